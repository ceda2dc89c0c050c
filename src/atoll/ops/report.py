"""Which path calls took, and the choice between the plain torch twin and the Triton kernels.

Triton is looked for, not imported: importing Atoll needs no more than torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter

import torch

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
