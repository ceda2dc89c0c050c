"""Conversations for the tests of the chat format: written out, and drawn at random."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from atoll.config import ModelConfig
from atoll.data.tokenizer import train_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather & wind, by "city"; ünïcode',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    },
}
CALCULATOR = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}}
TOOLS = [WEATHER, CALCULATOR]

PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?", "name": 'A & "B"'},
    {"role": "assistant", "reasoning": "Two and three.", "content": "5"},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "4 + 5?\n"}]},
    {"role": "assistant", "content": "9"},
]
CALLING = [
    {"role": "user", "content": "Weather in Paris and Rome, and 1 + 2"},
    {
        "role": "assistant",
        "reasoning_content": "Ask the tools.",
        "content": "I look.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": 'Pa"ris & <Co>\n', "days": 3}}},
            {"id": "b", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
            {
                "id": "c",
                "type": "function",
                "function": {"name": "add", "arguments": {"b": [1, {"z": None, "a": 1.5}], "a": True, "c": {}}},
            },
            {"id": "d", "type": "function", "function": {"name": "add", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "3"},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
    {"role": "tool", "tool_call_id": "b", "content": "sun"},
    {"role": "assistant", "reasoning": "", "content": "Rain and sun; 3."},
]
ONE_CALL = [
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3"},
    {"role": "system", "tools": [CALCULATOR]},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": ""},
]

SPOKEN = [json.dumps([PLAIN, CALLING, TOOLS]), "message role think response tools call argument"] * 4
TOKENIZER = train_tokenizer(SPOKEN, ModelConfig(vocab_size=400))

# ---------------------------------------------------------------- drawn

PIECES = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "think", "response", "message"]
PIECES += ["&amp;", '"', "&", " ", "\n", "é中😀", "\x00", "<|"]
words = st.lists(st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)), max_size=5).map("".join)
names = words.filter(bool)
numbers = st.one_of(st.integers(-(10**12), 10**12), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(words, numbers, st.booleans(), st.none()),
    lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(words, v, max_size=3)),
    max_leaves=5,
)
arguments = st.dictionaries(words, values, max_size=3)


@st.composite
def assistants(draw: st.DrawFn) -> dict:
    """An assistant's message; calls have ids."""
    calls = draw(st.lists(st.tuples(names, arguments), max_size=3))
    message = {"role": "assistant", "content": draw(words)}
    if draw(st.booleans()):
        message["reasoning"] = draw(words)
    if calls:
        message["tool_calls"] = [{"id": f"id{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    return message


@st.composite
def chats(draw: st.DrawFn) -> list[dict]:
    """A conversation, results of tools in call order."""
    out: list[dict] = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        out.append({"role": "user", "content": draw(words)})
        out.append(draw(assistants()))
        for i in range(draw(st.integers(0, len(out[-1].get("tool_calls", []))))):
            out.append({"role": "tool", "tool_call_id": f"id{i}", "content": draw(words)})
    return out
