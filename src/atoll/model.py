"""The whole model: what `atoll.load` gives. Knows its config, its loss, its cache; generation and files are called from here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.config import BalanceConfig, ModelConfig, UserError, load_config, validate_model
from atoll.nn.balancer import Balancer, Reduce
from atoll.nn.block_residual import DepthProbe, Stream
from atoll.nn.cache import Cache, empty_cache
from atoll.nn.carry import SegmentCache
from atoll.nn.decoder import LanguageModel
from atoll.nn.delta_attention import DeltaAttention
from atoll.nn.latent_moe import LatentMoE, Routing
from atoll.nn.media import MediaLayout, place_media, refuse_media
from atoll.nn.vision import build_vision

IGNORE = -100


@dataclass
class Output:
    """What a forward pass returns. `loss` is the mean over `num_targets` counted targets; `routing` holds ids [T,k] a MoE layer.

    `balance_loss`: in training under `balance.kind = "aux"`, the layers' auxiliary losses, summed: a mean over the tokens that are no
    padding, to be added to `loss`, which never holds it. `stream`: what some of the layers leave for those that follow.
    """

    logits: Tensor | None
    loss: Tensor | None
    num_targets: Tensor | None
    cache: Cache | None
    routing: list[Tensor]
    balance_loss: Tensor | None = None
    stream: Stream | None = None


class Model(nn.Module):
    """A model of the blueprint, with a vision tower where `config.vision` is set.

    Weights are set when it is built, except on the meta device (then `reset_parameters`).

    Args:
        config: shapes. balance: how experts are kept level in training.
        dtype: type of the weights; gates, filters, head norms and the router's bias are float32 or wider whatever it is.
        device: where; "meta" allocates nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        balance: BalanceConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        validate_model(config)
        self.config = config
        self.language_model = LanguageModel(config, balance or BalanceConfig(), dtype=dtype, device=device)
        self.vision_tower, self.mm_projector = None, None
        if config.vision is not None:
            self.vision_tower, self.mm_projector = build_vision(config.vision, config.hidden_size, dtype=dtype, device=device)
        self.balancer = Balancer(self.language_model)
        if self.language_model.lm_head.weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Set every parameter and buffer to its start (`seed` seeds torch's generators first)."""
        if seed is not None:
            torch.manual_seed(seed)
        self.language_model.reset_parameters(self.config.initializer_range)
        for part in (self.vision_tower, self.mm_projector):
            if part is not None:
                part.reset_parameters()

    # -------------------------------------------------- looking inside

    @property
    def gradient_checkpointing(self) -> bool:
        """Drop each layer's activations and compute them again in the backward pass."""
        return self.language_model.model.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.language_model.model.gradient_checkpointing = value
        if self.vision_tower is not None:
            self.vision_tower.encoder.gradient_checkpointing = value

    @property
    def device(self) -> torch.device:
        return self.language_model.lm_head.weight.device

    def moe_layers(self) -> list[LatentMoE]:
        """The layers with routed experts, first to last."""
        return [m for m in self.modules() if isinstance(m, LatentMoE)]

    def num_parameters(self) -> int:
        """Parameters and router biases, as a checkpoint stores them (padding of A_log aside)."""
        biases = sum(m.gate.e_score_correction_bias.numel() for m in self.moe_layers())
        return sum(p.numel() for p in self.parameters()) + biases

    def new_cache(self, batch: int) -> Cache:
        """An empty cache for `batch` sequences that advance together (what holds others: `atoll.nn.pooled_cache`)."""
        return empty_cache(batch, [self.config.is_kda(i) for i in range(self.config.num_hidden_layers)])

    # -------------------------------------------------- forward

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        cache: Cache | None = None,
        logits: bool | Tensor | None = None,
        routing: Iterable[Tensor] | None = None,
        record: dict[str, Any] | None = None,
        shifted: bool = False,
        embeds: Tensor | None = None,
        stream: Stream | None = None,
        layers: range | None = None,
        blank: bool = False,
    ) -> Output:
        """Logits [B,T,V] in at least float32, or the loss.

        Args:
            input_ids: int64 [B,T]; packed documents as [1,T] with `cu_seqlens` int64 [N+1] from 0 to T.
            labels: [B,T], usually `input_ids` itself: position t is predicted from what precedes it; the shift is made here.
                -100 is not counted, nor is the first token of a row or document, nor a place where a feature stands.
            pixel_values: [N,3,p,p], the patches of all images in the order of their placeholders; see `VisionTower.forward`.
            grid_thws: integers [images,3]: frames, rows and columns of each, in patches. `input_ids` hold one placeholder a feature,
                or one an image: then the row grows in place, and logits, routing, cache and documents with it.
                With images a padding token embeds to zero, as in the hub's own merge.
            cache: from `new_cache`; moved on in place. A `SegmentCache`: this is a segment of a longer row, with gradients.
            logits: whether to return logits, by default when there are no labels; or int64 [n], the positions to return them at.
            routing: experts to force, ids [B·T,k] a MoE layer, as an earlier call returned them.
            blank: without images, let the vision tower see one blank patch that adds nothing and whose gradients are zero, for a process
                among others that have images. It then embeds padding as they do.
            shifted: `labels` are targets already: each stands where it is predicted, as for a part of a longer row.
            record: a dict to fill with probes: "depth_weights", "depth_rms" (output and running sum of each sublayer), "decay", "load",
                and "depth_gradients", RMS at each sublayer's output, NaN until a backward pass.
            embeds: [B,T,D], in place of the embedding of `input_ids`: a part of a row whose images were embedded before (`features`,
                `embed_text`). Not with pixel_values.
            layers: run these alone, on the `stream` that those before left; without the last of all, the result is a `stream` again.
                `routing`, `record` and the result's balancing loss are then of these.
        """
        self._check(input_ids, labels, cu_seqlens, cache)
        if embeds is not None and (pixel_values is not None or grid_thws is not None):
            raise ValueError("embeds and pixel_values: the images are in the one or come as the other; give one of the two")
        if pixel_values is not None or grid_thws is not None:
            layout, embeds = self._merge(input_ids, pixel_values, grid_thws)
            input_ids = layout.fill(input_ids, self._placeholder())
            labels = None if labels is None else layout.fill(labels, IGNORE)
            cu_seqlens = None if cu_seqlens is None else layout.bounds(cu_seqlens)
        elif embeds is None and self.vision_tower is not None and (cache is None or input_ids.shape[1] > 1):
            refuse_media(input_ids, self._placeholder())  # a sampled one, fed back alone, is text
            embeds = self._blank(input_ids) if blank else None
        layers = range(self.config.num_hidden_layers) if layers is None else layers
        routes = self._routes(routing, layers)
        probe = self._start_probes(record)
        mask = input_ids.ne(self.config.pad_token_id) if self.training else None
        call = {"cu_seqlens": cu_seqlens, "cache": cache, "mask": mask, "routing": routes, "probe": probe}
        hidden = self.language_model.model(input_ids, embeds=embeds, stream=stream, layers=layers, **call)
        if cache is not None and layers.stop == self.config.num_hidden_layers:
            cache.length += input_ids.shape[1]
        if record is not None:
            self._finish_probes(record, probe or DepthProbe(), routes, layers)
        extra = [r.balance_loss for r in routes if r.balance_loss is not None]
        routed = [r.ids for r in routes if r.ids is not None]
        rest = {"routing": routed, "balance_loss": torch.stack(extra).sum() if extra else None}
        if isinstance(hidden, Stream):
            return Output(None, None, None, cache, stream=hidden, **rest)
        loss, count = (None, None) if labels is None else self._loss(hidden, labels if shifted else next_tokens(labels, cu_seqlens))
        if isinstance(logits, Tensor):
            hidden, logits = hidden.index_select(1, logits), True
        scores = self._logits(hidden) if logits or (logits is None and labels is None) else None
        return Output(scores, loss, count, cache, **rest)

    def _check(self, input_ids: Tensor, labels: Tensor | None, cu_seqlens: Tensor | None, cache: Cache | None) -> None:
        if input_ids.ndim != 2 or not len(input_ids):
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}: [batch, tokens] is expected, with one row or more")
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(f"labels have shape {tuple(labels.shape)}: {tuple(input_ids.shape)} is expected, as input_ids")
        if cu_seqlens is not None:
            if cache is not None and not isinstance(cache, SegmentCache):
                raise ValueError("cu_seqlens and cache: a cache serves whole rows; give one of the two")
            check_segments(cu_seqlens, input_ids.shape)
        if cache is not None and cache.batch != input_ids.shape[0]:
            raise ValueError(f"cache for {cache.batch} sequences, input_ids for {input_ids.shape[0]}: they must agree")

    def _placeholder(self) -> int:
        assert self.config.vision is not None
        return self.config.vision.media_placeholder_token_id

    def _merge(self, input_ids: Tensor, pixel_values: Tensor | None, grid_thws: Tensor | None) -> tuple[MediaLayout, Tensor]:
        """Where text and features go, and the input embeddings [B,T',D] of both together."""
        if self.vision_tower is None:
            raise ValueError("pixel_values: this model has no vision tower; build it with model.vision set, or load a folder that has one")
        if pixel_values is None or grid_thws is None:
            raise ValueError(f"{'pixel_values' if pixel_values is None else 'grid_thws'} is missing: images come as both of the two")
        self.vision_tower.grids(pixel_values, grid_thws)
        layout = place_media(input_ids, self.vision_tower.feature_lengths(grid_thws), self._placeholder())
        return layout, layout.merge(self.embed_text(input_ids), self.features(pixel_values, grid_thws))

    def _blank(self, input_ids: Tensor) -> Tensor:
        """`embed_text`, and a nothing that goes through the whole tower."""
        assert self.vision_tower is not None
        (a, b), p = self.vision_tower.merge, self.vision_tower.patch
        pixels = torch.zeros(a * b, 3, p, p, device=input_ids.device)
        features = self.features(pixels, torch.tensor([[1, a, b]]))
        return self.embed_text(input_ids) + (features * 0).sum()

    def features(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """The images' input embeddings [M,D], one after the other; needs a vision tower."""
        assert self.vision_tower is not None
        assert self.mm_projector is not None
        return self.mm_projector(self.vision_tower(pixel_values, grid_thws))

    def embed_text(self, input_ids: Tensor) -> Tensor:
        """Input embeddings [B,T,D] of text beside images: padding is zero."""
        text = self.language_model.model.embed_tokens(input_ids)
        return text.masked_fill(input_ids.eq(self.config.pad_token_id).unsqueeze(-1), 0)

    def replay(self, cache: Cache, counts: Tensor) -> None:
        """After a call whose cache says `draft`: of each row only the first `counts` int64 [B] tokens were right, and now count."""
        self.language_model.model.replay(cache, counts)

    def _routes(self, routing: Iterable[Tensor] | None, layers: range) -> list[Routing]:
        count = sum(not self.config.is_dense(i) for i in layers)
        if routing is None:
            return [Routing() for _ in range(count)]
        routes = [Routing(ids) for ids in routing]
        if len(routes) != count:
            raise ValueError(f"routing for {len(routes)} layers: {count} are expected")
        return routes

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.language_model.lm_head.logits(hidden)

    def _loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = self.language_model.lm_head.cross_entropy(hidden.flatten(0, 1), targets.flatten())
        return total / count.clamp(min=1), count

    # -------------------------------------------------- probes

    def _start_probes(self, record: dict[str, Any] | None) -> DepthProbe | None:
        for module in self.modules():
            if isinstance(module, DeltaAttention):
                module.probe = None if record is None else []
        return None if record is None else DepthProbe()

    def _finish_probes(self, record: dict[str, Any], depth: DepthProbe, routes: list[Routing], layers: range) -> None:
        c = self.config
        last = layers.stop == c.num_hidden_layers
        names = [f"{i}.{part}" for i in layers for part in ("attention", "mlp")] + ["output"] * last
        if depth.weights:  # the first layer's attention reads the embedding alone: no mix
            record["depth_weights"] = list(zip(names[layers.start == 0 :], depth.weights, strict=True))
        record["depth_rms"] = list(zip(names, depth.outputs, depth.sums, strict=False))
        record["depth_gradients"] = list(zip(names, depth.gradients, strict=False))
        record["decay"] = []
        for i in layers:
            mixer = self.language_model.model.layers[i].self_attn
            if isinstance(mixer, DeltaAttention) and mixer.probe:
                record["decay"].append((i, mixer.probe[-1].flatten()))
                mixer.probe = None
        record["load"] = [torch.bincount(r.ids.flatten(), minlength=c.num_experts) for r in routes if r.ids is not None]

    # -------------------------------------------------- balancing

    def balance_step(self, reduce: Reduce | None = None, skip: Tensor | None = None) -> dict[str, list[Any]]:
        """Once after each optimizer step: `Balancer.step` over all layers, one collective for all of them.

        `reduce` sums one integer tensor over ranks. Returns, a layer each, `max_vio` (largest load over mean load, minus 1), `dead` (share
        of experts without a token) and more (`nn.balancer.load_report`); empty lists where nothing was counted.
        """
        return self.balancer.step(skip, reduce)

    def balance_state(self) -> dict[str, Tensor]:
        """What a checkpoint of training needs beside the state_dict; see `Balancer.state`. Live: a checkpoint may be read into it."""
        return self.balancer.state()

    # -------------------------------------------------- use

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Continue `input_ids` [B,T]; see `atoll.infer.generate.generate` for the options."""
        from atoll.infer.generate import generate

        return generate(self, input_ids, max_new_tokens, **options)

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None) -> Path:
        """Write the hub layout: config.json, safetensors, and the tokenizer when one is given."""
        from atoll.hub.export import save

        return save(self, Path(folder), tokenizer)


def check_segments(cu_seqlens: Tensor, shape: torch.Size) -> None:
    """`cu_seqlens` must be int [N+1], rise from 0 to the row's length, with one row. Equal neighbours (empty documents) are allowed."""
    if shape[0] != 1:
        raise ValueError(f"cu_seqlens with {shape[0]} rows: packed documents come as one row [1, tokens]")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}: integers [documents + 1] are expected")
    if cu_seqlens.device.type == "cpu":
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != shape[1] or any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(f"cu_seqlens must rise from 0 to {shape[1]}, the row's length")


def next_tokens(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Targets [B,T]: at t the label of t+1, -100 where t is the last token of its row or document."""
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], 1)
    if cu_seqlens is not None:
        ends = cu_seqlens[1:] - 1
        targets[:, ends[cu_seqlens[1:] > 0]] = IGNORE
    return targets


def load(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    router_weights: str | None = None,
) -> Model:
    """A model by preset name (random weights) or from a folder in the hub's layout (also a run's `model/`).

    `router_weights`, "unbiased" or "biased", says which scores weigh the experts where the folder's config.json does not: released
    ones never do, and are read as "unbiased" (docs/interop.md). Raises `UserError` (one line) for a folder that cannot be read whole.
    """
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise UserError(f"dtype = {dtype!r}: one of torch.float32, bfloat16, float16, float64 is expected")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        overrides = {} if router_weights is None else {"model.router_weights": router_weights}
        return Model(load_config(name, overrides).model, dtype=dtype or torch.float32, device=device)
    from atoll.hub.load import compared, read_config

    if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        raise UserError(f"model = {str(name)!r}: no config.json there; give a preset, a run or a folder in the hub's layout")
    config = read_config(folder, router_weights)
    with compared(Model(config, device="meta"), folder) as copy_into:  # first, so that wrong settings never ask for their memory
        model = Model(config, dtype=dtype or torch.float32, device=device)
        copy_into(model)
    return model.eval()
