"""Every setting of a run, as frozen dataclasses: read from TOML, overridden from the command line, validated before anything is built.

One path serves files and flags: `load_config(name_or_path, overrides)` lays dotted keys over a preset, refuses what it does
not know with the nearest name, and `validate` refuses impossible combinations. A refused setting is a `ConfigError`: one line
that names the field, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal


class UserError(Exception):
    """A mistake of the user's: shown as one line on stderr, exit code 2, never as a traceback."""


class ConfigError(UserError, ValueError):
    """A setting that cannot be: the message names the field, the value and the remedy."""


def _refuse(name: str, value: object, remedy: str) -> typing.NoReturn:
    raise ConfigError(f"{name} = {value!r}: {remedy}")


@dataclass(frozen=True)
class VisionConfig:
    """Shapes of the vision tower and its projector, under the names of the hub's `vision_config` where it has one."""

    vt_num_hidden_layers: int = 4  # blocks of the tower
    vt_hidden_size: int = 64  # width of the tower
    vt_num_attention_heads: int = 3  # heads of a block
    qkv_hidden_size: int = 96  # width of queries, keys and values, over all heads; need not be the tower's width
    vt_intermediate_size: int = 256  # inner width of a block's MLP
    patch_size: int = 14  # pixels on a side of one patch
    init_pos_emb_height: int = 16  # rows of the table of learned positions, in patches; other sizes are interpolated
    init_pos_emb_width: int = 16  # columns of that table
    init_pos_emb_time: int = 4  # most frames in one item
    merge_kernel_size: tuple[int, int] = (2, 2)  # patches, down and across, that become one feature
    projector_ln_eps: float = 1e-5  # epsilon of the projector's norm
    norm_eps: float | None = None  # epsilon of the tower's norms; "none" is the machine epsilon of the type computed in, as released
    media_placeholder_token_id: int = 10  # token that stands where features go; 10 is the tokenizer's <|media_pad|> after ids 0, 1, 2


@dataclass(frozen=True)
class ModelConfig:
    """Shapes of the model. Names follow the hub's `config.json` where it has one."""

    vocab_size: int = 4096  # tokens in the vocabulary, special tokens included
    hidden_size: int = 128  # width of the residual stream
    num_hidden_layers: int = 5  # decoder layers
    num_attention_heads: int = 4  # heads of the latent attention (MLA)
    full_attn_layers: tuple[int, ...] | None = None  # MLA layers, counted from 1; default every fourth and the last
    kda_num_heads: int = 4  # heads of the delta attention (KDA)
    kda_head_dim: int = 32  # key and value width of a KDA head; also the rank of the decay's projection
    short_conv_kernel_size: int = 4  # taps of the causal convolution before KDA
    gate_lower_bound: float | None = -5.0  # lower bound of KDA's log decay; "none" is the unbounded softplus gate
    use_full_rank_gate: bool = True  # KDA's output gate: one matrix, or two of rank kda_head_dim
    q_lora_rank: int | None = 32  # rank of MLA's query; "none" is a direct projection
    kv_lora_rank: int = 32  # width of the cached MLA latent
    qk_nope_head_dim: int = 32  # per-head key width of MLA
    qk_rope_head_dim: int = 16  # shared key width of MLA; never rotated (NoPE)
    v_head_dim: int = 32  # per-head value width of MLA
    mla_use_output_gate: bool = True  # sigmoid gate on MLA's output
    intermediate_size: int = 600  # width of the dense MLP in the first layers
    first_k_dense_replace: int = 1  # how many first layers have a dense MLP in place of experts
    num_experts: int = 896  # routed experts a layer
    num_experts_per_token: int = 16  # routed experts a token visits
    num_shared_experts: int = 2  # shared experts, stored as one MLP of their summed width
    moe_intermediate_size: int = 56  # inner width of one expert
    routed_expert_hidden_size: int | None = 64  # latent width the routed experts work in; "none" is the full width
    latent_moe_use_norm: bool = True  # RMSNorm on the summed latent before it is projected up
    moe_renormalize: bool = True  # divide the mixture weights by their sum
    routed_scaling_factor: float = 1.0  # factor on the mixture weights
    router_weights: Literal["unbiased", "biased"] = "unbiased"  # scores that weigh the chosen experts: without or with the bias
    hidden_act: Literal["situ", "silu"] = "situ"  # activation of every GLU
    activation_situ_beta: float = 4.0  # cap of SiTU's gate
    activation_situ_linear_beta: float | None = 25.0  # cap of SiTU's linear half; "none" leaves it uncapped
    quantization: Literal["none", "mxfp4", "mxfp4+mxfp8"] = "none"  # routed experts in 4 bits, their inputs in 8
    residual: Literal["block", "full", "plain"] = "block"  # earlier layers are seen as mixes of block sums, of all sums, or one sum
    attn_res_block_size: int = 2  # decoder layers in one block of the attention residual
    rms_norm_eps: float = 1e-5  # epsilon of the decoder's norms
    latent_norm_eps: float = 1e-6  # epsilon of MLA's two latent norms
    initializer_range: float = 0.02  # standard deviation of the projections at the start
    a_log_storage: int | None = None  # stored length of A_log when padded (128 in the blueprint's release)
    bos_token_id: int = 0  # starts every document
    eos_token_id: int = 1  # ends every document
    pad_token_id: int = 2  # fills; never counted
    vision: VisionConfig | None = None  # the tower that reads images; "none" is a text model

    def full_attention(self) -> tuple[int, ...]:
        """MLA layers, counted from 1 as in the hub's lists: every fourth and the last unless set."""
        if self.full_attn_layers is not None:
            return self.full_attn_layers
        every = range(4, self.num_hidden_layers + 1, 4)
        return tuple(sorted({*every, self.num_hidden_layers}))

    def is_kda(self, layer: int) -> bool:
        """Whether the 0-based `layer` mixes by KDA (else by MLA)."""
        return layer + 1 not in self.full_attention()

    def is_dense(self, layer: int) -> bool:
        """Whether the 0-based `layer` has a dense MLP (else routed experts)."""
        return layer < self.first_k_dense_replace


BALANCE_DEFAULTS = {"sign_rate": 1e-3, "aux_coefficient": 1e-2, "capacity_factor": 1.25}


@dataclass(frozen=True)
class BalanceConfig:
    """How the routed experts are kept level (docs/balancing.md)."""

    kind: Literal["quantile", "local_quantile", "sign", "aux", "capacity", "none"] = "quantile"  # the rule; one at a time
    bins: int | None = 1000  # of "quantile": bins of the histogram; "none" solves from all margins, in one process alone
    ema: float = 0.0  # of both quantile rules: share of the old bias kept at each update
    asynchronous: bool = False  # of rules that set a bias: it is solved beside the next step and used from the one after, on all ranks
    sign_rate: float | None = None  # of "sign": what a bias moves by in a step; "none" takes 0.001
    aux_coefficient: float | None = None  # of "aux": weight of a layer's auxiliary loss; "none" takes 0.01
    capacity_factor: float | None = None  # of "capacity" and "aux": most tokens of an expert over the mean; "none": 1.25, no limit

    def value(self, name: str) -> float:
        """A setting that "none" leaves to its rule."""
        given = getattr(self, name)
        return BALANCE_DEFAULTS[name] if given is None else given

    def limits(self) -> bool:
        """Whether experts drop what is over their capacity."""
        return self.kind == "capacity" or self.capacity_factor is not None


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes samples."""

    kind: Literal["text", "chat", "synthetic", "images"] = "text"  # chat: .jsonl conversations; synthetic: tasks; images: docs/vision.md
    source: str = "stdlib"  # "stdlib", a folder, or a file: text, source, .jsonl, .parquet; of images: "rendered", folder, .jsonl, .tar
    text_field: str = "text"  # field of a JSONL or parquet record that holds the text
    suffixes: tuple[str, ...] = ()  # file endings read from a folder; empty takes every text file
    tasks: tuple[str, ...] = ()  # of synthetic: generated tasks, drawn alike often; their answers alone are learnt (docs/evaluations.md)
    text_share: float = 0.0  # of synthetic: share of the rows that are text of the source
    fonts: tuple[str, ...] = ()  # of rendered images: font files (.ttf, .otf) that words are drawn in; empty takes DejaVu Sans Mono
    image_patches: int = 65536  # of images: most patches of one; a larger one is scaled down
    image_cut: Literal["move", "refuse"] = "move"  # of images: one that a row's end would cut begins the next, or ends the run's start
    thinking: bool = True  # of chat: assistants have a think channel, also an empty one; a conversation may say otherwise
    heldout: float = 0.02  # share of the documents kept for validation, by a hash of path or text
    max_bytes: int | None = None  # stop reading the training split after this many bytes
    tokenizer: str = "train"  # "train" fits a byte-level BPE on the training split; or a path to tokenizer.json
    cache: str = "~/.cache/atoll"  # where tokenizers and token files are kept
    seed: int = 0  # order of the samples


@dataclass(frozen=True)
class OptimConfig:
    """Per-head Muon for matrices, AdamW for the rest."""

    lr: float = 4e-3  # peak learning rate of Muon
    adam_lr: float = 4e-3  # peak learning rate of AdamW
    router_lr: float = 2e-4  # peak learning rate of the routers; faster, and their scores outrun the balancing bias
    min_lr: float = 0.0  # share of the peak left at the end of the cosine
    warmup: float = 0.01  # share of the steps spent in linear warm-up
    weight_decay: float = 0.1  # decoupled weight decay of matrices
    momentum: float = 0.95  # Muon's momentum
    nesterov: bool = True  # Muon looks one step ahead
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's moments
    eps: float = 1e-8  # AdamW's epsilon
    experts: Literal["muon", "adamw"] = "muon"  # rule for the routed experts' matrices
    grad_clip: float = 1.0  # largest global gradient norm
    qk_clip: float | None = 100.0  # largest MLA logit; above it the query and key weights shrink ("none" is off)


@dataclass(frozen=True)
class StageConfig:
    """One stage of the context curriculum."""

    name: str = "1k"  # shown in every metric and plot
    length: int = 1024  # tokens in one sequence
    share: float = 1.0  # share of the run's steps
    batch: int = 8  # sequences in one optimizer step
    tokens: int | None = None  # in place of a share, in every stage or in none: tokens to train on, which then settle the run's steps
    lr: float = 1.0  # factor on the learning-rate schedule
    micro_batch: int | None = None  # sequences in one forward pass; "none" takes train.micro_batch
    recompute: bool | None = None  # recompute each layer in the backward pass; "none" takes train.gradient_checkpointing
    segment: int | None = None  # tokens of a sequence computed at once, the state carried on; "none" computes sequences whole
    offload: bool = False  # what waits between a segment's forward and backward pass waits in host memory


@dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how often, where, how safe."""

    init: str | None = None  # start from the weights, shapes and tokenizer of this run or hub folder; "none" draws weights
    steps: int | None = None  # optimizer steps; "none" derives them from `epochs` and `minutes`
    epochs: float | None = None  # times round the training split; with `minutes` too, whichever ends first
    minutes: float | None = 5.0  # wall-clock budget of the whole command
    micro_batch: int | None = None  # sequences in one forward pass; "none" takes the stage's whole batch
    seed: int = 0  # weights and sampling
    device: str = "auto"  # "auto", "cpu", "cuda"
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # compute type; "auto" is float32 on a CPU, bfloat16 on a GPU
    threads: int | None = None  # CPU threads; "none" takes what torch finds
    gradient_checkpointing: bool = False  # recompute each layer in the backward pass
    validate_every: int = 50  # steps between validations on a fixed part of the held-out split
    validate_tokens: int = 32768  # tokens of that part
    sample_every: int = 50  # steps between text samples
    sample_prompt: str = "def parse"  # what the samples continue
    save_every: int = 100  # steps between checkpoints
    keep: int = 2  # checkpoints kept
    async_save: bool = True  # write them beside the next steps, from a copy in the host's memory; not where that has no room for one
    skip_spike: float | None = 3.0  # skip a step whose gradient norm is over this many times its running mean; "none" is off
    evaluate: bool = True  # at the end, measure the whole held-out split beside gzip and xz
    report: bool = True  # at the end, write report.html and plots
    export: bool = True  # at the end, write model/ in the hub's layout


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes a run is spread over, axis by axis; their product is the number that `torchrun` starts (docs/scale.md)."""

    data_replicate: int = 1  # copies of the sharded model, each on samples of its own
    data_shard: int = 1  # processes that share weights, gradients and optimizer state, each on samples of its own
    expert: int = 1  # processes that share the routed experts out among them, each on samples of its own
    context: int = 1  # processes that cut sequences among them, on the same samples
    pipeline: int = 1  # processes that cut the layers among them, on the same samples; micro-batches pass from one to the next (1F1B)
    pipeline_virtual: int = 1  # stages of layers that each process of the pipeline holds; from 2 on the schedule is interleaved 1F1B
    pipeline_cut: tuple[int, ...] = ()  # first layer of every stage but the first, as 3,6,9; empty: as many layers for each
    tensor: int = 1  # processes that cut heads, inner widths and vocabulary among them, on the same samples


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    stages: tuple[StageConfig, ...] = (StageConfig(),)


# ---------------------------------------------------------------- reading


def presets() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(p.name[:-5] for p in resources.files("atoll.presets").iterdir() if p.name.endswith(".toml"))


ALIASES = {"150m": "1b-a50m", "1b": "7b-a310m", "7b": "50b-a2b"}


def load_config(name: str | Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read a preset by name or a TOML file by path, lay `overrides` (dotted keys) over it, validate.

    A file may say `preset = "tiny"` at its top to start from a preset. Raises `ConfigError`.
    """
    tree = _read_tree(name)
    base = Config()
    if (parent := tree.pop("preset", None)) is not None:
        base = load_config(str(parent))
    return override(merge(base, tree, ""), overrides or {})


def override(config: Config, overrides: dict[str, Any]) -> Config:
    """`config` with dotted keys laid over it, validated. Raises `ConfigError`."""
    for key, value in overrides.items():
        config = _override(config, key, value)
    validate(config)
    return config


def _read_tree(name: str | Path) -> dict[str, Any]:
    text = str(name)
    resource = resources.files("atoll.presets") / f"{ALIASES.get(text, text)}.toml"
    if "/" not in text and resource.is_file():
        return _parse_toml(resource.read_text(), text)
    path = Path(text).expanduser()
    if path.is_file():
        try:
            return _parse_toml(path.read_text(encoding="utf-8"), text)
        except UnicodeDecodeError:
            raise ConfigError(f"config = {text!r}: not UTF-8 text; give a TOML file") from None
    known = [*presets(), *ALIASES]
    near = difflib.get_close_matches(text, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"give a TOML file or one of {', '.join(known)}"
    raise ConfigError(f"config = {text!r}: no such preset or file; {hint}")


def _parse_toml(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config = {name!r}: not valid TOML ({error}); mend that line") from None


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _unknown(cls: type, key: str, prefix: str) -> typing.NoReturn:
    names = [f.name for f in dataclasses.fields(cls)]
    near = difflib.get_close_matches(key, names, 1, 0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(names)}"
    raise ConfigError(f"{prefix}{key}: no such setting; {hint}")


def merge(base: Any, tree: dict[str, Any], prefix: str) -> Any:
    """`base` with the nested `tree` laid over it."""
    hints, changes = _hints(type(base)), {}
    for key, value in tree.items():
        if key not in hints:
            _unknown(type(base), key, prefix)
        name = prefix + key
        if (group := _group_in(hints[key])) is not None:
            if _switches_off(hints[key], value):
                changes[key] = None
                continue
            if not isinstance(value, dict):
                _refuse(name, value, f"a table of settings is expected, as [{name}]")
            changes[key] = merge(getattr(base, key) or group(), value, name + ".")
        elif key == "stages":
            changes[key] = _read_stages(value)
        else:
            changes[key] = _coerce(hints[key], value, name)
    return dataclasses.replace(base, **changes)


def _group_in(hint: Any) -> type | None:
    """The dataclass that `hint` asks for, alone or beside None."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _switches_off(hint: Any, value: Any) -> bool:
    """Whether `value` leaves out a group of settings that may be absent."""
    return type(None) in typing.get_args(hint) and (value is None or (isinstance(value, str) and value.lower() == "none"))


def _read_stages(value: Any) -> tuple[StageConfig, ...]:
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        _refuse("stages", value, "a list of tables is expected, as [[stages]]")
    return tuple(merge(StageConfig(), v, f"stages.{i}.") for i, v in enumerate(value))


def _override(config: Any, key: str, value: Any, prefix: str = "") -> Any:
    """`config` with one dotted key replaced; `stages.0.length` reaches into the list."""
    head, _, rest = key.partition(".")
    if isinstance(config, tuple):
        if not head.isdigit() or int(head) >= len(config):
            _refuse(prefix + head, value, f"stages are numbered 0 to {len(config) - 1}")
        index = int(head)
        return (*config[:index], _override(config[index], rest, value, f"{prefix}{head}."), *config[index + 1 :])
    hints = _hints(type(config))
    if head not in hints:
        _unknown(type(config), head, prefix)
    current, group = getattr(config, head), _group_in(hints[head])
    if group is not None or head == "stages":
        if not rest and _switches_off(hints[head], value):
            return dataclasses.replace(config, **{head: None})
        if not rest:
            _refuse(prefix + head, value, f"a group of settings; set one of its fields, as {prefix}{head}.NAME")
        return dataclasses.replace(config, **{head: _override(current or (group or tuple)(), rest, value, f"{prefix}{head}.")})
    if rest:
        _unknown(type(config), key, prefix)
    return dataclasses.replace(config, **{head: _coerce(hints[head], value, prefix + head)})


def _coerce(kind: Any, value: Any, name: str) -> Any:
    """`value` (from TOML, or a string from the command line) as `kind`, or a `ConfigError` that names `name`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return _coerce(next(a for a in args if a is not type(None)), value, name)
    if origin is Literal:
        if value in args:
            return value
        near = difflib.get_close_matches(str(value), args, 1)
        _refuse(name, value, (f"did you mean {near[0]!r}? " if near else "") + f"one of {', '.join(map(repr, args))} is expected")
    if origin is tuple:
        items = [v.strip() for v in value.split(",") if v.strip()] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            _refuse(name, value, "a list is expected")
        if args[-1] is not Ellipsis and len(items) != len(args):
            _refuse(name, value, f"{len(args)} values are expected")
        return tuple(_coerce(args[0], v, name) for v in items)
    return _scalar(kind, value, name)


def _scalar(kind: type, value: Any, name: str) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        _refuse(name, value, "true or false is expected")
    if kind is str:
        if isinstance(value, (str, Path)):
            return str(value)
        _refuse(name, value, "text is expected")
    if isinstance(value, bool):
        _refuse(name, value, "a number is expected")
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        _refuse(name, value, "a whole number is expected" if kind is int else "a number is expected")
    if number != number or number in (float("inf"), float("-inf")):
        _refuse(name, value, "a finite number is expected")
    if kind is int and number != int(number):
        _refuse(name, value, "a whole number is expected")
    return int(str(value).replace("_", "")) if kind is int and str(value).replace("_", "").lstrip("+-").isdigit() else kind(number)


# ---------------------------------------------------------------- writing


def to_toml(config: Config) -> str:
    """The whole config as TOML that `load_config` reads back to an equal `Config`. A None is written as "none"."""
    lines: list[str] = []
    for group in dataclasses.fields(config):
        value = getattr(config, group.name)
        if group.name == "stages":
            for stage in value:
                lines += ["[[stages]]", *_lines(stage), ""]
        else:
            lines += _table(group.name, value)
    return "\n".join(lines)


def _table(name: str, group: Any) -> list[str]:
    """The settings of a group as [name], then the groups within it as [name.inner]."""
    settings = {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}
    inner = {key: value for key, value in settings.items() if dataclasses.is_dataclass(value)}
    lines = [f"[{name}]", *_lines(group), ""]
    return lines + [line for key, value in inner.items() for line in _table(f"{name}.{key}", value)]


def _lines(group: Any) -> list[str]:
    settings = {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}
    return [f"{key} = {_toml(value)}" for key, value in settings.items() if not dataclasses.is_dataclass(value)]


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'


def describe(cls: type) -> dict[str, str]:
    """Field name → its one-line meaning, read from the comment beside it."""
    import inspect
    import re

    found = re.findall(r"^    (\w+):[^\n]*?  # (.+)$", inspect.getsource(cls), re.M)
    return dict(found)


# ---------------------------------------------------------------- validation


MODEL_POSITIVE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kda_num_heads", "kda_head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size"),
    *("num_experts", "num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size", "attn_res_block_size"),
    *("rms_norm_eps", "latent_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "initializer_range"),
)
VISION_POSITIVE = (
    *("vt_num_hidden_layers", "vt_hidden_size", "vt_num_attention_heads", "qkv_hidden_size", "vt_intermediate_size", "patch_size"),
    *("init_pos_emb_height", "init_pos_emb_width", "init_pos_emb_time", "projector_ln_eps", "norm_eps"),
)
# Far over every model's; the product of any three fits an index of 64 bits.
LARGEST = {"width": 1 << 18, "vocab_size": 1 << 24, "num_hidden_layers": 1 << 12, "vt_num_hidden_layers": 1 << 12, "patch_size": 1 << 12}
LARGEST |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"), LARGEST["vocab_size"])


def validate(config: Config) -> None:
    """Refuse impossible combinations. Raises `ConfigError` naming the field, the value and the remedy."""
    validate_model(config.model)
    validate_balance(config.balance)
    _validate_stages(config.stages)
    _validate_train(config)


def _positive(group: Any, prefix: str, names: typing.Iterable[str]) -> None:
    for name in names:
        value = getattr(group, name)
        if value is not None and value <= 0:
            _refuse(prefix + name, value, "a number above 0 is expected")


def _bounded(group: Any, prefix: str) -> None:
    """Refuse a number that no tensor's size can be made of: a slip, or a damaged file."""
    for name, value in vars(group).items():
        most = LARGEST.get(name, LARGEST["width"])
        if isinstance(value, int) and value > most:
            _refuse(prefix + name, value, f"at most {most:,} is expected")


def validate_model(m: ModelConfig) -> None:
    """Refuse shapes that cannot be built or trained."""
    _positive(m, "model.", MODEL_POSITIVE)
    _bounded(m, "model.")
    if m.num_experts_per_token >= m.num_experts:
        _refuse("model.num_experts_per_token", m.num_experts_per_token, f"must be below num_experts = {m.num_experts}")
    if m.num_experts_per_token == 1 and m.moe_renormalize:
        _refuse(
            "model.num_experts_per_token", 1, "with renormalised weights the router gets no gradient; take 2 or moe_renormalize = false"
        )
    if m.gate_lower_bound is not None and not -5.0 <= m.gate_lower_bound < 0:
        _refuse("model.gate_lower_bound", m.gate_lower_bound, 'must lie in [-5, 0), or "none" for the unbounded gate')
    if m.short_conv_kernel_size < 2:
        _refuse("model.short_conv_kernel_size", m.short_conv_kernel_size, "2 taps or more are expected")
    if m.num_shared_experts < 0 or m.first_k_dense_replace < 0:
        _refuse("model.num_shared_experts", m.num_shared_experts, "0 or more is expected")
    outside = [i for i in m.full_attention() if not 1 <= i <= m.num_hidden_layers]
    if outside:
        _refuse("model.full_attn_layers", outside, f"layers are counted from 1 to {m.num_hidden_layers}")
    if m.a_log_storage is not None and m.a_log_storage < m.kda_num_heads:
        _refuse("model.a_log_storage", m.a_log_storage, f"must hold kda_num_heads = {m.kda_num_heads}")
    _validate_quantization(m)
    ids = {"bos_token_id": m.bos_token_id, "eos_token_id": m.eos_token_id, "pad_token_id": m.pad_token_id}
    for name, value in ids.items():
        if not 0 <= value < m.vocab_size:
            _refuse(f"model.{name}", value, f"must be below vocab_size = {m.vocab_size}")
    if m.vision is not None:
        _validate_vision(m.vision, m.vocab_size, ids)


QUANTILE_RULES = ("quantile", "local_quantile")
RULE_OF = {"sign_rate": ("sign",), "aux_coefficient": ("aux",), "capacity_factor": ("capacity", "aux")}


def validate_balance(b: BalanceConfig) -> None:
    """Refuse two balancers at once, and settings of a rule that is not the one chosen."""
    kinds = typing.get_args(_hints(BalanceConfig)["kind"])
    if b.kind not in kinds:
        _refuse("balance.kind", b.kind, f"one of {', '.join(map(repr, kinds))} is expected")
    _positive(b, "balance.", RULE_OF)
    for name, rules in RULE_OF.items():
        if getattr(b, name) is not None and b.kind not in rules:
            does = "drops tokens, which does not go with" if name == "capacity_factor" else "is a second balancer beside"
            remedy = f'{does} balance.kind = "{b.kind}"; leave it out, or take balance.kind = {" or ".join(map(repr, rules))}'
            _refuse(f"balance.{name}", getattr(b, name), remedy)
    if not 0 <= b.ema < 1:
        _refuse("balance.ema", b.ema, "a share from 0 up to 1 is expected")
    if b.ema and b.kind not in QUANTILE_RULES:
        _refuse("balance.ema", b.ema, f'balance.kind = "{b.kind}" estimates no quantile; leave it out')
    if b.bins is not None and b.bins < 2:
        _refuse("balance.bins", b.bins, "2 bins or more are expected")
    if b.asynchronous and b.kind not in (*QUANTILE_RULES, "sign"):
        _refuse("balance.asynchronous", True, f'balance.kind = "{b.kind}" updates no bias; leave it out')


def _validate_vision(v: VisionConfig, vocab_size: int, special: dict[str, int]) -> None:
    _positive(v, "model.vision.", VISION_POSITIVE)
    _bounded(v, "model.vision.")
    if v.qkv_hidden_size % v.vt_num_attention_heads:
        remedy = f"must be a multiple of vt_num_attention_heads = {v.vt_num_attention_heads}"
        _refuse("model.vision.qkv_hidden_size", v.qkv_hidden_size, remedy)
    if (share := v.qkv_hidden_size // v.vt_num_attention_heads) % 4:
        remedy = f"a head's share, {share}, must be a multiple of 4: pairs turn by column and by row"
        _refuse("model.vision.qkv_hidden_size", v.qkv_hidden_size, remedy)
    if v.vt_hidden_size % 2:
        _refuse("model.vision.vt_hidden_size", v.vt_hidden_size, "must be even: half of a frame's code is sine, half cosine")
    if min(v.merge_kernel_size) < 1:
        _refuse("model.vision.merge_kernel_size", v.merge_kernel_size, "1 or more patches down and across are expected")
    token = v.media_placeholder_token_id
    if not 0 <= token < vocab_size:
        _refuse("model.vision.media_placeholder_token_id", token, f"must be below vocab_size = {vocab_size}")
    if clash := next((name for name, value in special.items() if value == token), None):
        _refuse("model.vision.media_placeholder_token_id", token, f"is {clash}; take a token of its own")


MX_GROUP = 32  # numbers of a row that share a scale in the microscaling formats


def _validate_quantization(m: ModelConfig) -> None:
    if m.quantization == "none":
        return
    if m.first_k_dense_replace >= m.num_hidden_layers:
        _refuse("model.quantization", m.quantization, "no layer has routed experts; lower model.first_k_dense_replace")
    latent = "hidden_size" if m.routed_expert_hidden_size is None else "routed_expert_hidden_size"
    for name in (latent, "moe_intermediate_size"):
        width = getattr(m, name)
        if width % MX_GROUP:
            near = -(-width // MX_GROUP) * MX_GROUP
            _refuse(f"model.{name}", width, f"model.quantization = {m.quantization!r} needs a multiple of {MX_GROUP}, as {near}")


def _validate_stages(stages: tuple[StageConfig, ...]) -> None:
    if not stages:
        _refuse("stages", [], "at least one stage is expected")
    for i, stage in enumerate(stages):
        _positive(stage, f"stages.{i}.", ("length", "share", "tokens", "batch", "lr", "micro_batch", "segment"))
        if stage.offload and stage.segment is None:
            _refuse(f"stages.{i}.offload", True, "nothing waits where sequences are computed whole; give a segment")
        if i and stage.length <= stages[i - 1].length:
            _refuse(f"stages.{i}.length", stage.length, f"must grow: the stage before has {stages[i - 1].length}")
    names = [s.name for s in stages]
    if len(set(names)) != len(names):
        _refuse("stages.name", names, "each stage needs a name of its own")
    counted = [s.tokens is not None for s in stages]
    if any(counted):
        if not all(counted):
            at = counted.index(False)
            _refuse(f"stages.{at}.tokens", None, "the other stages count tokens; give it in every stage or in none")
        return
    total = sum(s.share for s in stages)
    if abs(total - 1) > 1e-6:
        _refuse("stages.share", [s.share for s in stages], f"shares must add up to 1, not {total:g}")


def _validate_train(config: Config) -> None:
    t, d, o = config.train, config.data, config.optim
    _positive(
        t,
        "train.",
        ["steps", "epochs", "minutes", "micro_batch", "threads", "validate_every", "validate_tokens", "sample_every", "save_every", "keep"],
    )
    _positive(o, "optim.", ["lr", "adam_lr", "router_lr", "eps", "grad_clip", "qk_clip"])
    if t.steps is None and t.epochs is None and t.minutes is None and config.stages[0].tokens is None:
        _refuse("train.steps", None, "set train.steps, train.epochs or train.minutes")
    if d.kind == "chat" and d.source == "stdlib":
        _refuse("data.source", d.source, 'with data.kind = "chat" a .jsonl file of conversations, or a folder of them, is expected')
    if (d.kind == "synthetic") != bool(d.tasks):
        _refuse("data.tasks", list(d.tasks), 'tasks and data.kind = "synthetic" go together: name some, as mqar,copy, or leave both out')
    if not 0 <= d.text_share < 1 or (d.text_share and d.kind != "synthetic"):
        _refuse("data.text_share", d.text_share, 'a share from 0 up to 1 is expected, with data.kind = "synthetic"')
    if d.kind == "images":
        _validate_images(config)
    if not 0 < d.heldout < 1:
        _refuse("data.heldout", d.heldout, "a share between 0 and 1 is expected")
    if not 0 <= o.warmup < 1:
        _refuse("optim.warmup", o.warmup, "a share from 0 up to 1 is expected")
    for i, stage in enumerate(config.stages):
        size = t.micro_batch if stage.micro_batch is None else stage.micro_batch
        if size is not None and stage.batch % size and stage.batch > size:
            name = "train.micro_batch" if stage.micro_batch is None else f"stages.{i}.micro_batch"
            _refuse(name, size, f"must divide stages.{i}.batch = {stage.batch}")


def _validate_images(config: Config) -> None:
    d, p = config.data, config.parallel
    _positive(d, "data.", ["image_patches"])
    if config.model.vision is None:
        _refuse("data.kind", d.kind, "this model has no vision tower; set model.vision, or start from tiny-vl")
    if d.source == "stdlib":
        _refuse("data.source", d.source, 'with data.kind = "images" a folder, a .jsonl or .tar file of pictures, or "rendered" is expected')
    if d.fonts and d.source != "rendered":
        _refuse("data.fonts", list(d.fonts), 'words are drawn with data.source = "rendered"; leave it out')
    for i, stage in enumerate(config.stages):
        if stage.segment is not None:
            _refuse(f"stages.{i}.segment", stage.segment, "rows with images are computed whole; leave it out")
    for axis in ("context", "pipeline"):
        if getattr(p, axis) > 1:
            _refuse(
                f"parallel.{axis}", getattr(p, axis), "rows with images are not cut; spread the run by data_replicate, data_shard, expert"
            )
