"""The pages do what they say: their Python runs, the files they name are there, their commands are commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from atoll import arguments, cli
from atoll.compare import words as compare_words
from atoll.config import load_config, presets

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize(("page", "block"), [("README.md", 0), ("docs/vision.md", 0), ("docs/vision.md", 1), ("docs/inference.md", 0)])
def test_python_runs(page, block):
    exec(compile(blocks(ROOT / page, "python")[block], page, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose)]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    named = re.findall(r"`((?:tests|benchmarks|docs|src|ops|nn|hub|data|infer|train|evals|optim)/[\w./*]*)(?:::\w+)?`", text)
    for name in (name for name in set(named) if "NAME" not in name):
        rooms = (ROOT, ROOT / "src" / "atoll")
        if not any(list(room.glob(name.rstrip("/"))) for room in rooms):
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_of_a_page_have_their_verbs_flags_and_settings(page, monkeypatch):
    monkeypatch.setattr(arguments, "call", arguments._known_flags)
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("atoll ")]
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "train":
            args = arguments.parse_train([word for word in words[1:] if word != "--help"])
            load_config(args.config if args.config in presets() else "tiny", args.overrides)
        elif words[0] == "compare":  # read as the verb reads them; it would go on to train
            asked = compare_words.parse([word for word in words[1:] if word != "--help"])
            for vary in asked.vary:
                for value in vary.values:
                    load_config(
                        asked.train.config if asked.train.config in presets() else "tiny", {**asked.train.overrides, vary.key: value}
                    )
        else:
            cli._dispatch(words)
