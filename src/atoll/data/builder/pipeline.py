"""From sources to shards: read, filter, leave out what was met before, join, sample up, compose, write, account for every file."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.config import UserError
from atoll.data.builder import evidence, joining
from atoll.data.builder.archives import fetched
from atoll.data.builder.filters import Bounds, Seen, fault
from atoll.data.builder.recipes import Origin, Unreadable, folder_origin, installed, read_text, resolve
from atoll.data.builder.writing import KIND, MANIFEST, VERSION, Shards, building
from atoll.data.cache import write_text
from atoll.data.tasks import Draw

Say = Callable[[str], None]
EVERY = 2.0  # seconds between lines of progress
DROPPED = "dropped.jsonl"


@dataclass(frozen=True)
class Options:
    """What a build does; the flags of `atoll data build`."""

    join: str = "repository"  # "repository", "folder", "none"
    near: float | None = 0.7
    max_chars: int = 4_000_000
    upsample: float = 1.0
    long: int = 32768
    evidence: int = 0
    evidence_chars: int = 65536
    shard_mb: float = 64.0
    suffixes: tuple[str, ...] = ()
    licence: str = "unknown"
    seed: int = 0
    bounds: Bounds = field(default_factory=Bounds)


@dataclass
class Tally:
    """What became of one source's files; `files` is the sum of `kept` and `dropped`."""

    origin: Origin
    files: int = 0
    kept: list[tuple[str, bytes]] = field(default_factory=list)  # name, digest of the text as it was read first
    dropped: Counter[str] = field(default_factory=Counter)
    documents: int = 0
    records: int = 0
    chars: int = 0  # of documents, copies not counted


class Progress:
    """Lines of progress, no oftener than every `EVERY` seconds."""

    def __init__(self, say: Say, what: str, total: float) -> None:
        self.say, self.what, self.total = say, what, max(1.0, total)
        self.begun = self.said = time.monotonic()

    def at(self, done: float) -> None:
        now = time.monotonic()
        if now - self.said >= EVERY and done:
            self.said = now
            share = min(1.0, done / self.total)
            self.say(f"{self.what}: {share:.0%} · {(now - self.begun) * (1 - share) / share:,.0f} s left")


def build(sources: list[str], out: Path, options: Options, download: bool = False, say: Say = lambda line: None) -> dict[str, Any]:
    """Write `out`: shards of JSON lines, manifest.json and dropped.jsonl; returns the manifest. Raises `UserError`.

    Interrupted, it leaves nothing but what was there before. The same files and options give the same shards to the byte.
    """
    check(sources, options)
    with tempfile.TemporaryDirectory(prefix="atoll-build-") as folder:
        origins = _origins(sources, options, download, Path(folder), say)
        with building(out) as aside:
            tallies = [Tally(origin) for origin in origins]
            _survey(tallies, options, aside / DROPPED, say)
            if not any(t.kept for t in tallies):
                reasons = ", ".join(f"{n:,} {why}" for why, n in sum((t.dropped for t in tallies), Counter()).most_common(3))
                raise UserError(f"source: no document is left ({reasons}); loosen the filters, or name more sources")
            shards = Shards(aside, int(options.shard_mb * 1e6))
            for i, tally in enumerate(tallies):
                _write(tally, _label(tallies, i), shards, options, say)
            composed = _compose(tallies, shards, options, say)
            shards.close()
            manifest = _manifest(tallies, shards, composed, options)
            write_text(aside / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False), "--out")
    return manifest


def check(sources: list[str], o: Options) -> None:
    """Refuse what cannot be."""
    if not sources:
        raise UserError("data build: a SOURCE is expected, a folder or a recipe; see atoll data recipes")
    if len(set(sources)) != len(sources):
        raise UserError(f"source = {max(sources, key=sources.count)!r}: given twice")
    if o.near is not None and not 0 < o.near <= 1:
        raise UserError(f"--near {o.near}: over 0 up to 1 is expected, or 0 for exact duplicates alone")
    for name, least in (("max_chars", 1000), ("upsample", 1), ("long", 1), ("evidence", 0), ("evidence_chars", 8000), ("shard_mb", 1e-3)):
        value = getattr(o, name)
        if not least <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value}: {least} or more is expected")


def _origins(sources: list[str], o: Options, download: bool, folder: Path, say: Say) -> list[Origin]:
    found = []
    for number, source in enumerate(sources):
        what = resolve(source)
        if isinstance(what, Path):
            found.append(folder_origin(what, o.suffixes, o.licence))
            continue
        origin = installed(what)
        if origin is None and what.via == "python":
            raise UserError(f"source = {source!r}: this Python keeps no source files; name a folder")
        if origin is None and not download:
            raise UserError(f"source = {source!r}: not on this machine; install it by: {what.install}, or give --download")
        found.append(origin or fetched(what, folder / str(number), say))
    return found


def _label(tallies: list[Tally], index: int) -> str:
    """A source's name in records; with its number where another has the same."""
    name = tallies[index].origin.name
    return name if sum(t.origin.name == name for t in tallies) == 1 else f"{name}#{index + 1}"


# ---------------------------------------------------------------- what is kept


def _survey(tallies: list[Tally], o: Options, log: Path, say: Say) -> None:
    """Read every file once and decide; what is left out goes to `log`, a line each with the reason."""
    seen = Seen(o.near)
    sizes = [[(t.origin.root / name).stat().st_size for name in t.origin.files] for t in tallies]
    progress, done = Progress(say, "reading", sum(map(sum, sizes))), 0
    say(f"reading {sum(map(len, sizes)):,} files, {sum(map(sum, sizes)) / 1e6:,.1f} MB")
    with log.open("w", encoding="utf-8", errors="replace") as file:
        for index, tally in enumerate(tallies):
            for name, size in zip(tally.origin.files, sizes[index], strict=True):
                tally.files += 1
                reason, twin, digest = _verdict(tally.origin, name, f"{_label(tallies, index)}:{name}", seen, o.bounds)
                if reason is None:
                    tally.kept.append((name, digest))
                else:
                    tally.dropped[reason] += 1
                    entry = {"source": _label(tallies, index), "file": name, "reason": reason} | ({"of": twin} if twin else {})
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
                done += size
                progress.at(done)


def _verdict(origin: Origin, name: str, full: str, seen: Seen, bounds: Bounds) -> tuple[str | None, str | None, bytes]:
    """(why it is left out or None, the document it repeats, digest of its text)."""
    try:
        text = read_text(origin.root / name)
    except Unreadable as error:
        return str(error), None, b""
    if reason := fault(text, origin.kind_of(name), bounds):
        return reason, None, b""
    if twin := seen.twin(full, text):
        return *twin, b""
    return None, None, _digest(text)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _again(tally: Tally, name: str, digest: bytes) -> str:
    """The text of a kept file, read a second time. Raises `UserError` if it is another by now."""
    try:
        text = read_text(tally.origin.root / name)
    except Unreadable:
        text = ""
    if _digest(text) != digest:
        raise UserError(f"source = {str(tally.origin.root / name)!r}: changed while it was read; start again")
    return text


# ---------------------------------------------------------------- what is written


def _write(tally: Tally, label: str, shards: Shards, o: Options, say: Say) -> None:
    digests, origin = dict(tally.kept), tally.origin
    progress, done = Progress(say, f"writing {label}", len(digests)), 0
    for group, names in joining.groups(origin, digests, o.join):
        texts = ((name, _again(tally, name, digests[name])) for name in names)
        for number, (files, text) in enumerate(joining.joined(texts, o.max_chars)):
            name = f"{label}:{group}" + (f"#{number + 1}" if number else "")
            record = {"text": text, "name": name, "source": label, "kind": origin.kind_of(files[0]), "licence": origin.licence}
            times = joining.copies(name, len(text), o.long, o.upsample)
            for _ in range(times):
                shards.add(record | {"files": len(files)})
            tally.documents, tally.records, tally.chars = tally.documents + 1, tally.records + times, tally.chars + len(text)
        done += len(names)
        progress.at(done)


def _compose(tallies: list[Tally], shards: Shards, o: Options, say: Say) -> dict[str, Any]:
    """Write the documents whose questions need evidence from all over; returns what the manifest says of them."""
    if not o.evidence:
        return {"records": 0, "questions": 0, "chars": 0}
    pool = [(t, name, digest) for t in tallies for name, digest in t.kept]
    if len(pool) < 2:
        raise UserError(f"--evidence {o.evidence}: needs two kept files or more to draw from; name more sources")
    progress, questions, chars = Progress(say, "composing", o.evidence), 0, 0
    for index in range(o.evidence):
        chosen, licences = [], set()
        for i in Draw(o.seed, index).order(len(pool)):
            tally, name, digest = pool[i]
            chosen.append(_again(tally, name, digest))
            licences.add(tally.origin.licence)
            if len(chosen) >= 2 and sum(min(len(text), evidence.MOST) for text in chosen) >= o.evidence_chars:
                break
        made = evidence.compose(chosen, o.evidence_chars, o.seed, index)
        licence = " and ".join(sorted(licences))
        shards.add({"text": made.text, "name": f"evidence:{index}", "source": "evidence", "kind": "synthetic", "licence": licence})
        questions, chars = questions + len(made.questions), chars + len(made.text)
        progress.at(index + 1)
    return {"records": o.evidence, "questions": questions, "chars": chars}


def _manifest(tallies: list[Tally], shards: Shards, composed: dict[str, Any], o: Options) -> dict[str, Any]:
    sources = [
        {
            "name": _label(tallies, i),
            "package": t.origin.package,
            "archive": t.origin.archive,
            "root": "" if t.origin.archive else str(t.origin.root),
            "licence": t.origin.licence,
            "files": t.files,
            "links_left_out": t.origin.links,
            "kept": len(t.kept),
            "dropped": dict(t.dropped.most_common()),
            "documents": t.documents,
            "records": t.records,
            "chars": t.chars,
        }
        for i, t in enumerate(tallies)
    ]
    totals: dict[str, Any] = {key: sum(s[key] for s in sources) for key in ("files", "kept", "documents", "records", "chars")}
    totals["dropped"] = dict(sum((t.dropped for t in tallies), Counter()).most_common())
    totals["records"] += composed["records"]
    return {
        "kind": KIND,
        "version": VERSION,
        "options": asdict(o) | {"suffixes": list(o.suffixes)},
        "sources": sources,
        "evidence": composed,
        "totals": totals,
        "shards": shards.done,
        "dropped": DROPPED,
    }
