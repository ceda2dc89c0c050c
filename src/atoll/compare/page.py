"""compare.html: the comparison as one file with everything in it, in the house's style."""

from __future__ import annotations

import shlex
from html import escape
from typing import Any

import numpy as np

from atoll.compare.pictures import PICTURES
from atoll.compare.plan import Plan
from atoll.compare.result import MEASURES, table_rows
from atoll.config import describe
from atoll.report.page import document, duration, figure_of, table, text

# Two-sided 95 per cent of Student's distribution by the number of seeds, from 1 (which tells nothing apart).
STUDENT = (float("inf"), 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.0)


def page(plan: Plan, result: dict[str, Any], drawn: dict[str, tuple[bytes, bytes]]) -> str:
    """The whole page; `drawn` by picture name, (light, dark) PNG."""
    shown = [p for p in PICTURES if p.name in drawn]
    parts = [_head(plan, result), _summary(result), "<h2>Pictures</h2>", *(figure_of(p, drawn) for p in shown), _runs(result), _how(plan)]
    return document(f"{plan.name}: {', '.join(v.key for v in plan.vary)}", parts)


def _head(plan: Plan, result: dict[str, Any]) -> str:
    keys = " and ".join(v.key for v in plan.vary)
    done = sum("loss" in row for row in result["runs"])
    facts = [
        ("runs", f"{done} of {len(result['runs'])}"),
        ("seeds", result["seeds"]),
        ("steps of each", f"{result['steps']:,}"),
        ("tokens of each", f"{result['tokens']:,}"),
        ("time in training, all", duration(sum(row.get("seconds") or 0 for row in result["runs"]))),
        ("parameters", f"{result['machine'].get('parameters', 0):,}"),
        ("hardware", result["machine"].get("device")),
        ("torch", result["machine"].get("torch")),
    ]
    items = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts if value not in ("", None, "0"))
    meanings = [f"<code>{text(v.key)}</code>: {text(_meaning(plan, v.key))}" for v in plan.vary]
    failed = [f"{row['value']}, seed {row['seed']}: {row['failed']}" for row in result["runs"] if "failed" in row]
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in failed)
    lead = f"{'; '.join(meanings)}. With one seed, all values see the same samples in the same order."
    title = f"{text(plan.name)}, by {text(keys)}"
    return f'<header>\n<h1>{title}</h1>\n<p class="lead">{lead}</p>\n<dl class="facts">{items}</dl>\n{notes}</header>'


def _meaning(plan: Plan, key: str) -> str:
    group: Any = plan.base
    *path, name = key.split(".")
    for part in path:
        group = group[int(part)] if isinstance(group, tuple) else getattr(group, part)
    return describe(type(group)).get(name, "")


def _summary(result: dict[str, Any]) -> str:
    head, rows = table_rows(result)
    best = _best(result)
    lines = table(head, rows)
    for value in best:
        lines = lines.replace(f"<tr><td>{text(value)}</td>", f"<tr class=own><td>{text(value)}</td>")
    meanings = "".join(f"<tr><td>{escape(name)}</td><td>{escape(meaning)}</td></tr>" for name, meaning in MEASURES.items())
    seeds = (
        "Mean ± standard deviation over seeds (n - 1). In bold the lowest held-out figure, and every value whose difference to it, "
        "paired by seed, may be zero (Student's 95 per cent)."
        if result["seeds"] > 1
        else "One seed: no spread is known, and a difference may be chance."
    )
    details = f"<details><summary>What is measured</summary>\n<table>{meanings}</table></details>"
    return f"<h2>What came out</h2>\n{lines}\n<p>{seeds}</p>\n{details}"


def _best(result: dict[str, Any]) -> list[str]:
    """The value with the lowest held-out figure, and those that the seeds do not tell from it."""
    by_value: dict[str, dict[int, float]] = {}
    for row in result["runs"]:
        if row.get("bits_per_byte") is not None:
            by_value.setdefault(row["value"], {})[row["seed"]] = row["bits_per_byte"]
    if not by_value or result["seeds"] < 2:
        return []
    top = min(by_value, key=lambda value: float(np.mean(list(by_value[value].values()))))
    found = []
    for value, seeds in by_value.items():
        pairs = np.array([x - by_value[top][seed] for seed, x in seeds.items() if seed in by_value[top]])
        error = pairs.std(ddof=1) / np.sqrt(len(pairs)) if len(pairs) > 1 else np.inf
        if value == top or pairs.mean() < STUDENT[min(len(pairs), len(STUDENT)) - 1] * error:
            found.append(value)
    return found


def _runs(result: dict[str, Any]) -> str:
    names = [name for name in MEASURES if any(row.get(name) is not None for row in result["runs"])]
    rows = [
        (row["value"], str(row["seed"]), *("" if row.get(name) is None else f"{row[name]:.5g}" for name in names), row["folder"])
        for row in result["runs"]
    ]
    body = table(("value", "seed", *names, "folder"), rows)
    return f"<details><summary>Every run, as numbers</summary>\n{body}</details>"


def _how(plan: Plan) -> str:
    varied = " ".join(shlex.quote(f"--vary={v.key}={','.join(v.values)}") for v in plan.vary)
    command = f"atoll compare {shlex.quote(plan.name)} {varied} --seeds {plan.seeds} --steps {plan.steps}"
    return f"<h2>The command</h2>\n<pre>{text(command)}</pre>\n<p>and the settings in <code>plan.json</code>.</p>"
