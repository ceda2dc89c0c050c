"""From files to token files: whole, the same every time, kept between runs and built again when damaged."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from atoll.config import DataConfig, ModelConfig, UserError
from atoll.data import Corpus, documents, open_corpus

MODEL = ModelConfig(vocab_size=400)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    for i in range(40):
        where = root / "sub" if i % 3 else root
        (where / f"f{i}.py").write_text(f"def f{i}(x):\n    return x * {i}\n\n# caf\u00e9 \u4e2d\n" * (1 + i))
    return DataConfig(source=str(root), heldout=0.2, cache=str(tmp_path / "cache"))


def texts(corpus: Corpus, heldout: bool) -> dict[str, str]:
    token_set = corpus.heldout if heldout else corpus.train
    return {name: corpus.tokenizer.decode(ids[1:-1]) for name, ids, _ in token_set.documents()}


def test_documents_are_the_files_framed_by_bos_and_eos(config):
    corpus = open_corpus(config, MODEL)
    files = {p.relative_to(config.source).as_posix(): p.read_text() for p in Path(config.source).rglob("*.py")}
    assert texts(corpus, False) | texts(corpus, True) == files
    for token_set in (corpus.train, corpus.heldout):
        assert token_set.tokens.dtype == np.uint16
        assert token_set.num_tokens == sum(len(ids) for _, ids, _ in token_set.documents())
        assert token_set.num_bytes == sum(len(files[name].encode()) for name in token_set.names)
        for name, ids, size in token_set.documents():
            assert (ids[0], ids[-1]) == (MODEL.bos_token_id, MODEL.eos_token_id)
            assert not np.isin(ids[1:-1], [0, 1, 2]).any()
            assert token_set.token_bytes[ids].sum() == size == len(files[name].encode())
    assert corpus.heldout_files == [(name, files[name].encode()) for name in corpus.heldout.names]
    assert (corpus.undecodable, corpus.has_tests) == (0, None)


def test_a_large_vocabulary_is_kept_in_32_bits(config):
    corpus = open_corpus(config, dataclasses.replace(MODEL, vocab_size=70_000))
    assert corpus.train.tokens.dtype == np.uint32
    assert texts(corpus, True) == {n: raw.decode() for n, raw in corpus.heldout_files}


def snapshot(config: DataConfig) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in Path(config.cache).rglob("*") if p.is_file()}


def test_a_second_opening_reads_the_cache_and_a_fresh_one_gives_the_same_bytes(config, monkeypatch):
    first = open_corpus(config, MODEL)
    kept = snapshot(config)
    assert not [name for name in kept if name.endswith(".tmp")]
    shutil.rmtree(config.cache)
    open_corpus(config, MODEL)
    assert snapshot(config) == kept
    monkeypatch.setattr(documents, "encode_documents", None)  # would fail if anything were tokenised again
    steps: list[str] = []
    again = open_corpus(config, MODEL, steps.append)
    assert len(steps) == 1
    assert steps[0].startswith("reading")
    assert isinstance(again.train.tokens, np.memmap)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert np.array_equal(again.train.tokens, first.train.tokens)


@pytest.mark.parametrize("harm", ["cut", "flip", "remove", "empty"])
def test_a_damaged_cache_is_built_again(config, harm):
    open_corpus(config, MODEL)
    kept = snapshot(config)
    for path in [p for p in Path(config.cache).rglob("*") if p.is_file()]:
        raw = path.read_bytes()
        if harm == "remove":
            path.unlink()
        else:
            path.write_bytes({"cut": raw[: len(raw) // 2], "flip": bytes([raw[0] ^ 1]) + raw[1:], "empty": b""}[harm])
        corpus = open_corpus(config, MODEL)
        assert snapshot(config) == kept, path.name
        assert texts(corpus, True) == {n: raw.decode() for n, raw in corpus.heldout_files}


def test_a_changed_file_is_seen(config):
    before = open_corpus(config, MODEL)
    name = before.train.names[0]
    (Path(config.source) / name).write_text("changed = True\n")
    after = open_corpus(config, MODEL)
    assert texts(after, False)[name] == "changed = True\n"
    assert np.array_equal(open_corpus(config, MODEL).train.tokens, after.train.tokens)


def test_another_tokenizer_can_be_given(config, tmp_path):
    first = open_corpus(config, MODEL)
    first.tokenizer.save(tmp_path / "t.json")
    given = open_corpus(dataclasses.replace(config, tokenizer=str(tmp_path / "t.json")), dataclasses.replace(MODEL, vocab_size=500))
    assert given.tokenizer.vocab_size == first.tokenizer.vocab_size
    assert len(given.train.token_bytes) == 500
    with pytest.raises(UserError, match=r"t.json.*over model.vocab_size = 300"):
        open_corpus(dataclasses.replace(config, tokenizer=str(tmp_path / "t.json")), dataclasses.replace(MODEL, vocab_size=300))


def test_what_was_left_out_or_repaired_is_said(config):
    (Path(config.source) / "latin.py").write_bytes(b"# caf\xe9\n" * 3)
    (Path(config.source) / "image.py").write_bytes(b"\0")
    corpus = open_corpus(dataclasses.replace(config, heldout=1e-9), MODEL)
    assert corpus.undecodable == 3
    assert [any(word in note for note in corpus.notes) for word in ("3 bytes are not UTF-8", "1 binary", "no held-out document")] == [
        True
    ] * 3
    assert len(corpus.heldout) == 1


def test_a_full_disk_gets_one_line_and_leaves_nothing_half_written(config, monkeypatch):
    def replace(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("atoll.data.cache.os.replace", replace)
    with pytest.raises(UserError, match=r"data.cache: .*No space left on device") as caught:
        open_corpus(config, MODEL)
    assert "\n" not in str(caught.value)
    assert snapshot(config) == {}


def test_a_cache_that_is_a_file_gets_one_line(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.cache"):
        open_corpus(dataclasses.replace(config, cache=str(tmp_path / "file")), MODEL)
