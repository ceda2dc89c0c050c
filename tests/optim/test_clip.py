"""Clips: gradients by their global norm, attention weights by their logits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from atoll.optim.clip import qk_clip

HEADS, NOPE, ROPE, V, RANK = 3, 4, 2, 5, 6


class Attention(nn.Module):
    """Just the weights of an MLA layer, and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.nope_dim, self.rope_dim, self.v_dim = HEADS, NOPE, ROPE, V
        self.q_b_proj = nn.Linear(RANK, HEADS * (NOPE + ROPE), bias=False, dtype=torch.float64)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + V), bias=False, dtype=torch.float64)
        self.max_logit: torch.Tensor | None = None

    def logits(self, q: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        query = self.q_b_proj(q).view(-1, HEADS, NOPE + ROPE)
        key = self.kv_b_proj(latent).view(-1, HEADS, NOPE + V)[..., :NOPE]
        key = torch.cat([key, shared[:, None].expand(-1, HEADS, -1)], -1)
        return torch.einsum("thd,shd->hts", query, key)


def test_every_logit_of_a_hot_head_shrinks_by_gamma_and_values_stay() -> None:
    torch.manual_seed(0)
    layer = Attention()
    inputs = torch.randn(7, RANK).double(), torch.randn(7, RANK).double(), torch.randn(7, ROPE).double()
    before = layer.logits(*inputs).detach()
    values = layer.kv_b_proj.weight.view(HEADS, NOPE + V, RANK)[:, NOPE:].detach().clone()
    layer.max_logit = before.amax((1, 2))
    limit = float(layer.max_logit.sort().values[1])  # one head above, one at, one below
    qk_clip(layer, limit)
    gamma = (limit / layer.max_logit).clamp(max=1)
    after = layer.logits(*inputs).detach()
    torch.testing.assert_close(after, before * gamma[:, None, None], atol=1e-12, rtol=1e-12)
    assert float(after.max()) == pytest.approx(limit)
    assert torch.equal(values, layer.kv_b_proj.weight.view(HEADS, NOPE + V, RANK)[:, NOPE:].detach())


@pytest.mark.parametrize("logit", [float("nan"), float("inf"), 0.0, -3.0, 99.0])
def test_leaves_weights_alone_when_nothing_is_to_clip(logit: float) -> None:
    layer = Attention()
    before = [p.detach().clone() for p in layer.parameters()]
    qk_clip(layer, 100.0)
    layer.max_logit = torch.full((HEADS,), logit)
    qk_clip(layer, 100.0)
    layer.max_logit = torch.full((HEADS,), 1000.0)
    qk_clip(layer, 100.0, skip=torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_masters_shrink_with_their_weights() -> None:
    layer = Attention().to(torch.bfloat16)
    masters = {p: p.detach().float() for p in layer.parameters()}
    before = {p: m.clone() for p, m in masters.items()}
    layer.max_logit = torch.full((HEADS,), 400.0)
    qk_clip(layer, 100.0, masters)
    query = layer.q_b_proj.weight
    torch.testing.assert_close(masters[query].view(HEADS, -1, RANK)[:, :NOPE], before[query].view(HEADS, -1, RANK)[:, :NOPE] * 0.5)
    torch.testing.assert_close(masters[query].view(HEADS, -1, RANK)[:, NOPE:], before[query].view(HEADS, -1, RANK)[:, NOPE:] * 0.25)
    assert all(torch.equal(p, masters[p].bfloat16()) for p in layer.parameters())


def test_a_layer_without_logits_is_left_alone() -> None:
    qk_clip(SimpleNamespace(max_logit=None), 1.0)
    layer = Attention()
    assert layer.max_logit is None
