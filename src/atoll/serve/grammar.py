"""Answers held to a JSON schema or to declared tools: a grammar over the chat format's elements, followed by llguidance.

The grammar says the whole message. Text between markers is any text without one; a response under `response_format` is JSON of the schema;
an argument's value is JSON of its property's schema, or, of a string, the text as it is, as the format writes it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.data.chat import kind_of
from atoll.data.messages import short
from atoll.data.tokenizer import Tokenizer
from atoll.serve.errors import ApiError, bad_request
from atoll.serve.prompt import Options

MOST_CALLS = 4  # of one constrained message
MOST_TOOLS = 64
# What compiling and following a grammar may cost: symbols, and work of the lexer at start and at every token.
LIMITS: dict[str, Any] = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
}
log = logging.getLogger("atoll.serve")
COMPACT = {"whitespace_flexible": False}  # the format writes arguments without spaces
TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True)
class Wanted:
    """What an answer must be: `schema` of its response (None: any text), the tools it may call, whether it must, and how often at most."""

    schema: Any = None
    tools: tuple[dict[str, Any], ...] = ()
    required: bool = False
    calls: int = MOST_CALLS

    def __bool__(self) -> bool:
        return self.schema is not None or bool(self.tools)


def wanted(options: Options) -> Wanted:
    """What the options of a request ask of the answer. Tools are free text where neither `tool_choice` nor `strict` binds them."""
    form = options.response_format or {}
    schema = {"json_object": {"type": "object"}, "json_schema": (form.get("json_schema") or {}).get("schema")}.get(form.get("type", ""))
    choice = options.tool_choice
    functions = [t.get("function", t) for t in options.tools or [] if isinstance(t, dict)]
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        functions = [f for f in functions if f.get("name") == name]
        if not functions:
            raise bad_request(f"tool_choice names {short(name)}, which is not among the tools", "tool_choice")
        return Wanted(schema, tuple(functions), True, 1)
    if choice == "required":
        if not functions:
            raise bad_request("tool_choice is required and there are no tools", "tool_choice")
        return Wanted(schema, tuple(functions), True)
    strict = choice != "none" and any(f.get("strict") for f in functions)
    return Wanted(schema, tuple(functions) if strict else ())


class Grammars:
    """Compiles grammars for one tokenizer. `available` says whether llguidance is there."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: int, max_schema: int) -> None:
        self._library: Any = None
        self._vocabulary, self._max_schema, self._special = vocabulary, max_schema, tuple(tokenizer.special)
        try:
            import llguidance
        except ImportError:
            return
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.guarded_text(), n_vocab=vocabulary, eos_token=eos)
        except Exception as error:  # a tokenizer of a kind that the library cannot read: everything but grammars works
            log.warning("llguidance cannot read this tokenizer (%s): answers cannot be held to schemas", error)
            return
        self._library = llguidance
        self._limits = llguidance.LLParserLimits(**LIMITS)

    @property
    def available(self) -> bool:
        """Whether anything can be held to a grammar."""
        return self._library is not None

    def compile(self, wish: Wanted, thinking: bool) -> Grammar:
        """The grammar of a message. Takes a while and drops the interpreter's lock meanwhile: call it in a thread.

        Raises `ApiError`: 400 for a schema that is too large or that cannot be compiled within the limits, 501 without the library.
        """
        if self._library is None:
            raise ApiError(501, "response_format needs llguidance, which is not on this server: pip install 'atoll[grammar]'")
        text = json.dumps([wish.schema, wish.tools], ensure_ascii=False)
        size, where = len(text.encode("utf-8", "replace")), "response_format" if wish.schema is not None else "tools"
        spelt = next((name for name in self._special if name in text), None)
        if spelt is not None:  # the library would make the marker of it
            raise bad_request(f"the schema spells {spelt}, which is a marker of the chat format", where, "invalid_schema")
        if size > self._max_schema or len(wish.tools) > MOST_TOOLS:
            raise bad_request(
                f"schemas of {size:,} bytes and {len(wish.tools)} tools: {self._max_schema:,} and {MOST_TOOLS} at most", where
            )
        matcher = self._library.LLMatcher(self._tokenizer, lark(wish, thinking), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise bad_request(f"the schema cannot be followed: {_reason(matcher.get_error())}", where, "invalid_schema")
        return Grammar(matcher, self._vocabulary)


class Grammar:
    """A `Constraint`: a message being held to its grammar. Of several answers each has its own `copy`."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def copy(self) -> Grammar:
        """One at the same place, that moves by itself."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary)

    def allowed(self) -> Tensor | None:
        """Mask bool [vocabulary]. Raises RuntimeError where the grammar became too costly to follow."""
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check()
        mask = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return mask.flatten()[: self._vocabulary].bool()

    def accept(self, id: int) -> None:
        """`id` came next."""
        self._matcher.consume_token(id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(f"the schema could not be followed: {_reason(self._matcher.get_error())}")


def lark(wish: Wanted, thinking: bool) -> str:
    """The message's grammar, in llguidance's dialect of Lark, from after the generation prefix to `<|end_of_msg|>`."""
    response = f"json_response\njson_response: %json {json.dumps(wish.schema)}" if wish.schema is not None else "TEXT"
    tools = "" if not wish.tools else " tools" if wish.required else " tools?"
    head = f"TEXT {_close('think')} {_open('response')} " if thinking else ""
    rules = [f"start: {head}response {_close('response')}{tools} {_close('message')} <|end_of_msg|>", f"response: {response}", TEXT]
    if wish.tools:
        rules.append(f"tools: {_open('tools')} calls_1 {_close('tools')}")
        for number in range(1, wish.calls + 1):
            more = f" calls_{number + 1}?" if number < wish.calls else ""
            rules.append(f"calls_{number}: ({' | '.join(f'call_{number}_{i}' for i in range(len(wish.tools)))}){more}")
        for i, tool in enumerate(wish.tools):
            rules += _tool(i, tool, wish.calls)
    return "\n".join(rules) + "\n"


def _tool(i: int, tool: dict[str, Any], calls: int) -> list[str]:
    """Rules of a tool: its call at each number, and its arguments: every required one, the others or not, in the schema's order."""
    parameters = tool.get("parameters") or {}
    properties = parameters.get("properties") or {} if isinstance(parameters, dict) else None
    required = parameters.get("required") or [] if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise bad_request(f"tools: the parameters of {short(tool.get('name'))} are no JSON schema of an object", "tools")
    rules, sequence = [], []
    for j, (key, schema) in enumerate(properties.items()):
        if isinstance(schema, dict) and not _listed(schema):
            where = f"argument {short(key)} of {short(tool.get('name'))}"
            raise bad_request(f"tools: {where}: enum is a list, type a name or a list of names", "tools")
        sequence.append(f"arg_{i}_{j}" + ("" if key in required else "?"))
        rules += _argument(f"arg_{i}_{j}", key, schema, {k: v for k, v in parameters.items() if k in ("$defs", "definitions")})
    rules.append(f"args_{i}: " + (" ".join(sequence) or '""'))
    for number in range(1, calls + 1):
        rules.append(f"call_{number}_{i}: {_open('call', tool=str(tool.get('name')), index=str(number))} args_{i} {_close('call')}")
    return rules


def _listed(schema: dict[str, Any]) -> bool:
    """Whether a schema's enum and type are of the forms that JSON schema gives them."""
    kinds = schema.get("type")
    names = isinstance(kinds, str | None) or (isinstance(kinds, list) and all(isinstance(k, str) for k in kinds))
    return names and isinstance(schema.get("enum"), list | None)


def _argument(rule: str, key: str, schema: Any, definitions: dict[str, Any]) -> list[str]:
    """Rules of one argument, by the types its schema allows."""
    schema = schema if isinstance(schema, dict) else {}
    kinds = _kinds(schema)
    rules, forms = [], []
    for kind in kinds:
        name = f"{rule}_{kind}"
        forms.append(name)
        if kind == "string":
            words = [schema["const"]] if "const" in schema else schema.get("enum")
            value = " | ".join(_quoted(w) for w in words if isinstance(w, str)) if words else "TEXT"
        else:
            part = {
                **schema,
                **definitions,
                "x-guidance": COMPACT,
                "type": "integer" if kind == "number" and schema.get("type") == "integer" else kind,
            }
            rules.append(f"{name}_json: %json {json.dumps(part)}")
            value = f"{name}_json"
        rules.append(f"{name}: {_open('argument', key=key, type=kind)} ({value}) {_close('argument')}")
    return [f"{rule}: {' | '.join(forms)}", *rules]


def _kinds(schema: dict[str, Any]) -> list[str]:
    """The format's types that a value of `schema` may have."""
    given = schema.get("type")
    if given is None and (values := schema.get("enum") or ([schema["const"]] if "const" in schema else None)):
        given = [kind_of(v) for v in values]
    every = ("string", "number", "boolean", "null", "object", "array")
    listed = [given] if isinstance(given, str) else given if isinstance(given, list) else list(every)
    kinds = ["number" if k == "integer" else k for k in listed]
    return [k for k in dict.fromkeys(kinds) if k in every] or list(every)


def _open(tag: str, **attributes: str) -> str:
    escaped = {key: value.replace("&", "&amp;").replace('"', "&quot;") for key, value in attributes.items()}
    text = tag + "".join(f' {key}="{value}"' for key, value in escaped.items())
    return f"<|open|> {_quoted(text)} <|sep|>"


def _close(tag: str) -> str:
    return f"<|close|> {_quoted(tag)} <|sep|>"


def _quoted(text: str) -> str:
    """`text` as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=True)


def _reason(error: str) -> str:
    """The first line of what the library says, cut where it is long."""
    return (error.strip().splitlines() or ["unknown"])[0][:200]
