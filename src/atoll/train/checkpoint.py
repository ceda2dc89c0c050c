"""Crash-safe checkpoints: a folder is whole and checked, or it is not there.

Tensors go through torch.distributed.checkpoint's safetensors storage (its default storage keeps a pickle), flat under dotted
names; scalars and a checksum of every file into `checkpoint.json`. Everything is written to a folder aside, synced, and renamed
to `step-N`; the sync of the parent makes the rename last. A damaged folder is found by its checksums, named in one line, and the
one before it is taken. Of several processes each writes what it holds, into the same folder (a file system that all of them see); any
other number of them reads it back, each what it is to hold.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.config import UserError
from atoll.data.cache import sync
from atoll.parallel.ranks import ALONE, Ranks

FORMAT = 1
META = "checkpoint.json"
ASIDE = ".writing-"
SHARD_BYTES = 1 << 30  # bytes in one safetensors file: it is built in memory before it is written


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the message says why."""


# ---------------------------------------------------------------- writing


def save(folder: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any], keep: int, ranks: Ranks = ALONE) -> Path:
    """Write `folder`/step-N and drop all but the newest `keep`. Raises `UserError` on a full disk; older checkpoints stay whole.

    Of several `ranks` all call it; cut tensors are DTensors.
    """
    final, aside = folder / f"step-{step}", folder / f"{ASIDE}{step}"
    # Of all processes: DTensors count as a whole, and the stages of a pipeline have tensors of their own.
    sizes = _joined(ranks, {name: t.numel() * t.element_size() for name, t in tensors.items()})
    try:
        ranks.on_main(lambda: _begin(folder, aside, sum(sizes.values())))
        _write_tensors(aside, tensors, sizes, ranks)
        files = _describe_all(aside, ranks)
        ranks.on_main(lambda: _end(aside, final, {"format": FORMAT, "step": step, **meta, "files": files}))
    except BaseException as error:  # DCP's CheckpointException is no Exception
        shutil.rmtree(aside, ignore_errors=True)
        if is_disk_full(error):
            remedy = f"free space, then: atoll train --resume {folder.parent}"
            raise UserError(f"{final}: the disk is full, nothing of it was kept; {remedy}") from None
        raise
    if ranks.main:
        for old in steps(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old}", ignore_errors=True)
    return final


def _begin(folder: Path, aside: Path, num_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    _require_space(folder, num_bytes)


def _end(aside: Path, final: Path, meta: dict[str, Any]) -> None:
    _write_text(aside / META, json.dumps(meta, indent=1))
    for path in (aside / META, aside):
        sync(path)
    _swap(aside, final)


def _describe_all(aside: Path, ranks: Ranks) -> dict[str, Any]:
    """Name → size and checksum of every file, once the disk has it; each process sees to those it wrote."""
    mine = sorted(p for p in aside.iterdir() if ranks.size == 1 or p.name.startswith(f"shard-{ranks.rank + 1:05d}-"))
    for path in mine:
        sync(path)
    return _joined(ranks, {p.name: _describe(p) for p in mine})


def _joined(ranks: Ranks, found: dict[str, Any]) -> dict[str, Any]:
    """What the processes have found, by name; the same on all of them."""
    return {name: about for part in ranks.gather(found) for name, about in part.items()}


def _write_tensors(folder: Path, tensors: dict[str, Tensor], sizes: dict[str, int], ranks: Ranks) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    shard, size, where = 1, 0, {}
    for name, num_bytes in sizes.items():
        if size and size + num_bytes > SHARD_BYTES * ranks.size:
            shard, size = shard + 1, 0
        where[name], size = shard, size + num_bytes
    alone = ranks.size == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that this is one process, which is meant
        writer = HuggingFaceStorageWriter(str(folder), where, save_distributed=not alone)
        dcp_save(tensors, storage_writer=writer, process_group=ranks.own, no_dist=alone)


def _require_space(folder: Path, num_bytes: int) -> None:
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or one that it wraps, says that no space is left."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    wrapped = [error, error.__cause__, error.__context__]
    failures = getattr(error, "failures", {})  # CheckpointException: rank → (error, traceback)
    wrapped += [f[0] for f in failures.values()]
    return any(isinstance(e, OSError) and e.errno in codes for e in wrapped) or any(
        os.strerror(code).lower() in str(e).lower() for e in wrapped if e is not None for code in codes
    )


def _swap(aside: Path, final: Path) -> None:
    """Put `aside` in place of `final`; an older folder of that name gives way in one rename."""
    old = final.with_name(f"{ASIDE}old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(aside, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def write_whole(path: Path, text: str) -> None:
    """Write a text file aside, sync it, and rename it into place."""
    aside = path.with_name(f".{path.name}.writing")
    _write_text(aside, text)
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "blake2b": _digest(path)}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# ---------------------------------------------------------------- reading


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, ascending, whole or not."""
    found = [p.name.removeprefix("step-") for p in folder.glob("step-*") if p.is_dir()] if folder.is_dir() else []
    return sorted(int(s) for s in found if s.isdigit())


def check(path: Path) -> dict[str, Any]:
    """The checkpoint's JSON, once every file in it has its checksum. Raises `Damaged`."""
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        files = meta["files"]
        if meta["format"] != FORMAT:
            raise Damaged(f"it has format {meta['format']}, this version reads {FORMAT}")
        for name, expected in files.items():
            if Path(name).name != name:
                raise Damaged(f"{META} names a file outside it")
            if not (path / name).is_file():
                raise Damaged(f"{name} is missing")
            if _describe(path / name) != expected:
                raise Damaged(f"{name} does not have its checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{META} cannot be read ({type(error).__name__})") from None
    return meta


def newest(folder: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its JSON; None when there is none at all. Each damaged one is named through `say`.

    Raises `UserError` when there are checkpoints and every one is damaged.
    """
    clean(folder)
    found = steps(folder)
    for step in reversed(found):
        path = folder / f"step-{step}"
        try:
            return path, check(path)
        except Damaged as reason:
            say(f"{path}: damaged, {reason}; falling back to the checkpoint before it")
    if found:
        raise UserError(f"{folder}: every checkpoint is damaged; start a new run, or delete {folder} to begin this one again")
    return None


def clean(folder: Path) -> None:
    """Remove what a crash left half-written."""
    for leftover in folder.glob(f"{ASIDE}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def load(path: Path, tensors: dict[str, Tensor], prefix: str = "", ranks: Ranks = ALONE) -> None:
    """Read the checkpoint at `path` (already checked) into `tensors`, in place: all of it, or all whose names start with `prefix`.

    Of several `ranks` all call it, and together they ask for all of it. Raises `UserError` if it is another model's.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    stored = {name: shape for name, shape in Contents(path).shapes.items() if name.startswith(prefix)}
    here = _joined(ranks, {name: tuple(t.shape) for name, t in tensors.items()})
    for name in sorted(stored.keys() ^ here.keys()):
        where = "in the checkpoint but not" if name in stored else "not in the checkpoint but"
        raise UserError(f"{path}: {name} is {where} in this model; resume with the run's own config.toml")
    for name in here:
        if stored[name] != here[name]:
            raise UserError(f"{path}: {name} has shape {stored[name]} there and {here[name]} here; resume with the run's own config.toml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp_load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


class Contents:
    """The tensors of a checkpoint, by however many processes it was written."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        found = HuggingFaceStorageReader(str(path)).read_metadata()
        self._tensors: dict[str, Any] = dict(found.state_dict_metadata)
        self._files: Any = found.storage_data

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of the whole tensor."""
        return {name: tuple(about.size) for name, about in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        return self._tensors[name].properties.dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        from safetensors import safe_open
        from torch.distributed.checkpoint.metadata import MetadataIndex

        about = self._tensors[name]
        whole = torch.empty(about.size, dtype=about.properties.dtype)
        for chunk in about.chunks:
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            with safe_open(self._files[MetadataIndex(name, chunk.offsets)].relative_path, framework="pt") as file:
                whole[place] = file.get_tensor(name)
        return whole


# ---------------------------------------------------------------- random numbers


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators, by name (bytes)."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Put back what `rng_state` gave."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def fingerprint(parts: Iterable[str]) -> str:
    """A short digest of texts, for telling whether settings are the same."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()
