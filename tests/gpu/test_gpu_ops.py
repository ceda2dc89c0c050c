"""Decoding step, short convolution and norms on a card: the blueprint's shapes, bfloat16 and float32, every setting, CUDA graphs.

What the interpreter can hold is in tests/ops/test_*_triton.py, which run on a card too where there is one.
"""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: no device is visible to torch")

from gpu.card import ratio, room  # noqa: E402

from atoll.ops import conv_launch, norm_launch  # noqa: E402
from atoll.ops.conv import short_conv  # noqa: E402
from atoll.ops.kda import ConvState, OutputNorm, kda_step, kernel_report  # noqa: E402
from atoll.ops.kda.step_launch import StepConfig, launch_step  # noqa: E402
from atoll.ops.norm import gated_rms_norm, l2_norm, rms_norm  # noqa: E402

LIMITS = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
GRADIENT_LIMITS = {torch.bfloat16: 8e-3, torch.float32: 2e-5}


class Decode:
    """A pool of states with rings, and the tokens of one step, at the blueprint's head."""

    def __init__(self, n, heads=96, width=128, value=128, dtype=torch.bfloat16, state_dtype=torch.float32, tokens=1, drafts=0, slots=None):
        torch.manual_seed(n + heads + tokens)
        self.pool = n if slots is None else max(slots) + 2
        channels, lead = heads * (2 * width + value), (n,) if tokens == 1 else (n, tokens)
        card = {"device": "cuda"}
        self.tokens = [torch.randn(*lead, d, **card, dtype=dtype) for d in (channels, heads * width, heads)]
        self.tokens[1] = self.tokens[1].view(*lead, heads, width)
        self.rest = [0.3 * torch.randn(heads, **card), torch.randn(heads, width, **card) - 1]
        lead = (self.pool, drafts) if drafts else (self.pool,)
        self.state = torch.randn(*lead, heads, value, width, **card).to(state_dtype).transpose(-1, -2)
        weight, ring = torch.randn(channels, 1, 4, **card), torch.randn(self.pool, 8, channels, **card, dtype=dtype)
        self.conv = ConvState(weight, ring, torch.randint(0, 50, (self.pool,), **card))
        self.norm = OutputNorm(torch.rand(value, **card), torch.randn(*self.tokens[0].shape[:-1], heads * value, **card, dtype=dtype))
        self.slots = None if slots is None else torch.tensor(slots, **card)

    def run(self, backend, fused=True, dtype=None, config=None, **options):
        """On copies; `dtype` for everything but the positions."""
        cast = (lambda t: t.to(dtype)) if dtype else (lambda t: t)
        state = self.state.clone() if dtype is None else self.state.to(dtype)
        conv = ConvState(cast(self.conv.weight), cast(self.conv.window.clone()), self.conv.position)
        tokens, rest = [cast(t) for t in self.tokens], [cast(t) for t in self.rest]
        norm = OutputNorm(cast(self.norm.weight), cast(self.norm.gate)) if fused else None
        if config is not None:
            o, window = launch_step((tokens[0],), *tokens[1:], *rest, state, conv, -5.0, self.slots, None, norm, None, config)
            return o, state, window
        o, state, conv = kda_step(*tokens, *rest, state, conv, slots=self.slots, norm=norm, backend=backend, **options)
        return o, state, conv.window


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("n", "slots"), [(1, None), (6, [7, -1, 0, 3, 2, 5]), (40, None)])
def test_step_against_float64(n, slots, fused, dtype):
    case = Decode(n, dtype=dtype, slots=slots)
    got = case.run("triton", fused)
    expected = case.run("torch", fused, torch.float64)
    for a, b in zip(got, expected, strict=True):
        assert ratio(a, b) < LIMITS[dtype]
    for a, b in zip(got, case.run("triton", fused), strict=True):
        assert torch.equal(a, b)
    if slots is not None:
        idle = [s for s in range(case.pool) if s not in slots]
        assert not got[0][1].any()
        assert torch.equal(got[1][idle], case.state[idle])
        assert torch.equal(got[2][idle], case.conv.window[idle])


@pytest.mark.parametrize(("columns", "warps"), [(16, 1), (16, 2), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8), (128, 16)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_every_setting_of_the_step(columns, warps, state_dtype):
    case = Decode(3, heads=5, state_dtype=state_dtype, dtype=torch.float32)
    expected = case.run("torch", columns == 128, torch.float64)
    for registers, evict in ((0, ""), (128, "evict_first")):
        got = case.run("triton", columns == 128, config=StepConfig(columns, warps, registers, evict))
        assert ratio(got[0], expected[0]) < 1e-5
        assert ratio(got[1], expected[1]) < (1e-5 if state_dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize(("width", "value"), [(32, 32), (64, 64), (256, 256), (32, 128), (256, 64)])
def test_step_of_other_widths_keeps_to_strides(width, value):
    case = Decode(3, heads=4, width=width, value=value, dtype=torch.float32)
    expected = case.run("torch", True, torch.float64)
    for layout in (lambda s: s, torch.Tensor.contiguous):
        case.state = layout(case.state)
        for a, b in zip(case.run("triton"), expected, strict=True):
            assert ratio(a, b) < 1e-5


@pytest.mark.parametrize("tokens", [2, 5, 8])
def test_draft_states_equal_single_steps(tokens):
    """bfloat16 states: each token starts from the rounded state of the one before, in one call as in several."""
    case = Decode(3, heads=8, tokens=tokens, drafts=tokens, state_dtype=torch.bfloat16)
    case.conv = case.conv._replace(window=torch.randn(3, 12, case.conv.window.shape[2], device="cuda").bfloat16())
    o, states, _ = case.run("triton", fused=False)
    state, conv = case.state[:, 0].clone(), case.conv._replace(window=case.conv.window.clone(), position=case.conv.position.clone())
    for t in range(tokens):
        single, state, conv = kda_step(*(x[:, t] for x in case.tokens), *case.rest, state, conv, inplace=True)
        assert ratio(o[:, t], single) < 5e-3
        assert ratio(states[:, t], state) < 5e-3
        conv.position.add_(1)


def test_step_in_a_cuda_graph_allocates_nothing_and_follows_its_inputs():
    case = Decode(4, heads=12, slots=[3, -1, 0, 1])
    out = torch.empty(4, 12, 128, device="cuda", dtype=torch.bfloat16)
    state, conv = case.state.clone(), case.conv._replace(window=case.conv.window.clone(), position=case.conv.position.clone())

    def step():
        kda_step(*case.tokens, *case.rest, state, conv, slots=case.slots, norm=case.norm, out=out)

    step()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        conv.position.add_(1)
    for memory, source in ((state, case.state), (conv.window, case.conv.window), (conv.position, case.conv.position)):
        memory.copy_(source)
    expected_state = case.state.clone()
    expected_conv = case.conv._replace(window=case.conv.window.clone(), position=case.conv.position.clone())
    for seed in range(12):  # more steps than the ring has rows
        torch.manual_seed(seed)
        case.slots.copy_(torch.tensor([[3, -1, 0, 1], [2, 1, -1, 0], [-1, -1, 4, 3]][seed % 3]))
        for t in case.tokens:
            t.normal_()
        graph.replay()
        expected, _, _ = kda_step(
            *case.tokens, *case.rest, expected_state, expected_conv, slots=case.slots, norm=case.norm, backend="torch"
        )
        expected_conv.position.add_(1)
        assert ratio(out, expected) < 5e-3
    assert ratio(state, expected_state) < 5e-3
    assert torch.equal(conv.window, expected_conv.window)


@room(20)
def test_step_beyond_32_bit_offsets():
    case = Decode(2, state_dtype=torch.bfloat16, slots=[0, 1])
    case.state, case.conv = case.state[:2].clone(), case.conv._replace(window=case.conv.window[:2], position=case.conv.position[:2])
    last = 2**31 // (96 * 128 * 128) + 40
    pool = torch.empty(last + 1, 96, 128, 128, device="cuda", dtype=torch.bfloat16).transpose(-1, -2)
    pool[[5, last]] = case.state
    ring = torch.zeros(last + 1, 8, case.conv.window.shape[2], device="cuda", dtype=torch.bfloat16)
    ring[[5, last]] = case.conv.window
    position = torch.zeros(last + 1, device="cuda", dtype=torch.int64)
    position[[5, last]] = case.conv.position
    expected = case.run("triton", fused=False)
    slots = torch.tensor([5, last], device="cuda")
    o, _, _ = kda_step(*case.tokens, *case.rest, pool, ConvState(case.conv.weight, ring, position), slots=slots)
    assert torch.equal(o, expected[0])
    assert torch.equal(pool[[5, last]], expected[1])


def conv_run(tensors, edges, backend, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    y, final = short_conv(leaves[0], leaves[1], initial_state=leaves[2], cu_seqlens=edges, output_final_state=True, backend=backend)
    torch.manual_seed(5)
    ups = [torch.randn(t.shape, device="cuda", dtype=torch.bfloat16).to(t.dtype) for t in (y, final)]
    return [y.detach(), final.detach(), *torch.autograd.grad((y, final), leaves, ups)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("taps", [2, 4, 8])
def test_convolution_of_all_heads_in_one_launch(dtype, taps):
    torch.manual_seed(0)
    edges = torch.tensor([0, 0, 1, 3, 300, 301, 301, 777], device="cuda")
    channels = 96 * 384 if taps == 4 else 1000
    shapes = ((1, 777, channels), (channels, 1, taps), (7, taps - 1, channels))
    tensors = [torch.randn(s, device="cuda").bfloat16() for s in shapes]
    kernel_report(clear=True)
    got = conv_run(tensors, edges, "auto", dtype)
    assert kernel_report() == {"short_conv triton": 1}
    expected = conv_run(tensors, edges, "torch", torch.float64)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert ratio(a, b) < (LIMITS if i < 2 else GRADIENT_LIMITS)[dtype]
    for a, b in zip(got, conv_run(tensors, edges, "auto", dtype), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "config",
    [conv_launch.ConvConfig(rows=r, channels=c, warps=w) for r, c, w in ((8, 512, 4), (16, 256, 4), (32, 128, 4), (32, 256, 8))]
    + [
        conv_launch.ConvConfig(back_channels=c, back_warps=w, back_group=g)
        for c, w, g in ((256, 1, 2), (256, 2, 4), (512, 4, 2), (512, 4, 4), (512, 4, 8), (1024, 4, 2), (1024, 8, 4))
    ],
)
def test_every_setting_of_the_convolution(config, monkeypatch):
    torch.manual_seed(0)
    edges = torch.tensor([0, 5, 130, 260], device="cuda")
    tensors = [torch.randn(s, device="cuda") for s in ((1, 260, 1100), (1100, 1, 4), (3, 3, 1100))]
    monkeypatch.setattr(conv_launch, "ConvConfig", lambda: config)
    for a, b in zip(conv_run(tensors, edges, "triton", torch.float32), conv_run(tensors, edges, "torch", torch.float64), strict=True):
        assert ratio(a, b) < 2e-5


@room(40)
def test_convolution_beyond_32_bit_offsets():
    x = torch.randn(1, 65536, 36864, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(36864, 1, 4, device="cuda")
    y, _ = short_conv(x, weight)
    tail, _ = short_conv(x[:, -20:].contiguous(), weight)
    assert torch.equal(y[:, -17:], tail[:, 3:])


def norm_run(kind, tensors, backend, dtype):
    x, weight, gate, up = (t.to(dtype) for t in tensors)
    leaves = [t.requires_grad_() for t in {"rms": (x, weight), "gated": (x, weight, gate), "l2": (x,)}[kind]]
    y = {"rms": rms_norm, "gated": gated_rms_norm, "l2": l2_norm}[kind](*leaves, backend=backend)
    return [y.detach(), *torch.autograd.grad(y, leaves, up)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3000, 7168), (5000, 128), (1, 7168), (17, 8192), (301, 2880), (999, 96), (40, 1)])
@pytest.mark.parametrize("kind", ["rms", "gated", "l2"])
def test_norms_against_float64(kind, shape, dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(s, device="cuda").bfloat16() for s in (shape, shape[-1:], shape, shape)]
    got, expected = norm_run(kind, tensors, "auto", dtype), norm_run(kind, tensors, "torch", torch.float64)
    scale = expected[0].square().mean().sqrt()
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        # one column: the gradient of x all but vanishes, and is measured against the output
        assert ratio(a, b) < (LIMITS if i == 0 else GRADIENT_LIMITS)[dtype] or (a.double() - b).square().mean().sqrt() < 1e-5 * scale
    for a, b in zip(got, norm_run(kind, tensors, "auto", dtype), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("setting", [(1, 1024, 3, 4), (1, 512, 5, 8), (2, 256, 9, 4), (4, 1024, 3, 8), (1, 4096, 1, 8)])
def test_every_setting_of_the_norms(setting, monkeypatch):
    torch.manual_seed(0)
    tensors = [torch.randn(s, device="cuda") for s in ((77, 2300), (2300,), (77, 2300), (77, 2300))]
    config = norm_launch.NormConfig(*setting)
    monkeypatch.setattr(norm_launch, "norm_config", lambda _: config)
    for kind in ("rms", "gated", "l2"):
        expected = norm_run(kind, tensors, "torch", torch.float64)
        for a, b in zip(norm_run(kind, tensors, "triton", torch.float32), expected, strict=True):
            assert ratio(a, b) < 2e-5


def test_one_compiled_graph_with_gradients():
    torch.manual_seed(0)
    x, filters = torch.randn(1, 100, 256, device="cuda", requires_grad=True), torch.randn(256, 1, 4, device="cuda", requires_grad=True)
    weight, gate = torch.rand(256, device="cuda", requires_grad=True), torch.randn(1, 100, 256, device="cuda", requires_grad=True)
    edges = torch.tensor([0, 30, 30, 100], device="cuda")

    def layer(x, filters, weight, gate):
        y, _ = short_conv(rms_norm(x, weight), filters, cu_seqlens=edges)
        return gated_rms_norm(l2_norm(y), weight, gate).square().sum()

    leaves = (x, filters, weight, gate)
    compiled = torch.compile(layer, fullgraph=True)
    for a, b in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, layer)), strict=True):
        assert ratio(a, b) < 1e-5


def test_compiled_step():
    case = Decode(3, heads=4, slots=[2, 0, -1])

    @torch.compile(fullgraph=True)
    def step(x, state, window):
        conv = ConvState(case.conv.weight, window, case.conv.position)
        return kda_step(x, *case.tokens[1:], *case.rest, state, conv, slots=case.slots, norm=case.norm)[0] * 2

    state, window = case.state.clone(), case.conv.window.clone()
    with torch.no_grad():
        got = step(case.tokens[0], state, window)
    expected = case.run("triton")
    assert ratio(got, expected[0] * 2) < 5e-3
    assert torch.equal(state, expected[1])
    assert torch.equal(window, expected[2])


def test_registrations_pass_the_checks_of_torch_library():
    card = {"device": "cuda", "requires_grad": True}
    x, weight, state = torch.randn(12, 16, **card), torch.randn(16, 4, **card), torch.randn(3, 3, 16, **card)
    edges = torch.tensor([0, 5, 5, 12], device="cuda")
    torch.library.opcheck(torch.ops.atoll.short_conv.default, (x, weight, state, edges, 12, True))
    torch.library.opcheck(torch.ops.atoll.norm.default, (x, torch.randn(16, **card), torch.randn(12, 16, **card), 1e-5, True))


def test_many_launches_give_the_same_bits():
    """Programs of one head share its window: a read of what another has written would show now and then."""
    case = Decode(64, heads=16)
    first = case.run("triton", fused=False)
    for _ in range(50):
        for a, b in zip(case.run("triton", fused=False), first, strict=True):
            assert torch.equal(a, b)
