"""Bytes: of the weights in each storage type, and of what one sequence keeps while it is generated. Arithmetic on the config."""

from __future__ import annotations

from atoll.config import ModelConfig
from atoll.plan import parameters as p

_FLOAT32, _BF16 = 4, 2
_MX_BLOCK = 32  # numbers that share one scale byte (OCP Microscaling Formats 1.0)


def kept_float32(c: ModelConfig) -> int:
    """Numbers stored as float32 beside bfloat16 weights: KDA's convolutions, decay and output norm, and the router biases."""
    width = c.kda_num_heads * c.kda_head_dim
    a_log = c.a_log_storage or c.kda_num_heads
    kda = 3 * width * c.short_conv_kernel_size + a_log + width + c.kda_head_dim
    return p.kda_layers(c) * kda + (c.num_hidden_layers - p.dense_layers(c)) * c.num_experts


def mxfp4_expert(c: ModelConfig) -> int:
    """Bytes of one routed expert in MXFP4: half a byte a number, a scale byte per 32 numbers of a row."""
    width, inner = p.expert_width(c), c.moe_intermediate_size

    def matrix(rows: int, columns: int) -> int:
        return rows * (-(-columns // 2) + -(-columns // _MX_BLOCK))

    return 2 * matrix(inner, width) + matrix(width, inner)


def weight_bytes(c: ModelConfig) -> dict[str, int]:
    """Bytes of all weights: in float32, in bfloat16 (the sensitive few stay float32), and with the routed experts in MXFP4."""
    counts, sensitive = p.count(c), kept_float32(c)
    bf16 = _BF16 * counts.total + (_FLOAT32 - _BF16) * sensitive
    experts = counts[p.ROUTED]
    return {
        "float32": _FLOAT32 * counts.total,
        "bfloat16": bf16,
        "mxfp4": bf16 - _BF16 * experts.total + experts.number * mxfp4_expert(c),
    }


def depth_sources(c: ModelConfig) -> int:
    """Rows the attention residual has banked at the last layer: the embedding and the completed blocks."""
    if c.residual == "plain":
        return 0
    if c.residual == "full":
        return 2 * c.num_hidden_layers
    return -(-c.num_hidden_layers // c.attn_res_block_size)


def state_bytes(c: ModelConfig) -> dict[str, int]:
    """What one sequence keeps: KDA's recurrent state (float32) and convolution window (bfloat16), both independent of its length;
    bytes a token of MLA's cache (bfloat16); and of the bank over depth (bfloat16), which lives only during a forward pass."""
    width, kda = c.kda_num_heads * c.kda_head_dim, p.kda_layers(c)
    mla = c.num_hidden_layers - kda
    return {
        "kda_state": kda * width * c.kda_head_dim * _FLOAT32,
        "kda_conv": kda * 3 * width * (c.short_conv_kernel_size - 1) * _BF16,
        "mla_per_token": mla * (c.kv_lora_rank + c.qk_rope_head_dim) * _BF16,
        "depth_bank_per_token": depth_sources(c) * c.hidden_size * _BF16,
    }
