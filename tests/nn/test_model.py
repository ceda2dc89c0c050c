"""The whole model: causality, packing, cache, recompute, gradients, initial values."""

import dataclasses
import itertools

import pytest
import torch

from atoll.config import BalanceConfig, ModelConfig, UserError
from atoll.model import Model, load, next_tokens

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=5,
    num_attention_heads=2,
    kda_num_heads=2,
    kda_head_dim=8,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=40,
    num_experts=12,
    num_experts_per_token=3,
    moe_intermediate_size=16,
    routed_expert_hidden_size=16,
    attn_res_block_size=2,
)


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Model:
    """A small model whose pseudo-queries and norms are not at their start, so that every term counts."""
    torch.manual_seed(seed)
    model = Model(dataclasses.replace(SMALL, initializer_range=0.2, **changes), dtype=dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_res_proj" in name:
                p.normal_(std=0.5)
            elif "norm" in name:
                p.add_(0.2 * torch.randn_like(p))
    return model


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("residual", ["block", "full", "plain"])
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "use_full_rank_gate": False, "gate_lower_bound": None}])
def test_packed_documents_equal_documents_alone(residual, changes):
    model = build(residual=residual, **changes).eval()
    ids, ends = tokens(1, 120), [0, 1, 34, 34, 57, 120]
    packed = model(ids, labels=ids, cu_seqlens=torch.tensor(ends), logits=True)
    losses = 0.0
    for a, b in itertools.pairwise(ends):
        if a == b:
            continue
        alone = model(ids[:, a:b], labels=ids[:, a:b], logits=True)
        torch.testing.assert_close(packed.logits[:, a:b], alone.logits, rtol=0, atol=1e-10)
        losses += alone.loss * alone.num_targets
    assert packed.num_targets == 120 - 4
    torch.testing.assert_close(packed.loss * packed.num_targets, losses, rtol=1e-12, atol=0)


@pytest.mark.parametrize("residual", ["block", "full", "plain"])
def test_prefill_then_steps_equal_the_whole_sequence(residual):
    model = build(residual=residual).eval()
    ids = tokens(2, 100)
    whole = model(ids).logits
    for split in ([1] * 10 + [90], [70, 30], [99, 1], [64, *[1] * 36]):
        cache, parts = model.new_cache(2), []
        for piece in ids.split(split, 1):
            parts.append(model(piece, cache=cache).logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)
        assert cache.length == 100


def test_a_forked_cache_continues_on_its_own():
    model = build().eval()
    ids = tokens(1, 40)
    cache = model.new_cache(1)
    model(ids[:, :30], cache=cache)
    fork = cache.fork(3)
    model(tokens(1, 5, seed=9), cache=cache)
    out = model(ids[:, 30:].expand(3, -1), cache=fork).logits
    torch.testing.assert_close(out, model(ids).logits[:, 30:].expand(3, -1, -1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("at", [1, 15, 16, 63, 64, 90])
def test_later_tokens_change_nothing_before_them_bit_for_bit(dtype, at):
    """Routing forced, as near-tied experts and the layout of the experts' matmuls depend on every token."""
    model = build(dtype=dtype).eval()
    ids = tokens(1, 97)
    first = model(ids)
    changed = ids.clone()
    changed[:, at:] = tokens(1, 97 - at, seed=5)
    second = model(changed, routing=first.routing)
    assert torch.equal(first.logits[:, :at], second.logits[:, :at])
    assert not torch.equal(first.logits[:, at:], second.logits[:, at:])


def test_free_routing_of_earlier_tokens_is_untouched_in_float64():
    model = build().eval()
    ids = tokens(1, 97)
    first = model(ids).routing
    for at in (1, 16, 50, 96):
        changed = ids.clone()
        changed[:, at:] = tokens(1, 97 - at, seed=at)
        flips = sum(int((a[:at] != b[:at]).any(1).sum()) for a, b in zip(first, model(changed).routing, strict=True))
        assert flips == 0


def test_gradients_do_not_reach_later_tokens():
    model = build().eval()
    embedded = []
    hook = model.language_model.model.embed_tokens.register_forward_hook(lambda m, i, o: (o.retain_grad(), embedded.append(o))[1])
    logits = model(tokens(1, 70)).logits
    hook.remove()
    logits[:, :33].square().sum().backward()
    grad = embedded[0].grad
    assert torch.equal(grad[:, 33:], torch.zeros_like(grad[:, 33:]))
    assert (grad[:, :33].abs().amax(-1) > 0).all()


def saved_bytes(model: Model, ids: torch.Tensor) -> int:
    """Bytes the graph keeps for the backward pass, each storage once."""
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return sum(size for at, size in kept.items() if at not in weights)


def test_gradient_checkpointing_saves_memory_and_changes_nothing():
    plain, saving = build(), build()
    saving.gradient_checkpointing = True
    ids = tokens(4, 64)
    before, after = saved_bytes(plain, ids), saved_bytes(saving, ids)
    assert after < before / 3, (before, after)
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for a, b in zip(plain.moe_layers(), saving.moe_layers(), strict=True):
        assert torch.equal(a.load, b.load)
        assert torch.equal(a.counts(), b.counts())
    assert int(plain.moe_layers()[0].load.sum()) == ids.numel() * 3


def test_every_parameter_gets_a_finite_gradient():
    model = build(dtype=torch.float32).train()
    ids = tokens(8, 64)
    out = model(ids, labels=ids)
    out.loss.backward()
    assert all((m.load > 0).all() for m in model.moe_layers()), "every expert must be reached"
    unused = {f"language_model.model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    for name, p in model.named_parameters():
        if name in unused:
            assert p.grad is None, name
            continue
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().sum() > 0, name
        if ".experts." in name:
            assert (p.grad.abs().amax((1, 2)) > 0).all(), name


def test_nothing_is_left_uninitialised_from_the_meta_device():
    reference = Model(SMALL)
    with torch.device("meta"):
        model = Model(SMALL)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.fill_(float("nan"))
    model.reset_parameters(seed=3)
    reference.reset_parameters(seed=3)
    for (name, a), b in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_initial_values_follow_the_papers():
    model = Model(dataclasses.replace(SMALL, kda_head_dim=64))
    for name, p in model.named_parameters():
        if name.endswith("A_log") or "_res_proj" in name:
            assert (p == 0).all(), name
        elif name.endswith("dt_bias"):
            assert -7.0 < p.min() < p.max() < -2.2, name
            decay = model.language_model.model.layers[0].self_attn.log_decay(torch.zeros(1, 1, 2, 64)).exp()
            assert decay.min() > 0.6
        elif "norm" in name:
            assert (p == 1).all(), name
        elif "conv1d" in name:
            assert 0.3 < p.abs().max() <= 0.5, name
        elif p.ndim >= 2:
            assert 0.015 < p.std() < 0.025, name


def test_forced_routing_replays_logits_and_counts_nothing():
    model = build().train()
    ids = tokens(2, 40)
    first = model(ids)
    model.balance_step()
    again = model(ids, routing=first.routing)
    assert torch.equal(first.logits, again.logits)
    assert all(m.load is None for m in model.moe_layers())


def test_balancing_is_off_in_evaluation_and_blind_to_padding():
    model = build(dtype=torch.float32).eval()
    ids = tokens(2, 40)
    model(ids)
    assert not any(model.balance_step().values())
    model.train()
    ids[:, 30:] = SMALL.pad_token_id
    model(ids)
    assert [int(m.load.sum()) for m in model.moe_layers()] == [2 * 30 * 3] * 4
    assert [int(m.counts().sum()) for m in model.moe_layers()] == [2 * 30 * 12] * 4


@pytest.mark.parametrize("bins", [1000, None])
def test_a_balancing_step_levels_the_load(bins):
    torch.manual_seed(0)
    model = Model(dataclasses.replace(SMALL, num_experts=48, initializer_range=0.3), BalanceConfig(bins=bins)).train()
    ids = tokens(8, 256)
    model(ids)
    before = model.balance_step()
    model(ids)
    after = model.balance_step()
    for worst, settled in zip(before["max_vio"], after["max_vio"], strict=True):
        assert settled < worst / 2
    assert after["dead"] == [0.0] * 4


def test_counts_pool_over_micro_batches_and_ranks():
    whole, parts = build(), build()
    ids = tokens(4, 32)
    whole(ids)
    pooled = [torch.zeros(0)]

    def reduce(counts: torch.Tensor) -> None:
        """The other rank has seen the same number of tokens: rows 2 and 3."""
        pooled[0] = counts.clone()

    other = build()
    other(ids[2:])
    other.balance_step(reduce)
    theirs = pooled[0]
    parts(ids[:1])
    parts(ids[1:2])
    parts.balance_step(lambda counts: counts.add_(theirs))
    whole.balance_step()
    for a, b in zip(whole.moe_layers(), parts.moe_layers(), strict=True):
        assert torch.equal(a.gate.e_score_correction_bias, b.gate.e_score_correction_bias)


def test_targets_stop_at_documents():
    labels = torch.arange(10, 18).view(1, 8)
    assert next_tokens(labels, None).tolist() == [[11, 12, 13, 14, 15, 16, 17, -100]]
    assert next_tokens(labels, torch.tensor([0, 0, 3, 3, 8])).tolist() == [[11, 12, -100, 14, 15, 16, 17, -100]]


def test_no_tokens_have_no_loss_and_no_logits():
    model, ids = build(), tokens(2, 0)
    out = model(ids, labels=ids)
    assert (float(out.loss.detach()), int(out.num_targets)) == (0, 0)
    assert model.eval()(ids).logits.shape == (2, 0, model.config.vocab_size)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "float32"])
def test_a_type_that_nothing_computes_in_is_refused(dtype):
    with pytest.raises(UserError, match=r"one of torch\.float32, bfloat16, float16, float64"):
        load("tiny", dtype=dtype)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda m: m(torch.zeros(5, dtype=torch.long)), "batch, tokens"),
        (lambda m: m(tokens(1, 5), labels=tokens(1, 4)), "labels"),
        (lambda m: m(tokens(2, 5), cu_seqlens=torch.tensor([0, 5])), "one row"),
        (lambda m: m(tokens(1, 5), cu_seqlens=torch.tensor([0, 4])), "rise from 0 to 5"),
        (lambda m: m(tokens(1, 5), cu_seqlens=torch.tensor([0, 3, 2, 5])), "rise from 0 to 5"),
        (lambda m: m(tokens(1, 0), cu_seqlens=torch.tensor([0])), r"documents \+ 1"),
        (lambda m: m(tokens(1, 5), cu_seqlens=torch.tensor([], dtype=torch.long)), r"documents \+ 1"),
        (lambda m: m(tokens(2, 5)[:0]), "one row or more"),
        (lambda m: m(tokens(1, 5), cache=m.new_cache(2)), "must agree"),
        (lambda m: m(tokens(1, 5), routing=[]), "routing for 0"),
    ],
)
def test_wrong_calls_are_refused_by_name(call, word):
    with pytest.raises(ValueError, match=word):
        call(build())


def test_probes_record_every_mechanism():
    model, record = build().eval(), {}
    model(tokens(1, 50), record=record)
    names = [name for name, _ in record["depth_weights"]]
    assert names[0] == "0.mlp"
    assert names[-1] == "output"
    assert [len(w) for _, w in record["depth_weights"]] == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    for _, weights in record["depth_weights"]:
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0), rtol=1e-5, atol=0)
    assert [name for name, _, _ in record["depth_rms"]] == [f"{i}.{part}" for i in range(5) for part in ("attention", "mlp")]
    assert all(output > 0 and total > 0 for _, output, total in record["depth_rms"])
    assert [layer for layer, _ in record["decay"]] == [0, 1, 2]
    assert all((g > -5).all() and (g < 0).all() for _, g in record["decay"])
    assert [int(load.sum()) for load in record["load"]] == [50 * 3] * 4


def test_free_routing_flips_only_near_ties_in_float32(record_property):
    """What later tokens may change of an earlier token's experts in float32: nothing but a tie, and the ties are reported."""
    model, scores = build(dtype=torch.float32).eval(), []
    hooks = [m.gate.register_forward_hook(lambda _, __, out: scores.append(out)) for m in model.moe_layers()]
    ids, at = tokens(1, 97), 60
    first = model(ids).routing
    biased = [s[:at] + m.gate.e_score_correction_bias for s, m in zip(scores, model.moe_layers(), strict=True)]
    for hook in hooks:
        hook.remove()
    changed = ids.clone()
    changed[:, at:] = tokens(1, 97 - at, seed=7)
    flips = 0
    for a, b, s in zip(first, model(changed).routing, biased, strict=True):
        moved = (a[:at].sort(1).values != b[:at].sort(1).values).any(1)
        best = s.topk(4, dim=1).values
        assert (best[moved, 2] - best[moved, 3] < 1e-5).all()
        flips += int(moved.sum())
    record_property("flipped_token_layers", flips)
