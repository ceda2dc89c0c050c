"""What a run prints: lines that stay, and one live line that is rewritten on a terminal and printed now and then elsewhere."""

from __future__ import annotations

import io
import shutil
import sys
import time
from typing import TextIO

EVERY = 10.0  # seconds between live lines when the output is not a terminal


class Screen:
    """Standard output, with at most one live line at its end. `silent`: says nothing, as all processes of a run but the first."""

    def __init__(self, stream: TextIO | None = None, every: float = EVERY, silent: bool = False) -> None:
        self.stream = io.StringIO() if silent else stream or sys.stdout
        self.silent = silent
        self.every = every
        self.terminal = self.stream.isatty()
        self._open = False
        self._last = -float("inf")

    def say(self, text: str) -> None:
        """Print text that stays."""
        self.close()
        self._write(text + "\n")

    def live(self, text: str, force: bool = False) -> None:
        """Rewrite the live line; off a terminal, print it when the last is `every` seconds old or `force` is set."""
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write("\r\x1b[K" + text[:width])
            self._open = True
        elif force or time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            self._write(text + "\n")

    def close(self) -> None:
        """End the live line, so that what it said stays readable."""
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        if self.silent:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            pass  # nobody reads any more: training goes on


def duration(seconds: float) -> str:
    """`75` → "1:15", `4000` → "1:06:40"."""
    s = max(0, round(seconds))
    return f"{s // 3600}:{s % 3600 // 60:02}:{s % 60:02}" if s >= 3600 else f"{s // 60}:{s % 60:02}"
