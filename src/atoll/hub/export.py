"""Write a model as a folder in the hub's layout, which the usual engines load unchanged."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from atoll.config import ModelConfig, UserError
from atoll.data import chat
from atoll.data.cache import sync
from atoll.hub import config_json
from atoll.hub.layout import Slot, config_of, pack, slots
from atoll.hub.load import INDEX, SINGLE
from atoll.hub.shards import Fetch, split, write_shard

# Code that lets transformers load and train the nested form with `trust_remote_code=True`, and what it is for.
REMOTE = ("configuration_kimi_k3.py", "modeling_kimi_k3.py")
AUTO_MAP = {
    "AutoConfig": "configuration_kimi_k3.KimiK3Config",
    "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
}
Progress = Callable[[int, int], None]

TEMPLATE = "chat_template.jinja"
# Beside the weights and config.json, what a folder holds that goes with a tokenizer; copied from a folder that is converted.
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE)
OURS = ("config.json", *COMPANIONS, INDEX, *REMOTE)


class SavedTokenizer(Protocol):
    """What `save` needs of a tokenizer: writing itself as `tokenizer.json`."""

    @property
    def fingerprint(self) -> str:
        """Names its vocabulary and rules."""
        ...

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json` at `path`."""
        ...


def carries_our_code(folder: Path) -> bool:
    """Whether the code that transformers would run from `folder` is, byte for byte, what this version writes, and nothing else."""
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if tree.get("auto_map") != AUTO_MAP or (folder / "custom_generate").exists():
        return False
    written = [(folder / name, Path(__file__).parent / "remote" / name) for name in REMOTE]
    return all(path.is_file() and path.read_bytes() == source.read_bytes() for path, source in written)


def save(
    model: nn.Module,
    folder: str | Path,
    tokenizer: SavedTokenizer | None = None,
    shard_bytes: float = 5e9,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write `model` (and `tokenizer`) to `folder`; returns the folder.

    Most tensors are written in `dtype` (default: the embedding's type), the ones the release keeps in float32 at least in float32.
    Weights over `shard_bytes` bytes are split into shards with an index. Everything is written beside the folder and renamed
    into place, so a folder is whole or absent. Saving what was loaded from such a folder gives the same bytes again.
    Raises `UserError` when the folder holds something else or cannot be written.
    """
    write_folder(config_of(model), slots(model, dtype), folder, tokenizer, shard_bytes=shard_bytes, progress=progress)
    return Path(folder).expanduser()


def write_folder(
    m: ModelConfig,
    parts: list[Slot],
    folder: str | Path,
    tokenizer: SavedTokenizer | None = None,
    *,
    shard_bytes: float = 5e9,
    fetch: Fetch = pack,
    companions: Iterable[Path] = (),
    progress: Progress | None = None,
) -> None:
    """`save` for slots whose tensors come from `fetch`, one at a time; no more than one of them is held.

    `companions` are files copied along as they are, over ours of the same name. `progress` is called after each tensor with the bytes
    written and the bytes in all. Interrupted or failed, it leaves what was there before.
    """
    folder = Path(folder).expanduser()
    _refuse_foreign(folder)
    if shard_bytes <= 0:
        raise UserError(f"shard_bytes = {shard_bytes!r}: a number above 0 is expected")
    main = next(slot.dtype for slot in parts if slot.name.endswith("embed_tokens.weight"))
    with _aside(folder) as aside:
        config = config_json.to_json(m, str(main).removeprefix("torch."))
        config[config_json.WRITER] = "atoll"
        if tokenizer is not None:
            config[config_json.FINGERPRINT] = tokenizer.fingerprint
        if not config_json.is_kimi_linear(m):  # transformers has a class of its own for the flat form
            config["auto_map"] = AUTO_MAP
            for name in REMOTE:
                shutil.copyfile(Path(__file__).parent / "remote" / name, aside / name)
        _write_json(aside / "config.json", config)
        added: dict[str, int] = {}
        if tokenizer is not None:
            tokenizer.save(aside / "tokenizer.json")
            added = _added_tokens(aside / "tokenizer.json")
            _write_json(aside / "tokenizer_config.json", _tokenizer_config(added, m))
            if added.keys() >= set(chat.MARKERS):
                (aside / TEMPLATE).write_text(chat.template(), encoding="utf-8")
        _write_json(aside / "generation_config.json", _generation(m, added))
        _write_weights(parts, aside, shard_bytes, _counted(fetch, parts, progress))
        for path in companions:
            shutil.copyfile(path, aside / path.name)


def _counted(fetch: Fetch, parts: list[Slot], progress: Progress | None) -> Fetch:
    """`fetch` that tells `progress` how far the writing is."""
    if progress is None:
        return fetch
    total, done = sum(slot.num_bytes for slot in parts), 0

    def counted(slot: Slot) -> torch.Tensor:
        nonlocal done
        tensor = fetch(slot)
        done += slot.num_bytes
        progress(done, total)
        return tensor

    return counted


def _added_tokens(path: Path) -> dict[str, int]:
    """Content → id of what a `tokenizer.json` adds to its vocabulary."""
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []
    return {token["content"]: token["id"] for token in added}


def _generation(m: ModelConfig, added: dict[str, int]) -> dict[str, Any]:
    """A document ends at eos, a message at the chat format's own end."""
    end = added.get("<|end_of_msg|>", m.eos_token_id)
    stop = m.eos_token_id if end == m.eos_token_id else [m.eos_token_id, end]
    return {"bos_token_id": m.bos_token_id, "eos_token_id": stop, "pad_token_id": m.pad_token_id, "do_sample": True}


def _tokenizer_config(added: dict[str, int], m: ModelConfig) -> dict[str, Any]:
    content = {i: name for name, i in added.items()}
    named = {"bos_token": m.bos_token_id, "eos_token": m.eos_token_id, "pad_token": m.pad_token_id}
    special = {key: content[i] for key, i in named.items() if i in content}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config_json.MAX_LENGTH,
        **special,
    }


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(parts: list[Slot], folder: Path, shard_bytes: float, fetch: Fetch) -> None:
    shards = list(split(parts, shard_bytes))
    if len(shards) == 1:
        write_shard(shards[0], folder / SINGLE, fetch)
        return
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_shard(shard, folder / file, fetch)
        where |= {slot.name: file for slot in shard}
    total = sum(slot.num_bytes for slot in parts)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _refuse_foreign(folder: Path) -> None:
    """An older export may be replaced; anything else that stands in the way is left alone."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; give a folder")
    if not folder.is_dir():
        return
    held = sorted(p.name for p in folder.iterdir())
    foreign = [name for name in held if name not in OURS and not _is_weights(name)]
    if foreign:
        raise UserError(f"{folder}: holds {foreign[0]}, which an export would not write; give a new folder")
    if held and not _is_export(folder):
        raise UserError(f"{folder}: holds {held[0]}, which Atoll did not write; give a new folder")


def _is_export(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and (config.get(config_json.WRITER) == "atoll" or config_json.FINGERPRINT in config)


def _is_weights(name: str) -> bool:
    return re.fullmatch(r"model(-\d{5,}-of-\d{5,})?\.safetensors", name) is not None


@contextlib.contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when the block ends well, and is removed otherwise.

    A link to a folder stays one: what it leads to is replaced.
    """
    given, folder = folder, folder.resolve()
    aside = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"  # named before it is there: an interrupt in between leaves nothing
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir(mode=0o755)
        yield aside
        for path in aside.iterdir():
            sync(path)
        sync(aside)
        _swap(aside, folder)
    except OSError as error:
        raise UserError(f"{given}: cannot be written ({error.strerror or error}); free space or give another folder") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _swap(aside: Path, folder: Path) -> None:
    if not folder.exists():
        os.replace(aside, folder)
    else:
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        try:
            os.replace(folder, old)
            os.replace(aside, folder)
        finally:
            if not folder.exists():  # interrupted between the two
                os.replace(old, folder)
            shutil.rmtree(old, ignore_errors=True)
    sync(folder.parent)
