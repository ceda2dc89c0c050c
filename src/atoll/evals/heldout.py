"""What `atoll eval` says: a run's model on every held-out file, beside general compressors on the same files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

WHAT = {"text": ("file", ""), "chat": ("conversation", ", what the assistants say"), "synthetic": ("task", ", the answers")}
POSITIONS = 1 << 18  # tokens of the split that loss by position is measured on


def run_corpus(run: Path) -> tuple[Any, Any]:
    """The config of a run, and its corpus under its own tokenizer. Raises `UserError` when its text is gone."""
    from atoll.config import load_config
    from atoll.data import open_corpus

    config = load_config(run / "config.toml")
    data = config.data
    if (run / "tokenizer.json").is_file():
        data = dataclasses.replace(data, tokenizer=str(run / "tokenizer.json"))
    return config, open_corpus(data, config.model)


def evaluate(run: Path) -> dict[str, Any]:
    """Bits per byte of `run`'s model over its whole held-out split, and of gzip -9 and xz -9e, ready for JSON. Of pictures, what was read.

    The split and the tokenizer are the run's own. "by_position" holds the buckets of `position.by_position` on part of the split.
    Raises `UserError` when the run has no exported model or its text is gone.
    """
    from atoll.evals.bpb import bits_per_byte, compressors
    from atoll.evals.position import by_position
    from atoll.model import load

    model = load(run)
    config, corpus = run_corpus(run)
    length = config.stages[-1].length
    if corpus.heldout.pictures is not None:
        from atoll.evals import pictures

        return {"kind": config.data.kind, **pictures.measure(model, corpus, length)[0]}
    measured = bits_per_byte(model, corpus.heldout, length)
    kind = "text" if corpus.heldout.trained is None else config.data.kind
    about = {"kind": kind, "files": len(corpus.heldout_files), "length": length, "has_tests": corpus.has_tests}
    places = by_position(model, corpus.heldout, length, limit_tokens=POSITIONS)
    return {**measured, **compressors(corpus.heldout_files), **about, "by_position": places}


def render(result: dict[str, Any]) -> str:
    """The result as aligned text."""
    if result["kind"] == "images":
        from atoll.evals import pictures

        return pictures.described(result)
    from atoll.evals import position

    rows = [("model", "bits_per_byte"), ("gzip -9", "gzip"), ("xz -9e", "xz")]
    one, rest = WHAT[result["kind"]]
    what = one + "s" * (result["files"] != 1) + rest
    head = f"{result['files']:,} held-out {what}: {result['bytes']:,} bytes, {result['tokens']:,} tokens in windows of {result['length']:,}"
    body = [f"  {name:<8} {result[key]:.4f} bits per byte" for name, key in rows]
    return "\n".join([head, *body, position.render(result["by_position"])])
