"""KDA through flash-linear-attention's `chunk_kda` (the optional extra atoll[fla]), imported at the first call that asks for it.

It fuses the same things: L2 norms (the same epsilon, added to the sum), the gate from raw logits, the sigmoid of beta. Its states are
float32, its dt_bias flat, its boundaries int64 on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STEEPEST = -5.0  # bound down to which its matmul path for bounded decay is safe
WIDEST = 256


def load() -> Callable[..., Any]:
    """fla's `chunk_kda`.

    Raises:
        ImportError: fla-core, or something it needs, is not installed.
    """
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    return chunk_kda


def refusal(q: Tensor, lower_bound: float | None) -> str:
    """Why fla cannot take this call; empty when it can."""
    try:
        load()
    except ImportError as error:
        return f"fla-core cannot be imported ({error}); pip install 'atoll[fla]'"
    if lower_bound is not None and not STEEPEST <= lower_bound < 0:
        return f"lower_bound = {lower_bound} is outside [{STEEPEST}, 0)"
    if q.shape[-1] > WIDEST:
        return f"K = {q.shape[-1]} is more than {WIDEST}"
    if q.dtype == torch.float64:
        return "an input is float64"
    return ""


def kda_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float,
    initial_state: Tensor | None,
    edges: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Arguments as `kda_recurrent`, boundaries as a tensor. Without a bound fla takes its softplus gate and the slower path for it."""
    known = {} if edges is None or edges.is_cuda else {"cu_seqlens_cpu": edges.to(torch.int64)}
    o, final = load()(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log.float(),
        dt_bias=dt_bias.float().reshape(-1),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=lower_bound is not None,
        lower_bound=lower_bound,
        cu_seqlens=None if edges is None else edges.to(q.device, torch.int64),
        **known,
    )
    return o.to(v.dtype), final
