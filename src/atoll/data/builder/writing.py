"""Shards and manifest of a build: written in a folder aside, which takes the result's place when all is there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from atoll.config import UserError
from atoll.data.cache import sync, writing

MANIFEST, KIND, VERSION = "manifest.json", "atoll data build", 1


class Shards:
    """JSON lines, one record a document, in files of at most about `most` bytes."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self.done: list[dict[str, Any]] = []
        self._file: IO[bytes] | None = None
        self._digest, self._bytes, self._records = hashlib.blake2b(digest_size=16), 0, 0

    def add(self, record: dict[str, Any]) -> None:
        """Write one record."""
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        if self._file is not None and self._bytes + len(line) > self.most:
            self.close()
        if self._file is None:
            self._file = (self.folder / f"shard-{len(self.done):05}.jsonl").open("xb")
            self._digest, self._bytes, self._records = hashlib.blake2b(digest_size=16), 0, 0
        self._file.write(line)
        self._digest.update(line)
        self._bytes, self._records = self._bytes + len(line), self._records + 1

    def close(self) -> None:
        """End the shard at hand."""
        if self._file is None:
            return
        name = Path(self._file.name).name
        self._file.close()
        sync(self.folder / name)
        self.done.append({"file": name, "records": self._records, "bytes": self._bytes, "blake2b": self._digest.hexdigest()})
        self._file = None


@contextlib.contextmanager
def building(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its place when the block ends well and vanishes when it does not.

    `out` may be new, empty, or an earlier build, which is replaced. What a killed build left beside it is removed.
    """
    with writing(out.parent, "--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear(out)
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or is_build(out))):
        raise UserError(f"--out {str(out)!r}: there, and no earlier build; give a new folder")
    with writing(out.parent, "--out"):
        aside = out.parent / f".{out.name}.{os.getpid()}.building"
        aside.mkdir()
    old = aside.with_suffix(".old")
    try:
        yield aside
        with writing(out.parent, "--out"):
            if out.exists():
                out.rename(old)
            aside.rename(out)
            sync(out.parent)
    finally:
        if old.exists() and not out.exists():
            old.rename(out)
        for left in (aside, old):
            shutil.rmtree(left, ignore_errors=True)


def _clear(out: Path) -> None:
    """Remove what killed builds of `out` left beside it; what stood there before comes back if one died while it took the place."""
    for left in [*out.parent.glob(f".{out.name}.*.old"), *out.parent.glob(f".{out.name}.*.building")]:
        if _lives(left.name.split(".")[-2]):
            continue
        if left.suffix == ".old" and not out.exists():
            left.rename(out)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _lives(number: str) -> bool:
    try:
        os.kill(int(number), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return int(number) != os.getpid()


def is_build(folder: Path) -> bool:
    """Whether `folder` is what a build wrote."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["kind"] == KIND
    except (OSError, ValueError, KeyError, TypeError):
        return False


def shards_of(folder: Path) -> list[str]:
    """The shard files of a build, in order. Raises `UserError` where one is missing or of another size than its manifest says."""
    listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["shards"]
    for shard in listed:
        path = folder / Path(shard["file"]).name
        if not path.is_file() or path.stat().st_size != shard["bytes"]:
            raise UserError(f"data.source = {str(folder)!r}: {path.name} is not what its {MANIFEST} says; build it again")
    return [Path(shard["file"]).name for shard in listed]
