"""Long documents: files of one repository or folder end to end, and how often each is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from atoll.data.builder.recipes import Origin
from atoll.data.split import unit_hash

ROOTS = (".git", "pyproject.toml", "setup.py", "package.json", "Cargo.toml", "go.mod", "pom.xml")  # what a repository's top holds


def groups(origin: Origin, names: Iterable[str], how: str) -> Iterator[tuple[str, list[str]]]:
    """(name, files) of every document to be, in order. `how`: "repository", "folder", or "none" for a file each.

    A file's repository is the nearest folder above it with one of `ROOTS` in it; without one the first folder below the source.
    """
    found: dict[str, list[str]] = {}
    tops: dict[str, bool] = {}
    for name in names:
        key = name if how == "none" else str(PurePosixPath(name).parent) if how == "folder" else _repository(origin.root, name, tops)
        found.setdefault(key, []).append(name)
    for key, files in found.items():
        yield ("" if key == "." else key), sorted(files, key=lambda f: (not PurePosixPath(f).name.lower().startswith("readme"), f))


def _repository(root: Path, name: str, tops: dict[str, bool]) -> str:
    for parent in PurePosixPath(name).parents:
        key = str(parent)
        if key not in tops:
            tops[key] = any((root / key / mark).exists() for mark in ROOTS)
        if tops[key]:
            return key
    return PurePosixPath(name).parts[0] if len(PurePosixPath(name).parts) > 1 else "."


def joined(texts: Iterable[tuple[str, str]], most: int) -> Iterator[tuple[list[str], str]]:
    """(files, text) of documents of at most `most` characters, cut between files, or at line ends in a longer one.

    Where a document has several files, each stands under a line with its path.
    """
    held: list[tuple[str, str]] = []
    size = 0
    for name, text in texts:
        for piece in _pieces(text, most):
            if held and size + len(piece) + len(name) + 16 > most:
                yield _laid(held)
                held, size = [], 0
            held.append((name, piece))
            size += len(piece) + len(name) + 16
    if held:
        yield _laid(held)


def _pieces(text: str, most: int) -> Iterator[str]:
    start = 0
    while len(text) - start > most:
        cut = text.rfind("\n", start, start + most) + 1
        cut = cut if cut > start else start + most
        yield text[start:cut]
        start = cut
    yield text[start:]


def _laid(held: list[tuple[str, str]]) -> tuple[list[str], str]:
    if len(held) == 1:
        return [held[0][0]], held[0][1]
    return [name for name, _ in held], "\n".join(f"===== {name} =====\n{text.rstrip()}\n" for name, text in held)


def copies(name: str, chars: int, long: int, most: float) -> int:
    """How often a document is written: once, or from `long` characters on its length over `long` times, at most `most`.

    What is over a whole number is a chance, taken by a hash of the name.
    """
    wish = min(most, chars / long) if chars >= long else 1.0
    whole = max(1, int(wish))
    return whole + (unit_hash(name, "copies:") < wish - whole)
