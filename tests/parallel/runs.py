"""Whole runs on several processes, started from a test: what they need and what they must have in common."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from atoll.config import Config, load_config

WORDS = ("def", "class", "return", "import", "self", "for", "in", "if", "else", "value", "index", "token", "state", "gate", "expert")

RUN: dict[str, Any] = {
    "data.heldout": 0.1,
    "model.vocab_size": 300,
    "stages.1.length": 32,
    "stages.1.batch": 4,
    "train.steps": 6,
    "train.threads": 1,
    "train.save_every": 2,
    "train.validate_every": 3,
    "train.sample_every": 3,
    "train.validate_tokens": 200,
    "train.evaluate": False,
    "train.report": False,
    "train.export": False,
}


def write_text(folder: Path) -> Path:
    """Thirty small files of pseudo-random words."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 12345
    for i in range(30):
        words = []
        for _ in range(200):
            number = (number * 1103515245 + 12345) % (1 << 31)
            words.append(WORDS[(number >> 16) % len(WORDS)])
        (folder / f"file{i:02}.txt").write_text(" ".join(words) + "\n")
    return folder


def config_in(tmp: Path, **changes: Any) -> Config:
    from training import MICRO

    settings = {**MICRO, **RUN, "data.source": str(write_text(tmp / "text")), "data.cache": str(tmp / "cache")}
    return load_config("tiny", {**settings, **{k.replace("__", "."): v for k, v in changes.items()}})


def run_on(config: Config | None, out: str, resume: bool = False) -> str:
    """A whole run on the processes running now; the line of a user's mistake, or how it left."""
    from atoll import train
    from atoll.config import UserError
    from atoll.train.callbacks import samples

    torch.set_num_threads(1)
    samples.TOKENS = 3
    with open(os.devnull, "w") as nowhere:
        import contextlib

        with contextlib.redirect_stdout(nowhere):
            try:
                train.run(config, out, resume=resume)
            except UserError as error:
                return str(error)
            except SystemExit as left:
                return f"exit {left.code}"
    return ""


def restored_on(config: Config, out: str, every: bool = False) -> dict[str, torch.Tensor] | None:
    """What the processes running now have in memory once they have gone back to the newest checkpoint of a run, whole; from rank 0, or
    from `every` one what it has a part of."""
    import torch.distributed as dist
    from training import whole

    from atoll.data import open_corpus
    from atoll.parallel import Ranks
    from atoll.train.screen import Screen
    from atoll.train.trainer import Trainer

    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    trainer = Trainer(config, open_corpus(config.data, config.model), Path(out), Screen(silent=True), ranks)
    trainer.restore()
    found = {name: whole(t) for name, t in trainer.tensors().items()}
    return found if every or ranks.main else None


def stopped_on(config: Config, out: str, rank: int, step: int) -> str:
    """`run_on` in which one process is asked to stop, by SIGTERM, in a step."""
    import torch.distributed as dist

    from atoll.train import trainer

    original, calls = trainer.train_step, 0

    def watched(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    trainer.train_step = watched
    return run_on(config, out)


def lines(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl with a step, without what the clock decides."""
    every = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    clocked = ("tokens_per_second", "peak_memory", "save_stall", "save_seconds")
    return [{k: v for k, v in line.items() if k not in clocked} for line in every if "step" in line]


def contents(out: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, put together here from the files' own offsets."""
    from safetensors import safe_open

    parts: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for file in sorted((out / "checkpoints" / f"step-{step}").glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            about = json.loads((f.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
        for name, part in load_file(file).items():
            parts.setdefault(name, []).append((about.get(name, {}).get("saved_offsets", [0] * part.dim()), part))
    whole = {}
    for name, found in parts.items():
        shape = [max(at[d] + part.shape[d] for at, part in found) for d in range(found[0][1].dim())]
        whole[name] = torch.empty(shape, dtype=found[0][1].dtype)
        for at, part in found:
            whole[name][tuple(slice(a, a + n) for a, n in zip(at, part.shape, strict=True))] = part
    return whole
