"""Runs flash-linear-attention's own KDA tests on Atoll's kernels.

    python tests/gpu/fla_shim.py PATH/TO/flash-linear-attention [--json FILE] [pytest's options]

PATH is a checkout beside the project, of which nothing is copied; its `tests/ops/test_kda.py` runs as it stands, with `chunk_kda` and
`fused_recurrent_kda` of `fla.ops.kda` replaced by a translation to `atoll.ops.kda`. Printed at the end: how many cases passed, failed,
were skipped with which reason, how many never call the two functions and so say nothing about Atoll, and which paths the calls took.

The translation is exact, and gradients flow through it:

* A decay that is given is turned back into logits: bounded at -5.5 where it is at least -5.49 everywhere, which the kernels take, else
  through the softplus, which plain torch takes. A given beta in (0, 1) becomes its logit.
* Queries and keys that are not to be normalised: with n the norm, the delta rule with key k is the one with the unit key, beta n² and
  v / n, and o scales with the norm of q.
* HV > H: queries and keys are repeated. Widths the kernels do not have are filled up with zeros. float16 runs in float32.
* Cases that ask for what the op does not have (negative eigenvalues, intermediate states, float64 states ...) are skipped by name.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

BOUND = -5.5  # the steepest that the kernels take, so that a decay of -5 is not saturated
WIDTHS = (32, 64, 128, 256)
HERE = Path(__file__).resolve()


def _logit(x: Tensor) -> Tensor:
    return torch.log(x) - torch.log1p(-x)


def _positive(x: Tensor) -> Tensor:
    """Zero becomes 1e-20, whose logit is finite; its gradient still counts."""
    return x + (x.clamp_min(1e-20) - x).detach()


def _gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, raw: bool) -> tuple[Any, ...]:
    """Logits, A_log, dt_bias and bound of a decay g [B, T, H, K] that is raw, or given."""
    heads, width = g.shape[2:]
    zero = torch.zeros(heads, width, device=g.device)
    if raw:
        rate = zero[:, 0] if A_log is None else A_log.reshape(-1)
        return g, rate.float(), zero if dt_bias is None else dt_bias.reshape(heads, width).float(), lower_bound
    g = g.float()
    lowest = float(g.detach().min()) if g.numel() else 0.0
    if lowest >= BOUND + 0.01:
        return _logit(_positive(g / BOUND)), zero[:, 0], zero, BOUND
    decay = _positive(-g)
    # the inverse of softplus: log(expm1(y)) = y + log(-expm1(-y))
    return decay + torch.log(-torch.expm1(-decay)), zero[:, 0], zero, None


def _unnormalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """What the op divides by, [..., 1], so that it can be undone."""
    x = x.float()
    return x, (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _skip(reason: str) -> None:
    pytest.skip(f"atoll: {reason}")


def _wider(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))


def _fit(width: int, bounded: bool) -> int:
    """The next width that the kernels have; plain torch takes any."""
    return next((w for w in WIDTHS if w >= width), width) if bounded else width


def translated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    return_intermediate_states: bool = False,
    cp_context: Any = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """A call of fla's as one of ours. Where chunks lie and what is recomputed (chunk_size, disable_recompute) is the op's own affair."""
    from atoll.ops.kda import kda

    if "transpose_state_layout" in rest:
        if state_v_first:
            raise ValueError("both state_v_first and transpose_state_layout")
        warnings.warn("transpose_state_layout is state_v_first", DeprecationWarning, stacklevel=2)
        return torch.zeros_like(v), None  # asked for its warning only, with keys and betas that the op cannot have
    if allow_neg_eigval or (not use_beta_sigmoid_in_kernel and beta.numel() and float(beta.detach().max()) > 1):
        _skip("beta above 1 (negative eigenvalues)")
    if return_intermediate_states:
        _skip("states inside a sequence")
    if cp_context is not None:
        _skip("fla's context parallelism")
    if chunk_size not in (32, 64):
        _skip("chunk_size is not an argument")
    if q.dtype == torch.float64:
        _skip("float64 has no kernel")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups, kind = v.shape[2] // q.shape[2], v.dtype
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    g, A_log, dt_bias, bound = _gate(g, A_log, dt_bias, lower_bound, use_gate_in_kernel)
    if torch.float16 in (x.dtype for x in (q, k, v, g, beta)):
        q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    factor = None
    if not use_qk_l2norm_in_kernel:
        (q, factor), (k, norm) = _unnormalised(q), _unnormalised(k)
        strength = (beta.float().sigmoid() if use_beta_sigmoid_in_kernel else beta.float()) * norm[..., 0].square()
        if strength.numel() and float(strength.detach().max()) >= 1:
            _skip("beta k² of 1 or more")
        beta, v = _logit(_positive(strength)), v.float() / norm
    elif not use_beta_sigmoid_in_kernel:
        if beta.numel() and float(beta.detach().max()) >= 1:
            _skip("beta of 1 or more")
        beta = _logit(_positive(beta.float()))
    state = initial_state
    if state is not None and state_v_first:
        state = state.transpose(-1, -2)
    width, value = q.shape[-1], v.shape[-1]
    wide, tall = _fit(width, bound is not None), _fit(value, bound is not None)
    q, k, g, dt_bias, v = (*(_wider(x, wide) for x in (q, k, g, dt_bias)), _wider(v, tall))
    state = None if state is None else F.pad(state, (0, tall - value, 0, wide - width)).contiguous()
    o, final = kda(
        q, k, v, g, beta, A_log, dt_bias,
        lower_bound=bound, scale=scale, initial_state=state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    o = o[..., :value] if factor is None else o[..., :value] * factor
    if final is not None:
        final = final[..., :width, :value]
        final = final.transpose(-1, -2) if state_v_first else final
    return o.to(kind), final


class Report:
    """The plugin: replaces the two functions before fla's tests import them, and counts."""

    def __init__(self) -> None:
        self.called = False
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.failed: list[str] = []
        self.other: list[str] = []

    def install(self) -> None:
        import fla.ops.kda as room  # pyright: ignore[reportMissingImports]

        def call(*args: Any, **options: Any) -> Any:
            self.called = True
            return translated(*args, **options)

        # chunk_kda takes scale sixth, fused_recurrent_kda A_log: all callers name what follows beta
        room.chunk_kda = room.fused_recurrent_kda = call

    def pytest_runtest_setup(self) -> None:
        self.called = False

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        outcome = yield
        report = outcome.get_result()
        if report.when == "setup" and report.skipped:
            self.skipped[_reason(report)] += 1
        if report.when != "call":
            return
        if report.skipped:
            self.skipped[_reason(report)] += 1
        elif not self.called:
            self.other.append(item.name)
        else:
            self.counts[report.outcome] += 1
            if report.failed:
                self.failed.append(item.name)

    def result(self) -> dict[str, Any]:
        from atoll.ops import kernel_report

        names = Counter(name.split("[")[0] for name in self.other)
        return {
            "passed": self.counts["passed"],
            "failed": self.failed,
            "skipped": dict(self.skipped),
            "never call the op": dict(names),
            "paths": kernel_report(),
        }


def _reason(report: Any) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args()
    tests = options.checkout.resolve() / "tests" / "ops" / "test_kda.py"
    if not tests.is_file():
        parser.error(f"{tests}: no such file; give a checkout of flash-linear-attention")
    sys.path[:0] = [str(options.checkout.resolve()), str(HERE.parents[2] / "src")]
    report = Report()
    report.install()
    code = pytest.main([str(tests), "-q", "-p", "no:cacheprovider", "--rootdir", str(options.checkout.resolve()), *rest], plugins=[report])
    result = report.result()
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
