"""What is read, in which order, what is left out and counted, and the one line a wrong source gets."""

import json
import os
import sysconfig
from pathlib import Path

import pytest

from atoll.config import DataConfig, ModelConfig, UserError
from atoll.data import open_corpus
from atoll.data.sources import open_source
from atoll.data.split import survey


def read(source: str | Path, **settings) -> list[tuple[str, str]]:
    return [(d.name, d.text) for d in open_source(DataConfig(source=str(source), **settings)).read()]


def refusal(source: str | Path, **settings) -> str:
    """The message a source is refused with: one line."""
    config = DataConfig(source=str(source), **settings)
    with pytest.raises(UserError) as caught:
        survey(open_source(config), config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    (root / "b").mkdir(parents=True)
    (root / "b" / "two.py").write_text("x = 2\n")
    (root / "a.txt").write_text("first\r\nline\n", newline="")
    (root / "c.md").write_text("third\n")
    return root


def test_a_folder_is_read_in_the_order_of_its_relative_paths_and_lines_are_kept(folder):
    assert read(folder) == [("a.txt", "first\r\nline\n"), ("b/two.py", "x = 2\n"), ("c.md", "third\n")]


def test_suffixes_choose_files(folder):
    assert [name for name, _ in read(folder, suffixes=(".py", ".md"))] == ["b/two.py", "c.md"]
    assert "data.suffixes" in refusal(folder, suffixes=(".rs",))


def test_binary_hidden_and_empty_files_are_left_out_and_counted(folder):
    (folder / "image.bin").write_bytes(b"\x89PNG\0\0")
    (folder / "late.txt").write_bytes(b"a" * 8192 + b"\0b")  # a NUL after the first 8 KiB is text
    (folder / "none.txt").write_text("")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.txt").write_text("cached")
    source = open_source(DataConfig(source=str(folder)))
    assert [d.name for d in source.read()] == ["a.txt", "b/two.py", "c.md", "late.txt"]
    assert (source.stats.binary, source.stats.empty) == (1, 1)


def test_links_are_not_followed_out_of_the_folder_nor_read_twice_inside(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    os.symlink(outside, folder / "away")
    os.symlink(outside / "secret.txt", folder / "secret.txt")
    os.symlink(folder / "a.txt", folder / "again.txt")
    os.symlink(folder, folder / "b" / "loop")
    source = open_source(DataConfig(source=str(folder)))
    assert [d.name for d in source.read()] == ["a.txt", "b/two.py", "c.md"]
    assert source.stats.links == 4


def test_undecodable_bytes_are_replaced_and_counted(folder):
    (folder / "latin.txt").write_bytes(b"caf\xe9 \xff\xfe ok \xe2\x82")
    source = open_source(DataConfig(source=str(folder)))
    texts = {d.name: d.text for d in source.read()}
    assert texts["latin.txt"] == "caf\ufffd \ufffd\ufffd ok \ufffd"
    assert source.stats.undecodable == 5


def test_an_empty_source_is_not_the_folder_one_stands_in():
    for kind in ("text", "images"):
        with pytest.raises(UserError, match=r"data\.source = '': empty"):
            open_corpus(DataConfig(kind=kind, source=""), ModelConfig())


def test_jsonl_gives_one_document_a_record(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two\\u00e9", "other": 1}\n{"text": null}\n{"text": "lone \\ud800 half"}\n')
    source = open_source(DataConfig(source=str(path)))
    assert [(d.name, d.text) for d in source.read()] == [
        ("x.jsonl:1", "one"),
        ("x.jsonl:3", "two\u00e9"),
        ("x.jsonl:5", "lone \ufffd half"),
    ]
    assert (source.stats.empty, source.stats.undecodable) == (1, 1)


def test_record_files_in_a_folder_are_read_when_a_suffix_asks_for_them(folder):
    (folder / "r.jsonl").write_text('{"text": "record"}\n')
    assert "r.jsonl" not in [name for name, _ in read(folder)]
    assert read(folder, suffixes=(".jsonl",)) == [("r.jsonl:1", "record")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", ["line 2", "not JSON"]),
        ("[1, 2]", ["line 2", "not a JSON object"]),
        ('{"txet": "x"}', ["data.text_field = 'text'", "line 2", "'txet'"]),
        ('{"other": "x"}', ["data.text_field", "'other'"]),
        ('{"text": 7}', ["record 2", "int"]),
        ("[" * 100_000, ["line 2", "not JSON"]),
    ],
)
def test_a_wrong_record_is_named_by_its_line(tmp_path, line, words):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    message = refusal(path)
    assert all(word in message for word in words), message


def test_parquet_is_read_by_column(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="an optional extra: atoll[data]")
    import pyarrow.parquet as pq

    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": ["one", None, "three"], "n": [1, 2, 3]}), path)
    assert read(path, text_field="body") == [("x.parquet:1", "one"), ("x.parquet:3", "three")]
    assert "did you mean 'body'?" in refusal(path, text_field="bodi")
    assert "int" in refusal(path, text_field="n")
    path.write_bytes(b"PAR1 not really")
    assert "not a parquet file" in refusal(path)


def test_one_text_file_becomes_many_documents_cut_at_line_ends(tmp_path):
    path = tmp_path / "book.txt"
    text = "".join(f"line {i} \u4e2d\n" for i in range(5000))
    path.write_text(text)
    documents = read(path)
    assert "".join(t for _, t in documents) == text
    assert len(documents) > 30
    assert all(t.endswith("\n") for _, t in documents)
    path.write_text("x" * 100_000)  # no line end anywhere
    assert len(read(path)) > 10
    assert "".join(t for _, t in read(path)) == "x" * 100_000


def test_a_missing_or_empty_source_is_named_in_one_line(tmp_path):
    assert "no such file" in refusal(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty corpus" in refusal(empty)
    (empty / "blank.txt").write_text("")
    (empty / "b.bin").write_bytes(b"\0")
    message = refusal(empty)
    assert "empty corpus" in message
    assert "1 binary, 1 empty" in message
    assert "at least two" in refusal(_write(tmp_path / "one.txt", "a single document"))
    assert "binary" in refusal(_write(tmp_path / "b.dat", "\0\0"))
    assert "empty corpus" in refusal(_write(tmp_path / "none.jsonl", json.dumps({"text": ""}) + "\n"))


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_an_unreadable_file_is_refused_in_one_line(folder, monkeypatch):
    def fail(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert "Permission denied" in refusal(folder)


def test_the_standard_library_is_found_without_what_was_installed_beside_it():
    source = open_source(DataConfig())
    assert "argparse.py" in source.files
    assert source.files == sorted(source.files)
    assert not [f for f in source.files if "site-packages" in f or "dist-packages" in f or not f.endswith(".py")]
    root = Path(sysconfig.get_paths()["stdlib"])
    assert source.has_tests == (len(list((root / "test").glob("test_*.py"))) > 100)
