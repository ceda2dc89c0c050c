"""The tower and the projector: the formulas written out once more, items apart, initial values, refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import pad

from atoll.config import load_config
from atoll.nn import Projector, VisionTower
from atoll.ops.attention import segment_attention
from atoll.ops.vision import interpolate_table, time_codes

IMAGES = [(1, 2, 4), (1, 6, 10), (3, 4, 2), (1, 4, 6), (1, 2, 4)]  # square and not, the table's own size, a clip
TABLE = (4, 6)


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> VisionTower:
    """A small tower with norms and table away from their start, so that every term counts."""
    torch.manual_seed(seed)
    shape = {"hidden": 20, "qkv": 24, "patch": 3, "table": TABLE, "frames": 3, "eps": 1e-3, **changes}
    tower = VisionTower(10, 2, 3, dtype=dtype, **shape)
    with torch.no_grad():
        for name, p in tower.named_parameters():
            p.add_(0.2 * torch.randn_like(p)) if "norm" in name else p.mul_(0.8)
    return tower


def pixels(grids, patch: int = 3, dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    n = sum(math.prod(g) for g in grids)
    values = torch.randn(n, 3, patch, patch, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype), torch.tensor(grids)


# ---------------------------------------------------------------- the formulas, item by item


def norm(x, weight, eps=1e-3):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def place(table, rows, columns):
    """Bilinear by torch's own."""
    return F.interpolate(table.permute(2, 0, 1)[None], size=(rows, columns), mode="bilinear")[0].permute(1, 2, 0)


def turn(x, grid):
    """Complex rotation of adjacent pairs of x [N, H, D]: pairs alternately by column and by row."""
    (t, h, w), d = grid, x.shape[-1]
    rows, columns = torch.arange(h).repeat_interleave(w).repeat(t), torch.arange(w).repeat(h * t)
    theta = 10000.0 ** (-4 * torch.arange(d // 4, dtype=torch.float64) / d)
    angle = torch.stack([columns[:, None] * theta, rows[:, None] * theta], -1).flatten(1)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(z).flatten(-2)


def formula(tower: VisionTower, values: torch.Tensor, grid) -> torch.Tensor:
    """One item through the tower, every step spelt out."""
    p, (t, h, w) = dict(tower.named_parameters()), grid
    x = F.conv2d(values, p["patch_embed.proj.weight"]).flatten(1)
    where = place(p["patch_embed.pos_emb.weight"], h, w)
    frames = []
    for f in range(t):
        angles = f / 10000.0 ** (torch.arange(5, dtype=torch.float64) / 5)
        code = torch.cat([angles.sin(), angles.cos()]).float().double() if t > 1 else 0.0
        frames.append(where + code)
    x = x + torch.stack(frames).flatten(0, 2)
    for i in range(2):
        b = f"encoder.blocks.{i}."
        qkv = norm(x, p[b + "norm0.weight"]) @ p[b + "wqkv.weight"].T
        q, k, v = (part.unflatten(1, (3, 8)) for part in qkv.split(24, 1))
        scores = torch.einsum("nhd,mhd->hnm", turn(q, grid), turn(k, grid)) / 8**0.5
        x = x + torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).flatten(1) @ p[b + "wo.weight"].T
        inner = norm(x, p[b + "norm1.weight"]) @ p[b + "mlp.fc0.weight"].T
        gelu = 0.5 * inner * (1 + torch.tanh((2 / math.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
        x = x + gelu @ p[b + "mlp.fc1.weight"].T
    x = norm(x, p["encoder.final_layernorm.weight"]).view(t, h, w, -1).mean(0)
    tiles = [torch.stack([x[r, c], x[r, c + 1], x[r + 1, c], x[r + 1, c + 1]]) for r in range(0, h, 2) for c in range(0, w, 2)]
    return torch.stack(tiles)


def test_equals_the_formulas_in_float64_with_every_gradient():
    tower, (values, grids) = build(), pixels(IMAGES)
    values.requires_grad_()
    inputs = [values, *tower.parameters()]
    ours = tower(values, grids)
    assert ours.shape == (sum(h * w // 4 for _, h, w in IMAGES), 4, 10)
    parts = values.split([math.prod(g) for g in IMAGES])
    theirs = torch.cat([formula(tower, part, grid) for part, grid in zip(parts, IMAGES, strict=True)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(ours, inputs, weight), torch.autograd.grad(theirs, inputs, weight), strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    tower = VisionTower(6, 1, 1, hidden=8, qkv=4, patch=2, table=(3, 3), frames=2, eps=1e-2, dtype=torch.float64)
    head = Projector(24, 5, dtype=torch.float64)
    values, grids = pixels([(1, 2, 4), (2, 2, 2)], patch=2)

    def run(values, *weights):
        names = [name for name, _ in tower.named_parameters()]
        merged = torch.func.functional_call(tower, dict(zip(names, weights, strict=True)), (values, grids))
        return head(merged)

    inputs = [x.detach().requires_grad_() for x in (values, *tower.parameters())]
    assert torch.autograd.gradcheck(run, inputs, atol=1e-6, rtol=1e-5, fast_mode=True)


def test_the_projector_equals_its_formula():
    torch.manual_seed(0)
    head, x = Projector(12, 7, eps=1e-2, dtype=torch.float64), torch.randn(5, 4, 3, dtype=torch.float64)
    p = dict(head.named_parameters())
    inner = x.flatten(1) @ p["proj.0.weight"].T
    expected = norm((inner * 0.5 * (1 + torch.erf(inner / 2**0.5))) @ p["proj.2.weight"].T, p["post_norm.weight"], 1e-2)
    torch.testing.assert_close(head(x), expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- items


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [0, 4]])
def test_items_together_equal_items_alone_in_any_order(order):
    """The last case is two items of one size, which go through attention as a batch."""
    tower, (values, _) = build(), pixels(IMAGES)
    parts = values.split([math.prod(g) for g in IMAGES])
    together = tower(torch.cat([parts[i] for i in order]), torch.tensor([IMAGES[i] for i in order]))
    alone = torch.cat([tower(parts[i], torch.tensor([IMAGES[i]])) for i in order])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


def test_no_item_sees_another_and_every_patch_sees_its_whole_item():
    tower, (values, grids) = build(), pixels([(1, 2, 4), (2, 4, 2)])
    values.requires_grad_()
    features = tower(values, grids)
    for part, own, other in ((features[:2], slice(0, 8), slice(8, 24)), (features[2:], slice(8, 24), slice(0, 8))):
        (grad,) = torch.autograd.grad(part[0].square().sum(), values, retain_graph=True)
        assert not grad[other].any()
        assert (grad[own].flatten(1).abs().amax(1) > 0).all()


def test_many_items_of_few_sizes_in_any_order_equal_each_alone():
    tower, grids = build(), [(1, 2, 4), (1, 4, 2), (2, 2, 2), (1, 2, 4), (1, 4, 4), (1, 4, 2), (2, 2, 2), (1, 2, 4), (1, 2, 4)]
    values, given = pixels(grids)
    together = tower(values, given)
    sizes, lengths = [math.prod(g) for g in grids], tower.feature_lengths(given)
    alone = [tower(part, given[i : i + 1]) for i, part in enumerate(values.split(sizes))]
    for i, (one, many) in enumerate(zip(alone, together.split(lengths), strict=True)):
        torch.testing.assert_close(many, one, rtol=0, atol=1e-12, msg=f"item {i}")


def test_segments_attend_in_both_directions_and_refuse_wrong_lengths():
    q, k, v = (torch.randn(1, 9, 2, 4, dtype=torch.float64) for _ in range(3))
    for lengths in ([4, 5], [3, 3, 3], [9], [1, 2, 1, 1, 2, 1, 1]):
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        scores = torch.einsum("bthd,bshd->bhts", q, k).masked_fill(ids[:, None] != ids, -torch.inf)
        expected = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
        torch.testing.assert_close(segment_attention(q, k, v, lengths, scale=1.0), expected, rtol=0, atol=1e-12)
    for wrong in ([4, 4], [9, 0], [10, -1]):
        with pytest.raises(ValueError, match="add up to N"):
            segment_attention(q, k, v, wrong, scale=1.0)


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize("size", [(4, 6), (8, 12), (2, 3), (1, 1), (7, 5), (4, 5), (3, 6), (64, 48)])
def test_positions_are_torchs_bilinear_interpolation(size):
    table = torch.randn(*TABLE, 5, dtype=torch.float64, requires_grad=True)
    ours, theirs = interpolate_table(table, *size), place(table, *size)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weight = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, table, weight), torch.autograd.grad(theirs, table, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_a_frames_code_is_added_only_to_clips_and_stays_float32():
    tower, grid = build(dtype=torch.bfloat16), torch.tensor([[1, 2, 2]])
    values, _ = pixels([(1, 2, 2)], dtype=torch.bfloat16)
    torch.testing.assert_close(time_codes(1, 10)[0], pad(torch.ones(5), (5, 0)))  # sines 0, cosines 1: not nothing
    embed = tower.patch_embed
    image, clip = embed(values, [(1, 2, 2)]), embed(torch.cat([values, values]), [(2, 2, 2)])
    plain = F.linear(values.flatten(1), embed.proj.weight.flatten(1))
    where = interpolate_table(embed.pos_emb.weight, 2, 2).flatten(0, 1)
    assert torch.equal(image, plain + where.bfloat16())
    assert torch.equal(clip[4:], plain + (where + time_codes(2, 10)[1]).bfloat16())
    assert time_codes(3, 10).dtype == torch.float32
    assert not list(tower.buffers()), "nothing that a change of type or a meta device could spoil"
    assert tower(values, grid).dtype == clip.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-7), (torch.float64, 2.0**-52)])
def test_the_epsilon_is_the_machine_epsilon_unless_one_is_given(dtype, eps):
    values, grids = pixels([(1, 4, 4)], dtype=dtype)
    free, same, other = (build(dtype=dtype, eps=e) for e in (None, eps, 0.3))
    assert torch.equal(free(values, grids), same(values, grids))
    assert not torch.equal(free(values, grids), other(values, grids))


# ---------------------------------------------------------------- start, memory, refusals


def test_initial_values_follow_the_release():
    torch.manual_seed(0)
    tower, head = VisionTower(64, 2, 4, hidden=256, qkv=96, table=(16, 16)), Projector(256, 128)
    for name, p in {**tower.state_dict(), **head.state_dict()}.items():
        fan_in = p[0].numel() if p.ndim > 1 else 1
        if "norm" in name:
            assert (p == 1).all(), name
        elif "pos_emb" in name:
            assert 0.97 < p.std() < 1.03, name
        elif ".mlp." in name or name.startswith("proj."):
            assert float(p.std()) == pytest.approx((2 / fan_in) ** 0.5, rel=0.03), name
        else:
            assert float(p.std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.03), name
            assert p.abs().max() <= fan_in**-0.5, name


def test_checkpointing_changes_no_gradient():
    grads = []
    for flag in (False, True):
        tower, (values, grids) = build(), pixels(IMAGES)
        tower.encoder.gradient_checkpointing = flag
        calls = []
        tower.encoder.blocks[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        tower(values, grids).square().sum().backward()
        assert len(calls) == 1 + flag
        grads.append([p.grad for p in tower.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_bfloat16_stays_near_float32():
    wide, narrow = build(dtype=torch.float32, eps=2.0**-7), build(dtype=torch.bfloat16, eps=None)
    with torch.no_grad():
        for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
            a.copy_(b.float())
        values, grids = pixels(IMAGES, dtype=torch.bfloat16)
        a, b = wide(values.float(), grids), narrow(values, grids)
    assert b.dtype == torch.bfloat16
    assert (a - b.float()).norm() < 0.02 * a.norm()


@pytest.mark.parametrize(
    ("grids", "shape", "says"),
    [
        ([[1, 2, 4]], (7, 3, 3, 3), r"pixel_values has shape \(7, 3, 3, 3\): \(8, 3, 3, 3\)"),
        ([[1, 2, 4]], (8, 3, 4, 3), r"\(8, 3, 3, 3\) is expected"),
        ([[1, 2, 4]], (8, 27), r"\(8, 3, 3, 3\) is expected"),
        ([[1, 2, 3]], (6, 3, 3, 3), r"grid_thws\[0\] = \(1, 2, 3\): rows must be a multiple of 2 and columns of 2"),
        ([[1, 2, 4], [1, 0, 4]], (8, 3, 3, 3), r"grid_thws\[1\] = \(1, 0, 4\)"),
        ([[4, 2, 2]], (16, 3, 3, 3), r"grid_thws\[0\] = \(4, 2, 2\): 1 to 3 frames"),
        ([[0, 2, 2]], (0, 3, 3, 3), r"1 to 3 frames"),
        ([[2, 4]], (8, 3, 3, 3), r"integers \[items, 3\]"),
        ([[1.0, 2.0, 4.0]], (8, 3, 3, 3), r"integers \[items, 3\]"),
        ([1, 2, 4], (8, 3, 3, 3), r"integers \[items, 3\]"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(grids, shape, says):
    with pytest.raises(ValueError, match=says) as caught:
        build()(torch.zeros(shape, dtype=torch.float64), torch.tensor(grids))
    assert "\n" not in str(caught.value)


def test_a_pictures_bytes_are_no_pixels():
    with pytest.raises(ValueError, match="uint8: normalised floats"):
        build()(torch.zeros(8, 3, 3, 3, dtype=torch.uint8), torch.tensor([[1, 2, 4]]))


def test_names_and_shapes_are_the_releases():
    """The published tower, built on the meta device."""
    from atoll.model import Model

    with torch.device("meta"):
        model = Model(load_config("blueprint-vl", {"model.num_hidden_layers": 1, "model.num_experts": 17}).model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith("language_model.")}
    block = {
        "norm0.weight": (1024,), "norm1.weight": (1024,), "wqkv.weight": (4608, 1024), "wo.weight": (1024, 1536),
        "mlp.fc0.weight": (4096, 1024), "mlp.fc1.weight": (1024, 4096),
    }  # fmt: skip
    assert shapes == {
        "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
        **{f"vision_tower.encoder.blocks.{i}.{name}": shape for i in range(27) for name, shape in block.items()},
        "vision_tower.encoder.final_layernorm.weight": (1024,),
        "mm_projector.proj.0.weight": (4096, 4096),
        "mm_projector.proj.2.weight": (7168, 4096),
        "mm_projector.post_norm.weight": (7168,),
    }
