"""Images in the engine: read in chunks as by a whole pass, part of a prefix's name, each by itself through the tower."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from infer.models import GREEDY, REPEATING, ask, build, cold, engine, same_bits

from atoll.config import UserError, VisionConfig
from atoll.infer.request import Request

IMAGE = 3
VISION = VisionConfig(
    vt_num_hidden_layers=2, vt_hidden_size=12, vt_num_attention_heads=3, qkv_hidden_size=24, vt_intermediate_size=20, patch_size=2,
    init_pos_emb_height=4, init_pos_emb_width=4, media_placeholder_token_id=IMAGE,
)  # fmt: skip
GRIDS = {0: (1, 4, 4), 1: (1, 16, 18), 2: (1, 2, 6)}  # 4, 72 and 3 features


@pytest.fixture(scope="module")
def model():
    return build(vision=VISION)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(4, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def show(*parts, count: int = 8, dtype=torch.float64, brightness: float = 1.0, **more) -> Request:
    """Lists of ids and numbers of images, as a request."""
    ids, pixels, grids = [], [], []
    for part in parts:
        if isinstance(part, int):
            t, h, w = GRIDS[part]
            ids += [IMAGE] * (h * w // 4)
            pixels.append(brightness * torch.randn(t * h * w, 3, 2, 2, generator=torch.Generator().manual_seed(part), dtype=dtype))
            grids.append([t, h, w])
        else:
            ids += part
    return ask(ids, count, pixel_values=torch.cat(pixels), grid_thws=torch.tensor(grids), **more)


def check_whole(model, request, answer):
    ids = torch.tensor([request.prompt + answer.ids])
    marks = ids.eq(IMAGE)
    marks[:, : len(request.prompt)] = False
    with torch.no_grad():
        logits = model(ids.masked_fill(marks, 4), pixel_values=request.pixel_values, grid_thws=request.grid_thws).logits
    expected = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[len(request.prompt) - 1 :, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-9)


def no_images_drawn(sampling=GREEDY):
    return dataclasses.replace(sampling, logit_bias={**sampling.logit_bias, IMAGE: -100.0})


@pytest.mark.parametrize("chunk", [64, 256])
def test_chunks_read_images_as_the_whole_pass_does(model, chunk):
    request = show(text(20), 0, text(30, 1), 1, text(9, 2), 2, sampling=no_images_drawn())
    answer = cold(model, request, prefill_chunk=chunk)
    check_whole(model, request, answer)


def test_an_image_is_part_of_the_name(model):
    e = engine(model)
    first, other = show(text(20), 1, text(60, 1)), show(text(20), 1, text(60, 1), brightness=1.1)
    a = e.run([first])[0]
    b = e.run([other])[0]
    assert e.stats()["prefix_hits"] == 0
    assert (a.ids, a.logprobs) != (b.ids, b.logprobs)
    assert e.run([first])[0].cached == 128
    late = show(text(20), 1, text(60, 1), 0, text(9))
    again = e.run([late])[0]
    assert again.cached == 128
    assert again.ids == cold(model, late).ids


def test_cold_is_warm_to_the_bit_through_the_middle_of_an_image():
    model = build(torch.float32, vision=VISION)
    first = show(text(40), 1, text(5, 1), dtype=torch.float32, turns=(80,))
    e = engine(model)
    e.run([first])
    more = show(text(40), 1, text(30, 2), 0, text(20, 3), dtype=torch.float32)
    answer = e.run([more])[0]
    assert answer.cached == 64  # within the image: positions 40 to 111
    assert same_bits(answer, cold(model, more))


def test_placeholders_that_were_drawn_are_text(model):
    sampling = dataclasses.replace(REPEATING, logit_bias={IMAGE: 90.0})
    e = engine(model, speculate="lookup")
    (answer,) = e.run([show(text(10), 0, text(10), sampling=sampling, count=20)])
    assert answer.ids == [IMAGE] * 20
    assert e.stats()["accepted"] > 0
    assert answer.ids == cold(model, show(text(10), 0, text(10), sampling=sampling, count=20)).ids
    assert cold(model, ask(text(9), 5, sampling=sampling)).ids == [IMAGE] * 5


def test_a_new_version_reads_images_again():
    mixed, other = build(vision=VISION), build(vision=VISION, seed=4)
    request = show(text(20), 1, text(20), sampling=no_images_drawn(), count=12)
    e = engine(mixed)
    e.submit(request)
    steps = [step for _ in range(6) for step in e.step()]
    mixed.load_state_dict(other.state_dict())
    e.set_version(1)
    while not e.idle():
        steps += e.step()
    answer = steps[-1].answer
    ids = torch.tensor([request.prompt + answer.ids])
    with torch.no_grad():
        logits = other(ids, pixel_values=request.pixel_values, grid_thws=request.grid_thws).logits
    expected = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[len(request.prompt) - 1 :, 0]
    cut = answer.versions.index(1)
    torch.testing.assert_close(torch.tensor(answer.logprobs[cut:], dtype=torch.float64), expected[cut:], rtol=0, atol=1e-9)


def test_images_that_do_not_fit_are_refused(model):
    good = show(text(5), 0, text(5))
    e = engine(model)
    for wrong, says in (
        (dataclasses.replace(good, pixel_values=None), "both of the two"),
        (dataclasses.replace(good, pixel_values=None, grid_thws=None), "without pixel_values"),
        (dataclasses.replace(good, prompt=[*good.prompt, IMAGE]), "5 media placeholders"),
        (dataclasses.replace(good, prompt=good.prompt[:6]), "1 media placeholders"),
        (dataclasses.replace(good, pixel_values=good.pixel_values[1:]), "pixel_values has shape"),
        (dataclasses.replace(good, grid_thws=torch.tensor([[1, 3, 4]])), "grid_thws"),
        (dataclasses.replace(good, prompt=[IMAGE, 9, *[IMAGE] * 3]), "side by side"),
    ):
        with pytest.raises(UserError, match=says) as refused:
            e.submit(wrong)
        assert "\n" not in str(refused.value)
    assert e.idle()
