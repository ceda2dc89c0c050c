"""Where documents come from: named recipes for packages one can install, and folders; the files themselves, decoded."""

from __future__ import annotations

import difflib
import gzip
import os
import re
import sysconfig
import tomllib
import zlib
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

from atoll.config import UserError
from atoll.data.records import Repairs, decode
from atoll.data.sources import SNIFF, walk

UNPACKED = 1 << 28  # most bytes of one file that was compressed
CODE = (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts", ".rb", ".sh", ".pl", ".cu", ".toml", ".json")
DPKG = Path("/var/lib/dpkg/info")  # where Debian notes what is installed
ZIPPED = (".gz", ".dz")


@dataclass(frozen=True)
class Recipe:
    """A package and what is read of it."""

    name: str
    via: str  # "debian", "pypi" or "python"
    package: str
    files: tuple[str, ...]  # patterns below / or site-packages
    kind: str
    licence: str
    about: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return {"debian": f"apt-get install {self.package}", "pypi": f"pip install {self.package}", "python": ""}[self.via]


@dataclass(frozen=True)
class Origin:
    """Files to read: paths below `root`, sorted. `kind` is "prose" or "code", or "" for what each file's ending says."""

    name: str
    root: Path
    files: list[str]
    kind: str
    licence: str
    package: str = ""
    archive: str = ""  # name and digest of the package that was fetched for it
    links: int = 0

    def kind_of(self, name: str) -> str:
        """ "prose" or "code"."""
        return self.kind or ("code" if name.removesuffix(".gz").endswith(CODE) else "prose")


def recipes() -> dict[str, Recipe]:
    """Every recipe, by name."""
    text = resources.files("atoll.data.builder").joinpath("recipes.toml").read_text(encoding="utf-8")
    return {
        n: Recipe(n, r["via"], r["package"], tuple(r["files"]), r["kind"], r["licence"], r["about"]) for n, r in tomllib.loads(text).items()
    }


def resolve(source: str) -> Recipe | Path:
    """The recipe or folder that `source` names; a path has a slash or is a folder. Raises `UserError`."""
    if not source:  # as a path it would be the folder one stands in
        raise UserError("source = '': empty; a folder or a recipe is expected")
    known, path = recipes(), Path(source).expanduser()
    if source in known and "/" not in source:
        return known[source]
    if path.is_dir():
        return path
    near = difflib.get_close_matches(source, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"recipes: {', '.join(known)}"
    raise UserError(f"source = {source!r}: no such recipe or folder; {hint}")


def folder_origin(path: Path, suffixes: tuple[str, ...], licence: str) -> Origin:
    """All text files of a folder, links and hidden files left out. Raises `UserError` for none."""
    files, links = walk(path.resolve(), suffixes)
    if not files:
        raise UserError(
            f"source = {str(path)!r}: no file to read in this folder" + (f" ending in {', '.join(suffixes)}" if suffixes else "")
        )
    return Origin(path.resolve().name or str(path), path.resolve(), files, "", licence, links=links)


def installed(recipe: Recipe) -> Origin | None:
    """What is there of a recipe's files on this machine, or None."""
    if recipe.via == "python":
        root = Path(sysconfig.get_paths()["stdlib"]).resolve()
        files, links = walk(root, (".py",)) if root.is_dir() else ([], 0)
        return Origin(recipe.name, root, files, recipe.kind, recipe.licence, recipe.package, links=links) if files else None
    if recipe.via == "debian":
        anyone = re.sub(r"\d+(\.\d+)*", "*", recipe.package)  # of whatever version
        listed = [*DPKG.glob(f"{anyone}.list"), *DPKG.glob(f"{anyone}:*.list")]
        return matching(recipe, Path("/")) if listed else None
    return matching(recipe, Path(sysconfig.get_paths()["purelib"]))


def matching(recipe: Recipe, base: Path, archive: str = "") -> Origin | None:
    """The files below `base` that match a recipe, those behind a symbolic link left out; None where there are none."""
    base = base.resolve()
    found = {path for pattern in recipe.files for path in base.glob(pattern) if path.is_file()}
    plain = sorted(str(p) for p in found if os.path.realpath(p) == str(p))
    if not plain:
        return None
    root = Path(os.path.commonpath([str(Path(p).parent) for p in plain]))
    files = [Path(p).relative_to(root).as_posix() for p in plain]
    return Origin(recipe.name, root, files, recipe.kind, recipe.licence, recipe.package, archive, len(found) - len(plain))


# ---------------------------------------------------------------- reading


class Unreadable(Exception):
    """A file that is no text; the message says why."""


def read_text(path: Path) -> str:
    """A file's text: unzipped, UTF-8, HTML without its marks. Raises `Unreadable`, or `UserError` where it cannot be opened."""
    try:
        raw = _unzipped(path) if path.suffix in ZIPPED else path.read_bytes()
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise Unreadable("damaged gzip") from error
    except OSError as error:
        raise UserError(f"source = {str(path)!r}: cannot be read ({error.strerror or error})") from error
    if b"\0" in raw[:SNIFF]:
        raise Unreadable("binary")
    repairs = Repairs()
    text = decode(raw, repairs)
    if repairs.undecodable > 0.01 * len(raw):
        raise Unreadable("not UTF-8")
    if not path.name.removesuffix(".gz").endswith((".html", ".htm")):
        return text
    try:
        return html_text(text)
    except AssertionError as error:  # how html.parser gives up on some marks
        raise Unreadable("damaged HTML") from error


def _unzipped(path: Path) -> bytes:
    with gzip.open(path, "rb") as file:
        raw = file.read(UNPACKED + 1)
    if len(raw) > UNPACKED:
        raise Unreadable("too large unzipped")
    return raw


class _Text(HTMLParser):
    HIDDEN = ("script", "style", "head", "nav", "template", "svg")
    BREAKS = ("p", "div", "li", "tr", "br", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "dt", "dd", "table", "section", "ul", "ol", "hr")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hidden: list[str] = []
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in self.HIDDEN:
            self.hidden.append(tag)
        self.verbatim += tag == "pre"
        if tag in self.BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.hidden:
            del self.hidden[self.hidden.index(tag) :]
        self.verbatim -= tag == "pre" and self.verbatim > 0
        if tag in self.BREAKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def html_text(text: str) -> str:
    """What a page says: its words, lines where blocks end, code as it stands; no scripts, styles or navigation."""
    parser = _Text()
    parser.feed(text)
    parser.close()
    lines = [line.rstrip() for line in "".join(parser.parts).split("\n")]
    kept = [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]
    return "\n".join(kept).strip() + "\n"
