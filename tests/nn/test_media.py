"""Images in the whole model: both forms of placeholders, documents, labels, cache, generation, gradients, balance, refusals."""

import dataclasses
import itertools

import pytest
import torch

from atoll.config import ModelConfig, OptimConfig, UserError, VisionConfig, load_config, to_toml
from atoll.data.tokenizer import special_layout
from atoll.model import Model
from atoll.nn.media import place_media
from atoll.optim import ModelOptimizer

IMAGE, PAD = 3, 2
VISION = VisionConfig(
    vt_num_hidden_layers=2, vt_hidden_size=12, vt_num_attention_heads=3, qkv_hidden_size=24, vt_intermediate_size=20, patch_size=2,
    init_pos_emb_height=4, init_pos_emb_width=4, media_placeholder_token_id=IMAGE,
)  # fmt: skip
SMALL = ModelConfig(
    vocab_size=61, hidden_size=24, num_hidden_layers=4, num_attention_heads=2, kda_num_heads=2, kda_head_dim=8, q_lora_rank=12,
    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=40, num_experts=12, num_experts_per_token=3,
    moe_intermediate_size=16, routed_expert_hidden_size=16, attn_res_block_size=2, initializer_range=0.2, vision=VISION,
)  # fmt: skip
GRIDS = [(1, 2, 4), (1, 4, 6), (2, 2, 2)]
LENGTHS = [2, 6, 1]


def build(dtype: torch.dtype = torch.float64, **changes) -> Model:
    torch.manual_seed(0)
    return Model(dataclasses.replace(SMALL, **changes), dtype=dtype)


def images(which=(0, 1, 2), dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Some of three images; the same number is the same image."""
    values = []
    for i in which:
        t, h, w = GRIDS[i]
        values.append(torch.randn(t * h * w, 3, 2, 2, generator=torch.Generator().manual_seed(i), dtype=torch.float64))
    return {"pixel_values": torch.cat(values).to(dtype), "grid_thws": torch.tensor([GRIDS[i] for i in which])}


def text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(4, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sentence(*parts) -> torch.Tensor:
    """Lists of ids and numbers of images, in the grown form's place-holding: [1, T]."""
    return torch.tensor([[i for part in parts for i in ([IMAGE] if isinstance(part, int) else part)]])


def expand(ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """One placeholder an image to one a feature."""
    runs = iter(lengths)
    return torch.tensor([[i for token in ids[0].tolist() for i in [token] * (next(runs) if token == IMAGE else 1)]])


IDS = sentence(text(5), 0, text(4, 2), 1, 2, text(3, 3))


def test_one_placeholder_an_image_equals_one_a_feature():
    """Logits, loss, gradients and routing; three images, two of them side by side, one of a single feature."""
    grown, expanded = build().eval(), build().eval()
    long = expand(IDS, LENGTHS)
    a = grown(IDS, labels=IDS, logits=True, **images())
    b = expanded(long, labels=long, logits=True, **images())
    assert a.logits.shape == (1, 12 + sum(LENGTHS), 61)
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    for (name, p), q in zip(grown.named_parameters(), expanded.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    again = grown(IDS, routing=a.routing, **images())
    assert torch.equal(again.logits, a.logits)


def test_features_are_no_targets():
    model = build().eval()
    out = model(IDS, labels=IDS, logits=True, **images())
    assert out.num_targets == 5 + 4 + 3 - 1
    long = expand(IDS, LENGTHS)
    scores = out.logits[0, :-1].log_softmax(-1)
    counted = long[0, 1:] != IMAGE
    expected = -scores[counted].gather(1, long[0, 1:][counted][:, None]).mean()
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=0)
    masked = IDS.clone()
    masked[0, -2:] = -100
    assert model(IDS, labels=masked, **images()).num_targets == 9


@pytest.mark.parametrize("form", ["grown", "expanded"])
def test_packed_documents_with_images_equal_documents_alone(form):
    model = build().eval()
    documents = [sentence(text(3), 0, text(2)), sentence(text(4, 5)), sentence(1, text(3, 6), 2, text(2, 7))]
    shown, lengths = [(0,), (), (1, 2)], [[2], [], [6, 1]]
    if form == "expanded":
        documents = [expand(d, n) for d, n in zip(documents, lengths, strict=True)]
    bounds = torch.tensor([0, *itertools.accumulate(d.shape[1] for d in documents)])
    packed = model(torch.cat(documents, 1), labels=torch.cat(documents, 1), cu_seqlens=bounds, logits=True, **images())
    alone = [
        model(d, labels=d, logits=True, **(images(which) if which else {})) for d, which in zip(documents, shown, strict=True)
    ]  # fmt: skip
    torch.testing.assert_close(packed.logits, torch.cat([a.logits for a in alone], 1), rtol=0, atol=1e-10)
    total = sum(a.loss * a.num_targets for a in alone)
    assert packed.num_targets == sum(a.num_targets for a in alone)
    torch.testing.assert_close(packed.loss * packed.num_targets, total, rtol=1e-12, atol=0)


def test_rows_of_a_batch_take_their_images_in_order():
    model = build().eval()
    rows = [sentence(text(3), 0, text(4)), sentence(text(5, 2), 0, text(2, 3))]
    both = images((0, 0))
    both["pixel_values"] = torch.cat([images((0,))["pixel_values"], 2 * images((0,))["pixel_values"]])
    out = model(torch.cat(rows), **both).logits
    for i, factor in enumerate((1, 2)):
        one = images((0,))
        one["pixel_values"] = one["pixel_values"] * factor
        torch.testing.assert_close(out[i : i + 1], model(rows[i], **one).logits, rtol=0, atol=1e-10)


def test_padding_embeds_to_zero_among_images_and_only_there():
    model, seen = build().eval(), []
    model.language_model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].rows()[-1][0].detach()))
    ids = sentence(text(2), 0, [PAD, 7])
    model(ids, **images((0,)))
    model(sentence([PAD, 7]))
    assert not seen[0][4].any()
    assert torch.equal(seen[0][5], model.language_model.model.embed_tokens.weight[7])
    assert torch.equal(seen[1][0], model.language_model.model.embed_tokens.weight[PAD])


def test_prefill_with_images_then_steps_equal_the_whole_sequence():
    model = build().eval()
    whole = model(IDS, **images()).logits
    for split in (12, 13, 14):
        cache = model.new_cache(1)
        parts = [model(IDS[:, :split], cache=cache, **images()).logits]
        parts += [model(IDS[:, t : t + 1], cache=cache).logits for t in range(split, IDS.shape[1])]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)
        assert cache.length == whole.shape[1]


@pytest.mark.parametrize(("split", "before"), [(5, 0), (6, 1), (8, 1), (10, 1), (11, 2), (12, 3)])
def test_a_later_turn_may_bring_images_of_its_own(split, before):
    """Also where the cache ends with an image, the next turn begins with one, or both."""
    model = build().eval()
    cache, which = model.new_cache(1), (0, 1, 2)
    turns = ((IDS[:, :split], which[:before]), (IDS[:, split:], which[before:]))
    parts = [model(ids, cache=cache, **(images(shown) if shown else {})).logits for ids, shown in turns]
    torch.testing.assert_close(torch.cat(parts, 1), model(IDS, **images()).logits, rtol=0, atol=1e-9)
    assert cache.length == sum(p.shape[1] for p in parts)


@pytest.mark.parametrize("form", ["grown", "expanded"])
def test_generation_sees_the_images(form):
    model = build().train()
    prompt = IDS if form == "grown" else expand(IDS, LENGTHS)
    out = model.generate(prompt, 4, temperature=0, **images())
    assert torch.equal(out[:, : prompt.shape[1]], prompt)
    ids = prompt
    for _ in range(4):
        ids = torch.cat([ids, model.eval()(ids, **images()).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(out, ids)
    other = images()
    other["pixel_values"] = -other["pixel_values"]
    sampled = [model.generate(prompt, 8, seed=0, **shown) for shown in (images(), images(), other)]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])


@pytest.mark.parametrize("prompt", [[[5, IMAGE]], [[5]]])
def test_a_prompt_that_ends_with_an_image_is_refused(prompt):
    with pytest.raises(UserError, match="ends with at least one token of text"):
        build().generate(torch.tensor(prompt), 2, **images((0,)))


def test_gradients_reach_the_whole_tower_and_checkpointing_changes_none():
    plain, saving = build().train(), build().train()
    saving.gradient_checkpointing = True
    calls = []
    saving.vision_tower.encoder.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (plain, saving):
        model(IDS, labels=IDS, **images()).loss.backward()
    assert len(calls) == 2
    for (name, a), b in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        if not name.startswith("language_model."):
            assert a.grad.abs().max() > 0, name
        assert a.grad is None or torch.equal(a.grad, b[1].grad), name


def test_gradients_of_pixels_are_those_of_finite_differences():
    model, shown = build().eval(), images()
    forced = model(IDS, **shown).routing

    def loss(values: torch.Tensor) -> torch.Tensor:
        return model(IDS, labels=IDS, routing=forced, pixel_values=values, grid_thws=shown["grid_thws"]).loss

    assert torch.autograd.gradcheck(loss, [shown["pixel_values"].requires_grad_()], atol=1e-7, rtol=1e-5, fast_mode=True)


def test_later_images_change_nothing_before_them_bit_for_bit():
    model, shown = build().eval(), images()
    first = model(IDS, **shown)
    shown["pixel_values"] = shown["pixel_values"].clone()
    shown["pixel_values"][8:] += 1
    second = model(IDS, routing=first.routing, **shown)
    before = 5 + 2 + 4
    assert torch.equal(first.logits[:, :before], second.logits[:, :before])
    assert not torch.equal(first.logits[:, before:], second.logits[:, before:])


def test_balancing_counts_features_and_not_padding():
    model = build(torch.float32).train()
    model(sentence(text(4), 1, [PAD, PAD]), **images((1,), torch.float32))
    assert [int(m.load.sum()) for m in model.moe_layers()] == [(4 + 6) * 3] * 3


def test_a_text_of_a_model_with_a_tower_is_that_of_the_model_without():
    ids = torch.tensor([text(30)])
    with_tower, without = build(), build(vision=None)
    without.load_state_dict({k: v for k, v in with_tower.state_dict().items() if k.startswith("language_model.")})
    a, b = (m(ids, labels=ids, logits=True) for m in (with_tower, without))
    assert torch.equal(a.logits, b.logits)
    a.loss.backward()
    assert all(p.grad is None for n, p in with_tower.named_parameters() if not n.startswith("language_model."))


def test_nothing_is_left_uninitialised_from_the_meta_device():
    reference = build()
    with torch.device("meta"):
        model = Model(SMALL, dtype=torch.float64)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.fill_(float("nan"))
    for m in (model, reference):
        m.reset_parameters(seed=3)
    for (name, a), b in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    out = model.eval()(IDS, **images()).logits
    assert torch.equal(out, reference.eval()(IDS, **images()).logits)


def test_an_optimizer_step_moves_every_part_of_the_tower():
    model = build(torch.float32)
    optimizer = ModelOptimizer(model, OptimConfig(), SMALL)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(IDS, labels=IDS, **images(dtype=torch.float32)).loss.backward()
    optimizer.clip()
    optimizer.step(0.1)
    optimizer.zero_grad()
    model(IDS[:, :5], labels=IDS[:, :5]).loss.backward()  # a step of text alone leaves the tower where it is
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step(0.1)
    for name, p in model.named_parameters():
        if not name.startswith("language_model."):
            assert not torch.equal(before[name], after[name]), name
            assert torch.equal(p, after[name]), name


# ---------------------------------------------------------------- refusals and layouts


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: m(sentence(text(3), 0, 1, 2, 2), **images()), "hold 4 media placeholders .id 3.: 3, one an item, or 9, one a feature"),
        (lambda m: m(sentence(text(3)), **images()), "hold 0 media placeholders"),
        (lambda m: m(sentence(text(3), 0)), "hold 1 media placeholders .id 3. and there are no pixel_values"),
        (lambda m: m(sentence(text(3), 0), cache=m.new_cache(1)), "there are no pixel_values"),
        (lambda m: m(sentence(0), pixel_values=images((0,))["pixel_values"]), "grid_thws is missing"),
        (lambda m: m(sentence(0), grid_thws=images((0,))["grid_thws"]), "pixel_values is missing"),
        (lambda m: m(torch.tensor([[IMAGE, 5], [6, 7]]), **images((0,))), r"grow to \[3, 2\] tokens"),
        (lambda m: m(torch.tensor([[IMAGE, 5, IMAGE]]), **images((0,))), "item 0: its 2 placeholders .* side by side"),
        (lambda m: m(torch.tensor([[5, IMAGE], [IMAGE, 6]]), **images((0,))), "item 0: its 2 placeholders .* in one row"),
        (lambda m: m(sentence(0, 1), pixel_values=torch.zeros(3, 3, 2, 2), grid_thws=torch.tensor([GRIDS[0]])), "pixel_values has shape"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(call, says):
    with pytest.raises(ValueError, match=says) as caught:
        call(build())
    assert "\n" not in str(caught.value)


def test_a_text_model_refuses_images():
    with pytest.raises(ValueError, match="no vision tower"):
        build(vision=None)(sentence(text(3), 0), **images((0,)))


def test_a_sampled_placeholder_fed_back_alone_is_text():
    model, cache = build().eval(), None
    cache = model.new_cache(1)
    model(sentence(text(3)), cache=cache)
    assert model(torch.tensor([[IMAGE]]), cache=cache).logits.isfinite().all()


def test_a_layout_moves_bounds_and_fills():
    layout = place_media(torch.tensor([[9, IMAGE, 8, IMAGE, 7]]), [3, 1], IMAGE)
    assert layout.source.tolist() == [0, 5, 6, 7, 2, 8, 4]
    assert layout.bounds(torch.tensor([0, 2, 2, 5], dtype=torch.int32)).tolist() == [0, 4, 4, 7]
    assert layout.fill(torch.tensor([[9, IMAGE, 8, IMAGE, 7]]), -100).tolist() == [[9, -100, -100, -100, 8, -100, 7]]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("name", ["tiny-vl", "blueprint-vl", "tiny"])
def test_settings_come_back_from_toml(name, tmp_path):
    config = load_config(name, {"model.vision.norm_eps": 0.5} if name != "tiny" else {})
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml") == config


def test_one_setting_switches_a_tower_on_and_none_switches_it_off(tmp_path):
    on = load_config("tiny", {"model.vision.vt_hidden_size": "32"}).model
    assert on.vision == VisionConfig(vt_hidden_size=32)
    text = {"data.kind": "text", "data.source": "stdlib"}
    off = load_config("tiny-vl", {"model.vision": "none", **text})
    assert off.model == dataclasses.replace(load_config("tiny").model, vocab_size=512)
    (tmp_path / "c.toml").write_text('preset = "tiny-vl"\n[model]\nvision = "none"\n[data]\nkind = "text"\nsource = "stdlib"\n')
    assert load_config(tmp_path / "c.toml") == off


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("qkv_hidden_size", "97", "model.vision.qkv_hidden_size = 97: must be a multiple of vt_num_attention_heads = 3"),
        ("qkv_hidden_size", "90", "model.vision.qkv_hidden_size = 90: a head's share, 30, must be a multiple of 4"),
        ("vt_hidden_size", "65", "model.vision.vt_hidden_size = 65: must be even"),
        ("merge_kernel_size", "0,2", "model.vision.merge_kernel_size"),
        ("patch_size", "0", "model.vision.patch_size = 0: a number above 0"),
        ("media_placeholder_token_id", "4096", "below vocab_size = 512"),
        ("media_placeholder_token_id", "2", "is pad_token_id; take a token of its own"),
        ("patchsize", "2", "did you mean model.vision.patch_size"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(key, value, says):
    with pytest.raises(UserError) as caught:
        load_config("tiny-vl", {f"model.vision.{key}": value})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["3", [], {"patch_size": "wide"}])
def test_a_wrong_table_of_settings_is_refused(value):
    from atoll.config import Config, merge

    with pytest.raises(UserError, match=r"model\.vision"):
        merge(Config(), {"model": {"vision": value}}, "")


def test_the_placeholder_is_a_special_token_of_our_own_tokenizer():
    for name in ("tiny-vl", "blueprint-vl"):
        model = load_config(name).model
        assert special_layout(model)[model.vision.media_placeholder_token_id] == "<|media_pad|>"
        assert len(special_layout(model)) == len(set(special_layout(model).values())) == 11
    assert special_layout(load_config("tiny-vl").model) == special_layout(load_config("tiny").model)
