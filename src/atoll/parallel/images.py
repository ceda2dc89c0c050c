"""Images on some processes and not on others: all of them run the vision tower when one has to."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from atoll.parallel.mesh import Mesh


def look_together(model: Any, mesh: Mesh) -> None:
    """Let training calls of `model`, one on every process at a time, ask whether any has images; the others then see a blank patch.

    FSDP sums the gradients of the tower over all processes in each backward pass: one that has none for it would leave the others waiting.
    Where no process has images, none runs the tower, and its weights are left alone, as by one process.
    """

    def agree(_: Any, args: tuple[Any, ...], call: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not (model.training and torch.is_grad_enabled()):
            return args, call
        mine = call.get("pixel_values") is not None
        any_ = torch.tensor(int(mine))
        mesh.over_peers(any_, dist.ReduceOp.MAX)
        return args, {**call, "blank": bool(any_) and not mine}

    model.register_forward_pre_hook(agree, with_kwargs=True, prepend=True)
