"""`ModelConfig` to and from the hub's `config.json`.

Two forms are written and read: the nested `kimi_k3` form (settings under `text_config`, and `vision_config` where there is a
tower) and the flat `kimi_linear` form of Kimi-Linear, which knows none of the blueprint's later mechanisms. Layer lists count from
1, as released.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from atoll.config import ConfigError, ModelConfig, UserError, merge, validate_model
from atoll.hub import packed

# Keys that are fields of the same name; SHAPES must stand in a file, the rest have defaults.
OPTIONAL = ("q_lora_rank", "moe_renormalize", "routed_scaling_factor", "rms_norm_eps", "initializer_range")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
SHAPES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "first_k_dense_replace"),
)
SHARED = (*SHAPES, *OPTIONAL, *SPECIAL)
LINEAR = {
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "short_conv_kernel_size",
}
# Settings that may stand in a file with one value only, because the model has no other form of them.
FIXED = {
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "mla_use_nope": True,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
VISION = (
    *("vt_num_hidden_layers", "vt_hidden_size", "vt_num_attention_heads", "qkv_hidden_size", "vt_intermediate_size", "patch_size"),
    *("init_pos_emb_height", "init_pos_emb_width", "init_pos_emb_time", "merge_kernel_size", "projector_ln_eps"),
)
VISION_FIXED = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
PLACEHOLDER = "media_placeholder_token_id"  # stands at the top of the file, beside the other ids
MAX_LENGTH = 1_048_576  # no position is encoded anywhere, so this is what engines reserve for, not what the weights allow

# Every key that is read, for telling a misspelt one from the many that say nothing here.
TEXT_KEYS = (
    *SHARED,
    *FIXED,
    *("num_key_value_heads", "hidden_act", "linear_attn_config", "activation_situ_beta", "activation_situ_linear_beta"),
    *("attn_res_block_size", "residual", "latent_moe_use_norm", "mla_use_output_gate", "routed_expert_hidden_size"),
    *("router_weights", "latent_norm_eps", "quantization_config", "expert_activations"),
)
LINEAR_KEYS = (*LINEAR, "full_attn_layers", "kda_layers", "gate_lower_bound", "use_full_rank_gate")
TOP_KEYS = ("model_type", "text_config", "vision_config", PLACEHOLDER)
ALIKE = 0.9  # similarity from which an unknown key counts as a slip; names of the hub's boilerplate stay under it

WRITER = "written_by"  # ours: tells an older export, which may be replaced, from a folder of somebody else's
FINGERPRINT = "tokenizer_fingerprint"  # ours: which tokenizer the weights go with; engines pass over it


def is_kimi_linear(m: ModelConfig) -> bool:
    """Whether the flat `kimi_linear` form can say all of `m`: plain residual, full-width SwiGLU experts, softplus gate, no MLA gate,
    no vision tower."""
    return (
        m.vision is None
        and m.residual == "plain"
        and m.routed_expert_hidden_size is None
        and m.hidden_act == "silu"
        and m.gate_lower_bound is None
        and not m.use_full_rank_gate
        and not m.mla_use_output_gate
    )


def to_json(m: ModelConfig, dtype: str = "bfloat16", max_length: int = MAX_LENGTH) -> dict[str, Any]:
    """The `config.json` of `m`; `dtype` names the type most tensors are stored in."""
    if is_kimi_linear(m):
        inert = {"head_dim": m.hidden_size // m.num_attention_heads, "rope_theta": 10000.0, "rope_scaling": None}
        return {**_common(m), **packed.to_json(m), **inert, "dtype": dtype, "model_max_length": max_length}
    text = {**_common(m), **_blueprint(m), **packed.to_json(m), "dtype": dtype, "max_position_embeddings": max_length}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        **{key: getattr(m, key) for key in SPECIAL},
        "dtype": dtype,
        "ignore_index": -100,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
        **_vision(m),
    }


def _vision(m: ModelConfig) -> dict[str, Any]:
    v = m.vision
    if v is None:
        return {}
    tower: dict[str, Any] = {key: getattr(v, key) for key in VISION} | VISION_FIXED
    tower |= {"merge_kernel_size": list(v.merge_kernel_size), "mm_hidden_size": v.vt_hidden_size, "text_hidden_size": m.hidden_size}
    if v.norm_eps is not None:  # no engine reads this; the release leaves the epsilon to the type computed in
        tower["norm_eps"] = v.norm_eps
    return {PLACEHOLDER: v.media_placeholder_token_id, "image_placeholder": "<|kimi_image_placeholder|>", "vision_config": tower}


def _common(m: ModelConfig) -> dict[str, Any]:
    full = m.full_attention()
    linear: dict[str, Any] = {
        **{key: getattr(m, field) for key, field in LINEAR.items()},
        "full_attn_layers": list(full),
        "kda_layers": [i for i in range(1, m.num_hidden_layers + 1) if i not in full],
    }
    if not is_kimi_linear(m):
        linear |= {"gate_lower_bound": m.gate_lower_bound, "use_full_rank_gate": m.use_full_rank_gate}
    out: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **{key: getattr(m, key) for key in SHARED},
        **FIXED,
        "num_key_value_heads": m.num_attention_heads,
        "hidden_act": m.hidden_act,
        "linear_attn_config": linear,
        "use_grouped_topk": True,
        "use_cache": True,
    }
    if m.router_weights == "biased":
        out["router_weights"] = "biased"
    if m.latent_norm_eps != ModelConfig.latent_norm_eps:
        out["latent_norm_eps"] = m.latent_norm_eps
    return out


def _blueprint(m: ModelConfig) -> dict[str, Any]:
    out: dict[str, Any] = {
        "activation_situ_beta": m.activation_situ_beta,
        "activation_situ_linear_beta": m.activation_situ_linear_beta,
        "attn_res_block_size": m.attn_res_block_size if m.residual == "block" else None,
        "latent_moe_use_norm": m.latent_moe_use_norm,
        "mla_use_output_gate": m.mla_use_output_gate,
        "routed_expert_hidden_size": m.routed_expert_hidden_size,
        "topk_method": "noaux_tc",
    }
    if m.residual == "full":  # no engine reads this; its extra tensors make a strict one refuse the folder
        out["residual"] = "full"
    return out


def from_json(tree: Any, name: str = "config.json") -> ModelConfig:
    """The `ModelConfig` that `tree` (a parsed `config.json`) describes. Raises `UserError` naming `name` and the key."""
    if not isinstance(tree, dict):
        raise UserError(f"{name}: an object of settings is expected")
    text = _text_part(tree, name)
    _no_slips(tree, (*TOP_KEYS, *TEXT_KEYS), name, "")
    _no_slips(text, TEXT_KEYS, name, "")
    _require(text, (*SHAPES, "linear_attn_config"), name, "")
    for key, value in FIXED.items():
        if text.get(key, value) not in (value, None):
            raise UserError(f"{name}: {key} = {text[key]!r}: only {value!r} is supported")
    heads = text["num_attention_heads"]
    if text.get("num_key_value_heads", heads) != heads:
        raise UserError(f"{name}: num_key_value_heads = {text['num_key_value_heads']!r}: must equal num_attention_heads = {heads!r}")
    linear = text["linear_attn_config"]
    if not isinstance(linear, dict):
        raise UserError(f"{name}: linear_attn_config = {linear!r}: an object of settings is expected")
    _no_slips(linear, LINEAR_KEYS, name, "linear_attn_config.")
    _require(linear, (*LINEAR, "full_attn_layers"), name, "linear_attn_config.")
    fields = {key: text[key] for key in SHARED if key in text}
    fields |= {field: linear[key] for key, field in LINEAR.items()}
    fields |= _translated(text, linear, name)
    fields["vision"] = _vision_fields(tree, text, name)
    fields["quantization"] = packed.from_json({**tree, **text}, name)
    m = _build(fields, name)
    rest = [i for i in range(1, m.num_hidden_layers + 1) if i not in m.full_attention()]
    kda = linear.get("kda_layers")
    if kda is not None and (not isinstance(kda, list) or sorted(map(str, kda)) != sorted(map(str, rest))):
        raise UserError(f"{name}: linear_attn_config.kda_layers: must list every layer outside full_attn_layers, {_few(rest)}")
    return m


def _few(layers: list[int]) -> str:
    text = ", ".join(map(str, layers))
    return text if len(text) < 400 else f"{text[:400].rpartition(',')[0]}, ... ({len(layers)} layers)"


def _vision_fields(tree: dict[str, Any], text: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Fields of `VisionConfig` in the file; None for a text model."""
    tower = tree.get("vision_config")
    if tower is None or tower == {}:
        return None
    if not isinstance(tower, dict):
        raise UserError(f"{name}: vision_config = {tower!r}: an object of settings is expected")
    if tree["model_type"] != "kimi_k3":
        raise UserError(f"{name}: vision_config is set: it goes with model_type 'kimi_k3', not {tree['model_type']!r}")
    _require(tower, VISION, name, "vision_config.")
    _require(tree, (PLACEHOLDER,), name, "")
    same = {"mm_hidden_size": tower["vt_hidden_size"], "text_hidden_size": text["hidden_size"]}
    for key, value in {**VISION_FIXED, **same}.items():
        if tower.get(key, value) not in (value, None):
            raise UserError(f"{name}: vision_config.{key} = {tower[key]!r}: only {value!r} is supported")
    fields = {key: tower[key] for key in VISION}
    return {**fields, "norm_eps": tower.get("norm_eps"), PLACEHOLDER: tree[PLACEHOLDER]}


def quantized_as_stored(m: ModelConfig, names: Iterable[str], folder: str) -> ModelConfig:
    """`m` with its experts quantised if the tensors `names` of `folder` are, whatever the file said; the rounding of activations is its."""
    if not packed.is_packed(names, folder):
        return dataclasses.replace(m, quantization="none")
    return m if m.quantization != "none" else _checked(dataclasses.replace(m, quantization="mxfp4"), folder)


def _text_part(tree: dict[str, Any], name: str) -> dict[str, Any]:
    kind = tree.get("model_type")
    if kind not in ("kimi_k3", "kimi_linear"):
        near = difflib.get_close_matches(str(kind), ("kimi_k3", "kimi_linear"), 1)
        hint = f"did you mean {near[0]!r}?" if near else "'kimi_k3' or 'kimi_linear' is expected"
        raise UserError(f"{name}: model_type = {kind!r}: not an architecture known here; {hint}")
    text = tree.get("text_config", tree)
    if not isinstance(text, dict):
        raise UserError(f"{name}: text_config = {text!r}: an object of settings is expected")
    return text


def _no_slips(tree: dict[str, Any], known: tuple[str, ...], name: str, prefix: str) -> None:
    """Refuse a key that is spelt almost like one that is read and is not there: its setting would silently take the default."""
    absent = [key for key in known if key not in tree]
    for key in tree:
        if key not in known and (near := difflib.get_close_matches(key, absent, 1, ALIKE)):
            raise UserError(f"{name}: {prefix}{key}: no such key; did you mean {prefix}{near[0]}?")


def _require(tree: dict[str, Any], keys: tuple[str, ...], name: str, prefix: str) -> None:
    for key in keys:
        if key not in tree:
            raise UserError(f"{name}: {prefix}{key} is missing; give the file as it was released")


def _translated(text: dict[str, Any], linear: dict[str, Any], name: str) -> dict[str, Any]:
    """Fields whose absence or value in the file means something else here."""
    full = linear["full_attn_layers"]
    if not isinstance(full, list) or not all(isinstance(i, int) for i in full):
        raise UserError(f"{name}: linear_attn_config.full_attn_layers = {full!r}: a list of layers counted from 1 is expected")
    block = text.get("attn_res_block_size")
    residual = text.get("residual", "plain" if block is None else "block")
    return {
        "full_attn_layers": tuple(full),
        "gate_lower_bound": linear.get("gate_lower_bound"),
        "use_full_rank_gate": linear.get("use_full_rank_gate") or False,
        "mla_use_output_gate": text.get("mla_use_output_gate") or False,
        "routed_expert_hidden_size": text.get("routed_expert_hidden_size"),
        "latent_moe_use_norm": text.get("latent_moe_use_norm") or False,
        "hidden_act": text.get("hidden_act", "silu"),
        "activation_situ_beta": text.get("activation_situ_beta", ModelConfig.activation_situ_beta),
        "activation_situ_linear_beta": text.get("activation_situ_linear_beta", ModelConfig.activation_situ_linear_beta),
        "residual": residual,
        "attn_res_block_size": block if block is not None else ModelConfig.attn_res_block_size,
        "q_lora_rank": text.get("q_lora_rank"),
        "router_weights": text.get("router_weights", "unbiased"),
        "latent_norm_eps": text.get("latent_norm_eps", ModelConfig.latent_norm_eps),
    }


def _build(fields: dict[str, Any], name: str) -> ModelConfig:
    try:
        m = merge(ModelConfig(), fields, "")  # checks and converts every value as in a TOML file
    except ConfigError as error:
        raise UserError(f"{name}: {error}") from None
    return _checked(m, name)


def _checked(m: ModelConfig, name: str) -> ModelConfig:
    try:
        validate_model(m)
    except ConfigError as error:
        raise UserError(f"{name}: {error}") from None
    return m
