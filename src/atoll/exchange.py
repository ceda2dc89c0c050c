"""What `atoll export` and `atoll import` do: find the model that is meant, move it, and say what now stands there."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.config import UserError
from atoll.hub.convert import convert, verify
from atoll.hub.engines import engines
from atoll.hub.export import save
from atoll.hub.load import read_config, tensor_files
from atoll.model import Model, load
from atoll.plan.summary import binary
from atoll.train.checkpoint import META
from atoll.train.screen import Screen, duration

FROM_HERE = "a run, one of its checkpoints (RUN/checkpoints/step-N) or a folder in the hub's layout is expected"


@dataclass(frozen=True)
class Source:
    """Where a model is read from: a folder in the hub's layout, or a checkpoint of a run."""

    folder: Path | None
    step: Path | None
    tokenizer: Path | None  # the run's tokenizer.json, where `step` is set


def find(run: str) -> Source:
    """The model that `run` names: a hub folder, a run's finished model/, a run's newest checkpoint, or one checkpoint. `UserError`."""
    path = Path(run).expanduser()
    if not path.is_dir():
        raise UserError(f"run = {run!r}: no such folder; {FROM_HERE}")
    if (path / "config.json").is_file():
        return Source(path, None, None)
    if (path / META).is_file():
        return _step(path, path.absolute().parents[1])
    if not (path / "config.toml").is_file():
        raise UserError(f"run = {run!r}: neither config.toml nor config.json there; {FROM_HERE}")
    if (path / "model" / "config.json").is_file():
        return Source(path / "model", None, None)
    from atoll.train.weights import newest_step

    if (step := newest_step(path)) is None:
        raise UserError(f"run = {run!r}: neither model/ nor a whole checkpoint there yet; go on with atoll train --resume {run}")
    return _step(step, path)


def _step(step: Path, run: Path) -> Source:
    if not (run / "config.toml").is_file():
        raise UserError(f"run = {str(step)!r}: a checkpoint outside its run; {FROM_HERE}")
    tokenizer = run / "tokenizer.json"
    return Source(None, step, tokenizer if tokenizer.is_file() else None)


def export_model(run: str, out: str, dtype: str | None, shard_bytes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the model of `run` to the folder `out`; returns `describe(out)`. Raises `UserError` and leaves `out` as it was."""
    if not out:
        raise UserError("folder = '': a name is expected")
    source, target = find(run), Path(out).expanduser()
    kind = None if dtype is None else getattr(torch, dtype)
    with interruptible(), progress("written") as watch:
        if source.folder is not None:
            convert(skeleton(source.folder), source.folder, target, dtype=kind, shard_bytes=shard_bytes, progress=watch)
        elif source.step is not None:
            from atoll.data.tokenizer import load_tokenizer
            from atoll.train.weights import model_at

            say(f"exporting {source.step}")
            tokenizer = load_tokenizer(source.tokenizer) if source.tokenizer else None
            save(model_at(source.step), target, tokenizer, shard_bytes, kind, watch)
    return describe(target)


def import_model(folder: str, out: str | None, dtype: str | None, shard_bytes: float, router_weights: str | None = None) -> dict[str, Any]:
    """Check every tensor of `folder` and, with `out`, write it there in Atoll's normal form; returns what was found or written."""
    source = Path(folder).expanduser()
    model, kind = skeleton(source, router_weights), None if dtype is None else getattr(torch, dtype)
    with interruptible(), progress("checked" if out is None else "written") as watch:
        if out is None:
            verify(model, source, watch)
        else:
            convert(model, source, out, dtype=kind, shard_bytes=shard_bytes, progress=watch)
    found = describe(source if out is None else Path(out).expanduser())
    return {**found, "router_weights": model.config.router_weights, "checked": str(source)}


def hold_against(run: str, against: str) -> dict[str, Any]:
    """`evals.parity.compare`'s report on the model of `run` in float32, against an engine's name or a file of reference logits."""
    from atoll.evals.parity import compare, read_reference
    from atoll.evals.peers import PEERS, reference

    source = find(run)
    if against not in PEERS and not against.endswith(".safetensors"):
        raise UserError(f"against = {against!r}: one of {', '.join(PEERS)} or a .safetensors file of input_ids and logits is expected")
    if source.folder is None:
        raise UserError(f"run = {run!r}: not finished; write it with atoll export {run} FOLDER and give that folder")
    model = load(source.folder, dtype=torch.float32)
    theirs = reference(against, source.folder, model.config.vocab_size) if against in PEERS else read_reference(against)
    return compare(model, theirs)


def skeleton(folder: Path, router_weights: str | None = None) -> Model:
    """The model of a hub folder on the meta device: names and shapes, no memory."""
    return Model(read_config(folder, router_weights), device="meta")


# ---------------------------------------------------------------- what stands in a folder


def describe(folder: Path) -> dict[str, Any]:
    """Files, bytes, tensors, form, and what each engine would make of a folder in the hub's layout; ready for JSON."""
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.is_file()}
    warnings = []
    if "tokenizer.json" not in files:
        warnings.append("no tokenizer.json: engines can load the weights and cannot read text")
    return {
        "folder": str(folder),
        "form": tree.get("model_type"),
        "dtype": str(tree.get("dtype")),
        "tensors": len(tensor_files(folder)),
        "bytes": sum(files.values()),
        "files": files,
        "engines": engines(tree),
        "warnings": warnings,
    }


def render(found: dict[str, Any]) -> str:
    """`describe`'s answer as aligned text."""
    head = f"{found['folder']}: {found['form']}, {found['tensors']:,} tensors in {found['dtype']}, {found['bytes']:,} bytes"
    names = [*found["files"]]
    shards = [name for name in names if name.startswith("model-") and name.endswith(".safetensors")]
    rest = [f"{name} ({found['files'][name]:,})" for name in names if name not in shards]
    lines = [head, "files: " + ", ".join([*([f"{len(shards)} shards"] if shards else []), *rest])]
    if "router_weights" in found:
        lines.append(f"experts are weighed by {found['router_weights']} scores")
    for name, reasons in found["engines"].items():
        lines.append(f"  {name:<13} " + ("; ".join(reasons) if reasons else "every setting it reads is there"))
    lines += [f"warning: {text}" for text in found["warnings"]]
    if "parity" in found:
        from atoll.evals.parity import render as parity

        lines += ["", parity(found["parity"])]
    return "\n".join(lines)


# ---------------------------------------------------------------- while it runs


@contextlib.contextmanager
def progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """A function that shows, on stderr, how far a folder is and when it will be done; short work shows nothing."""
    screen, first = Screen(sys.stderr), []  # the first call's time and bytes: what went before it says nothing of the speed

    def watch(done: int, total: int) -> None:
        now = time.monotonic()
        if not first:
            first.extend([now, done])
        passed = now - first[0]
        if passed > 2:
            left = passed * (total - done) / max(done - first[1], 1)
            screen.live(f"{binary(done)} of {binary(total)} {verb} · ETA {duration(left)}")

    try:
        yield watch
    finally:
        screen.close()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does: what is half-written is taken away first."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread: whoever calls from there sees to signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
