"""Documents of text and pictures as files hold them: JSON lines, folders of captioned images, WebDataset tars.

What a line or a name says of a path is read beneath the data's own folder alone; tars are read where they lie, nothing is written out.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from atoll.config import DataConfig, UserError, VisionConfig
from atoll.data.images import video
from atoll.data.images.picture import Picture
from atoll.data.images.reading import MOST_BYTES, SUFFIXES, BadImage, below, bytes_of, read_file, read_image
from atoll.data.records import Repairs, clean, decode
from atoll.data.sources import walk

MARK = "<image>"  # where in a text an image stands
CAPTIONS = ("captions.jsonl", "captions.csv", "metadata.jsonl", "metadata.csv")  # beside images: file_name and text
LONGEST = 1 << 24  # bytes of a text beside an image

Load = Callable[[], Picture]


@dataclass(frozen=True)
class Told:
    """A document: its parts in order, text or what loads a picture; `key` is what the split hashes. `bad`: why it cannot be read."""

    name: str
    key: str
    parts: tuple[str | Load, ...] = ()
    bad: str = ""


def read_documents(config: DataConfig, vision: VisionConfig) -> Iterator[Told]:
    """Every document of `config.source`, in order. Raises `UserError`: no such source, or one without pictures."""
    path = Path(config.source).expanduser()
    where = f"data.source = {config.source!r}"
    if path.is_dir():
        yield from _folder(path.resolve(), config, vision, where)
    elif path.suffix == ".jsonl" and path.is_file():
        yield from _lines(path, path.parent, config, vision)
    elif path.suffix == ".tar" and path.is_file():
        yield from _tar(path, config, vision)
    else:
        raise UserError(f'{where}: a folder of images, a .jsonl or a .tar file is expected, or "rendered"')


def _folder(root: Path, config: DataConfig, vision: VisionConfig, where: str) -> Iterator[Told]:
    tars, _ = walk(root, (".tar",))
    lines = [name for name in walk(root, (".jsonl",))[0] if Path(name).name not in CAPTIONS]
    if tars:
        for name in tars:
            yield from _tar(root / name, config, vision)
    elif lines:
        for name in lines:
            yield from _lines(root / name, (root / name).parent, config, vision)
    else:
        yield from _captioned(root, config, vision, where)


# ---------------------------------------------------------------- JSON lines


def _lines(path: Path, root: Path, config: DataConfig, vision: VisionConfig) -> Iterator[Told]:
    """A text with `MARK`s and as many `images`, or `texts` and `images` side by side, null where the other stands."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                name = f"{path.name}:{number}"
                try:
                    parts = _parts(json.loads(decode(line, Repairs())), config.text_field)
                    loads = tuple(p if isinstance(p, str) else _below(root, p[0], config, vision) for p in parts)
                    yield Told(name, json.dumps(parts), loads)
                except (ValueError, RecursionError) as error:  # BadImage too
                    yield Told(name, "", bad=" ".join(str(error).split())[:160])


def _parts(record: Any, field: str) -> list[str | tuple[str]]:
    """Texts, and paths as tuples of one. Raises ValueError."""
    images = record.get("images") if isinstance(record, dict) else None
    if not isinstance(images, list | None):
        raise ValueError("images: a list of paths is expected")
    if isinstance(record, dict) and isinstance(texts := record.get("texts"), list):
        if images and len(images) != len(texts):
            raise ValueError(f"{len(texts)} texts and {len(images)} images: as many are expected, null where the other stands")
        pairs = zip(texts, images or [None] * len(texts), strict=True)
        found: list[Any] = [text if image is None else (image,) for text, image in pairs]
    elif isinstance(record, dict) and isinstance(text := record.get(field), str):
        pieces, images = text.split(MARK), images or []
        if len(pieces) - 1 != len(images):
            raise ValueError(f"{len(pieces) - 1} {MARK} in the text and {len(images)} images: as many are expected")
        found = [p for piece, image in zip(pieces, [*images, None], strict=True) for p in (piece, None if image is None else (image,)) if p]
    else:
        raise ValueError(f"an object with {field!r} and 'images', or with 'texts' and 'images', is expected")
    found = [p for p in found if p is not None]
    if not all(isinstance(p[0] if isinstance(p, tuple) else p, str) for p in found):
        raise ValueError("texts and paths are expected to be text")
    return [clean(p, Repairs()) if isinstance(p, str) else p for p in found if p]


# ---------------------------------------------------------------- folders


def _captioned(root: Path, config: DataConfig, vision: VisionConfig, where: str) -> Iterator[Told]:
    """Images with a text of the same name beside them, or one that a table names."""
    told = _table(root, config.text_field)
    names, _ = walk(root, tuple(s for suffix in (*SUFFIXES, *video.SUFFIXES) for s in (suffix, suffix.upper())))
    if not names:
        raise UserError(f"{where}: no image in this folder; give {', '.join(SUFFIXES)} with captions in NAME.txt or captions.jsonl")
    for name in names:
        try:
            caption = told.get(name)
            if caption is None:
                beside = Path(name).with_suffix(".txt").as_posix()
                caption = decode(bytes_of(below(root, beside), LONGEST), Repairs())
            yield Told(name, name, (_below(root, name, config, vision), "\n" + caption.strip()))
        except BadImage as error:
            yield Told(name, name, bad=f"no caption: {error}" if told.get(name) is None else str(error))


def _table(root: Path, field: str) -> dict[str, str]:
    """Path → caption, of the first of `CAPTIONS` that is there; the first column or field names the file."""
    for name in CAPTIONS:
        path = root / name
        if path.is_symlink() or not path.is_file():
            continue
        text = decode(path.read_bytes(), Repairs())
        if path.suffix == ".csv":
            try:
                rows: list[Any] = list(csv.DictReader(io.StringIO(text)))
            except csv.Error as error:
                raise UserError(f"{path}: not a table that can be read ({error}); give comma-separated values, quotes closed") from None
        else:
            rows = [_object(line) for line in text.splitlines() if line.strip()]
        found = {}
        for number, row in enumerate(rows, 1):
            file = row.get("file_name") or row.get("image") or row.get("file")
            caption = row.get(field) or row.get("caption")
            if not isinstance(file, str) or not isinstance(caption, str):
                raise UserError(f"{path}: record {number}: file_name and {field} are expected; see data.text_field")
            found[Path(os.path.normpath(file)).as_posix()] = clean(caption, Repairs())
        return found
    return {}


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------- tars


def _tar(path: Path, config: DataConfig, vision: VisionConfig) -> Iterator[Told]:
    """Members that share a name up to its first dot are a document: an image and .txt, or .json with a text in it."""
    try:
        with tarfile.open(path, "r:") as archive:
            members: dict[str, dict[str, tuple[int, int]]] = {}
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                stem, _, ending = base.partition(".")
                if member.isreg() and not member.issparse() and stem:
                    members.setdefault(f"{folder}/{stem}".lstrip("/"), {})[f".{ending.lower()}"] = member.offset_data, member.size
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: not a tar file that can be read ({error}); give an uncompressed .tar") from None
    for key, places in members.items():
        yield _member(path, key, places, config, vision)


def _member(path: Path, key: str, places: dict[str, tuple[int, int]], config: DataConfig, vision: VisionConfig) -> Told:
    name = f"{path.name}:{key}"
    image = next((place for ending, place in places.items() if ending.endswith(SUFFIXES)), None)
    if image is None:
        return Told(name, name, bad="no image among its members")
    try:
        caption = decode(_slice(path, *places[".txt"], LONGEST), Repairs()) if ".txt" in places else None
        if caption is None and ".json" in places:
            record = _object(decode(_slice(path, *places[".json"], LONGEST), Repairs()))
            caption = record.get(config.text_field) or record.get("caption")
        if not isinstance(caption, str):
            return Told(name, name, bad=f"no caption: .txt, or .json with {config.text_field!r}")
    except BadImage as error:
        return Told(name, name, bad=str(error))
    most = config.image_patches
    return Told(name, name, (lambda: read_image(_slice(path, *image, MOST_BYTES), vision, most), "\n" + clean(caption, Repairs()).strip()))


def _slice(path: Path, offset: int, size: int, limit: int) -> bytes:
    """Bytes of a member, read where they lie."""
    if size > limit:
        raise BadImage(f"{size:,} bytes, {limit:,} at most")
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) != size:
        raise BadImage("cut off with its archive")
    return content


# ---------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Video:
    """A video among the parts: its items are known once it is read."""

    path: Path
    vision: VisionConfig
    most: int

    def __call__(self) -> Picture:
        """Its first item."""
        return self.items()[0][1]

    def loader(self, index: int) -> Load:
        """What gives item `index`."""
        return lambda: self.items()[index][1]

    def items(self) -> tuple[tuple[str, Picture], ...]:
        """Times and items, of the last video kept. Raises `BadImage`."""
        return _items(self.path, self.vision, self.most)


@lru_cache(maxsize=1)
def _items(path: Path, vision: VisionConfig, most: int) -> tuple[tuple[str, Picture], ...]:
    return tuple(video.video_items(video.AvFrames(path), vision, most))


def _below(root: Path, name: str, config: DataConfig, vision: VisionConfig) -> Load:
    path, most = below(root, name), config.image_patches
    if path.suffix.lower() in video.SUFFIXES:
        return Video(path, vision, most)
    return lambda: read_file(path, vision, most)
