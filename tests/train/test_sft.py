"""Fine-tuning on conversations: it learns what assistants say, from given weights, and nothing from anyone else."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conversations import CALCULATOR, CALLING, PLAIN
from helpers import MICRO, assert_same_run, metrics, tensors, write_corpus
from safetensors.torch import load_file, save_file

import atoll
from atoll import arguments, cli, train
from atoll.config import Config, UserError, load_config
from atoll.data import open_corpus
from atoll.data.loader import IGNORED, make_batch
from atoll.data.packing import open_sampler
from atoll.data.tokenizer import load_tokenizer
from atoll.infer.sample import reply
from atoll.model import next_tokens
from atoll.train import budget, initial
from atoll.train.screen import Screen
from atoll.train.step import accumulate, micro_batches
from atoll.train.trainer import Trainer

ADDING = [
    {"role": "user", "content": "Add 12 and 30."},
    {
        "role": "assistant",
        "reasoning": "A tool adds.",
        "content": "",
        "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}],
    },
    {"role": "tool", "tool_call_id": "x", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]
NAMED = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A small model."}]
COLOUR = [{"role": "user", "content": "A colour?"}, {"role": "assistant", "reasoning": "Any.", "content": "Blue, like the sea."}]
OTHER = [{"role": "user", "content": "What else?"}, {"role": "assistant", "content": "Nothing."}]  # its hash holds it out


def write_chats(path: Path, conversations: list[list[dict]]) -> str:
    path.write_text("".join(json.dumps({"messages": m, "tools": [CALCULATOR] if m is ADDING else None}) + "\n" for m in conversations))
    return str(path)


BASE = {
    **MICRO,
    "model.hidden_size": 48,
    "model.kda_head_dim": 16,
    "model.v_head_dim": 16,
    "model.intermediate_size": 64,
    "model.vocab_size": 320,
    "stages.1.length": 512,
    "stages.1.batch": 2,
    "train.steps": 6,
    "train.export": True,
    "train.save_every": 100,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a run, trained a little on text that spells the conversations' words, and chats.jsonl."""
    tmp = tmp_path_factory.mktemp("base")
    folder = write_corpus(tmp / "text")
    for i, messages in enumerate([ADDING, NAMED, COLOUR, PLAIN, CALLING]):
        (folder / f"words{i}.txt").write_text(json.dumps(messages) * 5)
    config = load_config("tiny", {**BASE, "data.source": str(folder), "data.cache": str(tmp / "cache")})
    train.run(config, tmp / "run")
    write_chats(tmp / "chats.jsonl", [ADDING, NAMED, COLOUR, OTHER])
    return tmp


def chat_config(base: Path, **changes) -> Config:
    """What `atoll train RUN --data.kind chat --data.source FILE` gives, with `changes` (__ for the dot)."""
    words = ["--data.kind", "chat", "--data.source", str(base / "chats.jsonl")]
    for key, value in changes.items():
        words += [f"--{key.replace('__', '.')}", str(value)]
    return arguments.plan_run(arguments.parse_train([str(base / "run"), *words]))[0]


# ---------------------------------------------------------------- it learns


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    """A run that knows ADDING, NAMED and COLOUR by heart; OTHER is held out."""
    out = base / "tuned"
    changes = {
        "optim__lr": 0.01,
        "optim__adam_lr": 0.01,
        "train__epochs": 150,
        "data__heldout": 1e-9,
        "stages__0__length": 1024,
        "stages__0__batch": 1,
    }
    config = chat_config(base, **changes, train__validate_every=40, train__sample_every=80, train__evaluate=True, optim__weight_decay=0)
    train.run(config, out)
    return out


def test_three_conversations_are_learnt_by_heart(tuned: Path) -> None:
    model, tokenizer = atoll.load(tuned), load_tokenizer(tuned / "model")
    calls = 0
    for messages in (ADDING, NAMED, COLOUR):
        tools = [CALCULATOR] if messages is ADDING else None
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            got = reply(model, tokenizer, messages[:k], tools, tokens=300, temperature=0)
            assert (got.finished, got.malformed) == (True, False)
            assert (got.content, got.thinking) == (message["content"], message.get("reasoning", ""))
            for call, asked in zip(got.tool_calls, message.get("tool_calls", []), strict=True):
                assert (call.name, call.arguments) == (asked["function"]["name"], asked["function"]["arguments"])
                calls += 1
    assert calls == 1


def test_what_a_run_writes_down(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = metrics(tuned)
    steps = [line for line in lines if "loss" in line]
    assert all(0 < line["trained_share"] < 1 for line in steps)
    assert steps[-1]["loss"] < 0.1 < steps[0]["loss"]
    validations = [line for line in lines if line.get("kind") == "validation"]
    assert all(line["nats_per_token"] > 0 and line["bits_per_byte"] > 0 for line in validations)
    final = next(line for line in lines if line.get("kind") == "final")
    assert final["files"] == 1
    assert {"bits_per_byte", "nats_per_token", "gzip", "xz"} <= final.keys()
    assert any("<|open|>message" in line["text"] for line in lines if line.get("kind") == "sample")
    assert (tuned / "model" / "chat_template.jinja").is_file()
    stops = json.loads((tuned / "model" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [1, load_tokenizer(tuned / "model").special["<|end_of_msg|>"]]
    assert cli.main(["eval", str(tuned)]) == 0
    assert "1 held-out conversation, what the assistants say" in capsys.readouterr().out


def test_the_command_answers(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", str(tuned), "A colour?", "--chat", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "(thinks) Any.\nBlue, like the sea.\n"
    assert cli.main(["sample", str(tuned), "A colour?", "--chat", "--temperature", "0", "--tokens", "5"]) == 0
    assert "(cut off after 5 tokens)" in capsys.readouterr().out
    assert cli.main(["sample", str(tuned), "A colour?", "A colour?", "--chat", "--temperature", "0", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [a["message"] for a in answers] == [{"role": "assistant", "content": "Blue, like the sea.", "reasoning": "Any."}] * 2
    assert [(a["finish"], a["malformed"]) for a in answers] == [("stop", False)] * 2
    assert cli.main(["sample", str(tuned), "A colour?", "A colour?", "--chat", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "\n----\n".join(["> A colour?\n(thinks) Any.\nBlue, like the sea."] * 2) + "\n"


def test_a_second_fine_tuning_keeps_the_rates_of_the_first(tuned: Path) -> None:
    first, second = load_config(tuned / "config.toml"), initial.settings(str(tuned), chat=True)
    assert second.optim == first.optim
    assert (second.train.init, second.train.steps) == (str((tuned / "model").resolve()), None)


# ---------------------------------------------------------------- from whom


def packed(base: Path, length: int = 1024):
    config = chat_config(base, stages__0__length=length, train__dtype="float64", train__steps=2)
    corpus = open_corpus(config.data, config.model)
    return config, corpus, open_sampler(corpus.train, length, 0)


def test_only_an_assistants_tokens_are_targets_and_each_is(base: Path) -> None:
    config, corpus, sampler = packed(base)
    trainer = Trainer(config, corpus, base / "nowhere", Screen())
    rows = int(sampler.epoch_rows)
    result = trainer.train_step(trainer.stages[0])
    _, targets = accumulate(trainer.model, micro_batches(sampler, 0, rows, 1))
    assert targets == int(corpus.train.trained.sum())
    assert result.targets == sum(int((b.labels != IGNORED).sum()) for b in micro_batches(trainer.samplers[0], 0, 2, None))


def test_no_gradient_comes_from_what_others_say(base: Path) -> None:
    """The loss of a batch does not move with any logit that predicts a token of a user, a tool, a system or the padding."""
    _, _, sampler = packed(base)
    model = atoll.load(base / "run", dtype=torch.float64)
    batch = make_batch(sampler, 0, 1)
    scores = model(batch.input_ids, cu_seqlens=batch.cu_seqlens).logits.detach().requires_grad_()
    targets = next_tokens(batch.labels, batch.cu_seqlens)
    loss = F.cross_entropy(scores[0], targets[0], ignore_index=IGNORED)
    own = model(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens).loss
    torch.testing.assert_close(loss, own, rtol=1e-12, atol=0)
    loss.backward()
    moved = scores.grad[0].abs().sum(-1) > 0
    trained = torch.from_numpy(sampler.trained(0))
    assert moved[:-1].tolist() == trained[1:].tolist()
    assert 0 < int(moved.sum()) < len(moved) // 2


def test_packed_conversations_give_the_gradient_of_each_alone(base: Path) -> None:
    _, corpus, sampler = packed(base)
    model = atoll.load(base / "run", dtype=torch.float64)
    model.train()
    rows = int(sampler.epoch_rows)
    loss, count = accumulate(model, [make_batch(sampler, 0, rows)])
    together = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    data, total = corpus.train, 0.0
    for begin, end in itertools.pairwise(data.offsets.tolist()):
        ids = torch.from_numpy(data.tokens[begin:end].astype("int64"))[None]
        labels = ids.masked_fill(~torch.from_numpy(data.trained[begin:end])[None], IGNORED)
        out = model(ids, labels=labels)
        (out.loss * out.num_targets / count).backward()
        total += float((out.loss * out.num_targets / count).detach())
    assert float(loss.detach()) == pytest.approx(total, rel=1e-12)
    alone = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert alone.keys() == together.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-8, atol=1e-12)


# ---------------------------------------------------------------- from given weights


def test_the_settings_of_a_run_started_from_a_run(base: Path) -> None:
    before, after = load_config(base / "run" / "config.toml"), chat_config(base)
    assert after.model == dataclasses.replace(before.model, full_attn_layers=before.model.full_attention())
    assert (after.optim.lr, after.optim.router_lr) == (before.optim.lr / 10, before.optim.router_lr / 10)
    assert (after.balance.kind, after.train.epochs, after.train.minutes, after.train.steps) == ("none", 3.0, None, None)
    assert [(s.length, s.batch, s.share) for s in after.stages] == [(512, 2, 1.0)]
    assert after.data.tokenizer == str((base / "run" / "model" / "tokenizer.json").resolve())
    hub = initial.settings(str(base / "run" / "model"), chat=True)
    assert hub == initial.settings(str(base / "run"), chat=True)
    text = initial.settings(str(base / "run"), chat=False)
    assert (text.balance.kind, text.train.minutes, text.data.source) == ("quantile", 5.0, before.data.source)


def test_a_run_begins_with_the_weights_it_is_given(base: Path) -> None:
    config = initial.adopt(chat_config(base, train__steps=2))
    corpus = open_corpus(config.data, config.model)
    trainer = Trainer(config, corpus, base / "nowhere", Screen())
    given = atoll.load(base / "run").state_dict()
    assert all(torch.equal(tensor, given[name]) for name, tensor in trainer.model.state_dict().items())
    assert corpus.tokenizer.fingerprint == load_tokenizer(base / "run" / "model").fingerprint
    biases = {n: b.clone() for n, b in trainer.model.named_buffers() if n.endswith("e_score_correction_bias")}
    trainer.train_step(trainer.stages[0])
    assert biases
    assert all(torch.equal(dict(trainer.model.named_buffers())[n], b) for n, b in biases.items())
    assert not all(torch.equal(tensor, given[name]) for name, tensor in trainer.model.state_dict().items())


def test_the_balancing_bias_moves_where_it_is_asked_to(base: Path) -> None:
    config = initial.adopt(chat_config(base, train__steps=2, balance__kind="quantile"))
    trainer = Trainer(config, open_corpus(config.data, config.model), base / "nowhere", Screen())
    biases = {n: b.clone() for n, b in trainer.model.named_buffers() if n.endswith("e_score_correction_bias")}
    trainer.train_step(trainer.stages[0])
    assert not any(torch.equal(dict(trainer.model.named_buffers())[n], b) for n, b in biases.items())


def test_a_hub_folder_without_a_run_and_a_preset_by_init(base: Path, tmp_path: Path) -> None:
    hub = Path(shutil.copytree(base / "run" / "model", tmp_path / "hub"))
    config = initial.settings(str(hub), chat=True)
    assert config.optim.lr == pytest.approx(Config().optim.lr / 10)
    named = load_config("tiny", {"train.init": str(hub), "data.kind": "chat", "data.source": str(base / "chats.jsonl")})
    assert initial.adopt(named).model == config.model
    assert initial.adopt(named).data.tokenizer == str(hub / "tokenizer.json")


def test_a_stopped_run_goes_on_without_the_weights_it_began_with(base: Path, tmp_path: Path) -> None:
    """To the same bits as one that was never stopped."""
    start = Path(shutil.copytree(base / "run", tmp_path / "run"))
    shutil.copy(base / "chats.jsonl", tmp_path)
    config = chat_config(tmp_path, train__steps=6, train__save_every=3, train__keep=3, stages__0__batch=1, train__export=False)
    train.run(config, tmp_path / "a")
    b = Path(shutil.copytree(tmp_path / "a", tmp_path / "b"))
    shutil.rmtree(b / "checkpoints" / "step-6")
    for file in (start / "model").glob("*.safetensors"):
        file.unlink()
    train.run(None, b, resume=True)
    assert_same_run(tmp_path / "a", b, 6)
    assert "guard.mean" in tensors(b, 6)


# ---------------------------------------------------------------- how long


def test_epochs_become_steps_and_the_shorter_of_two_limits_holds(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = initial.adopt(chat_config(base, train__epochs=2.5, stages__0__batch=1))
    corpus = open_corpus(config.data, config.model)
    rows = open_sampler(corpus.train, 512, 0).epoch_rows

    def steps(**changes) -> int:
        return budget.freeze(initial.adopt(chat_config(base, **changes)), corpus, tmp_path, Screen(), time.monotonic()).train.steps

    assert steps(train__epochs=2.5, stages__0__batch=1) == -(-5 * rows // 2)
    assert steps(train__epochs=2.5, stages__0__batch=2) == -(-5 * rows // 4)
    assert steps(train__epochs=2.5, train__steps=7) == 7
    monkeypatch.setattr(budget, "_measure", lambda *args: budget.Costs(step=1.0, end=0.0))
    assert steps(train__epochs=1000, stages__0__batch=1, train__minutes=1) == 57
    assert steps(train__epochs=4, stages__0__batch=1, train__minutes=1) == 4 * rows


# ---------------------------------------------------------------- mistakes


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *said: str) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(s in error for s in said), error


def change_one(path: Path) -> None:
    tensors = load_file(path)
    tensors["language_model.lm_head.weight"][0, 0] = float("nan")
    save_file(tensors, path)


def test_mistakes_are_one_line_and_leave_no_folder(base: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, chats = str(base / "run"), str(base / "chats.jsonl")
    chat = ["--data.kind", "chat", "--data.source", chats]
    refused(capsys, ["train", run, "--data.kind", "chat"], "data.source = 'stdlib'", "data.kind")
    refused(capsys, ["train", run, *chat, "--model.hidden_size", "64"], "--model.hidden_size", "its weights")
    refused(capsys, ["train", str(tmp_path), *chat], "train.init", "no config.json there")
    refused(capsys, ["train", "tiny", "--train.init", "none-such", *chat], "train.init = 'none-such'")
    refused(capsys, ["train", run, *chat, "--data.tokenizer", str(base / "no.json")], "no.json")
    refused(capsys, ["train", run, *chat, "--stages.0.length", "8"], "length = 8", "raise it")
    steps = ["--train.epochs", "none", "--train.steps", "1"]  # nothing needs the rows before the first step
    refused(capsys, ["train", run, *chat, *steps, "--stages.0.length", "8"], "length = 8", "raise it")
    shutil.copytree(base / "run" / "model", tmp_path / "holed")
    change_one(tmp_path / "holed" / "model.safetensors")
    refused(capsys, ["train", "holed", *chat, *steps], "holds NaN or infinity")
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    refused(capsys, ["train", run, "--data.kind", "chat", "--data.source", "bad.jsonl"], "bad.jsonl:1: messages[0].content")
    (tmp_path / "stopped").mkdir()
    shutil.copy(base / "run" / "config.toml", tmp_path / "stopped")
    refused(capsys, ["train", "stopped", *chat], "without model/", "--resume stopped")
    assert not list((tmp_path / "runs").iterdir())


def test_another_tokenizer_than_the_weights_own_is_refused(base: Path, tmp_path: Path) -> None:
    content = json.loads((base / "run" / "model" / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"not the tokenizer of train\.init"):
        initial.adopt(chat_config(base, data__tokenizer=tmp_path / "tokenizer.json"))
