"""The split depends on names (or record texts) alone: not on the machine, the order, or what else is there."""

import json
from pathlib import Path

import pytest

from atoll.config import DataConfig
from atoll.data.sources import open_source
from atoll.data.split import survey, unit_hash


def write_files(root: Path, count: int, text: str = "some words in file {i}\n") -> Path:
    root.mkdir(exist_ok=True)
    for i in range(count):
        (root / f"f{i:03d}.txt").write_text(text.format(i=i) * 20)
    return root


def sides(source: Path, **settings) -> tuple[set[str], set[str]]:
    config = DataConfig(source=str(source), **settings)
    opened = open_source(config)
    found = survey(opened, config)
    train, heldout = ({d.name for d in found.documents(opened, side)} for side in (False, True))
    assert {name for name, _ in found.heldout_files} == heldout
    return train, heldout


def test_the_hash_is_the_same_on_every_machine():
    assert unit_hash("argparse.py") == 0.33931810356806646
    assert unit_hash("argparse.py") != unit_hash("argparse.py", "tokenizer:")


def test_files_stay_on_their_side_when_others_come_and_when_their_text_changes(tmp_path):
    root = write_files(tmp_path / "c", 60)
    train, heldout = sides(root, heldout=0.2)
    assert 4 <= len(heldout) <= 24
    write_files(root, 90, "other text {i}\n")
    more_train, more_heldout = sides(root, heldout=0.2)
    assert train <= more_train
    assert heldout <= more_heldout
    assert not more_train & more_heldout
    assert heldout <= sides(root, heldout=0.4)[1]  # a larger share only adds


def test_equal_records_go_to_the_same_side(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"record {i % 40}"}) + "\n" for i in range(120)))
    train, heldout = sides(path, heldout=0.3)
    groups = {name: (int(name.split(":")[1]) - 1) % 40 for name in train | heldout}
    assert not {groups[n] for n in train} & {groups[n] for n in heldout}
    assert heldout


@pytest.mark.parametrize(("share", "forced_heldout"), [(1e-9, True), (1 - 1e-9, False)])
def test_a_small_corpus_still_has_both_sides_and_says_so(tmp_path, share, forced_heldout):
    root = write_files(tmp_path / "c", 5)
    config = DataConfig(source=str(root), heldout=share)
    opened = open_source(config)
    found = survey(opened, config)
    pick = (min if forced_heldout else max)((f"f{i:03d}.txt" for i in range(5)), key=unit_hash)
    assert found.forced == pick
    assert [d.name for d in found.documents(opened, forced_heldout)] == [pick]
    assert len(list(found.documents(opened, not forced_heldout))) == 4
    train_bytes = sum(len(d.text) for d in found.documents(opened, False))
    assert found.train_bytes == train_bytes
    assert [n for n, _ in found.heldout_files] == [d.name for d in found.documents(opened, True)]


def test_max_bytes_limits_training_and_keeps_the_held_out_files(tmp_path):
    root = write_files(tmp_path / "c", 60)
    train, heldout = sides(root, heldout=0.2)
    less, same = sides(root, heldout=0.2, max_bytes=2000)
    assert same == heldout
    assert less < train
    assert 4 <= len(less) <= 6  # files of about 460 bytes
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"record {i}" * 10}) + "\n" for i in range(200)))
    few, _ = sides(path, heldout=0.2, max_bytes=1000)
    assert len(few) == 13  # of 80 bytes and more: the one that reaches the limit is the last


def test_the_digests_tell_what_changed(tmp_path):
    root = write_files(tmp_path / "c", 30)
    config = DataConfig(source=str(root), heldout=0.2)
    first = survey(open_source(config), config)
    assert survey(open_source(config), config).digest == first.digest
    held = first.heldout_files[0][0]
    (root / held).write_text("changed")
    second = survey(open_source(config), config)
    assert second.digest != first.digest
    assert second.train_digest == first.train_digest  # the tokenizer has not seen it


def test_the_tokenizer_sees_a_bounded_fixed_part_of_many_training_documents(tmp_path, monkeypatch):
    root = write_files(tmp_path / "c", 60)
    (root / "huge.txt").write_text("a table\n" * 5000)
    config = DataConfig(source=str(root), heldout=0.2)
    opened = open_source(config)
    found = survey(opened, config)
    everything = [d.text for d in found.documents(opened, False)]
    assert list(found.tokenizer_texts(opened)) == everything
    monkeypatch.setattr("atoll.data.split.TOKENIZER_BYTES", 4000)
    monkeypatch.setattr("atoll.data.split.STRETCH", 200)
    part = list(found.tokenizer_texts(opened))
    assert part == list(found.tokenizer_texts(opened))
    assert 2000 < sum(map(len, part)) < 7000
    assert max(map(len, part)) == 200
    assert all(any(p in text for text in everything) for p in part)
    assert len(part) > 10
