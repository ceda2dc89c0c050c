"""Folder to folder: the same bytes as loading and saving, with no more than one tensor in memory, and whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from hub.golden import GOLDEN
from hub.models import FLAT, SMALL, build
from torch.utils._python_dispatch import TorchDispatchMode

import atoll
from atoll.config import ModelConfig, UserError
from atoll.data.tokenizer import train_tokenizer
from atoll.hub import export
from atoll.hub.convert import convert, verify
from atoll.hub.load import read_config
from atoll.model import Model, load


def skeleton(folder: Path, router_weights: str | None = None) -> Model:
    return Model(read_config(folder, router_weights), device="meta")


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("change", [{}, {"a_log_storage": 16}, {"residual": "full"}, FLAT], ids=["k3", "padded", "full", "flat"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_the_same_bytes_as_loading_and_saving(tmp_path, change, dtype):
    export.save(build(**change), tmp_path / "a", shard_bytes=20_000)
    convert(skeleton(tmp_path / "a"), tmp_path / "a", tmp_path / "b", dtype=dtype, shard_bytes=30_000)
    export.save(load(tmp_path / "a"), tmp_path / "c", dtype=dtype, shard_bytes=30_000)
    assert files(tmp_path / "b") == files(tmp_path / "c")
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize("folder", ["k3_tiny", "kimi_linear_tiny"])
def test_a_released_folder_comes_out_in_normal_form_once_and_for_all(tmp_path, folder):
    """Converted, and converted again: the second time nothing changes. The weights compute the same."""
    convert(skeleton(GOLDEN / folder), GOLDEN / folder, tmp_path / "a")
    convert(skeleton(tmp_path / "a"), tmp_path / "a", tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    theirs, ours = load(GOLDEN / folder), load(tmp_path / "a")
    assert all(torch.equal(p, q) for p, q in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True))


def test_a_chosen_router_convention_is_written_down(tmp_path):
    source = GOLDEN / "kimi_linear_tiny"
    assert load(source).config.router_weights == "unbiased"
    convert(skeleton(source, "biased"), source, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["router_weights"] == "biased"
    assert load(tmp_path / "a").config.router_weights == "biased"
    assert load(tmp_path / "a", router_weights="unbiased").config.router_weights == "unbiased"
    assert load("kimi-linear-tiny", device="meta", router_weights="biased").config.router_weights == "biased"
    with pytest.raises(UserError, match="router_weights = 'both'"):
        load(source, router_weights="both")


def test_the_tokenizer_and_its_files_go_along(tmp_path):
    words = train_tokenizer(["some text"], ModelConfig(**{**SMALL, "vocab_size": 300}))
    export.save(build(vocab_size=300), tmp_path / "a", words)
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "a" / "README.md").write_text("not a model's file")
    (tmp_path / "a" / "tokenizer_config.json").write_text('{"added_by": "hand"}')
    convert(skeleton(tmp_path / "a"), tmp_path / "a", tmp_path / "b")
    before, after = files(tmp_path / "a"), files(tmp_path / "b")
    assert set(before) - set(after) == {"README.md"}
    assert {n for n in after if after[n] != before[n]} == set()


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    export.save(build(), tmp_path / "a")  # 64 tokens
    train_tokenizer(["some text"], ModelConfig(**{**SMALL, "vocab_size": 300})).save(tmp_path / "a" / "tokenizer.json")
    for call in (
        lambda: convert(skeleton(tmp_path / "a"), tmp_path / "a", tmp_path / "b"),
        lambda: verify(skeleton(tmp_path / "a"), tmp_path / "a"),
    ):
        with pytest.raises(UserError, match=r"tokenizer.json: \d+ tokens, over model.vocab_size = 64"):
            call()
    assert not (tmp_path / "b").exists()


def test_the_folder_itself_and_foreign_folders_are_refused(tmp_path):
    export.save(build(), tmp_path / "a")
    before = files(tmp_path / "a")
    with pytest.raises(UserError, match="is the folder that is read"):
        convert(skeleton(tmp_path / "a"), tmp_path / "a", tmp_path / "b" / ".." / "a")
    assert files(tmp_path / "a") == before
    release = tmp_path / "release"  # nothing in it but what an export holds, and not ours
    release.mkdir()
    for name in ("config.json", "model.safetensors"):
        (release / name).write_bytes((GOLDEN / "k3_tiny" / name).read_bytes())
    before = files(release)
    with pytest.raises(UserError, match="which Atoll did not write"):
        convert(skeleton(tmp_path / "a"), tmp_path / "a", release)
    assert files(release) == before
    assert not list(tmp_path.glob(".*"))


# ---------------------------------------------------------------- memory


class Held(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, and the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu":
            storage = out.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.known:
                self.known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.drop, key, size)
        return out

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_memory_is_bounded_by_the_largest_tensor(tmp_path, dtype):
    m = build(num_hidden_layers=12)
    export.save(m, tmp_path / "a", shard_bytes=20_000)
    total = (sum(p.numel() for p in m.parameters())) * 4
    largest = max(s.num_bytes for s in export.slots(m))
    with Held() as held:
        convert(skeleton(tmp_path / "a"), tmp_path / "a", tmp_path / "b", dtype=dtype, shard_bytes=2 * total)
    assert (tmp_path / "b" / "model.safetensors").is_file()  # one file of all the bytes
    assert 0 < held.most <= 4 * largest < total / 10
    with Held() as held:
        verify(skeleton(tmp_path / "a"), tmp_path / "a")
    assert 0 < held.most <= 3 * largest
    with Held() as held:
        load(tmp_path / "a")
    assert held.most >= total  # the counter does count


def test_progress_tells_bytes(tmp_path):
    export.save(build(), tmp_path / "a", shard_bytes=20_000)
    seen: list[tuple[int, int]] = []
    convert(skeleton(tmp_path / "a"), tmp_path / "a", tmp_path / "b", progress=lambda done, total: seen.append((done, total)))
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})
    assert {t for _, t in seen} == {seen[-1][0]}


# ---------------------------------------------------------------- interrupted


def test_an_interrupt_leaves_what_was_there(tmp_path):
    export.save(build(), tmp_path / "a")
    export.save(build(num_hidden_layers=2), tmp_path / "b")
    before = files(tmp_path / "b")

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(skeleton(tmp_path / "a"), tmp_path / "a", tmp_path / "b", progress=stop)
    with pytest.raises(KeyboardInterrupt):
        convert(skeleton(tmp_path / "a"), tmp_path / "a", tmp_path / "c", progress=stop)
    assert files(tmp_path / "b") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


SLOW = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
import sys, time
from atoll import cli
from atoll.hub import convert
fill = convert._filled
def slow(slot, f):
    print("one", flush=True)
    time.sleep(0.05)
    return fill(slot, f)
convert._filled = slow
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_leaves_no_half_written_folder(tmp_path, number):
    export.save(build(), tmp_path / "a")
    env = {**os.environ, "PYTHONPATH": str(Path(atoll.__file__).parents[1])}
    words = [sys.executable, "-c", SLOW, "export", str(tmp_path / "a"), str(tmp_path / "b")]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline() == "one\n"
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".b.")]
        process.send_signal(number)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            process.stdout.readline()
        assert process.stderr is not None
        assert process.returncode == 130
        assert process.stderr.read().endswith("atoll: interrupted\n")  # after what was said of the progress
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
