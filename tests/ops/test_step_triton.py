"""The decoding step's kernel against its twin: in Triton's interpreter on any machine, on the card itself where there is one."""

import os

import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = "cuda" if CARD else "cpu"

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from atoll.ops.kda import ConvState, OutputNorm, kda_step, kernel_report  # noqa: E402
from atoll.ops.kda.step_launch import StepConfig, launch_step, step_config  # noqa: E402

HEADS = 2
LIMIT = 1e-5 if CARD else 2e-6  # a card's exp and division are approximate


def value_major(state):
    """The same values with K contiguous in memory."""
    return state.transpose(-1, -2).contiguous().transpose(-1, -2)


class Case:
    """Tensors of one decoding batch; `fresh()` gives copies for a backend and dtype."""

    def __init__(self, n=3, slots=None, tokens=1, width=16, value=16, taps=4, ring=0, drafts=0, seed=0, state_dtype=torch.float32):
        make = torch.Generator().manual_seed(seed)
        pool = n if slots is None else 6
        channels = HEADS * (2 * width + value)
        lead = (n,) if tokens == 1 else (n, tokens)

        def randn(*shape):
            return torch.randn(*shape, generator=make)

        self.x, self.g, self.beta = randn(*lead, channels), 3 * randn(*lead, HEADS, width), randn(*lead, HEADS)
        self.A_log, self.dt_bias = 0.3 * randn(HEADS), randn(HEADS, width)
        self.state = randn(pool, *([drafts] if drafts else []), HEADS, width, value).to(state_dtype)
        self.weight, self.window = randn(channels, 1, taps), randn(pool, ring or taps - 1, channels)
        self.position = torch.randint(0, 40, (pool,), generator=make) if ring else None
        self.gate, self.norm = randn(*lead, HEADS * value), randn(value)
        self.slots = None if slots is None else torch.tensor(slots)

    def run(self, backend, dtype=torch.float32, fused=False, layout=value_major, accepted=None, **options):
        def to(t):
            t = t.to(DEVICE, copy=True)
            return t.to(dtype) if t.is_floating_point() and t is not self.state else t

        state = self.state.to(DEVICE, copy=True)
        state = layout(state if dtype == torch.float32 else state.to(dtype))
        conv = ConvState(to(self.weight), to(self.window), None if self.position is None else to(self.position))
        o, state, conv = kda_step(
            to(self.x), to(self.g), to(self.beta), to(self.A_log), to(self.dt_bias), state, conv,
            slots=None if self.slots is None else to(self.slots), backend=backend,
            accepted=None if accepted is None else torch.tensor(accepted, device=DEVICE),
            norm=OutputNorm(to(self.norm), to(self.gate)) if fused else None, **options,
        )  # fmt: skip
        return o, state, conv.window


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def assert_close(got, expected, limit=LIMIT):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert relative(a, b) < limit


def both(case, **options):
    """Results of the kernel in float32 and of the twin in float64."""
    return case.run("triton", **options), case.run("torch", torch.float64, **options)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", [value_major, torch.Tensor.contiguous])
def test_one_token(bound, fused, layout):
    assert_close(*both(Case(), lower_bound=bound, fused=fused, layout=layout))


@pytest.mark.parametrize("taps", [2, 3, 8])
def test_taps(taps):
    assert_close(*both(Case(taps=taps)))
    assert_close(*both(Case(taps=taps, ring=taps + 1, tokens=2, slots=[0, 4, 2])))


@pytest.mark.parametrize(("width", "value"), [(16, 32), (32, 16), (64, 32)])
@pytest.mark.parametrize("fused", [False, True])
def test_unequal_widths_and_value_blocks(width, value, fused):
    case = Case(width=width, value=value, n=2)
    assert step_config(2, HEADS, width, value, False).columns == 16  # more than one program a head when V is 32
    assert_close(*both(case, fused=fused))


@pytest.mark.parametrize("gates", [50.0, -50.0])
def test_saturated_gates(gates):
    case = Case()
    case.g, case.beta = torch.full_like(case.g, gates), torch.full_like(case.beta, -gates)
    for bound in (-5.0, None):
        got, expected = both(case, lower_bound=bound)
        assert all(t.isfinite().all() for t in got)
        assert_close(got, expected, 3 * LIMIT)


@pytest.mark.parametrize("ring", [0, 5])
@pytest.mark.parametrize("fused", [False, True])
def test_slots_skip_and_leave_others_alone_to_the_bit(ring, fused):
    case = Case(n=4, slots=[4, -1, 0, 2], ring=ring, value=32)
    case.gate[1] = float("nan")  # nothing of a skipped sequence is looked at
    got, expected = both(case, fused=fused)
    assert_close(got, expected)
    o, state, window = got
    assert not o[1].any()
    for idle in (1, 3, 5):
        assert torch.equal(state[idle].cpu(), case.state[idle])
        assert torch.equal(window[idle].cpu(), case.window[idle])


def test_nan_stays_in_its_slot():
    case = Case(n=3, slots=[5, 1, 3], ring=4)
    clean = case.run("triton")
    case.x[1], case.window[1] = float("nan"), float("nan")
    dirty = case.run("triton")
    assert dirty[0][1].isnan().all()
    for a, b, keep in zip(dirty, clean, ([0, 2], [0, 2, 3, 4, 5], [0, 2, 3, 4, 5]), strict=True):
        assert torch.equal(a[keep], b[keep])


def test_ring_equals_plain_window_from_the_first_token_on():
    """Thirteen tokens: the ring goes round, and its stale rows are not read before the sequence has filled them."""
    steps = [Case(n=2, seed=s) for s in range(13)]
    first = steps[0]
    weight = first.weight.to(DEVICE)
    plain = ConvState(weight, torch.zeros_like(first.window, device=DEVICE))
    ring = ConvState(weight, torch.full((2, 5, weight.shape[0]), 7.0, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE))
    states = [value_major(torch.zeros_like(first.state, device=DEVICE)) for _ in range(2)]
    for case in steps:
        tokens = [t.to(DEVICE) for t in (case.x, case.g, case.beta, first.A_log, first.dt_bias)]
        a, states[0], plain = kda_step(*tokens, states[0], plain, backend="triton")
        b, states[1], ring = kda_step(*tokens, states[1], ring, backend="triton")
        assert torch.equal(a, b)
        ring.position.add_(1)
    assert torch.equal(*states)


@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("ring", [0, 9])
def test_several_tokens_equal_single_ones(tokens, ring):
    case = Case(n=2, tokens=tokens, ring=ring, slots=[3, 1])
    got, expected = both(case, fused=True)
    assert_close(got, expected)
    state, window, position = (None if t is None else t.to(DEVICE, copy=True) for t in (case.state, case.window, case.position))
    state = value_major(state)
    for t in range(tokens):
        o, _, _ = kda_step(
            *(x[:, t].to(DEVICE) for x in (case.x, case.g, case.beta)), case.A_log.to(DEVICE), case.dt_bias.to(DEVICE), state,
            ConvState(case.weight.to(DEVICE), window, position), slots=case.slots.to(DEVICE), backend="triton",
            norm=OutputNorm(case.norm.to(DEVICE), case.gate[:, t].to(DEVICE)),
        )  # fmt: skip
        assert relative(o, got[0][:, t]) < LIMIT
        if position is not None:
            position += 1
    assert relative(state, got[1]) < LIMIT
    assert torch.equal(window, got[2])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_rejected_drafts_roll_back(state_dtype):
    """Three drafts, two kept, then two more: as if the rejected one had never been there."""
    first = Case(n=2, tokens=3, drafts=4, ring=7, slots=[3, 0], state_dtype=state_dtype)
    second = Case(n=2, tokens=2, drafts=4, ring=7, slots=[3, 0], seed=1)
    plain = {"state": first.state[:, 0].clone(), "window": first.window.clone(), "position": first.position.clone()}

    def call(case, memory, tokens, backend, accepted=None):
        given = [x[:, tokens].to(DEVICE) for x in (case.x, case.g, case.beta)]
        conv = ConvState(first.weight.to(DEVICE), memory["window"], memory["position"])
        rest = (first.A_log.to(DEVICE), first.dt_bias.to(DEVICE), memory["state"], conv)
        return kda_step(*given, *rest, slots=first.slots.to(DEVICE), accepted=accepted, backend=backend)[0]

    for backend in ("triton", "torch"):
        drafts = {"state": value_major(first.state.to(DEVICE, copy=True))}
        drafts |= {key: plain[key].to(DEVICE, copy=True) for key in ("window", "position")}
        call(first, drafts, slice(0, 3), backend)
        kept = torch.tensor([2, 2], device=DEVICE)
        drafts["position"][first.slots.to(DEVICE)] += kept
        speculative = call(second, drafts, slice(0, 2), backend, kept)
        sequential = {key: value.to(DEVICE, copy=True) for key, value in plain.items()}
        sequential["state"] = value_major(sequential["state"])
        for t in range(2):
            call(first, sequential, slice(t, t + 1), backend)
            sequential["position"][first.slots.to(DEVICE)] += 1
        expected = call(second, sequential, slice(0, 2), backend)
        assert relative(speculative, expected) < LIMIT
        final = drafts["state"][first.slots.to(DEVICE), 1]
        assert relative(final, sequential["state"][first.slots.to(DEVICE)]) < LIMIT


def test_drafts_keep_a_state_a_token():
    case = Case(n=3, tokens=3, drafts=3, ring=6, slots=[2, -1, 5])
    assert_close(*both(case, accepted=[3, 1, 2]))


def test_bfloat16_state_is_exact_on_exact_values():
    """Keys are unit vectors, the strength one, the decay one, everything a small whole number: the update replaces a row by v."""
    case = Case(n=3, state_dtype=torch.bfloat16)
    case.state = torch.randint(-8, 9, case.state.shape).to(torch.bfloat16)
    case.weight[:] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    case.g[:], case.beta[:] = -200.0, 200.0
    q, k, v = case.x.view(3, 3, HEADS, 16).unbind(1)
    hot = torch.randint(16, (3, HEADS, 1))
    for x in (q, k):
        x.zero_().scatter_(2, hot, 64.0)  # SiLU(64) = 64, and its unit vector is exactly one
    v.copy_(torch.randint(24, 64, v.shape))  # SiLU is the identity here
    o, state, _ = case.run("triton")
    expected = case.state.clone().scatter_(2, hot[..., None].expand(-1, -1, -1, 16), v[:, :, None].bfloat16())
    assert state.dtype == torch.bfloat16
    assert torch.equal(state.cpu(), expected)
    assert torch.equal(o.cpu(), v * 0.25)


def test_bfloat16_state_is_the_float32_one_rounded_once():
    case = Case(n=2, state_dtype=torch.bfloat16)
    narrow = case.run("triton")
    case.state = case.state.float()
    wide = case.run("triton")
    assert torch.equal(narrow[0], wide[0])
    # the interpreter cuts where a card rounds
    torch.testing.assert_close(narrow[1].float(), wide[1], rtol=2**-8 if CARD else 2**-7, atol=0)


def test_bfloat16_inputs_round_where_the_twin_does():
    case = Case(n=2, ring=5)
    got, expected = (case.run(backend, torch.bfloat16, fused=True) for backend in ("triton", "torch"))
    assert got[0].dtype == torch.bfloat16
    assert_close(got, expected, 8e-3)


@pytest.mark.parametrize(("columns", "warps"), [(16, 1), (32, 2), (64, 4)])
def test_every_setting_gives_the_same(columns, warps):
    case = Case(n=2, width=32, value=64)
    expected = case.run("torch", torch.float64)
    state = value_major(case.state.to(DEVICE, copy=True))
    tensors = [t.to(DEVICE) for t in (case.g, case.beta, case.A_log, case.dt_bias)]
    conv = ConvState(case.weight.to(DEVICE), case.window.to(DEVICE))
    config = StepConfig(columns, warps)
    o, window = launch_step((case.x.to(DEVICE),), *tensors, state, conv, -5.0, None, None, None, None, config)
    assert_close((o, state, window), expected)


def test_three_parts_equal_one():
    case = Case()
    inner = HEADS * 16
    rest = [t.to(DEVICE) for t in (case.g, case.beta, case.A_log, case.dt_bias)]
    whole, apart = (value_major(case.state.to(DEVICE, copy=True)) for _ in range(2))
    x, weight, window = (t.to(DEVICE) for t in (case.x, case.weight, case.window))
    a, _, _ = kda_step(x, *rest, whole, ConvState(weight, window), backend="triton", inplace=True)
    parts, weights = (tuple(t.contiguous() for t in y.split(inner, d)) for y, d in ((x, 1), (weight, 0)))
    b, after, _ = kda_step(parts, *rest, apart, ConvState(weights, window), backend="triton", inplace=True)
    assert after is apart
    assert torch.equal(a, b)
    assert torch.equal(whole, apart)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_without_slots_nothing_given_is_changed(backend):
    case = Case()
    state, window = value_major(case.state.to(DEVICE)), case.window.to(DEVICE)
    rest = [t.to(DEVICE) for t in (case.x, case.g, case.beta, case.A_log, case.dt_bias)]
    before = state.clone(), window.clone()
    _, new, conv = kda_step(*rest, state, ConvState(case.weight.to(DEVICE), window), backend=backend)
    assert torch.equal(state, before[0])
    assert torch.equal(window, before[1])
    assert not torch.equal(new, state)
    assert not torch.equal(conv.window, window)


def test_given_output_is_filled():
    case = Case(ring=4)
    out = torch.full((3, HEADS, 16), float("nan"), device=DEVICE)
    o, _, _ = case.run("triton", out=out)
    assert o is out
    assert o.isfinite().all()


def test_dispatch_report_and_refusals():
    case = Case()
    kernel_report(clear=True)
    case.run("triton")
    case.run("torch")
    assert kernel_report(clear=True) == {"kda_step triton": 1, "kda_step torch": 1}
    with pytest.raises(ValueError, match="K, V = 8, 16"):
        Case(width=8).run("triton")
    with pytest.raises(ValueError, match="9 taps"):
        Case(taps=9).run("triton")
    with pytest.raises(ValueError, match="neither bfloat16 nor float32"):
        case.run("triton", torch.float64)


@pytest.mark.parametrize(
    ("case", "options", "word"),
    [
        ({"ring": 4, "tokens": 2}, {}, "W-1"),
        ({"drafts": 2}, {}, "position"),
        ({}, {"accepted": [1, 1, 1]}, "accepted"),
        ({"slots": [1, 2]}, {}, "slots"),
        ({}, {"out": torch.zeros(3, 5)}, "out"),
    ],
)
def test_wrong_memory_is_refused(case, options, word):
    with pytest.raises(ValueError, match=word):
        Case(**case).run("torch", **options)


def test_registration_and_compilation():
    case = Case(ring=4, slots=[0, 2, 5])
    tensors = [t.to(DEVICE) for t in (case.x, case.g, case.beta, case.A_log, case.dt_bias)]
    conv = ConvState(case.weight.to(DEVICE), case.window.to(DEVICE), case.position.to(DEVICE))
    slots = case.slots.to(DEVICE)
    inner = HEADS * 16
    arguments = (
        list(tensors[0].split(inner, 1)), list(conv.weight.split(inner)), *tensors[1:], value_major(case.state.to(DEVICE)),
        conv.window, None, slots, conv.position, None, None, None, torch.zeros(3, HEADS, 16, device=DEVICE), 1, 4, -5.0, 0.0, 16, 1, 0, "",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.atoll.kda_step.default, arguments)
    expected = case.run("triton")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(state, window):
        held = ConvState(conv.weight, window, conv.position)
        return kda_step(*tensors, state, held, slots=slots, backend="triton")[0] * 2

    state, window = value_major(case.state.to(DEVICE, copy=True)), case.window.to(DEVICE, copy=True)
    torch.testing.assert_close(step(state, window), expected[0] * 2)
    torch.testing.assert_close(state, expected[1])
    assert torch.equal(window, expected[2])
