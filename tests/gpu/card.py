"""What the tests on a card share."""

import pytest
import torch


def ratio(a, b):
    """RMS of the error over RMS of the reference; infinite where it is not finite."""
    error = (a.double() - b.double()).square().mean().sqrt()
    return float(error / b.double().square().mean().sqrt().clamp_min(1e-30)) if error.isfinite() else float("inf")


def room(gigabytes):
    """Skips a test where the card has less free memory."""
    free = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0
    return pytest.mark.skipif(free < gigabytes, reason=f"needs {gigabytes} GiB of free device memory, {free:.0f} are there")
