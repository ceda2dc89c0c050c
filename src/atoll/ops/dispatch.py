"""The choice between a plain torch twin and its Triton kernels, the count of which path calls took, and the launch itself.

Triton is looked for, not imported: importing Atoll needs no more than torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
calls: Counter[str] = Counter()
_strict = os.environ.get("ATOLL_STRICT") == "1"


def count(path: str, reason: str = "") -> None:
    """One more call of `path`, passed over by a faster one for `reason`."""
    calls[f"{path} ({reason})" if reason else path] += 1


def kernel_report(clear: bool = False) -> dict[str, int]:
    """How many calls took each path since the start or the last clear, with the reason when a faster path was passed over.

    `kda` counts under the bare path, other ops under their name and path, for example {"triton": 12, "kda_step triton": 40,
    "chunk (lower_bound = None is outside [-5.5, 0))": 3}; convolution and norms count kernels, and what a kernel on a GPU refused.
    `strict()`, ATOLL_STRICT=1 and `backend="triton"` raise instead of falling back.
    """
    report = dict(calls)
    if clear:
        calls.clear()
    return report


@contextlib.contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Within it, every op with a kernel raises a ValueError with the reason where it would fall back to plain torch on a GPU.

    ATOLL_STRICT=1 in the environment does so from the start; `strict(False)` suspends it. The whole process is meant, not a thread.
    A backend named in the call is no fallback. Compiled code keeps what held when it was compiled.
    """
    global _strict
    before, _strict = _strict, on
    try:
        yield
    finally:
        _strict = before


def passed_over(op: str, reason: str, accept: str) -> None:
    """The kernels of `op` cannot take a call that auto would give them.

    Raises:
        ValueError: in strict mode; the message names the reason and `accept`, the backend to ask for.
    """
    if _strict:
        raise ValueError(f"{op}: {reason}, and ATOLL_STRICT forbids to fall back; pass backend = {accept!r} to accept it")


def use_triton(op: str, backend: str, on_card: bool, refusal: str) -> bool:
    """Whether `op` runs in Triton.

    "auto" takes it for tensors on a GPU that the kernels do not refuse, "torch" never, "triton" always (on a CPU in Triton's interpreter).

    Raises:
        ValueError: an unknown backend, "triton" where the kernels cannot run, or a refusal in strict mode.
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
    if on_card and refusal:
        passed_over(op, refusal, "torch")
        if not torch.compiler.is_compiling():
            count(f"{op} torch", refusal)
    return on_card and not refusal


def launch(kernel: Any, grid: tuple[int, ...], where: Tensor, *arguments: object, **options: object) -> None:
    """Run `kernel` on the device of `where`; an empty grid is no launch. Loops are not pipelined unless `num_stages` says so."""
    if all(grid):
        with torch.cuda.device_of(where):
            kernel[grid](*arguments, **{"num_stages": 1, **options})
