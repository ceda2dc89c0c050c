"""What quantile balancing is compared with: the sign rule, the auxiliary loss, and capacity with dropping."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def sign_bias(load: Tensor, bias: Tensor, rate: float) -> Tensor:
    """The next bias [E]: b + rate * sign(mean load - load), with load [E] the tokens that each expert got in the step.

    Loss-free balancing, arXiv 2408.15664, algorithm 1.
    """
    return bias + rate * torch.sign(load.double().mean() - load).to(bias.dtype)


def balance_loss(scores: Tensor, share: Tensor, mask: Tensor | None = None) -> Tensor:
    """E * sum_j f_j P_j, a scalar; 1 where either is level. P_j is the mean over tokens of s_ij / sum_r s_ir; gradient to scores alone.

    scores [T, E] after the sigmoid; share [E], f_j, each expert's share of all choices of a step, summing to 1; mask [T] bool: False rows
    (padding) do not count. Source: Switch Transformer, arXiv 2101.03961, eq. 4 to 6; f over the global batch: arXiv 2501.11873.
    """
    part = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    each = scores.shape[1] * (part @ share.to(part.dtype))
    if mask is None:
        return each.mean()
    return (each * mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def within_capacity(ids: Tensor, experts: int, factor: float, mask: Tensor | None = None) -> Tensor:
    """Which choices an expert still has room for, bool [T, k]: the first ceil(factor * T k / E) of each expert, in the order of tokens.

    ids [T, k]. mask [T] bool: False rows (padding) take no place and are not among the T. An earlier token never loses its place to a
    later one, so nothing of the future is seen. Source: Switch Transformer, arXiv 2101.03961, eq. 3; GShard, arXiv 2006.16668.
    """
    flat = ids.reshape(-1)
    if mask is not None:
        flat = torch.where(mask[:, None], ids, experts).reshape(-1)
    tokens = flat.new_full((), ids.shape[0]) if mask is None else mask.sum()
    capacity = torch.ceil(factor * tokens.double() * ids.shape[1] / experts)
    order = flat.argsort(stable=True)
    load = torch.bincount(flat, minlength=experts + 1)
    first = load.cumsum(0) - load
    place = torch.arange(flat.numel(), device=flat.device) - first.index_select(0, flat.index_select(0, order))
    rank = torch.empty_like(flat).index_copy_(0, order, place)
    return ((rank < capacity) | (flat == experts)).view_as(ids)
