"""The norms' kernels against their twins: in Triton's interpreter on any machine, on the card itself where there is one."""

import os

import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = "cuda" if CARD else "cpu"

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from atoll.ops import kernel_report  # noqa: E402
from atoll.ops.norm import gated_rms_norm, l2_norm, rms_norm  # noqa: E402
from atoll.ops.norm_launch import NormConfig, norm_config, norm_refusal  # noqa: E402

KINDS = ("rms", "gated", "l2")


def apply(kind, x, weight, gate, backend):
    if kind == "rms":
        return rms_norm(x, weight, 1e-5, backend=backend)
    return gated_rms_norm(x, weight, gate, 1e-5, backend=backend) if kind == "gated" else l2_norm(x, backend=backend)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def material(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=generator) for s in (shape, shape[-1:], shape, shape)]
    return [t.to(DEVICE, dtype) for t in made]


def run(kind, tensors, backend):
    """Output and the gradients of those of x, weight, gate that take part."""
    x, weight, gate, up = tensors
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, gate)]
    y = apply(kind, *leaves, backend)
    used = {"rms": leaves[:2], "gated": leaves, "l2": leaves[:1]}[kind]
    return [y.detach(), *torch.autograd.grad(y, used, up.to(y.dtype))]


# narrow rows in one tile; several pieces; widths that divide nothing; one row; more rows than a tile
@pytest.mark.parametrize("shape", [(3, 5, 16), (7, 96), (1, 200), (2, 2, 1000), (3, 1792), (2, 7168), (70, 24)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, shape):
    tensors = material(shape)
    for got, expected in zip(run(kind, tensors, "triton"), run(kind, [t.double() for t in tensors], "torch"), strict=True):
        assert got.shape == expected.shape
        assert relative(got, expected) < 1e-5


@pytest.mark.parametrize("size", [1e-4, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_small_and_large_inputs(kind, size):
    x, weight, gate, up = material((5, 32))
    for got, expected in zip(
        run(kind, [x * size, weight, gate * size, up], "triton"),
        run(kind, [t.double() for t in (x * size, weight, gate * size, up)], "torch"),
        strict=True,
    ):
        assert relative(got, expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_rounds_where_the_twin_does(kind):
    tensors = [t.bfloat16() for t in material((6, 64))]
    got, expected = run(kind, tensors, "triton"), run(kind, tensors, "torch")
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert relative(a, b) < 8e-3


def test_nan_stays_in_its_row():
    x, weight, gate, _ = material((40, 24))
    clean = gated_rms_norm(x, weight, gate, backend="triton")
    x[7, 3] = float("nan")
    dirty = gated_rms_norm(x, weight, gate, backend="triton")
    rest = torch.arange(40) != 7
    assert torch.equal(dirty[rest], clean[rest])
    assert dirty[7].isnan().all()


def test_repeated_launches_give_the_same_bits():
    tensors = material((70, 24))
    for a, b in zip(run("gated", tensors, "triton"), run("gated", tensors, "triton"), strict=True):
        assert torch.equal(a, b)


def test_no_row_at_all():
    for got in run("gated", material((0, 24)), "triton"):
        assert not got.any()


def test_settings_hold_every_row_with_little_waste():
    for width in range(1, 8193):
        c = norm_config(width)
        assert width <= c.block * c.pieces < max(width + c.block, 17)
        assert c.pieces <= 8
        assert all(n & (n - 1) == 0 for n in (c.rows, c.block, c.warps))
    assert norm_config(7168) == NormConfig(1, 1024, 7, 8)


def test_dispatch_refusals_and_report():
    x, weight, gate, _ = material((2, 16))
    kernel_report(clear=True)
    rms_norm(x, weight, backend="triton")
    gated_rms_norm(x, weight, gate, backend="triton")
    l2_norm(x, backend="triton")
    assert kernel_report(clear=True) == {"rms_norm triton": 1, "gated_rms_norm triton": 1, "l2_norm triton": 1}
    assert "float32" in norm_refusal(x.double())
    assert "8192" in norm_refusal(x.new_zeros(1, 8193))
    with pytest.raises(ValueError, match="neither bfloat16 nor float32"):
        l2_norm(x.double(), backend="triton")
    with pytest.raises(ValueError, match="backend = 'cuda'"):
        l2_norm(x, backend="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_registration(kind):
    """torch.library's own checks of schema, fake shapes, gradients, and tracing with dynamic shapes."""
    x, weight, gate, _ = material((3, 16))
    given = (
        x.requires_grad_(),
        None if kind == "l2" else weight.requires_grad_(),
        gate.requires_grad_() if kind == "gated" else None,
        1e-5,
        kind != "l2",
    )
    torch.library.opcheck(torch.ops.atoll.norm.default, given)


def test_compiles_without_a_break():
    x, weight, gate, up = material((3, 16))
    leaves = [t.requires_grad_() for t in (x, weight, gate)]

    def layer(x, weight, gate):
        return gated_rms_norm(rms_norm(l2_norm(x, backend="triton"), weight, backend="triton"), weight, gate, backend="triton")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), layer(*leaves))
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves, up), torch.autograd.grad(layer(*leaves), leaves, up), strict=True):
        torch.testing.assert_close(a, b)
