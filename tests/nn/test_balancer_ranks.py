"""Two gloo ranks with disjoint data: one bias on both after every step, equal to the bit to one process with all of the data."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from atoll.nn import BalanceConfig, Balancer, LatentMoE, Routing

RULES = {
    "quantile": BalanceConfig(),
    "ema": BalanceConfig(ema=0.5),
    "local_quantile": BalanceConfig(kind="local_quantile"),
    "sign": BalanceConfig(kind="sign"),
    "aux": BalanceConfig(kind="aux"),
    "none": BalanceConfig(kind="none"),
    "late quantile": BalanceConfig(asynchronous=True),
    "late sign": BalanceConfig(kind="sign", asynchronous=True),
}
STEPS = 6


class Tower(nn.Module):
    """Three layers of experts, nothing else."""

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(LatentMoE(16, 8, 12, 3, 8, balance=config, init_std=0.3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=mask, routing=Routing())
        return x

    def bias(self) -> torch.Tensor:
        return torch.stack([layer.gate.e_score_correction_bias for layer in self.layers])


def micro_batches(step: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's data of a step: another number of micro-batches and of padding on each; in step 3 rank 1 has none that counts."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for _ in range(1 + rank):
        x = torch.randn(48 + 16 * rank, 16, generator=generator, dtype=torch.float64) + 0.4
        mask = torch.rand(len(x), generator=generator) < (0.8 if (step, rank) != (3, 1) else 0.0)
        found.append((x, mask))
    return found


def train(config: BalanceConfig, ranks: list[int], group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """The bias that each forward pass routes with, [passes, layers, E], and after each step; and how many sums were asked for."""
    tower, calls = Tower(config).train(), 0

    def reduce(counts: torch.Tensor) -> dist.Work | None:
        nonlocal calls
        calls += 1
        return dist.all_reduce(counts, group=group, async_op=True)

    balancer = Balancer(tower, None if group is None else reduce)
    routed, after, share = [], [], []
    for step in range(STEPS):
        for rank in ranks:
            for x, mask in micro_batches(step, rank):
                if group is not None and (step + rank) % 2:  # now one rank is late, now the other
                    time.sleep(0.03)
                routed.append(tower.bias())
                tower(x, mask)
                routed.append(tower.bias())
        balancer.step()
        after.append(tower.bias())
        share.append(torch.stack([layer.balance.share for layer in tower.layers]) if config.kind == "aux" else torch.zeros(3, 12))
    return {"routed": torch.stack(routed), "after": torch.stack(after), "share": torch.stack(share), "calls": torch.tensor(calls)}


def job() -> dict[str, dict[str, torch.Tensor]]:
    found = {name: train(config, [dist.get_rank()], dist.group.WORLD) for name, config in RULES.items()}
    tower = Tower(BalanceConfig()).train()
    for x, mask in micro_batches(0, dist.get_rank()):
        tower(x, mask)
    Balancer(tower, dist.group.WORLD).step()  # a process group in place of a function
    return {**found, "by group": {"after": tower.bias()}}


@pytest.fixture(scope="module")
def both() -> list[dict[str, dict[str, torch.Tensor]]]:
    return on_ranks(2, job)


@pytest.mark.parametrize("name", RULES)
def test_two_ranks_are_one_process_with_all_the_data(both, name):
    ours, theirs = (rank[name] for rank in both)
    alone = train(RULES[name], [0, 1], None)
    for key in ("after", "share"):
        assert torch.equal(ours[key], theirs[key]), key
        assert torch.equal(ours[key], alone[key]), key
    assert int(ours["calls"]) == STEPS, "one sum a step, whatever the number of layers"
    if RULES[name].kind in ("quantile", "local_quantile", "sign"):
        moved = [bool((a != b).any()) for a, b in zip(ours["after"][1:], ours["after"][:-1], strict=True)]
        assert all(moved)
    elif RULES[name].kind == "aux":
        assert float((ours["share"][-1] - 1 / 12).abs().max()) > 0.01
    else:
        assert not ours["after"].any()


@pytest.mark.parametrize("name", RULES)
def test_no_rank_ever_routes_with_anothers_bias(both, name):
    """Before and after every forward pass, though now one rank is late and now the other: the bias of this step, on both."""
    first, second = (rank[name]["routed"] for rank in both)
    by_step = [first.view(STEPS, 2, 3, 12), second.view(STEPS, 4, 3, 12)]
    for ours, theirs in zip(*by_step, strict=True):
        assert all(torch.equal(bias, ours[0]) for bias in (*ours, *theirs))
    if RULES[name].asynchronous:
        assert not by_step[0][:2].any()
        assert by_step[0][2].any()


def test_a_process_group_will_do(both):
    assert torch.equal(both[0]["by group"]["after"], both[0]["quantile"]["after"][0])
    assert torch.equal(both[1]["by group"]["after"], both[0]["quantile"]["after"][0])
