"""The text decoder: embedding, layers that read the past over time (KDA or MLA) and over depth (block residual), final norm.

Layer order: Kimi K3 report §2, arXiv 2607.24653, with the depth schedule of arXiv 2603.15031 Fig. 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atoll.config import BalanceConfig, ModelConfig
from atoll.nn.block_residual import DepthProbe, Reader, Schedule, Stream, read
from atoll.nn.cache import Cache, LayerCache
from atoll.nn.carry import DeltaCarry, LatentCarry, SegmentCache
from atoll.nn.delta_attention import DeltaAttention
from atoll.nn.head import Head
from atoll.nn.latent_attention import LatentAttention
from atoll.nn.latent_moe import LatentMoE, Routing
from atoll.nn.linear import RMSNorm, Weight
from atoll.nn.mlp import GatedMLP
from atoll.nn.pooled_cache import DeltaRows


def build_mixer(c: ModelConfig, layer: int, **factory) -> DeltaAttention | LatentAttention:
    """The mixer over time of a 0-based layer."""
    if c.is_kda(layer):
        return DeltaAttention(
            c.hidden_size,
            c.kda_num_heads,
            c.kda_head_dim,
            conv_size=c.short_conv_kernel_size,
            lower_bound=c.gate_lower_bound,
            full_rank_gate=c.use_full_rank_gate,
            eps=c.rms_norm_eps,
            **factory,
        )
    return LatentAttention(
        c.hidden_size,
        c.num_attention_heads,
        q_lora_rank=c.q_lora_rank,
        kv_lora_rank=c.kv_lora_rank,
        nope_dim=c.qk_nope_head_dim,
        rope_dim=c.qk_rope_head_dim,
        v_dim=c.v_head_dim,
        output_gate=c.mla_use_output_gate,
        latent_eps=c.latent_norm_eps,
        **factory,
    )


def build_mlp(c: ModelConfig, layer: int, balance: BalanceConfig, **factory) -> GatedMLP | LatentMoE:
    """The MLP of a 0-based layer."""
    act = {"activation": c.hidden_act, "beta": c.activation_situ_beta, "linear_beta": c.activation_situ_linear_beta}
    if c.is_dense(layer):
        return GatedMLP(c.hidden_size, c.intermediate_size, **act, **factory)
    return LatentMoE(
        c.hidden_size,
        c.routed_expert_hidden_size,
        c.num_experts,
        c.num_experts_per_token,
        c.moe_intermediate_size,
        shared=c.num_shared_experts,
        latent_norm=c.latent_moe_use_norm,
        renormalize=c.moe_renormalize,
        scale=c.routed_scaling_factor,
        weights_from=c.router_weights,
        quantization=c.quantization,
        eps=c.rms_norm_eps,
        balance=balance,
        init_std=None,  # the whole model is set at once
        **act,
        **factory,
    )


class DecoderLayer(nn.Module):
    """One layer: read over depth, mix over time, add; read over depth, MLP, add."""

    def __init__(self, c: ModelConfig, layer: int, balance: BalanceConfig, **factory) -> None:
        super().__init__()
        self.mode, self.eps = c.residual, c.rms_norm_eps
        self.starts_block = layer % c.attn_res_block_size == 0
        self.self_attn = build_mixer(c, layer, **factory)
        mlp = build_mlp(c, layer, balance, **factory)
        # The hub names dense and sparse layers differently.
        self.mlp, self.block_sparse_moe = (mlp, None) if isinstance(mlp, GatedMLP) else (None, mlp)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, **factory)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, **factory)
        if self.mode != "plain":
            self.self_attention_res_norm, self.mlp_res_norm = (Weight(c.hidden_size, **factory) for _ in range(2))
            self.self_attention_res_proj, self.mlp_res_proj = (Weight(1, c.hidden_size, **factory) for _ in range(2))

    def forward(
        self,
        stream: Stream,
        *,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | DeltaCarry | LatentCarry | None = None,
        mask: Tensor | None = None,
        routing: Routing | None = None,
        probe: DepthProbe | None = None,
    ) -> Stream:
        h, stream = self._read(stream, "self_attention", self.input_layernorm, probe)
        stream = _add(stream, self.self_attn(h, cu_seqlens=cu_seqlens, cache=cache), probe)
        h, stream = self._read(stream, "mlp", self.post_attention_layernorm, probe)
        if self.mlp is not None:
            return _add(stream, self.mlp(h), probe)
        assert self.block_sparse_moe is not None
        return _add(stream, self.block_sparse_moe(h, mask=mask, routing=routing), probe)

    def readers(self) -> list[Reader]:
        """Where this layer reads over depth, in order."""
        if self.mode == "plain":
            return []
        parts = ("self_attention", "mlp")
        return [Reader(getattr(self, f"{p}_res_norm").weight, getattr(self, f"{p}_res_proj").weight, self.eps) for p in parts]

    def _read(self, stream: Stream, sublayer: str, norm: RMSNorm, probe: DepthProbe | None) -> tuple[Tensor, Stream]:
        """What the sublayer reads, normed."""
        if self.mode == "plain":
            stream = stream.settle()
            assert stream.prefix is not None
            return norm(stream.prefix), stream
        if self.mode == "full":
            stream = stream.close()
        reader = self.readers()[sublayer == "mlp"]
        return read(stream, reader, out_norm=norm.weight, out_eps=norm.eps, probe=probe)


def _add(stream: Stream, x: Tensor, probe: DepthProbe | None) -> Stream:
    if probe is not None:
        probe.see(stream, x)
    return stream.add(x)


class Decoder(nn.Module):
    """Token ids [B,T] to normed hidden states [B,T,D]."""

    def __init__(self, c: ModelConfig, balance: BalanceConfig, **factory) -> None:
        super().__init__()
        self.residual, self.eps = c.residual, c.rms_norm_eps
        self.gradient_checkpointing = False
        self.schedule: Schedule = "auto"  # how the mixes of a block are made; see Stream.close
        self.partial_dtype: torch.dtype | None = None  # of two-phase mixes that wait for their turn; the stream's by default
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size, **factory)
        self.layers = nn.ModuleList(DecoderLayer(c, i, balance, **factory) for i in range(c.num_hidden_layers))
        if c.residual != "plain":
            self.output_attn_res_norm = Weight(c.hidden_size, **factory)
            self.output_attn_res_proj = Weight(1, c.hidden_size, **factory)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, **factory)

    def forward(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        mask: Tensor | None = None,
        routing: list[Routing] | None = None,
        probe: DepthProbe | None = None,
        embeds: Tensor | None = None,
        stream: Stream | None = None,
        layers: range | None = None,
    ) -> Tensor | Stream:
        """`embeds` [B,T,D] stands in for the embedding of `input_ids`: features of images among it.

        Of some `layers` alone: `stream` is what those before left; what these leave is returned where others follow. `routing` is theirs.
        """
        layers = range(len(self.layers)) if layers is None else layers
        flow = stream or Stream((), self.embed_tokens(input_ids) if embeds is None else embeds)
        routes = iter(routing or [])
        for i in layers:
            layer = self.layers[i]
            if self.residual == "block" and (layer.starts_block or i == layers.start):
                begin = flow.close if layer.starts_block else flow.open
                flow = begin(self._readers(i, layers.stop), schedule=self.schedule, partial_dtype=self.partial_dtype)
            call = {
                "cu_seqlens": cu_seqlens,
                "cache": None if cache is None else cache.layers[i],
                "mask": mask,
                "routing": next(routes, None) if layer.block_sparse_moe is not None else None,
                "probe": probe,
            }
            flow = self._recomputed(layer, flow, call) if self._recompute(cache) else layer(flow, **call)
        return self._output(flow, probe) if layers.stop == len(self.layers) else flow.pause()

    def _readers(self, first: int, stop: int) -> list[Reader]:
        """The readers of a block's layers from `first` on and before `stop`, the output's at the last."""
        layers = [layer for layer in self.layers[first:stop] if isinstance(layer, DecoderLayer)]
        end = next((i for i, layer in enumerate(layers) if i and layer.starts_block), None)
        readers = [r for layer in layers[:end] for r in layer.readers()]
        return readers if end is not None or stop < len(self.layers) else [*readers, self.output_reader()]

    def _recompute(self, cache: Cache | None) -> bool:
        again = cache is None or isinstance(cache, SegmentCache)  # a state that was moved on in place could not be entered twice
        return self.gradient_checkpointing and self.training and again and torch.is_grad_enabled()

    def _recomputed(self, layer: Callable[..., Stream], stream: Stream, call: dict) -> Stream:
        """The layer with its activations dropped and computed again in the backward pass, experts as first chosen."""
        if call["routing"] is None:
            call = {**call, "routing": Routing()}
        out = checkpoint(layer, stream, use_reentrant=False, preserve_rng_state=False, **call)
        assert isinstance(out, Stream)
        return out

    def replay(self, cache: Cache, counts: Tensor) -> None:
        """Make a draft's first `counts` int64 [B] tokens count in every KDA layer; see `DeltaRows`."""
        for layer, state in zip(self.layers, cache.layers, strict=True):
            mixer = layer.self_attn
            if isinstance(mixer, DeltaAttention) and isinstance(state, DeltaRows):
                mixer.replay(state, counts)

    def output_reader(self) -> Reader:
        return Reader(self.output_attn_res_norm.weight, self.output_attn_res_proj.weight, self.eps)

    def _output(self, stream: Stream, probe: DepthProbe | None) -> Tensor:
        if self.residual == "plain":
            stream = stream.settle()
            assert stream.prefix is not None
            return self.norm(stream.prefix)
        out, stream = read(stream, self.output_reader(), out_norm=self.norm.weight, out_eps=self.norm.eps, probe=probe)
        if stream.block is not None:
            stream.block.close()
        return out


class LanguageModel(nn.Module):
    """Decoder and LM head, under the hub's names."""

    def __init__(self, c: ModelConfig, balance: BalanceConfig, **factory) -> None:
        super().__init__()
        self.model = Decoder(c, balance, **factory)
        self.lm_head = Head(c.hidden_size, c.vocab_size, **factory)

    def reset_parameters(self, std: float) -> None:
        """Set every parameter and buffer: the start of training, whatever the memory held (also after `to_empty`)."""
        nn.init.normal_(self.model.embed_tokens.weight, std=std)
        nn.init.normal_(self.lm_head.weight, std=std)
        for module in self.model.modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, (DeltaAttention, LatentAttention, LatentMoE, GatedMLP)):
                module.reset_parameters(std)
        for name, parameter in self.named_parameters():
            if "_res_norm." in name:
                nn.init.ones_(parameter)
            elif "_res_proj." in name:
                nn.init.zeros_(parameter)
