"""KDA on a GPU: three kernels forward, five backward (three of them the forward's again), nothing kept but inputs and output.

Numerics: bfloat16 inputs multiply in bfloat16 with float32 sums, the scores of keys against keys in tf32, because the inverse
amplifies their error; float32 inputs multiply in tf32x3. Gate, decay, norms, states and the inverse are float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.kda import triton_kernels as kernels
from atoll.ops.kda.tiles import anchor

WIDTHS = (32, 64, 128)  # of keys and of values: those that were checked on a card; the interpreter also runs 16


class Config(NamedTuple):
    """Fixed launch settings: value columns a program, warps and pipeline stages of each kernel."""

    prepare_channels: int = 32
    prepare_warps: int = 4
    prepare_stages: int = 1
    prepare_registers: int = 0  # most registers a thread; 0 leaves it to the compiler
    inverse_warps: int = 4
    scan_columns: int = 64
    scan_warps: int = 4
    scan_stages: int = 1
    back_columns: int = 64
    back_warps: int = 4
    back_stages: int = 1
    gradient_channels: int = 64
    gradient_columns: int = 64
    gradient_warps: int = 8
    gradient_stages: int = 1
    gradient_registers: int = 0
    key_precision: str = "tf32"  # operands of key scores: "tf32" or "bf16"
    inverse_precision: str = "tf32"


BFLOAT16 = Config()
FLOAT32 = Config(prepare_channels=64, prepare_warps=8, scan_columns=32, back_columns=32, gradient_columns=32, inverse_precision="tf32x3")


class Table(NamedTuple):
    """Chunks of the documents: first token and token count of each, and each document's first chunk [N+1]."""

    starts: Tensor
    counts: Tensor
    first: Tensor
    chunks: int
    documents: int


@functools.lru_cache(maxsize=16)
def chunk_table(boundaries: tuple[int, ...], device: torch.device) -> Table:
    edges = torch.tensor(boundaries, dtype=torch.int64)
    lengths = edges[1:] - edges[:-1]
    numbers = (lengths + kernels.TOKENS - 1) // kernels.TOKENS
    first = torch.cat((torch.zeros(1, dtype=torch.int64), numbers.cumsum(0)))
    document = torch.repeat_interleave(torch.arange(numbers.numel()), numbers)
    position = (torch.arange(document.numel()) - first[document]) * kernels.TOKENS
    starts = edges[:-1][document] + position
    counts = (lengths[document] - position).clamp_max(kernels.TOKENS)
    counts, first = counts.to(device, torch.int32), first.to(device, torch.int32)
    return Table(starts.to(device), counts, first, document.numel(), numbers.numel())


def refusal(q: Tensor, v: Tensor, lower_bound: float | None, dtypes: tuple[torch.dtype, ...]) -> str:
    """Why the kernels do not take this call; empty when they do."""
    if lower_bound is None or not -5.9 <= lower_bound < 0:
        return f"lower_bound = {lower_bound} is outside [-5.9, 0)"
    widths = WIDTHS if q.is_cuda else (16, *WIDTHS)
    if q.shape[-1] not in widths or v.shape[-1] not in widths:
        return f"K, V = {q.shape[-1]}, {v.shape[-1]} are not both among {widths}"
    if any(d not in (torch.bfloat16, torch.float32) for d in dtypes):
        return "an input is neither bfloat16 nor float32"
    return ""


class _Call(NamedTuple):
    """What every launch of one call shares."""

    table: Table
    heads: int
    width: int
    value: int
    scale: float
    lower_bound: float
    dot: Any
    store: torch.dtype
    precision: str
    key_dot: Any
    config: Config


def _call(q: Tensor, v: Tensor, table: Table, scale: float, lower_bound: float, config: Config | None) -> _Call:
    wide = q.dtype == torch.float32 or v.dtype == torch.float32
    config = config or (FLOAT32 if wide else BFLOAT16)
    dot = tl.float32 if wide else tl.bfloat16
    key_dot = tl.float32 if wide or config.key_precision != "bf16" else tl.bfloat16
    store = torch.float32 if wide else torch.bfloat16
    return _Call(table, q.shape[2], q.shape[3], v.shape[3], scale, lower_bound, dot, store, "tf32x3" if wide else "tf32", key_dot, config)


class _Prepared(NamedTuple):
    query: Tensor
    key: Tensor
    tail: Tensor
    decay_end: Tensor
    inverse: Tensor
    scores: Tensor


class _Factors(NamedTuple):
    """What the scans read, and the tile offsets [chunks*H, 5, K] of the cumulative decay."""

    made: _Prepared
    offsets: Tensor


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    if all(grid):  # no chunk, no launch
        kernel[grid](*arguments, **options)


def _prepare(inputs: tuple[Tensor, ...], call: _Call) -> _Factors:
    q, k, _, g, beta, A_log, dt_bias = inputs
    places, size = call.table.chunks * call.heads, kernels.TOKENS
    query, key, tail = (q.new_empty(places, size, call.width, dtype=call.store) for _ in range(3))
    inverse, scores = (q.new_empty(places, size, size, dtype=call.store) for _ in range(2))
    inner = q.new_empty(places, size, size, dtype=torch.float32)
    offsets = q.new_empty(places, 5, call.width, dtype=torch.float32)
    out = _Prepared(query, key, tail, q.new_empty(places, call.width, dtype=torch.float32), inverse, scores)
    table, config, channels = call.table, call.config, min(call.config.prepare_channels, call.width)
    _launch(kernels.gate_kernel, (places,),
        g, A_log, dt_bias, table.starts, table.counts, offsets, out.decay_end, call.lower_bound, call.heads, K=call.width, C=call.width,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    _launch(kernels.prepare_kernel, (places,),
        q, k, g, beta, A_log, dt_bias, table.starts, table.counts, offsets, query, key, tail, inner, scores,
        call.scale, call.lower_bound, call.heads,
        K=call.width, C=channels, ANCHOR=anchor(call.lower_bound), DOT=call.dot, KEYDOT=call.key_dot, PRECISION=call.precision,
        num_warps=config.prepare_warps, num_stages=config.prepare_stages, maxnreg=config.prepare_registers or None,
    )  # fmt: skip
    _launch(
        kernels.inverse_kernel,
        (places,),
        inner,
        inverse,
        PRECISION=config.inverse_precision,
        num_warps=config.inverse_warps,
        num_stages=1,
    )
    return _Factors(out, offsets)


def _scan(
    made: _Prepared, v: Tensor, beta: Tensor, state: Tensor | None, call: _Call, o: Tensor | None, final: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Outputs into `o` and states into `final` where given; with `keep`, the entering states and updates."""
    table, config = call.table, call.config
    places, size = (table.chunks * call.heads, kernels.TOKENS) if keep else (0, 0)
    entering = v.new_empty(places, call.width, call.value, dtype=call.store)
    updates = v.new_empty(places, size, call.value, dtype=call.store)
    columns = min(config.scan_columns, call.value)
    _launch(kernels.scan_kernel, (call.value // columns, call.heads, table.documents),
        *made, v, beta, table.starts, table.counts, table.first, state, final, o, entering, updates, call.heads,
        K=call.width, V=call.value, BV=columns, DOT=call.dot, PRECISION=call.precision, HAS_INITIAL=state is not None,
        STORE_FINAL=final is not None, STORE_O=o is not None, STORE_STATES=keep, num_warps=config.scan_warps, num_stages=config.scan_stages,
    )  # fmt: skip
    return entering, updates


def _scan_back(
    made: _Prepared, v: Tensor, o: Tensor, beta: Tensor, updates: Tensor, do: Tensor, dfinal: Tensor | None, dinitial: Tensor | None,
    call: _Call,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dv, gradients of the leaving states, and three sums [3, B, T, H]: beta's logit gradient, <q, dq>, <k, dk>."""
    table, config = call.table, call.config
    columns = min(config.back_columns, call.value)
    blocks = call.value // columns
    dv = torch.empty_like(do)
    leaving = do.new_empty(table.chunks * call.heads, call.width, call.value, dtype=call.store)
    shares = do.new_empty(3, *beta.shape, blocks, dtype=torch.float32)
    _launch(kernels.scan_back_kernel, (blocks, call.heads, table.documents),
        *made, beta, table.starts, table.counts, table.first, updates, v, o, do, dfinal, dinitial, dv, leaving, *shares, call.heads, blocks,
        K=call.width, V=call.value, BV=columns, DOT=call.dot, PRECISION=call.precision,
        HAS_DFINAL=dfinal is not None, STORE_DINITIAL=dinitial is not None, num_warps=config.back_warps, num_stages=config.back_stages,
    )  # fmt: skip
    return dv, leaving, shares.sum(-1)


def _gradients(
    inputs: tuple[Tensor, ...],
    offsets: Tensor,
    entering: Tensor,
    leaving: Tensor,
    updates: Tensor,
    do: Tensor,
    dv: Tensor,
    sums: Tensor,
    call: _Call,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, g, A_log, dt_bias."""
    q, k, _, g, _, A_log, dt_bias = inputs
    table, config = call.table, call.config
    channels = min(config.gradient_channels, call.width)
    dq, dk, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(g)
    dbias, drate = (q.new_empty(table.chunks, call.heads, call.width, dtype=torch.float32) for _ in range(2))
    _launch(kernels.gradient_kernel, (table.chunks * call.heads * (call.width // channels),),
        q, k, g, A_log, dt_bias, table.starts, table.counts, offsets, entering, leaving, updates, do, dv, sums[1], sums[2],
        dq, dk, dg, dbias, drate, call.scale, call.lower_bound, call.heads,
        K=call.width, C=channels, V=call.value, BV=min(config.gradient_columns, call.value),
        ANCHOR=anchor(call.lower_bound), DOT=call.dot, PRECISION=call.precision,
        num_warps=config.gradient_warps, num_stages=config.gradient_stages,
        maxnreg=config.gradient_registers or None,
    )  # fmt: skip
    return dq, dk, dg, drate.sum((0, 2)).to(A_log.dtype), dbias.sum(0).to(dt_bias.dtype)


class _TritonKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Table, scale: float, bound: float, config: Config | None, state: Tensor | None, want: bool, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, _, v = inputs[:3]
        call = _call(q, v, table, scale, bound, config)
        o = torch.empty_like(v)
        # with no chunk at all the scan still copies the given states
        final = v.new_empty(table.documents, call.heads, call.width, call.value, dtype=torch.float32) if want else None
        _scan(_prepare(inputs, call).made, v, inputs[4], state, call, o, final, keep=False)
        ctx.save_for_backward(*inputs, o, *([] if state is None else [state]))
        ctx.call, ctx.want, ctx.has_state = call, want, state is not None
        return o, v.new_empty(0, dtype=torch.float32) if final is None else final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, o, state = ctx.saved_tensors[:7], ctx.saved_tensors[7], ctx.saved_tensors[8] if ctx.has_state else None
        call, beta = ctx.call, inputs[4]
        do = grad_outputs[0].contiguous()
        dfinal = grad_outputs[1].contiguous() if ctx.want else None
        made, offsets = _prepare(inputs, call)
        entering, updates = _scan(made, inputs[2], beta, state, call, None, None, keep=True)
        dstate = None if state is None else torch.empty_like(state, dtype=torch.float32)
        dv, leaving, sums = _scan_back(made, inputs[2], o, beta, updates, do, dfinal, dstate, call)
        del made
        dq, dk, dg, dA, dbias = _gradients(inputs, offsets, entering, leaving, updates, do, dv, sums, call)
        return (
            None,
            None,
            None,
            None,
            None if state is None or dstate is None else dstate.to(state.dtype),
            None,
            dq,
            dk,
            dv,
            dg,
            sums[0].to(beta.dtype),
            dA,
            dbias,
        )


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
    boundaries: list[int] | None,
    output_final_state: bool = True,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """The Triton path; arguments as `kda_recurrent`. Without `output_final_state` the second result is empty."""
    batch, length = k.shape[:2]
    edges = [n * length for n in range(batch + 1)] if boundaries is None else boundaries
    table = chunk_table(tuple(edges), q.device)
    inputs = [x.contiguous() for x in (q, k, v, g, beta, A_log, dt_bias)]
    state = None if initial_state is None else initial_state.contiguous()
    return _TritonKDA.apply(table, scale, lower_bound, config, state, output_final_state, *inputs)  # pyright: ignore[reportReturnType]
