"""Training on some layout, and what must come out of it whatever the layout."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from atoll.config import Config, ModelConfig, load_config
from atoll.data.documents import TokenSet
from atoll.data.loader import Sampler
from atoll.parallel import place
from atoll.parallel.ranks import ALONE, Ranks
from atoll.train import setup
from atoll.train.guard import Guard
from atoll.train.stages import plan
from atoll.train.step import micro_batches, train_step

LENGTH, BATCH, STEPS = 16, 8, 3

MICRO: dict[str, Any] = {
    "model.vocab_size": 60,
    "model.hidden_size": 16,
    "model.num_hidden_layers": 3,
    "model.num_attention_heads": 2,
    "model.kda_num_heads": 2,
    "model.kda_head_dim": 8,
    "model.q_lora_rank": 8,
    "model.kv_lora_rank": 8,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 6,
    "model.intermediate_size": 24,
    "model.moe_intermediate_size": 8,
    "model.routed_expert_hidden_size": 8,
    "model.num_experts": 8,
    "model.num_experts_per_token": 2,
    "model.attn_res_block_size": 2,
    "stages.0.length": LENGTH,
    "stages.0.batch": BATCH,
    "train.steps": 10,
    "train.dtype": "float64",
    "train.device": "cpu",
    "optim.qk_clip": 0.01,  # low enough to act on heads of this size
}


def config_for(**changes: Any) -> Config:
    """The micro model; `changes` use __ for the dot."""
    return load_config("tiny", {**MICRO, **{k.replace("__", "."): v for k, v in changes.items()}})


def text(model: ModelConfig) -> TokenSet:
    """Documents of pseudo-random tokens, the same everywhere."""
    numbers = np.random.RandomState(3).randint(3, model.vocab_size, size=520)
    cuts = np.asarray([0, 7, 9, 20, 33, 40, 52, 57, 70, 100, 104, 111, 122, 131, 160, 173, 180, 300, 307, 520])
    table = np.ones(model.vocab_size, dtype=np.int64)
    return TokenSet(numbers.astype(np.uint16), cuts, np.diff(cuts), [str(i) for i in range(len(cuts) - 1)], table, 0, 1, 2)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(config: Config, ranks: Ranks = ALONE, crowd: bool = False) -> dict[str, Any]:
    """Three steps: losses and norms of each, every gradient of the first, then all weights, biases and optimizer state.

    `crowd`: the first half of the experts is chosen by every token.
    """
    model, optimizer = setup.build(config, ranks=ranks)
    _off_zero(optimizer)
    for layer in model.moe_layers() if crowd else ():
        layer.gate.e_score_correction_bias[: layer.num_experts // 2] += 10
    guard, sampler = Guard(None), Sampler(text(config.model), LENGTH, 0)
    (at, shares), seen = place(config.parallel, ranks.rank), {}
    share = BATCH // shares
    found: dict[str, Any] = {"loss": [], "norm": [], "targets": [], "vio": []}
    before = optimizer.clip

    def clip() -> Tensor:
        norm = before()
        if not seen:
            held = optimizer.sharded.held if ranks.size > 1 else dict(model.named_parameters())
            wrap = optimizer.sharded.wrap if ranks.size > 1 else lambda name, t: t
            seen.update({n: whole(wrap(n, p.grad)) for n, p in held.items() if p.grad is not None})
        return norm

    optimizer.clip = clip
    for step in range(STEPS):
        batches = micro_batches(sampler, step * BATCH + at * share, share, config.train.micro_batch)
        result = train_step(model, optimizer, guard, batches, 0.5, ranks, plan(config.stages, STEPS)[0].segments)
        loss, norm, skipped, _ = result.read()
        assert not skipped
        for key, value in zip(found, (loss, norm, result.targets, result.balance["max_vio"]), strict=True):
            found[key].append(value)
    found["gradients"] = seen
    found["weights"] = {n: whole(t) for n, t in optimizer.weights().items()}
    found["state"] = {n: whole(t) for n, t in optimizer.state().items()}
    return found


def _off_zero(optimizer: Any) -> None:
    """Depth queries and A_log start at zero, where some gradients vanish by symmetry: move them off it, the same everywhere."""
    held = optimizer.sharded.held if hasattr(optimizer, "sharded") else dict(optimizer.model.named_parameters())
    cuts = optimizer.sharded.cuts if hasattr(optimizer, "sharded") else {}
    with torch.no_grad():
        for name, p in held.items():
            if "res_proj" in name or name.endswith("A_log"):
                cut, generator = cuts.get(name), torch.Generator().manual_seed(zlib.crc32(name.encode()))
                move = torch.randn(p.shape if cut is None else cut.shape, generator=generator, dtype=p.dtype) * 0.3
                p += move if cut is None else distribute_tensor(move, cut.mesh, cut.placements, src_data_rank=None).to_local()


def train_on(config: Config, crowd: bool = False) -> dict[str, Any] | None:
    """`train` on the processes running now; what it found, from rank 0."""
    import torch.distributed as dist

    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    found = train(config, ranks, crowd)
    if config.parallel.pipeline > 1:  # each stage has tensors of its own
        parts = ranks.gather({key: found[key] for key in ("gradients", "weights", "state")})
        found |= {key: {name: t for part in parts for name, t in part[key].items()} for key in parts[0]}
    return found if ranks.main else None


def layout(config: Config, **axes: Any) -> Config:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **axes))
