"""Files kept between runs: written aside and renamed, checked when read, built again when damaged."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from atoll.config import UserError

EDGE = 1 << 20  # bytes at each end of a file that `seal` looks at


def cache_folder(cache: str, kind: str) -> Path:
    """`cache/kind`, made if need be. Raises `UserError` when it cannot be."""
    folder = Path(cache).expanduser() / kind
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def sync(path: Path) -> None:
    """Wait until the disk has a file's contents, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(path: Path, setting: str = "data.cache") -> Iterator[None]:
    """Turn a full disk or a forbidden folder into one line that names the setting."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{setting}: {str(path)!r} cannot be written ({reason}); make room, or take another folder") from error


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well and vanishes when it does not."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, setting: str = "data.cache") -> None:
    """Write `text` whole or not at all. Raises `UserError` that names `setting`."""
    with writing(path.parent, setting), aside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def seal(path: Path) -> str:
    """A checksum of a file's length and of its first and last MiB: finds a cut or overwritten file without reading all of it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(EDGE))
        if size > EDGE:
            file.seek(max(EDGE, size - EDGE))
            digest.update(file.read())
    return digest.hexdigest()
