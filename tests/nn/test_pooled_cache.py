"""Rows of a pool in the model: different lengths in one call, padding without a trace, drafts taken back."""

from __future__ import annotations

import pytest
import torch
from infer.models import build, prompt

from atoll.nn.cache import Cache, DeltaState, LatentState
from atoll.nn.pooled_cache import DeltaRows, LatentRows

PAGE, SLOTS = 64, 4


@pytest.fixture(scope="module")
def model():
    return build()


class Pool:
    """Slots 0 to 3, each with the pages 1 + 4 slot and on; filled by whole passes."""

    def __init__(self, model, texts: dict[int, list[int]]):
        self.model, self.texts = model, texts
        c, self.layers = model.config, []
        for i in range(c.num_hidden_layers):
            if c.is_kda(i):
                self.layers.append((torch.randn(SLOTS, 2, 16, 16, dtype=torch.float64), torch.randn(SLOTS, 3, 96, dtype=torch.float64)))
            else:
                self.layers.append(torch.randn(1 + 4 * SLOTS, PAGE, 20, dtype=torch.float64))
        for slot, text in texts.items():
            self.fill(slot, text)

    @torch.no_grad()
    def fill(self, slot, text):
        cache = self.model.new_cache(1)
        self.model(torch.tensor([text]), cache=cache)
        for mine, layer in zip(self.layers, cache.layers, strict=True):
            if isinstance(layer, DeltaState):
                mine[0][slot], mine[1][slot] = layer.state[0], layer.window[0]
            else:
                rows = layer.buffer[0, : layer.length]
                mine.view(-1, 20)[(1 + 4 * slot) * PAGE :][: len(rows)] = rows

    def cache(self, slots, draft=False, counts=None):
        index, lengths = torch.tensor(slots), torch.tensor([len(self.texts[s]) for s in slots])
        table = (1 + 4 * index)[:, None] + torch.arange(4)
        layers = [
            DeltaRows(*mine, index, draft) if isinstance(mine, tuple) else LatentRows(mine, table, lengths, counts) for mine in self.layers
        ]
        return Cache(len(slots), layers)


TEXTS = {0: prompt(5), 2: prompt(64, 1), 3: prompt(150, 2)}


@torch.no_grad()
def whole(model, tokens):
    return model(torch.tensor([tokens])).logits[0]


@torch.no_grad()
def test_rows_of_different_lengths_in_one_call(model):
    pool = Pool(model, dict(TEXTS))
    for step in range(4):
        slots = [3, 0, 2] if step % 2 else [0, 3]
        new = {s: 10 + 5 * s + step for s in slots}
        logits = model(torch.tensor([[new[s]] for s in slots]), cache=pool.cache(slots)).logits[:, 0]
        for row, s in enumerate(slots):
            pool.texts[s] = [*pool.texts[s], new[s]]
            torch.testing.assert_close(logits[row], whole(model, pool.texts[s])[-1], rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_draft_changes_no_slot_and_its_right_part_is_replayed(model):
    pool = Pool(model, dict(TEXTS))
    slots, tokens = [3, 0, 2], torch.tensor([[7, 8, 9, 10], [11, 12, 2, 2], [13, 14, 15, 2]])
    counts, right = torch.tensor([4, 2, 3]), [2, 0, 3]
    before = [(a.clone(), b.clone()) for a, b in (m for m in pool.layers if isinstance(m, tuple))]
    cache = pool.cache(slots, draft=True, counts=counts)
    logits = model(tokens, cache=cache).logits
    after = [m for m in pool.layers if isinstance(m, tuple)]
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    for row, (s, n) in enumerate(zip(slots, counts.tolist(), strict=True)):
        expected = whole(model, pool.texts[s] + tokens[row, :n].tolist())[-n:]
        torch.testing.assert_close(logits[row, :n], expected, rtol=0, atol=1e-9)
    model.replay(cache, torch.tensor(right))
    for row, (s, n) in enumerate(zip(slots, right, strict=True)):
        pool.texts[s] = pool.texts[s] + tokens[row, :n].tolist()
    logits = model(torch.tensor([[20], [21], [22]]), cache=pool.cache(slots)).logits[:, 0]
    for row, s in enumerate(slots):
        torch.testing.assert_close(logits[row], whole(model, [*pool.texts[s], 20 + row])[-1], rtol=0, atol=1e-9)


@torch.no_grad()
def test_other_slots_and_pages_are_not_touched(model):
    pool = Pool(model, dict(TEXTS))
    before = [tuple(t.clone() for t in m) if isinstance(m, tuple) else m.clone() for m in pool.layers]
    model(torch.tensor([[7], [8]]), cache=pool.cache([0, 3]))
    for old, new in zip(before, pool.layers, strict=True):
        if isinstance(old, tuple):
            assert all(torch.equal(a[[1, 2]], b[[1, 2]]) for a, b in zip(old, new, strict=True))
        else:
            changed = (old != new).any(-1).nonzero().tolist()
            assert changed == [[1, 5], [1 + 12 + 150 // PAGE, 150 % PAGE]]


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3, 17, 63])
def test_padding_of_a_chunk_leaves_the_state_as_after_the_real_tokens(model, count):
    start, more = prompt(64), prompt(count, 5)
    cache, padded = model.new_cache(1), model.new_cache(1)
    for c in (cache, padded):
        model(torch.tensor([start]), cache=c)
    model(torch.tensor([more]), cache=cache)
    for layer in padded.layers:
        if isinstance(layer, DeltaState):
            layer.count = count
    model(torch.tensor([more + [2] * (64 - count)]), cache=padded)
    for a, b in zip(cache.layers, padded.layers, strict=True):
        if isinstance(a, DeltaState):
            torch.testing.assert_close(a.state, b.state, rtol=0, atol=1e-12)
            torch.testing.assert_close(a.window, b.window, rtol=0, atol=1e-12)


def test_rows_cannot_be_forked():
    with pytest.raises(ValueError, match="cannot be forked"):
        Cache(1, [DeltaRows(torch.zeros(1), torch.zeros(1), torch.zeros(1))]).fork(2)
    assert isinstance(Cache(1, [LatentState()]).fork(2).layers[0], LatentState)


@torch.no_grad()
def test_logits_at_positions_and_embeddings_given(model):
    ids = torch.tensor([prompt(20)])
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits=torch.tensor([3, 19])).logits, logits[:, [3, 19]], rtol=0, atol=1e-12)
    embeds = model.language_model.model.embed_tokens(ids)
    assert torch.equal(model(torch.zeros_like(ids), embeds=embeds).logits, logits)
    with pytest.raises(ValueError, match="embeds and pixel_values"):
        model(ids, embeds=embeds, pixel_values=torch.zeros(1))
