"""The output head: scores over the vocabulary, or the loss straight from hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.nn.linear import Linear
from atoll.ops.loss import linear_cross_entropy


class Head(Linear):
    """A `Linear` [V, D] that is asked for logits or for a loss; its `forward` is not used."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D], in at least float32."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(exact), self.weight.to(exact))

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(summed cross entropy, number of counted targets) of hidden [N, D] and targets int64 [N]; see `linear_cross_entropy`."""
        return linear_cross_entropy(hidden, self.weight, targets)
