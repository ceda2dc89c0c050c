"""The choice between a plain torch twin and its Triton kernels, the count of which path calls took, and the launch itself.

Triton is looked for, not imported: importing Atoll needs no more than torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
calls: Counter[str] = Counter()


def count(path: str, reason: str = "") -> None:
    """One more call of `path`, passed over by a faster one for `reason`."""
    calls[f"{path} ({reason})" if reason else path] += 1


def use_triton(op: str, backend: str, on_card: bool, refusal: str) -> bool:
    """Whether `op` runs in Triton.

    "auto" takes it for tensors on a GPU that the kernels do not refuse, "torch" never, "triton" always (on a CPU in Triton's interpreter).

    Raises:
        ValueError: an unknown backend, or "triton" where the kernels cannot run.
    """
    if backend == "torch":
        return False
    if backend not in ("auto", "triton"):
        raise ValueError(f"{op}: backend = {backend!r}; it must be auto, triton or torch")
    if not HAS_TRITON:
        refusal = "Triton is not installed"
    if backend == "triton":
        if not on_card and os.environ.get("TRITON_INTERPRET") != "1":
            refusal = "the tensors are not on a GPU"
        if refusal:
            raise ValueError(f"{op}: backend = 'triton': {refusal}; use auto or torch")
        return True
    if on_card and refusal and not torch.compiler.is_compiling():
        count(f"{op} torch", refusal)
    return on_card and not refusal


def launch(kernel: Any, grid: tuple[int, ...], where: Tensor, *arguments: object, **options: object) -> None:
    """Run `kernel` on the device of `where`; an empty grid is no launch. Loops are not pipelined unless `num_stages` says so."""
    if all(grid):
        with torch.cuda.device_of(where):
            kernel[grid](*arguments, **{"num_stages": 1, **options})
