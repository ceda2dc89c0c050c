"""Float32 masters: an optimizer that steps float32 copies of low-precision weights and copies the result back.

A bfloat16 weight has 8 bits of mantissa: an update 300 times smaller than the weight would round away. The base class below
swaps each low-precision parameter for a float32 master when it enters a group, so that the rule itself only ever sees float32
(or float64) and needs no second path. Gradients of swapped parameters are accumulated in float32 by autograd itself
(`Tensor.grad_dtype`), which also keeps micro-batches from rounding into one another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)


class MasterOptimizer(torch.optim.Optimizer):
    """Mixin for optimizers: low-precision parameters are replaced by float32 masters inside `param_groups`.

    `state` and `param_groups` speak of masters; `pairs` lists (parameter, master). Put this class before the optimizer it extends.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`; masters are made here, once per low-precision parameter."""
        self.pairs: list[tuple[Tensor, Tensor]] = getattr(self, "pairs", [])
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        super().add_param_group({**param_group, "params": [self._master(p) for p in given]})

    def _master(self, parameter: Tensor) -> Tensor:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        parameter.grad_dtype = torch.float32
        master = torch.nn.Parameter(parameter.detach().float())
        self.pairs.append((parameter, master))
        return master

    def take_gradients(self) -> None:
        """Hand the parameters' gradients to their masters (no copy: they are float32 already)."""
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters the model computes with."""
        for parameter, master in self.pairs:
            parameter.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients of parameters and masters."""
        super().zero_grad(set_to_none)
        for parameter, master in self.pairs:
            parameter.grad = master.grad = None
