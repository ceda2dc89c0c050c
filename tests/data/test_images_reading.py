"""Odd image files: the right pixels and grid, or one clear line."""

from __future__ import annotations

import io
import os
import struct

import numpy as np
import pytest
from data.pictures import gradient, png, png_chunks, saved
from PIL import Image

from atoll.config import VisionConfig
from atoll.data.images.picture import Picture, grid_of, scaled_size, stack
from atoll.data.images.reading import BadImage, below, bytes_of, read_file, read_image

VISION = VisionConfig()


def pixels(picture: Picture, frame: int = 0) -> np.ndarray:
    """A frame as uint8 [H, W, 3], with what fills it up."""
    (t, h, w), p = picture.grid, picture.patches.shape[-1]
    return picture.patches.reshape(t, h, w, 3, p, p).transpose(0, 1, 4, 2, 5, 3).reshape(t, h * p, w * p, 3)[frame]


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("size", "expected", "grid"),
    [
        ((1, 1), (1, 1), (1, 2, 2)),
        ((20000, 1), (7168, 1), (1, 2, 512)),
        ((1, 20000), (1, 7168), (1, 512, 2)),
        ((13, 13), (13, 13), (1, 2, 2)),
        ((28, 29), (28, 29), (1, 4, 2)),
        ((3584, 3584), (3584, 3584), (1, 256, 256)),
        ((7168, 7168), (3584, 3584), (1, 256, 256)),
        ((7169, 100), (7168, 99), (1, 8, 512)),
    ],
)
def test_sizes_follow_the_published_rule(size, expected, grid):
    assert scaled_size(*size, 14) == expected
    assert grid_of(*expected, VISION) == grid


def test_no_size_has_many_more_patches_than_allowed_and_none_vanishes():
    numbers = np.random.RandomState(0)
    for width, height in (2 ** numbers.uniform(0, 17, size=(3000, 2))).astype(int):
        w, h = scaled_size(int(width), int(height), 14)
        assert 1 <= w <= min(width, 7168)
        assert 1 <= h <= min(height, 7168)
        assert (w // 14) * (h // 14) <= 65536 * (1 if (w, h) == (width, height) else 1.01)  # the rule counts before it scales


@pytest.mark.parametrize(("size", "grid"), [((1, 20000), (1, 512, 2)), ((20000, 1), (1, 2, 512)), ((1, 1), (1, 2, 2))])
def test_thin_files_are_read(size, grid):
    picture = read_image(saved(Image.new("RGB", size, (9, 9, 9))), VISION)
    assert (picture.grid, picture.size) == (grid, size)
    assert picture.features(VISION) == grid[1] * grid[2] // 4
    assert pixels(picture)[0, 0].tolist() == [9, 9, 9]


def test_a_lower_limit_scales_further_down():
    picture = read_image(png(280, 280), VISION, most=100)
    assert picture.grid == (1, 10, 10)


# ---------------------------------------------------------------- pixels


def test_patches_stand_row_by_row_filled_up_with_black_and_scaled_to_one():
    shown = gradient(30, 20)
    picture = read_image(saved(Image.fromarray(shown)), VISION)
    assert picture.grid == (1, 2, 4)
    assert np.array_equal(picture.patches[1], shown[:14, 14:28].transpose(2, 0, 1))
    assert np.array_equal(pixels(picture)[:20, :30], shown)
    assert not pixels(picture)[20:].any()
    assert not pixels(picture)[:, 30:].any()
    values, grids = stack([picture, picture])
    assert values.shape == (16, 3, 14, 14)
    assert grids.tolist() == [[1, 2, 4]] * 2
    assert values[0, 0, 0, 0] == -1.0
    assert float(values.max()) == pytest.approx((shown.max() / 255 - 0.5) / 0.5, abs=1e-6)


def test_transparency_shows_a_chessboard_filled_after_scaling():
    clear = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    seen = pixels(read_image(saved(clear), VISION))[:32, :32, 0]
    assert set(np.unique(seen)) == {180, 255}
    assert (seen[:8, :8] == 255).all()
    assert (seen[:8, 8:16] == 180).all()
    assert (seen[8:16, :8] == 180).all()
    large = Image.new("RGBA", (14 * 1024, 28), (255, 0, 0, 0))
    small = pixels(read_image(saved(large), VISION))
    assert (small[:8, :8] == 255).all()
    assert (small[:8, 8:16] == 180).all()
    half = Image.new("RGBA", (8, 8), (0, 0, 0, 128))
    assert pixels(read_image(saved(half), VISION))[0, 0, 0] == round(255 * 127 / 255)


@pytest.mark.parametrize("mode", ["LA", "PA", "P", "RGBA"])
def test_every_mode_with_transparency(mode):
    image = Image.new("RGBA", (8, 8), (255, 255, 255, 255))
    image.putpixel((3, 3), (0, 0, 0, 0))
    if mode == "P":
        content = saved(image.convert("P"), "GIF", transparency=image.convert("P").getpixel((3, 3)))
        first = pixels(read_image(content, VISION))[3, 3]
        assert first.tolist() == [255, 255, 255]
        return
    content = saved(image.convert(mode), "PNG") if mode != "PA" else saved(image.convert("LA"), "TIFF")
    seen = pixels(read_image(content, VISION))
    assert seen[3, 3].tolist() == [255, 255, 255]
    assert seen[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    shown = gradient(40, 20)
    turned = {1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: np.rot90(np.fliplr(a)),
              6: np.rot90, 7: lambda a: np.rot90(np.fliplr(a), 3), 8: lambda a: np.rot90(a, 3)}  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(turned[orientation](shown))
    picture = read_image(saved(Image.fromarray(stored), "PNG", exif=exif), VISION)
    assert picture.size == (40, 20)
    assert np.array_equal(pixels(picture)[:20, :40], shown)


def test_broken_exif_says_nothing():
    content = saved(Image.fromarray(gradient(20, 20)), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff\xff\xff")
    assert read_image(content, VISION).size == (20, 20)


def test_sixteen_bits_keep_their_upper_half():
    values = np.asarray([[0, 257 * 3, 257 * 200, 65535]], np.uint16)
    grey = saved(Image.fromarray(values))
    assert pixels(read_image(grey, VISION))[0, :4].tolist() == [[v] * 3 for v in (0, 3, 200, 255)]
    rows = b"\0" + struct.pack(">6H", 257 * 10, 257 * 20, 257 * 30, 65535, 0, 257)
    assert pixels(read_image(png_chunks(2, 1, 16, 2, rows), VISION))[0, :2].tolist() == [[10, 20, 30], [255, 0, 1]]


def test_grey_palette_one_bit_and_cmyk():
    shown = gradient(30, 30)
    image = Image.fromarray(shown)
    grey = np.asarray(image.convert("L"))
    assert np.array_equal(pixels(read_image(saved(image.convert("L")), VISION))[:30, :30], np.repeat(grey[..., None], 3, 2))
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE)
    assert np.array_equal(pixels(read_image(saved(palette), VISION))[:30, :30], np.asarray(palette.convert("RGB")))
    one = image.convert("1")
    assert np.array_equal(pixels(read_image(saved(one), VISION))[:30, :30], np.asarray(one.convert("RGB")))
    ink = Image.new("CMYK", (30, 30), (255, 0, 0, 0))
    for kind in ("TIFF", "JPEG"):
        assert np.abs(pixels(read_image(saved(ink, kind), VISION))[0, 0].astype(int) - [0, 255, 255]).max() < 8


def test_animated_files_become_one_item_of_frames_spread_evenly():
    frames = [Image.new("RGB", (20, 20), (v, v, v)) for v in range(0, 220, 20)]
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        content = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
        picture = read_image(content, VISION)
        assert picture.grid == (4, 2, 2)
        assert picture.features(VISION) == 1
        seen = [int(pixels(picture, i)[0, 0, 0]) for i in range(4)]
        assert np.abs(np.asarray(seen) - [0, 60, 140, 200]).max() <= 1, (kind, seen)


def test_pages_of_other_sizes_are_left_out():
    pages = [Image.new("RGB", size, (5, 5, 5)) for size in ((20, 20), (60, 20), (20, 20))]
    assert read_image(saved(pages[0], "TIFF", save_all=True, append_images=pages[1:]), VISION).grid == (2, 2, 2)


def test_a_page_too_large_is_refused_before_it_is_decoded():
    large = Image.new("1", (9000, 9000))
    content = saved(Image.new("1", (20, 20)), "TIFF", compression="group4", save_all=True, append_images=[large])
    assert len(content) < 1 << 20
    with pytest.raises(BadImage, match="too large: 9,000 x 9,000 pixels"):
        read_image(content, VISION)


# ---------------------------------------------------------------- refusals


def bomb() -> bytes:
    """60,000 x 60,000 pixels in a few kilobytes."""
    return png_chunks(60000, 60000, 1, 0, bytes(1 << 20))


FLOATS = saved(Image.fromarray(np.full((4, 4), 0.5, np.float32)), "TIFF")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file"),
        (b"no image at all", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (png(60, 60)[:100], "damaged"),
        (saved(Image.fromarray(gradient(200, 200)), "JPEG")[:900], "damaged"),
        (saved(Image.fromarray(gradient(60, 60)), "WEBP")[:120], "damaged|not an image"),
        (png(60, 60)[:8] + b"\xff" * 300, "not an image|damaged"),
        (bomb(), "too large"),
        (png_chunks(9000, 9000, 8, 0, b""), "too large: 9,000 x 9,000 pixels"),
        (png_chunks(100, 100, 8, 0, b"\0"), "damaged"),
        (FLOATS, "save it as 8 or 16 bits"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
    ],
)
def test_what_gives_no_picture_gives_one_line(content, says):
    with pytest.raises(BadImage, match=says) as caught:
        read_image(content, VISION)
    assert "\n" not in str(caught.value)


def read_or_line(content: bytes) -> Picture | str:
    try:
        return read_image(content, VISION, 4096)
    except BadImage as error:
        return str(error)


def test_every_cut_and_many_flips_of_a_file_give_a_picture_or_one_line():
    numbers = np.random.RandomState(1)
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        whole = saved(Image.fromarray(gradient(40, 30)), kind)
        for _ in range(60):
            content = bytearray(whole[: numbers.randint(1, len(whole) + 1)])
            for at in numbers.randint(len(content), size=3):
                content[at] = numbers.randint(256)
            outcome = read_or_line(bytes(content))
            assert outcome.patches.shape[1:] == (3, 14, 14) if isinstance(outcome, Picture) else "\n" not in outcome


def test_paths_stay_in_their_folder(tmp_path):
    inside, outside = tmp_path / "data", tmp_path / "secret.png"
    (inside / "sub").mkdir(parents=True)
    outside.write_bytes(png(4, 4))
    (inside / "sub" / "a.png").write_bytes(png(4, 4))
    (inside / "out.png").symlink_to(outside)
    (inside / "away").symlink_to(tmp_path)
    (inside / "in.png").symlink_to(inside / "sub" / "a.png")
    assert read_file(below(inside, "sub/a.png"), VISION).size == (4, 4)
    assert below(inside, "in.png") == (inside / "sub" / "a.png").resolve()
    for name in ("../secret.png", str(outside), "out.png", "away/secret.png", "sub/../../secret.png", "", "a\0.png"):
        with pytest.raises(BadImage, match="folder"):
            below(inside, name)


def test_pipes_folders_and_missing_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for name, says in (("pipe.png", "no ordinary file"), (".", "no ordinary file|cannot be read"), ("gone.png", "No such file")):
        with pytest.raises(BadImage, match=says):
            bytes_of(tmp_path / name)
    (tmp_path / "large").write_bytes(bytes(100))
    with pytest.raises(BadImage, match="100 bytes, 10 at most"):
        bytes_of(tmp_path / "large", 10)


def test_names_say_nothing_the_content_does(tmp_path):
    (tmp_path / "a.jpg").write_bytes(png(5, 6))
    assert read_file(tmp_path / "a.jpg", VISION).size == (5, 6)
    assert io.BytesIO(png(5, 6)).read(4) == b"\x89PNG"
