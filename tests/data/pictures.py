"""Image files made for tests, odd ones among them, and micro settings of runs with pictures."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from atoll.config import Config, load_config


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of `image` as a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def gradient(width: int, height: int) -> np.ndarray:
    """uint8 [H, W, 3], each pixel unlike its neighbours."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x + y) % 256], -1).astype(np.uint8)


def png(width: int, height: int) -> bytes:
    """A colour picture."""
    return saved(Image.fromarray(gradient(width, height)))


def png_chunks(width: int, height: int, bits: int, colour: int, data: bytes) -> bytes:
    """A PNG written by hand: for depths that Pillow does not write, and headers that lie."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


MICRO: dict[str, Any] = {
    "model.vocab_size": 300,
    "model.hidden_size": 16,
    "model.num_hidden_layers": 3,
    "model.num_attention_heads": 2,
    "model.kda_num_heads": 2,
    "model.kda_head_dim": 8,
    "model.q_lora_rank": 8,
    "model.kv_lora_rank": 8,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 8,
    "model.intermediate_size": 24,
    "model.moe_intermediate_size": 8,
    "model.routed_expert_hidden_size": 8,
    "model.num_experts": 8,
    "model.num_experts_per_token": 2,
    "stages.0.length": 64,
    "stages.0.batch": 4,
    "train.steps": 6,
    "train.threads": 1,
    "train.save_every": 2,
    "train.validate_every": 3,
    "train.sample_every": 3,
    "train.validate_tokens": 128,
    "model.vision.vt_num_hidden_layers": 1,
    "model.vision.vt_hidden_size": 8,
    "model.vision.vt_num_attention_heads": 1,
    "model.vision.qkv_hidden_size": 8,
    "model.vision.vt_intermediate_size": 12,
}


def write_album(folder: Path, count: int = 12) -> Path:
    """`count` pictures of mixed sizes with captions beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"p{i}.png").write_bytes(png(20 + 17 * (i % 5), 20 + 30 * (i % 3)))
        (folder / f"p{i}.txt").write_text(f"picture number {i}, which is {20 + 17 * (i % 5)} wide\n")
    return folder


def config_for(folder: Path, **changes: Any) -> Config:
    """A micro run with pictures, its caches in `folder`; `changes` use __ for the dot."""
    return load_config("tiny-vl", {**MICRO, "data.cache": str(folder / "cache"), **{k.replace("__", "."): v for k, v in changes.items()}})
