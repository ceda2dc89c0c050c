"""Counters, gauges and histograms in Prometheus' text format (version 0.0.4). Used from the event loop's thread alone."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
Labels = tuple[tuple[str, str], ...]


class Counter:
    """A sum that only grows, for every set of labels."""

    kind = "counter"

    def __init__(self) -> None:
        self.values: dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add to the sum under `labels`."""
        key = tuple(sorted(labels.items()))
        self.values[key] = self.values.get(key, 0) + amount

    def samples(self) -> list[tuple[str, Labels, float]]:
        """(suffix, labels, value) of every series."""
        return [("", key, value) for key, value in sorted(self.values.items())] or [("", (), 0)]


class Histogram:
    """How often a value was at most each bound."""

    kind = "histogram"

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count `value`."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self) -> list[tuple[str, Labels, float]]:
        """The cumulated buckets, then sum and count."""
        out: list[tuple[str, Labels, float]] = []
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            out.append(("_bucket", (("le", bound),), total))
        return [*out, ("_sum", (), self.sum), ("_count", (), total)]


class Metrics:
    """The server's own measures, and at reading time the engine's."""

    def __init__(self, engine: Callable[[], Mapping[str, object]]) -> None:
        """`engine` gives the engine's numbers by name; what is no number is passed over."""
        self._engine = engine
        self._known: dict[str, tuple[str, Counter | Histogram]] = {}
        self.requests = self._counter("requests_total", "Requests answered, by endpoint and HTTP status.")
        self.finished = self._counter("sequences_total", "Sequences ended, by reason.")
        self.prompt_tokens = self._counter("prompt_tokens_total", "Tokens of prompts.")
        self.cached_tokens = self._counter("prompt_tokens_cached_total", "Tokens of prompts read from the prefix cache.")
        self.new_tokens = self._counter("generation_tokens_total", "Tokens sampled.")
        self.history = self._counter(
            "history_messages_total",
            "Assistant messages sent back: exact (their sampled ids took their place), edited or unknown (breaks of the exact prefix).",
        )
        self.malformed = self._counter("malformed_answers_total", "Answers that broke the chat format somewhere.")
        self.first_token = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.between = self._histogram("time_per_output_token_seconds", "Mean time between a sequence's tokens.")
        self.whole = self._histogram("request_seconds", "From a request's arrival to the end of its answer.")

    def _counter(self, name: str, meaning: str) -> Counter:
        made = Counter()
        self._known[name] = (meaning, made)
        return made

    def _histogram(self, name: str, meaning: str) -> Histogram:
        made = Histogram()
        self._known[name] = (meaning, made)
        return made

    def text(self, **gauges: float) -> str:
        """The page. `gauges` are values of this moment, by name."""
        lines: list[str] = []
        for name, (meaning, measure) in self._known.items():
            lines += [f"# HELP atoll_{name} {meaning}", f"# TYPE atoll_{name} {measure.kind}"]
            lines += [_line(f"atoll_{name}{suffix}", labels, value) for suffix, labels, value in measure.samples()]
        now = gauges | {f"engine_{key}": value for key, value in self._engine().items() if isinstance(value, (int, float))}
        for name, value in now.items():
            lines += [f"# TYPE atoll_{name} gauge", _line(f"atoll_{name}", (), float(value))]
        return "\n".join(lines) + "\n"


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    number = str(int(value)) if float(value).is_integer() else repr(float(value))
    return f"{name}{{{inside}}} {number}" if inside else f"{name} {number}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
