"""The delta layer's one-kernel step equals its whole-sequence pass: in Triton's interpreter, or on a card."""

import functools
import os

import pytest
import torch

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
DEVICE = "cuda" if CARD else "cpu"

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from atoll.nn import delta_attention  # noqa: E402
from atoll.nn.cache import DeltaState, value_major  # noqa: E402
from atoll.ops import kernel_report  # noqa: E402


def layer(bound, full_rank):
    torch.manual_seed(0)
    made = delta_attention.DeltaAttention(24, 2, 16, lower_bound=bound, full_rank_gate=full_rank, device=DEVICE)
    made.reset_parameters(std=0.3)
    torch.nn.init.uniform_(made.o_norm.weight, 0.5, 1.5)
    return made


@pytest.fixture
def _kernels(monkeypatch):
    """On a machine without a card the step is made to run, in the interpreter."""
    if not CARD:
        ready = lambda self, x, cache: cache.state is not None and x.shape[1] == 1  # noqa: E731
        monkeypatch.setattr(delta_attention.DeltaAttention, "_steps", ready)
        monkeypatch.setattr(delta_attention, "kda_step", functools.partial(delta_attention.kda_step, backend="triton"))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("bound", "full_rank"), [(-5.0, True), (None, False)])
@torch.no_grad()
def test_steps_continue_a_prefill(bound, full_rank):
    module = layer(bound, full_rank)
    x = torch.randn(2, 12, 24, device=DEVICE)
    whole = module(x)
    cache = DeltaState()
    parts = [module(x[:, :7], cache=cache)]
    kernel_report(clear=True)
    addresses = set()
    for t in range(7, 12):
        parts.append(module(x[:, t : t + 1], cache=cache))
        addresses.add(cache.state.data_ptr())
    assert kernel_report()["kda_step triton"] == 5
    assert len(addresses) == 1
    assert cache.state.shape == (2, 2, 16, 16)
    assert cache.window.shape == (2, 3, 96)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    again = DeltaState()
    module(x, cache=again)
    torch.testing.assert_close(cache.state, again.state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.window, again.window, rtol=1e-5, atol=1e-6)


def test_value_major_turns_the_memory_and_nothing_else():
    state = torch.randn(2, 3, 4, 5)
    turned = value_major(state)
    assert torch.equal(turned, state)
    assert turned.stride() == (60, 20, 1, 4)
    assert value_major(turned) is turned
