"""Runs with pictures: they learn from them, resume to the bit, give the same step however it is cut, and show what was read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import config_for, png, write_album
from helpers import assert_same_run, metrics
from ranks import on_ranks

import atoll
from atoll import cli, train
from atoll.config import Config, UserError
from atoll.data import open_corpus
from atoll.data.images.balance import step_rows
from atoll.data.images.samples import Sample
from atoll.data.loader import Batch, batch_of
from atoll.data.packing import open_sampler
from atoll.evals.pictures import Answer, accuracy, answers, choose, edits
from atoll.hub.load import load_tokenizer
from atoll.model import Model
from atoll.parallel.ranks import Ranks
from atoll.report import write
from atoll.train import setup
from atoll.train.callbacks import Callback
from atoll.train.guard import Guard
from atoll.train.screen import Screen
from atoll.train.segments import Segments
from atoll.train.step import accumulate, micro_batches, row_batches, train_step


@pytest.fixture(scope="module")
def album(tmp_path_factory) -> Path:
    return write_album(tmp_path_factory.mktemp("pictures") / "album", 24)


def album_config(tmp_path: Path, album: Path, **changes) -> Config:
    return config_for(tmp_path, data__source=str(album), **changes)


def quiet() -> Screen:
    return Screen(silent=True)


# ---------------------------------------------------------------- a step


def test_a_pictures_gradient_reaches_the_patch_embedding_and_the_split_changes_none(tmp_path, album):
    config = album_config(tmp_path, album, train__dtype="float64", model__num_experts=4)
    corpus = open_corpus(config.data, config.model)
    rows, grads, routing = open_sampler(corpus.train, 64, 0), [], None
    for size in (None, 1, 2):
        model, _ = setup.build(config)
        model.train()
        batches = micro_batches(rows, 0, 4, size)
        routes = []
        if routing is None:
            out = model(batches[0].input_ids, cu_seqlens=batches[0].cu_seqlens, pixel_values=batches[0].pixel_values,
                        grid_thws=batches[0].grid_thws)  # fmt: skip
            routing = [ids.view(4, 64, -1) for ids in out.routing]
        at = 0
        for batch in batches:
            count = batch.input_ids.shape[1] // 64
            routes.append([ids[at : at + count].flatten(0, 1) for ids in routing])
            at += count
        model.gradient_checkpointing = size == 2
        loss, targets = accumulate(model, batches, routes)
        grads.append((loss, targets, {n: p.grad for n, p in model.named_parameters()}))
    embedding = grads[0][2]["vision_tower.patch_embed.proj.weight"]
    assert float(embedding.abs().max()) > 1e-8
    for loss, targets, found in grads[1:]:
        assert targets == grads[0][1] > 50
        torch.testing.assert_close(loss, grads[0][0], rtol=1e-12, atol=0)
        for name, grad in found.items():
            torch.testing.assert_close(grad, grads[0][2][name], rtol=1e-9, atol=1e-12)


def test_a_step_of_text_is_the_same_to_the_bit_with_a_tower_and_without(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(6):
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(f"word{i * j % 17}" for j in range(200)))
    losses = []
    for vision in ({}, {"model__vision": "none"}):
        changes = {"data__kind": "text", "data__source": str(tmp_path / "text"), **vision}
        config = config_for(tmp_path, **changes)
        corpus = open_corpus(config.data, config.model)
        model, optimizer = setup.build(config_for(tmp_path, **{**changes, "model__vision": "none"}))
        if not vision:
            whole = Model(config.model)
            whole.load_state_dict({**whole.state_dict(), **model.state_dict()})
            model, optimizer = whole, type(optimizer)(whole, config.optim, config.model, None)
        rows, guard = open_sampler(corpus.train, 64, 0), Guard(None)
        losses.append([train_step(model, optimizer, guard, micro_batches(rows, 4 * i, 4, None), 1.0).read()[:2] for i in range(3)])
    assert [loss for loss, _ in losses[0]] == [loss for loss, _ in losses[1]]


def test_pictures_in_segments_are_refused_in_one_line(tmp_path, album):
    config = album_config(tmp_path, album)
    corpus = open_corpus(config.data, config.model)
    model, _ = setup.build(config)
    with pytest.raises(UserError, match="rows with images are computed whole"):
        accumulate(model, micro_batches(open_sampler(corpus.train, 64, 0), 0, 1, None), segments=Segments(64, 16))


def shared_step(folder: str, source: str) -> list:
    """Gradients of one step of all processes, and the grids this one saw."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    config = config_for(Path(folder), data__source=source, train__dtype="float64", parallel__data_shard=size)
    corpus = open_corpus(config.data, config.model)
    rows, ranks = open_sampler(corpus.train, 64, 0), Ranks(rank, size)
    model, optimizer = setup.build(config, ranks=ranks)
    batches = row_batches(rows, step_rows(rows, 4, 4, rank, size), 1)
    result = train_step(model, optimizer, Guard(None), batches, 0.5, ranks)
    return [result.read()[:2], result.targets, sorted(g for b in batches for g in map(tuple, b.grid_thws.tolist()))]


def test_two_processes_see_what_one_does_and_step_as_one_does(tmp_path, album):
    config = album_config(tmp_path, album, train__dtype="float64")
    corpus = open_corpus(config.data, config.model)
    rows = open_sampler(corpus.train, 64, 0)
    model, optimizer = setup.build(config)
    batches = micro_batches(rows, 4, 4, 1)
    whole = train_step(model, optimizer, Guard(None), batches, 0.5)
    found = on_ranks(2, shared_step, str(tmp_path), str(album), timeout=120)
    assert sorted(found[0][2] + found[1][2]) == sorted(g for b in batches for g in map(tuple, b.grid_thws.tolist()))
    for rank in found:
        assert rank[1] == whole.targets
        assert rank[0] == pytest.approx(whole.read()[:2], rel=1e-9)


def lonely_step(folder: str, source: str) -> tuple:
    """A step in which the first process has all the pictures."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    config = config_for(Path(folder), data__source=source, train__dtype="float64", parallel__data_shard=size)
    ranks, (told, bare) = Ranks(rank, size), lonely_batches(config)
    model, optimizer = setup.build(config, ranks=ranks)
    result = train_step(model, optimizer, Guard(None), [bare if rank else told, told if rank == 0 else bare], 0.5, ranks)
    return *result.read()[:2], float(sum(t.double().abs().sum() for t in map(whole, optimizer.weights().values())))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def lonely_batches(config: Config):
    """A batch with pictures, and one of text alone."""
    rows = open_sampler(open_corpus(config.data, config.model).train, 64, 0)
    told = batch_of(rows, [0])
    ids = torch.arange(100, 164)[None]
    return told, Batch(ids, ids.clone(), torch.tensor([0, 64]), 64)


def test_a_process_without_pictures_keeps_step_with_those_that_have_some(tmp_path, album):
    config = album_config(tmp_path, album, train__dtype="float64")
    told, bare = lonely_batches(config)
    model, optimizer = setup.build(config)
    alone = train_step(model, optimizer, Guard(None), [told, told, bare, bare], 0.5)
    weights = float(sum(t.double().abs().sum() for t in optimizer.weights().values()))
    for rank in on_ranks(2, lonely_step, str(tmp_path), str(album), timeout=120):
        assert rank == pytest.approx((*alone.read()[:2], weights), rel=1e-9)


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A whole run on rendered pictures, to the report."""
    tmp = tmp_path_factory.mktemp("run")
    config = config_for(tmp, train__evaluate=True, train__export=True, train__report=True)
    train.run(config, tmp / "run", screen=quiet())
    return tmp / "run"


def test_a_run_measures_and_shows_what_it_read(run):
    lines = metrics(run)
    final = next(line for line in lines if line.get("kind") == "final")
    assert {"digit_accuracy", "character_accuracy", "digits", "characters", "bits_per_byte"} <= final.keys()
    assert final["digits"] > 300
    assert any("digit_accuracy" in line for line in lines if line.get("kind") == "validation")
    shown = json.loads((run / "pictures.json").read_text())["pictures"]
    assert {p["kind"] for p in shown} == {"digit", "word"}
    assert len(shown) == 24
    page = (run / "report.html").read_text()
    assert page.count('alt="the word') == 12
    assert "letters of unseen words" in page
    assert not re.search(r"nan|None", page.partition("<h2>Learning")[0])


def test_the_page_escapes_what_a_model_and_a_file_say(run, tmp_path):
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    evil = [
        {"png": "aGk=", "kind": "", "truth": '"><script>alert(1)</script>', "said": "<img src=x onerror=1>"},
        {"png": '"><script>', "kind": "", "truth": "unshown", "said": ""},
        {"png": 5},
        "text",
    ]
    (tmp_path / "pictures.json").write_text(json.dumps({"pictures": evil}))
    page = write(tmp_path).read_text()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "unshown" not in page
    for damaged in ("{", "[1]", '{"pictures": 3}'):
        (tmp_path / "pictures.json").write_text(damaged)
        assert "Held-out pictures</h2>" not in write(tmp_path).read_text()


@pytest.mark.slow
def test_eval_says_the_same_again(run, capsys):
    assert cli.main(["eval", str(run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    final = next(line for line in metrics(run) if line.get("kind") == "final")
    for key in ("digit_accuracy", "character_accuracy"):
        assert said[key] == pytest.approx(final[key], abs=0.02)
    assert said["bits_per_byte"] == pytest.approx(final["bits_per_byte"], rel=1e-4)
    assert cli.main(["eval", str(run)]) == 0
    assert "letters of unseen words" in capsys.readouterr().out


class StopAfter(Callback):
    """Ends a run as a signal does, after step `last`."""

    def __init__(self, last: int) -> None:
        self.last = last

    def metrics(self, trainer, line):
        trainer.stopping = trainer.stopping or line.get("step") == self.last


@pytest.mark.parametrize("source", ["album", pytest.param("rendered", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, album, source):
    short = {"train__evaluate": False, "train__report": False, "train__export": False}
    config = config_for(tmp_path, data__source="rendered" if source == "rendered" else str(album), **short)
    train.run(config, tmp_path / "whole", screen=quiet())
    train.run(config, tmp_path / "cut", screen=quiet(), watch=StopAfter(4))
    assert not (tmp_path / "cut" / "checkpoints" / "step-6").exists()
    train.run(None, tmp_path / "cut", resume=True, screen=quiet())
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 6)


# ---------------------------------------------------------------- asking


def test_sample_sees_images(run, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(png(60, 30))
    (tmp_path / "b.png").write_bytes(png(28, 28))
    base = ["sample", str(run), "--tokens", "12", "--temperature", "0"]
    assert cli.main([*base, "what is this?", "--image", str(tmp_path / "a.png")]) == 0
    assert capsys.readouterr().out.startswith("what is this?")
    both = ["--image", str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert cli.main([*base, "<image> and <image>: what is this?", *both]) == 0
    assert cli.main([*base, *both]) == 0
    assert cli.main([*base, "what is this?", "--chat", *both]) == 0
    capsys.readouterr()
    for words, says in (
        (["x <image>", *both], "1 <image> and 2 images"),
        (["x", "--image", str(tmp_path / "gone.png")], "gone.png: cannot be read (No such file"),
        (["x", "--image", str(run / "config.toml")], "config.toml: not an image"),
    ):
        assert cli.main([*base, *words]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


def test_what_is_sampled_depends_on_the_image(run):
    from atoll.infer.sample import continue_text, read_pictures

    model, tokenizer = atoll.load(run), load_tokenizer(run / "model")
    with torch.no_grad():
        for p in model.mm_projector.parameters():
            p.mul_(30)  # a run of six steps hardly looks
    said = set()
    for width in (28, 57, 85, 200):
        Path(run / "x.png").write_bytes(png(width, 28))
        said.add(continue_text(model, tokenizer, "what is this?", 16, 1.0, pictures=read_pictures([str(run / "x.png")], model.config)))
    (run / "x.png").unlink()
    assert len(said) > 1


def test_answers_are_those_of_each_picture_alone(run):
    config = config_for(run.parent)
    corpus = open_corpus(config.data, config.model)
    model = atoll.load(run, dtype=torch.float64)
    asked = choose(corpus.heldout.pictures.samples, 6)
    together = answers(model, asked, corpus.tokenizer)
    for sample, answer in zip(asked, together, strict=True):
        assert answers(model, [sample], corpus.tokenizer)[0].said[:6] == answer.said[:6]
        assert answer.truth == sample.truth


def test_letters_are_counted_by_edits():
    assert [edits(*pair) for pair in (("", "abc"), ("abc", "abc"), ("axc", "abc"), ("ac", "abc"), ("xabc", "abc"))] == [3, 0, 1, 1, 1]
    assert accuracy([]) == {}
    empty = np.zeros(0, np.int64)
    word, digit = (Sample(empty, empty, (), kind) for kind in ("word", "digit"))
    truth = "the word abcd"
    said = [Answer(word, answer, truth) for answer in ("the word abxd", "the word " + 40 * "z", "abcd", "")]
    found = accuracy([*said, *(Answer(digit, answer, "the digit 7") for answer in ("the digit 7", "7"))])
    assert found == {"digit_accuracy": 0.5, "digits": 2, "character_accuracy": 1 - (1 + 4 + 0 + 4) / 16, "characters": 16}
