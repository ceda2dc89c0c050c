"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats v1.0), in the released checkpoints' packing.

A row's byte j holds column 2j in its low and 2j + 1 in its high nibble. A nibble is E2M1: bit 3 the sign, bits 0-2 an index into
{0, 0.5, 1, 1.5, 2, 3, 4, 6}. A scale byte s is 2^(s - 127), one per 32 columns.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GROUP = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _exponents(amax: Tensor, rule: str) -> Tensor:
    """Each group's shared exponent from its largest magnitude; at most 125, where 6 is still finite in float32."""
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - 1  # floor(log2(amax))
    if rule == "round_amax":
        exponent = exponent + (mantissa >= 0.875)  # amax to one mantissa bit: from 1.75 2^e on it counts as 2^(e+1)
    exponent = torch.where(amax == 0, -127, exponent - 2)  # the largest E2M1 binade is 2^2
    return exponent.clamp(-127, 125)


def _codes(x: Tensor) -> Tensor:
    """E2M1 code of each value: nearest, ties to the even code, saturating at 6."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for edge, even_above in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (magnitude >= edge) if even_above else (magnitude > edge)
    return code


@torch.no_grad()
def mxfp4_quantize(w: Tensor, *, rule: Literal["round_amax", "ocp_floor"] = "round_amax") -> tuple[Tensor, Tensor]:
    """w [..., C] of any float dtype, C a multiple of 32 -> packed uint8 [..., C/2], scale uint8 [..., C/32].

    rule: how a group's scale follows from its largest magnitude: "ocp_floor" 2^(floor(log2 amax) - 2), or "round_amax", the same after
    rounding amax to one mantissa bit, as compressed-tensors does. Raises ValueError on other widths, rules, and NaN or infinity.
    """
    if rule not in ("round_amax", "ocp_floor"):
        raise ValueError(f'rule = {rule!r} must be "round_amax" or "ocp_floor"')
    if w.shape[-1] % GROUP:
        raise ValueError(f"last dimension {w.shape[-1]} must be a multiple of {GROUP}")
    groups = w.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("w holds NaN or infinity, which MXFP4 has not")
    exponent = _exponents(amax, rule)
    code = _codes(torch.ldexp(groups, -exponent[..., None])).flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, (exponent + 127).to(torch.uint8)


@torch.no_grad()
def mxfp4_dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed uint8 [..., C/2], scale uint8 [..., C/32] -> [..., C] in `dtype`; exact in float32 and bfloat16.

    Raises ValueError when shapes or dtypes do not fit, or where a scale is 255, which is NaN.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8 or packed.shape != (*scale.shape[:-1], scale.shape[-1] * GROUP // 2):
        raise ValueError(
            f"packed uint8 [..., C/2] and scale uint8 [..., C/32] do not fit {packed.dtype} {list(packed.shape)}, "
            f"{scale.dtype} {list(scale.shape)}"
        )
    if bool((scale == 255).any()):
        raise ValueError("scale holds 255, which is NaN")
    table = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=torch.float32, device=packed.device)
    code = torch.stack([packed & 15, packed >> 4], -1).flatten()
    values = table.index_select(0, code.int()).view(*scale.shape, GROUP)
    return torch.ldexp(values, scale.int()[..., None] - 127).flatten(-2).to(dtype)
