"""Segments on a card: cuDNN's two parts against float64, and a segmented step in bfloat16 against the whole row's."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: no device is visible to torch")

from gpu.card import ratio  # noqa: E402

from atoll.ops.prefix_attention import prefix_attention  # noqa: E402


@pytest.mark.parametrize(("queries", "keys"), [(256, 512), (1000, 3001), (64, 8192), (2048, 2049)])
def test_two_parts_of_cudnn_against_float64(queries, keys):
    torch.manual_seed(0)
    shapes = ((1, queries, 4, 192), (1, keys, 4, 192), (1, keys, 4, 128))
    given = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    exact = [t.detach().double().requires_grad_() for t in given]
    grad = torch.randn(1, queries, 4, 128, device="cuda", dtype=torch.bfloat16)
    out, whole = prefix_attention(*given, scale=192**-0.5), prefix_attention(*exact, scale=192**-0.5, fused=False)
    assert ratio(out, whole) < 5e-3
    found = torch.autograd.grad(out, given, grad)
    for mine, theirs in zip(found, torch.autograd.grad(whole, exact, grad.double()), strict=True):
        assert ratio(mine, theirs) < 1e-2


@pytest.mark.parametrize("recompute", [False, True])
def test_a_segmented_step_is_near_the_whole_rows(recompute):
    import atoll
    from atoll.train.segments import Segments, Weights, accumulate_rows

    torch.manual_seed(0)
    model = atoll.load("tiny", dtype=torch.bfloat16, device="cuda").train()
    model.gradient_checkpointing = recompute
    ids = torch.randint(3, 4096, (1, 4096), device="cuda")
    bounds = torch.tensor([0, 700, 4096], device="cuda")
    out = model(ids, labels=ids, cu_seqlens=bounds)
    out.loss.backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = accumulate_rows(model, ids, ids, bounds, Segments(4096, 1024), Weights(4094, 4096))
    assert abs(float(loss) - float(out.loss)) < 2e-2
    for name, grad in whole.items():
        if ".experts." not in name and "gate" not in name:  # near-tied experts change places between batch shapes
            mine = dict(model.named_parameters())[name].grad
            assert ratio(mine, grad) < 0.15, name
