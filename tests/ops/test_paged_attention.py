"""Absorbed attention over pages against the step over whole rows: tables in any order, splits, padding, and joined parts."""

from __future__ import annotations

import pytest
import torch

from atoll.ops.attention import latent_attention_step
from atoll.ops.paged_attention import merge_attention, paged_latent_attention

PAGE, WIDTH, SHARED, HEADS = 8, 6, 3, 2


def case(lengths: list[int], steps: int, seed: int = 0):
    """Queries, a pool of pages in random order with rubbish where nothing was written, the table, and the rows as they are."""
    g = torch.Generator().manual_seed(seed)
    need = [-(-n // PAGE) for n in lengths]
    order = (torch.randperm(sum(need) + 3, generator=g) + 1).tolist()
    pages = torch.full((len(order) + 1, PAGE, WIDTH + SHARED), 7e4, dtype=torch.float64)
    table = torch.zeros(len(lengths), max(need) + 1, dtype=torch.int64)
    rows = torch.randn(len(lengths), max(lengths), WIDTH + SHARED, generator=g, dtype=torch.float64)
    for i, n in enumerate(lengths):
        for p in range(need[i]):
            table[i, p] = order.pop()
            part = rows[i, p * PAGE : min((p + 1) * PAGE, n)]
            pages[table[i, p], : len(part)] = part
    q = torch.randn(len(lengths), steps, HEADS, WIDTH + SHARED, generator=g, dtype=torch.float64)
    return q, pages, table, rows


@pytest.mark.parametrize("split", [1, 2, 64])
@pytest.mark.parametrize(("lengths", "steps"), [([1], 1), ([8, 9, 1, 40], 1), ([5, 30, 17], 4), ([8, 16], 8)])
def test_pages_are_rows(lengths, steps, split):
    q, pages, table, rows = case(lengths, steps)
    n = torch.tensor(lengths)
    out, lse = paged_latent_attention(q, pages, table, n, width=WIDTH, scale=0.4, split=split)
    expected = latent_attention_step(q[..., :WIDTH], q[..., WIDTH:], rows[..., :WIDTH], rows[..., WIDTH:], n, scale=0.4)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    scores = torch.einsum("bthc,bsc->bths", q, rows) * 0.4
    seen = torch.arange(rows.shape[1]) < (n[:, None] - steps + 1 + torch.arange(steps))[..., None]
    torch.testing.assert_close(lse, scores.masked_fill(~seen[:, :, None], -torch.inf).logsumexp(-1), rtol=0, atol=1e-12)


def test_a_row_longer_than_a_split_of_pages_and_a_row_in_the_first():
    q, pages, table, rows = case([PAGE * 70, 3], 1)
    n = torch.tensor([PAGE * 70, 3])
    out, _ = paged_latent_attention(q, pages, table, n, width=WIDTH, scale=0.4)
    expected = latent_attention_step(q[..., :WIDTH], q[..., WIDTH:], rows[..., :WIDTH], rows[..., WIDTH:], n, scale=0.4)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_padding_sees_what_the_last_real_token_sees_and_nothing_else():
    q, pages, table, _ = case([20, 12], 4)
    n, counts = torch.tensor([20, 12]), torch.tensor([2, 4])
    q[0, 2:] = q[0, 1]
    out, _ = paged_latent_attention(q, pages, table, n, width=WIDTH, scale=0.4, counts=counts)
    assert torch.equal(out[0, 2], out[0, 3])
    torch.testing.assert_close(out[0, 2], out[0, 1], rtol=0, atol=1e-12)
    pages[table[0, 2], 2:] = -9e4  # positions 18 and 19: past the two real tokens
    again, _ = paged_latent_attention(q, pages, table, n, width=WIDTH, scale=0.4, counts=counts)
    assert torch.equal(again, out)


def test_parts_join_to_the_whole_and_empty_ones_add_nothing():
    g = torch.Generator().manual_seed(0)
    scores, values = torch.randn(5, 30, generator=g, dtype=torch.float64) * 20, torch.randn(30, 4, generator=g, dtype=torch.float64)
    cuts = [(0, 7), (7, 8), (8, 30)]
    outs = [scores[:, a:b].softmax(-1) @ values[a:b] for a, b in cuts]
    lses = [scores[:, a:b].logsumexp(-1) for a, b in cuts]
    nothing = torch.full((5,), -torch.inf, dtype=torch.float64)
    out, lse = merge_attention([*outs, torch.zeros(5, 4, dtype=torch.float64)], [*lses, nothing])
    torch.testing.assert_close(out, scores.softmax(-1) @ values, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)
    empty, lse = merge_attention([torch.zeros(5, 4)] * 2, [torch.full((5,), -torch.inf)] * 2)
    assert empty.eq(0).all()
    assert lse.eq(-torch.inf).all()


def test_low_precision_is_summed_in_float32():
    q, pages, table, _ = case([40, 9], 1)
    q, pages = q.bfloat16(), pages.clamp(-9, 9).bfloat16()
    out, lse = paged_latent_attention(q, pages, table, torch.tensor([40, 9]), width=WIDTH, scale=0.4)
    exact, _ = paged_latent_attention(q.double(), pages.double(), table, torch.tensor([40, 9]), width=WIDTH, scale=0.4)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.03)
