"""Tokenised documents: one flat array of ids, read through a memory map, with the bounds and bytes of every document."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config import ModelConfig
from atoll.data.cache import aside, seal, write_text, writing
from atoll.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 4_000_000  # text handed to the tokenizer's threads at once


@dataclass(frozen=True)
class TokenSet:
    """Documents as `[bos] + tokens + [eos]`, or conversations as they are rendered, end to end.

    tokens [N] uint16 or uint32; offsets int64 [D+1]; doc_bytes int64 [D] (UTF-8 bytes of each text); names of the D documents;
    token_bytes int64 [V]: bytes of text behind each id, 0 for specials. Of conversations also trained bool [N]: the tokens that are
    targets, whose bytes alone doc_bytes counts; and end_of_msg, the id that ends each message. `tasks` says what rows of generated tasks
    are made of (`data.synthetic`), `pictures` what stands where media placeholders do (`data.images.corpus.Gallery`).
    """

    tokens: np.ndarray
    offsets: np.ndarray
    doc_bytes: np.ndarray
    names: list[str]
    token_bytes: np.ndarray
    bos: int
    eos: int
    pad: int
    trained: np.ndarray | None = None
    end_of_msg: int | None = None
    tasks: Any = None
    pictures: Any = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_tokens(self) -> int:
        """All ids, bos and eos included."""
        return int(self.offsets[-1])

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.doc_bytes.sum())

    def document(self, index: int) -> np.ndarray:
        """Ids of one document, bos first and eos last."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def documents(self) -> Iterator[tuple[str, np.ndarray, int]]:
        """(name, ids with bos and eos, bytes of text) of each document."""
        for index, name in enumerate(self.names):
            yield name, self.document(index), int(self.doc_bytes[index])


def from_ids(documents: Iterable[tuple[str, list[int], int]], tokenizer: Tokenizer, model: ModelConfig) -> TokenSet:
    """A `TokenSet` in memory of (name, ids without bos and eos, bytes)."""
    kept = list(documents)
    flat = [np.asarray([model.bos_token_id, *ids, model.eos_token_id], dtype=token_dtype(model)) for _, ids, _ in kept]
    tokens = np.concatenate(flat) if flat else np.zeros(0, token_dtype(model))
    sizes = np.asarray([[len(f), size] for f, (_, _, size) in zip(flat, kept, strict=True)], dtype=np.int64).reshape(-1, 2)
    return _token_set(tokens, sizes, [name for name, _, _ in kept], tokenizer, model)


def from_conversations(conversations: Iterable[tuple[str, np.ndarray, np.ndarray]], tokenizer: Tokenizer, model: ModelConfig) -> TokenSet:
    """A `TokenSet` in memory of (name, ids, which of them are trained)."""
    return dataclasses.replace(from_tasks(conversations, tokenizer, model), end_of_msg=tokenizer.special["<|end_of_msg|>"])


def from_tasks(samples: Iterable[tuple[str, np.ndarray, np.ndarray]], tokenizer: Tokenizer, model: ModelConfig) -> TokenSet:
    """The same of samples that are no messages."""
    kept = list(samples)
    tokens = np.concatenate([np.zeros(0, token_dtype(model)), *(ids for _, ids, _ in kept)]).astype(token_dtype(model))
    trained = np.concatenate([np.zeros(0, bool), *(mask for _, _, mask in kept)]).astype(bool)
    sizes = [[len(ids), int(tokenizer.bytes_table[ids[mask]].sum())] for _, ids, mask in kept]
    flat = _token_set(tokens, np.asarray(sizes, dtype=np.int64).reshape(-1, 2), [name for name, _, _ in kept], tokenizer, model)
    return dataclasses.replace(flat, trained=trained)


def token_dtype(model: ModelConfig) -> type[np.unsignedinteger[Any]]:
    """The narrowest type that holds every id."""
    return np.uint16 if model.vocab_size <= 1 << 16 else np.uint32


def encode_documents(texts: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[tuple[str, list[int], int]]:
    """(name, ids, bytes) of each (name, text), some megabytes at a time on the tokenizer's threads."""
    batch: list[tuple[str, str]] = []
    size = 0
    for item in texts:
        batch.append(item)
        size += len(item[1])
        if size >= BATCH_CHARACTERS:
            yield from _encode(batch, tokenizer)
            batch, size = [], 0
    yield from _encode(batch, tokenizer)


def _encode(batch: list[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[tuple[str, list[int], int]]:
    for (name, text), ids in zip(batch, tokenizer.encode_batch([t for _, t in batch]), strict=True):
        yield name, ids, len(text.encode("utf-8"))


# ---------------------------------------------------------------- kept on disk


def write_tokens(stem: Path, documents: Iterable[tuple[str, list[int], int]], model: ModelConfig) -> None:
    """Write `stem.tokens` (raw little-endian ids) and `stem.sizes` (int64 [D, 2]), then `stem.json`, which makes them count."""
    dtype = np.dtype(token_dtype(model)).newbyteorder("<")
    names, sizes = [], []
    tokens, table = stem.with_suffix(".tokens"), stem.with_suffix(".sizes")
    with writing(stem.parent), aside(tokens) as temporary, temporary.open("wb") as file:
        for name, ids, size in documents:
            file.write(np.asarray([model.bos_token_id, *ids, model.eos_token_id], dtype=dtype).tobytes())
            names.append(name)
            sizes.append((len(ids) + 2, size))
    with writing(stem.parent), aside(table) as temporary:
        temporary.write_bytes(np.asarray(sizes, dtype="<i8").tobytes())
    meta = {"dtype": dtype.str, "names": names, "tokens": seal(tokens), "sizes": seal(table)}
    write_text(stem.with_suffix(".json"), json.dumps(meta))


def read_tokens(stem: Path, tokenizer: Tokenizer, model: ModelConfig) -> TokenSet | None:
    """What `write_tokens` kept, memory-mapped; None when a file is missing or damaged."""
    tokens, table = stem.with_suffix(".tokens"), stem.with_suffix(".sizes")
    try:
        meta = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        if meta["tokens"] != seal(tokens) or meta["sizes"] != seal(table):
            return None
        sizes = np.frombuffer(table.read_bytes(), dtype="<i8").reshape(-1, 2)
        flat = np.memmap(tokens, dtype=np.dtype(meta["dtype"]), mode="r")
        if len(sizes) != len(meta["names"]) or int(sizes[:, 0].sum()) != len(flat):
            return None
        return _token_set(flat, sizes, list(meta["names"]), tokenizer, model)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _token_set(tokens: np.ndarray, sizes: np.ndarray, names: list[str], tokenizer: Tokenizer, model: ModelConfig) -> TokenSet:
    offsets = np.concatenate([[0], np.cumsum(sizes[:, 0], dtype=np.int64)]).astype(np.int64)
    table = np.zeros(model.vocab_size, dtype=np.int64)
    table[: len(tokenizer.bytes_table)] = tokenizer.bytes_table
    ids = (model.bos_token_id, model.eos_token_id, model.pad_token_id)
    return TokenSet(tokens, offsets, sizes[:, 1].astype(np.int64), names, table, *ids)


def stem_name(digest: str, tokenizer: Tokenizer, model: ModelConfig) -> str:
    """Name of a token file: the corpus, the tokenizer, and what frames a document."""
    return f"{digest[:16]}-{tokenizer.fingerprint[:16]}-{model.bos_token_id}-{model.eos_token_id}-{np.dtype(token_dtype(model)).name}"
