"""KDA on a GPU: which calls the kernels take, with which settings, and their registration with torch: fake shapes, gradients.

Nothing is kept for the backward pass but inputs and output. Triton is imported at the first launch.

Numerics: bfloat16 inputs multiply in bfloat16 with float32 sums; scores of keys against keys, the inverse and its products, which
would amplify rounding, in tf32. float32 inputs multiply in tf32x3. Gate, decay, norms and states are float32.

Packed documents equal the same documents alone, bit for bit, in outputs, states and gradients of q, k, v, g, beta and the initial
state, within one class: same dtypes, K, V and settings, and each document cut at the same chunks. A document shorter than three
segments (`table.segment_size` of either call) is never cut. Gradients of A_log and dt_bias are sums over everything and not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.ops.dispatch import count
from atoll.ops.kda.table import make_table

WIDTHS = (32, 64, 128, 256)  # of keys and of values: those that were checked on a card; the interpreter also runs 16
STEEPEST = -5.5  # bound of the log-decay at which both factors of a block still fit bfloat16's range


class Config(NamedTuple):
    """Fixed launch settings: channels or value columns a program, warps and pipeline stages of each kernel."""

    prepare_channels: int = 32
    prepare_columns: int = 64
    prepare_warps: int = 2
    prepare_registers: int = 0  # most registers a thread; 0 leaves it to the compiler
    scan_columns: int = 128
    scan_warps: int = 8
    scan_stages: int = 2
    keep_columns: int = 128
    keep_warps: int = 8
    keep_stages: int = 2
    back_columns: int = 128
    back_warps: int = 8
    back_stages: int = 2
    pairs_channels: int = 64
    pairs_columns: int = 64
    pairs_warps: int = 4
    pairs_stages: int = 1
    gradient_channels: int = 32
    gradient_warps: int = 4
    gradient_registers: int = 0
    join_channels: int = 128  # widest transition that a program holds whole


BFLOAT16 = Config()
BFLOAT16_WIDE = Config(  # K = 256
    scan_columns=64, scan_stages=1, keep_columns=64, keep_stages=1, back_columns=64, back_stages=1
)
FLOAT32 = Config(
    prepare_columns=32,
    scan_columns=32,
    scan_warps=4,
    scan_stages=1,
    keep_columns=32,
    keep_warps=4,
    keep_stages=1,
    back_columns=32,
    back_warps=4,
    back_stages=1,
    pairs_channels=32,
    pairs_columns=32,
)


def refusal(q: Tensor, v: Tensor, lower_bound: float | None, dtypes: tuple[torch.dtype, ...]) -> str:
    """Why the kernels do not take this call; empty when they do."""
    if lower_bound is None or not STEEPEST <= lower_bound < 0:
        return f"lower_bound = {lower_bound} is outside [{STEEPEST}, 0)"
    widths = WIDTHS if q.is_cuda else (16, *WIDTHS)
    if q.shape[-1] not in widths or v.shape[-1] not in widths:
        return f"K, V = {q.shape[-1]}, {v.shape[-1]} are not both among {widths}"
    if any(d not in (torch.bfloat16, torch.float32) for d in dtypes):
        return "an input is neither bfloat16 nor float32"
    return ""


def _states(v: Tensor, k: Tensor, edges: Tensor | None, wanted: bool) -> Tensor:
    """Memory for the final states, none where they are not wanted."""
    documents = k.shape[0] if edges is None else edges.numel() - 1
    return v.new_empty(documents if wanted else 0, k.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


def _settings(config: Config | None) -> list[int] | None:
    return None if config is None else list(config)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    edges: Tensor | None,
    lower_bound: float,
    scale: float,
    final: bool,
    settings: list[int] | None,
    segment: int | None,
) -> tuple[Tensor, Tensor]:
    from atoll.ops.kda import triton_launches as launches

    count("triton")
    inputs = tuple(x.contiguous() for x in (q, k, v, g, beta, A_log, dt_bias))
    table = make_table(edges, k.shape[0], k.shape[1], k.shape[2], q.device, segment)
    call = launches.make_call(q, v, table, scale, lower_bound, None if settings is None else Config(*settings))
    o = torch.empty_like(inputs[2])
    last = _states(v, k, edges, final)
    launches.forward(inputs, None if state is None else state.contiguous(), last if final else None, o, call)
    return o, last


def _backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    o: Tensor,
    state: Tensor | None,
    edges: Tensor | None,
    lower_bound: float,
    scale: float,
    settings: list[int] | None,
    segment: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from atoll.ops.kda import triton_launches as launches

    inputs = tuple(x.contiguous() for x in (q, k, v, g, beta, A_log, dt_bias))
    table = make_table(edges, k.shape[0], k.shape[1], k.shape[2], q.device, segment)
    call = launches.make_call(q, v, table, scale, lower_bound, None if settings is None else Config(*settings))
    state = None if state is None else state.contiguous()
    dstate = None if state is None else torch.empty_like(state, dtype=torch.float32)
    dfinal = None if dfinal is None else dfinal.contiguous()
    grads = launches.backward(inputs, o, state, do.contiguous(), dfinal, dstate, call)
    return *grads, q.new_empty(0) if state is None or dstate is None else dstate.to(state.dtype)  # pyright: ignore[reportReturnType]


_op = torch.library.custom_op("atoll::kda", _forward, mutates_args=())
_back = torch.library.custom_op("atoll::kda_backward", _backward, mutates_args=())


@_op.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v, memory_format=torch.contiguous_format), _states(v, k, rest[5], rest[8])


@_back.register_fake
def _back_fake(do: Tensor, dfinal: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    inputs, state = rest[:7], rest[8]
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*inputs, *([] if state is None else [state]))]
    return (*like, do.new_empty(0)) if state is None else tuple(like)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    state, edges, lower_bound, scale, final, settings, segment = inputs[7:]
    ctx.save_for_backward(*inputs[:7], output[0], state, edges)
    ctx.constants, ctx.final = (lower_bound, scale, settings, segment), final


def _gradients(ctx: Any, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    *grads, dstate = _back(do, dfinal if ctx.final else None, *saved, *ctx.constants)
    return *grads, None if saved[8] is None else dstate, *[None] * 6


_op.register_autograd(_gradients, setup_context=_setup)


def kda_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    scale: float,
    initial_state: Tensor | None,
    boundaries: Tensor | Sequence[int] | None,
    output_final_state: bool = True,
    config: Config | None = None,
    segment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The Triton path; arguments as `kda_recurrent`. Without `output_final_state` the second result is empty.

    `boundaries` on a GPU are never read by the host: nothing waits, and the call can be captured in a CUDA graph once its kernels are
    compiled. `config` and `segment` (chunks of a piece of a long document, 0: no cuts) override the rules.

    Raises:
        ValueError: boundaries known to the host do not fit.
    """
    inputs: Any = [x.contiguous() for x in (q, k, v, g, beta, A_log, dt_bias)]
    edges = boundaries if boundaries is None or isinstance(boundaries, Tensor) else torch.tensor(boundaries, dtype=torch.int64)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *([] if initial_state is None else [initial_state])))
    run: Any = _op if learns or torch.compiler.is_compiling() else _forward
    return run(*inputs, initial_state, edges, lower_bound, scale, output_final_state, _settings(config), segment)
