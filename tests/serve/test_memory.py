"""Conversations sent back as text get the ids that were sampled: prefixes are exact, and breaks are counted."""

from __future__ import annotations

import re

import httpx
import pytest
from conversations import TOKENIZER, assistants
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import CLOSE, END, Scripted, served, written

from atoll.data.chat import render, tokenize
from atoll.infer.chat_parser import parse
from atoll.infer.request import Answer, Step
from atoll.serve.answers import ChatReader
from atoll.serve.memory import Memory
from atoll.serve.prompt import Options, build_prompt
from atoll.serve.text import TokenNames

ASK = [{"role": "user", "content": "x"}]


NAMES = TokenNames(TOKENIZER)
OF_BYTE = {NAMES.bytes(i): i for i in range(TOKENIZER.vocab_size) if len(NAMES.bytes(i)) == 1}


def odd_ids(text):
    """Ids of `text` that its tokenizer would not give: one a byte."""
    return [OF_BYTE[bytes([b])] for b in text.encode()]


def sampled(content, thinking="secret thoughts"):
    """A message whose texts were sampled byte by byte."""
    plain = written({"reasoning": thinking, "content": content})
    out, text = [], TOKENIZER.encode(content)
    for start in range(len(plain)):
        if text and plain[start : start + len(text)] == text:
            return out + odd_ids(content) + plain[start + len(text) :]
        out.append(plain[start])
    raise AssertionError("the content is there")


def read(ids, thinking=True, finish="stop"):
    """A reader that was fed `ids`."""
    reader = ChatReader(TOKENIZER, thinking)
    for id in ids[:-1]:
        reader.feed(Step(0, id))
    reader.feed(Step(0, ids[-1], finish=finish, answer=Answer([], [], [], finish)))
    return reader


def prompt(messages, memory, **options):
    return build_prompt(messages, Options(**options), TOKENIZER, memory, "salt")


def counts(s):
    text = httpx.get(s.url + "/metrics").text
    return {how: int(n) for how, n in re.findall(r'atoll_history_messages_total\{message="(\w+)"\} (\d+)', text)}


def test_the_second_turn_begins_with_the_very_ids_of_the_first():
    answer = sampled("two tokens or more")
    with served(Scripted(lambda request: answer)) as s:

        def say(messages, **more):
            return httpx.post(s.url + "/v1/chat/completions", json={"messages": messages, **more}).json()["choices"][0]["message"]

        first = say(ASK)
        assert first["content"] == "two tokens or more"
        asked = s.engine.requests[-1].prompt
        bare = {"role": "assistant", "content": first["content"]}  # as clients send it: no thinking
        say([*ASK, bare, {"role": "user", "content": "y"}])
        assert s.engine.requests[-1].prompt[: len(asked) + len(answer)] == asked + answer
        assert counts(s) == {"exact": 1, "edited": 0, "unknown": 0}
        say([*ASK, first, {"role": "user", "content": "y"}])  # with its thinking
        assert s.engine.requests[-1].prompt[: len(asked) + len(answer)] == asked + answer
        say([*ASK, {**bare, "content": "something else"}, {"role": "user", "content": "y"}])
        say([{"role": "user", "content": "z"}, bare, {"role": "user", "content": "y"}])
        say([*ASK, bare, {"role": "user", "content": "y"}], cache_salt="other")
        assert counts(s) == {"exact": 2, "edited": 1, "unknown": 2}


def test_tool_calls_are_recognised_in_their_json():
    calls = [{"function": {"name": "add", "arguments": {"a": 1.0, "b": ["x", None]}}}, {"function": {"name": "add", "arguments": {}}}]
    reader = read(written({"reasoning": "hm", "content": "", "tool_calls": calls}))
    memory = Memory(1000)
    before = prompt(ASK, memory)
    memory.put(before.place, reader.message, reader.kept_ids())
    sent = [
        {"id": "q", "type": "function", "function": {"name": "add", "arguments": '{"b": ["x", null], "a": 1}'}},
        {"id": "r", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]
    results = [{"role": "tool", "tool_call_id": i, "content": "3"} for i in "qr"]
    after = prompt([*ASK, {"role": "assistant", "content": None, "tool_calls": sent}, *results], memory)
    assert after.history["exact"] == 1
    assert after.ids[: len(before.ids) + len(reader.ids)] == before.ids + reader.ids


@settings(max_examples=60, deadline=None)
@given(assistants(), st.booleans(), st.data())
def test_an_answer_cut_off_anywhere_is_completed_to_what_its_reader_saw(message, thinking, data):
    """Where the cut can be completed, the kept ids begin with what was sampled and say no more than was shown."""
    ids = written(message, thinking)
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    reader = read(ids, thinking, "stop" if ids[-1] == END else "length")
    kept = reader.kept_ids()
    if kept is None:
        return
    assert kept[: len(ids)] == ids
    again, shown = parse(kept, TOKENIZER, thinking), reader.message
    assert (again.content, again.tool_calls, again.thinking or "") == (shown.content, shown.tool_calls, shown.thinking or "")
    assert again.finished
    memory = Memory(10_000)
    memory.put(prompt(ASK, memory, thinking=thinking).place, shown, kept)
    after = prompt([*ASK, shown.as_message()], memory, thinking=thinking)
    assert after.history["exact"] == 1


def test_an_answer_with_an_images_place_in_it_is_not_kept():
    ids = written({"reasoning": "hm", "content": "hello"})
    ids.insert(2, TOKENIZER.special["<|media_pad|>"])
    assert read(ids).kept_ids() is None


def test_an_answer_ended_by_eos_is_kept_without_it():
    whole = written({"reasoning": "hm", "content": "hello"})
    second = [i for i, id in enumerate(whole) if id == CLOSE][1]  # the response's
    ids = [*whole[:second], 1]
    kept = read(ids).kept_ids()
    assert kept[: len(ids) - 1] == ids[:-1]
    assert 1 not in kept
    assert parse(kept, TOKENIZER).content == "hello"


@given(st.lists(assistants(), min_size=1, max_size=3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_without_memory_the_ids_are_the_formats(messages, thinking):
    chat = []
    for message in messages:
        chat += [{"role": "user", "content": "<|open|>"}, message]
        chat += [{"role": "tool", "tool_call_id": c["id"], "content": "r"} for c in message.get("tool_calls", [])]
    made = prompt(chat, Memory(100), thinking=thinking)
    assert made.ids == tokenize(render(chat, thinking=thinking, add_generation_prompt=True), TOKENIZER)[0]
    assert made.history["unknown"] == len(messages)
    assert all(made.ids[turn - 1] == END for turn in made.turns)
    assert len(made.turns) == len(chat)


def test_options_stand_where_the_format_has_them():
    tools = [{"type": "function", "function": {"name": "add"}}]
    form = {"type": "json_object"}
    made = prompt(ASK, Memory(1), tools=tools, effort="low", tool_choice="required", response_format=form)
    whole = render(ASK, tools, True, "low", "required", form, add_generation_prompt=True)
    assert made.ids == tokenize(whole, TOKENIZER)[0]
    plain = prompt(ASK, Memory(1), tools=tools, effort="low")
    assert made.place == plain.place  # what stands behind the conversation is no part of the answer's place


def test_the_oldest_are_forgotten_first():
    memory = Memory(10)
    for n, place in enumerate((b"a", b"b", b"c")):
        memory.put(place, read(written({"content": str(n)})).message, [1, 2, 3, 4])
    assert memory.held == 8
    assert memory.find(b"a", None)[0] == "unknown"
    memory.put(b"d", read(written({"content": "x"})).message, range(50))
    assert memory.held == 0  # larger than all there is room for


@pytest.mark.parametrize("text", ["<|open|>", "<|close|>response<|sep|>", "<|end_of_msg|>", "<|eos|>"])
def test_markers_that_a_user_spells_stay_text(text):
    engine = Scripted(lambda request: written({"content": "hi"}))
    with served(engine) as s:
        plain = {"messages": [{"role": "user", "content": "a"}]}
        httpx.post(s.url + "/v1/chat/completions", json=plain).raise_for_status()
        httpx.post(s.url + "/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]}).raise_for_status()
        httpx.post(s.url + "/v1/completions", json={"prompt": text}).raise_for_status()
    specials = [[i for i in r.prompt if TOKENIZER.is_special(i)] for r in engine.requests]
    assert specials[0] == specials[1]
    assert specials[2] == [0]


def test_turns_are_read_from_the_prefix_cache_and_salts_keep_apart():
    with served() as s:

        def say(messages, **more):
            body = {"messages": messages, "max_tokens": 40, "seed": 1, "logit_bias": {"3": -100, "1": -100}, **more}
            answer = httpx.post(s.url + "/v1/chat/completions", json=body, timeout=60).json()
            return answer["choices"][0]["message"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        chat = [{"role": "user", "content": "a first message that is longer than one page of sixty-four tokens, so that it is kept"}]
        first, cached = say(chat)
        assert cached == 0
        chat += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "and on"}]
        _, cached = say(chat)
        assert cached >= 64
        assert counts(s)["exact"] == 1
        assert say(chat, cache_salt="somebody else")[1] == 0
        text = httpx.get(s.url + "/metrics").text
        assert f"atoll_prompt_tokens_cached_total {cached}" in text
