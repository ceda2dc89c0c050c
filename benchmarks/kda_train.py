"""Trains `tiny` and `mini` with the kernels and with plain torch, from the same seeds, and compares the loss curves.

    python benchmarks/kda_train.py [--presets tiny,mini] [--steps 100] [--out kda_train.json]

Three runs a preset, --jobs of them side by side: "kernels" (everything as on a GPU), "torch" (no Triton kernel at all), and "nudged"
(torch, learning rates times 1 + 2^-9, the step of bfloat16). Runs that round differently part ways like runs that start a hair apart,
so what the nudge does is the noise. Equal within noise: the mean distance of the loss curves over the second half is at most three
times that of the nudged run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIANTS = ("kernels", "torch", "nudged")
FACTOR = 3.0


def train(preset: str, variant: str, steps: int, device: str, folder: str) -> dict[str, Any]:
    """One run; its losses, tokens a second (median of the second half) and the paths its ops took."""
    from atoll.config import load_config
    from atoll.ops import dispatch, kernel_report
    from atoll.train import run

    if variant != "kernels":
        dispatch.HAS_TRITON = False
        importlib.import_module("atoll.ops.kda").HAS_TRITON = False  # type: ignore[attr-defined]
    quiet: dict[str, Any] = {"evaluate": False, "report": False, "export": False, "validate_every": 10**9, "sample_every": 10**9}
    overrides: dict[str, Any] = {f"train.{key}": value for key, value in quiet.items()}
    overrides |= {"train.steps": steps, "train.minutes": None, "train.device": device, "train.save_every": 10**9}
    if variant == "nudged":
        optim = load_config(preset).optim
        overrides |= {f"optim.{name}": getattr(optim, name) * (1 + 2**-9) for name in ("lr", "adam_lr")}
    out = run(load_config(preset, overrides), folder)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line and "kind" not in line]
    rates = sorted(line["tokens_per_second"] for line in lines[len(lines) // 2 :])
    return {"loss": [line["loss"] for line in lines], "tokens_per_second": rates[len(rates) // 2], "paths": kernel_report()}


def compare(runs: dict[str, dict[str, Any]], card: bool) -> dict[str, Any]:
    """Distances of the curves, and whether the kernels' is noise."""
    curves = {name: run["loss"] for name, run in runs.items()}
    half = len(curves["torch"]) // 2

    def distance(name: str) -> float:
        return sum(abs(a - b) for a, b in zip(curves[name][half:], curves["torch"][half:], strict=True)) / (len(curves["torch"]) - half)

    kernels, noise = distance("kernels"), distance("nudged")
    used = runs["kernels"]["paths"].get("triton", 0) > 0
    clean = not any("triton" in path for name in ("torch", "nudged") for path in runs[name]["paths"])
    learned = curves["kernels"][-1] < curves["kernels"][0]
    ok = kernels <= FACTOR * noise and learned and clean and (used or not card)
    return {"kernels_against_torch": kernels, "noise": noise, "kernels_used": used, "torch_used_none": clean, "learned": learned, "ok": ok}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", default="tiny,mini")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--jobs", type=int, default=3, help="runs at once; losses do not depend on it, speed does")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("PRESET", "VARIANT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        preset, variant, folder = options.one
        print("\n" + json.dumps(train(preset, variant, options.steps, options.device, folder)))
        return
    import torch

    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "steps": options.steps, "jobs": options.jobs}
    with tempfile.TemporaryDirectory() as folder:
        for preset in options.presets.split(","):
            runs = run_variants(preset, options, Path(folder))
            report[preset] = {**compare(runs, options.device == "cuda"), "runs": runs}
            shown = {key: value for key, value in report[preset].items() if key != "runs"}
            rates = {variant: round(run["tokens_per_second"]) for variant, run in runs.items()}
            print(preset, shown, "last loss", {v: round(r["loss"][-1], 4) for v, r in runs.items()}, "tokens/s", rates, flush=True)
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if all(report[preset]["ok"] for preset in options.presets.split(",")) else 1)


def run_variants(preset: str, options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Each variant in a process of its own: what one has switched off stays off."""
    waiting, running, results = list(VARIANTS), {}, {}
    common = [sys.executable, __file__, "--steps", str(options.steps), "--device", options.device]
    while waiting or running:
        while waiting and len(running) < options.jobs:
            variant = waiting.pop(0)
            command = [*common, "--one", preset, variant, str(folder / f"{preset}-{variant}")]
            running[variant] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        variant = next(iter(running))
        out, _ = running[variant].communicate()
        if running.pop(variant).returncode:
            raise SystemExit(f"{preset} {variant} failed:\n{out[-2000:]}")
        results[variant] = json.loads(out.splitlines()[-1])
    return results


if __name__ == "__main__":
    main()
