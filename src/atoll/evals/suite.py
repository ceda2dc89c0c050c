"""`atoll eval RUN --suite …`: generated tasks by length and depth, scored by exact match under teacher forcing.

An answer counts when the model's likeliest token is right at every token of it, the answer's earlier tokens given. That is what greedy
generation would give, in one forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config import UserError
from atoll.data.tasks import DEEP, FORMED, SUITES, Draw, Sample, Tasks
from atoll.evals.teacher import forced

KEY = 3  # of the draws: no training row has it
LENGTHS = {"recall": (64, 256), "state": (16, 64, 256), "needle": (1024, 2048, 4096), "ruler": (1024, 2048, 4096)}
LEGEND = "prompt: tokens before the last answer; cut: prompts shortened to the length; tokens: share of answer tokens that are right"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Score:
    """One cell: a task at a length, with its needle at a depth (None: the evidence is everywhere)."""

    task: str
    length: int  # asked for
    depth: float | None  # asked for
    placed: float | None  # mean depth of the needles as they lie
    prompt_tokens: float  # mean tokens before the last answer
    truncated: int  # samples whose prompt had to be cut
    samples: int
    questions: int
    exact: float  # share of questions with every token right
    tokens: float  # share of answer tokens right
    chance: float  # of `exact`, by blind guessing among the task's answers


def grade(samples: Sequence[Sample], right: Sequence[np.ndarray]) -> dict[str, float]:
    """{"exact", "tokens", "chance", "questions"} of samples, given for each which of its answer tokens (in order) are right."""
    exact, chances = [], []
    for sample, found in zip(samples, right, strict=True):
        mask = np.zeros(len(sample.ids), dtype=bool)
        mask[sample.answers()] = found
        exact += [bool(mask[q.start : q.stop].all()) for q in sample.questions]
        chances += [q.chance for q in sample.questions]
    return {
        "exact": float(np.mean(exact)),
        "tokens": float(np.concatenate(list(right)).mean()),
        "chance": float(np.mean(chances)),
        "questions": len(exact),
    }


def measure(
    model: Any,
    tasks: Tasks,
    names: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> list[Score]:
    """Every task at every length, at every depth where it has one. A function of the model and the arguments."""
    cells = [(n, length, d) for n in names for length in lengths for d in (depths if n.partition(":")[0] in DEEP else (None,))]
    work, done, scores = max(1, sum(c[1] for c in cells)), 0, []
    for name, length, depth in cells:
        draws = [Draw(KEY, seed, i, length, round((depth or 0) * 1e6), *name.encode()) for i in range(samples)]
        made = [tasks.make(name, draw, length, depth or 0.0) for draw in draws]
        right = forced(model, [s.ids for s in made], [s.answers() for s in made])
        placed = None if depth is None else float(np.mean([s.depth for s in made if s.depth is not None]))
        prompt = float(np.mean([s.prompt_tokens for s in made]))
        found = grade(made, right)
        cut = sum(s.truncated for s in made)
        rates = {key: found[key] for key in ("exact", "tokens", "chance")}
        scores.append(Score(name, length, depth, placed, prompt, cut, samples, int(found["questions"]), **rates))
        done += length
        if progress is not None:
            progress(name, done / work)
    return scores


# ---------------------------------------------------------------- a run


def evaluate(
    folder: Path,
    suite: str,
    lengths: str | None = None,
    depths: str | None = None,
    samples: int = 16,
    seed: int = 0,
    form: str = "text",
    haystack: str = "text",
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The scores of `suite` for the model in `folder` (a run's, or one in the hub's layout), ready for JSON. Raises `UserError`."""
    import torch

    from atoll.hub.load import load_tokenizer
    from atoll.model import load

    sizes = _numbers("--lengths", lengths, int, 16, 1 << 31) or LENGTHS[suite]
    places = _numbers("--depths", depths, float, 0.0, 1.0) or DEPTHS
    if samples < 1:
        raise UserError(f"--samples {samples}: 1 or more is expected")
    on_card = torch.cuda.is_available()
    model = load(folder, device="cuda", dtype=torch.bfloat16) if on_card else load(folder)
    tokenizer = load_tokenizer(folder)
    names = [f"{n}:raw" if n in FORMED and form == "raw" else n for n in SUITES[suite]]
    needs_text = haystack == "text" and any(n.partition(":")[0] in DEEP for n in names)
    text = heldout_text(folder, say) if needs_text else None
    tasks, begun = Tasks(tokenizer, model.config.bos_token_id, text), time.monotonic()

    def progress(name: str, share: float) -> None:
        left = (time.monotonic() - begun) * (1 - share) / share
        say(f"{name}: {share:.0%}, {left:,.0f} s left")

    scores = measure(model, tasks, names, sizes, places, samples, seed, progress)
    lies_in = ("held-out text" if text is not None else "noise") if any(s.depth is not None for s in scores) else None
    about = {"suite": suite, "model": str(folder), "haystack": lies_in, "seed": seed}
    if text is not None:
        about["haystack_tokens"] = text.num_tokens
    return {**about, "scores": [asdict(s) for s in scores]}


def heldout_text(folder: Path, say: Callable[[str], None]) -> Any:
    """The held-out split of the text that the run in or above `folder` was trained on, or None with a word why."""
    from atoll.evals.heldout import run_corpus

    run = next((f for f in (folder, folder.parent) if (f / "config.toml").is_file()), None)
    try:
        if run is not None and (held := run_corpus(run)[1].heldout).trained is None:
            return held
        say("needles lie in noise: " + ("no run's folder" if run is None else "no held-out text in this run"))
    except UserError as error:
        say(f"needles lie in noise: {error}")
    return None


def _numbers(flag: str, text: str | None, kind: Callable[[str], Any], low: float, high: float) -> tuple[Any, ...]:
    try:
        found = tuple(kind(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        raise UserError(f"{flag} {text!r}: numbers with commas between them are expected") from None
    wrong = next((n for n in found if not low <= n <= high), None)
    if wrong is not None:
        raise UserError(f"{flag} {wrong}: {low} to {high} is expected")
    return found


def render(result: dict[str, Any]) -> str:
    """The scores as an aligned table."""
    where = f"; needles lie in {result['haystack']}" if result["haystack"] else ""
    if result.get("haystack_tokens"):
        where += f" of {result['haystack_tokens']:,} tokens, read round and round where a prompt is longer"
    head = f"{result['suite']}, seed {result['seed']}: exact match under teacher forcing{where}"
    columns = ("task", "length", "prompt", "cut", "depth", "placed", "exact", "chance", "tokens", "questions")
    rows: list[tuple[str, ...]] = [columns]
    for s in result["scores"]:
        depth, placed = ("all", "") if s["depth"] is None else (f"{s['depth']:g}", f"{s['placed']:.3f}")
        cut = f"{s['truncated']}/{s['samples']}"
        figures = (f"{s['exact']:.1%}", _chance(s["chance"]), f"{s['tokens']:.1%}", f"{s['questions']:,}")
        rows.append((s["task"], f"{s['length']:,}", f"{s['prompt_tokens']:,.0f}", cut, depth, placed, *figures))
    widths = [max(len(r[i]) for r in rows) for i in range(len(columns))]
    lines = ["  ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows]
    return "\n".join([head, *lines, LEGEND])


def _chance(p: float) -> str:
    return f"{p:.1%}" if p >= 1e-3 else f"{100 * p:.0e}%" if p else "0%"
