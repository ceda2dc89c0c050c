"""What the microscaling formats share: groups of 32 numbers under one power of two (OCP Microscaling Formats v1.0, §5 and §6.3)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

GROUP = 32
BIAS = 127  # a scale byte s is 2^(s - 127), E8M0; 255 is NaN
NAN_SCALE = 255
_PIECE = 2**17  # groups worked on at once, 4 M numbers: temporaries stay small beside the tensor


def check(x: Tensor, name: str) -> None:
    """Refuse what has no groups: `x` must be of a floating type, its last dimension a multiple of 32. Raises ValueError."""
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}: a floating tensor [..., C] is expected")
    if x.shape[-1] % GROUP:
        raise ValueError(f"{name} has a last dimension of {x.shape[-1]}: a multiple of {GROUP} is expected, the numbers that share a scale")


def scale_shape(x: Tensor) -> tuple[int, ...]:
    """Shape of the scales of `x` [..., C]: one for 32 numbers."""
    return (*x.shape[:-1], x.shape[-1] // GROUP)


def power(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exact on every device, for whole exponents from -127 to 127; 128 gives NaN."""
    return (exponent + BIAS).to(torch.uint8).view(torch.float8_e8m0fnu).to(dtype)


def floor_log2(amax: Tensor) -> Tensor:
    """floor(log2(amax)), int32; what it says of zero, infinity and NaN is left to the caller."""
    return torch.frexp(amax)[1] - 1


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, all with one number of rows (groups), a bounded number of rows at a time."""
    for start in range(0, tensors[0].shape[0], _PIECE):
        yield tuple(t[start : start + _PIECE] for t in tensors)


def finite_or_nan(scale: Tensor, amax: Tensor) -> Tensor:
    """`scale` [G], NaN where a group's largest magnitude is NaN or infinity: the whole group then shows it."""
    return torch.where(torch.isfinite(amax), scale, torch.nan)
