"""The attention residual on a card: the blueprint's shapes, bfloat16 and float32, whole blocks, CUDA graphs, one compiled graph.

What the interpreter can hold is in tests/ops/test_attn_res_triton.py, which runs on a card too where there is one.
"""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: no device is visible to torch")

from gpu.card import ratio, room  # noqa: E402

from atoll.nn import BlockResidual, Stream  # noqa: E402
from atoll.ops import kernel_report  # noqa: E402
from atoll.ops.attn_res import attn_res, attn_res_sum, open_block  # noqa: E402
from atoll.ops.attn_res.mix import mix_gradients  # noqa: E402
from atoll.ops.attn_res.mix_launch import mix_backward, mix_config, mix_forward  # noqa: E402

CARD = {"device": "cuda"}
BF16, F32 = torch.bfloat16, torch.float32
LIMITS = {BF16: 5e-3, F32: 1e-5}
GRADIENT_LIMITS = {BF16: 1e-2, F32: 5e-5}


def vectors(width, count, scale=1.0):
    return [scale * torch.randn(width, **CARD).bfloat16() for _ in range(count)]


def fused(dtype, backend, rows, query, weight, delta, out_norm, up):
    leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (query, weight, delta, out_norm, *rows)]
    query, weight, delta, out_norm, *rows = leaves
    out, last = attn_res_sum(rows, query, weight, delta=delta, out_norm=out_norm, backend=backend)
    total = (out * up.to(dtype)).sum() + (last * up.flip(0).to(dtype)).sum()
    return [out.detach(), last.detach(), *torch.autograd.grad(total, [t for t in leaves if t is not None])]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("fuse", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("sources", "tokens", "width"),
    [
        (9, 777, 7168),
        (5, 300, 7168),
        (1, 64, 7168),
        (9, 1000, 2048),
        (4, 501, 1024),
        (3, 1001, 128),
        (6, 65, 2880),
        (64, 9, 384),
        (2, 5, 40),
    ],
)
def test_mix_against_float64(sources, tokens, width, fuse, dtype):
    torch.manual_seed(0)
    rows = [(0.1 * 3.0 ** (r % 5) * torch.randn(tokens, width, **CARD)).bfloat16() for r in range(sources)]
    (query,), (weight, out_norm) = vectors(width, 1, width**-0.5), vectors(width, 2)
    delta, up = (torch.randn(tokens, width, **CARD).bfloat16() for _ in range(2))
    given = (rows, query, weight, delta if fuse[0] else None, out_norm if fuse[1] else None, up)
    kernel_report(clear=True)
    got = fused(dtype, "auto", *given)
    assert kernel_report(clear=True) == {"attn_res triton": 1}
    expected = fused(torch.float64, "torch", *given)
    size = expected[-1].square().mean().sqrt()
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        # a lone source's score has no gradient at all
        assert ratio(a, b) < (LIMITS if i < 2 else GRADIENT_LIMITS)[dtype] or (a.double() - b).square().mean().sqrt() < 1e-5 * size
    for a, b in zip(got, fused(dtype, "auto", *given), strict=True):
        assert torch.equal(a, b)


class BlockCase:
    """Queries of a block on finished sources, each but the first with the running sum."""

    def __init__(self, sources, queries, tokens, width):
        torch.manual_seed(sources + queries)
        self.sources = [(0.1 * 3.0 ** (r % 5) * torch.randn(tokens, width, **CARD)).bfloat16() for r in range(sources)]
        self.queries, self.norms = vectors(width, queries, width**-0.5), vectors(width, queries)
        self.steps = [torch.randn(tokens, width, **CARD).bfloat16() for _ in range(queries)]
        self.out_norm, self.up = vectors(width, 1)[0], torch.randn(queries, tokens, width, **CARD).bfloat16()

    def run(self, dtype, backend, partial=None, close=True):
        groups = [self.sources, self.queries, self.norms, self.steps, [self.out_norm]]
        sources, queries, norms, steps, (out_norm,) = ([t.to(dtype).requires_grad_() for t in g] for g in groups)
        block = open_block(sources, queries, norms, partial_dtype=partial, backend=backend)
        outs, prefix = [], None
        for i in range(len(queries)):
            prefix = steps[0] if i == 1 else prefix
            out, prefix = block.mix(i, prefix, delta=steps[i - 1] if i > 1 else None, out_norm=out_norm)
            outs.append(out)
        if close:
            block.close()
        outs = torch.stack(outs)
        return [outs.detach(), *torch.autograd.grad(outs, [*sources, *queries, *norms, *steps[:-1], out_norm], self.up.to(dtype))]


@pytest.mark.parametrize(("dtype", "partial"), [(BF16, None), (BF16, F32), (F32, None)])
@pytest.mark.parametrize(
    ("sources", "queries", "tokens", "width"),
    [(8, 24, 300, 7168), (3, 24, 40, 7168), (3, 8, 1000, 1024), (16, 3, 65, 384), (2, 64, 70, 128)],
)
def test_block_against_float64(sources, queries, tokens, width, dtype, partial):
    case = BlockCase(sources, queries, tokens, width)
    kernel_report(clear=True)
    got = case.run(dtype, "auto", partial)
    # phase one is made again once for the gradients
    assert kernel_report(clear=True) == {"attn_res phase one triton": 2, "attn_res phase two triton": queries}
    expected = case.run(torch.float64, "torch")
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert ratio(a, b) < (2 * LIMITS[dtype] if i == 0 else 2 * GRADIENT_LIMITS[dtype]), i
    for a, b in zip(got, case.run(dtype, "auto", partial, close=False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("partial", "limit"), [(F32, 1e-6), (BF16, 1e-2)])
@pytest.mark.parametrize("tokens", [1, 700])
def test_two_phases_equal_one_pass(tokens, partial, limit):
    case = BlockCase(6, 5, tokens, 7168)
    rows, last = [s.float() for s in case.sources], case.steps[0].float()
    block = open_block(rows, case.queries, case.norms, partial_dtype=partial)
    for i, (q, w) in enumerate(zip(case.queries, case.norms, strict=True)):
        assert ratio(block.mix(i, last)[0], attn_res([*rows, last], q, w)) < limit


SETTINGS = [{"warps": w} for w in (4, 16)] + [{"stages": n} for n in (1, 2, 4)] + [{"back_stages": n} for n in (1, 2, 4)]


@pytest.mark.parametrize("setting", [*SETTINGS, {"back_warps": 16}, {"back_registers": 0}, {"programs": 7}])
def test_every_setting_of_the_mix(setting):
    torch.manual_seed(0)
    rows, (query, weight, norm) = [torch.randn(99, 7168, **CARD) for _ in range(5)], vectors(7168, 3, 0.02)
    up = torch.randn(99, 7168, **CARD)
    for out_norm in (None, norm):
        config = mix_config(7168, 5, out_norm is not None)._replace(**setting)
        out, _, lse = mix_forward(rows, None, None, None, query, weight, out_norm, 1e-5, 1e-5, F32, True, config)
        d = mix_backward(up, None, None, rows, None, None, query, weight, out_norm, 1e-5, 1e-5, None, config)
        wide = [r.double() for r in rows], *(v if v is None else v.double() for v in (query, weight, out_norm))
        expected, _ = attn_res_sum(wide[0], *wide[1:3], out_norm=wide[3], backend="torch")
        d_true = mix_gradients(up.double(), None, None, wide[0], None, None, *wide[1:], 1e-5, 1e-5, False)
        assert ratio(out, expected) < 1e-5
        assert lse.isfinite().all()
        for a, b in zip((*d.sources, d.query, d.norm), (*d_true.sources, d_true.query, d_true.norm), strict=True):
            assert ratio(a, b) < 8e-3


@pytest.mark.parametrize("schedule", ["one-pass", "two-phase"])
def test_a_captured_decoding_step(schedule):
    """Ten sublayers in blocks of four: replays follow new inputs and new weights."""
    torch.manual_seed(0)
    width, depth, block = 2048, 10, 4
    layers = [torch.randn(width, width, **CARD).bfloat16() / width**0.5 for _ in range(depth)]
    residuals = [BlockResidual(width, **CARD, dtype=BF16) for _ in range(depth + 1)]
    norm, x = torch.ones(width, **CARD, dtype=BF16), torch.randn(3, 1, width, **CARD).bfloat16()
    for r in residuals:
        torch.nn.init.normal_(r.query.weight, std=0.05)

    def step():
        stream = Stream((), x)
        for i in range(depth + 1):
            if i % block == 0:
                stream = stream.close([r.reader() for r in residuals[i : i + block]], schedule=schedule)
            h, stream = residuals[i](stream, out_norm=norm)
            if i < depth:
                stream = stream.add(h @ layers[i])
        return h

    with torch.no_grad():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for seed in range(3):
            torch.manual_seed(seed)
            x.normal_()
            residuals[5].query.weight.normal_(std=0.05)
            graph.replay()
            assert torch.equal(out, step())


def test_one_compiled_graph_with_gradients():
    torch.manual_seed(0)
    rows = [torch.randn(60, 256, **CARD, requires_grad=True) for _ in range(3)]
    query, weight, norm = (t.float().requires_grad_() for t in vectors(256, 3, 0.1))

    def network(query, weight, norm, *rows):
        out, total = attn_res_sum(rows[:2], query, weight, delta=rows[2], out_norm=norm)
        block = open_block([*rows[:2], total], [query, norm], [weight, weight])
        first, _ = block.mix(0)
        second, total = block.mix(1, out, delta=first)
        return (second * total).square().mean()

    leaves = (query, weight, norm, *rows)
    compiled = torch.compile(network, fullgraph=True)
    for a, b in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, network)), strict=True):
        assert ratio(a, b) < 1e-4


def test_more_tokens_than_a_grids_second_axis():
    case = BlockCase(2, 3, 70_000, 64)
    for a, b in zip(case.run(F32, "auto"), case.run(torch.float64, "torch"), strict=True):
        assert ratio(a, b) < 2 * GRADIENT_LIMITS[F32]


@room(50)
def test_beyond_32_bit_offsets():
    tokens, width = 2**31 // 7168 + 70, 7168
    rows = [torch.randn(tokens, width, **CARD, dtype=BF16) for _ in range(2)]
    query, weight = vectors(width, 2, 0.02)
    tail = [r[-30:].clone() for r in rows]
    assert torch.equal(attn_res(rows, query, weight)[-30:], attn_res(tail, query, weight))
    block, small = open_block(rows, [query], [weight]), open_block(tail, [query], [weight])
    assert ratio(block.mix(0, rows[1])[0][-30:], small.mix(0, tail[1])[0]) < 1e-3


@room(20)
def test_means_go_with_the_block_and_only_sources_stay():
    """The running memory of a closed block, forward: sources and mixes, no means."""
    tokens, width, queries = 4096, 7168, 12
    case = BlockCase(3, queries, tokens, width)
    row = tokens * width * 2
    sources = [s.requires_grad_() for s in case.sources]
    before = torch.cuda.memory_allocated()
    block = open_block(sources, case.queries, case.norms)
    assert torch.cuda.memory_allocated() - before >= queries * row
    out, _ = block.mix(1, case.steps[0])
    block.close()
    assert torch.cuda.memory_allocated() - before < 2.5 * row
    out.sum().backward()
    assert all(s.grad is not None for s in sources)
