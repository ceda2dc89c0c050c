"""The end of a run: the whole held-out split, gzip and xz beside it, model/ for other engines, the report."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

from atoll.train import checkpoint
from atoll.train.callbacks.base import record
from atoll.train.callbacks.metrics import MetricsFile
from atoll.train.screen import duration

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer


def finish(trainer: Trainer) -> None:
    """Everything after the last step that the settings ask for. Interrupted, it can be had again by resuming the run.

    Of several processes all run the model, and the first does the rest.
    """
    c, ranks = trainer.config.train, trainer.ranks
    metrics = MetricsFile()
    trainer.callbacks = [metrics] if ranks.main else []
    for callback in trainer.callbacks:
        callback.start(trainer)
    if c.evaluate:
        line = final_line(trainer)
        record(trainer, line)
        metrics.sync()
        trainer.screen.say(_verdict(line, "text" if trainer.corpus.heldout.trained is None else trainer.config.data.kind))
    if c.export:
        ranks.on_main(lambda: _export(trainer))
    if c.report:
        ranks.on_main(lambda: _report(trainer))


def _export(trainer: Trainer) -> None:
    from atoll.hub.export import save
    from atoll.train.weights import export_step, model_at

    for leftover in trainer.out.glob(".model.*"):  # of an export that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    folder, tokenizer = trainer.out / "model", trainer.corpus.tokenizer
    if trainer.ranks.size == 1:
        save(trainer.model, folder, tokenizer)
    elif trainer.config.model.quantization != "none":  # a group is packed from weights and scales together
        save(model_at(trainer.out / "checkpoints" / f"step-{trainer.step}"), folder, tokenizer)
    else:
        export_step(trainer.out / "checkpoints" / f"step-{trainer.step}", trainer.config, folder, tokenizer)
    trainer.screen.say(f"model: {folder}")


def _report(trainer: Trainer) -> None:
    from atoll.report import write

    try:
        trainer.screen.say(f"report: {write(trainer.out)}")
    except ImportError as error:
        trainer.screen.say(f"no report: {error.name} is not installed; pip install {error.name}, then: atoll report {trainer.out}")


def final_line(trainer: Trainer) -> dict[str, Any]:
    """Bits per byte of the whole held-out split, and of gzip and xz on the same files one by one; of pictures what was said of them."""
    corpus = trainer.corpus
    if corpus.heldout.pictures is not None:
        return {"kind": "final", **heldout(trainer, None)}
    return {
        "kind": "final",
        **heldout(trainer, None),
        **trainer.ranks.on_main(lambda: compressed(corpus)),
        "files": len(corpus.heldout_files),
        "bytes": sum(len(content) for _, content in corpus.heldout_files),
        "has_tests": corpus.has_tests,
    }


def compressed(corpus: Any) -> dict[str, float]:
    """Bits per byte of gzip -9 and xz -9e; measured once a process, because xz takes its time."""
    from atoll.evals.bpb import compressors

    known = _KNOWN.get(id(corpus))
    if known is None:
        known = _KNOWN[id(corpus)] = dict(compressors(corpus.heldout_files))
    return known


_KNOWN: dict[int, dict[str, float]] = {}


def _verdict(line: dict[str, Any], kind: str) -> str:
    if kind == "images":
        from atoll.evals.pictures import described

        return described(line)
    if kind == "chat":
        return (
            f"{line['bits_per_byte']:.4f} bits per byte, {line['nats_per_token']:.4f} nats a token of what the assistants say in "
            f"{line['files']:,} held-out conversations ({line['bytes']:,} bytes); gzip -9 {line['gzip']:.4f}, xz -9e {line['xz']:.4f}"
        )
    if kind == "synthetic":
        return f"{line['nats_per_token']:.4f} nats a token of the answers to {line['files']:,} held-out tasks; see atoll eval --suite"
    tests = {True: ", the library's tests among them", False: ", without the library's tests"}.get(line["has_tests"], "")
    size = f"{line['files']:,} held-out files ({line['bytes'] / 1e6:.2f} MB{tests})"
    return f"{line['bits_per_byte']:.4f} bits per byte on {size}; gzip -9 {line['gzip']:.4f}, xz -9e {line['xz']:.4f}"


def look(trainer: Trainer, tokens: int | None) -> dict[str, float]:
    """`heldout` of pictures: the loss beside them, and how many of the answers about them are right; at the end (None) pictures.json."""
    from atoll.evals.pictures import measure

    length = trainer.stages[-1].length
    measured, shown = measure(trainer.model, trainer.corpus, length, tokens, stop=trainer.ranks.size == 1)
    if shown and trainer.ranks.main:
        checkpoint.write_whole(trainer.out / "pictures.json", json.dumps({"step": trainer.step, "pictures": shown}))
    return measured


def heldout(trainer: Trainer, tokens: int | None) -> dict[str, float]:
    """{"bits_per_byte", "nats_per_token"} of a fixed choice of about `tokens` held-out tokens (None: of all, with progress)."""
    from atoll.evals.bpb import bits_per_byte

    if trainer.corpus.heldout.pictures is not None:
        return look(trainer, tokens)
    begun = time.monotonic()

    def progress(share: float) -> None:
        left = (time.monotonic() - begun) * (1 - share) / max(share, 1e-9)
        trainer.screen.live(f"held-out split: {share:.0%} · ETA {duration(left)}")

    length = trainer.stages[-1].length
    token_set = trainer.corpus.heldout
    measured = bits_per_byte(trainer.model, token_set, length, limit_tokens=tokens, progress=None if tokens else progress)
    return {key: measured[key] for key in ("bits_per_byte", "nats_per_token")}
