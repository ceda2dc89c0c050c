"""Which optimizer each parameter goes to, and how Muon splits it. One function says it all: `rule`.

Muon (Kimi K3 report §2.5, per head): every matrix, with the projections that make queries, keys and values split along heads.
AdamW (Moonlight §2.2): embedding, output head, everything of one dimension or none, and the small tensors whose rows are not
directions of one space: convolution taps, the router, the depth queries of the block residual. The report is silent on the last
three and on MLA's up-projections; those lines are our reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from atoll.config import ModelConfig
from atoll.optim.muon import Blocks

WHOLE = Blocks()


@dataclass(frozen=True)
class Rule:
    """How one parameter is updated."""

    kind: Literal["muon", "adamw"]
    decay: bool  # whether weight decay pulls it towards zero
    blocks: Blocks = WHOLE  # Muon only: what is orthogonalised by itself
    peak: Literal["lr", "adam_lr", "router_lr"] = "lr"  # setting in [optim] that holds the peak learning rate
    why: str = ""  # shown by `describe`


_LAYER = re.compile(r"\.layers\.(\d+)\.")


def rule(name: str, parameter: Tensor, model: ModelConfig, experts: Literal["muon", "adamw"] = "muon") -> Rule:
    """The rule of the parameter `name` (hub name, experts stacked)."""
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if name.startswith(("vision_tower.", "mm_projector.")):
        return _vision_rule(name, leaf, model)
    if leaf == "embed_tokens":
        # A row without a token in the batch has no gradient; decay would only shrink it.
        return Rule("adamw", False, peak="adam_lr", why="embedding")
    if leaf == "lm_head":
        return Rule("adamw", True, peak="adam_lr", why="output head")
    if leaf in ("A_log", "dt_bias") or "norm" in leaf or parameter.dim() < 2:
        return Rule("adamw", False, peak="adam_lr", why="scale or bias")
    if leaf.endswith("_res_proj"):
        return Rule("adamw", False, peak="adam_lr", why="depth query")
    if leaf.endswith("conv1d"):
        return Rule("adamw", False, peak="adam_lr", why="convolution taps")
    if leaf == "gate":
        # Balancing answers a batch with the bias of the next: it holds only while scores stay put between two steps.
        return Rule("adamw", True, peak="router_lr", why="router")
    if ".experts." in name and parameter.dim() == 3:
        if experts == "muon":
            return Rule("muon", True, why="one block an expert")
        return Rule("adamw", True, peak="adam_lr", why="routed experts")
    blocks = _head_blocks(leaf, name, model)
    return Rule("muon", True, blocks, why="one block a head" if blocks.rows else "whole matrix")


def _vision_rule(name: str, leaf: str, model: ModelConfig) -> Rule:
    """As for text: matrices by Muon, queries, keys and values along heads; what embeds a pixel or a place, and norms, by AdamW."""
    if "norm" in leaf:
        return Rule("adamw", False, peak="adam_lr", why="scale or bias")
    if ".patch_embed." in name:
        return Rule("adamw", leaf == "proj", peak="adam_lr", why="embedding of patches and places")
    if leaf == "wqkv" and model.vision is not None:
        heads = model.vision.vt_num_attention_heads
        return Rule("muon", True, Blocks(3 * heads, (model.vision.qkv_hidden_size // heads,)), why="one block a head")
    return Rule("muon", True, why="whole matrix")


def _head_blocks(leaf: str, name: str, model: ModelConfig) -> Blocks:
    """The split along heads of the projections that make queries, keys and values; whole otherwise."""
    found = _LAYER.search(name)
    if found is None or ".self_attn." not in name:
        return WHOLE
    if model.is_kda(int(found[1])):
        per_head = leaf in ("q_proj", "k_proj", "v_proj")
        return Blocks(model.kda_num_heads, (model.kda_head_dim,)) if per_head else WHOLE
    if leaf in ("q_proj", "q_b_proj"):
        return Blocks(model.num_attention_heads, (model.qk_nope_head_dim + model.qk_rope_head_dim,))
    if leaf == "kv_b_proj":
        return Blocks(model.num_attention_heads, (model.qk_nope_head_dim, model.v_head_dim))
    return WHOLE


def rules(named: Iterable[tuple[str, Tensor]], model: ModelConfig, experts: Literal["muon", "adamw"] = "muon") -> dict[str, Rule]:
    """Name → rule for all trainable parameters of `named`."""
    return {name: rule(name, p, model, experts) for name, p in named if p.requires_grad}


def describe(module: nn.Module, model: ModelConfig, experts: Literal["muon", "adamw"] = "muon") -> str:
    """The groups as a table a person reads: one line a kind of parameter (layer numbers folded), with counts."""
    rows: dict[tuple[str, str, str, str], list[int]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        r = rule(name, parameter, model, experts)
        row = (re.sub(r"\.\d+\.", ".*.", name), r.kind, "decay" if r.decay else "no decay", r.why)
        rows.setdefault(row, []).append(parameter.numel())
    width = max((len(row[0]) for row in rows), default=0)
    lines = [f"{row[0]:<{width}}  x{len(n):<3} {sum(n):>14,}  {row[1]:<5}  {row[2]:<8}  {row[3]}" for row, n in rows.items()]
    return "\n".join(lines)
