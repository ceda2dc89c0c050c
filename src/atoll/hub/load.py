"""Read a folder in the hub's layout into a model: strict both ways, one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from atoll.config import ModelConfig, UserError, merge
from atoll.data import tokenizer as data_tokenizer
from atoll.data.tokenizer import Tokenizer
from atoll.hub import config_json
from atoll.hub.layout import Slot, readable_shapes, slots, unpack
from atoll.hub.packed import forget_scales, is_packed

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DENSE = re.compile(r"\.mlp\.((gate|up|down)_proj\.weight)$")


def read_config(folder: str | Path, router_weights: str | None = None) -> ModelConfig:
    """The shapes of the model stored in `folder`. Raises `UserError`, one line, when `config.json` is missing or unknown.

    Read off the weights, where there are any: `a_log_storage` off the first stored `A_log`, and off the names whether the experts
    are quantised. `router_weights` ("unbiased" or "biased") goes before the file's own key of that name, which released files do not
    have (then "unbiased": docs/interop.md).
    """
    folder = _existing(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; give a folder in the hub's layout")
    stays_inside(path)
    m = config_json.from_json(_read_json(path), str(path))
    if router_weights is not None:
        m = merge(m, {"router_weights": router_weights}, "")
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return m
    where = tensor_files(folder)
    m = config_json.quantized_as_stored(m, where, str(folder))
    name, file = next(((n, f) for n, f in where.items() if n.endswith(".A_log")), (None, None))
    if name is None or file is None:
        return m
    with ExitStack() as stack:
        shape = tuple(_open(file, stack).get_slice(name).get_shape())
    padded = len(shape) == 1 and shape[0] > m.kda_num_heads
    return dataclasses.replace(m, a_log_storage=shape[0]) if padded else m


def load_into(model: nn.Module, folder: str | Path) -> None:
    """Copy the weights in `folder` into `model` (built from `read_config(folder)`), converting to the model's types.

    Experts in MXFP4 are read into a model that computes without, and plain ones into a model that is to be trained in MXFP4.

    Every name and shape is compared before the first tensor is copied. Raises `UserError`, one line, naming the first tensor
    that is missing, not wanted, misshapen or not finite, or the file that cannot be read.
    """
    with compared(model, folder) as copy_into:
        copy_into(model)


@contextmanager
def compared(skeleton: nn.Module, folder: str | Path) -> Iterator[Callable[[nn.Module], None]]:
    """The weights in `folder`, once every name, shape and type has been compared with `skeleton` (on the meta device it takes no memory).

    Gives a function that copies them into a model of the same config. Raises `UserError` as `load_into` does.
    """
    where = tensor_files(folder)
    packed = is_packed(where, str(folder))
    with opened(slots(skeleton, packed=packed), Path(folder), where) as fill:

        def copy_into(model: nn.Module) -> None:
            with torch.no_grad():
                if not packed:
                    forget_scales(model)
                for slot in slots(model, packed=packed):
                    fill(slot)

        yield copy_into


@contextmanager
def opened(parts: list[Slot], folder: Path, where: dict[str, Path]) -> Iterator[Callable[[Slot], None]]:
    """The tensors at `where` in `folder`, once every name, shape and type has been compared with `parts` (all slots of one model).

    Gives a function that copies one tensor from the folder into its slot. Raises `UserError` as `load_into` does.
    """
    names = {slot.name: _stored_name(slot, where) for slot in parts}
    _same_names(set(names.values()), set(where), folder)
    with ExitStack() as stack:
        files = {file: _open(file, stack) for file in sorted(set(where.values()))}
        for slot in parts:
            _check(files[where[names[slot.name]]], where[names[slot.name]], dataclasses.replace(slot, name=names[slot.name]))

        def fill(slot: Slot) -> None:
            name = names[slot.name]
            file = where[name]
            if wrong := unpack(slot, files[file].get_tensor(name)):
                raise UserError(f"{file}: tensor {name} {wrong}; the file is damaged or from another model")

        yield fill


def stored_dtype(folder: Path, where: dict[str, Path]) -> torch.dtype:
    """The type that the embedding is stored in: that of most tensors. Raises `UserError` when there is no embedding."""
    name, file = next(((n, f) for n, f in where.items() if n.endswith("embed_tokens.weight")), (None, None))
    if name is None or file is None:
        raise UserError(f"{folder}: no embed_tokens.weight among its tensors; give the text model's folder")
    with ExitStack() as stack:
        kind = _open(file, stack).get_slice(name).get_dtype()
    if kind not in FLOATS:
        raise UserError(f"{file}: tensor {name} is stored as {kind}; {', '.join(FLOATS)} is expected")
    return FLOATS[kind]


def _stored_name(slot: Slot, where: dict[str, Path]) -> str:
    """The name of `slot` in a folder that transformers' own `kimi_linear` class saved: there (5.24) a dense layer's MLP stands as
    `block_sparse_moe`. Nothing else can have that name, so such a folder is read rather than refused."""
    other = DENSE.sub(r".block_sparse_moe.\1", slot.name)
    return other if slot.name not in where and other in where else slot.name


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in `folder`. Raises `UserError` when there is none, or not the one the weights were saved with."""
    folder = _existing(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder}: no tokenizer.json; text cannot be read without it")
    stays_inside(path)
    tokenizer = data_tokenizer.load_tokenizer(path)
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    saved = config.get(config_json.FINGERPRINT) if isinstance(config, dict) else None
    if saved is not None and saved != tokenizer.fingerprint:
        raise UserError(f"{path}: not the tokenizer that these weights were saved with; put that one back")
    return tokenizer


def stays_inside(path: Path) -> None:
    """Refuse a file that is a link out of its folder. A hub cache's own links, from snapshots/REVISION to blobs/, are followed."""
    target, folder = path.resolve(), path.parent.resolve()
    if target.parent not in (folder, folder.parent.parent / "blobs"):
        raise UserError(f"{path}: a link out of the folder, to {target}; put the file itself there")


def _existing(folder: str | Path) -> Path:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"{folder}: no such folder")
    return path


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({_line(error)}); fetch or export it again") from None


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """Tensor name → file, from the index (whose shards must agree with it) or from the header of a single file. Raises `UserError`."""
    folder = _existing(folder)
    if (folder / INDEX).is_file():
        return _read_index(folder)
    if (folder / SINGLE).is_file():
        with ExitStack() as stack:
            return dict.fromkeys(_open(folder / SINGLE, stack).keys(), folder / SINGLE)
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise UserError(f"{folder}: only pickled weights ({pickles[0]}), which are never opened; convert them to safetensors")
    shards = sorted(folder.glob("*.safetensors"))
    hint = f"{shards[0].name} stands there without {INDEX}" if shards else f"{SINGLE} or {INDEX} is expected"
    raise UserError(f"{folder}: no weights; {hint}")


def _read_index(folder: Path) -> dict[str, Path]:
    path = folder / INDEX
    tree = _read_json(path)
    names = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(names, dict) or not all(isinstance(f, str) for f in names.values()):
        raise UserError(f"{path}: no weight_map of tensor names to files")
    for file in sorted(set(names.values())):
        if file in ("", ".", "..") or re.search(r"[/\\\0]", file):
            raise UserError(f"{path}: weight_map names {file!r}, outside the folder; give plain file names")
        if not (folder / file).is_file():
            raise UserError(f"{path}: weight_map names {file}, which is not in the folder; fetch the missing shard")
    where = {name: folder / file for name, file in names.items()}
    _index_agrees(where, path)
    return where


def _index_agrees(where: dict[str, Path], index: Path) -> None:
    """Each shard holds exactly the tensors that the index gives it."""
    for file in sorted(set(where.values())):
        with ExitStack() as stack:
            held = set(_open(file, stack).keys())
        listed = {name for name, other in where.items() if other == file}
        if listed - held:
            raise UserError(f"{file}: tensor {min(listed - held)} is missing, though {index.name} lists it here")
        if held - listed:
            raise UserError(f"{file}: tensor {min(held - listed)} is not in {index.name}")


def _open(path: Path, stack: ExitStack) -> Any:
    stays_inside(path)
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({_line(error)}); fetch or export it again") from None


def _same_names(wanted: set[str], found: set[str], folder: Path) -> None:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing:
        near = f"; it holds {extra[0]}, which the config does not ask for" if extra else ""
        raise UserError(f"{folder}: tensor {missing[0]} is missing{_more(missing)}{near}")
    if extra:
        raise UserError(f"{folder}: tensor {extra[0]} is not part of the model{_more(extra)}; config.json and weights disagree")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check(file: Any, path: Path, slot: Slot) -> None:
    header = file.get_slice(slot.name)
    if slot.packed is not None:
        _check_packed(header, path, slot)
        return
    shape = tuple(header.get_shape())
    if shape not in readable_shapes(slot):
        raise UserError(f"{path}: tensor {slot.name} has shape {list(shape)}; the config asks for {list(slot.shape)}")
    if header.get_dtype() not in FLOATS:
        raise UserError(f"{path}: tensor {slot.name} is stored as {header.get_dtype()}; {', '.join(FLOATS)} is expected")


def _check_packed(header: Any, path: Path, slot: Slot) -> None:
    shape, kind = tuple(header.get_shape()), header.get_dtype()
    if shape != slot.shape:
        raise UserError(f"{path}: tensor {slot.name} has shape {list(shape)}; the config asks for {list(slot.shape)}")
    if kind != "U8":
        raise UserError(f"{path}: tensor {slot.name} is stored as {kind}; U8 is expected, MXFP4")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
