"""Files with pictures: JSON lines, captioned folders, tars; what cannot be read is left out and counted, and no path leaves its folder."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from data.pictures import config_for, png, write_album

from atoll.config import ConfigError, UserError
from atoll.data import open_corpus
from atoll.data.images.samples import runs
from atoll.data.loader import make_batch
from atoll.data.packing import open_sampler


def corpus_of(tmp_path: Path, source: Path, **changes):
    config = config_for(tmp_path, data__source=str(source), **changes)
    return config, open_corpus(config.data, config.model)


def documents(corpus, config) -> dict[str, list]:
    """name → parts: text, or the grid of an item."""
    found = {}
    for token_set in (corpus.train, corpus.heldout):
        for name, sample in zip(token_set.names, token_set.pictures.samples, strict=True):
            parts, at = [], 1
            for item, (begin, end) in zip(sample.items, runs(sample.ids, sample.items, config.model), strict=True):
                parts += [corpus.tokenizer.decode(sample.ids[at:begin]), item.grid]
                at = end
            found[name] = [p for p in [*parts, corpus.tokenizer.decode(sample.ids[at:-1])] if p]
    return found


def notes(corpus) -> str:
    return "\n".join(corpus.notes)


def write_lines(path: Path, *records) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_interleaved_lines_in_both_forms(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.png").write_bytes(png(28, 28))
    (tmp_path / "sub" / "b.png").write_bytes(png(60, 28))
    path = write_lines(
        tmp_path / "data.jsonl",
        {"text": "First <image> then <image> and the end.", "images": ["a.png", "sub/b.png"]},
        {"texts": ["Before", None, "after", None], "images": [None, "sub/b.png", None, "a.png"]},
        {"text": "No picture at all."},
        {"text": "<image>under it", "images": ["a.png"]},
    )
    config, corpus = corpus_of(tmp_path, path)
    assert documents(corpus, config) == {
        "data.jsonl:1": ["First ", (1, 2, 2), " then ", (1, 2, 6), " and the end."],
        "data.jsonl:2": ["Before", (1, 2, 6), "after", (1, 2, 2)],
        "data.jsonl:3": ["No picture at all."],
        "data.jsonl:4": [(1, 2, 2), "under it"],
    }
    assert "4 documents with 5 images of 9 tokens" in notes(corpus)
    batch = make_batch(open_sampler(corpus.train, 64, 0), 0, 2)
    assert batch.pixel_values is not None


BAD = [
    ({"text": "<image> x", "images": ["../secret.png"]}, "lies outside the data's own folder"),
    ({"text": "<image> x", "images": ["/etc/hostname"]}, "within the data's own folder"),
    ({"text": "<image> x", "images": ["link.png"]}, "lies outside the data's own folder"),
    ({"text": "<image> x", "images": ["away/secret.png"]}, "lies outside the data's own folder"),
    ({"text": "<image> x", "images": ["gone.png"]}, "No such file"),
    ({"text": "<image> x", "images": ["broken.png"]}, "damaged"),
    ({"text": "<image> x", "images": ["text.png"]}, "not an image"),
    ({"text": "<image> x", "images": ["pipe.png"]}, "no ordinary file"),
    ({"text": "<image> x", "images": []}, "1 <image> in the text and 0 images"),
    ({"text": "x", "images": "a.png"}, "a list of paths is expected"),
    ({"text": "<image> x", "images": [5]}, "expected to be text"),
    ({"other": 1}, "an object with 'text' and 'images'"),
    ({"texts": ["a"], "images": ["a.png", "a.png"]}, "1 texts and 2 images"),
    ({"texts": [5, {}], "images": []}, "expected to be text"),
    ({"texts": [[]], "images": [{}]}, "expected to be text"),
    ({"texts": [["a.png"], []], "images": []}, "expected to be text"),
    ([1, 2], "an object with"),
    ("{not json", "Expecting property name"),
    ("[" * 5000, "recursion|Expecting|expected"),
    ({"text": "<image>", "images": ["a.png"]}, "no text"),
]


@pytest.mark.parametrize(("record", "says"), BAD)
def test_what_cannot_be_read_is_left_out_and_counted(tmp_path, record, says):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(png(9, 9))
    (folder / "a.png").write_bytes(png(28, 28))
    (folder / "broken.png").write_bytes(png(200, 200)[:100])
    (folder / "text.png").write_text("no picture")
    os.mkfifo(folder / "pipe.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "away").symlink_to(tmp_path)
    good = [{"text": f"<image> number {i}", "images": ["a.png"]} for i in range(3)]
    _, corpus = corpus_of(tmp_path, write_lines(folder / "data.jsonl", *good[:2], record, good[2]))
    assert len(corpus.train) + len(corpus.heldout) == 3
    left_out = [line for line in corpus.notes if line.startswith("left out")]
    assert len(left_out) == 1
    assert left_out[0].startswith("left out: 1 (data.jsonl:3: ")
    import re

    assert re.search(says, left_out[0])
    assert not any("\n" in line for line in corpus.notes)


def test_a_folder_of_captioned_images(tmp_path):
    album = write_album(tmp_path / "album", 6)
    (album / "bare.png").write_bytes(png(9, 9))
    (album / ".hidden.png").write_bytes(png(9, 9))
    (album / "cut.png").write_bytes(png(99, 99)[:90])
    (album / "cut.txt").write_text("a damaged one")
    (album / "out.png").symlink_to(tmp_path / "elsewhere.png")
    config, corpus = corpus_of(tmp_path, album)
    found = documents(corpus, config)
    assert sorted(found) == [f"p{i}.png" for i in range(6)]
    assert found["p1.png"] == [(1, 4, 4), "\npicture number 1, which is 37 wide"]
    assert "left out: 1 (bare.png: no caption" in notes(corpus)
    assert "left out: 1 (cut.png: damaged" in notes(corpus)
    for side in (corpus.train, corpus.heldout):  # prompts end with a token of text, answers are the captions
        for sample in side.pictures.samples:
            assert corpus.tokenizer.decode(sample.ids[sample.prompt :]).startswith(("picture", "<|eos|>")) or sample.prompt == 0


def test_a_table_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(png(28, 28))
    (tmp_path / "captions.csv").write_text('file_name,text\na.png,"a quote that nobody ends' + "x" * 200_000)
    with pytest.raises(UserError, match=r"captions\.csv: not a table that can be read \(field larger than .*\)"):
        corpus_of(tmp_path, tmp_path)


@pytest.mark.parametrize("kind", ["captions.jsonl", "captions.csv", "metadata.jsonl"])
def test_a_table_of_captions(tmp_path, kind):
    album = tmp_path / "album"
    (album / "in").mkdir(parents=True)
    for name in ("in/a.png", "b.png", "c.png"):
        (album / name).write_bytes(png(28, 28))
    rows = [("./in/a.png", "one, of course"), ("b.png", "two"), ("../../etc/passwd", "never")]
    if kind.endswith("csv"):
        (album / kind).write_text('file_name,text\n./in/a.png,"one, of course"\nb.png,two\n../../etc/passwd,never\n')
    else:
        write_lines(album / kind, *({"file_name": name, "text": text} for name, text in rows))
    config, corpus = corpus_of(tmp_path, album)
    assert documents(corpus, config) == {"in/a.png": [(1, 2, 2), "\none, of course"], "b.png": [(1, 2, 2), "\ntwo"]}
    assert "c.png: no caption" in notes(corpus)


def write_tar(path: Path, members: dict[str, bytes], **links: str) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name, target in links.items():
            info = tarfile.TarInfo(f"{name}.png")
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return path


def test_tars_are_read_where_they_lie(tmp_path, monkeypatch):
    members = {
        "000.png": png(28, 28),
        "000.txt": "first é".encode(),
        "000.cls": b"7",
        "in/001.seg.jpg": png(60, 28),
        "in/001.json": json.dumps({"caption": "second"}).encode(),
        "../../002.png": png(9, 9),
        "../../002.txt": b"third",
        "003.png": png(99, 99)[:80],
        "003.txt": b"damaged",
        "004.png": png(9, 9),
        "005.txt": b"no image",
    }
    path = write_tar(tmp_path / "shard.tar", members, link="/etc/passwd")
    before = sorted(tmp_path.parent.rglob("*"))
    config, corpus = corpus_of(tmp_path, path)
    assert documents(corpus, config) == {
        "shard.tar:000": [(1, 2, 2), "\nfirst é"],
        "shard.tar:in/001": [(1, 2, 6), "\nsecond"],
        "shard.tar:../../002": [(1, 2, 2), "\nthird"],
    }
    assert "003: damaged" in notes(corpus)
    assert "004: no caption" in notes(corpus)
    assert "005: no image among its members" in notes(corpus)
    assert [p for p in sorted(tmp_path.parent.rglob("*")) if p not in before and "cache" not in p.parts and p.name != "shard.tar"] == []
    make_batch(open_sampler(corpus.train, 64, 0), 0, 1)


def test_a_damaged_tar_is_one_line(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no tar" * 400)
    with pytest.raises(UserError, match="not a tar file that can be read") as caught:
        corpus_of(tmp_path, tmp_path / "a.tar")
    assert "\n" not in str(caught.value)


def test_a_picture_that_changes_under_a_run_is_one_line(tmp_path):
    album = write_album(tmp_path / "album", 5)
    _, corpus = corpus_of(tmp_path, album)
    for path in album.glob("*.png"):
        path.write_bytes(png(200, 200))
    with pytest.raises(UserError, match="has changed since the start"):
        make_batch(open_sampler(corpus.train, 64, 0), 0, 1)
    for path in album.glob("*.png"):
        path.unlink()
    with pytest.raises(UserError, match="cannot be any more"):
        make_batch(open_sampler(corpus.train, 64, 0), 0, 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data__source": "stdlib"}, "data.source = 'stdlib': with data.kind = \"images\""),
        ({"model__vision": "none", "data__source": "x.tar"}, "no vision tower"),
        ({"data__source": "x.tar", "data__fonts": "a.ttf"}, "data.fonts"),
        ({"data__image_patches": 0}, "data.image_patches = 0"),
        ({"stages__0__segment": 16}, "stages.0.segment = 16: rows with images are computed whole"),
        ({"parallel__context": 2}, "parallel.context = 2: rows with images are not cut"),
    ],
)
def test_impossible_settings_are_one_line(tmp_path, changes, says):
    with pytest.raises(ConfigError) as caught:
        config_for(tmp_path, **changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "gone", "a folder of images, a .jsonl or a .tar file"),
        (lambda p: p, "no image in this folder"),
        (lambda p: write_lines(p / "a.jsonl", {"text": "one"}), "1 document with text and images that can be read; give at least two"),
    ],
)
def test_sources_without_pictures_are_one_line(tmp_path, make, says):
    with pytest.raises(UserError) as caught:
        corpus_of(tmp_path, make(tmp_path))
    assert says in str(caught.value)


def test_fonts_of_the_users_own(tmp_path):
    from atoll.data.images.rendered import bundled_font

    other = Path(bundled_font()).with_name("DejaVuSans.ttf")
    seen = []
    for fonts in ("", str(other)):
        config = config_for(tmp_path, data__source="rendered", data__fonts=fonts)
        batch = make_batch(open_sampler(open_corpus(config.data, config.model).train, 64, 0), 0, 1)
        seen.append(batch.pixel_values.sum())
    assert seen[0] != seen[1]
    config = config_for(tmp_path, data__fonts="x.ttf")
    with pytest.raises(UserError, match=r"data.fonts: 'x.ttf' cannot be read as a font"):
        open_corpus(config.data, config.model)
