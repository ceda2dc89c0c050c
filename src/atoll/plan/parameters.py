"""How many parameters a model has, counted from its config alone: a pure function, no module is built.

Conventions: `total` counts every stored number (router biases too; `A_log` at its stored length when the config pads it);
`active` counts what one token of text passes through: the experts it visits, the language-model head, `A_log` as its heads, and
not the input embedding, which is a look-up, nor the vision tower. Under these the blueprint has 2.78T total and 104.2B active
parameters, as in Table 1 of the Kimi K3 technical report (arXiv 2607.24653).
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.config import ModelConfig

EMBEDDING = "embedding"
LM_HEAD = "lm_head"
KDA = "KDA mixers"
MLA = "MLA mixers"
DENSE = "dense MLP"
ROUTED = "routed experts"
SHARED = "shared experts"
LATENT = "latent projections"
ROUTER = "routers"
NORMS = "norms"
RESIDUAL = "attention residual"
TOWER = "vision tower"
PROJECTOR = "vision projector"


@dataclass(frozen=True)
class Group:
    """One row of the count: `number` like parts, their parameters stored, and those one token passes through."""

    name: str
    number: int
    total: int
    active: int


@dataclass(frozen=True)
class Counts:
    """Parameters of a model, group by group."""

    groups: tuple[Group, ...]

    @property
    def total(self) -> int:
        """Every stored number."""
        return sum(g.total for g in self.groups)

    @property
    def active(self) -> int:
        """What one token passes through: head counted, input embedding not."""
        return sum(g.active for g in self.groups)

    @property
    def active_without_head(self) -> int:
        """`active` less the language-model head."""
        return self.active - self[LM_HEAD].active

    @property
    def active_with_embedding(self) -> int:
        """`active` plus the whole input embedding."""
        return self.active + self[EMBEDDING].total

    def __getitem__(self, name: str) -> Group:
        return next(g for g in self.groups if g.name == name)


# ---------------------------------------------------------------- one part


def kda_mixer(c: ModelConfig, a_log: int | None = None) -> int:
    """One KDA mixer: q, k, v, convolutions, low-rank decay, beta, output gate, norm, output. `a_log` is A_log's length (default: heads)."""
    width = c.kda_num_heads * c.kda_head_dim
    matrices = 4 * width * c.hidden_size  # q, k, v, output
    convolutions = 3 * width * c.short_conv_kernel_size
    decay = c.kda_head_dim * (c.hidden_size + width) + width + (c.kda_num_heads if a_log is None else a_log)
    beta = c.kda_num_heads * c.hidden_size
    gate = width * c.hidden_size if c.use_full_rank_gate else c.kda_head_dim * (c.hidden_size + width)
    return matrices + convolutions + decay + beta + gate + c.kda_head_dim


def mla_mixer(c: ModelConfig) -> int:
    """One gated MLA mixer: query (through its rank, or direct), shared latent with its norm, per-head key and value, gate, output."""
    queries = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    values = c.num_attention_heads * c.v_head_dim
    if c.q_lora_rank is None:
        query = queries * c.hidden_size
    else:
        query = c.q_lora_rank * (c.hidden_size + 1 + queries)
    latent = (c.kv_lora_rank + c.qk_rope_head_dim) * c.hidden_size + c.kv_lora_rank
    keys_values = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    return query + latent + keys_values + values * c.hidden_size * (2 if c.mla_use_output_gate else 1)


def dense_mlp(c: ModelConfig) -> int:
    """The three matrices of a dense layer's GLU."""
    return 3 * c.hidden_size * c.intermediate_size


def expert_width(c: ModelConfig) -> int:
    """Width the routed experts read and write."""
    return c.hidden_size if c.routed_expert_hidden_size is None else c.routed_expert_hidden_size


def routed_expert(c: ModelConfig) -> int:
    """One routed expert."""
    return 3 * expert_width(c) * c.moe_intermediate_size


def shared_experts(c: ModelConfig) -> int:
    """The shared experts of one layer, one MLP of their summed width at the model's width."""
    return 3 * c.hidden_size * c.num_shared_experts * c.moe_intermediate_size


def latent_projections(c: ModelConfig) -> int:
    """Down and up projection of one layer's experts and the norm between."""
    if c.routed_expert_hidden_size is None:
        return 0
    width = c.routed_expert_hidden_size
    return 2 * width * c.hidden_size + (width if c.latent_moe_use_norm else 0)


def router(c: ModelConfig) -> int:
    """Weight and bias of one router."""
    return c.num_experts * (c.hidden_size + 1)


def moe_layer(c: ModelConfig) -> tuple[int, int]:
    """One layer's mixture of experts: (total, active)."""
    always = shared_experts(c) + latent_projections(c) + router(c)
    return always + c.num_experts * routed_expert(c), always + c.num_experts_per_token * routed_expert(c)


def residual_mix(c: ModelConfig) -> int:
    """Pseudo-query and key norm of one mix over depth."""
    return 0 if c.residual == "plain" else 2 * c.hidden_size


def vision_tower(c: ModelConfig) -> int:
    """Patch embedding, table of positions, blocks of two norms, attention and MLP, and the final norm."""
    v = c.vision
    if v is None:
        return 0
    dim = v.vt_hidden_size
    embedding = dim * (3 * v.patch_size**2 + v.init_pos_emb_height * v.init_pos_emb_width)
    block = dim * (2 + 4 * v.qkv_hidden_size + 2 * v.vt_intermediate_size)
    return embedding + v.vt_num_hidden_layers * block + dim


def projector(c: ModelConfig) -> int:
    """Two matrices and a norm from merged patches to the model's width."""
    if c.vision is None:
        return 0
    inner = c.vision.vt_hidden_size * c.vision.merge_kernel_size[0] * c.vision.merge_kernel_size[1]
    return inner * (inner + c.hidden_size) + c.hidden_size


# ---------------------------------------------------------------- the whole


def kda_layers(c: ModelConfig) -> int:
    """How many layers mix by KDA."""
    return sum(c.is_kda(i) for i in range(c.num_hidden_layers))


def dense_layers(c: ModelConfig) -> int:
    """How many layers have a dense MLP."""
    return sum(c.is_dense(i) for i in range(c.num_hidden_layers))


def count(config: ModelConfig) -> Counts:
    """Parameters by group, total and active, from the config alone."""
    c, layers = config, config.num_hidden_layers
    kda, dense = kda_layers(c), dense_layers(c)
    mla, moe = layers - kda, layers - dense
    table = c.vocab_size * c.hidden_size
    norms = (2 * layers + 1) * c.hidden_size
    mixes = 0 if c.residual == "plain" else 2 * layers + 1

    def same(name: str, number: int, each: int) -> Group:
        return Group(name, number, number * each, number * each)

    groups = (
        Group(EMBEDDING, 1, table, 0),
        same(LM_HEAD, 1, table),
        Group(KDA, kda, kda * kda_mixer(c, c.a_log_storage), kda * kda_mixer(c)),
        same(MLA, mla, mla_mixer(c)),
        same(DENSE, dense, dense_mlp(c)),
        Group(ROUTED, moe * c.num_experts, moe * c.num_experts * routed_expert(c), moe * c.num_experts_per_token * routed_expert(c)),
        same(SHARED, moe, shared_experts(c)),
        same(LATENT, moe, latent_projections(c)),
        same(ROUTER, moe, router(c)),
        Group(NORMS, 2 * layers + 1, norms, norms),
        same(RESIDUAL, mixes, residual_mix(c)),
        Group(TOWER, int(c.vision is not None), vision_tower(c), 0),
        Group(PROJECTOR, int(c.vision is not None), projector(c), 0),
    )
    return Counts(groups)
