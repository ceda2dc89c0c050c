"""Which documents are held out, and what a corpus consists of: one lazy reading of the source, before anything is tokenised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from atoll.config import DataConfig, UserError
from atoll.data.sources import Document, Source, Stats

TOKENIZER_BYTES = 5_000_000  # the tokenizer is trained on about this much of the training split
STRETCH = 6000  # of which one document gives so much, so that a table of a megabyte does not fill the vocabulary


def unit_hash(key: str, salt: str = "") -> float:
    """A number in [0, 1) that depends on `key` and `salt` alone, the same on every machine and in every run."""
    digest = hashlib.blake2b((salt + key).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


@dataclass
class Survey:
    """What a source holds and how it is split. Bytes are UTF-8 bytes of the text that will be tokenised."""

    heldout: list[bool] = field(default_factory=list)  # by document, in reading order
    keep: set[str] | None = None  # files read; None is all
    sizes: list[int] = field(default_factory=list)  # bytes, by document, in reading order
    digest: str = ""  # of every name, text and side
    train_digest: str = ""  # of the training texts alone
    heldout_files: list[tuple[str, bytes]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    forced: str | None = None  # the document held out because the hash held out none

    def documents(self, source: Source, heldout: bool) -> Iterator[Document]:
        """The documents of one side, in reading order."""
        for side, document in zip(self.heldout, source.read(self.keep), strict=False):
            if side == heldout:
                yield document

    @property
    def train_bytes(self) -> int:
        """Bytes of the training split."""
        return sum(size for size, side in zip(self.sizes, self.heldout, strict=True) if not side)

    def tokenizer_texts(self, source: Source) -> Iterator[str]:
        """A fixed choice, by hash, of stretches of training documents, about `TOKENIZER_BYTES` in all; all of a smaller split."""
        sizes = [size for size, side in zip(self.sizes, self.heldout, strict=True) if not side]
        cap = max(STRETCH, TOKENIZER_BYTES // len(sizes)) if sum(sizes) > TOKENIZER_BYTES else max(sizes)
        share = TOKENIZER_BYTES / sum(min(size, cap) for size in sizes)
        for document in self.documents(source, False):
            if share >= 1 or unit_hash(document.key, "tokenizer:") < share:
                yield _stretch(document, cap)


def _stretch(document: Document, cap: int) -> str:
    """At most `cap` characters from a line's start somewhere in the document."""
    text = document.text
    at = int(unit_hash(document.key, "stretch:") * max(0, len(text) - cap))
    at = text.rfind("\n", 0, at) + 1
    return text[at : at + cap]


def survey(source: Source, config: DataConfig) -> Survey:
    """Read the source once. Raises `UserError` for an empty corpus, or one document, which cannot be on both sides."""
    found = Survey(keep=_chosen_files(source, config))
    hashes: list[float] = []
    train_bytes = 0
    digests = {side: hashlib.blake2b(digest_size=16) for side in (False, True)}
    for document in source.read(found.keep):
        raw = document.text.encode("utf-8")
        hashes.append(unit_hash(document.key))
        side = hashes[-1] < config.heldout
        found.heldout.append(side)
        found.sizes.append(len(raw))
        digests[side].update(f"{document.name}\0{len(raw)}\0".encode("utf-8", "surrogatepass") + raw)
        if side:
            found.heldout_files.append((document.name, raw))
        else:
            train_bytes += len(raw)
        if config.max_bytes is not None and not source.splits_files and train_bytes >= config.max_bytes:
            break
    found.stats = source.stats
    _require_two(found, config)
    forced = all(found.heldout) or not any(found.heldout)
    if forced:
        _force(found, hashes, source)
    sides = [digests[side].hexdigest() for side in (False, True)]
    found.digest = hashlib.blake2b(json.dumps([sides, found.heldout]).encode(), digest_size=16).hexdigest()
    found.train_digest = found.digest if forced else sides[0]
    return found


def _chosen_files(source: Source, config: DataConfig) -> set[str] | None:
    """With `max_bytes`, whole files in the order of their hash until it is reached: a fair sample, not the alphabet's start."""
    if config.max_bytes is None or not source.splits_files:
        return None
    ordered = sorted(source.files, key=unit_hash)
    chosen, total = set(), 0
    for name in ordered:
        if unit_hash(name) >= config.heldout:
            if total >= config.max_bytes:
                break
            total += source.size(name)
        chosen.add(name)
    return chosen


def _require_two(found: Survey, config: DataConfig) -> None:
    if len(found.heldout) >= 2:
        return
    stats, where = found.stats, f"data.source = {config.source!r}"
    if not found.heldout:
        left_out = f"{stats.binary} binary, {stats.empty} empty, {stats.links} links left out"
        raise UserError(f"{where}: empty corpus, no document with text ({left_out}); give text files")
    raise UserError(f"{where}: one document cannot be both for training and held out; give at least two")


def _force(found: Survey, hashes: list[float], source: Source) -> None:
    """Move one document: the one nearest the threshold, so that the choice does not depend on the order of reading."""
    pick: Callable[..., int] = max if all(found.heldout) else min
    index = pick(range(len(hashes)), key=hashes.__getitem__)
    found.heldout[index] = not found.heldout[index]
    found.heldout_files = [(d.name, d.text.encode("utf-8")) for d in found.documents(source, True)]
    found.forced = next(found.documents(source, found.heldout[index])).name
