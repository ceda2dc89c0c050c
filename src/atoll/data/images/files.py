"""A corpus of files with pictures: each read once to learn its size, what cannot be read left out and counted, split, tokenised."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from atoll.config import DataConfig, ModelConfig, UserError
from atoll.data.corpus import Corpus, Progress, fitted, given_tokenizer
from atoll.data.images.gallery import Gallery, token_set
from atoll.data.images.picture import Picture, features_of
from atoll.data.images.reading import BadImage
from atoll.data.images.samples import Item, Sample, document
from atoll.data.images.sources import Load, Video, read_documents
from atoll.data.split import TOKENIZER_BYTES, unit_hash
from atoll.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Read:
    """A document whose pictures have been looked at."""

    name: str
    place: float  # in [0, 1), by which it is split
    parts: tuple[str | Item, ...]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass
class Dropped:
    """What was left out, by reason, and the first of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, why: str) -> None:
        """Count one; reasons are told apart by their first words."""
        reason = why.split(" (")[0].split(": ")[0]
        self.counts[reason] += 1
        self.first.setdefault(reason, f"{name}: {why}")

    def notes(self) -> list[str]:
        """One line a reason."""
        return [f"left out: {count:,} ({self.first[reason]})" for reason, count in self.counts.most_common()]


def open_files(config: DataConfig, model: ModelConfig, say: Progress) -> Corpus:
    """The corpus that `config.source` holds. Raises `UserError`."""
    assert model.vision is not None
    say(f"looking at the pictures of {config.source}")
    dropped = Dropped()
    found = list(_looked_at(config, model, dropped))
    sides = _sides(found, config, dropped)
    sides_of = {side: [d for d, s in zip(found, sides, strict=True) if s == side] for side in (False, True)}
    tokenizer = _tokenizer([d.text for d in sides_of[False]], config, model, say)
    sets = {}
    for side, told in sides_of.items():
        samples = [_sample(d, tokenizer, model) for d in told]
        sets[side] = token_set(samples, tokenizer, model, Gallery(samples, model, config.image_cut), [d.name for d in told])
    items = [p for d in found for p in d.parts if isinstance(p, Item)]
    patches = sum(features_of(item.grid, model.vision) for item in items)
    note = f"{len(found):,} documents with {len(items):,} images of {patches:,} tokens; {sum(sides):,} documents held out"
    texts = [(d.name, d.text.encode("utf-8")) for d in sides_of[True]]
    return Corpus(tokenizer, sets[False], sets[True], texts, None, 0, [note, *dropped.notes()])


def _looked_at(config: DataConfig, model: ModelConfig, dropped: Dropped) -> list[Read]:
    """Every document that can be read, until `config.max_bytes` of training text."""
    assert model.vision is not None
    found, train_bytes = [], 0
    for told in read_documents(config, model.vision):
        if told.bad:
            dropped.add(told.name, told.bad)
            continue
        try:
            read = Read(told.name, unit_hash(told.key), tuple(p for part in told.parts for p in _known(part, told.name)))
        except BadImage as error:
            dropped.add(told.name, str(error))
            continue
        if not any(part.strip() for part in read.parts if isinstance(part, str)):
            dropped.add(told.name, "no text")
            continue
        found.append(read)
        train_bytes += len(read.text.encode()) if read.place >= config.heldout else 0
        if config.max_bytes is not None and train_bytes >= config.max_bytes:
            break
    return found


def _known(part: str | Load, name: str) -> list[str | Item]:
    """A part with its picture's grid. Raises `BadImage`."""
    if isinstance(part, str):
        return [part]
    if isinstance(part, Video):
        return [p for i, (time, item) in enumerate(part.items()) for p in (time, _item(part.loader(i), item, name))]
    return [_item(part, part(), name)]


def _item(load: Load, picture: Picture, name: str) -> Item:
    def again() -> Picture:
        try:
            found = load()
        except BadImage as error:
            raise UserError(
                f"{name}: an image that could be read at the start cannot be any more ({error}); put it back, then resume"
            ) from None
        if found.grid != picture.grid:
            raise UserError(f"{name}: an image has changed since the start; put it back, then resume")
        return found

    return Item(picture.grid, again)


def _sides(found: list[Read], config: DataConfig, dropped: Dropped) -> list[bool]:
    """Whether each is held out; where the hash leaves a side empty, the one nearest to it goes there."""
    if len(found) < 2:
        what = f"{len(found)} document with text and images that can be read; give at least two"
        raise UserError(f"data.source = {config.source!r}: {'; '.join([what, *dropped.notes()])}")
    sides = [d.place < config.heldout for d in found]
    if all(sides) or not any(sides):
        pick = max if all(sides) else min
        index = pick(range(len(found)), key=lambda i: found[i].place)
        sides[index] = not sides[index]
    return sides


def _tokenizer(texts: list[str], config: DataConfig, model: ModelConfig, say: Progress) -> Tokenizer:
    if config.tokenizer != "train":
        return given_tokenizer(config, model)
    some, room = [], TOKENIZER_BYTES
    for text in texts:
        if room <= 0:
            break
        some.append(text)
        room -= len(text)
    return fitted(hashlib.blake2b("\0".join(some).encode(), digest_size=16).hexdigest(), lambda: some, config, model, say)


def _sample(read: Read, tokenizer: Tokenizer, model: ModelConfig) -> Sample:
    return document([part if isinstance(part, Item) else tokenizer.encode(part) for part in read.parts], model)
