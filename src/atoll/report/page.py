"""report.html: one file with everything in it. No script, no address outside it; whatever a user or a model wrote is escaped."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from atoll.config import Config, describe
from atoll.plan.parameters import count
from atoll.plan.summary import short
from atoll.report.mechanisms import even
from atoll.report.plots import HEALTH, LEARNING, MECHANISMS
from atoll.report.run import Line, Run, number
from atoll.report.stages import HEAD, stage_rows

_SAMPLES = 6
# Beside the missing script, a browser that keeps to this loads nothing and runs nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_VISIBLE = {i: 0x2400 + i for i in range(32) if i not in (9, 10)} | {13: None, 127: 0x2421}


def text(value: object) -> str:
    """`value` as HTML text: escaped, control characters made visible, nothing that UTF-8 cannot write."""
    return escape(str(value).translate(_VISIBLE).encode("utf-8", "replace").decode())


def page(run: Run, pictures: dict[str, tuple[bytes, bytes]]) -> str:
    """The whole report as HTML; `pictures` by plot name, (light, dark) PNG."""
    parts = [
        _head(run),
        _headline(run),
        "<h2>Learning</h2>",
        *(figure_of(p, pictures) for p in LEARNING),
        _stages(run),
        _samples(run),
        _pictures(run),
        "<h2>Mechanisms</h2>",
        *(figure_of(p, pictures) for p in MECHANISMS),
        _loads(run),
        "<h2>Health of the run</h2>",
        *(figure_of(p, pictures) for p in HEALTH),
        _validations(run),
        _parameters(run),
        _settings(run.config),
    ]
    return document(run.name, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A whole HTML file of the house: `parts` one after the other, empty ones left out; nothing outside it is needed."""
    style = resources.files("atoll.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)} · Atoll</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


# ---------------------------------------------------------------- top


def _head(run: Run) -> str:
    counts = count(run.config.model)
    m = run.config.model
    kda = sum(m.is_kda(i) for i in range(m.num_hidden_layers))
    experts = f"{m.num_experts:,} routed experts, {m.num_experts_per_token} a token; " if run.has_experts else ""
    lead = (
        f"{m.num_hidden_layers} layers of width {m.hidden_size:,}: {kda} with delta attention, {m.num_hidden_layers - kda} with latent "
        f"attention; {experts}vocabulary of {m.vocab_size:,}."
    )
    facts = [
        ("parameters", f"{short(counts.total)}, {short(counts.active)} active"),
        ("steps", f"{run.steps[-1]['step']:,}" + (f" of {run.config.train.steps:,}" if run.config.train.steps else "")),
        ("tokens seen", f"{sum(run.tokens_in(line) for line in run.steps):,}"),
        ("time in training", duration(training_seconds(run))),
        *_machine(run.start),
    ]
    items = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts if value not in ("", None))
    return f'<header>\n<h1>{text(run.name)}</h1>\n<p class="lead">{text(lead)}</p>\n<dl class="facts">{items}</dl>\n{_notes(run)}</header>'


def _machine(start: Line) -> list[tuple[str, object]]:
    """Where the run ran, as far as it said."""
    threads, cpus = start.get("threads"), start.get("cpus")
    if threads is not None and cpus is not None:
        threads = f"{threads} on {cpus} CPUs"
    return [("hardware", start.get("device")), ("threads", threads), ("torch", start.get("torch")), ("Python", start.get("python"))]


def _notes(run: Run) -> str:
    notes = []
    if not _ended(run):
        notes.append("This run is not finished: what follows is its state at its last written step.")
    skipped = sum(bool(line.get("skipped")) for line in run.steps)
    if skipped:
        notes.append(f"{skipped:,} of {len(run.steps):,} steps were skipped by the guards.")
    if run.damaged:
        notes.append(f"{run.damaged:,} damaged lines or probes were left out.")
    return "".join(f'<p class="note">{text(note)}</p>\n' for note in notes)


def _ended(run: Run) -> bool:
    """Whether nothing is left to do: measured at the end, or, where that was not asked for, at its last step."""
    t = run.config.train
    return run.final is not None or (not t.evaluate and t.steps is not None and run.steps[-1]["step"] >= t.steps)


def training_seconds(run: Run) -> float:
    """Seconds spent in training steps: each step's tokens over its speed. Reading, validation and evaluation are not in it."""
    speeds = [(run.tokens_in(line), number(line.get("tokens_per_second"))) for line in run.steps]
    return sum(tokens / speed for tokens, speed in speeds if speed > 0)


def duration(seconds: float) -> str:
    """291.4 → "4 min 51 s"."""
    if not np.isfinite(seconds) or seconds <= 0:
        return ""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _headline(run: Run) -> str:
    final = run.final or {}
    own = number(final.get("bits_per_byte"))
    if not np.isfinite(own):
        return "<h2>Bits per byte on held-out files</h2>\n" + _latest_validation(run)
    if run.config.data.kind == "images":
        return f"<h2>Held-out pictures, in numbers</h2>\n{_read_aloud(final)}"
    rows = [("this model", own, True), ("gzip -9", number(final.get("gzip")), False), ("xz -9e", number(final.get("xz")), False)]
    rows = [row for row in rows if np.isfinite(row[1])]
    most = max(value for _, value, _ in rows)
    body = "".join(
        f'<tr{" class=own" if mine else ""}><th scope="row">{name}</th><td class="n">{value:.3f}</td>'
        f'<td class="n">{"" if mine else f"{own / value:.2f}×"}</td>'
        f'<td class="bar"><i style="width:{100 * value / most:.1f}%"></i></td></tr>\n'
        for name, value, mine in rows
    )
    head = '<tr><th>less is better</th><th class="n">bits per byte</th><th class="n">model over it</th><th></th></tr>'
    return f"<h2>Bits per byte on held-out files</h2>\n<table>{head}\n{body}</table>\n<p>{text(_about_files(final))}</p>"


def _read_aloud(final: Line) -> str:
    """What was read right, and the loss on the text beside the pictures."""
    rows = [
        ("handwritten digits named right", f"{number(final.get('digit_accuracy')):.1%}", f"{final.get('digits')} digits"),
        ("letters of unseen words", f"{number(final.get('character_accuracy')):.1%}", f"{final.get('characters')} letters"),
        ("bits per byte of the text", f"{number(final.get('bits_per_byte')):.3f}", f"{final.get('pictures')} pictures asked about"),
    ]
    return table(("never trained on", "", "of"), [row for row in rows if "nan" not in row[1]])


def _about_files(final: Line) -> str:
    said = []
    if isinstance(final.get("files"), int) and isinstance(final.get("bytes"), int):
        said.append(
            f"Measured on all {final['files']:,} held-out files, {final['bytes']:,} bytes, never trained on; compressed one by one."
        )
    if "has_tests" in final and final["has_tests"] is not None:
        said.append(
            f"The library's own tests were {'among the files' if final['has_tests'] else 'not installed here'}, which moves all figures."
        )
    return " ".join(said)


def _latest_validation(run: Run) -> str:
    known = [v for v in run.validations if np.isfinite(number(v.get("bits_per_byte")))]
    if not known:
        return '<p class="note">Nothing was measured on held-out files yet.</p>'
    last = known[-1]
    rest = "are measured when the run ends" if run.config.train.evaluate else "are measured by atoll eval on this run"
    return (
        f"<p>{number(last['bits_per_byte']):.3f} at step {last['step']:,}, on a fixed part of the held-out files. "
        f"All of them, beside gzip and xz, {text(rest)}.</p>"
    )


# ---------------------------------------------------------------- middle


def figure_of(plot: Any, pictures: dict[str, tuple[bytes, bytes]]) -> str:
    """A plot (its name, title, healthy, missing) as a figure in both themes, or the sentence said in its place."""
    if plot.name not in pictures:
        return f'<h3>{plot.title}</h3>\n<p class="note">{text(plot.missing)}</p>'
    light, dark = (base64.b64encode(data).decode() for data in pictures[plot.name])
    return (
        f'<figure>\n<picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{text(plot.title)}" src="data:image/png;base64,{light}"></picture>\n'
        f"<figcaption><b>Healthy:</b> {text(plot.healthy)}</figcaption>\n</figure>"
    )


def _samples(run: Run) -> str:
    head = "<h2>Samples</h2>\n"
    if not run.samples:
        return head + '<p class="note">No sample was written yet.</p>'
    shown = [run.samples[i] for i in even(len(run.samples), _SAMPLES)]
    prompt = run.config.train.sample_prompt
    lead = f"<p>What the model wrote on <code>{text(prompt)}</code> as it learned"
    lead += f"; {len(shown)} of {len(run.samples)}, first and last among them.</p>\n" if len(shown) < len(run.samples) else ".</p>\n"
    return head + lead + "\n".join(f"<h3>step {s['step']:,}</h3>\n<pre>{text(s.get('text', ''))}</pre>" for s in shown)


def _pictures(run: Run) -> str:
    """Held-out pictures, what the model said of them, and the truth where it said something else."""
    shown = "".join(_picture(p) for p in run.pictures)
    return (
        f'<h2>Held-out pictures</h2>\n<p>What the model says, and the truth where that is not it.</p>\n<div class="pictures">{shown}</div>'
        if shown
        else ""
    )


def _picture(picture: Line) -> str:
    said, truth = str(picture.get("said", "")), str(picture.get("truth", ""))
    verdict = f'<b class="right">{text(said)}</b>' if said == truth else f'<b class="wrong">{text(said or "(nothing)")}</b> {text(truth)}'
    return f'<figure><img alt="{text(truth)}" src="data:image/png;base64,{picture["png"]}"><figcaption>{verdict}</figcaption></figure>\n'


# ---------------------------------------------------------------- tables


def table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers_from: int = 1) -> str:
    """A table of text cells; columns from `numbers_from` on are flush right."""

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}{' class=n' if i >= numbers_from else ''}>{text(c)}</{tag}>" for i, c in enumerate(cells)) + "</tr>"

    return "<table>" + line(head, "th") + "\n" + "\n".join(line(row, "td") for row in rows) + "</table>"


def _stages(run: Run) -> str:
    return f"<h3>Stages</h3>\n{table(HEAD, stage_rows(run))}" if len(run.stages) > 1 else ""


def _validations(run: Run) -> str:
    if not run.validations:
        return ""
    shown = [run.validations[i] for i in even(len(run.validations), 40)]
    names = [(key, head) for key, head in VALIDATED if any(key in v for v in shown)]
    body = table(
        ("step", *(head for _, head in names)), [(f"{v['step']:,}", *(f"{number(v.get(k)):.4f}" for k, _ in names)) for v in shown]
    )
    return f"<details><summary>Validations, as numbers</summary>\n{body}</details>"


VALIDATED = (
    ("bits_per_byte", "held-out bits per byte"),
    ("digit_accuracy", "digits named right"),
    ("character_accuracy", "letters of unseen words"),
)
LOADS = (
    ("max_vio", "MaxVio of the worst layer: busiest expert's load over the mean, less 1"),
    ("max_vio_mean", "MaxVio, mean over layers"),
    ("max_load", "tokens of the busiest expert"),
    ("mean_load", "tokens of the mean expert"),
    ("dead_share", "share of experts without a token"),
    ("dropped_share", "share of choices dropped over capacity"),
    ("bare_tokens", "tokens left with the shared experts alone, over all layers"),
    ("balance_loss", "auxiliary loss, over all layers"),
)


def _loads(run: Run) -> str:
    """How level the experts were at first and at last, as numbers: medians over a tenth of the steps."""
    if not run.has_experts:
        return ""
    few = max(1, len(run.steps) // 10)
    rows = []
    for name, meaning in LOADS:
        values = np.array([number(line.get(name)) for line in run.steps])
        if np.isfinite(values).any():
            cells = [part[np.isfinite(part)] for part in (values[:few], values[-few:])]
            rows.append((meaning, *(f"{np.median(c):.4g}" if len(c) else "" for c in cells)))
    if not rows:
        return ""
    body = table(("in training", f"first {few:,} steps", f"last {few:,}"), rows)
    kind = text(run.config.balance.kind)
    return f'<details><summary>Balance, as numbers (rule "{kind}")</summary>\n{body}</details>'


def _parameters(run: Run) -> str:
    counts = count(run.config.model)
    rows = [(g.name, f"{g.total:,}", f"{g.active:,}") for g in counts.groups if g.total]
    rows.append(("total", f"{counts.total:,}", f"{counts.active:,}"))
    body = table(("group", "parameters", "active"), rows).replace("<table>", "<table class=sum>")
    return f"<h2>Parameters</h2>\n<p>Active counts the language-model head, not the input embedding.</p>\n{body}"


def _settings(config: Config) -> str:
    parts = ["<h2>Settings</h2>\n<p>In bold what differs from the defaults.</p>"]
    for group in dataclasses.fields(config):
        value = getattr(config, group.name)
        for i, settings in enumerate(value if isinstance(value, tuple) else (value,)):
            name = f"{group.name}.{i}" if isinstance(value, tuple) else group.name
            parts.append(f"<details><summary>{name}</summary>\n<table>{_setting_rows(settings)}</table></details>")
    return "\n".join(parts)


def _setting_rows(settings: Any, prefix: str = "") -> str:
    meanings, default = describe(type(settings)), type(settings)()
    rows = []
    for field in dataclasses.fields(settings):
        value, meaning = getattr(settings, field.name), meanings.get(field.name, "")
        if dataclasses.is_dataclass(value):
            rows.append(_setting_rows(value, f"{prefix}{field.name}."))
            continue
        changed = " class=changed" if value != getattr(default, field.name) else ""
        rows.append(f"<tr><td><code>{prefix}{field.name}</code></td><td{changed}>{text(_shown(value))}</td><td>{text(meaning)}</td></tr>")
    return "\n".join(rows)


def _shown(value: Any) -> str:
    """A setting as a file has it, without digits that only rounding put there."""
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)
