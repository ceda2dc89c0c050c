"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats v1.0), in the released checkpoints' packing.

A row's byte j holds column 2j in its low and 2j + 1 in its high nibble. A nibble is E2M1: bit 3 the sign, bits 0-2 an index into
{0, 0.5, 1, 1.5, 2, 3, 4, 6}. A scale byte s is 2^(s - 127), one per 32 columns.

Two rules give a group's scale from its largest magnitude, amax:

* "ocp_floor" (OCP v1.0, §6.3): 2^(floor(log2 amax) - 2). An amax from 6 to 8 times the scale is cut to 6 times.
* "round_amax", the default: the same after amax is rounded to one mantissa bit, so that from 1.75 * 2^e on it counts as 2^(e+1). No more
  than 7 times the scale is left to be cut to 6. It is the rule of compressed-tensors, whose files the engines read, hence the rule of
  training and export here: what training computes with is what any of these tools would have written.

Either way a group's largest code is 4 or 6 unless the scale is at the end of its range, so a second pass over the values finds the
same scale, whichever rule the first pass used: the values are a fixed point of both. Scales chosen larger than that (by another rule)
keep their values but not their bytes; `keep` is for those.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from atoll.ops.microscaling import BIAS, GROUP, NAN_SCALE, check, finite_or_nan, floor_log2, pieces, power, scale_shape
from atoll.ops.situ import wide

Rule = Literal["round_amax", "ocp_floor"]
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = 125  # exponent under which 6 is still finite in float32 and bfloat16


def _exponents(amax: Tensor, rule: str) -> Tensor:
    """Each group's shared exponent, int32 in [-127, 125]; zero takes the least."""
    exponent = floor_log2(amax)
    if rule == "round_amax":
        exponent = exponent + (torch.frexp(amax)[0] >= 0.875)  # frexp's mantissa lies in [0.5, 1)
    exponent = torch.where(amax == 0, -BIAS, exponent - 2)  # the largest E2M1 binade is 2^2
    return exponent.clamp(-BIAS, _LARGEST)


def _codes(x: Tensor) -> Tensor:
    """E2M1 code of each value: nearest, ties to the even code, saturating at 6. The sign of zero is kept."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for edge, even_above in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (magnitude >= edge) if even_above else (magnitude > edge)
    return code


def _nearest(x: Tensor) -> Tensor:
    """The E2M1 value that `_codes` would name: steps of 0.5 below 2, of 1 below 4, of 2 above; halves to the even step."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(x.dtype)
    return (x / step).round_().mul_(step).clamp_(-6.0, 6.0)


def _kept(groups: Tensor, keep: Tensor, exponent: Tensor) -> Tensor:
    """`exponent`, but the one of `keep` (scale bytes) where that scale says every value of the group exactly."""
    old = keep.int() - BIAS
    said = _nearest(groups * power(-old, groups.dtype)[:, None]).mul_(power(old, groups.dtype)[:, None])
    return torch.where((said == groups).all(-1) & (keep != NAN_SCALE), old, exponent)


@torch.no_grad()
def mxfp4_quantize(w: Tensor, *, rule: Rule = "round_amax", keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """w [..., C] of any float dtype, C a multiple of 32 -> packed uint8 [..., C/2], scale uint8 [..., C/32].

    Args:
        w: rounded from its own precision (float64 too); magnitudes saturate at 6 * 2^125, what float32 and bfloat16 still hold.
        rule: how a group's scale follows from its largest magnitude; see the head of this file.
        keep: scales uint8 [..., C/32] from an earlier quantisation; a group whose values its old scale says exactly keeps it, 255
            stands for none. The values never depend on it, the bytes do.

    Zeros get scale 0, and -0.0 keeps its sign bit. Temporaries are bounded; one wait for the device.
    Raises ValueError on other widths, dtypes and rules, and, with the place, on NaN or infinity.
    """
    if rule not in ("round_amax", "ocp_floor"):
        raise ValueError(f'rule = {rule!r} must be "round_amax" or "ocp_floor"')
    check(w, "w")
    groups = w.reshape(-1, GROUP)
    packed = torch.empty(groups.shape[0], GROUP // 2, dtype=torch.uint8, device=w.device)
    scale = torch.empty(groups.shape[0], dtype=torch.uint8, device=w.device)
    old = torch.full_like(scale, NAN_SCALE) if keep is None else _scales_like(keep, w).reshape(-1)
    finite = torch.ones((), dtype=torch.bool, device=w.device)
    for part, k, to_packed, to_scale in pieces(groups, old, packed, scale):
        x = part.to(wide(w.dtype))
        amax = x.abs().amax(-1)
        finite &= torch.isfinite(amax).all()
        exponent = _exponents(amax, rule)
        if keep is not None:
            exponent = _kept(x, k, exponent)
        code = _codes(x * power(-exponent, x.dtype)[:, None])
        torch.bitwise_or(code[:, 0::2], code[:, 1::2] << 4, out=to_packed)
        to_scale.copy_(exponent + BIAS)
    if not bool(finite):
        at = (~torch.isfinite(w)).nonzero()[0].tolist()
        raise ValueError(f"w{at} is {float(w[tuple(at)])}: NaN or infinity, which MXFP4 cannot hold")
    columns = w.shape[-1]
    return packed.view(*w.shape[:-1], columns // 2), scale.view(scale_shape(w))


def _scales_like(keep: Tensor, w: Tensor) -> Tensor:
    shape = scale_shape(w)
    if keep.dtype != torch.uint8 or keep.shape != shape:
        raise ValueError(f"keep is {keep.dtype} {list(keep.shape)}: uint8 {list(shape)} is expected")
    return keep


@torch.no_grad()
def mxfp4_dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed uint8 [..., C/2], scale uint8 [..., C/32] -> [..., C] in `dtype`.

    Exact in float64, and in float32 and bfloat16 wherever that is finite; 4 and 6 under the scale byte 253 and 2 to 6 under 254 are not.
    Raises ValueError when shapes or dtypes do not fit, or where a scale is 255, which is NaN.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8 or packed.shape != (*scale.shape[:-1], scale.shape[-1] * GROUP // 2):
        raise ValueError(
            f"packed uint8 [..., C/2] and scale uint8 [..., C/32] do not fit {packed.dtype} {list(packed.shape)}, "
            f"{scale.dtype} {list(scale.shape)}"
        )
    if bool((scale == NAN_SCALE).any()):
        raise ValueError(f"scale{(scale == NAN_SCALE).nonzero()[0].tolist()} is 255, which is NaN")
    exact = wide(dtype)
    table = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=exact, device=packed.device)
    out = torch.empty(scale.numel(), GROUP, dtype=dtype, device=packed.device)
    for p, s, to in pieces(packed.reshape(-1, GROUP // 2), scale.reshape(-1), out):
        code = torch.stack([p & 15, p >> 4], -1).flatten()
        values = table.index_select(0, code.int()).view(-1, GROUP)
        to.copy_(values.mul_(power(s.int() - BIAS, exact)[:, None]))
    return out.view(*scale.shape[:-1], scale.shape[-1] * GROUP)


@torch.no_grad()
def mxfp4_fake(w: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Quantised and dequantised: w [..., C] -> the same shape and dtype, by "round_amax"; into a contiguous `out`, which may be w.

    Bit for bit `mxfp4_dequantize(*mxfp4_quantize(w), w.dtype)` where w is finite; a group with NaN or infinity in it becomes NaN, so that
    a loss shows it, and no device is waited for. Idempotent. Raises ValueError on other widths and dtypes.
    """
    check(w, "w")
    out = torch.empty_like(w, memory_format=torch.contiguous_format) if out is None else out
    for part, to in pieces(w.reshape(-1, GROUP), out.view(-1, GROUP)):
        x = part.to(wide(w.dtype))
        amax = x.abs().amax(-1)
        exponent = _exponents(amax, "round_amax")
        y = _nearest(x * power(-exponent, x.dtype)[:, None])
        to.copy_(y.mul_(finite_or_nan(power(exponent, x.dtype), amax)[:, None]))
    return out
