"""One object that steps a whole model: Muon and AdamW side by side, masters, clips, and a flat state for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from atoll.config import ModelConfig, OptimConfig
from atoll.optim.clip import qk_clip
from atoll.optim.groups import rules
from atoll.optim.masters import MasterOptimizer
from atoll.optim.muon import Muon


class AdamW(MasterOptimizer, torch.optim.AdamW):
    """torch's fused AdamW with float32 masters; `found_inf` (a float tensor of 0 or 1) makes `step` leave everything as it was."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        for group in self.param_groups:
            for p in group["params"]:
                # As torch would on the first step; made now so that a checkpoint can be read into place.
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        self.take_gradients()
        loss = super().step(closure)
        self.publish()
        return loss


class ModelOptimizer:
    """Both optimizers of a model, stepped together. Every state tensor has a name, so that a checkpoint needs no pickle.

    `held` names the tensors to be stepped where they are not the model's own parameters, and `muon` another form of `Muon`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        shapes: ModelConfig,
        ns_dtype: torch.dtype | None = None,
        held: Mapping[str, Tensor] | None = None,
        muon: Callable[..., Muon] = Muon,
    ) -> None:
        self.config, self.model = config, model
        named = {name: p for name, p in (held or dict(model.named_parameters())).items() if p.requires_grad}
        self.rules = rules(named.items(), shapes, config.experts)
        self.parts: dict[str, tuple[MasterOptimizer, list[str]]] = {}
        names = [n for n, r in self.rules.items() if r.kind == "muon"]
        if names:
            group = {"params": [named[n] for n in names], "blocks": [self.rules[n].blocks for n in names], "peak": config.lr}
            rule = muon([group], config.lr, config.weight_decay, config.momentum, config.nesterov, ns_dtype=ns_dtype)
            self.parts["muon"] = (rule, names)
        by_kind: dict[tuple[bool, str], list[str]] = {}
        for name, r in self.rules.items():
            if r.kind == "adamw":
                by_kind.setdefault((r.decay, r.peak), []).append(name)
        if by_kind:
            groups = [
                {"params": [named[n] for n in names], "weight_decay": config.weight_decay * decay, "peak": getattr(config, peak)}
                for (decay, peak), names in by_kind.items()
            ]
            adam = AdamW(groups, lr=config.adam_lr, betas=config.betas, eps=config.eps)
            self.parts["adamw"] = (adam, [n for names in by_kind.values() for n in names])
        self.masters = {p: m for part, _ in self.parts.values() for p, m in part.pairs}
        self._clipped: list[Any] = [m for m in model.modules() if hasattr(m, "track_max_logit")] if config.qk_clip else []
        for layer in self._clipped:
            layer.track_max_logit = True

    def clip(self) -> Tensor:
        """Clip all gradients in place by their global norm; returns the norm before, a scalar tensor. No host sync."""
        having = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in having if p.grad is not None])
        clip_grads_with_norm_(having, self.config.grad_clip, norm)
        return norm

    def step(self, share: float, skip: Tensor | None = None) -> None:
        """One update at `share` of the peak learning rates. `skip`: a float32 scalar of 0 or 1; 1 changes nothing at all."""
        for part, _ in self.parts.values():
            part.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
            for group in part.param_groups:
                group["lr"] = group["peak"] * share
            part.step()
        self._clip_logits(skip)

    def _clip_logits(self, skip: Tensor | None) -> None:
        for layer in self._clipped:
            assert self.config.qk_clip is not None
            qk_clip(layer, self.config.qk_clip, self.masters, skip)
            layer.max_norms = None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part, _ in self.parts.values():
            part.zero_grad()

    context: Any = None  # where sequences are cut over processes, `parallel.context.Context`
    pipeline: Any = None  # where layers are, `parallel.pipeline.Pipelined`
    counts = True  # whether this process's numbers count, not those of another that has the same tokens and layers

    @property
    def num_parameters(self) -> int:
        """Of the whole model, as a checkpoint stores them."""
        return self.model.num_parameters()  # pyright: ignore[reportCallIssue]

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, as a checkpoint stores them."""
        return {name: t.detach() for name, t in self.model.state_dict().items()}

    def state(self) -> dict[str, Tensor]:
        """Every state tensor by name, live: `muon.momentum.NAME`, `adamw.exp_avg.NAME`, `master.NAME` and so on."""
        tensors: dict[str, Tensor] = {}
        for kind, (part, names) in self.parts.items():
            held = [p for group in part.param_groups for p in group["params"]]
            owners = {id(master) for _, master in part.pairs}
            for name, p in zip(names, held, strict=True):
                tensors |= {f"{kind}.{key}.{name}": value for key, value in part.state[p].items()}
                if id(p) in owners:
                    tensors[f"master.{name}"] = p.detach()
        return tensors
