"""The Triton kernels: in the interpreter in float32 on any machine, on the card itself where there is one."""

import os

import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = "cuda" if CARD else "cpu"

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from test_kda import random_inputs, relative  # noqa: E402

from atoll.ops.kda import kda, kernel_report  # noqa: E402
from atoll.ops.kda.table import host_table  # noqa: E402
from atoll.ops.kda.triton_path import Config, kda_triton, refusal  # noqa: E402


def both(inputs, edges, state, **options):
    """Outputs, states and gradients: of the kernels in float32, of the recurrence in float64."""
    results = []
    for backend, dtype in (("triton", torch.float32), ("recurrent", torch.float64)):
        leaves = {key: value.to(DEVICE, dtype).requires_grad_() for key, value in inputs.items()}
        start = None if state is None else state.to(DEVICE, dtype).requires_grad_()
        if backend == "triton":
            o, final = kda_triton(*leaves.values(), -5.0, 0.3, start, edges, **options)
        else:
            cu = None if edges is None else torch.tensor(edges)
            o, final = kda(**leaves, scale=0.3, initial_state=start, cu_seqlens=cu, output_final_state=True, backend=backend)
        generator = torch.Generator().manual_seed(9)
        ups = [torch.randn(x.shape, generator=generator).to(x) for x in (o, final)]
        wanted = [*leaves.values(), *([] if start is None else [start])]
        results.append([o.detach(), final.detach(), *torch.autograd.grad((o, final), wanted, ups)])
    return results


def assert_close(got, expected):
    """Relative errors; a gradient that saturated gates make vanish is measured against that of q."""
    size = expected[2].norm()
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < 2e-5 or (a.double() - b).norm() < 1e-5 * size


@pytest.mark.parametrize("gates", ["random", "high", "low", "mixed"])
def test_packed_with_states(gates):
    inputs = random_inputs(1, 80, heads=1, width=16, value=16, gates=gates)
    state = torch.randn(4, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_close(*both(inputs, [0, 0, 1, 67, 80], state))


@pytest.mark.parametrize(("width", "value"), [(16, 32), (32, 16)])
def test_batch_without_state_and_unequal_widths(width, value):
    assert_close(*both(random_inputs(2, 20, heads=2, width=width, value=value), None, None))


def test_channels_in_halves_and_value_blocks():
    """The loops that wide heads take: channels, columns and value columns in parts."""
    config = Config(
        prepare_channels=16,
        prepare_columns=16,
        gradient_channels=16,
        scan_columns=16,
        keep_columns=16,
        back_columns=16,
        pairs_channels=16,
        pairs_columns=16,
        join_channels=16,
    )
    inputs = random_inputs(1, 80, heads=1, width=32, value=32)
    assert_close(*both(inputs, None, None, config=config))
    state = torch.randn(3, 1, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    longer = random_inputs(1, 160, heads=1, width=32, value=32)
    longer["g"] = longer["g"] - 2.0
    assert_close(*both(longer, [0, 150, 150, 160], state, config=config, segment=1))


def test_identical_keys():
    inputs = random_inputs(1, 64, heads=1, width=16, value=16)
    inputs["k"] = torch.ones_like(inputs["k"])
    inputs["g"] = inputs["g"] - 8
    got, expected = both(inputs, None, None)
    for a, b in zip(got[:6], expected[:6], strict=True):
        assert relative(a, b) < 2e-5


def test_later_inputs_change_no_earlier_output_bit():
    inputs, other = (random_inputs(1, 40, heads=1, width=16, value=16, dtype=torch.float32, seed=s) for s in (0, 1))

    def run(values):
        return kda_triton(*[x.to(DEVICE) for x in values.values()], -5.0, 0.3, None, None)[0]

    before = run(inputs)
    for cut in (7, 16, 33):
        mixed = {key: torch.cat((x[:, :cut], other[key][:, cut:]), 1) if x.dim() > 2 else x for key, x in inputs.items()}
        assert torch.equal(run(mixed)[:, :cut], before[:, :cut])


def test_gradients_of_a_prefix_loss_ignore_later_inputs_to_the_bit():
    inputs, other = (random_inputs(1, 100, heads=1, width=16, value=16, dtype=torch.float32, seed=s) for s in (0, 1))

    def gradients(values, cut):
        leaves = {key: value.to(DEVICE).requires_grad_() for key, value in values.items()}
        o = kda_triton(*leaves.values(), -5.0, 0.3, None, None)[0]
        return dict(zip(leaves, torch.autograd.grad(o[:, :cut].square().sum(), list(leaves.values())), strict=True))

    for cut in (20, 40, 70):
        mixed = {k: torch.cat((v[:, :cut], other[k][:, cut:]), 1) if v.dim() > 2 else v for k, v in inputs.items()}
        first, second = gradients(inputs, cut), gradients(mixed, cut)
        for name in ("q", "k", "v", "g", "beta"):
            assert torch.equal(first[name][:, :cut], second[name][:, :cut]), name
            assert not second[name][:, cut:].any(), name


@pytest.mark.parametrize(("segment", "long", "names"), [(0, 40, "qkvgb"), (1, 130, "k")])
def test_nan_stays_in_its_document(segment, long, names):
    end = 10 + long
    inputs = list(random_inputs(1, end + 10, heads=1, width=16, value=16, dtype=torch.float32).values())
    edges = [0, 10, end, end, end + 10]

    def run(values):
        leaves = [x.to(DEVICE).requires_grad_() for x in values]
        o, final = kda_triton(*leaves, -5.0, 0.3, None, edges, segment=segment)
        return [o.detach(), *torch.autograd.grad(o.sum() + final.sum(), leaves[:5])], final.detach()

    clean, states = run(inputs)
    for name in names:
        dirty = [x.clone() for x in inputs]
        dirty["qkvgb".index(name)][:, 30] = float("nan")
        got, ends = run(dirty)
        assert got[0][:, 30:end].isnan().any(), name
        for a, b in zip(got, clean, strict=True):
            assert torch.equal(a[:, :10], b[:, :10]), name
            assert torch.equal(a[:, end:], b[:, end:]), name
        assert torch.equal(ends[[0, 2, 3]], states[[0, 2, 3]]), name


def test_table_of_chunks():
    table = host_table((0, 0, 1, 130, 130), torch.device("cpu"), 0)
    assert table.starts.tolist() == [0, 1, 65, 129]
    assert table.counts.tolist() == [1, 64, 64, 1]
    assert table.first.tolist() == [0, 0, 1, 4, 4]


def test_refusals_name_the_reason():
    q, v = torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 1, 16)
    assert refusal(q, v, -5.0, (torch.float32,)) == ""
    assert "lower_bound" in refusal(q, v, None, (torch.float32,))
    assert "K, V = 24" in refusal(torch.zeros(1, 4, 1, 24), v, -5.0, (torch.float32,))
    assert "bfloat16" in refusal(q, v, -5.0, (torch.float64,))


def test_dispatch_counts_and_strictness():
    kernel_report(clear=True)
    inputs = {key: value.to(DEVICE) for key, value in random_inputs(1, 5, heads=1, width=16, value=16, dtype=torch.float32).items()}
    kda(**inputs, backend="triton")
    assert kernel_report() == {"triton": 1}
    with pytest.raises(ValueError, match="lower_bound = None"):
        kda(**inputs, lower_bound=None, backend="triton")


def test_no_token_at_all_keeps_the_state():
    inputs = [value.to(DEVICE) for value in random_inputs(1, 0, heads=1, width=16, value=16, dtype=torch.float32).values()]
    state = torch.randn(2, 1, 16, 16, device=DEVICE)
    o, final = kda_triton(*inputs, -5.0, 0.3, state, [0, 0, 0])
    assert o.shape == (1, 0, 1, 16)
    assert torch.equal(final, state)
