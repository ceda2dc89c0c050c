"""From one folder in the hub's layout to another, or only through it: every tensor read and checked, one in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.config import UserError
from atoll.data.tokenizer import Tokenizer, check_fits
from atoll.hub.export import COMPANIONS, Progress, write_folder
from atoll.hub.layout import Slot, config_of, pack, slots
from atoll.hub.load import load_tokenizer, opened, stays_inside, stored_dtype, tensor_files


def convert(
    skeleton: nn.Module,
    folder: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: float = 5e9,
    progress: Progress | None = None,
) -> None:
    """Write the model in `folder` to `out` as `hub.export.save` would, with its tokenizer's files, without ever holding all of it.

    `skeleton` is the model on the meta device, built from the folder's config. `dtype` is the type of most tensors (default: as they
    are stored). Raises `UserError` as loading and saving do, and leaves `out` as it was.
    """
    folder, out = Path(folder).expanduser(), Path(out).expanduser()
    if out.resolve() == folder.resolve():
        raise UserError(f"{out}: is the folder that is read; give a new one")
    tokenizer = fitting_tokenizer(skeleton, folder)
    where = tensor_files(folder)
    parts = slots(skeleton, dtype or stored_dtype(folder, where))
    beside = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    for path in beside:
        stays_inside(path)
    with opened(parts, folder, where) as fill:
        write_folder(
            config_of(skeleton),
            parts,
            out,
            tokenizer,
            shard_bytes=shard_bytes,
            fetch=lambda slot: pack(_filled(slot, fill)),
            companions=beside,
            progress=progress,
        )


def verify(skeleton: nn.Module, folder: str | Path, progress: Progress | None = None) -> None:
    """Read and check every tensor of `folder` (and its tokenizer) and keep none. Raises `UserError` naming the first that is wrong."""
    folder = Path(folder).expanduser()
    fitting_tokenizer(skeleton, folder)
    parts = slots(skeleton)
    total, done = sum(slot.num_bytes for slot in parts), 0
    with opened(parts, folder, tensor_files(folder)) as fill:
        for slot in parts:
            _filled(slot, fill)
            done += slot.num_bytes
            if progress is not None:
                progress(done, total)


def fitting_tokenizer(skeleton: nn.Module, folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, None when it has none. Raises `UserError` when it cannot be read or does not fit the model."""
    if not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = load_tokenizer(folder)
    check_fits(tokenizer, config_of(skeleton), str(folder / "tokenizer.json"))
    return tokenizer


def _filled(slot: Slot, fill: Callable[[Slot], None]) -> Slot:
    """`slot` with the folder's tensor in memory in place of the skeleton's."""
    tensor: Tensor = torch.empty(slot.tensor.shape, dtype=slot.dtype)
    filled = replace(slot, tensor=tensor)
    fill(filled)
    return filled
