"""Packages fetched and unpacked without running anything in them: plain files that a recipe names, never out of the folder, no links."""

from __future__ import annotations

import fnmatch
import hashlib
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from atoll.config import UserError
from atoll.data.builder.recipes import Origin, Recipe, matching

MOST_BYTES, MOST_FILES = 1 << 33, 500_000  # of one package, unpacked
BLOCK = 1 << 20
# What readers of archives raise; the last two are zipfile's, for members that are encrypted or compressed in a way it does not know.
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError, NotImplementedError)


def fetched(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> Origin:
    """Fetch a recipe's package into `folder`, a new empty one, and unpack its files there. Raises `UserError`."""
    down, base = folder / "package", folder / "files"
    down.mkdir(parents=True)
    base.mkdir()
    if recipe.via == "debian":
        words, needed = ["apt-get", "download", recipe.package], "apt-get"
    else:  # a wheel is an archive; a source package would have to be run to be asked what it is
        words, needed = (
            [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "-d", ".", recipe.package],
            "",
        )
    if needed and shutil.which(needed) is None:
        raise UserError(f"--download: {recipe.name}: {needed} is not here; install it by: {recipe.install}")
    say(f"{recipe.name}: {needed or 'pip'} download {recipe.package}")
    done = subprocess.run(words, cwd=down, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    got = sorted(down.iterdir())
    if done.returncode or len(got) != 1:
        why = (done.stderr.strip().splitlines() or ["nothing came"])[-1][:200]
        raise UserError(f"--download: {recipe.name}: {recipe.package} could not be fetched ({why}); install it by: {recipe.install}")
    unpack(got[0], base, recipe.files)
    origin = matching(recipe, base, f"{got[0].name} sha256:{_digest(got[0])}")
    if origin is None:
        raise UserError(f"--download: {recipe.name}: none of its files are in {got[0].name}; another version lays them out otherwise")
    return origin


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, folder: Path, patterns: Iterable[str]) -> int:
    """Write the plain files of a .deb, .whl, .zip or .tar archive that match `patterns` below `folder`; returns how many.

    Links and devices are never made. Raises `UserError`, with nothing of the offending member written, for a path that leaves the
    folder, for more than `MOST_BYTES` or `MOST_FILES`, and for a damaged archive.
    """
    wanted = [re.compile(_regex(p)) for p in patterns]
    count, room = 0, MOST_BYTES
    try:
        for name, stream in _members(archive):
            path = inside(name, archive)
            if not any(w.fullmatch(path) for w in wanted):
                continue
            count += 1
            if count > MOST_FILES:
                raise UserError(f"{archive.name}: more than {MOST_FILES:,} files; that is no package of text")
            room -= _written(stream, folder / path, room, archive)
    except (*DAMAGED, EOFError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{archive.name}: damaged, or no archive ({said}); fetch it again") from error
    return count


def inside(name: str, archive: Path) -> str:
    """A member's path, relative and plain. Raises `UserError` when it would leave the folder it is unpacked to."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
        raise UserError(f"{archive.name}: refused, its member {name!r} would leave the folder it is unpacked to")
    return str(PurePosixPath(*parts))


def _regex(pattern: str) -> str:
    """A glob in which * stays within a folder and ** is any number of them."""
    parts = [
        r"(?:[^/]+/)*" if part == "**" else fnmatch.translate(part).removesuffix(r"\Z").removesuffix(r"\z") + "/"
        for part in pattern.split("/")
    ]
    return "".join(parts).replace("(?s:", "(?:").replace(".*", "[^/]*").removesuffix("/")


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, content) of each plain file; of other members the name is checked and no more."""
    if archive.suffix == ".deb":
        yield from _deb(archive)
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                inside(info.filename, archive)
                if not info.is_dir() and stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG):
                    with file.open(info) as stream:
                        yield info.filename, stream
    else:
        with tarfile.open(archive, "r:*") as file:
            yield from _tar(file, archive)


def _deb(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """A Debian package's files, as dpkg-deb writes them out as one tar stream: its scripts stay where they are."""
    if shutil.which("dpkg-deb") is None:
        raise UserError(f"{archive.name}: dpkg-deb is needed to read it; apt-get install dpkg")
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as file:
                yield from _tar(file, archive)
            process.stdout.read()
        finally:
            process.stdout.close()
            code = process.wait()
    if code:
        raise UserError(f"{archive.name}: damaged, or no Debian package; fetch it again")


def _tar(file: tarfile.TarFile, archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    for member in file:
        inside(member.name, archive)
        if member.isreg() and (stream := file.extractfile(member)) is not None:
            yield member.name, stream


def _written(stream: IO[bytes], path: Path, room: int, archive: Path) -> int:
    """Write a member, never over a file that is there and never through a link; returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644), "wb") as file:
        while block := stream.read(BLOCK):
            size += len(block)
            if size > room:
                raise UserError(f"{archive.name}: more than {MOST_BYTES / 1e9:.0f} GB unpacked; that is no package of text")
            file.write(block)
    return size
