"""MXFP8: 8-bit floats E4M3 in groups of 32 that share a power of two, as activations are rounded to.

Source: OCP Microscaling Formats v1.0, §6.3. The shared scale is 2^(floor(log2 amax) - 8), for 2^8 is the largest binade of E4M3; an
element is the nearest E4M3 value of x / scale, ties to even, saturating at 448. A scale byte s is 2^(s - 127).
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.ops.microscaling import BIAS, GROUP, NAN_SCALE, check, finite_or_nan, floor_log2, pieces, power, scale_shape
from atoll.ops.situ import wide

E4M3_MAX = 448.0
_LARGEST_BINADE = 8


def _exponents(amax: Tensor) -> Tensor:
    """Each group's shared exponent, int32 in [-127, 119]; zero takes the least."""
    exponent = torch.where(amax == 0, -BIAS, floor_log2(amax) - _LARGEST_BINADE)
    return exponent.clamp(-BIAS, BIAS - _LARGEST_BINADE)


def _elements(x: Tensor, exponent: Tensor) -> Tensor:
    """float8_e4m3fn of x / 2^exponent. Torch's cast makes NaN of what is over 464, so it is cut before."""
    return (x * power(-exponent, x.dtype)[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


@torch.no_grad()
def mxfp8_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., C] of any float dtype, C a multiple of 32 -> elements float8_e4m3fn [..., C], scale uint8 [..., C/32].

    A group with NaN or infinity in it gets the scale 255, which is NaN. float64 is rounded by way of float32.
    Raises ValueError on other widths and dtypes.
    """
    check(x, "x")
    groups = x.reshape(-1, GROUP)
    elements = torch.empty(groups.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(groups.shape[0], dtype=torch.uint8, device=x.device)
    for part, to_elements, to_scale in pieces(groups, elements, scale):
        y = part.to(wide(x.dtype))
        amax = y.abs().amax(-1)
        exponent = _exponents(amax)
        to_elements.copy_(_elements(y, exponent))
        to_scale.copy_(torch.where(torch.isfinite(amax), exponent + BIAS, NAN_SCALE))
    return elements.view(x.shape), scale.view(scale_shape(x))


@torch.no_grad()
def mxfp8_dequantize(elements: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """elements float8_e4m3fn [..., C], scale uint8 [..., C/32] -> [..., C] in `dtype`; exact in bfloat16 and wider but for subnormals.

    Raises ValueError when shapes or dtypes do not fit.
    """
    shape = (*scale.shape[:-1], scale.shape[-1] * GROUP)
    if elements.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8 or elements.shape != shape:
        raise ValueError(
            f"elements float8_e4m3fn [..., C] and scale uint8 [..., C/32] do not fit {elements.dtype} {list(elements.shape)}, "
            f"{scale.dtype} {list(scale.shape)}"
        )
    exact = wide(dtype)
    values = elements.reshape(-1, GROUP).to(exact) * power(scale.reshape(-1).int() - BIAS, exact)[:, None]
    return values.to(dtype).view(elements.shape)


@torch.no_grad()
def mxfp8_fake(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Quantised and dequantised: x [..., C] -> the same shape and dtype; into a contiguous `out`, which may be x.

    Bit for bit `mxfp8_dequantize(*mxfp8_quantize(x), x.dtype)`, with bounded temporaries and no wait for the device.
    Raises ValueError on other widths and dtypes.
    """
    check(x, "x")
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    for part, to in pieces(x.reshape(-1, GROUP), out.view(-1, GROUP)):
        y = part.to(wide(x.dtype))
        amax = y.abs().amax(-1)
        exponent = _exponents(amax)
        values = _elements(y, exponent).to(y.dtype)
        to.copy_(values.mul_(finite_or_nan(power(exponent, y.dtype), amax)[:, None]))
    return out
