"""What `atoll eval` says: a run's model on every held-out file, beside general compressors on the same files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any


def evaluate(run: Path) -> dict[str, Any]:
    """Bits per byte of `run`'s model over its whole held-out split, and of gzip -9 and xz -9e, ready for JSON. Of pictures, what was read.

    The split and the tokenizer are the run's own. Raises `UserError` when the run has no exported model or its text is gone.
    """
    from atoll.config import load_config
    from atoll.data import open_corpus
    from atoll.evals.bpb import bits_per_byte, compressors
    from atoll.model import load

    config = load_config(run / "config.toml")
    data = config.data
    if (run / "tokenizer.json").is_file():
        data = dataclasses.replace(data, tokenizer=str(run / "tokenizer.json"))
    model = load(run)
    corpus = open_corpus(data, config.model)
    length = config.stages[-1].length
    if corpus.heldout.pictures is not None:
        from atoll.evals import pictures

        return {"kind": data.kind, **pictures.measure(model, corpus, length)[0]}
    measured = bits_per_byte(model, corpus.heldout, length)
    about = {"kind": data.kind, "files": len(corpus.heldout_files), "length": length, "has_tests": corpus.has_tests}
    return {**measured, **compressors(corpus.heldout_files), **about}


def render(result: dict[str, Any]) -> str:
    """The result as aligned text."""
    if result["kind"] == "images":
        from atoll.evals import pictures

        return pictures.described(result)
    rows = [("model", "bits_per_byte"), ("gzip -9", "gzip"), ("xz -9e", "xz")]
    text = result["kind"] == "text"
    what = ("file" if text else "conversation") + "s" * (result["files"] != 1) + ("" if text else ", what the assistants say")
    head = f"{result['files']:,} held-out {what}: {result['bytes']:,} bytes, {result['tokens']:,} tokens in windows of {result['length']:,}"
    return "\n".join([head, *(f"  {name:<8} {result[key]:.4f} bits per byte" for name, key in rows)])
