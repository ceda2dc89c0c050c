# SPDX-License-Identifier: Apache-2.0
"""Settings of a Kimi-K3-shaped model for transformers: the nested `kimi_k3` form around a `kimi_linear` text part.

Key names are the released ones. Layer lists in `linear_attn_config` count from 1, as released.
"""

from transformers import PreTrainedConfig

# Keys that have one supported value, because the model has no other form of them.
FIXED = {
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "mla_use_nope": True,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}


class KimiLinearConfig(PreTrainedConfig):
    """The text model.

    `linear_attn_config` holds the delta attention (KDA): `num_heads`, `head_dim`, `short_conv_kernel_size`, `kda_layers`,
    `full_attn_layers` (both from 1), `gate_lower_bound` (null is the unbounded softplus gate), `use_full_rank_gate`.
    The last three fields are of this code alone: they choose how it computes, not what.
    """

    model_type = "kimi_linear"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012
    attribute_map = {"num_experts_per_tok": "num_experts_per_token", "num_local_experts": "num_experts"}  # noqa: RUF012

    vocab_size: int = 163840
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = None
    linear_attn_config: dict | None = None
    q_lora_rank: int | None = None  # null is a direct query projection
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64  # shared key width; never rotated
    v_head_dim: int = 128
    mla_use_output_gate: bool = False
    latent_norm_eps: float = 1e-6
    intermediate_size: int = 33792
    first_k_dense_replace: int = 1
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int | None = None  # null is experts at full width
    latent_moe_use_norm: bool = False
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    router_weights: str = "unbiased"  # scores the mixture weights come from, or "biased"
    hidden_act: str = "silu"  # or "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    attn_res_block_size: int | None = None  # null is the plain residual
    residual: str | None = None  # "plain", "block" or "full"; null reads it off attn_res_block_size
    # One value each, see FIXED; written out because an absent key is not "off" for every engine.
    moe_layer_freq: int = 1
    moe_router_activation_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    mla_use_nope: bool = True
    num_nextn_predict_layers: int = 0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    a_log_storage: int | None = None  # stored length of A_log where a checkpoint pads it; read off the file
    kda_backend: str = "auto"  # "torch" is built in; "atoll" is that package's op; "auto" takes it on CUDA where installed
    logits_with_loss: bool = True  # return logits beside a loss; false saves their memory

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.residual is None:
            self.residual = "plain" if self.attn_res_block_size is None else "block"
        self.linear_attn_config = self._whole_linear_attn_config()
        super().__post_init__(**kwargs)
        self._refuse_unsupported()

    def _whole_linear_attn_config(self) -> dict:
        given = {k: v for k, v in (self.linear_attn_config or {}).items() if v is not None}
        full = given.get("full_attn_layers", [*range(4, self.num_hidden_layers, 4), self.num_hidden_layers])
        defaults = {
            "num_heads": self.num_attention_heads,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": None,
            "use_full_rank_gate": False,
            "full_attn_layers": list(full),
            "kda_layers": [i for i in range(1, self.num_hidden_layers + 1) if i not in full],
        }
        return {**defaults, **given}

    @property
    def layer_types(self) -> list[str]:
        """What each layer keeps in a cache: transformers reads this name."""
        full = self.linear_attn_config["full_attn_layers"]
        return ["full_attention" if i + 1 in full else "linear_attention" for i in range(self.num_hidden_layers)]

    def _refuse_unsupported(self) -> None:
        for key, value in FIXED.items():
            if getattr(self, key, value) not in (value, None):
                raise ValueError(f"{key} = {getattr(self, key)!r}: only {value!r} is supported")
        if self.num_key_value_heads != (heads := self.num_attention_heads):
            raise ValueError(f"num_key_value_heads = {self.num_key_value_heads}: must equal num_attention_heads = {heads}")
        bound = self.linear_attn_config["gate_lower_bound"]
        if bound is not None and not -5.0 <= bound < 0:
            raise ValueError(f"gate_lower_bound = {bound}: must lie in [-5, 0), or null for the unbounded gate")
        choices = {"residual": ("plain", "block", "full"), "hidden_act": ("situ", "silu"), "router_weights": ("unbiased", "biased")}
        for key, allowed in {**choices, "kda_backend": ("auto", "torch", "atoll")}.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} = {getattr(self, key)!r}: one of {', '.join(allowed)} is expected")


class KimiK3Config(PreTrainedConfig):
    """The whole model: `text_config`, and room for a `vision_config`."""

    model_type = "kimi_k3"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012
    sub_configs_defaults = {"text_config": KimiLinearConfig}  # noqa: RUF012

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | None = None
    ignore_index: int = -100
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings = True: embedding and LM head are two matrices here; only False is supported")

    def to_diff_dict(self) -> dict:
        """What `config.json` gets: every text setting, since other readers of this layout do not know the defaults of this class."""
        return {**super().to_diff_dict(), "text_config": self.text_config.to_diff_dict()}
