"""A look inside: load of the experts, weights over depth, decays, as small JSON files for the report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from atoll.data.loader import Sampler, make_batch
from atoll.data.packing import open_sampler
from atoll.evals.pictures import arguments
from atoll.train import checkpoint
from atoll.train.callbacks.base import Callback

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer

SAMPLE = 512  # decays kept of each layer
TOKENS = 8192  # held-out tokens looked at: enough for some hundred tokens an expert


class Probes(Callback):
    """Runs the model once on a fixed held-out batch, in evaluation mode, and writes what it recorded to probes/step-N.json."""

    def __init__(self, every: int) -> None:
        self.every = every

    def act(self, trainer: Trainer) -> None:
        seen = look(trainer)
        if trainer.ranks.main:
            path = trainer.out / "probes" / f"step-{trainer.step}.json"
            path.parent.mkdir(exist_ok=True)
            checkpoint.write_whole(path, json.dumps({"step": trainer.step, **seen}))


@torch.no_grad()
def look(trainer: Trainer) -> dict[str, Any]:
    """{"depth_weights": [[name, weights]], "depth_rms": [[sublayer, of its output, of the running sum]], "decay": [[layer, log decays]],
    "load": [[tokens an expert]]}, plain numbers."""
    length = trainer.stages[0].length
    token_set = trainer.corpus.heldout
    rows = Sampler(token_set, length, 0) if token_set.pictures is None else open_sampler(token_set, length, 0)
    batch = make_batch(rows, 0, max(1, TOKENS // length))
    seen: dict[str, Any] = {}
    trainer.model.eval()
    trainer.model(**{k: t.to(trainer.device) for k, t in arguments(batch).items()}, record=seen)
    trainer.model.train()
    return {
        "depth_weights": [[name, _numbers(weights)] for name, weights in seen.get("depth_weights", [])],
        "depth_rms": [[name, *_numbers(torch.stack(sizes))] for name, *sizes in seen.get("depth_rms", [])],
        "decay": [[layer, _numbers(_thinned(g))] for layer, g in seen.get("decay", [])],
        "load": [counts.tolist() for counts in seen.get("load", [])],
    }


def _thinned(values: torch.Tensor) -> torch.Tensor:
    """At most SAMPLE of the values, evenly spread over them (an odd stride, so that every channel is met)."""
    stride = max(1, values.numel() // SAMPLE) | 1
    return values[::stride][:SAMPLE]


def _numbers(values: torch.Tensor) -> list[float]:
    return [float(f"{v:.5g}") for v in values.tolist()]
