"""Two joined parts equal one masked softmax: outputs and gradients, in float64 and in bfloat16; what is masked moves nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.ops.attention import causal_attention
from atoll.ops.prefix_attention import prefix_attention


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(queries + keys)
    return (
        torch.randn(2, queries, 3, 12, dtype=dtype, requires_grad=True),
        torch.randn(2, keys, 3, 12, dtype=dtype, requires_grad=True),
        torch.randn(2, keys, 3, 8, dtype=dtype, requires_grad=True),
    )


@pytest.mark.parametrize(("queries", "keys"), [(5, 6), (1, 9), (16, 17), (7, 40), (33, 64)])
def test_equals_one_masked_softmax(queries: int, keys: int) -> None:
    q, k, v = inputs(queries, keys)
    grad = torch.randn(2, queries, 3, 8, dtype=torch.float64)
    out = prefix_attention(q, k, v, scale=0.3)
    found = torch.autograd.grad(out, (q, k, v), grad)
    whole = causal_attention(q, k, v, scale=0.3, offset=keys - queries)
    torch.testing.assert_close(out, whole, atol=1e-12, rtol=1e-12)
    for mine, theirs in zip(found, torch.autograd.grad(whole, (q, k, v), grad), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


def test_gradients_by_differences() -> None:
    q, k, v = inputs(3, 7)
    assert torch.autograd.gradcheck(lambda *x: prefix_attention(*x, scale=0.5), (q, k, v))


def test_bfloat16_is_near_float64() -> None:
    q, k, v = inputs(20, 50, torch.bfloat16)
    exact = prefix_attention(*(t.detach().double() for t in (q, k, v)), scale=0.3)
    out = prefix_attention(q, k, v, scale=0.3)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()) < 5e-3


def test_a_later_key_moves_no_bit() -> None:
    q, k, v = inputs(6, 10)
    before = prefix_attention(q, k, v, scale=1.0)
    with torch.no_grad():
        k[:, -1] += 3
        v[:, -1] = 1e6
    assert torch.equal(prefix_attention(q, k, v, scale=1.0)[:, :-1], before[:, :-1])


def test_no_prefix() -> None:
    q, k, v = inputs(6, 6)
    with pytest.raises(ValueError, match="more keys than queries"):
        prefix_attention(q, k, v, scale=1.0)
