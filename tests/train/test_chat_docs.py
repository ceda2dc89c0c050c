"""docs/chat.md does what it says: its commands run in order, its output is what they print, its Python runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import atoll

TEXT = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.M | re.S) if name == kind]


def test_the_worked_example(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "atoll"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m atoll "$@"\n')
    command.chmod(0o755)
    source = str(Path(atoll.__file__).parents[1])
    env = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": source,
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=570)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    said = [run("bash", "-e", "-c", block) for block in blocks("sh")]
    assert len(said) == 3
    assert said[-1].endswith("\n" + blocks("")[0])
    assert "3 conversations and 1 held out" in said[-1]
    (python,) = blocks("python")
    assert "thinking '" in run(sys.executable, "-c", python)
