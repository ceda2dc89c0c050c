"""Images in requests: read as the tower wants them, from data URLs alone, bombs refused before they are decoded."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import httpx
import numpy as np
import pytest
from conversations import TOKENIZER
from PIL import Image
from serving import END, SHAPES, Scripted, served, small_engine, small_model, written

from atoll.config import ModelConfig, VisionConfig
from atoll.data.images import reading
from atoll.serve.errors import ApiError
from atoll.serve.images import read_image, together

PAD = TOKENIZER.special["<|media_pad|>"]
VISION = VisionConfig(media_placeholder_token_id=PAD)


def url(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def picture(width=70, height=40, colour=(255, 0, 0)):
    return Image.new("RGB", (width, height), colour)


def read(address, pixels=10**6):
    return read_image({"type": "image_url", "image_url": {"url": address}}, VISION, pixels, "here")


def test_an_image_becomes_patches_of_whole_features():
    found = read(url(picture()))
    assert (found.picture.size, found.picture.grid) == ((70, 40), (1, 4, 6))  # 56 x 84 in patches of 14
    patches, grids = together([found, read(url(picture(28, 28)))])
    assert patches.shape == (24 + 4, 3, 14, 14)
    assert grids.tolist() == [[1, 4, 6], [1, 2, 2]]
    assert found.picture.features(VISION) == 6
    assert patches[0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]
    assert patches[23].unique().tolist() == [-1.0]  # the border below and to the right is black


def test_an_image_is_seen_as_training_sees_it():
    """Upright by its EXIF, and of 16-bit grey the upper 8 bits."""
    tags = Image.Exif()
    tags[274] = 6  # lies on its left side
    turned = io.BytesIO()
    picture(70, 40).save(turned, "JPEG", exif=tags)
    deep = io.BytesIO()
    Image.fromarray(np.full((40, 70), 32768, np.uint16)).save(deep, "PNG")
    for content, kind, size in ((turned, "jpeg", (40, 70)), (deep, "png", (70, 40))):
        raw = content.getvalue()
        found, trained = read(f"data:image/{kind};base64," + base64.b64encode(raw).decode()), reading.read_image(raw, VISION)
        assert found.picture.size == trained.size == size
        assert found.picture.patches.tobytes() == trained.patches.tobytes()


def test_a_large_image_is_made_smaller():
    found = read(url(picture(9000, 20)))
    assert found.picture.grid[2] <= 512
    assert found.picture.size == (9000, 20)  # the size that the format shows stays


def bomb(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    raw = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", raw) + chunk(b"IEND", b"")


BAD = [
    "http://127.0.0.1:1/image.png",
    "file:///etc/passwd",
    "data:text/html;base64,aGk=",
    "data:image/svg+xml;base64,aGk=",
    "data:image/png;base64,***",
    "data:image/png;base64,aGk=",
    "data:image/png;base64,",
    "data:image/png," + "x" * 10,
    "data:image/png;base64," + base64.b64encode(bomb(100_000, 100_000)).decode(),
    "data:image/png;base64," + base64.b64encode(bomb(2000, 2000)).decode(),
    url(picture())[:-30],
    url(picture(), "TIFF").replace("tiff", "png"),
    None,
    7,
]


@pytest.mark.parametrize("address", BAD, ids=range(len(BAD)))
def test_what_is_no_image_is_refused(address):
    with pytest.raises(ApiError) as found:
        read(address)
    assert (found.value.status, found.value.param) == (400, "here")


def ask(s, *addresses, **more):
    parts = [{"type": "text", "text": "see "}, *({"type": "image_url", "image_url": {"url": a}} for a in addresses)]
    return httpx.post(
        s.url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}], "max_tokens": 4, **more}, timeout=60
    )


def test_the_prompt_has_a_placeholder_a_feature_and_the_patches_beside_it():
    engine = Scripted(lambda request: written({"content": "hi"}))
    engine_config = ModelConfig(**SHAPES, vision=VISION)
    with served(engine, config=engine_config, max_images=2) as s:
        assert ask(s, url(picture()), url(picture(28, 28, (0, 9, 0)))).status_code == 200
        request = engine.requests[-1]
        assert request.prompt.count(PAD) == 6 + 1
        assert request.pixel_values.shape == (24 + 4, 3, 14, 14)
        assert request.grid_thws.tolist() == [[1, 4, 6], [1, 2, 2]]
        assert all(request.prompt[turn - 1] == END for turn in request.turns)
        three = ask(s, *[url(picture())] * 3)
        assert (three.status_code, three.json()["error"]["param"]) == (400, "messages[0].content[3]")
        ids = httpx.post(s.url + "/v1/completions", json={"prompt": [1, PAD, 2]})
        assert ids.status_code == 400


def test_a_model_with_a_tower_answers_about_an_image():
    model = small_model(vision=VISION)
    with served(small_engine(model)) as s:
        first, again, other = (
            ask(s, url(picture(colour=c)), temperature=0, logprobs=True).json() for c in ((9, 0, 0), (9, 0, 0), (0, 0, 250))
        )
    assert first["choices"][0]["logprobs"] == again["choices"][0]["logprobs"]
    assert first["choices"][0]["logprobs"] != other["choices"][0]["logprobs"]
    assert first["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
