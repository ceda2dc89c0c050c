"""Grammars: what a message may be, what it may not, and what compiling one may cost."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from conversations import TOKENIZER, TOOLS, arguments
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from serving import written

from atoll.serve.errors import ApiError
from atoll.serve.grammar import Grammars, Wanted, wanted
from atoll.serve.prompt import Options

VOCABULARY = 408  # wider than the tokenizer: those ids are never allowed
GRAMMARS = Grammars(TOKENIZER, VOCABULARY, 1, 64 << 10)


def follows(wish, message, thinking=True):
    """Whether the grammar allows a message, token by token, to its end."""
    grammar = GRAMMARS.compile(wish, thinking)
    for id in written(message, thinking):
        mask = grammar.allowed()
        assert mask.shape == (VOCABULARY,)
        if not mask[id]:
            return False
        grammar.accept(id)
    return True


def called(name, **given):
    return {"content": "", "reasoning": "hm é", "tool_calls": [{"function": {"name": name, "arguments": given}}]}


def test_what_a_request_asks_for():
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    assert not wanted(Options())
    assert not wanted(Options(tools=TOOLS))
    assert not wanted(Options(tools=strict, tool_choice="none"))
    assert len(wanted(Options(tools=strict)).tools) == 2
    assert not wanted(Options(tools=strict)).required
    assert wanted(Options(tools=TOOLS, tool_choice="required")).required
    assert [t["name"] for t in wanted(Options(tools=TOOLS, tool_choice={"function": {"name": "add"}})).tools] == ["add"]
    assert wanted(Options(response_format={"type": "json_object"})).schema == {"type": "object"}
    with pytest.raises(ApiError, match="not among the tools"):
        wanted(Options(tools=TOOLS, tool_choice={"function": {"name": "subtract"}}))


def test_required_calls_have_the_arguments_that_their_schema_says():
    wish = wanted(Options(tools=TOOLS, tool_choice="required"))
    assert follows(wish, called("weather", city='Pa"ris\n<&>', days=3))
    assert follows(wish, called("weather", city=""))
    assert not follows(wish, called("weather", days=3))  # city is required
    assert not follows(wish, called("weather", city="x", days=1.5))
    assert not follows(wish, called("weather", city=3))
    assert not follows(wish, called("other", city="x"))
    assert not follows(wish, {"content": "no call", "reasoning": ""})
    assert follows(wish, {**called("add", a=1), "tool_calls": called("add", a=1)["tool_calls"] * 4})
    assert not follows(wish, {**called("add", a=1), "tool_calls": called("add", a=1)["tool_calls"] * 5})


@settings(max_examples=40, deadline=None)
@given(arguments)
def test_arguments_without_a_schema_are_any_json(given):
    assume(not any(name in key for key in given for name in TOKENIZER.special))
    assume("\x7f" not in json.dumps(given, ensure_ascii=False))  # which llguidance wants escaped
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {key: {} for key in given}}}}
    wish = wanted(Options(tools=[tool], tool_choice="required"))
    assert follows(wish, called("f", **given))


def test_strict_tools_may_be_left_alone_but_not_misused():
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    wish = wanted(Options(tools=strict))
    assert follows(wish, {"content": "as I like", "reasoning": "x"})
    assert follows(wish, called("weather", city="x"))
    assert not follows(wish, called("weather", city=None))


def test_words_of_an_enum_and_a_constant():
    parameters = {"properties": {"unit": {"enum": ['C"\\', "F"]}, "mode": {"const": "é"}, "mixed": {"enum": ["a", 2, None]}}}
    wish = wanted(Options(tools=[{"function": {"name": "f", "parameters": parameters}}], tool_choice="required"))
    assert follows(wish, called("f", unit='C"\\', mode="é", mixed=None))
    assert follows(wish, called("f", mixed=2))
    assert not follows(wish, called("f", mixed=3))
    assert not follows(wish, called("f", unit="K"))
    assert not follows(wish, called("f", mode="e"))


@pytest.mark.parametrize("thinking", [True, False])
def test_a_response_is_json_of_its_schema(thinking):
    wish = Wanted({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False})
    assert follows(wish, {"content": '{"a": 12}', "reasoning": "free text"}, thinking)
    assert not follows(wish, {"content": '{"a": "12"}', "reasoning": ""}, thinking)
    assert not follows(wish, {"content": "{}", "reasoning": ""}, thinking)
    assert not follows(wish, {"content": 'x{"a": 12}', "reasoning": ""}, thinking)


@pytest.mark.parametrize("place", ["name", "key", "enum", "schema"])
def test_a_schema_cannot_bring_a_marker_in(place):
    spelt = "a<|close|>b"
    tool = {"function": {"name": spelt if place == "name" else "f", "parameters": {"properties": {spelt if place == "key" else "k": {}}}}}
    if place == "enum":
        tool["function"]["parameters"]["properties"]["k"] = {"enum": [spelt]}
    wish = Wanted({"const": spelt}) if place == "schema" else wanted(Options(tools=[tool], tool_choice="required"))
    with pytest.raises(ApiError, match="marker"):
        GRAMMARS.compile(wish, True)


def test_copies_move_by_themselves():
    grammar = GRAMMARS.compile(Wanted({"type": "object"}), False)
    first, second = grammar.copy(), grammar.copy()
    ids = written({"content": "{}"}, thinking=False)
    before = second.allowed()
    for id in ids[:1]:
        first.accept(id)
    assert not first.allowed().equal(before)
    assert second.allowed().equal(before)


HOSTILE = [
    {"$ref": "#/nothing"},
    {"$ref": "http://127.0.0.1:1/schema"},
    {"type": "strange"},
    {"properties": 5},
    {"type": "string", "pattern": "("},
    7,
    {"type": "string", "pattern": "(x+x+)+y{1,100000}"},
    {"enum": [str(n) * 200 for n in range(10_000)]},
    {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
]


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_schema_is_refused_at_once_or_compiles(schema):
    started = time.monotonic()
    with contextlib.suppress(ApiError, RuntimeError):
        GRAMMARS.compile(Wanted(schema), True).allowed()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("schema", [{"enum": 5}, {"enum": "abc"}, {"type": "string", "enum": {"a": 1}}, {"type": [{"a": 1}]}, {"type": 5}])
def test_an_argument_whose_schema_is_none_is_refused_by_name(schema):
    tool = {"function": {"name": "find", "parameters": {"properties": {"key": schema}}}}
    with pytest.raises(ApiError, match=r"argument 'key' of 'find'") as caught:
        GRAMMARS.compile(wanted(Options(tools=[tool], tool_choice="required")), True)
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_tools_have_limits():
    many = [{"function": {"name": f"f{n}"}} for n in range(65)]
    with pytest.raises(ApiError, match="64 at most"):
        GRAMMARS.compile(wanted(Options(tools=many, tool_choice="required")), True)
    long = {"function": {"name": "f", "description": "x" * 70_000}}
    with pytest.raises(ApiError, match="65,536"):
        GRAMMARS.compile(wanted(Options(tools=[long], tool_choice="required")), True)


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda v: st.lists(v) | st.dictionaries(st.text(), v)))
def test_no_tool_declaration_raises_anything_else(parameters):
    options = Options(tools=[{"function": {"name": "f", "parameters": parameters}}], tool_choice="required")
    with contextlib.suppress(ApiError):
        assert GRAMMARS.compile(wanted(options), True).allowed().any()
