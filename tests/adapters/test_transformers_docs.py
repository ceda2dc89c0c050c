"""docs/transformers.md is run, block by block."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from adapters.remote_models import build

from atoll.config import ModelConfig
from atoll.data.tokenizer import train_tokenizer
from atoll.hub import export
from atoll.model import load

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


def test_every_block_runs(tmp_path, monkeypatch, capsys):
    words = train_tokenizer(["def f(x): return x", "def g(x): return f(f(x))"] * 20, ModelConfig(vocab_size=320))
    export.save(build(torch.float32), tmp_path / "runs" / "tiny" / "model", tokenizer=words)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 5
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    first, trained, merged = (load(f"runs/{name}") for name in ("tiny", "mine", "merged"))
    ids = torch.tensor(names["rows"][0]["input_ids"])[None]
    for changed in (trained, merged):
        assert float((changed(ids).logits - first(ids).logits).detach().abs().max()) > 1e-4
    prompt = names["prompt"]["input_ids"]
    expected = first.generate(prompt, max_new_tokens=32, temperature=0, stop_ids=[first.config.eos_token_id])
    assert torch.equal(names["text"], expected)
    assert "def parse" in capsys.readouterr().out
