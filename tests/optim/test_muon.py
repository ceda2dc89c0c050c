"""Muon against golden values, and its bookkeeping."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.optim import Blocks, Muon, newton_schulz

GOLDEN = Path(__file__).parents[1] / "golden" / "muon"
CASES = ("wide_blocks", "tall_blocks", "square_blocks", "full_wide")


@pytest.mark.parametrize("variant", ["plain", "nesterov"])
@pytest.mark.parametrize("split", ["full", "per_head"])
@pytest.mark.parametrize("case", CASES)
def test_step_equals_golden(case: str, split: str, variant: str) -> None:
    g = load_file(GOLDEN / f"{case}.safetensors")
    heads = int(g["num_heads"]) if split == "per_head" else 1
    weight = torch.nn.Parameter(g["weight"].clone())
    optimizer = Muon(
        [{"params": [weight], "blocks": [Blocks(heads, (weight.shape[0] // heads,))]}],
        lr=float(g["lr"]),
        weight_decay=float(g["weight_decay"]),
        momentum=float(g["momentum_coef"]),
        nesterov=variant == "nesterov",
    )
    optimizer.state[weight]["momentum"].copy_(g["momentum"])
    weight.grad = g["grad"].clone()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["momentum"].double(), g["momentum_out"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(weight.detach().double(), g[f"{variant}.{split}.new_weight"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_newton_schulz_equals_golden(case: str) -> None:
    g = load_file(GOLDEN / f"{case}.safetensors")
    heads = int(g["num_heads"])
    u = g["momentum_out"]
    blocks = u.view(heads, -1, u.shape[-1])
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        ortho = newton_schulz(blocks.to(dtype)).reshape(u.shape).double()
        torch.testing.assert_close(ortho, g["plain.per_head.ortho"], atol=limit, rtol=0)


def test_blocks_split_keys_from_values() -> None:
    kv = torch.arange(2 * 5 * 3.0).view(10, 3)  # two heads, each of two key rows and three value rows
    keys, values = Blocks(2, (2, 3)).split(kv)
    assert torch.equal(keys, torch.stack([kv[0:2], kv[5:7]]))
    assert torch.equal(values, torch.stack([kv[2:5], kv[7:10]]))


def test_batching_over_shapes_equals_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.optim import muon

    torch.manual_seed(0)
    shapes = [(8, 6), (6, 8), (3, 4, 6), (8, 6), (2, 8, 6)]
    starts = [torch.randn(s) for s in shapes]
    grads = [torch.randn(s) for s in shapes]

    def after(groups: list[list[int]]) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(s.clone()) for s in starts]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        for indices in groups:
            Muon([params[i] for i in indices], lr=0.1).step()
        return [p.detach() for p in params]

    together = after([[0, 1, 2, 3, 4]])
    for a, b in zip(together, after([[0], [1], [2], [3], [4]]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    monkeypatch.setattr(muon, "MAX_BATCH_ELEMENTS", 50)  # forces slices inside and between stacks
    for a, b in zip(together, after([[0, 1, 2, 3, 4]]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_bfloat16_weights_keep_float32_masters() -> None:
    torch.manual_seed(0)
    exact = torch.nn.Parameter(torch.randn(8, 8).bfloat16().float())
    low = torch.nn.Parameter(exact.detach().bfloat16())
    twins = Muon([exact], lr=1e-4), Muon([low], lr=1e-4)
    for _ in range(20):
        gradient = torch.randn(8, 8).bfloat16()
        for p, optimizer in zip((exact, low), twins, strict=True):
            optimizer.zero_grad()
            (p * gradient).sum().backward()
        exact.grad = exact.grad.bfloat16().float()
        for optimizer in twins:
            optimizer.step()
    master = twins[1].param_groups[0]["params"][0]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master.detach(), exact.detach(), atol=1e-6, rtol=0)
    assert torch.equal(low.detach(), master.detach().bfloat16())


def test_state_dict_round_trip_continues_equally() -> None:
    torch.manual_seed(0)
    first = torch.nn.Parameter(torch.randn(4, 6))
    optimizer = Muon([first], lr=0.1)
    first.grad = torch.randn(4, 6)
    optimizer.step()
    second = torch.nn.Parameter(first.detach().clone())
    other = Muon([second], lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, o in ((first, optimizer), (second, other)):
        p.grad = torch.full((4, 6), 0.3)
        o.step()
    assert torch.equal(first, second)


def test_refuses_what_is_not_a_matrix() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="rows"):
        Muon([{"params": [torch.nn.Parameter(torch.zeros(5, 3))], "blocks": [Blocks(2, (2,))]}])


def test_zero_gradient_gives_no_nan() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.zeros(3, 4)
    Muon([weight], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(weight.detach(), torch.ones(3, 4))
