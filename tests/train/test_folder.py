"""Run folders and checkpoints: every mistake or accident is one line, and nothing that was whole is lost."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import assert_same_run, micro_config, tensors

from atoll import train
from atoll.config import UserError, load_config
from atoll.train import checkpoint, folder

pytestmark = pytest.mark.usefixtures("standin_model")


def refused(action, *words: str) -> None:
    """The action ends in a one-line `UserError` with all `words`."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a finished run `run`."""
    import sys
    from types import SimpleNamespace

    import standin

    tmp = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "atoll.model", SimpleNamespace(Model=standin.Model))
        train.run(micro_config(tmp), tmp / "run")
    return tmp


def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def cut(out: Path, step: int) -> Path:
    """Make it look as if the run had died with `step` as its last checkpoint."""
    for other in checkpoint.steps(out / "checkpoints"):
        if other > step:
            shutil.rmtree(out / "checkpoints" / f"step-{other}")
    return out


def test_a_folder_that_holds_a_run_is_refused_without_resume(finished: Path, tmp_path: Path) -> None:
    out = copy(finished, tmp_path)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    refused(lambda: train.run(micro_config(tmp_path), out), str(out), "--resume")
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_a_folder_in_use_is_refused(finished: Path, tmp_path: Path) -> None:
    out = copy(finished, tmp_path)
    with open(out / ".lock", "w") as held:
        held.write("4711\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(lambda: train.run(None, out, resume=True), str(out), "in use by process 4711")
    train.run(None, out, resume=True)  # and free again once its holder is gone


def test_nothing_to_resume_is_refused(tmp_path: Path) -> None:
    refused(lambda: train.run(None, tmp_path / "none", resume=True), "resume", "no config.toml")
    assert not (tmp_path / "none").exists()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    refused(lambda: train.run(micro_config(tmp_path), tmp_path / "run"), "is a file")


def test_resume_refuses_other_settings_and_names_the_first(finished: Path, tmp_path: Path) -> None:
    out = copy(finished, tmp_path)
    kept = load_config(out / "config.toml")
    other = dataclasses.replace(kept, optim=dataclasses.replace(kept.optim, lr=0.5))
    refused(lambda: train.run(other, out, resume=True), "optim.lr = 0.5", str(kept.optim.lr))


def test_resume_refuses_text_that_changed(finished: Path, tmp_path: Path) -> None:
    out = cut(copy(finished, tmp_path), 8)
    text = Path(shutil.copytree(finished / "text", tmp_path / "text"))
    toml = (out / "config.toml").read_text().replace(str(finished / "text"), str(text))
    (out / "config.toml").write_text(toml)
    (text / "file00.txt").write_text("quite another text\n" * 50)
    refused(lambda: train.run(None, out, resume=True), "tokenizer", "step-8")


def test_resume_refuses_settings_edited_in_the_folder(finished: Path, tmp_path: Path) -> None:
    out = cut(copy(finished, tmp_path), 8)
    toml = (out / "config.toml").read_text()
    edited = toml.replace("\nmomentum = ", "\nmomentum = 0.5 # ")
    assert edited != toml
    (out / "config.toml").write_text(edited)
    refused(lambda: train.run(None, out, resume=True), "step-8", "other settings")


def damage(path: Path, how: str) -> None:
    file = next(path.glob("*.safetensors"))
    if how == "a flipped bit":
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    elif how == "cut short":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "a file lost":
        file.unlink()
    elif how == "no JSON":
        (path / "checkpoint.json").write_text("{")
    else:
        (path / "checkpoint.json").unlink()


@pytest.mark.parametrize("how", ["a flipped bit", "cut short", "a file lost", "no JSON", "no checkpoint.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    out = copy(finished, tmp_path)
    damage(out / "checkpoints" / "step-12", how)
    train.run(None, out, resume=True)
    text = capsys.readouterr().out
    assert sum("step-12: damaged" in line and "falling back" in line for line in text.splitlines()) == 1
    assert "after step 8 of 12" in text
    assert_same_run(finished / "run", out, 12)


def test_when_all_are_damaged_the_run_is_refused(finished: Path, tmp_path: Path) -> None:
    out = copy(finished, tmp_path)
    for step in checkpoint.steps(out / "checkpoints"):
        damage(out / "checkpoints" / f"step-{step}", "cut short")
    refused(lambda: train.run(None, out, resume=True), "every checkpoint is damaged")


@pytest.mark.parametrize("call", ["fsync", "write", "space"])
def test_a_full_disk_is_one_line_and_older_checkpoints_stay(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    out = cut(copy(finished, tmp_path), 8)
    before = {p: p.read_bytes() for p in (out / "checkpoints").rglob("*") if p.is_file()}

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "fsync":
        monkeypatch.setattr(checkpoint, "sync", lambda path: full() if ".writing-" in str(path) else None)
    elif call == "write":
        monkeypatch.setattr("safetensors.torch.save", full)  # inside DCP, which wraps the error
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    refused(lambda: train.run(None, out, resume=True), "step-12", "disk is full", f"--resume {out}")
    assert before == {p: p.read_bytes() for p in (out / "checkpoints").rglob("*") if p.is_file()}


def test_after_a_full_disk_the_run_goes_on(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = cut(copy(finished, tmp_path), 8)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        refused(lambda: train.run(None, out, resume=True), "disk is full")
    train.run(None, out, resume=True)
    assert_same_run(finished / "run", out, 12)


def test_keeps_the_newest_checkpoints_without_a_pickle(finished: Path) -> None:
    assert checkpoint.steps(finished / "run" / "checkpoints") == [8, 12]
    files = [p for p in (finished / "run").rglob("*") if p.is_file() and "tfevents" not in p.name]
    assert files
    for file in files:
        assert file.suffix in {".json", ".jsonl", ".toml", ".safetensors"} or file.name == ".lock"
        assert not file.read_bytes().startswith((b"\x80", b"PK"))


def test_a_checkpoint_holds_all_that_a_resume_needs(finished: Path) -> None:
    held = tensors(finished / "run", 12)
    meta = json.loads((finished / "run/checkpoints/step-12/checkpoint.json").read_text())
    assert {name.split(".")[0] for name in held} == {"model", "optim", "guard", "rng"}
    assert "model.block_sparse_moe.gate.e_score_correction_bias" in held
    assert {n.split(".")[1] for n in held if n.startswith("optim.")} == {"muon", "adamw"}
    assert meta["step"] == meta["steps"] == 12
    assert len(meta["tokenizer"]) == len(meta["settings"]) == 32


def test_a_file_name_that_leaves_the_folder_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    (tmp_path / "outside").write_text("x")
    (path / "checkpoint.json").write_text(json.dumps({"format": 1, "files": {"../outside": checkpoint._describe(tmp_path / "outside")}}))
    with pytest.raises(checkpoint.Damaged, match="outside it"):
        checkpoint.check(path)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"a": torch.zeros(2), "b": torch.zeros(3)}, {}, 1)
    refused(lambda: checkpoint.load(path, {"a": torch.zeros(2)}), "b is in the checkpoint but not")
    refused(lambda: checkpoint.load(path, {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}), "c is not in the checkpoint")
    refused(lambda: checkpoint.load(path, {"a": torch.zeros(2), "b": torch.zeros(4)}), "b has shape (3,) there and (4,) here")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_tensors_of_every_kind_come_back_over_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20)
    given = {f"x.{shape}": (torch.randn(shape) * 100).to(dtype) for shape in [(), (0,), (3,), (4, 5), (2, 1, 3)]}
    path = checkpoint.save(tmp_path, 3, given, {"note": "α"}, 1)
    assert len(list(path.glob("*.safetensors"))) > 1
    assert checkpoint.check(path)["note"] == "α"
    back = {name: torch.empty_like(t) for name, t in given.items()}
    checkpoint.load(path, back)
    assert all(torch.equal(given[name], back[name]) for name in given)


def test_metrics_are_cut_at_the_checkpoint(tmp_path: Path) -> None:
    lines = ['{"kind": "run"}', '{"step": 1}', '{"step": 2}', '{"kind": "sample", "step": 3}', '{"kind": "final"}', '{"step": 4']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    folder.cut_metrics(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == "\n".join(lines[:3]) + "\n"


def test_a_mistake_before_the_first_step_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def mistaken() -> None:
        with folder.taken(out, resume=False):
            (out / folder.TRIAL).mkdir()
            raise UserError("data.source = 'x': no such file")

    refused(mistaken, "data.source")
    assert not out.exists()


def test_a_folder_in_use_is_not_cleared_by_who_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with folder.taken(out, resume=False):

        def second() -> None:
            with folder.taken(out, resume=False):
                pass

        refused(second, "in use")
        assert (out / folder.LOCK).exists()
