"""Packages are unpacked to plain files inside one folder, whatever they hold; what would leave it is refused."""

from __future__ import annotations

import io
import shutil
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from atoll.config import UserError
from atoll.data.builder import archives
from atoll.data.builder.archives import fetched, inside, unpack
from atoll.data.builder.recipes import Recipe, matching

ALL = ("**/*",)


def tar(path: Path, *members: tuple[str, bytes | str, str]) -> Path:
    """A tar of (name, content or link target, kind)."""
    with tarfile.open(path, "w:gz") as file:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type = {"file": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE}[kind]
            if kind == "file":
                assert isinstance(content, bytes)
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
            else:
                info.linkname = str(content)
                file.addfile(info)
    return path


def found(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() or p.is_symlink()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


NAMES = ["../out.txt", "/out.txt", "a/../../out.txt", "a\\..\\out.txt", "C:out.txt", "..", "./../out.txt"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_out_of_the_folder_is_refused(folder, tmp_path, name):
    archive = tar(tmp_path / "x.tar.gz", (name, b"bad", "file"))
    with pytest.raises(UserError, match="would leave the folder"):
        unpack(archive, folder, ALL)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr(zipfile.ZipInfo(name), b"bad")
    with pytest.raises(UserError, match="would leave the folder"):
        unpack(tmp_path / "x.zip", folder, ALL)
    with pytest.raises(UserError, match="would leave the folder"):
        inside(name, archive)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "x.tar.gz", "x.zip"]
    assert found(folder) == {}


def test_links_and_devices_are_never_made_and_nothing_is_written_through_them(folder, tmp_path):
    (tmp_path / "target").mkdir()
    members = [("d", str(tmp_path / "target"), "link"), ("d/file", b"text", "file"), ("h", "/etc/passwd", "hard"), ("f", "", "fifo")]
    assert unpack(tar(tmp_path / "x.tar.gz", *members), folder, ALL) == 1
    assert found(folder) == {"d/file": b"text"}
    assert list((tmp_path / "target").iterdir()) == []
    assert not (folder / "d").is_symlink()
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc/passwd")
        file.writestr("plain", b"text")
    other = tmp_path / "other"
    assert unpack(tmp_path / "x.zip", other, ALL) == 1
    assert found(other) == {"plain": b"text"}


def test_nothing_is_written_over_a_file_or_through_a_link_that_is_there(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (folder / "a").symlink_to(outside)
    with pytest.raises(UserError, match="damaged, or no archive"):
        unpack(tar(tmp_path / "x.tar.gz", ("a", b"bad", "file")), folder, ALL)
    assert outside.read_text() == "mine"
    twice = tar(tmp_path / "y.tar.gz", ("b", b"one", "file"), ("b", b"two", "file"))
    with pytest.raises(UserError, match="damaged, or no archive"):
        unpack(twice, folder, ALL)
    assert (folder / "b").read_bytes() == b"one"


def test_an_archive_that_swells_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_BYTES", 5_000_000)
    archive = tar(tmp_path / "x.tar.gz", ("a", b"0" * 3_000_000, "file"), ("b", b"0" * 3_000_000, "file"))
    assert archive.stat().st_size < 20_000
    with pytest.raises(UserError, match="no package of text"):
        unpack(archive, folder, ALL)
    assert sum(map(len, found(folder).values())) <= 5_000_000
    monkeypatch.setattr(archives, "MOST_FILES", 1)
    with pytest.raises(UserError, match="more than 1 files"):
        unpack(tar(tmp_path / "y.tar.gz", ("c", b"1", "file"), ("d", b"2", "file")), folder, ALL)


def test_damaged_archives_are_named(folder, tmp_path):
    whole = tar(tmp_path / "x.tar.gz", ("a", b"x" * 100_000, "file")).read_bytes()
    for name, content in (("cut.tar.gz", whole[:60]), ("no.whl", b"PK\x03\x04junk"), ("no.tar", b"junk")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"^{name}: damaged"):
            unpack(tmp_path / name, folder, ALL)


def spoilt(raw: bytes, at: dict[int, bytes]) -> bytes:
    """A zip of one member with bytes changed, places in the central directory counted from its start where they are negative."""
    content, central = bytearray(raw), raw.find(b"PK\x01\x02")
    for place, new in at.items():
        start = place if place >= 0 else central - place
        content[start : start + len(new)] = new
    return bytes(content)


@pytest.mark.parametrize(
    "at", [{60: b"\xff" * 200}, {6: b"\x01", -8: b"\x01"}, {8: b"\x63", -10: b"\x63"}], ids=["deflate", "encrypted", "method"]
)
def test_members_that_cannot_be_read_are_named(folder, tmp_path, at):
    with zipfile.ZipFile(tmp_path / "x.whl", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a", bytes(range(256)) * 20)
    (tmp_path / "x.whl").write_bytes(spoilt((tmp_path / "x.whl").read_bytes(), at))
    with pytest.raises(UserError, match=r"^x.whl: damaged, or no archive \(.*\); fetch it again$"):
        unpack(tmp_path / "x.whl", folder, ALL)


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2"])
def test_a_damaged_tar_is_one_line(folder, tmp_path, kind):
    path = tmp_path / f"x.tar.{kind}"
    with tarfile.open(path, f"w:{kind}") as file:
        info = tarfile.TarInfo("a")
        info.size = 1 << 20
        file.addfile(info, io.BytesIO(bytes(i * i % 251 for i in range(1 << 20))))
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2] + b"\xff\x00" * 200 + raw[len(raw) // 2 + 400 :])
    with pytest.raises(UserError, match=r"damaged, or no archive") as caught:
        unpack(path, folder, ALL)
    assert "\n" not in str(caught.value)


def test_only_what_the_patterns_name_is_written(folder, tmp_path):
    names = ["usr/doc/a.txt", "usr/doc/sub/b.txt", "usr/doc/sub/deep/c.txt", "usr/doc/d.html", "etc/a.txt", "usr/doc.txt"]
    archive = tar(tmp_path / "x.tar.gz", *(("./" + n, n.encode(), "file") for n in names))
    for patterns, wanted in (
        (("usr/doc/*.txt",), {"usr/doc/a.txt"}),
        (("usr/doc/**/*.txt",), {"usr/doc/a.txt", "usr/doc/sub/b.txt", "usr/doc/sub/deep/c.txt"}),
        (("usr/*/[ad].*", "etc/?.txt"), {"usr/doc/a.txt", "usr/doc/d.html", "etc/a.txt"}),
    ):
        shutil.rmtree(folder)
        folder.mkdir()
        unpack(archive, folder, patterns)
        assert set(found(folder)) == wanted
        recipe = Recipe("x", "debian", "x", patterns, "prose", "none", "")
        origin = matching(recipe, folder)
        assert origin is not None
        assert {str((origin.root / f).relative_to(folder)) for f in origin.files} == wanted


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not here")
def test_a_debian_package_is_read_and_its_scripts_are_not_run(folder, tmp_path):
    root, mark = tmp_path / "root", tmp_path / "ran"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "usr/share/doc/x").mkdir(parents=True)
    (root / "usr/share/doc/x/a.txt").write_text("text")
    (root / "usr/share/doc/x/l.txt").symlink_to("/etc/passwd")
    (root / "DEBIAN/control").write_text("Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n")
    for script in ("preinst", "postinst"):
        (root / "DEBIAN" / script).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (root / "DEBIAN" / script).chmod(0o755)
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", str(root), str(tmp_path / "x.deb")], check=True, capture_output=True)
    assert unpack(tmp_path / "x.deb", folder, ("usr/share/doc/*/*.txt",)) == 1
    assert found(folder) == {"usr/share/doc/x/a.txt": b"text"}
    assert not mark.exists()
    (tmp_path / "y.deb").write_bytes(b"no package")
    with pytest.raises(UserError, match=r"y\.deb: damaged"):
        unpack(tmp_path / "y.deb", folder, ALL)


def test_a_fetch_takes_wheels_alone_and_says_what_failed(tmp_path, monkeypatch):
    recipe = Recipe("speeches", "pypi", "speeches", ("speeches/*.txt",), "prose", "none", "")
    asked = []

    def fetch(words, cwd, **rest):
        asked.append(words)
        with zipfile.ZipFile(cwd / "speeches-1-py3-none-any.whl", "w") as file:
            file.writestr("speeches/a.txt", "text")
            file.writestr("speeches/code.py", "raise SystemExit")
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fetch)
    origin = fetched(recipe, tmp_path / "one", print)
    assert origin.files == ["a.txt"]
    assert origin.archive.startswith("speeches-1-py3-none-any.whl sha256:")
    assert "--only-binary=:all:" in asked[0]
    monkeypatch.setattr(subprocess, "run", lambda words, **rest: subprocess.CompletedProcess(words, 1, "", "noise\nno such package\n"))
    with pytest.raises(UserError, match=r"could not be fetched \(no such package\); install it by: pip install speeches"):
        fetched(recipe, tmp_path / "two", print)
