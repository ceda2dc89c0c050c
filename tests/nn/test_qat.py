"""Quantisation-aware training: one rounding in training, evaluation, generation and export; the gradient straight through."""

import dataclasses

import pytest
import torch

from atoll.config import ConfigError, ModelConfig, OptimConfig, load_config, presets, validate_model
from atoll.model import Model, load
from atoll.nn import LatentMoE
from atoll.ops.mxfp4 import mxfp4_fake
from atoll.optim import ModelOptimizer

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=3,
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
    moe_intermediate_size=32,
    routed_expert_hidden_size=64,
    quantization="mxfp4+mxfp8",
    initializer_range=0.2,
)
BOTH = pytest.mark.parametrize("quantization", ["mxfp4", "mxfp4+mxfp8"])


def build(dtype: torch.dtype = torch.float64, **changes) -> Model:
    torch.manual_seed(0)
    return Model(dataclasses.replace(SMALL, **changes), dtype=dtype)


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def experts(model: Model) -> dict[str, torch.nn.Parameter]:
    found = {name: p for name, p in model.named_parameters() if ".experts." in name and "shared" not in name}
    assert len(found) == 6
    return found


def rounded_by_hand(model: Model) -> Model:
    """A model without quantisation whose experts hold the rounded weights."""
    other = build(next(model.parameters()).dtype, quantization="none")
    other.load_state_dict({n: t for n, t in model.state_dict().items() if not n.endswith("_scale")})
    with torch.no_grad():
        for p in experts(other).values():
            p.copy_(mxfp4_fake(p))
    return other


def gradients(model: Model, ids: torch.Tensor, routing=None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids, routing=routing).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_only_is_a_plain_model_with_rounded_weights(dtype):
    """Outputs and every gradient, bit for bit: the gradient of a float weight is that of the rounded one."""
    model = build(dtype, quantization="mxfp4")
    plain, ids = rounded_by_hand(model), tokens(2, 40)
    a, b = model(ids), plain(ids)
    assert torch.equal(a.logits, b.logits)
    mine, theirs = gradients(model, ids), gradients(plain, ids)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    assert not torch.equal(build(dtype, quantization="none")(ids).logits, a.logits)


@BOTH
def test_training_evaluation_and_decoding_are_one_path(quantization):
    model, ids = build(quantization=quantization), tokens(2, 40)
    trained = model.train()(ids)
    evaluated = model.eval()(ids, routing=trained.routing)
    assert torch.equal(trained.logits, evaluated.logits)
    cache = model.new_cache(2)
    steps = [model(ids[:, :30], cache=cache), *(model(ids[:, t : t + 1], cache=cache) for t in range(30, 40))]
    torch.testing.assert_close(torch.cat([s.logits for s in steps], 1), evaluated.logits, rtol=0, atol=1e-9)


@BOTH
def test_changed_weights_are_seen_at_once(quantization):
    """Nothing rounded is remembered: after any change, in place or not, the next evaluation is that of a new model."""
    model, ids = build(quantization=quantization).eval(), tokens(1, 20)
    before = model(ids).logits
    with torch.no_grad():
        for p in experts(model).values():
            p.mul_(1.3)
    after = model(ids).logits
    fresh = build(quantization=quantization).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, fresh(ids).logits)
    assert not torch.equal(after, before)
    for p in experts(model).values():
        p.data = p.data / 1.3
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-9, atol=1e-9)


@BOTH
def test_recomputed_layers_give_the_same_gradients(quantization):
    model, ids = build(quantization=quantization).train(), tokens(2, 40)
    expected = gradients(model, ids)
    model.gradient_checkpointing = True
    for name, grad in gradients(model, ids).items():
        assert torch.equal(grad, expected[name]), name


def test_router_and_latent_projections_get_gradients_through_rounded_rows():
    grads = gradients(build().train(), tokens(2, 40))
    for layer in (1, 2):
        for name in ("gate", "routed_expert_down_proj", "routed_expert_up_proj"):
            grad = grads[f"language_model.model.layers.{layer}.block_sparse_moe.{name}.weight"]
            assert grad.isfinite().all()
            assert grad.abs().max() > 1e-6


def train(model: Model, steps: int, rule: str) -> list[float]:
    optimizer = ModelOptimizer(model, OptimConfig(lr=0.02, adam_lr=0.01, experts=rule), model.config)  # type: ignore[arg-type]
    ids, losses = tokens(4, 32), []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.clip()
        optimizer.step(1.0)
        model.balance_step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("rule", ["muon", "adamw"])
@pytest.mark.parametrize(("dtype", "quantization"), [(torch.float32, "mxfp4+mxfp8"), (torch.bfloat16, "mxfp4")], ids=str)
def test_trains_and_exports_exactly_what_it_trained_with(tmp_path, rule, dtype, quantization):
    model = build(dtype, quantization=quantization)
    before = {name: p.detach().clone() for name, p in experts(model).items()}
    losses = train(model, 12, rule)
    assert losses[-1] < losses[0] - 0.3
    model.eval().save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out", dtype=dtype)
    assert again.config.quantization == quantization
    read, ids = experts(again), tokens(2, 40)
    for name, p in experts(model).items():
        assert not torch.equal(p, before[name]), name
        assert not torch.equal(p, mxfp4_fake(p)), name  # what the optimizer moves is finer than what is written
        assert torch.equal(read[name], mxfp4_fake(p)), name
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(again.generate(ids, 8, temperature=0), model.generate(ids, 8, temperature=0))


def test_a_loaded_folder_can_be_trained_on(tmp_path):
    build(torch.float32).save_pretrained(tmp_path / "a")
    model = load(tmp_path / "a")
    read = {name: p.detach().clone() for name, p in experts(model).items()}
    losses = train(model, 6, "adamw")
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "b")
    again = experts(load(tmp_path / "b"))
    for name, p in experts(model).items():
        assert torch.equal(again[name], mxfp4_fake(p)), name
        assert not torch.equal(again[name], read[name]), name


def test_scales_are_held_only_where_something_is_quantised():
    assert not any(n.endswith("_scale") for n in build(quantization="none").state_dict())
    model = build()
    scales = {n: t for n, t in model.state_dict().items() if n.endswith("_scale")}
    assert len(scales) == 6
    assert all(t.dtype == torch.uint8 and (t == 255).all() for t in scales.values())
    for name, p in experts(model).items():
        assert scales[f"{name}_scale"].shape == (*p.shape[:-1], p.shape[-1] // 32)
    model.language_model.model.layers[1].block_sparse_moe.experts.w1_scale.fill_(3)
    model.reset_parameters()
    assert all((t == 255).all() for n, t in model.state_dict().items() if n.endswith("_scale"))


def test_the_layer_alone():
    torch.manual_seed(0)
    layer = LatentMoE(24, 64, 12, 3, 32, quantization="mxfp4+mxfp8", dtype=torch.float64)
    layer.reset_parameters(0.3)
    y = layer(torch.randn(2, 5, 24, dtype=torch.float64))
    assert y.shape == (2, 5, 24)
    with pytest.raises(ValueError, match="multiples of 32"):
        LatentMoE(24, 64, 12, 3, 40, quantization="mxfp4")


# ---------------------------------------------------------------- the setting


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"moe_intermediate_size": 56}, ["model.moe_intermediate_size = 56", "multiple of 32", "64"]),
        ({"routed_expert_hidden_size": 40}, ["model.routed_expert_hidden_size = 40", "multiple of 32", "64"]),
        ({"routed_expert_hidden_size": None}, ["model.hidden_size = 24", "multiple of 32", "32"]),
        ({"first_k_dense_replace": 3}, ["model.quantization", "no layer has routed experts"]),
    ],
)
def test_widths_that_engines_could_not_load_are_refused(change, says):
    with pytest.raises(ConfigError) as caught:
        validate_model(dataclasses.replace(SMALL, **change))
    assert all(word in str(caught.value) for word in says), caught.value
    validate_model(dataclasses.replace(SMALL, **change, quantization="none"))


def test_a_wrong_value_names_the_right_ones():
    with pytest.raises(ConfigError, match=r"model\.quantization = 'mxfp6'.*'mxfp4\+mxfp8'"):
        load_config("tiny", {"model.quantization": "mxfp6"})


def test_which_presets_qualify():
    """As docs/quantization.md says; the others take the nearest multiple of 32."""
    fit = {"blueprint", "blueprint-vl", "kimi-linear-48b", "mini", "1b-a50m"}
    for name in presets():
        if name in fit:
            assert load_config(name, {"model.quantization": "mxfp4"}).model.quantization == "mxfp4"
        else:
            with pytest.raises(ConfigError, match="moe_intermediate_size"):
                load_config(name, {"model.quantization": "mxfp4"})
