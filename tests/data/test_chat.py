"""The chat format: every row of its table spelt out, no marker out of a user's words, and ids that do not depend on what follows."""

from __future__ import annotations

import json

import pytest
from conversations import CALLING, ONE_CALL, PLAIN, TOKENIZER, TOOLS, WEATHER, chats, words
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import UserError
from atoll.data.chat import EFFORTS, MARKERS, render, text_of, tokenize
from atoll.data.tokenizer import Tokenizer


def drawn(messages, **options) -> str:
    """The rendered text in a shorter spelling: `<message role="user">` ... `</message>`, `.` ends a message."""
    segments = render(messages, **options)
    short = {"<|open|>": "<", "<|close|>": "</", "<|sep|>": ">", "<|end_of_msg|>": "."}
    return "".join(short.get(s.text, s.text) if s.marker else s.text for s in segments)


def trained(messages, **options) -> str:
    return "".join(s.text for s in render(messages, **options) if s.trained)


def test_a_plain_conversation():
    assert drawn(PLAIN) == (
        '<message role="system">Be brief.</message>.'
        '<message role="user" name="A &amp; &quot;B&quot;">What is 2 + 3?</message>.'
        '<message role="assistant"><think>Two and three.</think><response>5</response></message>.'
        '<message role="user">And 4 + 5?\n</message>.'
        '<message role="assistant"><think></think><response>9</response></message>.'
    )


def test_instruct_mode_drops_the_think_channel_and_opens_the_response():
    assert drawn(PLAIN[1:3], thinking=False, add_generation_prompt=True, effort="low").endswith(
        '<message role="assistant"><response>5</response></message>.<message role="assistant"><response>'
    )
    assert "think" not in drawn(PLAIN, thinking=False, effort="max")
    assert drawn([], add_generation_prompt=True) == '<message role="assistant"><think>'


def test_tool_calls_have_typed_arguments_and_results_come_in_call_order():
    assert drawn(CALLING[1:]) == (
        '<message role="assistant"><think>Ask the tools.</think><response>I look.</response><tools>'
        '<call tool="weather" index="1"><argument key="city" type="string">Pa"ris & <Co>\n</argument>'
        '<argument key="days" type="number">3</argument></call>'
        '<call tool="weather" index="2"><argument key="city" type="string">Rome</argument></call>'
        '<call tool="add" index="3"><argument key="b" type="array">[1,{"z":null,"a":1.5}]</argument>'
        '<argument key="a" type="boolean">true</argument><argument key="c" type="object">{}</argument></call>'
        '<call tool="add" index="4"></call></tools></message>.'
        '<message role="tool" tool="weather" index="1">rain</message>.'
        '<message role="tool" tool="weather" index="2">sun</message>.'
        '<message role="tool" tool="add" index="3">3</message>.'
        '<message role="assistant"><think></think><response>Rain and sun; 3.</response></message>.'
    )


def test_results_without_an_id_answer_in_place_and_arguments_may_be_json_text():
    text = [{**ONE_CALL[1], "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]}]
    assert drawn(ONE_CALL[:1] + text + ONE_CALL[2:]) == drawn(ONE_CALL)
    assert '<message role="tool" tool="add" index="1">3</message>.' in drawn(ONE_CALL)
    for empty in ("", " ", None, {}):
        call = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": empty}}]}]
        assert '<call tool="f" index="1"></call>' in drawn(call)


@pytest.mark.parametrize("text", ['{"a": ', "[1]", "3", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_and_not_trained(text):
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    assert f'<call tool="f" index="1"><json type="object">{text}</json></call>' in drawn([message])
    assert trained([message]) == (
        "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>'
    )


def test_options_stand_where_the_format_has_them():
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "b": 1, "a": 2}}}
    text = drawn(PLAIN[1:2], tools=[WEATHER], effort="high", tool_choice="required", response_format=schema, add_generation_prompt=True)
    fenced = json.dumps([WEATHER], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert text == (
        f'<message role="system" type="tool-declare">You can call these tools.\n```json\n{fenced}\n```</message>.'
        '<message role="system" type="thinking-effort">Think with high effort.</message>.'
        '<message role="user" name="A &amp; &quot;B&quot;">What is 2 + 3?</message>.'
        '<message role="system" type="tool-choice">Call at least one tool in the next message.</message>.'
        '<message role="system" type="response-format">Write the next response as JSON that fits this schema.\n'
        '```json\n{"a":2,"b":1,"type":"object"}\n```</message>.'
        '<message role="assistant"><think>'
    )
    assert '"parameters":{"properties":{"city":{"type":"string"},"days"' in fenced
    assert drawn(PLAIN, tool_choice="auto", response_format={"type": "text"}, tools=[]) == drawn(PLAIN)
    assert drawn([], tool_choice={"type": "function", "function": {"name": "add"}}) == (
        '<message role="system" type="tool-choice">Call the tool add in the next message.</message>.'
    )
    assert "as one JSON object." in drawn([], response_format={"type": "json_object"})
    assert {e: drawn([], effort=e).count(f"Think with {e} effort.") for e in EFFORTS} == dict.fromkeys(EFFORTS, 1)


def test_tools_declared_within_a_conversation():
    declared = drawn(ONE_CALL[4:6])
    assert declared.startswith(
        '<message role="system" type="tool-declare">From here on you can call these tools too.\n```json\n[{"function":'
    )
    assert declared.endswith('```</message>.<message role="user">Thanks</message>.')


def test_an_image_is_one_placeholder_and_its_size():
    parts = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": "x"}, "width": 640, "height": 48}]
    assert drawn([{"role": "user", "content": parts}]) == (
        '<message role="user">See <|media_begin|>image 640x48<|media_content|><|media_pad|><|media_end|></message>.'
    )


def test_trained_is_all_that_an_assistant_writes_and_nothing_else():
    assert trained(PLAIN) == "".join(
        f"<|open|>think<|sep|>{thought}<|close|>think<|sep|><|open|>response<|sep|>{answer}<|close|>response<|sep|>"
        "<|close|>message<|sep|><|end_of_msg|>"
        for thought, answer in (("Two and three.", "5"), ("", "9"))
    )
    assert trained(PLAIN[:2], tools=TOOLS, effort="low", add_generation_prompt=True) == ""
    ids, mask = tokenize(render(PLAIN), TOKENIZER)
    assert TOKENIZER.decode([i for i, t in zip(ids, mask, strict=True) if t]) == trained(PLAIN)


# ---------------------------------------------------------------- ids


@settings(max_examples=150, deadline=None)
@given(chats(), st.booleans())
def test_markers_come_from_the_format_alone(messages, thinking):
    """As many marker ids as the renderer put in, whatever texts spell; and the ids decode to the rendered text."""
    segments = render(messages, thinking=thinking)
    ids, mask = tokenize(segments, TOKENIZER)
    assert len(ids) == len(mask)
    for name in MARKERS:
        assert ids.count(TOKENIZER.special[name]) == sum(s.marker and s.text == name for s in segments)
    assert ids.count(TOKENIZER.special["<|end_of_msg|>"]) == len(messages)
    assert TOKENIZER.decode(ids) == text_of(segments)


@settings(max_examples=150, deadline=None)
@given(chats(), st.booleans(), st.booleans())
def test_ids_of_a_conversation_begin_the_ids_of_what_it_becomes(messages, thinking, declared):
    options = {"thinking": thinking, "tools": TOOLS if declared else None}
    whole, mask = tokenize(render(messages, **options), TOKENIZER)
    for k in range(len(messages)):
        answered = messages[k]["role"] == "assistant"
        prompt, _ = tokenize(render(messages[:k], add_generation_prompt=answered, **options), TOKENIZER)
        assert whole[: len(prompt)] == prompt
        if answered:  # what follows the opening tag is trained: the channel's tag of the prefix is the first of it
            assert mask[len(prompt)]


def test_where_the_format_itself_breaks_the_prefix():
    """The exceptions that atoll.data.chat names: options behind the conversation, results out of order, a named assistant."""

    def begins(k: int, messages, **options) -> bool:
        prompt, _ = tokenize(render(messages[:k], add_generation_prompt=messages[k]["role"] == "assistant", **options), TOKENIZER)
        return tokenize(render(messages, **options), TOKENIZER)[0][: len(prompt)] == prompt

    assert begins(2, PLAIN)
    assert not begins(2, PLAIN, tool_choice="none")
    assert not begins(2, PLAIN, response_format={"type": "json_object"})
    assert not begins(3, CALLING)
    assert not begins(1, [PLAIN[1], {**PLAIN[2], "name": "bot"}])


@settings(max_examples=200, deadline=None)
@given(words, words)
def test_a_text_cannot_imitate_another(one, other):
    """Two contents give the same ids only where they are the same text, so none can act as another's end and beginning."""
    a, b = (tokenize(render([{"role": "user", "content": t}, PLAIN[2]]), TOKENIZER)[0] for t in (one, other))
    assert (a == b) == (one == other)


# ---------------------------------------------------------------- tokenizers


def with_added(change) -> str:
    content = json.loads(TOKENIZER.text)
    content["added_tokens"] = change(content["added_tokens"])
    return json.dumps(content)


def test_structure_is_written_as_ordinary_and_read_as_special():
    flags = {t["content"]: t["special"] for t in json.loads(TOKENIZER.text)["added_tokens"]}
    assert {name for name, special in flags.items() if not special} == {"<|open|>", "<|close|>", "<|sep|>"}
    assert TOKENIZER.decode(TOKENIZER.encode("<|open|>a<|sep|>")) == "<|open|>a<|sep|>"
    assert not set(TOKENIZER.encode("<|open|>a<|sep|>")) & set(TOKENIZER.special.values())
    ids, _ = tokenize(render(PLAIN[:1]), TOKENIZER)
    assert TOKENIZER.decode(ids, skip_special=True) == '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|>'
    everything = Tokenizer(with_added(lambda added: [{**t, "special": True} for t in added]))
    assert everything.fingerprint == TOKENIZER.fingerprint
    assert everything.encode("x<|open|>") == TOKENIZER.encode("x<|open|>")


@pytest.mark.parametrize("name", [*MARKERS, "<|media_pad|>"])
def test_a_tokenizer_without_a_marker_is_refused_by_its_name(name):
    content = json.loads(TOKENIZER.text)
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != name]
    tokenizer = Tokenizer(json.dumps(content))
    image = [{"role": "user", "content": [{"type": "image", "width": 1, "height": 1}]}]
    with pytest.raises(UserError) as caught:
        tokenize(render(image if "media" in name else PLAIN), tokenizer)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    if "media" in name:
        tokenize(render(PLAIN), tokenizer)


# ---------------------------------------------------------------- mistakes

CALL = {"id": "a", "function": {"name": "f", "arguments": {}}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "y"}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "messages = 'hello'"),
        (["hello"], "messages[0] = 'hello'"),
        ([{"content": "x"}], "messages[0].role = None"),
        ([{"role": "usr", "content": "x"}], "messages[0].role = 'usr': did you mean 'user'"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content = 3"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content = '\\ud800': a lone surrogate"),
        ([{"role": "user", "content": [{"type": "txt", "text": "x"}]}], "messages[0].content[0].type = 'txt'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text = None"),
        ([{"role": "user", "content": [{"type": "image", "width": 0, "height": 3}]}], "messages[0].content[0].width = 0"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name = 3"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([*PLAIN[:2], {"role": "assistant"}], "messages[2].content"),
        ([{"role": "assistant", "content": "x", "tool_call": []}], "messages[0].tool_call = []: no such field; did you mean tool_calls?"),
        ([{"role": "assistant", "tool_calls": {}}, {"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls = {}"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0] = 'f'"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name = None"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}], "tool_calls[0].function.arguments = [1]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": float("nan")}}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant", "tool_calls": [CALL, CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}], "messages[0].reasoning = 'a'"),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}], "messages[1].role = 'tool'"),
        (
            [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "y", "tool_call_id": "z"}],
            "messages[1].tool_call_id = 'z'",
        ),
        (
            [{"role": "assistant", "tool_calls": [CALL]}, *[{"role": "tool", "content": "y", "tool_call_id": "a"}] * 2],
            "messages[2].tool_call_id",
        ),
        ([CALLED, RESULT, RESULT], "messages[2].tool_call_id"),
        ([{"role": "system", "tools": [{"type": "function"}]}], "messages[0].tools[0]"),
        ([{"role": "system", "tools": TOOLS, "content": "x"}], "messages[0].tools"),
    ],
)
def test_a_bad_message_is_one_line_with_its_number_and_field(messages, said):
    with pytest.raises(UserError) as caught:
        render(messages)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_name_is_none():
    """As the template takes it; and so an assistant's ids begin with its generation prefix."""
    assert render([{**m, "name": ""} for m in PLAIN[1:3]]) == render([{"role": m["role"], **m, "name": None} for m in PLAIN[1:3]])


def test_what_is_nested_without_end_is_one_short_line():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    called = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": deep}]}]
    for messages in (deep, [{"role": "user", "content": [deep]}], called):
        with pytest.raises(UserError) as caught:
            render(messages)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": "weather"}, "tools = 'weather'"),
        ({"tools": [{"function": {"name": 3}}]}, "tools[0]"),
        ({"effort": "huge"}, "effort = 'huge'"),
        ({"effort": "huge" * 1000}, "..."),
        ({"tool_choice": "all" * 1000}, "..."),
        ({"tool_choice": "always"}, "tool_choice = 'always'"),
        ({"tool_choice": {"function": {}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type = 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.type = 'json_schema'"),
    ],
)
def test_a_bad_option_is_one_line(options, said):
    with pytest.raises(UserError) as caught:
        render(PLAIN, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
