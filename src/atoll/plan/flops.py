"""Floating-point operations of a token, by mechanism and by the length of its sequence: arithmetic on the config.

Conventions: a multiply-add is two; a matrix of n numbers costs a token 2n; what is elementwise (norms, gates, activations) is not counted.
Attention over the past is counted as a causal sequence needs it, half the square: a token of a sequence of T sees T/2 others on average.
The delta rule is counted as its recurrence needs it, three products of the state with a vector a head, 6·K·V, however a kernel computes it.
The backward pass costs twice the forward one. Of recomputation nothing is counted: these are the model's operations, those of MFU.
"""

from __future__ import annotations

from atoll.config import ModelConfig
from atoll.plan import parameters as p

LENGTHS = (8_192, 65_536, 262_144, 1_048_576)
ATTENTION, RECURRENCE = "MLA over the past", "KDA state"


def matrices(c: ModelConfig) -> dict[str, int]:
    """Operations of one token's forward pass in products with weights, by group of `plan.parameters`."""
    kda = p.kda_layers(c)
    mla, moe = c.num_hidden_layers - kda, c.num_hidden_layers - p.dense_layers(c)
    width = c.kda_num_heads * c.kda_head_dim
    latents = p.latent_projections(c) - (expert_norm(c) if c.routed_expert_hidden_size else 0)
    found = {
        p.LM_HEAD: c.vocab_size * c.hidden_size,
        p.KDA: kda * (p.kda_mixer(c, 0) - width - c.kda_head_dim),  # less dt_bias and the output norm
        p.MLA: mla * (p.mla_mixer(c) - c.kv_lora_rank - (c.q_lora_rank or 0)),  # less the two latent norms
        p.DENSE: p.dense_layers(c) * p.dense_mlp(c),
        p.ROUTED: moe * c.num_experts_per_token * p.routed_expert(c),
        p.SHARED: moe * p.shared_experts(c),
        p.LATENT: moe * latents,
        p.ROUTER: moe * c.num_experts * c.hidden_size,
    }
    return {name: 2 * number for name, number in found.items() if number}


def expert_norm(c: ModelConfig) -> int:
    """Weights of the norm between the experts' sum and its projection up."""
    return p.expert_width(c) if c.latent_moe_use_norm else 0


def over_tokens(c: ModelConfig, length: int) -> dict[str, int]:
    """Operations of one token's forward pass with what other tokens left, in a sequence of `length`."""
    kda = p.kda_layers(c)
    mla = c.num_hidden_layers - kda
    wide = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
    found = {
        RECURRENCE: kda * 6 * c.kda_num_heads * c.kda_head_dim**2,
        ATTENTION: mla * c.num_attention_heads * wide * length,  # 2 operations, half the length
        p.RESIDUAL: 4 * c.hidden_size * mixed_rows(c),
    }
    return {name: number for name, number in found.items() if number}


def mixed_rows(c: ModelConfig) -> int:
    """Rows that all mixes over depth of one token read: each is scored and weighed once."""
    if c.residual == "plain":
        return 0
    total, bank, running = 0, 1, False  # the embedding is the first source
    for layer in range(c.num_hidden_layers):
        for sublayer in range(2):
            closes = c.residual == "full" or (sublayer == 0 and layer % c.attn_res_block_size == 0)
            if closes and running:
                bank, running = bank + 1, False
            total += bank + running
            running = True
    return total + bank + running


def forward(c: ModelConfig, length: int) -> dict[str, int]:
    """Operations of one token's forward pass, by mechanism."""
    return {**matrices(c), **over_tokens(c, length)}


def training(c: ModelConfig, length: int) -> int:
    """Operations of one token in training: forward and backward."""
    return 3 * sum(forward(c, length).values())


def report(c: ModelConfig, lengths: tuple[int, ...] = LENGTHS) -> dict[str, dict[str, int]]:
    """{length: {mechanism: operations of a token's forward pass}}, ready for JSON."""
    return {str(length): forward(c, length) for length in lengths}
