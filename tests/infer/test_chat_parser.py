"""Reading back what a model wrote: the same message whatever the pieces, nothing lost, never an exception."""

from __future__ import annotations

import json

import pytest
from conversations import CALLING, PLAIN, TOKENIZER, assistants
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.config import UserError
from atoll.data.chat import MARKERS, render, text_of, tokenize
from atoll.data.messages import read_messages
from atoll.data.tokenizer import Tokenizer
from atoll.infer.chat_parser import ChatParser, events_of, parse
from atoll.infer.parsed import Event, Parsed


def written(message: dict, thinking: bool = True) -> list[int]:
    """Ids that the model would write after the generation prefix to say `message`."""
    prefix, _ = tokenize(render([], thinking=thinking, add_generation_prompt=True), TOKENIZER)
    return tokenize(render([message], thinking=thinking), TOKENIZER)[0][len(prefix) :]


def spelt(short: str) -> str:
    """`[/think][response]` ... to markers."""
    return short.replace("[/", "<|close|>").replace("[", "<|open|>").replace("]", "<|sep|>").replace(".", "<|end_of_msg|>")


def merged(events: list[Event]) -> list[Event]:
    out: list[Event] = []
    for e in events:
        if out and out[-1].kind == e.kind and out[-1].call == e.call and e.kind != "call":
            out[-1] = Event(e.kind, out[-1].text + e.text, e.call)
        else:
            out.append(e)
    return out


def joined(events: list[Event], kind: str, call: int = 0) -> str:
    return "".join(e.text for e in events if e.kind == kind and e.call == call)


# ---------------------------------------------------------------- round trip


@settings(max_examples=200, deadline=None)
@given(assistants(), st.booleans())
def test_what_is_rendered_is_read_back(message, thinking):
    ids = written(message, thinking)
    parser = ChatParser(TOKENIZER, thinking)
    events = list(events_of(parser, ids))
    got = parser.message
    assert (got.finished, got.malformed) == (True, False)
    assert got.thinking == (message.get("reasoning", "") if thinking else None)
    assert got.content == message["content"]
    calls = read_messages([message])[0].calls
    assert [(c.name, c.arguments) for c in got.tool_calls] == [(c.name, c.arguments) for c in calls]
    assert joined(events, "content") == got.content
    assert joined(events, "thinking") == (got.thinking or "")
    assert [e.name for e in events if e.kind == "call"] == [c.name for c in calls]
    for number, call in enumerate(calls, 1):
        assert json.loads(joined(events, "arguments", number)) == call.arguments
    assert written(got.as_message(), thinking) == ids
    whole, _ = tokenize(render([message], thinking=thinking), TOKENIZER)
    assert parse(whole, TOKENIZER, opened=False) == got


def test_arguments_that_are_no_object_come_back_as_text():
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}
    got = parse(written(message), TOKENIZER)
    assert got.tool_calls[0].arguments == '{"a": '
    assert got.malformed
    assert written(got.as_message()) == written(message)


def test_long_arguments_stream():
    """Each token of a string argument is out as soon as its characters are whole, as JSON."""
    text = 'line "one"\n\té中😀 ' * 40
    parser = ChatParser(TOKENIZER)
    begun, pieces = False, []
    for token in written({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"code": text}}}]}):
        events = parser.feed(token)
        begun |= any(e.kind == "call" for e in events)
        pieces += [e.text for e in events if e.kind == "arguments"]
    assert json.loads("".join(pieces)) == {"code": text}
    assert len(pieces) > 100
    assert begun


# ---------------------------------------------------------------- every split, every accident


@settings(max_examples=60, deadline=None)
@given(assistants().filter(lambda m: "<|" not in json.dumps(m)))
@example({**CALLING[1], "reasoning": CALLING[1]["reasoning_content"]})
def test_every_split_of_a_text_gives_the_same(message):
    text = TOKENIZER.decode(written(message))
    whole = ChatParser()
    events = merged(list(events_of(whole, [text])))
    assert whole.message == parse(written(message), TOKENIZER)
    assert events == merged(list(events_of(ChatParser(TOKENIZER), written(message))))
    for at in range(1, len(text)):
        parser = ChatParser()
        assert merged(list(events_of(parser, [text[:at], text[at:]]))) == events
        assert parser.message == whole.message
    assert merged(list(events_of(ChatParser(), text))) == events


TAGS = ["message", "think", "response", "tools", 'call tool="f" index="1"']
TAGS += ['argument key="k" type="number"', 'argument key="k" type="string"']
TAGS += ['json type="object"', "call", "argument", "other", "", " think ", 'message role="user"']
soup = st.lists(
    st.one_of(
        st.sampled_from(MARKERS),
        st.sampled_from(TAGS),
        st.sampled_from([f"<|{m}|>{t}<|sep|>" for m in ("open", "close") for t in TAGS]),
        st.sampled_from(["x", " ", "12", '{"a": 1}', "é", "<|", "|>", "<|open"]),
    ),
    max_size=25,
)


@settings(max_examples=500, deadline=None)
@given(soup, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_any_soup_gives_a_message_the_same_whatever_the_pieces(parts, thinking, opened, random):
    text = "".join(parts)
    whole = ChatParser(None, thinking, opened)
    events = merged(list(events_of(whole, [text])))
    cuts = sorted(random.sample(range(len(text) + 1), min(len(text), 6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = ChatParser(None, thinking, opened)
    assert merged(list(events_of(parser, pieces))) == events
    assert parser.message == whole.message
    assert (joined(events, "content"), joined(events, "thinking")) == (parser.message.content, parser.message.thinking or "")
    assert [e.kind for e in events].count("end") == 1
    render([parser.message.as_message()])  # whatever came, it can stand in the next prompt
    for number, call in enumerate(parser.message.tool_calls, 1):
        if isinstance(call.arguments, dict) and not parser.message.malformed:
            assert json.loads(joined(events, "arguments", number)) == call.arguments


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 12), st.integers(0, TOKENIZER.vocab_size - 1)), max_size=60), st.booleans())
def test_any_ids_give_a_message(ids, thinking):
    parser = ChatParser(TOKENIZER, thinking)
    events = list(events_of(parser, ids))
    assert joined(events, "content") == parser.message.content
    if not parser.message.malformed:
        stop = TOKENIZER.special["<|end_of_msg|>"]
        assert parser.message.finished == (stop in ids)
    render([parser.message.as_message()])


@settings(max_examples=100, deadline=None)
@given(assistants(), st.data())
def test_a_message_cut_off_keeps_what_was_whole(message, data):
    ids = written(message)
    at = data.draw(st.integers(0, len(ids) - 1))
    got = parse(ids[:at], TOKENIZER)
    assert not got.malformed
    assert message["content"].startswith(got.content.rstrip("\ufffd"))
    calls = read_messages([message])[0].calls
    assert [(c.name, c.arguments) for c in got.tool_calls] == [(c.name, c.arguments) for c in calls[: len(got.tool_calls)]]


GOOD = "[/response][/message]."
CALLS = '[/think][response][/response][tools][call tool="f" index="1"]'
TOOLS_FIRST = CALLS.removeprefix("[/think][response][/response]")
NUMBER, STRING = '[argument key="k" type="number"]', '[argument key="k" type="string"]'


@pytest.mark.parametrize(
    ("short", "thinking", "content", "calls"),
    [
        ("a[response]b" + GOOD, "a", "b", []),  # the think channel was not closed
        ("a" + TOOLS_FIRST + NUMBER + "1[/argument][/call][/tools][/message].", "a", "", [("f", {"k": 1})]),
        ("a[/think][response]b.", "a", "b", []),  # nothing was closed
        ("a[/think][response]b[/message].", "a", "b", []),
        ("a[/think][/message].", "a", "", []),  # no response
        ("a[/think]stray[response]b" + GOOD, "a", "strayb", []),
        ("a[/think][response]b[other]c" + GOOD, "a", "b<|open|>other<|sep|>c", []),
        ("a[/think][response]b[/other]c" + GOOD, "a", "b<|close|>other<|sep|>c", []),
        ("a[/think][response]b]c" + GOOD, "a", "b<|sep|>c", []),
        ("a[/think][response]b[x[/response][/message].", "a", "b<|open|>x", []),
        ("a[/think][response]b" + GOOD + "more", "a", "b", []),
        ("a[/think][response]b[/response][response]c" + GOOD, "a", "bc", []),
        ("a[/think][response]b[/response][/message][message]", "a", "b<|open|>message<|sep|>", []),
        (CALLS.replace("1", "2") + "[/call][/tools][/message].", "", "", [("f", {})]),
        (CALLS + NUMBER + "no[/argument][/call][/tools][/message].", "", "", [("f", {"k": "no"})]),
        (CALLS + NUMBER + "1[/call][/tools][/message].", "", "", [("f", {"k": 1})]),
        (CALLS + STRING + "a" + STRING.replace("k", "j", 2).replace("jey", "key") + "b[/argument][/call][/tools][/message].",
         "", "", [("f", {"k": "a", "j": "b"})]),
    ],
)  # fmt: skip
def test_what_breaks_the_format_stays_readable_and_is_flagged(short, thinking, content, calls):
    got = parse(spelt(short))
    assert got.malformed
    assert (got.thinking, got.content) == (thinking, content)
    assert [(c.name, c.arguments) for c in got.tool_calls] == calls


def test_spaces_around_tags_do_no_harm():
    got = parse(spelt('a[/ think]\n [response ]b[/response] \n[tools]\n[ call  tool="f"  index="1" ] [/call]\n[/tools][/message] .\n'))
    assert got == Parsed("a", "b", got.tool_calls, True, False)
    assert got.tool_calls[0].name == "f"


def test_padding_and_the_end_of_the_document_after_the_end_are_nothing():
    ids = written(PLAIN[2])
    assert parse([*ids, 1, 2, 2], TOKENIZER) == parse(ids, TOKENIZER)
    assert parse([*ids[:-1], 1], TOKENIZER).malformed


def test_text_that_spells_markers_is_text_in_ids():
    said = text_of(render(PLAIN))
    got = parse(written({"role": "assistant", "reasoning": said, "content": said}), TOKENIZER)
    assert (got.thinking, got.content, got.malformed) == (said, said, False)


def test_ids_need_a_tokenizer_with_the_markers():
    with pytest.raises(ValueError, match="tokenizer"):
        ChatParser().feed(3)
    content = json.loads(TOKENIZER.text)
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<|sep|>"]
    with pytest.raises(UserError, match="sep"):
        ChatParser(Tokenizer(json.dumps(content)))
