"""The end of a run: the whole held-out split, gzip and xz beside it, model/ for other engines, the report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from atoll.train.callbacks.base import record
from atoll.train.callbacks.metrics import MetricsFile
from atoll.train.screen import duration

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer


def finish(trainer: Trainer) -> None:
    """Everything after the last step that the settings ask for. Interrupted, it can be had again by resuming the run."""
    c = trainer.config.train
    metrics = MetricsFile()
    trainer.callbacks = [metrics]
    metrics.start(trainer)
    if c.evaluate:
        line = final_line(trainer)
        record(trainer, line)
        metrics.sync()
        trainer.screen.say(_verdict(line))
    if c.export:
        from atoll.hub.export import save

        save(trainer.model, trainer.out / "model", trainer.corpus.tokenizer)
        trainer.screen.say(f"model: {trainer.out / 'model'}")
    if c.report:
        from atoll.report import write

        trainer.screen.say(f"report: {write(trainer.out)}")


def final_line(trainer: Trainer) -> dict[str, Any]:
    """Bits per byte of the whole held-out split, and of gzip and xz on the same files one by one."""
    corpus = trainer.corpus
    bits = heldout_bits(trainer, None)
    return {
        "kind": "final",
        "bits_per_byte": bits,
        **compressed(corpus),
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


def _verdict(line: dict[str, Any]) -> str:
    tests = {True: ", the library's tests among them", False: ", without the library's tests"}.get(line["has_tests"], "")
    size = f"{line['files']:,} held-out files ({line['bytes'] / 1e6:.2f} MB{tests})"
    return f"{line['bits_per_byte']:.4f} bits per byte on {size}; gzip -9 {line['gzip']:.4f}, xz -9e {line['xz']:.4f}"


def heldout_bits(trainer: Trainer, tokens: int | None) -> float:
    """Bits per byte on the first `tokens` tokens of the held-out split (None: all, with progress)."""
    from atoll.evals.bpb import bits_per_byte

    begun = time.monotonic()

    def progress(done: int, total: int) -> None:
        left = (time.monotonic() - begun) / max(1, done) * (total - done)
        trainer.screen.live(f"held-out split: {done:,} of {total:,} tokens · ETA {duration(left)}")

    length = trainer.stages[-1].length
    return bits_per_byte(trainer.model, trainer.corpus.heldout, length, max_tokens=tokens, progress=None if tokens else progress)
