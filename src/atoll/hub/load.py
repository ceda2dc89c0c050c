"""Read a folder in the hub's layout into a model: strict both ways, one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from atoll.config import ModelConfig, UserError
from atoll.data import tokenizer as data_tokenizer
from atoll.data.tokenizer import Tokenizer
from atoll.hub import config_json
from atoll.hub.layout import Slot, readable_shapes, slots, unpack
from atoll.hub.packed import forget_scales, is_packed

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DENSE = re.compile(r"\.mlp\.((gate|up|down)_proj\.weight)$")


def read_config(folder: str | Path) -> ModelConfig:
    """The shapes of the model stored in `folder`. Raises `UserError`, one line, when `config.json` is missing or unknown.

    Two settings are read off the weights, where there are any: `a_log_storage` off the first stored `A_log`, and whether the
    experts are quantised off the names.
    """
    folder = _existing(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; give a folder in the hub's layout")
    m = config_json.from_json(_read_json(path), str(path))
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return m
    where = _weight_map(folder)
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
    folder = _existing(folder)
    where = _weight_map(folder)
    packed = is_packed(where, str(folder))
    wanted = {slot.name: slot for slot in (_as_stored(slot, where) for slot in slots(model, packed=packed))}
    _same_names(set(wanted), set(where), folder)
    with ExitStack() as stack:
        files = {file: _open(file, stack) for file in sorted(set(where.values()))}
        for name, slot in wanted.items():
            _check(files[where[name]], where[name], slot)
        with torch.no_grad():
            if not packed:
                forget_scales(model)
            for name, slot in wanted.items():
                if wrong := unpack(slot, files[where[name]].get_tensor(name)):
                    raise UserError(f"{where[name]}: tensor {name} {wrong}; the file is damaged or from another model")


def _as_stored(slot: Slot, where: dict[str, Path]) -> Slot:
    """`slot` under the name it has in a folder that transformers' own `kimi_linear` class saved: there (5.24) a dense layer's MLP
    stands as `block_sparse_moe`. Nothing else can have that name, so such a folder is read rather than refused."""
    other = DENSE.sub(r".block_sparse_moe.\1", slot.name)
    return dataclasses.replace(slot, name=other) if slot.name not in where and other in where else slot


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in `folder`. Raises `UserError` when there is none, or not the one the weights were saved with."""
    folder = _existing(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder}: no tokenizer.json; text cannot be read without it")
    tokenizer = data_tokenizer.load_tokenizer(path)
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    saved = config.get(config_json.FINGERPRINT) if isinstance(config, dict) else None
    if saved is not None and saved != tokenizer.fingerprint:
        raise UserError(f"{path}: not the tokenizer that these weights were saved with; put that one back")
    return tokenizer


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


def _weight_map(folder: Path) -> dict[str, Path]:
    """Tensor name → file, from the index or from the headers of a single file."""
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
    if header.get_dtype() not in ("BF16", "F16", "F32", "F64"):
        raise UserError(f"{path}: tensor {slot.name} is stored as {header.get_dtype()}; a floating type is expected")


def _check_packed(header: Any, path: Path, slot: Slot) -> None:
    shape, kind = tuple(header.get_shape()), header.get_dtype()
    if shape != slot.shape:
        raise UserError(f"{path}: tensor {slot.name} has shape {list(shape)}; the config asks for {list(slot.shape)}")
    if kind != "U8":
        raise UserError(f"{path}: tensor {slot.name} is stored as {kind}; U8 is expected, MXFP4")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
