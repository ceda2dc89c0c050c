"""Rows with pictures: whole documents by global index, none of them cut through a picture; the same wherever and however often."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from data.pictures import config_for, write_album

from atoll.config import UserError, load_config
from atoll.data import open_corpus
from atoll.data.images.balance import assign, step_rows
from atoll.data.images.picture import Picture
from atoll.data.images.samples import Item, Sample, document, pieces, runs
from atoll.data.loader import IGNORED, batch_of, make_batch
from atoll.data.packing import open_sampler
from atoll.train.step import micro_batches

LENGTH = 64


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("rendered")
    config = config_for(tmp, data__source="rendered")
    return config, open_corpus(config.data, config.model)


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("album")
    config = config_for(tmp, data__source=str(write_album(tmp / "album", 30)))
    return config, open_corpus(config.data, config.model)


def equal(a, b) -> bool:
    pairs = ((getattr(a, n), getattr(b, n)) for n in ("input_ids", "labels", "cu_seqlens", "pixel_values", "grid_thws"))
    return all(torch.equal(x, y) for x, y in pairs) and a.num_bytes == b.num_bytes


# ---------------------------------------------------------------- by index


@pytest.mark.parametrize("kind", ["rendered", "album"])
def test_a_row_is_a_function_of_its_index(kind, request):
    config, corpus = request.getfixturevalue(kind)
    again = open_corpus(config.data, config.model)
    one, other = open_sampler(corpus.train, LENGTH, 3), open_sampler(again.train, LENGTH, 3)
    batches = [make_batch(one, i, 1) for i in (5, 0, 7, 5)]
    assert equal(batches[0], batches[3])
    for i, batch in zip((5, 0, 7), batches, strict=False):
        assert equal(batch, make_batch(other, i, 1))
    assert not torch.equal(batches[0].input_ids, make_batch(open_sampler(corpus.train, LENGTH, 4), 5, 1).input_ids)
    whole = make_batch(one, 4, 4)
    parts = micro_batches(other, 4, 4, 1)
    assert torch.equal(whole.pixel_values, torch.cat([p.pixel_values for p in parts]))
    assert torch.equal(whole.labels, torch.cat([p.labels for p in parts], 1))


@pytest.mark.parametrize("kind", ["rendered", "album"])
def test_every_placeholder_has_its_feature_and_none_is_a_target(kind, request):
    config, corpus = request.getfixturevalue(kind)
    vision = config.model.vision
    rows = open_sampler(corpus.train, LENGTH, 0)
    batch = make_batch(rows, 0, 8)
    marks = batch.input_ids == vision.media_placeholder_token_id
    assert int(marks.sum()) == int((batch.grid_thws[:, 1] * batch.grid_thws[:, 2]).sum()) // 4 > 8
    assert batch.pixel_values.shape == (int(batch.grid_thws.prod(1).sum()), 3, 14, 14)
    assert (batch.labels[marks] == IGNORED).all()
    assert (batch.labels[batch.input_ids == config.model.pad_token_id] == IGNORED).all()
    counted = batch.labels[batch.labels != IGNORED]
    assert len(counted) > 50
    assert batch.num_bytes == corpus.train.token_bytes[counted.numpy()].sum()


def test_an_epoch_holds_every_document_once(album):
    _, corpus = album
    rows = open_sampler(corpus.train, 128, 0)
    count = int(rows.epoch_rows)
    for epoch in range(2):
        met = [s for i in range(epoch * count, (epoch + 1) * count) for s in rows.row(i)]
        assert sorted(s.ids.tobytes() for s in met) == sorted(
            corpus.train.document(i).astype(np.int64).tobytes() for i in range(len(corpus.train))
        )
        assert sum(len(s.items) for s in met) == len(corpus.train)


def test_held_out_words_and_digits_are_in_no_training_picture(rendered):
    _, corpus = rendered
    artist = corpus.train.pictures.draw.__self__
    other = {s.truth for s in corpus.heldout.pictures.samples if s.kind == "word"}
    assert len(other) > 300
    assert not other & {"the word " + word for word in artist.renderer.words}
    met = {s.truth for row in range(40) for s in open_sampler(corpus.train, 512, 0).row(row) if s.kind == "word"}
    assert len(met) > 400
    assert not met & other
    held = {s.items[0].load().patches.tobytes() for s in corpus.heldout.pictures.samples if s.kind == "digit"}
    assert len(held) + len(artist.renderer.names) == 1797


def test_answers_are_spelt_letter_by_letter_and_the_question_is_not_learnt(rendered):
    _, corpus = rendered
    for sample in corpus.heldout.pictures.samples[::50]:
        answer = sample.ids[sample.prompt : -1]
        assert corpus.tokenizer.decode(answer) == sample.truth
        letters = sample.truth.rpartition(" ")[2]
        assert [corpus.tokenizer.decode([i]) for i in answer[-len(letters) :]] == list(letters)
        assert np.flatnonzero(sample.trained).tolist() == list(range(sample.prompt, len(sample.ids)))


# ---------------------------------------------------------------- cutting

MODEL = load_config("tiny-vl").model
MARK = MODEL.vision.media_placeholder_token_id


def item(features: int) -> Item:
    grid = (1, 2, 2 * features)
    return Item(grid, lambda: Picture(np.zeros((4 * features, 3, 14, 14), np.uint8), grid, (28 * features, 28)))


def test_no_piece_cuts_an_item_and_text_is_learnt_once():
    numbers = np.random.RandomState(0)
    for _ in range(300):
        parts = [item(int(n)) if n % 2 else list(range(100, 100 + int(n))) for n in numbers.randint(1, 9, size=numbers.randint(1, 8))]
        sample, length = document(parts, MODEL), int(numbers.randint(9, 20))
        found = pieces(sample, length, MODEL, "x")
        assert all(2 <= len(p.ids) <= length for p in found)
        assert [i.grid for p in found for i in p.items] == [i.grid for i in sample.items]
        for piece in found:
            assert int((piece.ids == MARK).sum()) == sum(b - a for a, b in runs(piece.ids, piece.items, MODEL))
        learnt = sum(int(p.trained[1:].sum()) for p in found)
        assert 0 <= int(sample.trained[1:].sum()) - learnt <= len(sample.items)  # a row that begins behind an item has nothing to go by


def test_a_piece_goes_on_with_its_context():
    sample = document([list(range(100, 130))], MODEL)
    first, second = pieces(sample, 20, MODEL, "x")
    assert second.ids[0] == first.ids[-1]
    assert [*first.ids[1:], *second.ids[1:]] == list(sample.ids[1:])


def test_an_item_that_would_be_cut_moves_or_is_refused():
    sample = document([[100] * 6, item(5), [101] * 3], MODEL)
    moved = pieces(sample, 10, MODEL, "album:3")
    assert [len(p.items) for p in moved] == [0, 1]
    assert moved[1].ids.tolist()[:7] == [100, *[MARK] * 5, 101]
    with pytest.raises(UserError, match=r"image_cut = 'refuse': album:3: a row of 10 tokens would cut an image; raise stages.length"):
        pieces(sample, 10, MODEL, "album:3", "refuse")
    assert len(pieces(sample, 20, MODEL, "album:3", "refuse")) == 1


def test_an_item_longer_than_a_row_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"stages: length = 10: album:3 has an image of 11 tokens.*raise stages.length to 11") as caught:
        pieces(document([item(11), [100]], MODEL), 10, MODEL, "album:3")
    assert "\n" not in str(caught.value)
    assert [len(p.ids) for p in pieces(document([item(10), [100, 101]], MODEL), 10, MODEL, "x")] == [10, 3]


# ---------------------------------------------------------------- ranks


def test_rows_are_shared_out_alike_and_evenly():
    numbers = np.random.RandomState(2)
    for places in (1, 2, 4):
        for _ in range(50):
            costs = (100 + numbers.exponential(200, size=8)).tolist()
            found = assign(costs, places)
            assert found == assign(costs, places)
            assert sorted(itertools.chain(*found)) == list(range(8))
            assert {len(rows) for rows in found} == {8 // places}
            loads = [sum(costs[i] for i in rows) for rows in found]
            in_order = [sum(costs[p * 8 // places : (p + 1) * 8 // places]) for p in range(places)]
            assert max(loads) - min(loads) <= max(in_order) - min(in_order) + max(costs)
    assert assign([9, 1, 1, 9], 2) == [[0, 1], [2, 3]]


def test_ranks_see_the_same_pictures_however_a_step_is_cut(album):
    _, corpus = album
    rows = open_sampler(corpus.train, LENGTH, 0)
    whole = batch_of(rows, range(8, 16))
    for places in (1, 2, 4, 8):
        mine = [step_rows(rows, 8, 8, place, places) for place in range(places)]
        assert sorted(itertools.chain(*mine)) == list(range(8, 16))
        grids = torch.cat([batch_of(rows, r).grid_thws for r in mine])
        assert sorted(grids.tolist()) == sorted(whole.grid_thws.tolist())
    costs = [rows.cost(i) for i in range(8, 16)]
    shared = [sum(rows.cost(i) for i in step_rows(rows, 8, 8, p, 2)) for p in range(2)]
    assert abs(shared[0] - shared[1]) <= abs(sum(costs[:4]) - sum(costs[4:]))


def test_rows_of_text_keep_their_order(tmp_path):
    assert step_rows(object(), 16, 8, 1, 4) == [18, 19]  # type: ignore[arg-type]


def test_samples_know_their_prompt():
    sample = document([item(2), [100, 101, 102]], MODEL)
    assert isinstance(sample, Sample)
    assert sample.ids[: sample.prompt].tolist() == [MODEL.bos_token_id, MARK, MARK, 100]
    assert document([[100, 101]], MODEL).prompt == 0
    assert document([[100], item(2)], MODEL).prompt == 0
