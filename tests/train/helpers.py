"""Micro settings, a small corpus, and what two runs must have in common."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import standin
from safetensors.torch import load_file

from atoll.config import Config, load_config

WORDS = ("def", "class", "return", "import", "self", "for", "in", "if", "else", "value", "index", "token", "state", "gate", "expert")


def write_corpus(folder: Path) -> Path:
    """Forty small files of pseudo-random words: enough for a tokenizer and two splits."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 12345
    for i in range(40):
        lines = []
        for _ in range(40):
            words = []
            for _ in range(6):
                number = (number * 1103515245 + 12345) % (1 << 31)
                words.append(WORDS[(number >> 16) % len(WORDS)])
            lines.append(" ".join(words))
        (folder / f"file{i:02}.txt").write_text("\n".join(lines) + "\n")
    return folder


MICRO: dict[str, Any] = {
    "model.vocab_size": 300,
    "model.hidden_size": 16,
    "model.num_hidden_layers": 3,
    "model.num_attention_heads": 2,
    "model.kda_num_heads": 2,
    "model.kda_head_dim": 8,
    "model.q_lora_rank": 8,
    "model.kv_lora_rank": 8,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 8,
    "model.intermediate_size": 24,
    "model.moe_intermediate_size": 8,
    "model.routed_expert_hidden_size": 8,
    "model.num_experts": 8,
    "model.num_experts_per_token": 2,
    "model.attn_res_block_size": 2,
    "stages.0.length": 32,
    "stages.0.batch": 8,
    "stages.1.length": 64,
    "stages.1.batch": 4,
    "data.heldout": 0.1,
    "train.steps": 12,
    "train.threads": 1,
    "train.save_every": 4,
    "train.validate_every": 5,
    "train.sample_every": 6,
    "train.validate_tokens": 256,
    "train.evaluate": False,
    "train.report": False,
    "train.export": False,
}


def micro_config(tmp: Path, **changes: Any) -> Config:
    """The smallest run with every part on: two stages, text and caches in `tmp`. `changes` use __ for the dot."""
    settings = {**MICRO, "data.source": str(write_corpus(tmp / "text")), "data.cache": str(tmp / "cache")}
    return load_config("tiny", {**settings, **{k.replace("__", "."): v for k, v in changes.items()}})


def use_standin() -> None:
    """Let `atoll.model.Model` be the stand-in, in this process."""
    sys.modules["atoll.model"] = SimpleNamespace(Model=standin.Model)  # pyright: ignore[reportArgumentType]


CLOCKED = ("tokens_per_second", "peak_memory", "save_stall", "save_seconds")


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what the clock and the host decide."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCKED} for line in lines]


def tensors(out: Path, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint."""
    found: dict[str, Any] = {}
    for file in (out / "checkpoints" / f"step-{step}").glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_run(a: Path, b: Path, step: int) -> None:
    """Losses, validations, samples, probes, and every tensor of the last checkpoint are the same, bit for bit."""
    assert metrics(a) == metrics(b)
    assert {p.name: p.read_text() for p in (a / "probes").iterdir()} == {p.name: p.read_text() for p in (b / "probes").iterdir()}
    mine, theirs = tensors(a, step), tensors(b, step)
    assert mine.keys() == theirs.keys()
    assert len(mine) > 10
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype
        assert mine[name].numpy(force=True).tobytes() == theirs[name].numpy(force=True).tobytes(), name
