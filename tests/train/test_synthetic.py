"""Training on generated tasks: rows by global index, answers alone learnt, and what a small model learns from them in seconds."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from helpers import MICRO, assert_same_run, micro_config, write_corpus

from atoll import cli
from atoll.config import UserError, load_config
from atoll.data import make_batch, open_corpus
from atoll.data.packing import open_sampler
from atoll.data.synthetic import TaskSampler, heldout_sample
from atoll.data.tasks import NAMES, Tasks
from atoll.evals.suite import measure
from atoll.model import Model
from atoll.optim import ModelOptimizer
from atoll.train import run

TASKS = {"data__kind": "synthetic", "data__tasks": "mqar,copy,parity"}


def opened(tmp_path, length: int = 256, seed: int = 0, **changes):
    config = micro_config(tmp_path, **{**TASKS, **changes})
    corpus = open_corpus(config.data, config.model)
    return corpus, open_sampler(corpus.train, length, seed)


def test_a_row_is_a_function_of_its_index_at_any_batch_split(tmp_path):
    corpus, sampler = opened(tmp_path)
    again = open_sampler(corpus.train, 256, 0)
    assert isinstance(sampler, TaskSampler)
    whole = make_batch(sampler, 3, 8)
    parts = [make_batch(again, start, 2) for start in (9, 7, 5, 3)][::-1]
    assert torch.equal(whole.input_ids, torch.cat([p.input_ids for p in parts], 1))
    assert torch.equal(whole.labels, torch.cat([p.labels for p in parts], 1))
    other = make_batch(open_sampler(corpus.train, 256, 1), 3, 8)
    assert not torch.equal(whole.input_ids, other.input_ids)


def test_answers_alone_are_targets_and_segments_start_with_bos(tmp_path):
    corpus, sampler = opened(tmp_path)
    for index in range(30):
        batch = make_batch(sampler, index, 1)
        ids, labels = batch.input_ids[0].numpy(), batch.labels[0].numpy()
        pads = ids == corpus.train.pad
        assert (ids[batch.cu_seqlens[:-1].numpy()] == np.where(pads[batch.cu_seqlens[:-1].numpy()], corpus.train.pad, 0)).all()
        assert (labels[pads] == -100).all()
        assert 0 < (labels != -100).sum() < len(ids) / 2 + 8
        assert (labels[labels != -100] == ids[labels != -100]).all()
        assert batch.num_bytes == (labels != -100).sum()  # every symbol is one byte
    sizes = [len(make_batch(sampler, i, 1).cu_seqlens) for i in range(200)]
    assert len(set(sizes)) >= 4  # whole rows, halves, quarters, …


def test_a_mixture_has_rows_of_text_whose_every_token_is_learnt(tmp_path):
    corpus, sampler = opened(tmp_path, length=64, data__text_share="0.5")
    plain = open_sampler(dataclasses.replace(corpus.train, tasks=None), 64, 0)
    text = [i for i in range(200) if np.array_equal(sampler[i][0], plain[i][0])]
    assert 70 < len(text) < 130
    assert all(sampler.trained(i).all() for i in text)
    assert corpus.heldout.trained is None  # the text's own held-out split


def test_held_out_samples_are_no_training_rows(tmp_path):
    corpus, sampler = opened(tmp_path, length=512)
    tasks = Tasks(corpus.tokenizer, 0)
    held = {heldout_sample(tasks, ("mqar",), i).ids.tobytes() for i in range(50)}
    seen = {sampler[i][0].tobytes() for i in range(100)}
    assert len(held) == 50
    assert not held & seen
    assert len(corpus.heldout) == 64
    assert corpus.heldout.num_bytes == sum(len(content) for _, content in corpus.heldout_files)


def test_training_on_recall_beats_chance_by_far(tmp_path):
    """Two layers, one of each attention, two hundred steps of seven pairs."""
    shapes = {k: v for k, v in MICRO.items() if k.startswith("model.")}
    wide = {"model.hidden_size": 64, "model.num_hidden_layers": 2, "model.kda_head_dim": 16, "model.kv_lora_rank": 16}
    few = {"model.num_experts": 4, "model.moe_intermediate_size": 32, "model.routed_expert_hidden_size": 32, "model.intermediate_size": 64}
    config = load_config("tiny", {**shapes, **wide, **few, "optim.lr": 0.01, "optim.adam_lr": 0.01})
    corpus, sampler = opened(tmp_path, length=32, data__tasks="mqar")
    torch.manual_seed(0)
    model = Model(config.model, config.balance)
    tasks = Tasks(corpus.tokenizer, 0)
    (before,) = measure(model, tasks, ("mqar",), (32,), (), 64)
    assert before.exact < before.chance + 4 * (before.chance / before.questions) ** 0.5
    optimizer = ModelOptimizer(model, config.optim, config.model)
    steps = 250
    for step in range(steps):
        batch = make_batch(sampler, 16 * step, 16)
        loss = model(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens).loss
        loss.backward()
        optimizer.clip()
        optimizer.step(min(1.0, (step + 1) / 10) * (1 - step / steps))
        optimizer.zero_grad()
        model.balance_step()
    (after,) = measure(model, tasks, ("mqar",), (32,), (), 64)
    assert after.chance == before.chance < 0.02
    assert after.exact > 0.5


def test_a_run_on_tasks_ends_is_measured_and_resumes_to_the_bit(tmp_path, capsys):
    changes = {**TASKS, "train__steps": 6, "train__evaluate": True, "train__export": True, "train__report": True}
    whole = run(micro_config(tmp_path, **changes), tmp_path / "whole")
    out = capsys.readouterr().out
    assert "nats a token of the answers to 64 held-out tasks" in out
    assert "on held-out answers" in out
    assert "tasks: mqar, copy, parity; 0% of the rows are text" in out
    assert (whole / "report.html").is_file()

    class Stop(Exception):
        pass

    from atoll.train.callbacks.base import Callback

    class Halt(Callback):
        every = 1

        def act(self, trainer):
            if trainer.step == 5:
                raise Stop

    with pytest.raises(Stop):
        run(micro_config(tmp_path, **{**changes, "train__report": False}), tmp_path / "cut", watch=Halt())
    run(None, tmp_path / "cut", resume=True)
    assert_same_run(whole, tmp_path / "cut", 6)
    capsys.readouterr()
    assert cli.main(["eval", str(whole), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["kind"], plain["files"]) == ("synthetic", 64)
    assert sum(r["nats"] for r in plain["by_position"]) == pytest.approx(plain["nats"], rel=1e-4)
    assert cli.main(["eval", str(whole)]) == 0
    said = capsys.readouterr().out
    assert "64 held-out tasks, the answers: " in said
    assert "tokens before" in said
    assert cli.main(["eval", str(whole), "--suite", "recall", "--lengths", "32", "--samples", "2"]) == 0
    assert "mqar" in capsys.readouterr().out


def test_needles_lie_in_the_held_out_text_of_a_run_on_text(tmp_path, capsys):
    whole = run(micro_config(tmp_path, train__steps=2, train__export=True), tmp_path / "run")
    capsys.readouterr()
    assert cli.main(["eval", str(whole), "--suite", "needle", "--lengths", "500", "--samples", "1", "--depths", "0.5"]) == 0
    assert "needles lie in held-out text of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.kind": "synthetic"}, "data.tasks"),
        ({"data.tasks": "mqar"}, "go together"),
        ({"data.text_share": "0.5"}, "data.text_share"),
        ({"data.kind": "synthetic", "data.tasks": "mqar", "data.text_share": "1"}, "a share from 0 up to 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        load_config("tiny", changes)


def test_names_and_lengths_are_refused_before_the_first_step(tmp_path):
    write_corpus(tmp_path / "text")
    with pytest.raises(UserError, match="did you mean 'mqar'"):
        opened(tmp_path, data__tasks="mqra")
    with pytest.raises(UserError, match="needle_single: length = 8"):
        opened(tmp_path, length=8, data__tasks="needle_single")
    with pytest.raises(UserError, match="length = 64: too short for the task 'needle_multi'"):
        opened(tmp_path, length=64, data__tasks="needle_multi")
    assert len(NAMES) == 20


def test_english_needles_are_rows_with_their_answers_in_the_text(tmp_path):
    corpus, sampler = opened(tmp_path, length=2048, data__tasks="needle_single,variables,common_words")
    shares = set()
    for index in range(16):
        ids, starts = sampler[index]
        mask = sampler.trained(index)
        shares.add(len([s for s in starts if ids[s] == 0]))
        for begin, end in itertools.pairwise([*starts.tolist(), len(ids)]):
            answers = [a.strip(" ,") for a in corpus.tokenizer.decode(ids[begin:end][mask[begin:end]]).split()]
            prompt = corpus.tokenizer.decode(ids[begin:end][~mask[begin:end]])
            assert all(answer in prompt for answer in answers)
            assert bool(answers) == (ids[begin] == 0)
    assert shares == {1, 2, 4}
    hay = corpus.tokenizer.decode(sampler[0][0])
    assert "return" in hay  # of the run's own text
    assert "return" in corpus.tokenizer.decode(corpus.train.tokens)
