"""What `atoll audit NAME` looks at: whose decay, and the text that its model is run on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from atoll.config import ModelConfig, UserError
from atoll.plan import audit as audits


def audit(name: str, given: dict[str, Any], text: str | None = None, tokens: int = 2048) -> dict[str, Any]:
    """The audit of a preset, a run, a folder in the hub's layout, or ("none") of the `given` settings of `Decay` alone, ready for JSON.

    A run's and a folder's model are run on `text`, a file, or on the run's held-out text, else on random tokens. Raises `UserError`.
    """
    if tokens < 1:
        raise UserError(f"tokens = {tokens}: 1 or more are expected")
    if name == "none":
        if text is not None:
            raise UserError(f"text = {text!r}: there is no model to run on it; give a run's folder, or leave --text out")
        return audits.report(audits.settings_of(ModelConfig(), **given))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from atoll.config import load_config

        if text is not None:
            raise UserError(f"text = {text!r}: a preset has no weights to run on it; give a run's folder, or leave --text out")
        return audits.report(audits.settings_of(load_config(name).model, **given))
    import torch

    from atoll.model import load

    model = load(folder)
    ids, source = _input(folder, model, text, tokens)
    return audits.report(audits.settings_of(model.config, **given), model, torch.tensor([ids]), source)


def _input(folder: Path, model: Any, text: str | None, tokens: int) -> tuple[list[int], str]:
    """Token ids, at most `tokens`, and what they are."""
    if text is not None:
        path = Path(text).expanduser()
        if not path.is_file():
            raise UserError(f"text = {text!r}: no such file")
        return _encoded(folder, path.read_text(encoding="utf-8", errors="replace"), text)[:tokens], str(path)
    if (folder / "config.toml").is_file():
        return _heldout(folder, tokens), "the run's held-out text"
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (tokens,), generator=generator).tolist(), "random tokens"


def _encoded(folder: Path, content: str, name: str) -> list[int]:
    from atoll.hub.load import load_tokenizer

    home = folder if (folder / "tokenizer.json").is_file() else folder / "model"
    if not (home / "tokenizer.json").is_file():
        raise UserError(f"text = {name!r}: {folder} has no tokenizer.json to read it with; leave --text out")
    ids = load_tokenizer(home).encode(content)
    if not ids:
        raise UserError(f"text = {name!r}: is empty")
    return ids


def _heldout(run: Path, tokens: int) -> list[int]:
    from atoll.config import load_config
    from atoll.data import open_corpus

    config = load_config(run / "config.toml")
    own = run / "tokenizer.json"
    data = dataclasses.replace(config.data, tokenizer=str(own)) if own.is_file() else config.data
    return open_corpus(data, config.model).heldout.tokens[:tokens].tolist()
