"""Learning-rate schedule: linear warm-up, then one cosine to the end. Kimi K3 report §3.2 prefers it over warm-up-stable-decay."""

from __future__ import annotations

import math


def factor(step: int, steps: int, warmup: float = 0.01, floor: float = 0.0) -> float:
    """Share of the peak learning rate at optimizer step `step` (0-based) of `steps`.

    The first `warmup` share of the steps (at least one step when the share is not zero) climbs linearly and reaches 1 on its last
    step; the rest follows (1 + cos πx)/2 towards `floor`, which would come one step after the last. A pure function, so that
    resuming needs no state.
    """
    climb = math.ceil(warmup * steps)
    if step < climb:
        return (step + 1) / climb
    progress = (step - climb + 1) / (steps - climb + 1)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
