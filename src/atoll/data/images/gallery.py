"""A `TokenSet` of documents with pictures, and how its rows are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.config import ModelConfig
from atoll.data.documents import TokenSet, token_dtype
from atoll.data.images.sampler import DocumentRows, DrawnRows, PictureRows
from atoll.data.images.samples import Sample
from atoll.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Gallery:
    """Beside a `TokenSet`: its documents as samples; of a side that is drawn without end, what draws one by key."""

    samples: list[Sample]
    model: ModelConfig
    cut: str = "move"
    draw: Callable[..., Sample] | None = None

    def rows(self, token_set: TokenSet, length: int, seed: int) -> PictureRows:
        """The sampler of `token_set`, whose `pictures` this is."""
        if (draw := self.draw) is not None:
            return DrawnRows(token_set, lambda row, slot: draw(length, seed, row, slot), length)
        return DocumentRows(token_set, self.samples, length, seed, self.model, self.cut)


def token_set(
    samples: Sequence[Sample], tokenizer: Tokenizer, model: ModelConfig, gallery: Gallery, names: Sequence[str] | None = None
) -> TokenSet:
    """`samples` as a `TokenSet` with its pictures."""
    table = np.zeros(model.vocab_size, dtype=np.int64)
    table[: len(tokenizer.bytes_table)] = tokenizer.bytes_table
    kept = [s.ids.astype(token_dtype(model)) for s in samples]
    offsets = np.cumsum([0, *(len(ids) for ids in kept)]).astype(np.int64)
    sizes = np.asarray([int(table[s.ids[s.trained]].sum()) for s in samples], dtype=np.int64)
    named = list(names or (f"picture {i}" for i in range(len(samples))))
    trained = np.concatenate([np.zeros(0, bool), *(s.trained for s in samples)])
    tokens = np.concatenate([np.zeros(0, token_dtype(model)), *kept])
    ends = model.bos_token_id, model.eos_token_id, model.pad_token_id
    return TokenSet(tokens, offsets, sizes, named, table, *ends, trained=trained, pictures=gallery)
