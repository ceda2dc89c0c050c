"""The optimizer of a cut model: `ModelOptimizer` over what one process holds, with norm, clips and Muon right over all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from atoll.config import ModelConfig, OptimConfig
from atoll.optim import ModelOptimizer, Rule, rules
from atoll.optim.clip import clip_factors
from atoll.parallel.muon import ShardedMuon
from atoll.parallel.pieces import Pieces
from atoll.parallel.ranks import Ranks
from atoll.parallel.shard import LOW_PRECISION, Sharded


class ShardedOptimizer(ModelOptimizer):
    """Its state has the names, and as DTensors the shapes, of a model that is not cut: a checkpoint fits any layout."""

    def __init__(
        self, sharded: Sharded, ranks: Ranks, config: OptimConfig, shapes: ModelConfig, ns_dtype: torch.dtype | None = None
    ) -> None:
        self.sharded, self.ranks = sharded, ranks
        self.context, self.pipeline, self.counts = sharded.context, sharded.pipeline, sharded.mesh.counts
        self._group, tensor = sharded.mesh.dense.get_group("data"), sharded.mesh.tensor_size
        self._names = {m: n for n, m in sharded.model.named_modules()}
        here = dataclasses.replace(
            shapes, kda_num_heads=shapes.kda_num_heads // tensor, num_attention_heads=shapes.num_attention_heads // tensor
        )
        pieces: dict[Tensor, Pieces] = {}
        for name, rule in rules(sharded.held.items(), here).items():
            found = self._pieces(name, rule) if name in sharded.by_fsdp and rule.kind == "muon" and sharded.held[name].dim() == 2 else None
            if found is not None:
                pieces[sharded.held[name]] = found
        super().__init__(sharded.model, config, here, ns_dtype, sharded.held, functools.partial(ShardedMuon, pieces=pieces))

    def _pieces(self, name: str, rule: Rule) -> Pieces | None:
        """Where a matrix is put together from: of one that is made orthogonal head by head, the heads of this tensor rank alone."""
        mesh, (height, width) = self.sharded.mesh, self.sharded.cuts[name].shape
        kind = self.sharded.kinds.get(name)
        if kind == "column" and rule.blocks.rows:
            return None if self._group.size() == 1 else Pieces(self._group, height // mesh.tensor_size, width)
        cut = kind if kind in ("column", "row") else None
        return Pieces(mesh.copy.get_group("data"), height, width, mesh.tensor_size, cut)

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Bring the gradients together and clip them by their norm over all processes, which it returns."""
        self.sharded.take_gradients()
        sharded, mesh = self.sharded, self.sharded.mesh
        grads = {n: p.grad for n, p in sharded.held.items() if p.grad is not None}
        _together([g for n, g in grads.items() if n not in sharded.by_fsdp], mesh.over_peers)
        _together([g for n, g in grads.items() if sharded.kinds.get(n) == "summed"], mesh.over_tensor)
        # Groups may sum in different orders: what is the same on all tensor ranks must stay so to the bit.
        _together([g for n, g in grads.items() if sharded.kinds.get(n) == "alike"], mesh.first_of_tensor)
        squares = get_total_norm([g for n, g in grads.items() if self._speaks_for(n)]).double().square()
        mesh.over_copy(squares)
        mesh.over_stages(squares)
        norm = squares.sqrt()
        self.ranks.from_main_(norm)  # replicas may differ in the last bit; what follows must not
        clip_grads_with_norm_(sharded.held.values(), self.config.grad_clip, norm)
        return norm

    def _speaks_for(self, name: str) -> bool:
        """Whether this process is the one, of those with the same part of a tensor in one copy of its stage, that counts it."""
        sharded, mesh = self.sharded, self.sharded.mesh
        data = name in sharded.by_fsdp or self._group.rank() == 0
        tensor = sharded.kinds.get(name) in ("column", "row", "tokens") or mesh.tensor_rank == 0
        return data and tensor

    @torch.no_grad()
    def _clip_logits(self, skip: Tensor | None) -> None:
        seen = [layer for layer in self._clipped if layer.max_norms is not None]
        if not seen:
            return
        pooled = torch.cat([layer.max_norms for layer in seen], 1)
        self.sharded.mesh.over_peers(pooled, torch.distributed.ReduceOp.MAX)
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
        masters = {
            n: cut for n, cut in self.sharded.cuts.items() if cut.dtype in LOW_PRECISION and n in self.rules and n in self.sharded.by_fsdp
        }
        return found | {f"master.{n}": cut.wrap(self.sharded.held[n].detach()) for n, cut in masters.items()}

    @staticmethod
    def _owner(key: str) -> str:
        """The parameter's name in the name of its state: `muon.momentum.NAME`, `master.NAME`."""
        return key.split(".", 1 if key.startswith("master.") else 2)[-1]


def _together(gradients: list[Tensor], reduce: Callable[[Tensor], object]) -> None:
    """Let `reduce`, which changes one tensor in place, have all gradients in one call a type."""
    for dtype in sorted({g.dtype for g in gradients}, key=str):
        alike = [g for g in gradients if g.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in alike])
        reduce(flat)
        for g, part in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
            g.copy_(part.view_as(g))
