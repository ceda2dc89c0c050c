"""Videos: sampled in time, four frames an item, each after its time; from memory, and through PyAV where it is installed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from data.pictures import config_for

from atoll.config import VisionConfig
from atoll.data import open_corpus
from atoll.data.images import video
from atoll.data.images.reading import BadImage
from atoll.data.images.video import AvFrames, sampled, stamp, video_items

VISION = VisionConfig()


def film(seconds: float, rate: float, size: tuple[int, int] = (28, 28)) -> list[tuple[float, np.ndarray]]:
    """Frames whose grey is their number."""
    return [(i / rate, np.full((size[1], size[0], 3), i % 256, np.uint8)) for i in range(round(seconds * rate))]


@pytest.mark.parametrize(("given", "kept"), [(24, 3), (8, 1), (30, 3.75), (4, 1)])
def test_eight_frames_a_second(given, kept):
    chosen = sampled(film(2, given))
    assert len(chosen) == min(16, 2 * given)
    numbers = [int(f[0, 0, 0]) for _, f in chosen]
    assert numbers == [int(np.ceil(round(i * max(1.0, given / 8), 6))) for i in range(len(chosen))]
    assert kept in (given / 8, 1)


def test_long_videos_keep_so_many_spread_evenly():
    chosen = sampled(film(40, 8), most=16)
    assert len(chosen) == 16
    gaps = np.diff([time for time, _ in chosen])
    assert chosen[0][0] == 0
    assert chosen[-1][0] >= 38
    assert gaps.max() < 2 * gaps.min() + 1e-9


def test_four_frames_an_item_each_after_its_time():
    items = video_items(film(1.25, 8, (56, 30)), VISION)
    assert [time for time, _ in items] == ["00:00:00.000", "00:00:00.500", "00:00:01.000"]
    assert [item.grid for _, item in items] == [(4, 4, 4), (4, 4, 4), (2, 4, 4)]
    assert items[1][1].patches[::16, 0, 0, 0].tolist() == [4, 5, 6, 7]
    assert all(item.features(VISION) == 4 for _, item in items)
    two = video_items(film(0.5, 8), dataclasses.replace(VISION, init_pos_emb_time=2))
    assert [item.grid[0] for _, item in two] == [2, 2]


def test_the_whole_videos_limit_is_shared_by_its_frames(monkeypatch):
    assert video_items(film(0.5, 8, (280, 280)), VISION, most=100)[0][1].grid == (4, 10, 10)
    monkeypatch.setattr(video, "MOST_OF_A_VIDEO", 16 * 64)
    items = video_items(film(2, 8, (280, 280)), VISION)
    assert [item.grid for _, item in items] == [(4, 8, 8)] * 4


def test_times():
    assert stamp(3661.5) == "01:01:01.500"
    assert stamp(59.9996) == "00:01:00.000"
    assert stamp(-1) == "00:00:00.000"


def test_no_frames_is_one_line():
    with pytest.raises(BadImage, match="without a frame"):
        video_items([], VISION)


def write_video(path) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(16):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def test_files_through_pyav(tmp_path):
    pytest.importorskip("av")
    write_video(tmp_path / "a.mp4")
    items = video_items(AvFrames(tmp_path / "a.mp4"), VISION)
    assert [time for time, _ in items] == ["00:00:00.000", "00:00:00.500"]
    assert [item.grid for _, item in items] == [(4, 4, 6)] * 2
    greys = [int(item.patches[at, :, :8, :8].mean()) for _, item in items for at in range(0, 96, 24)]
    assert np.abs(np.asarray(greys) - np.arange(0, 160, 20)).max() < 12
    (tmp_path / "b.mp4").write_bytes(b"no video" * 50)
    with pytest.raises(BadImage, match="no video that can be read"):
        video_items(AvFrames(tmp_path / "b.mp4"), VISION)


def test_videos_among_documents(tmp_path):
    pytest.importorskip("av")
    write_video(tmp_path / "a.mp4")
    lines = [f'{{"text": "Number {i}: <image>", "images": ["a.mp4"]}}' for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    config = config_for(tmp_path, data__source=str(tmp_path / "data.jsonl"))
    corpus = open_corpus(config.data, config.model)
    sample = corpus.train.pictures.samples[0]
    assert [item.grid for item in sample.items] == [(4, 4, 6)] * 2
    said = corpus.tokenizer.decode(sample.ids)
    assert "00:00:00.000<|media_pad|>" in said
    assert "<|media_pad|>00:00:00.500" in said
    first, second = (item.load().patches for item in sample.items)
    assert not np.array_equal(first, second)
