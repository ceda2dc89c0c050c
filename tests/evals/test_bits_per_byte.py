"""Bits per byte against sums done by hand, and the compressors against the programs' own settings."""

import gzip
import lzma
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data import TokenSet
from atoll.evals.bpb import bits_per_byte, compressors, windows

BOS, EOS, PAD, VOCAB = 0, 1, 2, 50


def token_set(sizes: list[int]) -> TokenSet:
    generator = np.random.default_rng(0)
    table = np.concatenate([[0, 0, 0], 1 + np.arange(VOCAB - 3) % 4]).astype(np.int64)
    parts = [generator.integers(3, VOCAB, size) for size in sizes]
    flat = np.concatenate([[BOS, *p, EOS] for p in parts]).astype(np.uint16) if parts else np.zeros(0, np.uint16)
    offsets = np.concatenate([[0], np.cumsum([s + 2 for s in sizes], dtype=np.int64)]).astype(np.int64)
    doc_bytes = np.asarray([table[p].sum() for p in parts], dtype=np.int64)
    return TokenSet(flat, offsets, doc_bytes, [str(i) for i in range(len(sizes))], table, BOS, EOS, PAD)


class Bigram(torch.nn.Module):
    """Predicts a token from the one before it within its segment: what a window's bounds and masks do to it is easily told."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1))
        self.widest = 0
        self.modes: set[bool] = set()

    def forward(self, input_ids, labels=None, cu_seqlens=None):
        assert labels is not None
        assert input_ids.shape[0] == 1
        assert (int(cu_seqlens[0]), int(cu_seqlens[-1])) == (0, input_ids.shape[1])
        self.widest = max(self.widest, input_ids.shape[1])
        self.modes.add(self.training)
        counted = labels[0] != -100
        assert not counted[cu_seqlens[:-1]].any()
        at = counted.nonzero()[:, 0]
        losses = -self.table[input_ids[0, at - 1], labels[0, at]]
        return SimpleNamespace(loss=losses.mean(), num_targets=torch.tensor(len(at)))


def by_hand(model: Bigram, data: TokenSet) -> float:
    """Sum of -ln p over every text token, document by document."""
    total = 0.0
    for _, ids, _ in data.documents():
        ids = torch.from_numpy(ids.astype(np.int64))
        total -= float(model.table.detach()[ids[:-2], ids[1:-1]].sum())
    return total


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(2, 20), st.data())
def test_windows_count_every_text_token_exactly_once(sizes, length, data):
    overlap = data.draw(st.integers(0, length - 2))
    tokens = token_set(sizes)
    counts = np.zeros(tokens.num_tokens, dtype=int)
    starts = tokens.offsets[:-1]
    for first, last, counted in windows(tokens, length, overlap).tolist():
        assert last - first <= length
        assert first < counted < last
        counts[counted:last] += 1
        document = np.searchsorted(starts, first, side="right") - 1
        assert last <= tokens.offsets[document + 1] - 1  # never the eos, never another document
        assert first == starts[document] or counted - first == max(1, overlap)
    expected = np.ones(tokens.num_tokens, dtype=int)
    expected[starts] = 0
    expected[tokens.offsets[1:] - 1] = 0
    assert np.array_equal(counts, expected)


@pytest.mark.parametrize(("length", "overlap", "batch_tokens"), [(16, None, 64), (16, 0, 1), (7, 5, 1000), (512, None, 16384), (2, 0, 33)])
def test_the_sum_is_the_sum_over_documents_at_any_length_and_batch(length, overlap, batch_tokens):
    model, data = Bigram(), token_set([40, 3, 0, 17, 100])
    shares: list[float] = []
    result = bits_per_byte(model, data, length, overlap=overlap, batch_tokens=batch_tokens, progress=shares.append)
    nats = by_hand(model, data)
    assert result["nats"] == pytest.approx(nats, rel=1e-12)
    assert result["tokens"] == 160
    assert result["bytes"] == data.num_bytes
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / data.num_bytes, rel=1e-12)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert model.widest <= max(batch_tokens, length)


def test_a_limit_scores_a_fixed_part_over_many_documents():
    model, data = Bigram(), token_set([50] * 30)
    part = bits_per_byte(model, data, 16, limit_tokens=300)
    assert part == pytest.approx(bits_per_byte(model, data, 16, limit_tokens=300, batch_tokens=32), rel=1e-12)
    assert 150 <= part["tokens"] <= 300
    assert part["bytes"] < data.num_bytes
    assert 0 < part["bits_per_byte"] < 10
    whole = bits_per_byte(model, data, 16, limit_tokens=10**9)
    assert whole["bytes"] == data.num_bytes


def test_the_models_mode_is_left_as_it_was():
    model, data = Bigram(), token_set([10])
    model.train()
    bits_per_byte(model, data, 8)
    assert model.training
    assert model.modes == {False}
    model.eval()
    bits_per_byte(model, data, 8)
    assert not model.training


def test_nothing_to_score_is_refused():
    with pytest.raises(ValueError, match="no document"):
        bits_per_byte(Bigram(), token_set([0, 0]), 8)
    with pytest.raises(ValueError, match="overlap = 7"):
        windows(token_set([4]), 8, 7)


def test_compressors_agree_with_the_programs_settings():
    generator = np.random.default_rng(1)
    files = [(str(n), bytes(generator.integers(97, 105, n, dtype=np.uint8)) * 3) for n in (1, 100, 4096, 5000, 70_000)]
    files.append(("empty", b""))
    total = sum(len(data) for _, data in files)
    found = compressors(files)
    assert found["gzip"] == 8 * sum(len(gzip.compress(data, 9)) for _, data in files) / total
    assert found["xz"] == 8 * sum(len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) for _, data in files) / total
    assert found == compressors(files, threads=1)
    with pytest.raises(ValueError, match="no bytes"):
        compressors([("empty", b"")])
