"""Bits per byte: how well a model predicts text, in a unit that does not depend on its tokenizer.

    bits per byte = (sum over counted tokens of -ln p) / ln 2 / (bytes of text)

Every token of a document's text is counted exactly once; of a conversation those that are trained, markers among them, which have
no bytes. The end-of-document token is not: a file's end is not among its bytes,
and a compressor is told of it by the file system. Documents start from nothing, as a compressor does that takes files one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from atoll.data.documents import TokenSet
from atoll.data.loader import IGNORED, permutation


def windows(token_set: TokenSet, length: int, overlap: int) -> np.ndarray:
    """Stretches of documents to be scored, int64 [W, 3]: first token, one past the last, first token that counts.

    A window has at most `length` tokens; each after a document's first begins with `overlap` tokens that the window before it
    counted, as context. The tokens that count, over all windows, are every document's without its bos and eos, and of conversations
    those that are trained; a window without any is left out. Raises `ValueError`.
    """
    if length < 2 or not 0 <= overlap <= length - 2:
        raise ValueError(f"length = {length}, overlap = {overlap}: length of 2 or more, overlap from 0 to length - 2 are expected")
    context = max(1, overlap)  # the token before the first that counts is always there: it predicts
    rows, trained = [], token_set.trained
    ends = token_set.offsets[1:] - (trained is None)  # a conversation has no eos
    for begin, end in zip(token_set.offsets[:-1].tolist(), ends.tolist(), strict=True):
        first, counted = begin, begin + 1
        while counted < end:
            last = min(end, first + length)
            if trained is None or trained[counted:last].any():
                rows.append((first, last, counted))
            first, counted = last - context, last
    return np.asarray(rows, dtype=np.int64).reshape(-1, 3)


def bits_per_byte(
    model: Any,
    token_set: TokenSet,
    length: int,
    *,
    overlap: int | None = None,
    batch_tokens: int = 16384,
    limit_tokens: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> dict[str, float]:
    """Score `token_set` in windows of `length` tokens: {"bits_per_byte", "nats_per_token", "bytes", "tokens", "nats"}.

    Windows (see `windows`; `overlap` is length // 4 unless given) of near sizes go together in packed batches [1, N] of at most
    `batch_tokens`, longest first. With `limit_tokens`, a fixed pseudo-random choice of windows with about so many tokens is
    scored. `progress` is called with the share done after each batch. The model is left in the mode it was in.
    Raises `ValueError` when there is nothing to score.
    """
    chosen = windows(token_set, length, length // 4 if overlap is None else overlap)
    if limit_tokens is not None:
        chosen = some(chosen, limit_tokens)
    if not len(chosen):
        raise ValueError("bits_per_byte: no document with text to score")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    nats, tokens, num_bytes, done = 0.0, 0, 0, 0
    was_training = model.training
    model.eval()
    try:
        for batch in _batches(chosen, batch_tokens):
            ids, labels, bounds = _pack(token_set, batch)
            with torch.inference_mode():
                out = model(ids.to(device), labels=labels.to(device), cu_seqlens=bounds.to(device))
            count = int(out.num_targets)
            nats += float(out.loss) * count
            tokens += count
            num_bytes += int(token_set.token_bytes[labels[labels != IGNORED].numpy()].sum())
            done += len(batch)
            if progress is not None:
                progress(done / len(chosen))
    finally:
        model.train(was_training)
    if limit_tokens is None:
        num_bytes = token_set.num_bytes  # the texts' own, also when a foreign tokenizer does not keep every byte
    bits = nats / math.log(2) / max(1, num_bytes)
    return {"bits_per_byte": bits, "nats_per_token": nats / max(1, tokens), "bytes": num_bytes, "tokens": tokens, "nats": nats}


def some(chosen: np.ndarray, limit: int) -> np.ndarray:
    """A fixed pseudo-random choice of windows with about `limit` tokens."""
    shuffled = chosen[permutation(len(chosen), 0, 0)]
    sizes = np.cumsum(shuffled[:, 1] - shuffled[:, 0])
    return shuffled[: max(1, int(np.searchsorted(sizes, limit, side="right")))]


def _batches(chosen: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Windows, longest first, in groups of at most `batch_tokens` tokens (a longer window goes alone)."""
    sizes = chosen[:, 1] - chosen[:, 0]
    ordered = chosen[np.argsort(-sizes, kind="stable")]
    start, filled = 0, 0
    for i, size in enumerate((ordered[:, 1] - ordered[:, 0]).tolist()):
        if i > start and filled + size > batch_tokens:
            yield ordered[start:i]
            start, filled = i, 0
        filled += size
    yield ordered[start:]


def _pack(token_set: TokenSet, batch: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """input_ids [1, N], labels [1, N] with -100 on context and on what is not trained, cu_seqlens [W+1], all int64."""
    ids = np.concatenate([token_set.tokens[first:last] for first, last, _ in batch.tolist()]).astype(np.int64)
    labels = ids.copy()
    bounds = np.concatenate([[0], np.cumsum(batch[:, 1] - batch[:, 0])])
    for at, (first, _, counted) in zip(bounds.tolist(), batch.tolist(), strict=False):
        labels[at : at + counted - first] = IGNORED
    if token_set.trained is not None:
        labels[~np.concatenate([token_set.trained[first:last] for first, last, _ in batch.tolist()])] = IGNORED
    return torch.from_numpy(ids)[None], torch.from_numpy(labels)[None], torch.from_numpy(bounds)


# ---------------------------------------------------------------- the yardstick


def compressors(files: Sequence[tuple[str, bytes]], threads: int = 2) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz -9e` on the same files, compressed one by one (names are not stored).

    Raises `ValueError` when there are no bytes.
    """
    total = sum(len(data) for _, data in files)
    if not total:
        raise ValueError("compressors: no bytes to compress")
    with ThreadPoolExecutor(threads) as pool:  # both libraries let go of the interpreter's lock
        gzipped = sum(pool.map(_gzip, (data for _, data in files)))
        xzipped = sum(pool.map(_xz, (data for _, data in files)))
    return {"gzip": 8 * gzipped / total, "xz": 8 * xzipped / total}


def _gzip(data: bytes) -> int:
    import gzip

    return len(gzip.compress(data, 9, mtime=0))


def _xz(data: bytes) -> int:
    """Size of `xz -9e`'s output. Its 64 MiB window is cut to the data's size: the same matches, without 700 MB of tables a thread."""
    import lzma

    window = min(1 << 26, max(4096, 1 << (len(data) - 1).bit_length())) if data else 4096
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=filters))
