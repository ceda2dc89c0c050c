"""Balancing in the module: every rule, accumulation, recomputation, evaluation, state, asynchrony, refusals."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from atoll.config import BalanceConfig, ConfigError, ModelConfig, load_config
from atoll.model import Model
from atoll.nn import Balancer, LatentMoE, Routing

KINDS = ("quantile", "local_quantile", "sign", "aux", "capacity", "none")
BIASED = ("quantile", "local_quantile", "sign")


def layer(balance: BalanceConfig | str = "quantile", seed: int = 0, **options) -> LatentMoE:
    torch.manual_seed(seed)
    return LatentMoE(16, 8, 12, 3, 8, balance=balance, init_std=0.3, dtype=torch.float64, **options).train()


def inputs(seed: int, tokens: int = 64) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def skewed(seed: int) -> torch.Tensor:
    """Inputs with a mean: some experts' scores are high for every token."""
    return inputs(seed, 2048) + 0.5


def bias_of(moe: LatentMoE) -> torch.Tensor:
    return moe.gate.e_score_correction_bias.clone()


def call(moe: LatentMoE, x: torch.Tensor) -> torch.Tensor:
    return moe(x, routing=Routing())


# --- rules -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_which_rules_set_a_bias_and_when(kind):
    moe = layer(kind)
    balancer = Balancer(moe)
    call(moe, inputs(0))
    assert int(moe.load.sum()) == 64 * 3
    assert torch.equal(bias_of(moe), torch.zeros(12, dtype=torch.float64)), "a batch is never routed with a bias made of itself"
    report = balancer.step()
    assert (bias_of(moe) != 0).any() == (kind in BIASED)
    assert moe.load is None
    assert report["max_vio"][0] > 0
    moe.eval()
    call(moe, inputs(1))
    before = bias_of(moe)
    assert not any(balancer.step().values())
    assert torch.equal(bias_of(moe), before), "frozen in evaluation"


@pytest.mark.parametrize("kind", ["quantile", "local_quantile"])
def test_ema_keeps_its_share_of_the_old_bias(kind):
    plain, slow = layer(kind), layer(BalanceConfig(kind=kind, ema=0.75))
    for moe in (plain, slow):
        moe.gate.e_score_correction_bias.copy_(torch.linspace(-0.11, 0.11, 12))
        call(moe, inputs(0))
        moe.balance_step()
    start = torch.linspace(-0.11, 0.11, 12).double()
    torch.testing.assert_close(bias_of(slow), 0.75 * start + 0.25 * bias_of(plain))
    assert abs(float(bias_of(slow).mean())) < 1e-12


@pytest.mark.parametrize("kind", BIASED)
def test_the_loop_levels_skewed_experts(kind):
    """The sign rule needs a hundred steps at its rate where the quantiles need one."""
    moe = layer(BalanceConfig(kind=kind, sign_rate=5e-3 if kind == "sign" else None))
    balancer = Balancer(moe)
    worst = []
    for step in range(120 if kind == "sign" else 4):
        call(moe, skewed(step))
        worst.append(balancer.step()["max_vio"][0])
    assert worst[0] > 0.8
    assert worst[-1] < 0.3 * worst[0], worst


def test_capacity_drops_in_order_and_leaves_the_shared_expert():
    moe = layer(BalanceConfig(kind="capacity", capacity_factor=0.5), shared=1)
    x = inputs(0, 96)
    x[:, :] = x[0]  # all tokens want the same three experts: each has room for ceil(0.5 * 96 * 3 / 12) = 12
    out = call(moe, x)
    assert torch.equal(out[12:], moe.shared_experts(x)[12:].expand_as(out[12:]))
    assert (out[:12] - moe.shared_experts(x)[:12]).abs().max() > 1e-3
    report = Balancer(moe).step()
    assert report["dropped"] == [pytest.approx((96 - 12) / 96)]
    assert report["bare"] == [96 - 12]
    assert report["dead"] == [pytest.approx(9 / 12)]
    moe.eval()
    served = call(moe, x)
    assert torch.allclose(served, served[:1].expand_as(served), rtol=0, atol=1e-12), "nothing is dropped in evaluation"
    assert torch.allclose(served[:12], out[:12], rtol=0, atol=1e-12)


def test_dropped_choices_send_no_gradient_to_their_expert():
    moe = layer(BalanceConfig(kind="capacity", capacity_factor=0.01))
    route = Routing()
    moe(inputs(0), routing=route).square().sum().backward()
    first = torch.zeros(12, dtype=torch.bool)
    first[route.ids.flatten().unique()] = True  # an expert keeps one token: ceil(0.01 * 64 * 3 / 12) = 1
    assert torch.equal(moe.experts.w1.grad.abs().amax((1, 2)) > 0, first)
    assert int(moe.balance.tally.lost[0]) == 64 * 3 - int(first.sum())


def test_the_auxiliary_loss_takes_its_load_from_the_step_before():
    moe = layer(BalanceConfig(kind="aux", aux_coefficient=0.5))
    route = Routing()
    moe(inputs(0), routing=route)
    assert route.balance_loss.item() == pytest.approx(0.5, rel=1e-12), "level until a step was counted"
    load = moe.load.double()
    assert Balancer(moe).step()["balance_loss"] == [pytest.approx(0.5)]
    moe(inputs(1), routing=(again := Routing()))
    scores = moe.gate(inputs(1))
    part = scores / scores.sum(1, keepdim=True)
    expected = 0.5 * 12 * ((load / load.sum()) * part.mean(0)).sum()
    assert again.balance_loss.item() == pytest.approx(expected.item(), rel=1e-12)
    again.balance_loss.backward()
    assert moe.gate.weight.grad.abs().sum() > 0
    assert moe.experts.w1.grad is None
    moe.eval()
    moe(inputs(1), routing=(quiet := Routing()))
    assert quiet.balance_loss is None


def test_a_lost_auxiliary_loss_is_refused():
    moe = layer("aux")
    with pytest.raises(ValueError, match="add its balance_loss to the loss"):
        moe(inputs(0))
    with torch.no_grad():
        moe(inputs(0))


# --- whole model: accumulation, recomputation --------------------------------------------------------------------------------------

SMALL = ModelConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, kda_num_heads=2, kda_head_dim=8, q_lora_rank=8,
    kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=24, num_experts=12, num_experts_per_token=3,
    moe_intermediate_size=8, routed_expert_hidden_size=8, initializer_range=0.2,
)  # fmt: skip


def build(balance: BalanceConfig, **changes) -> Model:
    torch.manual_seed(0)
    return Model(dataclasses.replace(SMALL, **changes), balance, dtype=torch.float64).train()


def tokens(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, (rows, 16), generator=torch.Generator().manual_seed(seed))


def backward(model: Model, ids: torch.Tensor, share: float = 1.0, routing=None) -> None:
    out = model(ids, labels=ids, routing=routing)
    loss = out.loss if out.balance_loss is None else out.loss + out.balance_loss
    (loss * share).backward()


def gradients(model: Model) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_neither_gradient_nor_count(kind):
    plain, saving = build(BalanceConfig(kind=kind)), build(BalanceConfig(kind=kind))
    saving.gradient_checkpointing = True
    for step in range(2):
        for model in (plain, saving):
            model.zero_grad()
            backward(model, tokens(4, step))
        for a, b in zip(gradients(plain), gradients(saving), strict=True):
            assert torch.equal(a, b)
        assert plain.balance_step() == saving.balance_step()
        for a, b in zip(plain.moe_layers(), saving.moe_layers(), strict=True):
            assert torch.equal(a.gate.e_score_correction_bias, b.gate.e_score_correction_bias)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_users_own_checkpointing_counts_once(reentrant):
    moe = layer()
    x = inputs(0).requires_grad_()
    checkpoint(moe, x, use_reentrant=reentrant).square().sum().backward()
    assert x.grad.abs().sum() > 0
    assert int(moe.load.sum()) == 64 * 3
    assert int(moe.counts().sum()) == 64 * 12


@pytest.mark.parametrize("kind", ["quantile", "sign", "aux"])
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_gives_the_same_bias_and_gradient(kind, parts):
    """Experts replayed for the gradients, since near ties may flip with the shape of a batch."""
    whole, split = build(BalanceConfig(kind=kind)), build(BalanceConfig(kind=kind))
    for step in range(2):
        ids = tokens(8, step)
        with torch.no_grad():
            routing = whole(ids).routing
            for moe in whole.moe_layers():
                moe.balance.take()  # counted below, as in a step
        whole.zero_grad()
        split.zero_grad()
        backward(whole, ids, routing=routing)
        for part, some in zip(ids.chunk(parts), zip(*(r.chunk(parts) for r in routing), strict=True), strict=True):
            backward(split, part, 1 / parts, routing=list(some))
        for a, b in zip(gradients(whole), gradients(split), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            whole(ids)
            for part in ids.chunk(parts):
                split(part)
        a, b = whole.balance_step(), split.balance_step()
        assert {n: v for n, v in a.items() if n != "balance_loss"} == {n: v for n, v in b.items() if n != "balance_loss"}
        assert a["balance_loss"] == pytest.approx(b["balance_loss"], rel=1e-12)
        for mine, theirs in zip(whole.moe_layers(), split.moe_layers(), strict=True):
            assert torch.equal(mine.gate.e_score_correction_bias, theirs.gate.e_score_correction_bias)
            if kind == "aux":
                assert torch.equal(mine.balance.share, theirs.balance.share)


def test_the_held_out_loss_has_no_auxiliary_part():
    with_aux, without = build(BalanceConfig(kind="aux")), build(BalanceConfig(kind="none"))
    ids = tokens(4)
    with_aux(ids)
    with_aux.balance_step()
    trained = with_aux(ids, labels=ids)
    assert trained.balance_loss > 0
    assert torch.equal(trained.loss, without(ids, labels=ids).loss), "nor has the training loss: it is beside it"
    assert with_aux.eval()(ids, labels=ids).balance_loss is None


# --- state -------------------------------------------------------------------------------------------------------------------------

ALL = [BalanceConfig(kind=kind) for kind in KINDS] + [
    BalanceConfig(bins=None),
    BalanceConfig(ema=0.5),
    BalanceConfig(kind="aux", capacity_factor=1.0),
    *(BalanceConfig(kind=kind, asynchronous=True) for kind in BIASED),
]


@pytest.mark.parametrize("config", ALL, ids=str)
def test_resume_in_the_middle_of_accumulation_is_exact(config):
    """Two of four micro-batches, everything saved and read into a new layer, the other two: as if nothing had happened."""
    straight, stopped = layer(config), layer(config)
    runs = {"straight": Balancer(straight), "stopped": Balancer(stopped)}
    for moe, balancer in zip((straight, stopped), runs.values(), strict=True):
        for step in range(2):
            call(moe, inputs(step))
            balancer.step()
        call(moe, inputs(10))
        call(moe, inputs(11))
    saved = {n: t.clone() for n, t in runs["stopped"].state().items()}
    weights = copy.deepcopy(stopped.state_dict())
    resumed = layer(config, seed=1)
    resumed.load_state_dict(weights)
    again = Balancer(resumed)
    again.load_state(saved)
    for moe in (straight, resumed):
        call(moe, inputs(12))
        call(moe, inputs(13))
    assert runs["straight"].step() == again.step()
    for step in range(20, 23):
        assert torch.equal(bias_of(straight), bias_of(resumed))
        for moe in (straight, resumed):
            call(moe, inputs(step))
        assert runs["straight"].step() == again.step()
    assert runs["straight"].state().keys() == again.state().keys()


@pytest.mark.parametrize("config", [c for c in ALL if not c.asynchronous], ids=str)
def test_a_skipped_step_changes_no_bit(config):
    moe = layer(config)
    balancer = Balancer(moe)
    call(moe, inputs(0))
    balancer.step()
    before, state = bias_of(moe), {n: t.clone() for n, t in balancer.state().items()}
    call(moe, inputs(1) * float("nan"))
    balancer.step(skip=torch.ones(()))
    assert torch.equal(bias_of(moe), before)
    assert all(torch.equal(t, state[n]) for n, t in balancer.state().items())
    call(moe, inputs(2))
    balancer.step(skip=torch.zeros(()))
    assert bias_of(moe).isfinite().all()
    assert torch.equal(bias_of(moe), before) == (config.kind not in BIASED)


# --- asynchronous ------------------------------------------------------------------------------------------------------------------


class Sum:
    """A sum over ranks that is done when it is waited for, and says so."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, counts: torch.Tensor) -> Sum:
        assert not counts.is_floating_point()
        self.log.append("begin")
        return self

    def wait(self) -> None:
        self.log.append("end")


@pytest.mark.parametrize("kind", BIASED)
def test_an_asynchronous_update_comes_one_step_later_and_at_the_step_alone(kind):
    late, reduce = layer(BalanceConfig(kind=kind, asynchronous=True)), Sum()
    balancer, seen = Balancer(late, reduce), []
    expected = []
    for step in range(5):
        call(late, inputs(step))
        seen.append(bias_of(late))
        # what a synchronous step would make of these counts, with the bias they were routed with
        twin = layer(kind)
        twin.gate.e_score_correction_bias.copy_(seen[-1])
        call(twin, inputs(step))
        if kind == "sign":  # it moves the bias of when it is put in place
            load = twin.load.double()
            expected.append(1e-3 * torch.sign(load.mean() - load))
        else:
            Balancer(twin).step()
            expected.append(bias_of(twin))
        balancer.step()
        assert reduce.log[-1] == "begin", "nothing waits for the sum that was just begun"
    assert reduce.log == ["begin", *["end", "begin"] * 4]
    zero = torch.zeros(12, dtype=torch.float64)
    assert torch.equal(seen[0], zero)
    assert torch.equal(seen[1], zero)
    for step in range(2, 5):
        want = expected[step - 2] + (seen[step - 1] if kind == "sign" else 0)
        torch.testing.assert_close(seen[step], want, rtol=0, atol=1e-15)


def test_settling_early_puts_nothing_in_place():
    moe = layer(BalanceConfig(asynchronous=True))
    balancer = Balancer(moe)
    call(moe, inputs(0))
    balancer.step()
    balancer.state()  # as for a checkpoint
    assert torch.equal(bias_of(moe), torch.zeros(12, dtype=torch.float64))
    call(moe, inputs(1))
    balancer.step()
    assert (bias_of(moe) != 0).any()


def test_an_asynchronous_loop_levels_as_well():
    moe = layer(BalanceConfig(asynchronous=True))
    balancer, worst = Balancer(moe), []
    for step in range(8):
        call(moe, skewed(step))
        worst.append(balancer.step()["max_vio"][0])
    assert worst[0] > 0.8
    assert worst[1] > 0.8, "the second step still has the first bias"
    assert max(worst[2:4]) < 0.4 * worst[0]
    assert max(worst[4:]) < 0.3 * worst[0]


def test_a_skipped_step_is_left_out_asynchronously():
    moe = layer(BalanceConfig(asynchronous=True))
    balancer = Balancer(moe)
    call(moe, inputs(0))
    balancer.step(skip=torch.ones(()))
    call(moe, inputs(1))
    balancer.step(skip=torch.zeros(()))
    assert torch.equal(bias_of(moe), torch.zeros(12, dtype=torch.float64))
    call(moe, inputs(2))
    balancer.step()
    assert (bias_of(moe) != 0).any()


# --- ranks -------------------------------------------------------------------------------------------------------------------------


def test_one_integer_sum_serves_all_layers_and_a_rank_without_tokens_joins_it():
    model, idle, sums = build(BalanceConfig()), build(BalanceConfig()), []

    def reduce(counts: torch.Tensor) -> None:
        sums.append(counts.clone())

    model(tokens(4))
    model.balance_step(reduce)
    idle.balance_step(reduce)
    assert len(sums) == 2
    assert sums[0].dtype == torch.int32
    assert sums[0].shape == sums[1].shape == (2 * (12 * 1000 + 12 + 2),)
    assert not sums[1].any()
    assert not idle.moe_layers()[0].gate.e_score_correction_bias.any()


# --- precision and refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_below_float32_is_refused_in_one_line(dtype):
    moe = LatentMoE(16, 8, 12, 3, 8).to(dtype)
    with pytest.raises(ValueError, match="below float32 near-tied experts") as refusal:
        moe(torch.randn(4, 16, dtype=dtype))
    assert "\n" not in str(refusal.value)
    assert LatentMoE(16, 8, 12, 3, 8, dtype=dtype).gate.e_score_correction_bias.dtype == torch.float32


def test_autocast_does_not_lower_the_router():
    moe = LatentMoE(16, 8, 12, 3, 8, init_std=0.3)
    x = torch.randn(64, 16)
    plain = moe.gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moe.gate(x), plain)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "quantil"}, "did you mean 'quantile'"),
        ({"capacity_factor": "1.2"}, "drops tokens, which does not go with balance.kind"),
        ({"kind": "sign", "capacity_factor": "1.2"}, "take balance.kind = 'capacity' or 'aux'"),
        ({"sign_rate": "0.001"}, "a second balancer beside balance.kind"),
        ({"aux_coefficient": "0.01"}, "a second balancer beside"),
        ({"kind": "sign", "aux_coefficient": "0.01"}, "a second balancer beside"),
        ({"kind": "none", "sign_rate": "0.01"}, "take balance.kind = 'sign'"),
        ({"kind": "aux", "aux_coefficient": "-1"}, "above 0"),
        ({"kind": "sign", "ema": "0.5"}, "estimates no quantile"),
        ({"ema": "1"}, "a share from 0 up to 1"),
        ({"bins": "1"}, "2 bins or more"),
        ({"kind": "aux", "asynchronous": "true"}, "updates no bias"),
    ],
    ids=str,
)
def test_impossible_settings_are_one_line_that_names_the_field(settings, says):
    with pytest.raises(ConfigError) as refusal:
        load_config("tiny", {f"balance.{name}": value for name, value in settings.items()})
    text = str(refusal.value)
    assert says in text
    assert text.startswith("balance.")
    assert "\n" not in text


def test_the_module_refuses_what_the_settings_refuse():
    with pytest.raises(ValueError, match=r"balance\.capacity_factor"):
        LatentMoE(16, 8, 12, 3, 8, balance=BalanceConfig(capacity_factor=1.0))
    with pytest.raises(ValueError, match=r"balance\.kind = 'quantiles'"):
        LatentMoE(16, 8, 12, 3, 8, balance="quantiles")
    with pytest.raises(ValueError, match="top_k = 12"):
        LatentMoE(16, 8, 12, 12, 8)
    exact = layer(BalanceConfig(bins=None))
    with pytest.raises(ConfigError, match=r"balance\.bins = None"):
        Balancer(exact, lambda counts: None).step()
    with pytest.raises(ConfigError, match="differs between layers"):
        Balancer([layer(), layer(BalanceConfig(asynchronous=True))])


def test_a_layer_alone_starts_with_set_weights():
    torch.manual_seed(0)
    moe = LatentMoE(16, 8, 12, 3, 32, init_std=0.5)
    for name, p in moe.named_parameters():
        assert p.isfinite().all()
        assert (p == 1).all() if "norm" in name else 0.4 < p.std().item() < 0.6, name
    assert all(p.is_meta for p in LatentMoE(16, 8, 12, 3, 8, device="meta").parameters())


def test_a_used_layer_can_be_copied_and_moved():
    moe = layer(BalanceConfig(asynchronous=True))
    call(moe, inputs(0))
    moe.balance_step()
    twin = copy.deepcopy(moe)
    for m in (moe, twin):
        call(m, inputs(1))
        m.balance_step()
    assert torch.equal(bias_of(moe), bias_of(twin))
    assert (bias_of(moe) != 0).any()
    assert [n for n, _ in moe.named_buffers() if "balance" in n] == ["balance.pending", "balance.due"]
    assert not any("balance" in n for n in moe.state_dict())
