"""A run folder with numbers like a real run's, so that the report can be tested and looked at without training.

`python tests/report/fake_run.py FOLDER [STEPS [PRESET]]` writes one to look at.
"""

import json
import sys
from pathlib import Path

import numpy as np

from atoll.config import load_config, to_toml

SAMPLES = (
    "def parse the the self self, , (((: return",
    "def parse(self, name):\n        return self.name[0]\n\n    def __init__(self):\n        self.self = None",
    "def parse_args(self, args=None):\n        if args is None and len(self) < 3:\n            args = []\n        return args",
    'def parse_header(line):\n    """Parse a header & its options."""\n    key, *parts = line.split(b";")\n    return key, parts',
)
RUN = {"kind": "run", "parameters": 40_910_316, "device": "x86_64", "cpus": 2, "threads": 2, "torch": "2.13.0", "python": "3.11.9"}
FINAL = {"kind": "final", "bits_per_byte": 1.713, "gzip": 1.668, "xz": 1.571, "files": 38, "bytes": 812_344, "has_tests": True}


def write_run(folder: Path, steps: int = 800, preset: str = "tiny", *, finished: bool = True, probes: int = 5, **overrides) -> Path:
    """Write a fake run of `steps` steps into `folder` and return it. Unfinished, it stops at six tenths."""
    config = load_config(preset, {"train.steps": steps, **overrides})
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config))
    done = steps if finished else max(1, int(steps * 0.6))
    lines = [RUN, *step_lines(config, steps, done, rng), *([FINAL] if finished else [])]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "probes").mkdir(exist_ok=True)
    for step in np.linspace(1, steps, probes).astype(int) if probes else []:
        (folder / "probes" / f"step-{step}.json").write_text(json.dumps(probe(config.model, step / steps, rng)))
    return folder


def step_lines(config, steps, done, rng):
    """Lines of all steps, and validations and samples between them."""
    lines, drift = [], np.cumsum(rng.normal(0, 0.006, steps))
    starts = np.cumsum([0, *(round(steps * s.share) for s in config.stages)])
    for i in range(done):
        stage = config.stages[min(int(np.searchsorted(starts, i, side="right")) - 1, len(config.stages) - 1)]
        line = step_line(i, steps, stage, stage is config.stages[0], drift[i], rng)
        lines.append(line)
        if (i + 1) % max(1, steps // 16) == 0:
            lines.append({"kind": "validation", "step": i + 1, "bits_per_byte": line["bits_per_byte"] + 0.05})
            lines.append({"kind": "sample", "step": i + 1, "text": SAMPLES[min(3, 4 * (i + 1) // steps)]})
    return lines


def step_line(i, steps, stage, first_stage, drift, rng):
    """One step's numbers: a falling loss, a level router after a few steps, two skipped spikes."""
    t = (i + 1) / steps
    loss = 3.1 + 5.2 * np.exp(-6.5 * t**0.5) + 0.05 * drift + rng.normal(0, 0.09) - 0.12 * max(0, t - 0.75)
    skipped = steps > 100 and i in (211, 388)
    warm = min(1, (i + 1) / max(1, steps * 0.01))
    speed = (24_000 if first_stage else 19_500) * (1 - abs(rng.normal(0, 0.03)) - (0.4 if i % 100 == 99 else 0))
    return {
        "step": i + 1,
        "stage": stage.name,
        "loss": loss,
        "bits_per_byte": loss / 1.92,
        "tokens": stage.length * stage.batch,
        "tokens_per_second": speed,
        "peak_memory": (1.1 if first_stage else 1.6) * 2**30,
        "lr": 4e-3 * warm * 0.5 * (1 + np.cos(np.pi * t)),
        "grad_norm": (np.exp(rng.normal(-0.7, 0.2)) + 6 * np.exp(-i / 12)) * (14 if skipped else 1),
        "max_vio": (0.33 + 11 * 0.25**i) * np.exp(rng.normal(0, 0.12)),
        "dead_experts": int(rng.poisson(400 * 0.3**i)),
        "load_map": [[0.5 / (1 + 9 * 0.25**i), 0.8, 1.0, 1.2, 1.3 + 11 * 0.25**i] for _ in range(4)],
        "skipped": skipped,
    }


def probe(model, t, rng):
    """What a probe at the share `t` of the run might see."""
    experts, layers = model.num_experts, range(model.num_hidden_layers)
    mean = 8192 * model.num_experts_per_token / experts
    skew = np.exp(rng.normal(0, 1.1 if t < 0.01 else 0.05, (len(layers), experts)))
    return {
        "load": [rng.poisson(mean * skew[i] / skew[i].mean()).tolist() for i in layers if not model.is_dense(i)],
        "decay": [[i, log_decays(t, i / len(layers), rng)] for i in layers if model.is_kda(i)],
        "depth_weights": depth_weights(model, t, rng),
        "depth_rms": [[f"{i}.{part}", *rng.lognormal(0, 0.2, 2).tolist()] for i in layers for part in ("attention", "mlp")],
    }


def log_decays(t, depth, rng):
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), 512))
    z = dt + np.log(-np.expm1(-dt)) + rng.normal(-2 * t * depth, 0.2 + 1.3 * t, 512)
    return (-5 / (1 + np.exp(-z))).tolist()


def depth_weights(model, t, rng):
    layers, block = model.num_hidden_layers, model.attn_res_block_size
    places = [(f"{i}.{part}", i, part == "mlp") for i in range(layers) for part in ("attention", "mlp")]
    rows = {name: i // block + (2 if inside or i % block else 1) for name, i, inside in places[1:]}
    rows["output"] = -(-layers // block) + 1
    scores = {name: t * (rng.normal(0, 0.8, n) + np.linspace(0, 1.5, n)) for name, n in rows.items()}
    return [[name, (np.exp(s) / np.exp(s).sum()).tolist()] for name, s in scores.items()]


if __name__ == "__main__":
    write_run(Path(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:4])
