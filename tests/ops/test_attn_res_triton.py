"""The attention residual's kernels against their twins: in Triton's interpreter on any machine, on the card where there is one."""

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

from ops.test_attn_res import ten_layers  # noqa: E402

from atoll.ops import kernel_report  # noqa: E402
from atoll.ops.attn_res import attn_res, attn_res_reference, attn_res_sum, block_refusal, open_block  # noqa: E402
from atoll.ops.attn_res.mix_launch import mix_config, mix_refusal  # noqa: E402
from atoll.ops.norm import rms_norm  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden" / "attn_res"
F32 = torch.float32


def rand(*shape, seed=0, dtype=F32, scale=1.0):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return made.to(DEVICE, dtype)


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30)) if b.numel() else 0.0


def mixed(kind, sources, query, weight, delta, out_norm, up):
    """Mix, sum, and all gradients; `kind` is a backend, or the formula in float64."""
    dtype = torch.float64 if kind == "formula" else None
    leaves = [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in (query, weight, delta, out_norm, *sources)]
    query, weight, delta, out_norm, *sources = leaves
    if kind == "formula":
        last = sources[-1] if delta is None else sources[-1] + delta
        out = attn_res_reference([*sources[:-1], last], query, weight)
        out = out if out_norm is None else rms_norm(out, out_norm, backend="torch")
    else:
        out, last = attn_res_sum(sources, query, weight, delta=delta, out_norm=out_norm, backend=kind)
    used = [t for t in leaves if t is not None]
    total = (out * up.to(out.dtype)).sum() + (last * up.flip(0).to(out.dtype)).sum()
    return [out, last, *torch.autograd.grad(total, used)]


# narrow rows in one tile, widths that divide nothing, the blueprint's, more rows than a tile, many sources
SHAPES = [(1, 3, 16), (3, 5, 96), (9, 4, 200), (5, 2, 7168), (2, 70, 24), (4, 3, 1000)]


@pytest.mark.parametrize("fused", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("sources", "tokens", "width"), SHAPES)
def test_values_and_gradients(sources, tokens, width, fused):
    rows = [rand(tokens, width, seed=s, scale=10.0 ** (s % 4 - 2)) for s in range(sources)]
    query, weight = rand(width, seed=80, scale=width**-0.5), rand(width, seed=81)
    delta, out_norm = rand(tokens, width, seed=82) if fused[0] else None, rand(width, seed=83) if fused[1] else None
    given = (rows, query, weight, delta, out_norm, rand(tokens, width, seed=84))
    got, expected = mixed("triton", *given), mixed("formula", *given)
    scale = float(expected[-1].norm())
    for a, b in zip(got, expected, strict=True):
        # a lone source's score has no gradient at all
        assert relative(a, b) < 2e-5 or float((a.double() - b).norm()) < 1e-6 * scale
    for a, b in zip(got, mixed("triton", *given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("sources", "fused"), [(64, True), (131, False)])
def test_many_sources(sources, fused):
    """As many as a kernel takes, and more: in groups then."""
    rows = [rand(2, 24, seed=s) for s in range(sources)]
    given = (rows, rand(24, seed=80, scale=0.2), rand(24, seed=81), None, rand(24, seed=83) if fused else None, rand(2, 24, seed=84))
    for a, b in zip(mixed("triton", *given), mixed("formula", *given), strict=True):
        assert relative(a, b) < 2e-5


@pytest.mark.parametrize("sources", [1, 2, 9])
@pytest.mark.parametrize("kind", ["norms from 1e-4 to 1e4", "identical", "zero query", "a zero source", "large scores"])
def test_hard_sources(kind, sources):
    rows = [rand(7, 96, seed=s) for s in range(sources)]
    query = rand(96, seed=90, scale=0.03)
    if kind == "norms from 1e-4 to 1e4":
        rows = [r * 10 ** (8 * i / max(1, sources - 1) - 4.0) for i, r in enumerate(rows)]
    if kind == "identical":
        rows = [rows[0].clone() for _ in rows]
    if kind == "a zero source":
        rows[0] = torch.zeros_like(rows[0])
    query = {"zero query": query * 0, "large scores": query * 3000}.get(kind, query)
    given = (rows, query, rand(96, seed=91), None, None, rand(7, 96, seed=92))
    got, expected = mixed("triton", *given), mixed("formula", *given)
    scale = max(float(b.detach().norm()) for b in expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.isfinite(a).all()
        assert relative(a, b) < 5e-5 or float((a.double() - b).norm()) < 1e-5 * scale


@pytest.mark.parametrize("name", ["mix_r1", "mix_r2", "mix_r5", "mix_r9"])
def test_golden_mix_and_gradients(name):
    golden = {k: v.to(DEVICE) for k, v in load_file(GOLDEN / f"{name}.safetensors").items()}
    rows = [r.to(F32).requires_grad_() for r in golden["rows"]]
    query, weight = golden["query"].to(F32).requires_grad_(), golden["norm_weight"].to(F32).requires_grad_()
    out = attn_res(rows, query, weight, 1e-5, backend="triton")
    grads = torch.autograd.grad(out, [query, weight, *rows], golden["dout"].to(F32))
    for ours, true in zip([out, *grads], [golden["out"], golden["dquery"], golden["dnorm_weight"], *golden["drows"]], strict=True):
        torch.testing.assert_close(ours.double(), true.double(), rtol=1e-5, atol=1e-5 * max(1.0, float(true.abs().max())))


def two_phase_mix(rows, query, weight):
    if len(rows) == 1:
        return open_block(rows, [query], [weight], backend="triton").mix(0)[0]
    return open_block(rows[:-1], [query], [weight], backend="triton").mix(0, rows[-1])[0]


@pytest.mark.parametrize("name", ["schedule_bs3", "schedule_bs4"])
@pytest.mark.parametrize("mix", [lambda *a: attn_res(*a, backend="triton"), two_phase_mix])
def test_golden_schedule_of_ten_layers(name, mix):
    golden = load_file(GOLDEN / f"{name}.safetensors", device=DEVICE)
    block = int(name[-1])
    inputs = {k[2:]: golden[k[2:]].to(F32).requires_grad_() for k in golden if k.startswith("d.")}
    out, trace = ten_layers(inputs, block, 1e-5, mix)
    torch.testing.assert_close(out.double(), golden["out"].double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(trace["output_mix"].double(), golden["trace.output_mix"].double(), rtol=0, atol=1e-5)
    grads = torch.autograd.grad(out, list(inputs.values()), golden["dout"].to(F32), allow_unused=True)
    for key, grad in zip(inputs, grads, strict=True):
        grad = torch.zeros_like(inputs[key]) if grad is None else grad
        torch.testing.assert_close(grad, golden[f"d.{key}"], rtol=1e-4, atol=1e-5 * max(1.0, float(golden[f"d.{key}"].abs().max())))


class BlockCase:
    """A block of queries on finished sources, each query but the first with the running sum of what came before it."""

    def __init__(self, sources, queries, tokens, width, dtype=F32):
        self.sources = [rand(tokens, width, seed=s, dtype=dtype, scale=10.0 ** (s % 4 - 2)) for s in range(sources)]
        self.queries = [rand(width, seed=50 + s, dtype=dtype, scale=width**-0.5) for s in range(queries)]
        self.norms = [rand(width, seed=150 + s, dtype=dtype) for s in range(queries)]
        self.steps = [rand(tokens, width, seed=250 + s, dtype=dtype) for s in range(queries)]
        self.out_norm, self.up = rand(width, seed=350, dtype=dtype), rand(queries, tokens, width, seed=351, dtype=dtype)

    def run(self, kind, partial=None, close=True, gradients=True):
        """All mixes and all gradients."""
        groups = [self.sources, self.queries, self.norms, self.steps, [self.out_norm]]
        wide = (lambda t: t.double()) if kind == "formula" else (lambda t: t)
        sources, queries, norms, steps, (out_norm,) = ([wide(t.detach()).requires_grad_() for t in g] for g in groups)
        block = None if kind == "formula" else open_block(sources, queries, norms, partial_dtype=partial, backend=kind)
        outs, prefix = [], None
        for i, (query, norm) in enumerate(zip(queries, norms, strict=True)):
            after = out_norm if i % 2 else None
            if block is None:
                prefix = None if i == 0 else steps[0] if i == 1 else prefix + steps[i - 1]
                out = attn_res_reference([*sources, *([] if prefix is None else [prefix])], query, norm)
                out = out if after is None else rms_norm(out, after, backend="torch")
            else:
                prefix = steps[0] if i == 1 else prefix
                out, prefix = block.mix(i, prefix, delta=steps[i - 1] if i > 1 else None, out_norm=after)
            outs.append(out)
        if block is not None and close:
            block.close()
        used = [*sources, *queries, *norms, *steps[: len(queries) - 1], *([out_norm] if len(queries) > 1 else [])]
        outs = torch.stack(outs)
        return [outs, *(torch.autograd.grad(outs, used, wide(self.up)) if gradients else [])]


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize(
    ("sources", "queries", "tokens", "width"), [(1, 1, 1, 16), (1, 4, 5, 40), (3, 5, 4, 96), (9, 3, 3, 200), (2, 3, 20, 64), (2, 17, 2, 40)]
)
def test_block_values_and_gradients(sources, queries, tokens, width, close):
    case = BlockCase(sources, queries, tokens, width)
    got, expected = case.run("triton", close=close), case.run("formula")
    scale = float(expected[1].norm())
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < 2e-5 or float((a.double() - b).norm()) < 1e-6 * scale
    for a, b in zip(got, case.run("triton"), strict=True):
        assert torch.equal(a, b)


def test_two_phases_equal_one_pass():
    """To 1e-6 with float32 means, to 1e-2 with bfloat16 ones."""
    case = BlockCase(4, 5, 6, 96)
    partial = case.steps[0]
    expected = [attn_res([*case.sources, partial], q, w, backend="triton") for q, w in zip(case.queries, case.norms, strict=True)]
    for dtype, limit in ((F32, 1e-6), (torch.bfloat16, 1e-2)):
        block = open_block(case.sources, case.queries, case.norms, partial_dtype=dtype, backend="triton")
        for i, one in enumerate(expected):
            assert relative(block.mix(i, partial)[0], one) < limit


def test_many_tokens_take_the_other_tile():
    case = BlockCase(2, 2, 300, 16)
    assert relative(case.run("triton", gradients=False)[0], case.run("formula", gradients=False)[0]) < 2e-5


def test_no_tokens():
    for got in (BlockCase(3, 3, 0, 24).run("triton"), mixed("triton", *no_tokens(False)), mixed("triton", *no_tokens(True))):
        assert not any(t.any() for t in got)


def no_tokens(fused):
    extra = (rand(0, 24), rand(24)) if fused else (None, None)
    return [rand(0, 24) for _ in range(3)], rand(24, seed=1), rand(24, seed=2), *extra, rand(0, 24)


def test_bfloat16():
    """bfloat16 sources, float32 inside: an error of the last rounding, no more."""
    half = {"dtype": torch.bfloat16}
    rows, query, weight = [rand(6, 96, seed=s, **half) for s in range(5)], rand(96, seed=80, scale=0.1, **half), rand(96, seed=81, **half)
    extra = rand(6, 96, seed=82, **half), rand(96, seed=83, **half)
    up = rand(6, 96, seed=84, **half)
    for given in ((None, None), extra):
        got, twin = (mixed(kind, rows, query, weight, *given, up) for kind in ("triton", "torch"))
        for a, b in zip(got, twin, strict=True):
            assert a.dtype == b.dtype == torch.bfloat16
            assert relative(a, b) < 1e-2


def test_nan_stays_in_its_row():
    rows = [rand(9, 24, seed=s) for s in range(3)]
    query, weight = rand(24, seed=8), rand(24, seed=9)
    clean = attn_res(rows, query, weight, backend="triton")
    rows[1][4, 3] = float("nan")
    dirty = attn_res(rows, query, weight, backend="triton")
    rest = torch.arange(9, device=DEVICE) != 4
    assert torch.equal(dirty[rest], clean[rest])
    assert dirty[4].isnan().all()


def test_later_tokens_change_nothing_before_them():
    base = BlockCase(3, 2, 40, 16).run("triton", gradients=False)[0]
    for t in (1, 16, 33):
        changed = BlockCase(3, 2, 40, 16)
        for x in (*changed.sources, *changed.steps):
            x[t:] = 3 * x[t:] + 1
        other = changed.run("triton", gradients=False)[0]
        assert torch.equal(other[:, :t], base[:, :t])
        assert not torch.equal(other[:, t:], base[:, t:])


def test_dispatch_refusals_and_report():
    x, v = rand(2, 16), rand(16)
    kernel_report(clear=True)
    attn_res([x, x], v, v, backend="triton")
    block = open_block([x, x], [v], [v], backend="triton")
    block.mix(0, x)
    report = kernel_report(clear=True)
    assert report == {"attn_res triton": 1, "attn_res phase one triton": 1, "attn_res phase two triton": 1}
    assert "float32" in mix_refusal([x.double()], [v])
    assert "8192" in mix_refusal([x.new_zeros(1, 8193)], [v])
    assert "17 finished" in block_refusal([x] * 17, [v, v])
    assert "65 queries" in block_refusal([x], [v] * 130)
    with pytest.raises(ValueError, match="neither bfloat16 nor float32"):
        attn_res([x.double()], v.double(), v.double(), backend="triton")
    with pytest.raises(ValueError, match="17 finished sources"):
        open_block([x] * 17, [v], [v], backend="triton")
    with pytest.raises(ValueError, match="backend = 'cuda'"):
        attn_res([x], v, v, backend="cuda")


def test_settings_depend_on_the_shape_alone():
    for width in (16, 128, 1024, 2048, 7168, 8192):
        for out_norm in (False, True):
            c = mix_config(width, 9, out_norm)
            assert c.block * c.pieces >= width
            assert c.back_warps <= 16
            assert c.programs * c.back_warps <= 2112


# ---------------------------------------------------------------- torch's registry and compiler


@pytest.mark.parametrize("triton", [False, True])
def test_registration(triton):
    """torch.library's own checks of schema, fake shapes, gradients, and tracing with dynamic shapes."""
    rows = [rand(3, 16, seed=s).requires_grad_() for s in range(3)]
    vectors = [rand(16, seed=s).requires_grad_() for s in (8, 9)]
    delta, out_norm = rand(3, 16, seed=5).requires_grad_(), rand(16, seed=10).requires_grad_()
    mean, lse = rand(3, 16, seed=6).requires_grad_(), rand(3, seed=7).requires_grad_()
    torch.library.opcheck(torch.ops.atoll.attn_res.default, (rows, None, None, None, *vectors, None, 1e-5, 1e-5, F32, False, triton))
    torch.library.opcheck(torch.ops.atoll.attn_res.default, (rows, delta, mean, lse, *vectors, out_norm, 1e-5, 1e-5, F32, True, triton))
    torch.library.opcheck(torch.ops.atoll.attn_res_block.default, (rows, vectors[:1], vectors[1:], 1e-5, F32, triton))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiles_without_a_break(backend):
    rows = [rand(3, 16, seed=s).requires_grad_() for s in range(3)]
    query, weight, out_norm = (rand(16, seed=s).requires_grad_() for s in (8, 9, 10))

    def network(query, weight, out_norm, *rows):
        out, total = attn_res_sum(rows[:2], query, weight, delta=rows[2], out_norm=out_norm, backend=backend)
        block = open_block([*rows[:2], total], [query, out_norm], [weight, weight], backend=backend)
        first, _ = block.mix(0)
        second, total = block.mix(1, out, delta=first)
        return second * total

    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    leaves = (query, weight, out_norm, *rows)
    torch.testing.assert_close(compiled(*leaves), network(*leaves))
    for a, b in zip(*(torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, network)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
