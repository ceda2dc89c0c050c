"""One decoding step at a time equals the whole sequence through the convolution and KDA."""

import pytest
import torch

from atoll.ops.conv import short_conv
from atoll.ops.kda import ConvState, kda, kda_step

HEADS, WIDTH, VALUE, TAPS = 2, 8, 12, 4
CHANNELS = HEADS * (2 * WIDTH + VALUE)


def material(batch, length, dtype=torch.float64):
    torch.manual_seed(0)
    shape = (batch, length)
    return {
        "x": torch.randn(*shape, CHANNELS, dtype=dtype),
        "g": torch.randn(*shape, HEADS, WIDTH, dtype=dtype),
        "beta": torch.randn(*shape, HEADS, dtype=dtype),
        "A_log": torch.randn(HEADS, dtype=dtype),
        "dt_bias": torch.randn(HEADS, WIDTH, dtype=dtype),
        "weight": torch.randn(CHANNELS, 1, TAPS, dtype=dtype),
    }


def whole(m, bound):
    y, window = short_conv(m["x"], m["weight"], output_final_state=True)
    q, k, v = y.split((HEADS * WIDTH, HEADS * WIDTH, HEADS * VALUE), -1)
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
    o, state = kda(q, k, v, m["g"], m["beta"], m["A_log"], m["dt_bias"], lower_bound=bound, output_final_state=True, backend="chunk")
    return o, state, window


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_steps_equal_the_sequence(bound, dtype, limit):
    m = material(3, 21, dtype)
    state = torch.zeros(3, HEADS, WIDTH, VALUE, dtype=dtype)
    conv = ConvState(m["weight"], torch.zeros(3, TAPS - 1, CHANNELS, dtype=dtype))
    outputs = []
    for t in range(21):
        o, state, conv = kda_step(m["x"][:, t], m["g"][:, t], m["beta"][:, t], m["A_log"], m["dt_bias"], state, conv, lower_bound=bound)
        outputs.append(o)
    expected, final, window = whole(m, bound)
    torch.testing.assert_close(torch.stack(outputs, 1), expected, rtol=limit, atol=limit)
    torch.testing.assert_close(state, final, rtol=limit, atol=limit)
    assert torch.equal(conv.window, window)


def test_slots_choose_states_and_skip():
    m = material(3, 1)
    state = torch.randn(5, HEADS, WIDTH, VALUE, dtype=torch.float64)
    conv = ConvState(m["weight"], torch.randn(5, TAPS - 1, CHANNELS, dtype=torch.float64))
    slots = torch.tensor([4, -1, 0])
    rest = (m["A_log"], m["dt_bias"])
    tokens = (m["x"][:, 0], m["g"][:, 0], m["beta"][:, 0])
    chosen = torch.tensor([4, 0])
    held = ConvState(m["weight"], conv.window[chosen])
    o, after, window = kda_step(*(t[[0, 2]] for t in tokens), *rest, state[chosen], held)
    untouched = state[1:4].clone()
    got, pool, pooled = kda_step(*tokens, *rest, state, conv, slots=slots)
    assert torch.equal(got[[0, 2]], o)
    assert not got[1].any()
    assert pool is state
    assert torch.equal(state[chosen], after)
    assert torch.equal(pooled.window[chosen], window.window)
    assert torch.equal(state[1:4], untouched)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x_qkv": torch.zeros(3, 5)}, "x_qkv"),
        ({"g": torch.zeros(3, HEADS)}, "g has shape"),
        ({"state": torch.zeros(2, HEADS, WIDTH, VALUE)}, "window|slots"),
        ({"conv": ConvState(torch.zeros(4, 1, 4), torch.zeros(3, 3, CHANNELS))}, "conv.weight"),
    ],
)
def test_wrong_shapes_are_refused(change, word):
    arguments = {
        "x_qkv": torch.zeros(3, CHANNELS), "g": torch.zeros(3, HEADS, WIDTH), "beta": torch.zeros(3, HEADS), "A_log": torch.zeros(HEADS),
        "dt_bias": torch.zeros(HEADS, WIDTH), "state": torch.zeros(3, HEADS, WIDTH, VALUE),
        "conv": ConvState(torch.zeros(CHANNELS, 1, TAPS), torch.zeros(3, TAPS - 1, CHANNELS)), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=word):
        kda_step(**arguments)
