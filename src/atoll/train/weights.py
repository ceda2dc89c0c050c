"""The model of a run as it stood at a checkpoint, without optimizer or data: what is exported before a run has ended."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from atoll.config import UserError, load_config
from atoll.model import Model
from atoll.train import checkpoint

PREFIX = "model."  # of the model's tensors in a checkpoint
EMBEDDING = "model.language_model.model.embed_tokens.weight"


def newest_step(run: Path) -> Path | None:
    """The newest whole checkpoint of `run`; None when there is none. Nothing in the folder is touched: the run may be going on."""
    folder = run / "checkpoints"
    for step in reversed(checkpoint.steps(folder)):
        try:
            checkpoint.check(folder / f"step-{step}")
        except checkpoint.Damaged:
            continue
        return folder / f"step-{step}"
    return None


def model_at(step: Path) -> Model:
    """The model at the checkpoint `step` (RUN/checkpoints/step-N), on the CPU in its stored type.

    Raises `UserError` when the checkpoint is damaged or is not that of the run's config.toml.
    """
    try:
        checkpoint.check(step)
    except checkpoint.Damaged as reason:
        raise UserError(f"{step}: damaged, {reason}; take another step") from None
    config = load_config((step.parents[1] / "config.toml").resolve())
    model = Model(config.model, config.balance, dtype=_dtype(step))
    checkpoint.load(step, {PREFIX + n: t.detach() for n, t in model.state_dict().items()}, PREFIX)
    return model.eval()


def _dtype(step: Path) -> torch.dtype:
    for file in sorted(step.glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            if EMBEDDING in f.keys():  # noqa: SIM118 (not a dict)
                return f.get_slice(EMBEDDING)[:1].dtype
    raise UserError(f"{step}: {EMBEDDING} is missing; take another step")
