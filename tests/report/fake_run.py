"""A run folder with numbers like a real run's, so that the report can be tested and looked at without training."""

import json
from pathlib import Path

import numpy as np

from atoll.config import load_config, to_toml

SAMPLES = (
    "def parse the the self self, , (((: return",
    "def parse(self, name):\n        return self.name[0]\n\n    def __init__(self):\n        self.self = None",
    'def parse_args(self, args=None):\n        """Return the parsed arguments."""\n        if args is None:\n            args = []\n'
    "        for name, value in self._options.items():\n            if value < 3 and name:\n                raise ValueError(name)\n        return args",
    "def parse_header(line: bytes) -> tuple[str, dict]:\n    \"\"\"Parse a Content-type like header.\n\n    Return the main content-type and a dictionary of options.\n"
    '    """\n    parts = _parseparam(b";" + line)\n    key = next(parts)\n    pdict = {}\n    for p in parts:\n        i = p.find(b"=")\n        if i >= 0:\n'
    "            name = p[:i].strip().lower()\n            value = p[i + 1:].strip()\n            pdict[name] = value\n    return key, pdict",
)


def write_run(folder: Path, steps: int = 800, preset: str = "tiny", *, finished: bool = True, probes: int = 5, seed: int = 0, **overrides) -> Path:
    """Write a fake run of `steps` steps into `folder` and return it."""
    config = load_config(preset, {"train.steps": steps, **overrides})
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config))
    lines = [{"kind": "run", "parameters": 40_910_316, "device": "x86_64", "cpus": 2, "threads": 2, "torch": "2.13.0", "python": "3.11.9"}]
    lines += _step_lines(config, steps, rng, finished)
    if finished:
        lines.append({"kind": "final", "bits_per_byte": 1.713, "gzip": 1.668, "xz": 1.571, "files": 38, "bytes": 812_344,
                      "has_tests": True})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "probes").mkdir(exist_ok=True)
    for step in np.linspace(1, steps, probes).astype(int) if probes else []:
        (folder / "probes" / f"step-{step}.json").write_text(json.dumps(_probe(config.model, step / steps, rng)))
    return folder


def _step_lines(config, steps, rng, finished):
    lines, drift = [], np.cumsum(rng.normal(0, 0.006, steps))
    starts = np.cumsum([0, *(round(steps * s.share) for s in config.stages)])
    for i in range(steps if finished else max(1, int(steps * 0.6))):
        stage = config.stages[min(int(np.searchsorted(starts, i, side="right")) - 1, len(config.stages) - 1)]
        t = (i + 1) / steps
        loss = 3.1 + 5.2 * np.exp(-(t**0.5) * 6.5) + 0.05 * drift[i] + rng.normal(0, 0.09) - 0.12 * max(0, t - 0.75)
        level = 0.31 if i > 4 else 11 * 0.25**i + 0.31
        skipped = steps > 100 and i in (211, 388)
        lines.append({
            "step": i + 1, "stage": stage.name, "loss": loss, "bits_per_byte": loss / 1.92, "lr": 4e-3 * min(1, (i + 1) / max(1, steps * 0.01))
            * 0.5 * (1 + np.cos(np.pi * t)), "grad_norm": float(np.exp(rng.normal(-0.7, 0.2)) + 6 * np.exp(-i / 12)) * (14 if skipped else 1),
            "max_vio": level * float(np.exp(rng.normal(0, 0.12))), "dead_experts": int(rng.poisson(400 * 0.3**i)), "skipped": skipped,
            "tokens_per_second": 24_000 * (0.82 if stage is not config.stages[0] else 1) * float(1 - abs(rng.normal(0, 0.03)) - (0.4 if i % 100 == 99 else 0)),
            "tokens": stage.length * stage.batch,
        })  # fmt: skip
        if (i + 1) % max(1, steps // 16) == 0:
            lines.append({"kind": "validation", "step": i + 1, "bits_per_byte": (loss + 0.1) / 1.92})
            lines.append({"kind": "sample", "step": i + 1, "text": SAMPLES[min(3, int(t * 4))]})
    return lines


def _probe(model, t, rng):
    experts, layers = model.num_experts, model.num_hidden_layers
    mean = 8192 * model.num_experts_per_token / experts
    skew = np.exp(rng.normal(0, 1.1 if t < 0.01 else 0.05, (layers, experts)))
    load = [rng.poisson(mean * skew[i] / skew[i].mean()).tolist() for i in range(layers) if not model.is_dense(i)]
    decay = []
    for i in [i for i in range(layers) if model.is_kda(i)]:
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), 512))
        z = dt + np.log(-np.expm1(-dt)) + rng.normal(-2 * t * i / layers, 0.2 + 1.3 * t, 512)
        decay.append([i, (-5 / (1 + np.exp(-z))).tolist()])
    names = [f"{i}.{part}" for i in range(layers) for part in ("attention", "mlp")][1:] + ["output"]
    weights = []
    for j, name in enumerate(names):
        rows = min((j + 1) // 2, layers - 1) // model.attn_res_block_size + 2 if name != "output" else -(-layers // model.attn_res_block_size) + 1
        score = t * (rng.normal(0, 0.8, rows) + np.linspace(0, 1.5, rows))
        weights.append([name, (np.exp(score) / np.exp(score).sum()).tolist()])
    return {"load": load, "decay": decay, "depth_weights": weights}
