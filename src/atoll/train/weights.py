"""The model of a run as it stood at a checkpoint, without optimizer or data: what is exported before a run has ended."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from atoll.config import Config, UserError, load_config
from atoll.hub.export import write_folder
from atoll.hub.layout import Slot, pack, slots
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


def export_step(step: Path, config: Config, folder: Path, tokenizer: Any) -> None:
    """Write the model at the checkpoint `step` as a folder in the hub's layout, one tensor at a time: the model is never whole in memory.

    Not for quantised experts. Raises `UserError` as `hub.export.save` does.
    """
    model, contents = Model(config.model, config.balance, dtype=_dtype(step), device="meta"), checkpoint.Contents(step)
    read = functools.lru_cache(1)(contents.read)  # the experts of a stack come one after another

    def fetch(slot: Slot) -> torch.Tensor:
        at = slot.tensor  # on the meta device: says which part of the stored tensor is meant
        part = torch.as_strided(read(PREFIX + slot.inner), at.shape, at.stride(), at.storage_offset())
        return pack(dataclasses.replace(slot, tensor=part))

    write_folder(config.model, slots(model), folder, tokenizer, fetch=fetch)


def _dtype(step: Path) -> torch.dtype:
    contents = checkpoint.Contents(step)
    if EMBEDDING not in contents.shapes:
        raise UserError(f"{step}: {EMBEDDING} is missing; take another step")
    return contents.dtype(EMBEDDING)
