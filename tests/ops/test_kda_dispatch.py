"""Which path a call of kda takes and why; strict mode; flash-linear-attention as a backend, through a double of its function."""

import itertools
import os
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from test_kda import random_inputs

from atoll.ops import dispatch, kernel_report, strict
from atoll.ops.kda import _choose, fla_path, kda
from atoll.ops.norm import l2_norm


def on_card(width=128, value=128, length=64, dtype=torch.bfloat16):
    """What the choice looks at, of tensors on a card."""
    return [types.SimpleNamespace(is_cuda=True, shape=(1, length, 4, d), dtype=dtype) for d in (width, value)]


def choose(bound, backend="auto", **shape):
    q, v = on_card(**shape)
    return _choose(backend, q, v, bound, (q, v))


pytestmark = pytest.mark.skipif(not dispatch.HAS_TRITON, reason="Triton has no wheel for this platform")


def test_the_path_of_a_call_on_a_card():
    assert choose(-5.0) == ("triton", "")
    assert choose(None) == ("chunk", "lower_bound = None is outside [-5.5, 0)")
    assert choose(-5.8)[0] == "chunk"
    path, reason = choose(-9.0)
    assert path == "recurrent"  # no path in chunks holds so steep a bound
    assert "-9.0" in reason
    assert choose(-5.0, width=100)[0] == "chunk"
    assert choose(-5.0, dtype=torch.float16) == ("chunk", "an input is neither bfloat16 nor float32")
    assert choose(None, length=1)[0] == "recurrent"


def test_strict_mode_raises_where_a_call_would_fall_back():
    with strict():
        assert choose(-5.0) == ("triton", "")
        with pytest.raises(ValueError, match=r"kda: lower_bound = None .* ATOLL_STRICT .* backend = 'chunk'"):
            choose(None)
        assert choose(None, backend="chunk") == ("chunk", "")  # asked for, so no fallback
        with pytest.raises(ValueError, match=r"l2_norm: too wide.* backend = 'torch'"):
            dispatch.use_triton("l2_norm", "auto", True, "too wide")
        with strict(False):
            assert choose(None)[0] == "chunk"
        kda(**random_inputs(1, 4))  # no kernels on a CPU, so none passed over
        l2_norm(torch.ones(2, 3, dtype=torch.float64))
    assert choose(None)[0] == "chunk"


@pytest.mark.parametrize(("value", "raises"), [("1", True), ("0", False)])
def test_strict_mode_by_the_environment(value, raises):
    code = "from atoll.ops.dispatch import use_triton; use_triton('op', 'auto', True, 'for a reason')"
    environment = {**os.environ, "ATOLL_STRICT": value, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode != 0) == raises
    assert ("op: for a reason" in done.stderr) == raises


def test_the_reason_is_reported():
    kernel_report(clear=True)
    dispatch.use_triton("op", "auto", True, "for a reason")
    assert kernel_report() == {"op torch (for a reason)": 1}


@pytest.fixture
def fla(monkeypatch):
    """A double that keeps to the contract of fla 0.6's chunk_kda, token by token; says what it was called with."""
    seen = []

    def chunk_kda(
        q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, A_log, dt_bias, lower_bound, safe_gate, **rest
    ):
        seen.append({"lower_bound": lower_bound, "safe_gate": safe_gate, "cu_seqlens": cu_seqlens, "state": initial_state, **rest})
        assert rest.pop("use_qk_l2norm_in_kernel")
        assert rest.pop("use_gate_in_kernel")
        assert rest.pop("use_beta_sigmoid_in_kernel")
        assert rest.keys() <= {"cu_seqlens_cpu"}
        assert A_log.dtype == dt_bias.dtype == torch.float32
        assert dt_bias.shape == (A_log.numel() * q.shape[-1],)
        raw, rate = g + dt_bias.view(*g.shape[2:]), A_log.exp()[:, None]
        decay = -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        spans = [(0, q.shape[1])] * q.shape[0] if cu_seqlens is None else list(itertools.pairwise(cu_seqlens.tolist()))
        o, finals = torch.empty_like(v), []
        for n, (start, stop) in enumerate(spans):
            b = n if cu_seqlens is None else 0
            state = v.new_zeros(*k.shape[2:], v.shape[-1]) if initial_state is None else initial_state[n]
            for t in range(start, stop):
                state = decay[b, t].exp()[..., None] * state
                error = v[b, t] - torch.einsum("hkv,hk->hv", state, k[b, t])
                state = state + torch.einsum("hk,hv,h->hkv", k[b, t], error, beta[b, t].sigmoid())
                o[b, t] = torch.einsum("hkv,hk->hv", state, q[b, t]) * scale
            finals.append(state)
        return o, torch.stack(finals) if output_final_state else None

    for name in ("fla", "fla.ops", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fla.ops.kda"].chunk_kda = chunk_kda
    return seen


@pytest.mark.parametrize("bound", [-5.0, -1.0, None])
@pytest.mark.parametrize("edges", [None, [0, 0, 9, 20]])
def test_fla_is_called_as_it_wants(fla, bound, edges):
    inputs = random_inputs(2 if edges is None else 1, 20, dtype=torch.float32)
    cu = None if edges is None else torch.tensor(edges, dtype=torch.int32)
    state = torch.randn(2 if edges is None else 3, 2, 8, 12, dtype=torch.float64)
    expected = kda(**inputs, lower_bound=bound, cu_seqlens=cu, initial_state=state.float(), output_final_state=True, backend="recurrent")
    got = fla_path.kda_fla(*inputs.values(), bound, 8**-0.5, state, cu, True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    call = fla[0]
    assert call["safe_gate"] == (bound is not None)
    assert call["state"].dtype == torch.float32
    if edges is not None:
        assert call["cu_seqlens"].dtype == call["cu_seqlens_cpu"].dtype == torch.int64
    assert fla_path.kda_fla(*inputs.values(), bound, 8**-0.5, None, cu, False)[1] is None


def test_fla_is_refused_in_one_line(fla):
    q = on_card()[0]
    assert choose(None, backend="fla") == ("fla", "")
    assert "-5.3 is outside" in fla_path.refusal(q, -5.3)
    assert "K = 300" in fla_path.refusal(on_card(width=300)[0], -5.0)
    with pytest.raises(ValueError, match=r"backend = 'fla': the tensors are not on a GPU; use auto or chunk"):
        kda(**random_inputs(1, 4), backend="fla")


def test_fla_is_imported_only_when_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)  # as if it were not installed
    kda(**random_inputs(1, 4))
    with pytest.raises(ValueError, match=r"kda: backend = 'fla': fla-core cannot be imported .* pip install 'atoll\[fla\]'"):
        choose(-5.0, backend="fla")
