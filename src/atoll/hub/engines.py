"""What other programs make of an exported `config.json`: facts read in the releases named here, held by tests/adapters/.

Each entry says why an engine would not compute what Atoll computes; an empty list says that it reads every setting.
"""

from __future__ import annotations

from typing import Any

# The keys of the text settings that vLLM and mlx-lm both read (mlx-lm 0.32.2; vLLM 0.33.0). An absent key is not "off" everywhere.
READ = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size"),
    *("rms_norm_eps", "vocab_size", "hidden_act", "activation_situ_beta", "activation_situ_linear_beta", "attn_res_block_size"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_nope", "mla_use_output_gate"),
    *("num_experts", "num_experts_per_token", "num_shared_experts", "moe_router_activation_func", "moe_renormalize"),
    *("routed_scaling_factor", "first_k_dense_replace", "moe_layer_freq", "num_expert_group", "topk_group", "topk_method"),
    *("routed_expert_hidden_size", "latent_moe_use_norm", "linear_attn_config"),
)
READ_LINEAR = (
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "kda_layers",
    "full_attn_layers",
    "gate_lower_bound",
    "use_full_rank_gate",
)
# The flat form is read by the Kimi-Linear classes, which know none of the later mechanisms; these stand in the release instead.
READ_FLAT = ("head_dim", "rope_theta", "rope_scaling", "model_max_length", "use_grouped_topk", "tie_word_embeddings")
LATER = (
    *("activation_situ_beta", "activation_situ_linear_beta", "attn_res_block_size", "mla_use_output_gate", "topk_method"),
    *("routed_expert_hidden_size", "latent_moe_use_norm"),
)


def missing_keys(tree: dict[str, Any]) -> list[str]:
    """Keys that engines read of this form and that `tree` (a `config.json`) does not have; none for what Atoll writes."""
    text = tree.get("text_config", tree)
    linear = text.get("linear_attn_config", {})
    if tree.get("model_type") == "kimi_linear":
        wanted, inner = [k for k in (*READ, *READ_FLAT) if k not in LATER], READ_LINEAR[:5]
    else:
        wanted, inner = list(READ), READ_LINEAR
    return [k for k in wanted if k not in text] + [f"linear_attn_config.{k}" for k in inner if k not in linear]


def engines(tree: dict[str, Any]) -> dict[str, list[str]]:
    """Engine → why it does not compute what this `config.json` says; an empty list where nothing is known against it."""
    text, flat = tree.get("text_config", tree), tree.get("model_type") == "kimi_linear"
    common = _common(tree, text)
    return {
        "mlx-lm": common + (_mlx_kimi_linear(text) if flat else _mlx_kimi_k3(text)),
        "transformers": common + _transformers_cache(text) + (_transformers_kimi_linear(text) if flat else _transformers_kimi_k3(tree)),
        "vLLM": common,
    }


def _common(tree: dict[str, Any], text: dict[str, Any]) -> list[str]:
    reasons = [f"{key} is missing" for key in missing_keys(tree)]
    if text.get("router_weights", "unbiased") == "biased":
        reasons.append("weighs experts by unbiased scores, this model by biased ones")
    if text.get("residual") == "full":
        reasons.append("has no full attention residual, only the block form")
    return reasons


def _mlx_kimi_k3(text: dict[str, Any]) -> list[str]:
    reasons = [] if text.get("hidden_act") == "situ" else [f"hidden_act = {text.get('hidden_act')!r}: its kimi_k3 knows situ alone"]
    if text.get("latent_norm_eps", 1e-6) != 1e-6:
        reasons.append(f"latent_norm_eps = {text['latent_norm_eps']}: its kimi_k3 has 1e-06 in MLA's latent norms")
    return reasons


def _mlx_kimi_linear(text: dict[str, Any]) -> list[str]:
    reasons, mine = [], text.get("latent_norm_eps", 1e-6)
    if mine != text.get("rms_norm_eps"):
        reasons.append(f"its kimi_linear has rms_norm_eps = {text.get('rms_norm_eps')} in MLA's latent norm, this model {mine}")
    if text.get("q_lora_rank") is not None:
        reasons.append("q_lora_rank: its kimi_linear has a direct query alone")
    if text.get("quantization_config"):
        reasons.append("its kimi_linear does not read quantised experts")
    return reasons


def _transformers_cache(text: dict[str, Any]) -> list[str]:
    if text.get("linear_attn_config", {}).get("full_attn_layers"):
        return []
    return ["no layer of full attention: its cache then counts no tokens, so only use_cache=False works"]


def _transformers_kimi_k3(tree: dict[str, Any]) -> list[str]:
    """transformers has no class of its own for this form: the folder's remote code is what it runs."""
    if "auto_map" not in tree:
        return ["has no class of its own for kimi_k3, and the folder carries no code for it; atoll export writes it"]
    text = tree.get("text_config", tree)
    reasons = ["the folder's code reads text only, not vision_config"] if tree.get("vision_config") else []
    return reasons + (["the folder's code does not read quantised experts"] if text.get("quantization_config") else [])


def _transformers_kimi_linear(text: dict[str, Any]) -> list[str]:
    reasons = []
    if text.get("latent_norm_eps", 1e-6) != 1e-6:
        reasons.append(f"latent_norm_eps = {text['latent_norm_eps']}: its class has 1e-06 in MLA's latent norms")
    if not text.get("num_shared_experts"):
        reasons.append("num_shared_experts = 0: its class always has one")
    if text.get("quantization_config"):
        reasons.append("its class does not read quantised experts")
    return reasons
