"""Which documents are worth learning from: structure alone, no model. And which were met before, exactly or nearly."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.config import UserError

WORDS, PERMUTATIONS = 5, 128  # of a shingle, of a MinHash
PIECE = 1 << 16  # shingles hashed at once
HEAD, COMMENT = 20, ("#", "//", "/*", "*", "--", ";", "%", "<!--")  # lines in which a file says that it was generated, and how they begin
GENERATED = re.compile(r"@generated|do not edit|auto-?generated|(?:file|code) (?:is|was) generated|generated (?:by|automatically)", re.I)


@dataclass(frozen=True)
class Bounds:
    """What a document must keep to; shares are of characters that are no white space, or of lines."""

    min_chars: int = 200
    min_line: float = 5.0  # characters of the mean line
    max_line: float = 200.0  # the same, where hardly any white space is in it: minified
    min_letters: float = 0.5  # share of letters in prose
    min_code_letters: float = 0.3  # share of letters in code
    max_repeated: float = 0.5  # share of lines (of ten characters or more) that were there before


def fault(text: str, kind: str, bounds: Bounds) -> str | None:
    """Why a document is left out, or None."""
    if len(text) < bounds.min_chars:
        return "short"
    lines = [line for line in (line.strip() for line in text.splitlines()) if line]
    mean = sum(map(len, lines)) / max(1, len(lines))
    solid = sum(map(len, text.split()))
    if mean < bounds.min_line:
        return "short lines"
    if mean > bounds.max_line and len(text) - solid < 0.08 * len(text):
        return "minified"
    if kind == "code" and any(line.startswith(COMMENT) and GENERATED.search(line) for line in lines[:HEAD]):
        return "generated"
    if sum(map(str.isalpha, text)) < (bounds.min_code_letters if kind == "code" else bounds.min_letters) * solid:
        return "few letters"
    long = [line for line in lines if len(line) >= 10]
    if len(long) >= 10 and len(long) - len(set(long)) > bounds.max_repeated * len(long):
        return "repeated lines"
    return None


@dataclass
class Seen:
    """Documents met so far: exact ones by a hash of their words, near ones by MinHash over shingles of five words (Broder 1997)."""

    threshold: float | None  # of Jaccard's index, from which two are the same; None looks for exact ones alone
    _exact: dict[bytes, str] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict)  # MinHashes by name
    _index: Any = None

    def twin(self, name: str, text: str) -> tuple[str, str] | None:
        """(reason, the earlier document's name) if `text` was met before; else it is remembered as `name`."""
        words = text.split()
        key = hashlib.blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key in self._exact:
            return "exact duplicate", self._exact[key]
        found = self._near(name, words) if self.threshold is not None else None
        if found is None:
            self._exact[key] = name
        return found

    def _near(self, name: str, words: list[str]) -> tuple[str, str] | None:
        minhash, index = _datasketch()
        if self._index is None:
            # The index looks wider than asked, since it misses some at its own threshold; the estimate then decides.
            self._index = index(threshold=max(0.2, (self.threshold or 0) - 0.2), num_perm=PERMUTATIONS)
        mine = minhash(num_perm=PERMUTATIONS, hashfunc=int)
        hashes = np.fromiter((zlib.crc32(s) for s in shingles(words)), dtype=np.uint32)
        for at in range(0, len(hashes), PIECE):
            mine.update_batch(np.unique(hashes[at : at + PIECE]).tolist())
        near = [(mine.jaccard(self._kept[other]), other) for other in self._index.query(mine)]
        near = [pair for pair in near if pair[0] >= (self.threshold or 0)]
        if near:
            return "near duplicate", max(near)[1]
        self._index.insert(name, mine)
        self._kept[name] = mine
        return None


def shingles(words: list[str]) -> Iterable[bytes]:
    """Every run of five words, or the whole of fewer."""
    if len(words) < WORDS:
        return [" ".join(words).encode("utf-8", "surrogatepass")]
    return (" ".join(words[i : i + WORDS]).encode("utf-8", "surrogatepass") for i in range(len(words) - WORDS + 1))


def _datasketch() -> tuple[Any, Any]:
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError:
        raise UserError("--near: near duplicates are found by datasketch; pip install 'atoll[data]', or give --near 0") from None
    return MinHash, MinHashLSH
