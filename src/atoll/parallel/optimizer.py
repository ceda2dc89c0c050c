"""The optimizer of a cut model: `ModelOptimizer` over what one process holds, with norm, clips and Muon right over all of them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from atoll.config import ModelConfig, OptimConfig
from atoll.optim import ModelOptimizer
from atoll.optim.clip import clip_factors
from atoll.parallel.muon import ShardedMuon
from atoll.parallel.ranks import Ranks
from atoll.parallel.shard import LOW_PRECISION, Sharded


class ShardedOptimizer(ModelOptimizer):
    """Its state has the names, and as DTensors the shapes, of a model that is not cut: a checkpoint fits any layout."""

    def __init__(
        self, sharded: Sharded, ranks: Ranks, config: OptimConfig, shapes: ModelConfig, ns_dtype: torch.dtype | None = None
    ) -> None:
        self.sharded, self.ranks, self.context = sharded, ranks, sharded.context
        self._group = sharded.mesh.dense.get_group("data")
        self._names = {m: n for n, m in sharded.model.named_modules()}
        heights: dict[Tensor, int] = {sharded.held[n]: cut.shape[0] for n, cut in sharded.cuts.items() if len(cut.shape) == 2}
        muon = functools.partial(ShardedMuon, group=self._group, heights=heights)
        super().__init__(sharded.model, config, shapes, ns_dtype, sharded.held, muon)

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Bring the gradients together and clip them by their norm over all processes, which it returns."""
        self.sharded.take_gradients()
        cuts, held = self.sharded.cuts, self.sharded.held
        whole = [p.grad for n, p in held.items() if n not in cuts and p.grad is not None]
        self._sum(whole)
        squares = get_total_norm([p.grad for n, p in held.items() if n in cuts and p.grad is not None]).double().square()
        torch.distributed.all_reduce(squares, group=self._group)
        norm = (squares + get_total_norm(whole).double().square()).sqrt()
        self.ranks.from_main_(norm)  # replicas may differ in the last bit; what follows must not
        clip_grads_with_norm_(held.values(), self.config.grad_clip, norm)
        return norm

    def _sum(self, gradients: list[Tensor]) -> None:
        """Sum whole gradients over the processes: one collective a type."""
        for dtype in sorted({g.dtype for g in gradients}, key=str):
            alike = [g for g in gradients if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in alike])
            self.ranks.sum_(flat)
            for g, part in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
                g.copy_(part.view_as(g))

    @torch.no_grad()
    def _clip_logits(self, skip: Tensor | None) -> None:
        seen = [layer for layer in self._clipped if layer.max_norms is not None]
        if not seen:
            return
        pooled = torch.cat([layer.max_norms for layer in seen], 1)
        self.ranks.max_(pooled)
        for layer, norms in zip(seen, pooled.split([layer.num_heads for layer in seen], 1), strict=True):
            layer.max_norms = norms
            assert self.config.qk_clip is not None
            for leaf, factors in clip_factors(layer, self.config.qk_clip, skip).items():
                held = self.sharded.held[f"{self._names[layer]}.{leaf}"]
                mine = factors.chunk(self._group.size())
                at = self._group.rank()
                held.mul_((mine[at] if at < len(mine) else factors[:0]).to(held.dtype))
            layer.max_norms = None

    def zero_grad(self) -> None:
        super().zero_grad()
        self.sharded.model.zero_grad()

    @property
    def num_parameters(self) -> int:
        return self.sharded.num_parameters

    def weights(self) -> dict[str, Tensor]:
        return self.sharded.tensors()

    def state(self) -> dict[str, Tensor]:
        tensors = super().state()
        found = {key: self.sharded.wrap(self._owner(key), value) for key, value in tensors.items()}
        masters = {n: cut for n, cut in self.sharded.cuts.items() if cut.dtype in LOW_PRECISION and n in self.rules}
        return found | {f"master.{n}": cut.wrap(self.sharded.held[n].detach()) for n, cut in masters.items()}

    @staticmethod
    def _owner(key: str) -> str:
        """The parameter's name in the name of its state: `muon.momentum.NAME`, `master.NAME`."""
        return key.split(".", 1 if key.startswith("master.") else 2)[-1]
