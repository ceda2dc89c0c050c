"""JSON lines of conversations become token sets: what is trained, which side, what is refused, how rows are packed."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conversations import CALLING, ONE_CALL, PLAIN, TOKENIZER, TOOLS, chats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.config import DataConfig, ModelConfig, UserError
from atoll.data import open_corpus
from atoll.data.chat import render, tokenize
from atoll.data.documents import from_conversations
from atoll.data.loader import IGNORED, make_batch
from atoll.data.packing import ConversationSampler, open_sampler, pack
from atoll.evals.bpb import bits_per_byte, windows
from atoll.model import next_tokens

MODEL = ModelConfig(vocab_size=400)
RECORDS = [{"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"{i}, {i + 1}"}]} for i in range(40)]
RECORDS += [{"messages": PLAIN, "id": 7}, {"messages": CALLING, "tools": TOOLS}, {"messages": ONE_CALL, "thinking": False, "effort": None}]


def write(path, records) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


@pytest.fixture
def config(tmp_path):
    TOKENIZER.save(tmp_path)
    source = write(tmp_path / "chats.jsonl", RECORDS)
    return DataConfig(kind="chat", source=source, heldout=0.2, tokenizer=str(tmp_path / "tokenizer.json"), cache=str(tmp_path / "cache"))


def expected(record) -> tuple[list[int], list[bool]]:
    return tokenize(render(record["messages"], record.get("tools"), thinking=record.get("thinking", True)), TOKENIZER)


def test_a_line_is_a_conversation_as_it_is_rendered(config):
    corpus = open_corpus(config, MODEL)
    names = corpus.train.names + corpus.heldout.names
    assert sorted(names, key=lambda n: int(n.split(":")[1])) == [f"chats.jsonl:{i + 1}" for i in range(len(RECORDS))]
    assert len(corpus.heldout) >= 2
    for token_set in (corpus.train, corpus.heldout):
        for index, name in enumerate(token_set.names):
            ids, trained = expected(RECORDS[int(name.split(":")[1]) - 1])
            span = slice(token_set.offsets[index], token_set.offsets[index + 1])
            assert token_set.tokens[span].tolist() == ids
            assert token_set.trained[span].tolist() == trained
            assert token_set.doc_bytes[index] == sum(TOKENIZER.token_bytes(i) for i, t in zip(ids, trained, strict=True) if t)
    assert [len(text) for _, text in corpus.heldout_files] == corpus.heldout.doc_bytes.tolist()
    counted = int(corpus.train.trained.sum())
    assert f"{counted:,} of {corpus.train.num_tokens:,} tokens ({counted / corpus.train.num_tokens:.0%})" in corpus.notes[0]


def test_the_split_goes_by_the_conversation_and_nothing_else(config, tmp_path):
    first = open_corpus(config, MODEL)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "b.jsonl", RECORDS[::-1][:20])
    write(
        folder / "a.jsonl", [*RECORDS[:-20], {"messages": [{"role": "user", "content": "more"}, {"role": "assistant", "content": "yes"}]}]
    )
    second = open_corpus(dataclasses.replace(config, source=str(folder)), MODEL)
    assert set(dict(first.heldout_files).values()) <= set(dict(second.heldout_files).values())
    assert len(second.train) + len(second.heldout) == len(RECORDS) + 1


def test_one_conversation_under_other_options_stays_on_its_side(config):
    before = open_corpus(config, MODEL)
    after = open_corpus(dataclasses.replace(config, thinking=False), MODEL)
    assert after.heldout.names == before.heldout.names
    write(Path(config.source), [{**r, "effort": e, "thinking": True} for r in RECORDS for e in ("low", "high")])
    names = open_corpus(config, MODEL).heldout.names
    assert len(names) == 2 * len(before.heldout)
    assert {(int(n.split(":")[1]) - 1) // 2 for n in names} == {int(n.split(":")[1]) - 1 for n in before.heldout.names}


def test_thinking_may_be_switched_off_for_all(config):
    corpus = open_corpus(dataclasses.replace(config, thinking=False), MODEL)
    ids = corpus.train.document(corpus.train.names.index("chats.jsonl:3"))
    assert ids.tolist() == tokenize(render(RECORDS[2]["messages"], thinking=False), TOKENIZER)[0]


def test_conversations_without_an_assistant_are_left_out_and_said(config):
    write_path = config.source
    with open(write_path, "a") as file:
        file.write("\n" + json.dumps({"messages": PLAIN[:2]}) + "\n")
    corpus = open_corpus(config, MODEL)
    assert len(corpus.train) + len(corpus.heldout) == len(RECORDS)
    assert corpus.notes[1] == f"left out: 1 without an assistant's message, the first chats.jsonl:{len(RECORDS) + 2}"


def test_a_tokenizer_can_be_trained_on_conversations(config):
    fresh = dataclasses.replace(config, tokenizer="train")
    corpus, again = open_corpus(fresh, MODEL), open_corpus(fresh, MODEL)
    assert corpus.tokenizer.fingerprint == again.tokenizer.fingerprint
    assert corpus.tokenizer.fingerprint != TOKENIZER.fingerprint
    assert np.array_equal(corpus.train.tokens, again.train.tokens)


def test_max_bytes_stops_reading(config):
    corpus = open_corpus(dataclasses.replace(config, max_bytes=500), MODEL)
    assert 2 <= len(corpus.train) < 12


def test_a_small_file_gives_both_sides_one(config, tmp_path):
    source = write(tmp_path / "two.jsonl", RECORDS[:2])
    corpus = open_corpus(dataclasses.replace(config, source=source, heldout=1e-9), MODEL)
    assert (len(corpus.train), len(corpus.heldout)) == (1, 1)


GOOD = json.dumps(RECORDS[0])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, "{"], "chats.jsonl:2: not JSON"),
        ([GOOD, "", "[1]"], "chats.jsonl:3: not a JSON object"),
        ([GOOD, '{"message": []}'], "chats.jsonl:2: message: no such field; did you mean messages?"),
        ([GOOD, '{"conversations": []}'], "chats.jsonl:2: messages is missing; the line has 'conversations'"),
        ([GOOD, '{"messages": [{"role": "usr", "content": "x"}]}'], "chats.jsonl:2: messages[0].role = 'usr': did you mean 'user'"),
        ([GOOD, '{"messages": [], "thinking": "yes"}'], "chats.jsonl:2: thinking = 'yes'"),
        ([GOOD, '{"messages": [], "tools": {}}', '{"messages": [], "tools": 3}'], "chats.jsonl:3: tools = 3"),
        ([GOOD, '{"messages": [], "effort": "much"}'], "chats.jsonl:2: effort = 'much'"),
        (
            [GOOD, '{"messages": [{"role": "user", "content": "\\ud800"}]}'],
            "chats.jsonl:2: messages[0].content = '\\ud800': a lone surrogate",
        ),
        (
            [json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "width": 1, "height": 1}]}]})],
            "chats.jsonl:1: an image in a message",
        ),
        ([GOOD], "one conversation cannot be both"),
        (['{"messages": []}'], "no conversation with an assistant's message"),
        ([], "no conversation with an assistant's message"),
    ],
)
def test_a_bad_line_is_one_line_with_file_and_number(config, lines, said):
    write(Path(config.source), lines)
    with pytest.raises(UserError) as caught:
        open_corpus(config, MODEL)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_and_places_that_hold_nothing_are_refused(config, tmp_path):
    (tmp_path / "raw.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    (tmp_path / "empty").mkdir()
    for source, said in (("raw.jsonl", "raw.jsonl:1: not JSON"), ("none.jsonl", "no such file"), ("empty", "no .jsonl file")):
        with pytest.raises(UserError, match=said):
            open_corpus(dataclasses.replace(config, source=str(tmp_path / source)), MODEL)


# ---------------------------------------------------------------- rows


def token_set(records):
    pairs = [(str(i), *map(np.asarray, expected(r))) for i, r in enumerate(records)]
    return from_conversations(pairs, TOKENIZER, MODEL)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packing_keeps_all_and_exceeds_nothing(sizes):
    rows = pack(np.asarray(sizes), 50)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in row) for row in rows]
    assert max(filled) <= 50
    assert sum(f <= 25 for f in filled) <= 1  # two half-empty rows would have been one


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(chats(), min_size=1, max_size=6), st.integers(0, 3))
def test_each_epoch_trains_each_assistants_token_once_and_nothing_else(drawn, seed):
    """Counted by what the model's own shift makes of a batch's labels: targets = trained tokens exactly."""
    data = token_set([{"messages": messages} for messages in drawn])
    length = int(np.diff(data.offsets).max())
    sampler = open_sampler(data, length, seed)
    assert isinstance(sampler, ConversationSampler)
    rows = int(sampler.epoch_rows)
    for epoch in range(2):
        batch = make_batch(sampler, epoch * rows, rows)
        targets = next_tokens(batch.labels, batch.cu_seqlens)
        assert int((targets != IGNORED).sum()) == int(data.trained.sum())
        seen = []
        bounds = batch.cu_seqlens.tolist()
        for begin, end in itertools.pairwise(bounds):
            ids = batch.input_ids[0, begin:end]
            if bool((ids == data.pad).all()):
                assert bool((batch.labels[0, begin:end] == IGNORED).all())
                continue
            seen.append(ids.tolist())
        assert sorted(seen) == sorted(data.document(i).tolist() for i in range(len(data)))
        assert batch.num_bytes == data.num_bytes


def test_rows_are_a_function_of_their_index():
    data = token_set(RECORDS)
    a, b = (ConversationSampler(data, 700, 3) for _ in range(2))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    rows = {i: a[i] for i in order}
    for i in range(40):
        assert all(np.array_equal(x, y) for x, y in zip(rows[i], b[i], strict=True))
    whole = make_batch(a, 3, 6)
    parts = [make_batch(b, 3, 2), make_batch(b, 5, 4)]
    assert torch.equal(whole.labels, torch.cat([p.labels for p in parts], 1))
    epoch = int(a.epoch_rows)
    assert sorted(a[i][0].tolist() for i in range(epoch)) == sorted(a[i][0].tolist() for i in range(epoch, 2 * epoch))
    with pytest.raises(IndexError):
        a[-1]


def test_a_long_conversation_ends_after_an_assistants_message_or_is_left_out():
    long = {"messages": [m for i in range(5) for m in ({"role": "user", "content": f"Count {i}"}, {"role": "assistant", "content": "yes"})]}
    ids, trained = expected(long)
    ends = [i + 1 for i, (t, token) in enumerate(zip(trained, ids, strict=True)) if t and token == TOKENIZER.special["<|end_of_msg|>"]]
    data = token_set([long, {"messages": [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "x"}]}])
    for length in (ends[2], ends[2] + 1, ends[3] - 1):
        sampler = ConversationSampler(data, length, 0)
        assert (sampler.cut, sampler.dropped, sampler.epoch_rows) == (1, 1, 1)
        assert sampler[0][0][: ends[2]].tolist() == ids[: ends[2]]
        assert (sampler[0][0][ends[2] :] == data.pad).all()
        assert sampler.trained(0)[: ends[2]].tolist() == trained[: ends[2]]
        assert "1 cut after an earlier message, 1 left out" in sampler.note
    with pytest.raises(UserError, match=f"length = {ends[0] - 1}"):
        ConversationSampler(data, ends[0] - 1, 0)


# ---------------------------------------------------------------- measuring


@pytest.mark.parametrize("length", [24, 64, 4096])
def test_windows_count_each_assistants_token_once(length):
    data = token_set(RECORDS)
    counted = np.zeros(data.num_tokens, dtype=int)
    for _, last, first in windows(data, length, length // 4):
        counted[first:last] += 1
        assert data.trained[first:last].any()
    assert (counted[data.trained] == 1).all()


class Uniform(torch.nn.Module):
    """Every token is as likely as every other."""

    def forward(self, ids, labels, cu_seqlens):
        from types import SimpleNamespace

        count = (next_tokens(labels, cu_seqlens) != IGNORED).sum()
        return SimpleNamespace(loss=torch.tensor(np.log(400.0)), num_targets=count)


def test_held_out_loss_is_a_token_and_a_byte_of_what_assistants_say():
    data = token_set(RECORDS)
    measured = bits_per_byte(Uniform(), data, 64)
    assert measured["tokens"] == int(data.trained.sum())
    assert measured["nats_per_token"] == pytest.approx(np.log(400))
    assert measured["bits_per_byte"] == pytest.approx(data.trained.sum() * np.log2(400) / data.num_bytes)
    assert bits_per_byte(Uniform(), data, 64, limit_tokens=80)["tokens"] < measured["tokens"]
