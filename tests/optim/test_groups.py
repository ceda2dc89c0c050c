"""Every parameter lands in exactly one group, by the rule that the design gives it."""

import pytest
import torch
from torch import nn

from atoll.config import ModelConfig, OptimConfig, VisionConfig
from atoll.optim import Blocks, ModelOptimizer, describe, rule

MODEL = ModelConfig(
    num_hidden_layers=4,
    kda_num_heads=2,
    kda_head_dim=8,
    num_attention_heads=3,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=6,
    vision=VisionConfig(vt_num_attention_heads=2, qkv_hidden_size=8),
)
LAYER = "language_model.model.layers."
ADAM_FREE, ADAM_DECAY, WHOLE = ("adamw", False, Blocks()), ("adamw", True, Blocks()), ("muon", True, Blocks())
KDA, EXPERTS = Blocks(2, (8,)), ("muon", True, Blocks())
EXPECTED = {
    "language_model.model.embed_tokens.weight": ((9, 4), ADAM_FREE),
    "language_model.lm_head.weight": ((9, 4), ADAM_DECAY),
    "language_model.model.norm.weight": ((4,), ADAM_FREE),
    "language_model.model.output_attn_res_proj.weight": ((1, 4), ADAM_FREE),
    f"{LAYER}0.self_attn.q_proj.weight": ((16, 4), ("muon", True, KDA)),
    f"{LAYER}0.self_attn.k_proj.weight": ((16, 4), ("muon", True, KDA)),
    f"{LAYER}0.self_attn.v_proj.weight": ((16, 4), ("muon", True, KDA)),
    f"{LAYER}0.self_attn.q_conv1d.weight": ((16, 1, 4), ADAM_FREE),
    f"{LAYER}0.self_attn.A_log": ((2,), ADAM_FREE),
    f"{LAYER}0.self_attn.dt_bias": ((16,), ADAM_FREE),
    f"{LAYER}0.self_attn.b_proj.weight": ((2, 4), WHOLE),
    f"{LAYER}0.self_attn.f_a_proj.weight": ((8, 4), WHOLE),
    f"{LAYER}0.self_attn.f_b_proj.weight": ((16, 8), WHOLE),
    f"{LAYER}0.self_attn.g_proj.weight": ((16, 4), WHOLE),
    f"{LAYER}0.self_attn.o_norm.weight": ((8,), ADAM_FREE),
    f"{LAYER}0.self_attn.o_proj.weight": ((4, 16), WHOLE),
    f"{LAYER}0.mlp_res_proj.weight": ((1, 4), ADAM_FREE),
    f"{LAYER}0.mlp_res_norm.weight": ((4,), ADAM_FREE),
    f"{LAYER}0.mlp.gate_proj.weight": ((7, 4), WHOLE),
    f"{LAYER}3.self_attn.q_a_proj.weight": ((5, 4), WHOLE),
    f"{LAYER}3.self_attn.q_b_proj.weight": ((18, 5), ("muon", True, Blocks(3, (6,)))),
    f"{LAYER}3.self_attn.kv_a_proj_with_mqa.weight": ((7, 4), WHOLE),
    f"{LAYER}3.self_attn.kv_b_proj.weight": ((30, 5), ("muon", True, Blocks(3, (4, 6)))),
    f"{LAYER}3.self_attn.g_proj.weight": ((18, 4), WHOLE),
    f"{LAYER}3.block_sparse_moe.gate.weight": ((6, 4), ADAM_DECAY),
    f"{LAYER}3.block_sparse_moe.routed_expert_norm.weight": ((2,), ADAM_FREE),
    f"{LAYER}3.block_sparse_moe.routed_expert_up_proj.weight": ((4, 2), WHOLE),
    f"{LAYER}3.block_sparse_moe.shared_experts.gate_proj.weight": ((6, 4), WHOLE),
    f"{LAYER}3.block_sparse_moe.experts.w1": ((6, 3, 2), EXPERTS),
    f"{LAYER}3.block_sparse_moe.experts.w2": ((6, 2, 3), EXPERTS),
    "vision_tower.patch_embed.proj.weight": ((6, 3, 2, 2), ADAM_DECAY),
    "vision_tower.patch_embed.pos_emb.weight": ((3, 3, 6), ADAM_FREE),
    "vision_tower.encoder.blocks.0.norm0.weight": ((6,), ADAM_FREE),
    "vision_tower.encoder.blocks.0.wqkv.weight": ((24, 6), ("muon", True, Blocks(6, (4,)))),
    "vision_tower.encoder.blocks.0.wo.weight": ((6, 8), WHOLE),
    "vision_tower.encoder.blocks.0.mlp.fc0.weight": ((9, 6), WHOLE),
    "vision_tower.encoder.final_layernorm.weight": ((6,), ADAM_FREE),
    "mm_projector.proj.0.weight": ((24, 24), WHOLE),
    "mm_projector.post_norm.weight": ((4,), ADAM_FREE),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_rule(name: str) -> None:
    shape, (kind, decay, blocks) = EXPECTED[name]
    found = rule(name, torch.zeros(shape), MODEL)
    assert (found.kind, found.decay, found.blocks) == (kind, decay, blocks)


def test_experts_go_to_adamw_on_request() -> None:
    name = f"{LAYER}3.block_sparse_moe.experts.w1"
    found = rule(name, torch.zeros(6, 3, 2), MODEL, "adamw")
    assert (found.kind, found.decay) == ("adamw", True)


class Bag(nn.Module):
    """The parameters of EXPECTED under their names."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, (shape, _) in EXPECTED.items():
            self.register_parameter(name.replace(".", "|"), nn.Parameter(torch.randn(shape, dtype=dtype)))

    def named_parameters(self, *args, **kwargs):
        return ((name.replace("|", "."), p) for name, p in super().named_parameters(*args, **kwargs))


@pytest.mark.parametrize("experts", ["muon", "adamw"])
def test_every_parameter_is_in_exactly_one_group(experts) -> None:
    bag = Bag()
    optimizer = ModelOptimizer(bag, OptimConfig(experts=experts), MODEL)
    held = [id(p) for part, _ in optimizer.parts.values() for group in part.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in bag.parameters())
    for part, names in optimizer.parts.values():  # names and parameters are kept in one order
        by_name = dict(bag.named_parameters())
        assert [id(by_name[n]) for n in names] == [id(p) for group in part.param_groups for p in group["params"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_skipped_step_changes_nothing_not_even_with_nan_gradients(dtype: torch.dtype) -> None:
    bag = Bag(dtype)
    optimizer = ModelOptimizer(bag, OptimConfig(), MODEL)

    def step(value: float, skip: float | None) -> None:
        optimizer.zero_grad()
        for p in bag.parameters():
            p.grad = torch.full(p.shape, value, dtype=p.grad_dtype)
        optimizer.clip()
        optimizer.step(1.0, None if skip is None else torch.tensor(skip))

    step(0.5, None)
    before = {n: t.clone() for n, t in [*optimizer.state().items(), *bag.named_parameters()]}
    step(float("nan"), 1.0)
    after = dict([*optimizer.state().items(), *bag.named_parameters()])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    step(0.5, 0.0)
    changed = [n for n in before if not torch.equal(before[n], after[n])]
    assert len(changed) > 2 * len(EXPECTED) - 1
    assert all(torch.isfinite(t).all() for t in after.values())


def test_a_step_with_skip_zero_equals_a_step_without() -> None:
    results = []
    for skip in (None, torch.zeros(())):
        bag = Bag()
        optimizer = ModelOptimizer(bag, OptimConfig(), MODEL)
        for p in bag.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step(0.5, skip)
        results.append([p.detach().clone() for p in bag.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_describe_names_every_kind_of_parameter_once() -> None:
    table = describe(Bag(), MODEL).splitlines()
    assert sum("q_proj" in line for line in table) == 1
    assert len(table) == len({line.split()[0] for line in table})
    assert sum(int(line.split()[2].replace(",", "")) for line in table) == sum(p.numel() for p in Bag().parameters())


def test_the_router_learns_at_a_rate_of_its_own() -> None:
    bag, config = Bag(), OptimConfig()
    optimizer = ModelOptimizer(bag, config, MODEL)
    before = {n: p.detach().clone() for n, p in bag.named_parameters()}
    for p in bag.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(0.5)
    after = dict(bag.named_parameters())
    for name, peak in (("block_sparse_moe.gate.weight", config.router_lr), ("lm_head.weight", config.adam_lr)):
        whole = next(n for n in before if n.endswith(name))
        lr = 0.5 * peak
        expected = before[whole] * (1 - lr * config.weight_decay) - lr  # AdamW's first step is the sign of the gradient
        torch.testing.assert_close(after[whole].detach(), expected, atol=1e-6, rtol=1e-5)
