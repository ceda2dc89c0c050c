"""KDA on a GPU: three kernels forward, six backward (three of them the forward's again); nothing is kept but inputs and output.

Numerics: bfloat16 inputs multiply in bfloat16 with float32 sums; scores of keys against keys, the inverse and its products, which
would amplify rounding, in tf32. float32 inputs multiply in tf32x3. Gate, decay, norms and states are float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.ops.kda import triton_scan as scans
from atoll.ops.kda.triton_common import BLOCK, TOKENS
from atoll.ops.kda.triton_gradient import gradient_kernel, pair_gradient_kernel
from atoll.ops.kda.triton_prepare import gate_kernel, prepare_kernel

WIDTHS = (32, 64, 128, 256)  # of keys and of values: those that were checked on a card; the interpreter also runs 16
STEEPEST = -5.5  # bound of the log-decay at which both factors of a block still fit bfloat16's range
PROGRAMS = 132  # programs that fill a card
SHORTEST = 16  # chunks of the shortest segment


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


class Table(NamedTuple):
    """Chunks of the documents: first token and token count of each; segments: first chunk [S+1]; documents: first segment [N+1]."""

    starts: Tensor
    counts: Tensor
    first: Tensor
    first_segment: Tensor
    chunks: int
    segments: int
    documents: int


@functools.lru_cache(maxsize=16)
def chunk_table(boundaries: tuple[int, ...], device: torch.device, programs: int = PROGRAMS) -> Table:
    """`programs` is how many programs a segment of every document gives together: enough of them, and no document is cut."""
    edges = torch.tensor(boundaries, dtype=torch.int64)
    lengths = edges[1:] - edges[:-1]
    numbers = (lengths + TOKENS - 1) // TOKENS
    first = torch.cat((torch.zeros(1, dtype=torch.int64), numbers.cumsum(0)))
    document = torch.repeat_interleave(torch.arange(numbers.numel()), numbers)
    position = (torch.arange(document.numel()) - first[document]) * TOKENS
    starts = edges[:-1][document] + position
    counts = (lengths[document] - position).clamp_max(TOKENS)
    cuts, first_segment = _segments(first.tolist(), programs)
    int32 = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    return Table(
        starts.to(device),
        counts.to(device, torch.int32),
        int32(cuts),
        int32(first_segment),
        document.numel(),
        len(cuts) - 1,
        numbers.numel(),
    )


def _segments(first: list[int], heads: int) -> tuple[list[int], list[int]]:
    """Chunk boundaries of the segments, and each document's first segment.

    A document is cut only where that makes the longest chain of chunks at least three times shorter: the states of the pieces cost
    two further scans without outputs.
    """
    longest = max((b - a for a, b in zip(first, first[1:], strict=False)), default=0)
    size = max(SHORTEST, -(-first[-1] * heads // PROGRAMS // SHORTEST) * SHORTEST)
    if 3 * size > longest:
        return first, list(range(len(first)))
    cuts, first_segment = [0], [0]
    for a, b in zip(first, first[1:], strict=False):
        cuts += [*range(a + size, b, size), b]
        first_segment.append(len(cuts) - 1)
    return cuts, first_segment


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


def shift(lower_bound: float) -> int:
    """Powers of two between the decay at a block's start and its anchor: half of what 31 tokens can decay."""
    return math.ceil((BLOCK - 1) / 2 * abs(lower_bound) / math.log(2))


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
    config: Config


def _call(q: Tensor, v: Tensor, table: Table, scale: float, lower_bound: float, config: Config | None) -> _Call:
    wide = q.dtype == torch.float32 or v.dtype == torch.float32
    dot, store = (tl.float32, torch.float32) if wide else (tl.bfloat16, torch.bfloat16)
    config = config or (FLOAT32 if wide else BFLOAT16 if q.shape[3] <= 128 else BFLOAT16_WIDE)
    return _Call(table, q.shape[2], q.shape[3], v.shape[3], scale, lower_bound, dot, store, "tf32x3" if wide else "tf32", config)


class _Prepared(NamedTuple):
    """What the scans read of each chunk and head; see `prepare_kernel`."""

    query: Tensor
    erase: Tensor
    tail: Tensor
    write: Tensor
    scores: Tensor
    decay_end: Tensor


class _Kept(NamedTuple):
    """What the backward pass uses of a chunk beside that: N^T, G [64, K], its sums over blocks [2, K], reciprocal norms [B, T, H]."""

    turned_inverse: Tensor
    decay: Tensor
    sums: Tensor
    norms_q: Tensor
    norms_k: Tensor


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    if all(grid):  # no chunk, no launch
        kernel[grid](*arguments, **options)


def _prepare(inputs: tuple[Tensor, ...], call: _Call, keep: bool) -> tuple[_Prepared, _Kept]:
    q, k, v, g, beta, A_log, dt_bias = inputs
    table, config = call.table, call.config
    places, size = table.chunks * call.heads, TOKENS
    float32 = functools.partial(q.new_empty, dtype=torch.float32)
    query, erase, tail = (q.new_empty(places, size, call.width, dtype=call.store) for _ in range(3))
    write = q.new_empty(places, size, call.value, dtype=call.store)
    scores = q.new_empty(places, size, size, dtype=call.store)
    out = _Prepared(query, erase, tail, write, scores, float32(places, call.width))
    inverse = float32(places if keep else 0, size, size)
    norms = [float32(beta.shape if keep else 0) for _ in range(2)]
    kept = _Kept(inverse, float32(places, size, call.width), float32(places, 2, call.width), *norms)
    _launch(gate_kernel, (places,),
        g, A_log, dt_bias, table.starts, table.counts, kept.decay, kept.sums, out.decay_end, call.lower_bound, call.heads,
        K=call.width, num_warps=1, num_stages=1,
    )  # fmt: skip
    _launch(prepare_kernel, (places,),
        q, k, v, beta, table.starts, table.counts, kept.decay, kept.sums, query, erase, tail, write, scores, inverse, *norms,
        call.scale, call.heads,
        K=call.width, C=min(config.prepare_channels, call.width), V=call.value, SOLVE=min(config.prepare_columns, call.width, call.value),
        SHIFT=shift(call.lower_bound), DOT=call.dot, PRECISION=call.precision, KEEP=keep,
        num_warps=config.prepare_warps, num_stages=1, maxnreg=config.prepare_registers or None,
    )  # fmt: skip
    return out, kept


class _Pieces(NamedTuple):
    """Of each segment: the state it ends in when it starts from zero [S,H,K,V], and its transition [S,H,K,K]."""

    local: Tensor
    carry: Tensor


def _pieces(made: _Prepared, call: _Call) -> _Pieces | None:
    """None when every segment is a whole document."""
    table, config = call.table, call.config
    if table.segments == table.documents:
        return None
    shape = (table.segments, call.heads, call.width)
    out = _Pieces(*(made.query.new_empty(*shape, n, dtype=torch.float32) for n in (call.value, call.width)))
    columns = min(config.keep_columns, call.value, call.width)
    _launch(scans.local_kernel, ((call.value + call.width) // columns, call.heads, table.segments),
        made.erase, made.tail, made.write, made.decay_end, table.first, *out, call.heads,
        K=call.width, V=call.value, BV=columns, DOT=call.dot, PRECISION=call.precision,
        num_warps=config.keep_warps, num_stages=config.keep_stages,
    )  # fmt: skip
    return out


def _join(local: Tensor, carry: Tensor, edge: Tensor | None, far: Tensor | None, call: _Call, back: bool) -> Tensor:
    """The state (gradient of the state) at the near edge of every segment [S,H,K,V]; what leaves the documents goes into `far`."""
    out = torch.empty_like(local)
    columns = min(32, call.value)
    _launch(scans.join_kernel, (call.value // columns, call.heads, call.table.documents),
        local, carry, call.table.first_segment, edge, out, far, call.heads,
        K=call.width, V=call.value, BV=columns, BACK=back, HAS_EDGE=edge is not None, STORE_FAR=far is not None, num_warps=8, num_stages=1,
    )  # fmt: skip
    return out


def _scan(made: _Prepared, state: Tensor | None, call: _Call, o: Tensor | None, final: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """Outputs into `o` and states into `final` where given; with `keep`, the entering states and updates. `state` one a segment."""
    table, config = call.table, call.config
    places, size = (table.chunks * call.heads, TOKENS) if keep else (0, 0)
    entering = made.query.new_empty(places, call.width, call.value)
    updates = made.query.new_empty(places, size, call.value)
    columns, warps, stages = config[7:10] if keep else config[4:7]
    columns = min(columns, call.value)
    _launch(scans.scan_kernel, (call.value // columns, call.heads, table.segments),
        made.query, made.erase, made.tail, made.write, made.scores, made.decay_end, table.starts, table.counts, table.first,
        state, final, o, entering, updates, call.heads,
        K=call.width, V=call.value, BV=columns, DOT=call.dot, PRECISION=call.precision, HAS_INITIAL=state is not None,
        STORE_FINAL=final is not None, STORE_O=o is not None, STORE_STATES=keep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return entering, updates


def _scan_back(
    made: _Prepared, do: Tensor, dfinal: Tensor | None, dinitial: Tensor | None, call: _Call, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients of the leaving states and of the updates; `dfinal` and `dinitial` one a segment."""
    table, config = call.table, call.config
    places, size = (table.chunks * call.heads, TOKENS) if keep else (0, 0)
    leaving = made.query.new_empty(places, call.width, call.value)
    dupdates = made.query.new_empty(places, size, call.value, dtype=torch.float32)  # N^T, which comes next, would amplify rounding
    columns = min(config.back_columns, call.value)
    _launch(scans.scan_back_kernel, (call.value // columns, call.heads, table.segments),
        made.query, made.erase, made.tail, made.scores, made.decay_end, table.starts, table.counts, table.first,
        do, dfinal, dinitial, dupdates, leaving, call.heads,
        K=call.width, V=call.value, BV=columns, DOT=call.dot, PRECISION=call.precision,
        HAS_DFINAL=dfinal is not None, STORE_DINITIAL=dinitial is not None, STORE=keep,
        num_warps=config.back_warps, num_stages=config.back_stages,
    )  # fmt: skip
    return leaving, dupdates


def _gradients(
    inputs: tuple[Tensor, ...],
    o: Tensor,
    do: Tensor,
    kept: _Kept,
    entering: Tensor,
    leaving: Tensor,
    updates: Tensor,
    dupdates: Tensor,
    call: _Call,
) -> tuple[Tensor, ...]:
    """Gradients of all seven inputs."""
    q, k, v, g, beta, A_log, dt_bias = inputs
    table, config = call.table, call.config
    channels = min(config.gradient_channels, call.width)
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    dscores, dinner = (torch.empty_like(kept.turned_inverse, dtype=call.store) for _ in range(2))
    dquery, drow, dcol = (q.new_empty(table.chunks * call.heads, TOKENS, call.width, dtype=call.store) for _ in range(3))
    along_q, along_k = (torch.empty_like(beta, dtype=torch.float32) for _ in range(2))
    dend, dbias, drate = (q.new_empty(table.chunks, call.heads, call.width, dtype=torch.float32) for _ in range(3))
    _launch(pair_gradient_kernel, (table.chunks * call.heads,),
        v, beta, o, table.starts, table.counts, kept.turned_inverse, updates, dupdates, entering, leaving, do,
        dv, dbeta, along_q, along_k, dscores, dinner, dquery, drow, dcol, dend, call.scale, call.heads,
        K=call.width, C=min(config.pairs_channels, call.width), V=call.value, BV=min(config.pairs_columns, call.value),
        DOT=call.dot, PRECISION=call.precision, ALONG=channels < call.width,
        num_warps=config.pairs_warps, num_stages=config.pairs_stages,
    )  # fmt: skip
    _launch(gradient_kernel, (table.chunks * call.heads * (call.width // channels),),
        q, k, g, A_log, dt_bias, table.starts, table.counts, kept.decay, kept.sums, kept.norms_q, kept.norms_k, dscores, dinner, dquery, drow, dcol, dend, along_q, along_k,
        dq, dk, dg, dbias, drate, call.scale, call.lower_bound, call.heads,
        K=call.width, C=channels, SHIFT=shift(call.lower_bound), DOT=call.dot, PRECISION=call.precision,
        num_warps=config.gradient_warps, num_stages=1, maxnreg=config.gradient_registers or None,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, drate.sum((0, 2)).to(A_log.dtype), dbias.sum(0).to(dt_bias.dtype)


def _forward(inputs: tuple[Tensor, ...], state: Tensor | None, final: Tensor | None, o: Tensor, call: _Call) -> None:
    made, _ = _prepare(inputs, call, keep=False)
    pieces = _pieces(made, call)
    if pieces is None:
        _scan(made, state, call, o, final, keep=False)
    else:
        _scan(made, _join(*pieces, state, final, call, back=False), call, o, None, keep=False)


def _backward(
    inputs: tuple[Tensor, ...], o: Tensor, state: Tensor | None, do: Tensor, dfinal: Tensor | None, dstate: Tensor | None, call: _Call
) -> tuple[Tensor, ...]:
    made, kept = _prepare(inputs, call, keep=True)
    pieces = _pieces(made, call)
    if pieces is None:
        entering, updates = _scan(made, state, call, None, None, keep=True)
        leaving, dupdates = _scan_back(made, do, dfinal, dstate, call)
    else:
        entering, updates = _scan(made, _join(*pieces, state, None, call, back=False), call, None, None, keep=True)
        local = torch.empty_like(pieces.local)
        _scan_back(made, do, None, local, call, keep=False)
        leaving, dupdates = _scan_back(made, do, _join(local, pieces.carry, dfinal, dstate, call, back=True), None, call)
    del made, pieces
    return _gradients(inputs, o, do, kept, entering, leaving, updates, dupdates, call)


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
        _forward(inputs, state, final, o, call)
        ctx.save_for_backward(*inputs, o, *([] if state is None else [state]))
        ctx.call, ctx.want, ctx.has_state = call, want, state is not None
        return o, v.new_empty(0, dtype=torch.float32) if final is None else final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, o, state = ctx.saved_tensors[:7], ctx.saved_tensors[7], ctx.saved_tensors[8] if ctx.has_state else None
        dfinal = grad_outputs[1].contiguous() if ctx.want else None
        dstate = None if state is None else torch.empty_like(state, dtype=torch.float32)
        grads = _backward(inputs, o, state, grad_outputs[0].contiguous(), dfinal, dstate, ctx.call)
        return (None, None, None, None, None if state is None or dstate is None else dstate.to(state.dtype), None, *grads)


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
    batch, length, heads = k.shape[:3]
    edges = [n * length for n in range(batch + 1)] if boundaries is None else boundaries
    table = chunk_table(tuple(edges), q.device, heads)
    inputs = [x.contiguous() for x in (q, k, v, g, beta, A_log, dt_bias)]
    state = None if initial_state is None else initial_state.contiguous()
    return _TritonKDA.apply(table, scale, lower_bound, config, state, output_final_state, *inputs)  # pyright: ignore[reportReturnType]
