"""The experts by Triton kernels: three products and a sum forward, three products and three gradients backward.

Forward: sort the assignments by expert; hidden = act(w1 x, w3 x), rows of x gathered as they are read; y = w2 hidden, stored where the
assignment stands; out = the weighted sum over a token's k rows of y, in order, float32. Hidden and y are rounded to x.dtype.
Backward keeps the inputs and the sort. It computes gate and up again (or has kept them), then
back = w2^T d_out, the gradients of gate, up and the token's weight, dx = w1^T d_gate + w3^T d_up, and the weights' gradients.
No atomics and no sum whose order depends on scheduling: same inputs, same bits. Triton is imported at the first launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atoll.ops.dispatch import count, launch
from atoll.ops.experts.plan import Config, Plan, choose, sort, tiles

_FLOATS = (torch.bfloat16, torch.float32)
MOST_CHOICES = 64
_Act = tuple[str, float, float]  # "silu", "situ" or "uncapped", and the two caps


def experts_refusal(x: Tensor, ids: Tensor, weights: Tensor, quantization: str) -> str:
    """Why the kernels do not take this call; empty when they do."""
    if quantization != "none":
        return f"quantization = {quantization!r} is not in the kernels"
    if x.dtype not in _FLOATS:
        return "x is neither bfloat16 nor float32"
    if weights.dtype not in (*_FLOATS, torch.float16):
        return "the mixture weights are wider than float32"
    if not 1 <= ids.shape[1] <= MOST_CHOICES:
        return f"{ids.shape[1]} experts a token are not 1 to {MOST_CHOICES}"
    if ids.numel() >= 2**31:
        return f"{ids.numel()} assignments are 2^31 or more"
    return ""


def fused_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, betas: tuple[float, float | None] | None, recompute: bool
) -> Tensor:
    """As `experts_mlp`; betas: SiTU's caps, or None for SwiGLU. An id that is no expert's adds nothing."""
    act, beta, linear = "silu", 1.0, 1.0
    if betas is not None:
        beta = betas[0]
        act, linear = ("uncapped", 1.0) if betas[1] is None else ("situ", betas[1])
    tensors = (x, weights, w1, w3, w2)
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return _op(x, ids, weights, w1, w3, w2, act, beta, linear, not recompute)[0]
    return forward(x, ids, weights, w1, w3, w2, (act, beta, linear), keep=False)[0]


def config_for(x: Tensor, inner: int) -> Config:
    hopper = not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == 9
    return choose(x.shape[0], x.shape[1], inner, x.dtype, hopper)


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def _products(
    x: Tensor, plan: Plan, w: tuple[Tensor, Tensor], out: Tensor, inner: Tensor, k: int, config: Config, act: _Act, *,
    gather: bool = False, scatter: bool = False, transposed: bool = False, twice: bool = False, keep: str = "nothing",
) -> None:  # fmt: skip
    """`rows_kernel` over all tiles. x [T or R, K or 2 K], each of w [E, M, K] or, transposed, [E, K, M]."""
    from atoll.ops.experts import rows_kernels

    experts, m, depth = w[0].shape if not transposed else (w[0].shape[0], w[0].shape[2], w[0].shape[1])
    each = config.weights if act[0] == "none" else config.weights // 2
    blocks = -(-m // each)
    programs = min(tiles(config, plan.order.numel(), experts) * blocks, _multiprocessors(x) * config.resident)
    launch(
        rows_kernels.rows_kernel, (programs,), x,
        x, plan.order, plan.table, plan.tiles[experts:], *w, out, inner, depth, m, blocks, act[1], act[2],
        FULL=config.full, HALVES=config.halves, FIRST=config.first, SECOND=config.second, GROUP=config.group,
        MW=config.weights, BK=config.depth, STAGES=config.stages, TOPK=k, GATHER=gather, SCATTER=scatter,
        TRANSPOSED=transposed, TWICE=twice, EVEN=depth % config.depth == 0 and (not transposed or m % config.weights == 0),
        ACT=act[0], KEEP=keep, PRECISION="tf32x3", num_warps=config.warps,
    )  # fmt: skip


def _sum(rows: Tensor, ids: Tensor, weights: Tensor | None, experts: int) -> Tensor:
    """[T, L]: each token's k rows, weighted, in order, in float32."""
    from atoll.ops.experts import point_kernels

    (tokens, k), width = ids.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    block = min(512, max(16, 1 << (width - 1).bit_length()))
    each = max(1, 512 // block)
    launch(
        point_kernels.sum_kernel, (-(-tokens // each), -(-width // block)), rows,
        rows, ids, weights, out, tokens, experts, width, ROWS=each, BLOCK=block, TOPK=k, WEIGHTED=weights is not None, num_warps=2,
    )  # fmt: skip
    return out


def forward(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: _Act, keep: bool, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the sort's buffer, and gate beside up [R, 2 I] of each sorted row where kept."""
    count("experts_mlp triton")
    x, ids, weights, w1, w3, w2 = (t.contiguous() for t in (x, ids, weights, w1, w3, w2))
    (tokens, k), (experts, width, _) = ids.shape, w1.shape
    rows = tokens * k
    config = config or config_for(x, width)
    inner = x.new_empty(rows if keep else 0, 2 * width)
    if rows == 0:
        return torch.zeros_like(x), ids.new_zeros(Plan.size(rows, experts), dtype=torch.int32), inner
    buffer = sort(ids, experts, config)
    plan = Plan.read(buffer, rows, experts)
    hidden, y = x.new_empty(rows, width), x.new_empty(rows, x.shape[1])
    _products(x, plan, (w1, w3), hidden, inner, k, config, act, gather=True, keep="also" if keep else "nothing")
    _products(hidden, plan, (w2, w2), y, inner, k, config, ("none", 1.0, 1.0), scatter=True)
    return _sum(y, ids, weights, experts), buffer, inner


def backward(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, buffer: Tensor, inner: Tensor, act: _Act,
    needs: tuple[bool, bool, bool], config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weights, w1, w3, w2; needs: of x, of w1 and w3, of w2, the others come back empty."""
    from atoll.ops.experts import point_kernels

    grad, x, ids, weights, w1, w3, w2 = (t.contiguous() for t in (grad, x, ids, weights, w1, w3, w2))
    (tokens, k), (experts, width, latent) = ids.shape, w1.shape
    rows, none = tokens * k, ("none", 1.0, 1.0)
    config = config or config_for(x, width)
    d_weights = torch.zeros_like(weights)
    made = [
        torch.empty_like(t) if n else t.new_empty(0) for t, n in zip((x, w1, w3, w2), (needs[0], *needs[1:2] * 2, needs[2]), strict=True)
    ]
    if rows == 0:
        dx, *dw = (t.zero_() for t in made)
        return dx, d_weights, dw[0], dw[1], dw[2]
    plan = Plan.read(buffer, rows, experts)
    if inner.shape[0] == 0:
        inner = x.new_empty(rows, 2 * width)
        _products(x, plan, (w1, w3), inner, inner, k, config, act, gather=True, keep="only")
    back, d_inner, hidden = x.new_empty(rows, width), torch.empty_like(inner), x.new_empty(rows, width)
    _products(grad, plan, (w2, w2), back, back, k, config, none, gather=True, transposed=True)
    block = min(1024, max(16, 1 << (width - 1).bit_length()))
    each = 1024 // block
    launch(
        point_kernels.slope_kernel, (-(-rows // each),), x,
        inner, back, weights, plan.order, plan.first[experts:], d_inner, hidden, d_weights, width, act[1], act[2],
        ROWS=each, BLOCK=block, PIECES=-(-width // block), ACT=act[0], num_warps=4,
    )  # fmt: skip
    del inner, back
    if needs[1]:
        _weight_gradients(d_inner, x, plan, made[1], made[2], k, config, right_gather=True)
    if needs[2]:
        _weight_gradients(grad, hidden, plan, made[3], made[3], k, config, left_gather=True)
    del hidden
    if needs[0]:
        y = x.new_empty(rows, latent)
        _products(d_inner, plan, (w1, w3), y, y, k, config, none, scatter=True, transposed=True, twice=True)
        made[0] = _sum(y, ids, None, experts)
    return made[0], d_weights, made[1], made[2], made[3]


def _weight_gradients(
    left: Tensor, right: Tensor, plan: Plan, out: Tensor, more: Tensor, k: int, config: Config, *,
    left_gather: bool = False, right_gather: bool = False,
) -> None:  # fmt: skip
    """out [E, M, N], and `more` beside it where left [., 2 M] has two sides: sums over each expert's rows of left times right."""
    from atoll.ops.experts import weight_kernels

    experts, m, n = out.shape
    sides = left.shape[1] // m
    tall, wide = (min(size, max(16, 1 << (d - 1).bit_length())) for size, d in ((config.tall, m), (config.wide, n)))
    blocks = (-(-m // tall), -(-n // wide))
    launch(
        weight_kernels.weight_kernel, (experts * sides * blocks[0] * blocks[1],), left,
        left, right, plan.order, plan.first, out, more, m, n, *blocks,
        SIDES=sides, BM=tall, BN=wide, BK=config.deep, GROUP=config.grad_group, STAGES=config.grad_stages, TOPK=k,
        LEFT_GATHER=left_gather, RIGHT_GATHER=right_gather, EVEN=m % tall == 0 and n % wide == 0, PRECISION="tf32x3",
        num_warps=config.grad_warps,
    )  # fmt: skip


def _forward_op(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: str, beta: float, linear: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return forward(x, ids, weights, w1, w3, w2, (act, beta, linear), keep)


def _backward_op(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, buffer: Tensor, inner: Tensor,
    act: str, beta: float, linear: float, needs_x: bool, needs_up: bool, needs_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return backward(grad, x, ids, weights, w1, w3, w2, buffer, inner, (act, beta, linear), (needs_x, needs_up, needs_down))


_op = torch.library.custom_op("atoll::experts_mlp", _forward_op, mutates_args=())
_back = torch.library.custom_op("atoll::experts_mlp_backward", _backward_op, mutates_args=())


def _like(t: Tensor, needed: bool = True) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format) if needed else t.new_empty(0)


@_op.register_fake
def _fake(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: str, beta: float, linear: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    size = Plan.size(ids.numel(), w1.shape[0])
    return _like(x), ids.new_empty(size, dtype=torch.int32), x.new_empty(ids.numel() if keep else 0, 2 * w1.shape[1])


@_back.register_fake
def _back_fake(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, buffer: Tensor, inner: Tensor,
    act: str, beta: float, linear: float, needs_x: bool, needs_up: bool, needs_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _like(x, needs_x), _like(weights), _like(w1, needs_up), _like(w3, needs_up), _like(w2, needs_down)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.act, ctx.beta, ctx.linear, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    flags = (needs[0], needs[3] or needs[4], needs[5])
    dx, d_weights, dw1, dw3, dw2 = _back(grad, *ctx.saved_tensors, ctx.act, ctx.beta, ctx.linear, *flags)
    found = (dx, None, d_weights, dw1, dw3, dw2)
    return *(g if n else None for g, n in zip(found, needs[:6], strict=True)), None, None, None, None


_op.register_autograd(_gradients, setup_context=_setup)
