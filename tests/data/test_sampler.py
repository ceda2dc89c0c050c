"""Row i is a fixed function of (documents, length, seed, i); over an epoch every token is a target exactly once."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data import Sampler, TokenSet, make_batch
from atoll.data.loader import IGNORED, permutation

BOS, EOS, PAD = 0, 1, 2


def token_set(sizes: list[int]) -> TokenSet:
    """Documents of `sizes` text tokens, every text token another id, so that each can be told from all others."""
    total = sum(sizes)
    flat, at = [], 3
    for size in sizes:
        flat += [BOS, *range(at, at + size), EOS]
        at += size
    lengths = np.asarray(sizes, dtype=np.int64)
    table = np.concatenate([[0, 0, 0], 1 + np.arange(total) % 5]).astype(np.int64)
    doc_bytes = np.asarray([table[3 + s : 3 + e].sum() for s, e in _ranges(sizes)], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths + 2)]).astype(np.int64)
    return TokenSet(np.asarray(flat, np.uint16), offsets, doc_bytes, [f"d{i}" for i in range(len(sizes))], table, BOS, EOS, PAD)


def _ranges(sizes: list[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(sizes).tolist()
    return list(zip([0, *ends], ends, strict=False))


def targets(sampler: Sampler, rows: int) -> Counter:
    found: Counter = Counter()
    for i in range(rows):
        ids, starts = sampler[i]
        found.update(np.delete(ids, starts).tolist())
    return found


SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(2, 17), st.integers(0, 5))
def test_every_token_is_a_target_exactly_once_an_epoch(sizes, length, seed):
    data = token_set(sizes)
    sampler = Sampler(data, length, seed)
    epochs = length - 1  # after so many the rows end where an epoch ends, in the stream of short pieces too
    found = targets(sampler, round(epochs * sampler.epoch_rows))
    assert found[EOS] == epochs * len(sizes)
    assert found[BOS] == 0
    for token in range(3, 3 + sum(sizes)):
        assert found[token] == epochs


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(2, 17))
def test_segments_are_stretches_of_one_document(sizes, length):
    data = token_set(sizes)
    sampler = Sampler(data, length, 0)
    where = {t: d for d, (s, e) in enumerate(_ranges(sizes)) for t in range(3 + s, 3 + e)}
    for i in range(8):
        ids, starts = sampler[i]
        assert ids.dtype == np.int64
        assert len(ids) == length
        assert starts[0] == 0
        for segment in np.split(ids, starts[1:]):
            body = [t for t in segment.tolist() if t > PAD]
            assert len({where[t] for t in body}) <= 1
            assert body == list(range(body[0], body[0] + len(body))) if body else True
            assert BOS not in segment[1:]
            assert EOS not in segment[:-1]


def test_a_piece_that_continues_begins_with_the_token_before_it():
    sampler = Sampler(token_set([20]), 6, 0)  # 22 ids
    starts, sizes = sampler._pieces()
    assert starts.tolist() == [0, 5, 10, 15, 20]
    assert sizes.tolist() == [6, 6, 6, 6, 2]


def test_a_piece_of_full_length_is_a_row_of_its_own():
    sampler = Sampler(token_set([62, 30, 62]), 22, 4)  # 3, 1 and 3 pieces of 22 ids, and one of 11
    rows = [sampler[i] for i in range(7)]
    whole = [ids for ids, starts in rows if len(starts) == 1]
    assert sorted(ids[1] for ids in whole) == [3, 3 + 21, 3 + 42, 65, 95, 95 + 21, 95 + 42]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 300))
def test_any_batch_split_gives_the_same_rows(splits, start):
    data = token_set([5, 30, 1, 17, 64, 9])
    whole = make_batch(Sampler(data, 16, 3), start, sum(splits))
    parts, at, bounds, num_bytes = [], start, [np.zeros(1, np.int64)], 0
    for count in splits:
        part = make_batch(Sampler(data, 16, 3), at, count)  # a fresh sampler: as after a resume
        bounds.append(part.cu_seqlens.numpy()[1:] + (at - start) * 16)
        parts.append(part)
        num_bytes += part.num_bytes
        at += count
    assert torch.equal(torch.cat([p.input_ids for p in parts], 1), whole.input_ids)
    assert torch.equal(torch.cat([p.labels for p in parts], 1), whole.labels)
    assert np.array_equal(np.concatenate(bounds), whole.cu_seqlens.numpy())
    assert num_bytes == whole.num_bytes


def test_rows_do_not_depend_on_what_was_read_before():
    data = token_set([5, 30, 1, 17, 64, 9])
    sampler = Sampler(data, 8, 1)
    forward = [sampler[i][0].tolist() for i in range(200)]
    for i in (199, 0, 57, 3, 198):
        assert sampler[i][0].tolist() == forward[i] == Sampler(data, 8, 1)[i][0].tolist()
    assert len(sampler._orders) <= 4


def test_epochs_and_seeds_reshuffle():
    data = token_set([9] * 50)
    rows = int(Sampler(data, 11, 0).epoch_rows)
    first = [Sampler(data, 11, 0)[i][0].tolist() for i in range(20)]
    assert first != [Sampler(data, 11, 1)[i][0].tolist() for i in range(20)]
    assert first != [Sampler(data, 11, 0)[rows + i][0].tolist() for i in range(20)]


def test_a_batch_mixes_documents():
    """Routed experts go out of balance on batches of one document (must hold 6)."""
    data = token_set([1000] * 60)
    for start in (0, 16, 1600):
        batch = make_batch(Sampler(data, 512, 0), start, 16)
        documents = [int(t - 3) // 1000 for t in batch.input_ids.flatten() if t > PAD]
        assert len(set(documents)) >= 12
        assert max(Counter(documents).values()) <= 16 * 512 // 4


def test_a_batch_masks_every_first_token_and_nothing_else():
    data = token_set([5, 30, 1, 17, 0, 64, 9])
    batch = make_batch(Sampler(data, 16, 3), 5, 7)
    ids, labels, bounds = batch.input_ids, batch.labels, batch.cu_seqlens
    assert ids.shape == labels.shape == (1, 7 * 16)
    assert ids.dtype == labels.dtype == bounds.dtype == torch.int64
    assert (int(bounds[0]), int(bounds[-1])) == (0, 7 * 16)
    assert (bounds.diff() > 0).all()
    assert set(range(0, 113, 16)) <= set(bounds.tolist())
    masked = torch.zeros(112, dtype=torch.bool)
    masked[bounds[:-1]] = True
    assert torch.equal(labels[0] == IGNORED, masked)
    assert torch.equal(labels[0][~masked], ids[0][~masked])
    assert batch.num_bytes == int(data.token_bytes[ids[0][~masked].numpy()].sum())
    assert PAD not in ids


def test_an_order_is_a_permutation_that_does_not_change_between_versions():
    assert permutation(8, 0, 0).tolist() == [1, 4, 5, 7, 2, 3, 6, 0]
    for size in (0, 1, 1000):
        assert sorted(permutation(size, 12, 3).tolist()) == list(range(size))
    assert permutation(100, 1, 0).tolist() != permutation(100, 0, 1).tolist()
    spread = np.mean([permutation(1000, s, 0)[0] for s in range(400)])
    assert 450 < spread < 550


def test_impossible_samplers_are_refused():
    with pytest.raises(ValueError, match="length = 1"):
        Sampler(token_set([3]), 1, 0)
    with pytest.raises(ValueError, match="at least one document"):
        Sampler(token_set([]), 8, 0)
    with pytest.raises(IndexError, match="-1"):
        Sampler(token_set([3]), 8, 0)[-1]
