"""The CPU host's settings that torch leaves alone and that decide how fast a small model trains there."""

from __future__ import annotations

import ctypes
import sys

import torch

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next tensor instead of giving it back to the system.

    By default every tensor over some 100 KB is a fresh mapping whose pages fault one by one: an elementwise product of 8 M
    floats then takes 10 ms in place of 2 (two cores of an EPYC). Returns whether it was done; elsewhere than on Linux with
    glibc nothing happens. Memory is not returned before the process ends, as a training run does not need.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_TOP_PAD, 64 << 20))


def peak_memory(device: torch.device) -> int | None:
    """Bytes at most in use since the last call: of `device` where it is a card; of this process, since its start, on Linux and macOS."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
