"""Where text comes from: the Python standard library on this machine, a folder, or one file of text or records.

A `Source` yields the same `Document`s in the same order every time it is read, and reads lazily, so that a corpus need not fit
in memory. What it leaves out or repairs is counted in `Source.stats`, never hidden.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from atoll.config import DataConfig, UserError
from atoll.data.builder.writing import is_build, shards_of
from atoll.data.records import RECORDS, Repairs, decode, read_records

SNIFF = 8192  # bytes looked at to tell text from binary
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
BLOCK = 16384  # characters of one document when a single text file is the corpus


@dataclass(frozen=True)
class Document:
    """One text. `key` is what the split hashes: the relative path of a file, the text itself of a record or block."""

    name: str
    text: str
    key: str


@dataclass
class Stats(Repairs):
    """What one reading of a source met: `undecodable` bytes replaced, and things left out."""

    binary: int = 0  # files with a NUL byte near their start
    links: int = 0  # symbolic links, never followed
    empty: int = 0  # files or records without text


@dataclass
class Source:
    """Files below `root` (paths relative to it, sorted), read one document at a time."""

    root: Path
    files: list[str]
    text_field: str = "text"
    single: bool = False  # `root/files[0]` is the corpus, not a member of a folder
    has_tests: bool | None = None  # whether the standard library's own tests are there; None for other sources
    links: int = 0
    stats: Stats = field(default_factory=Stats)

    @property
    def splits_files(self) -> bool:
        """Whether documents are whole files, known by path before they are read."""
        return not self.single and not any(f.endswith(RECORDS) for f in self.files)

    def size(self, name: str) -> int:
        """Bytes of one file."""
        return (self.root / name).stat().st_size

    def read(self, keep: set[str] | None = None) -> Iterator[Document]:
        """Every document, in order, of all files or of those named in `keep`. Raises `UserError` where a file cannot be read."""
        self.stats = Stats(links=self.links)
        for name in self.files:
            if keep is not None and name not in keep:
                continue
            try:
                for document in self._read_file(name):
                    if document.text:
                        yield document
                    else:
                        self.stats.empty += 1
            except OSError as error:
                raise UserError(f"data.source = {str(self.root / name)!r}: cannot be read ({error.strerror or error})") from error

    def _read_file(self, name: str) -> Iterator[Document]:
        path = self.root / name
        if name.endswith(RECORDS):
            for index, text in read_records(path, self.text_field, self.stats):
                yield Document(f"{name}:{index}", text, text)
        elif self.single:
            yield from self._blocks(path)
        else:
            raw = path.read_bytes()
            if b"\0" in raw[:SNIFF]:
                self.stats.binary += 1
            else:
                yield Document(name, decode(raw, self.stats), name)

    def _blocks(self, path: Path) -> Iterator[Document]:
        """One text file as documents of about `BLOCK` characters, cut at line ends; smaller ones where the file is small."""
        size = min(BLOCK, max(512, path.stat().st_size // 64))
        index = 0
        with path.open("rb") as file:
            if b"\0" in file.read(SNIFF):
                raise UserError(f"data.source = {str(path)!r}: a binary file; text, source, .jsonl or .parquet is expected")
            file.seek(0)
            while raw := b"".join(file.readlines(size)):
                text = decode(raw, self.stats)
                for at in range(0, len(text), 2 * size):  # more than one turn only for very long lines
                    block = text[at : at + 2 * size]
                    yield Document(f"{path.name}:{index}", block, block)
                    index += 1


def open_source(config: DataConfig) -> Source:
    """The source that `config.source` names. Raises `UserError`: no such file, no file in the folder."""
    if config.source == "stdlib":
        return _stdlib()
    path = Path(config.source).expanduser()
    if not path.exists():
        raise UserError(f'data.source = {config.source!r}: no such file or folder; give an existing path, or "stdlib"')
    if path.is_dir():
        root = path.resolve()
        if is_build(root):
            return Source(root, shards_of(root))
        files, links = walk(root, config.suffixes)
        if not files:
            endings = f" ending in {', '.join(config.suffixes)}" if config.suffixes else ""
            raise UserError(f"data.source = {config.source!r}: empty corpus, no file{endings} in this folder; see data.suffixes")
        return Source(root, files, config.text_field, links=links)
    return Source(path.parent.resolve(), [path.name], config.text_field, single=True)


def _stdlib() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    files, links = walk(root, (".py",)) if root.is_dir() else ([], 0)
    if not files:
        raise UserError(f'data.source = "stdlib": this Python keeps no source files in {str(root)!r}; set data.source to a folder of text')
    tests = sum(f.startswith("test/test_") for f in files)
    return Source(root, files, links=links, has_tests=tests > 100)  # some systems ship test/support alone


def walk(root: Path, suffixes: tuple[str, ...]) -> tuple[list[str], int]:
    """Relative paths below `root`, sorted, and how many links were passed over.

    Links are not followed: what they name outside the folder is not ours to read, and inside it is met under its own name.
    Hidden files and folders are left out, and so are record files unless a suffix asks for them.
    """
    found, links = [], 0
    for folder, folders, names in os.walk(root):
        links += sum(os.path.islink(os.path.join(folder, d)) for d in folders)
        folders[:] = sorted(d for d in folders if not d.startswith(".") and d not in SKIPPED_FOLDERS)
        for name in names:
            if name.startswith(".") or not _wanted(name, suffixes):
                continue
            path = os.path.join(folder, name)
            if os.path.islink(path):
                links += 1
            elif os.path.isfile(path):
                found.append(Path(path).relative_to(root).as_posix())
    return sorted(found), links


def _wanted(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.endswith(suffixes) if suffixes else not name.endswith(RECORDS)
