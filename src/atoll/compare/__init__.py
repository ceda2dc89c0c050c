"""One setting, several values, several seeds: each trained as an ordinary run, and one report over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def compare(words: list[str]) -> tuple[dict[str, Any], Path, bool]:
    """What `atoll compare` does: read its words, train what is not trained yet, write the report.

    Returns the result (as in compare.json), its folder, and whether it was asked for as JSON. Raises `UserError`.
    """
    from atoll.compare import plan, result, runs
    from atoll.compare import words as reading

    asked = reading.parse(words)
    prepared = plan.prepare(asked)
    runs.train_all(prepared, runs.Progress(prepared, to_stderr=asked.json))
    return result.write(prepared), prepared.out, asked.json
