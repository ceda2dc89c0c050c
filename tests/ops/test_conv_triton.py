"""The short convolution's kernels against their twin: in Triton's interpreter on any machine, on the card itself where there is one."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = "cuda" if CARD else "cpu"

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from atoll.ops import conv_launch as launch  # noqa: E402
from atoll.ops import kernel_report  # noqa: E402
from atoll.ops.conv import short_conv  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden" / "kda" / "short_conv.safetensors"
LIMIT = 1e-5 if CARD else 2e-6  # a card's exp and division are approximate
PACKED = [0, 0, 1, 3, 40, 41, 41, 80]


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def material(shape, taps=4, documents=None, seed=0):
    """x, weight, and a state for each document when their number is given."""
    make = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=make) for s in (shape, (shape[2], 1, taps), (documents or 0, taps - 1, shape[2]))]
    return [t.to(DEVICE) for t in made[: 2 if documents is None else 3]]


def run(tensors, edges, backend, dtype, final=True):
    """Output, final state, gradients of x, weight and state."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    state = leaves[2] if len(leaves) == 3 else None
    cu = None if edges is None else torch.tensor(edges, device=DEVICE)
    y, last = short_conv(leaves[0], leaves[1], initial_state=state, cu_seqlens=cu, output_final_state=final, backend=backend)
    make = torch.Generator().manual_seed(7)
    outputs = [y] if last is None else [y, last]
    ups = [torch.randn(o.shape, generator=make).to(o) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, ups)]


def assert_twin(tensors, edges=None, **options):
    got, expected = run(tensors, edges, "triton", torch.float32, **options), run(tensors, edges, "torch", torch.float64, **options)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < LIMIT


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 37])
def test_rows_of_one_length(length, with_state):
    assert_twin(material((2, length, 24), documents=2 if with_state else None))


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 4, 8])
def test_packed_documents_and_taps(taps, with_state):
    assert_twin(material((1, 80, 20), taps, len(PACKED) - 1 if with_state else None), PACKED)


def test_empty_documents_at_both_ends_and_no_final_state():
    assert_twin(material((1, 5, 16), documents=5), [0, 0, 0, 5, 5, 5], final=False)
    assert_twin(material((1, 5, 16), documents=5), [0, 0, 0, 5, 5, 5])


@pytest.mark.parametrize("kind", ["zero", "state"])
def test_golden(kind):
    data = load_file(GOLDEN)
    x, weight, state = (data[key].float().to(DEVICE) for key in ("x", "weight", "initial_state"))
    tensors = [x[None], weight, *([state] if kind == "state" else [])]
    cu = data["cu_seqlens"].to(DEVICE)
    leaves = [t.requires_grad_() for t in tensors]
    held = leaves[2] if kind == "state" else None
    y, final = short_conv(leaves[0], leaves[1], initial_state=held, cu_seqlens=cu, output_final_state=True, backend="triton")
    y[0].backward(data["dy"].to(y))
    got = {"y": y[0], "final_state": final, "dx": leaves[0].grad[0], "dweight": leaves[1].grad}
    if held is not None:
        got["dinitial_state"] = held.grad
    for key, value in got.items():
        assert relative(value.detach().cpu(), data[f"{kind}.{key}"]) < LIMIT


def test_packed_is_separate_to_the_bit_and_state_carries():
    x, weight, start = material((1, 80, 32), documents=len(PACKED) - 1)

    def kernel(x, **options):
        return short_conv(x, weight, output_final_state=True, backend="triton", **options)

    y, final = kernel(x, initial_state=start, cu_seqlens=torch.tensor(PACKED, device=DEVICE))
    for n, (a, b) in enumerate(itertools.pairwise(PACKED)):
        alone, after = kernel(x[:, a:b], initial_state=start[n : n + 1])
        assert torch.equal(alone, y[:, a:b])
        assert torch.equal(after[0], final[n])
    head, state = kernel(x[:, :33])
    assert torch.equal(torch.cat((head, kernel(x[:, 33:], initial_state=state)[0]), 1), kernel(x)[0])


def test_nan_stays_in_its_document_forward_and_backward():
    edges = [0, 20, 22, 50]
    tensors = material((1, 50, 16), documents=3)
    clean = run(tensors, edges, "triton", torch.float32)
    tensors[0][:, 20:22], tensors[2][1] = float("nan"), float("nan")
    dirty = run(tensors, edges, "triton", torch.float32)
    rows = torch.tensor([*range(20), *range(22, 50)])
    for key in (0, 2):  # y and dx
        assert torch.equal(dirty[key][:, rows], clean[key][:, rows])
    for key in (1, 4):  # final state and the initial state's gradient
        assert torch.equal(dirty[key][[0, 2]], clean[key][[0, 2]])


def test_later_rows_change_no_earlier_output():
    x, weight = material((1, 50, 16))
    y, _ = short_conv(x, weight, backend="triton")
    x[:, 30:] = float("nan")
    assert torch.equal(short_conv(x, weight, backend="triton")[0][:, :30], y[:, :30])


@pytest.mark.parametrize(
    "config", [launch.ConvConfig(rows=32, channels=64), launch.ConvConfig(back_channels=16, back_rows=7, back_group=2)]
)
def test_other_settings_give_the_same(config, monkeypatch):
    monkeypatch.setattr(launch, "ConvConfig", lambda: config)
    assert_twin(material((1, 80, 40), documents=len(PACKED) - 1), PACKED)


def test_bfloat16_values():
    tensors = [t.bfloat16() for t in material((2, 20, 16))]
    got, expected = (run(tensors, None, backend, torch.bfloat16) for backend in ("triton", "torch"))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert relative(a, b) < 8e-3


def test_dispatch_refusals_and_report():
    x, weight = material((1, 4, 16))
    kernel_report(clear=True)
    short_conv(x, weight, backend="triton")
    assert kernel_report(clear=True) == {"short_conv triton": 1}
    with pytest.raises(ValueError, match="9 taps"):
        short_conv(x, material((1, 4, 16), taps=9)[1], backend="triton")
    with pytest.raises(ValueError, match="neither bfloat16 nor float32"):
        short_conv(x.double(), weight.double(), backend="triton")


def test_registration():
    """torch.library's own checks of schema, fake shapes, gradients, and tracing with dynamic shapes."""
    x, weight, state = (t.requires_grad_() for t in material((1, 12, 16), documents=3))
    edges = torch.tensor([0, 5, 5, 12], device=DEVICE)
    torch.library.opcheck(torch.ops.atoll.short_conv.default, (x[0].detach().requires_grad_(), weight[:, 0], state, edges, 12, True))
    torch.library.opcheck(torch.ops.atoll.short_conv.default, (x[0].detach().requires_grad_(), weight[:, 0], None, None, 6, False))


def test_compiles_without_a_break():
    x, weight, state = (t.requires_grad_() for t in material((1, 12, 16), documents=3))
    edges = torch.tensor([0, 5, 5, 12], device=DEVICE)

    def layer(x, weight, state):
        y, final = short_conv(x, weight, initial_state=state, cu_seqlens=edges, output_final_state=True, backend="triton")
        return y.sum() + (final * 2).sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(x, weight, state), (x, weight, state)) for f in (compiled, layer)), strict=True):
        torch.testing.assert_close(a, b)
