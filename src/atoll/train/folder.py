"""A run's folder: taken by one process at a time, never silently overwritten, its settings frozen on the first start."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.config import Config, ParallelConfig, StageConfig, UserError, load_config, to_toml
from atoll.train import checkpoint

LOCK = ".lock"
TRIAL = ".trial"  # what timing the machine writes; names with a dot hold nothing of a run, so a start killed early can be repeated
# Settings that may differ on a resume, because no number of the run depends on them (or, for the split, none that is kept).
FREE = {
    "data": {"cache", "tokenizer"},
    "parallel": {f.name for f in dataclasses.fields(ParallelConfig)},
    "stages": {"micro_batch", "recompute", "segment", "offload"},
    "train": {
        "minutes",
        "epochs",
        "micro_batch",
        "device",
        "threads",
        "gradient_checkpointing",
        "save_every",
        "keep",
        "async_save",
        "evaluate",
        "report",
        "export",
    },
}


@contextmanager
def taken(out: Path, resume: bool) -> Iterator[Path]:
    """Hold the run folder `out` for this process.

    Raises `UserError` when another process holds it, when it is not empty and `resume` is not set, or when there is nothing to resume.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"out = {str(out)!r}: is a file; give a folder")
    if resume and not (out / "config.toml").is_file():
        raise UserError(f"resume = {str(out)!r}: no config.toml there; give the folder of a run that has started")
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"out = {str(out)!r}: cannot be written ({error.strerror}); give another folder") from None
    held = False
    try:
        _lock(handle, out)
        held = True
        if not resume and any(not p.name.startswith(".") for p in out.iterdir()):
            raise UserError(f"out = {str(out)!r}: already holds a run; go on with it by --resume {out}, or give a new folder")
        yield out
    finally:
        if held and all(p.name.startswith(".") for p in out.iterdir()):
            _leave_nothing(out)
        os.close(handle)  # the lock goes with it


def _leave_nothing(out: Path) -> None:
    """Take away a folder in which no run began: a mistake found before the first step leaves nothing behind."""
    shutil.rmtree(out / TRIAL, ignore_errors=True)
    with contextlib.suppress(OSError):
        (out / LOCK).unlink()
        out.rmdir()


def _lock(handle: int, out: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
        raise UserError(f"out = {str(out)!r}: in use by process {owner}; wait for it, or give another folder") from None
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())


def begin(out: Path, config: Config, tokenizer: Any) -> None:
    """Write the frozen settings and the tokenizer; from here on the run can be resumed."""
    checkpoint.write_whole(out / "config.toml", to_toml(config))
    tokenizer.save(out / "tokenizer.json")


def frozen(out: Path, given: Config | None) -> Config:
    """The settings a resumed run goes on with: the folder's, with the free ones of `given`.

    Raises `UserError` naming the first setting of `given` that would change the run.
    """
    kept = load_config((out / "config.toml").resolve())
    if given is None:
        return kept
    steps, threads = given.train.steps, given.train.threads
    train = dataclasses.replace(
        given.train,
        steps=kept.train.steps if steps is None else steps,
        threads=kept.train.threads if threads is None else threads,
    )
    given = dataclasses.replace(given, train=train)
    for name, mine, theirs in _differences(given, kept):
        raise UserError(f"{name} = {mine!r}: the run in {out} has {theirs!r}; leave it out to go on, or start a new run")
    return given


def _differences(a: Config, b: Config) -> Iterator[tuple[str, Any, Any]]:
    for group in dataclasses.fields(Config):
        mine, theirs = getattr(a, group.name), getattr(b, group.name)
        if isinstance(mine, tuple):
            if _bound(mine) != _bound(theirs):
                yield group.name, mine, theirs
            continue
        for f in dataclasses.fields(mine):
            x, y = getattr(mine, f.name), getattr(theirs, f.name)
            if x != y and f.name not in FREE.get(group.name, set()):
                yield f"{group.name}.{f.name}", x, y


def fingerprint(config: Config) -> str:
    """A digest of every setting that a number of the run depends on.

    Of those that are not at their default: a setting that a later version adds, and leaves off, does not keep a run from going on.
    """
    parts, usual = [], Config()
    for group in dataclasses.fields(Config):
        value, default = getattr(config, group.name), getattr(usual, group.name)
        if isinstance(value, tuple):
            parts.append(f"{group.name}={_bound(value)!r}")
            continue
        off = {k: v for k, v in dataclasses.asdict(value).items() if k not in FREE.get(group.name, set())}
        kept = dataclasses.asdict(default)
        parts += [f"{group.name}.{k}={v!r}" for k, v in off.items() if v != kept[k]]
    return checkpoint.fingerprint(parts)


def _bound(stages: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The settings of each stage that numbers depend on and that are not at their default."""
    usual = dataclasses.asdict(StageConfig())
    return [{k: v for k, v in dataclasses.asdict(s).items() if k not in FREE["stages"] and v != usual[k]} for s in stages]


# ---------------------------------------------------------------- metrics.jsonl


def cut_metrics(out: Path, step: int) -> None:
    """Drop from metrics.jsonl what lies after `step` (and a last line cut short), so that a resumed run's file equals one never stopped."""
    path = out / "metrics.jsonl"
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and record.get("kind") != "final" and record.get("step", 0) <= step:
            kept.append(line)
    checkpoint.write_whole(path, "".join(kept))
    for probe in (out / "probes").glob("step-*.json"):
        number = probe.stem.removeprefix("step-")
        if number.isdigit() and int(number) > step:
            probe.unlink()
