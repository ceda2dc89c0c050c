"""lm-evaluation-harness, unchanged, against `atoll serve`: `--model local-completions` on tasks from a local file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest
import torch
from conversations import TOKENIZER

import atoll
from atoll.config import ModelConfig
from atoll.model import Model

pytest.importorskip("lm_eval")
SRC = Path(__file__).parents[2] / "src"
SHAPES = {
    "vocab_size": 400, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "kda_num_heads": 2, "kda_head_dim": 8,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 40,
    "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16,
}  # fmt: skip
ROWS = [
    {"question": "What is 2 + 3?", "choices": ["five", "the weather in Rome"], "gold": 0},
    {"question": "Be brief.", "choices": ["naïve", "a, b and c", "x"], "gold": 1},
    {"question": "Rain and sun", "choices": ["3", "6"], "gold": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = Model(ModelConfig(**SHAPES, initializer_range=0.2))
    return model.save_pretrained(tmp_path_factory.mktemp("evaluated") / "small", TOKENIZER)


@pytest.fixture(scope="module")
def url(folder):
    """The address of `atoll serve`, started as a user starts it."""
    command = [sys.executable, "-m", "atoll", "serve", str(folder), "--port", "0", "--name", "small", "--max-model-len", "1024"]
    variables = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    try:
        line = process.stdout.readline()  # pyright: ignore[reportOptionalMemberAccess]
        yield re.search(r"http://\S+?:\d+", line)[0]  # pyright: ignore[reportOptionalSubscript]
    finally:
        process.terminate()
        process.wait(20)


def task(tmp_path, **kind):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 1.0},
        **kind,
    }


def evaluate(url, folder, asked, **more):
    import lm_eval

    arguments = {"model": "small", "base_url": f"{url}/v1/completions", "tokenizer": str(folder), "tokenizer_backend": "huggingface"}
    arguments |= {"max_length": 1024, "batch_size": 2, "max_retries": 1, **more}
    return lm_eval.simple_evaluate(model="local-completions", model_args=arguments, tasks=[asked], bootstrap_iters=0, log_samples=True)


def test_choices_are_scored_as_a_forward_pass_scores_them(url, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    asked = task(tmp_path, task="picks", output_type="multiple_choice", doc_to_choice="choices", doc_to_target="gold")
    samples = evaluate(url, folder, asked)["samples"]["picks"]
    model = atoll.load(folder)
    assert len(samples) == len(ROWS)
    for sample in samples:
        row = sample["doc"]
        for choice, found in zip(row["choices"], sample["filtered_resps"], strict=True):
            context, whole = TOKENIZER.encode(row["question"]), TOKENIZER.encode(f"{row['question']} {choice}")
            with torch.no_grad():
                logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            rows = range(len(context) - 1, len(whole) - 1)
            expected = sum(float(logprobs[i, whole[i + 1]]) for i in rows)
            greedy = all(int(logprobs[i].argmax()) == whole[i + 1] for i in rows)
            assert float(found[0]) == pytest.approx(expected, abs=1e-3)
            assert found[1] in (greedy, str(greedy))


def test_texts_are_generated_up_to_a_stop(url, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    until = {"until": ["e", "\n\n"], "max_gen_toks": 12, "temperature": 0}
    asked = task(tmp_path, task="writes", output_type="generate_until", doc_to_target="{{gold}}", generation_kwargs=until)
    samples = evaluate(url, folder, asked)["samples"]["writes"]
    model = atoll.load(folder)
    for sample in samples:
        prompt = TOKENIZER.encode(sample["doc"]["question"])
        ids = model.generate(torch.tensor([prompt]), 12, temperature=0, stop_ids=(1,))[0, len(prompt) :].tolist()
        text = TOKENIZER.decode([i for i in ids if not TOKENIZER.is_special(i)])
        assert sample["resps"][0][0] == text.partition("e")[0].partition("\n\n")[0]
