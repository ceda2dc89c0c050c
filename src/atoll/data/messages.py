"""OpenAI-style messages, read and checked: what `atoll.data.chat.render` draws. A mistake names the message and the field."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from atoll.config import UserError

ROLES = ("system", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id", "tools")
NEAR = 0.85  # an unknown field this like a known one is a misspelling; others (ids, dates, ...) are passed over


@dataclass(frozen=True)
class Image:
    """An image in a message: its size in pixels, as it was given."""

    width: int
    height: int


@dataclass(frozen=True)
class Call:
    """A tool call. `arguments` is text where what was given is not a JSON object."""

    name: str
    arguments: dict[str, Any] | str
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One message. Of a tool's result, `name` is the tool's and `index` counts the call it answers, from 1."""

    role: str
    parts: tuple[str | Image, ...] = ()
    name: str | None = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: list[dict[str, Any]] | None = None  # declared from here on, in place of content
    call_id: str | None = None
    index: int = 0


def read_messages(messages: Any) -> list[Message]:
    """Checked messages, the results of one turn's tool calls in the order of the calls. Raises `UserError`."""
    if not isinstance(messages, (list, tuple)):
        raise UserError(f"messages = {short(messages)}: a list of messages is expected")
    return _in_call_order([_message(m, f"messages[{i}]") for i, m in enumerate(messages)])


def read_tools(tools: Any, where: str = "tools") -> list[dict[str, Any]]:
    """Checked tool declarations: objects with a name, or with one in their `function`. Raises `UserError`."""
    if not isinstance(tools, (list, tuple)):
        _refuse(where, tools, "a list of tool declarations is expected")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(f"{where}[{i}]", tool, 'an object with function.name is expected, as {"type": "function", "function": {"name": ...}}')
        dump(tool, f"{where}[{i}]")
    return list(tools)


def dump(value: Any, where: str, sort_keys: bool = False) -> str:
    """`value` as compact JSON. Raises `UserError` for what JSON or UTF-8 cannot hold."""
    try:
        return whole(json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys, allow_nan=False), where)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(where, value, f"not JSON ({error}); give finite numbers, text, lists and objects")


def whole(text: Any, where: str) -> str:
    """`text`, if it is text that UTF-8 can hold. Raises `UserError`."""
    if not isinstance(text, str):
        _refuse(where, text, "text is expected")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        _refuse(where, text, "a lone surrogate, half a character; repair the text")
    return text


def _refuse(where: str, value: object, remedy: str) -> NoReturn:
    raise UserError(f"{where} = {short(value)}: {remedy}")


def short(value: object) -> str:
    """`value` for a message: on one line, cut where it is long."""
    try:
        text = ascii(value)
    except RecursionError:
        text = f"{type(value).__name__} within {type(value).__name__} within ..."
    return text if len(text) <= 60 else text[:57] + "..."


# ---------------------------------------------------------------- one message


def _message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        _refuse(where, raw, "an object with role and content is expected")
    given = {key: value for key, value in raw.items() if value is not None}
    for key in given:
        near = difflib.get_close_matches(str(key), FIELDS, 1, NEAR)
        if key not in FIELDS and near:
            _refuse(f"{where}.{key}", given[key], f"no such field; did you mean {near[0]}?")
    role = given.get("role")
    if role not in ROLES:
        near = difflib.get_close_matches(str(role), ROLES, 1)
        _refuse(f"{where}.role", role, f"did you mean {near[0]!r}?" if near else f"one of {', '.join(ROLES)} is expected")
    name = whole(given["name"], f"{where}.name") or None if "name" in given and role != "tool" else None
    if role == "assistant":
        return _assistant(given, name, where)
    if given.get("tool_calls"):
        _refuse(f"{where}.tool_calls", given["tool_calls"], f"only an assistant calls tools, and role is {role!r}")
    if role == "system" and given.get("tools"):
        if given.get("content"):
            _refuse(f"{where}.tools", given["tools"], "stands beside content; give each a message of its own")
        return Message(role, tools=read_tools(given["tools"], f"{where}.tools"))
    if "content" not in given:
        _refuse(f"{where}.content", None, "text or a list of parts is expected")
    call_id = whole(given["tool_call_id"], f"{where}.tool_call_id") if role == "tool" and "tool_call_id" in given else None
    return Message(role, _parts(given["content"], f"{where}.content"), name, call_id=call_id)


def _assistant(given: dict[str, Any], name: str | None, where: str) -> Message:
    thoughts = [given[key] for key in ("reasoning", "reasoning_content") if key in given]
    if len(thoughts) == 2 and thoughts[0] != thoughts[1]:
        _refuse(f"{where}.reasoning", thoughts[0], "differs from reasoning_content; give one of the two")
    reasoning = whole(thoughts[0], f"{where}.reasoning") if thoughts else ""
    calls = given.get("tool_calls", [])
    if not isinstance(calls, (list, tuple)):
        _refuse(f"{where}.tool_calls", calls, "a list of calls is expected")
    if not calls and "content" not in given:
        _refuse(f"{where}.content", None, "text is expected where there are no tool_calls")
    read = tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))
    ids = [call.id for call in read if call.id is not None]
    if len(set(ids)) < len(ids):
        _refuse(f"{where}.tool_calls", ids, "two calls share an id")
    return Message("assistant", _parts(given.get("content", ""), f"{where}.content"), name, reasoning, read)


def _parts(content: Any, where: str) -> tuple[str | Image, ...]:
    if isinstance(content, str):
        return (whole(content, where),)
    if not isinstance(content, (list, tuple)):
        _refuse(where, content, "text or a list of parts is expected")
    return tuple(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str | Image:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return whole(part.get("text"), f"{where}.text")
    if kind not in ("image", "image_url"):
        _refuse(f"{where}.type", kind, "'text', 'image' or 'image_url' is expected")
    for side in ("width", "height"):
        pixels = part.get(side)
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < 1:
            _refuse(f"{where}.{side}", pixels, "the image's size in pixels is expected")
    return Image(part["width"], part["height"])


# ---------------------------------------------------------------- tools


def _call(call: Any, where: str) -> Call:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        _refuse(where, call, 'a call is expected, as {"function": {"name": ..., "arguments": {...}}}')
    name = whole(function.get("name"), f"{where}.function.name")
    call_id = call.get("id")
    if call_id is not None:
        call_id = whole(call_id, f"{where}.id")
    return Call(name, _arguments(function.get("arguments"), f"{where}.function.arguments"), call_id)


def _arguments(given: Any, where: str) -> dict[str, Any] | str:
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, str):
        return decode_object(whole(given, where))
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        _refuse(where, given, "an object, or JSON text of one, is expected")
    dump(given, where)
    return given


def decode_object(text: str) -> dict[str, Any] | str:
    """The JSON object that `text` spells, or `text` itself where it spells none."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _in_call_order(read: list[Message]) -> list[Message]:
    """Each run of tool results gets the tool's name and the number of its call, and is sorted by it."""
    out: list[Message] = []
    at = 0
    while at < len(read):
        stop = at + 1
        if read[at].role != "tool":
            out.append(read[at])
        else:
            while stop < len(read) and read[stop].role == "tool":
                stop += 1
            calls = out[-1].calls if out else ()
            if not calls:
                _refuse(f"messages[{at}].role", "tool", "no tool_calls in the message before it")
            answers = [_answer(read[at + n], calls, n, f"messages[{at + n}]") for n in range(stop - at)]
            numbers = [m.index for m in answers]
            for n, number in enumerate(numbers):
                if number in numbers[:n]:
                    _refuse(f"messages[{at + n}].tool_call_id", answers[n].call_id, f"call {number} is answered twice")
            out += sorted(answers, key=lambda m: m.index)
        at = stop
    return out


def _answer(message: Message, calls: tuple[Call, ...], place: int, where: str) -> Message:
    """The result that names its call by id; without an id it answers the call at its own place among the results."""
    if message.call_id is not None:
        ids = [call.id for call in calls]
        if message.call_id not in ids:
            known = ", ".join(repr(i) for i in ids if i is not None) or "none has an id"
            _refuse(f"{where}.tool_call_id", message.call_id, f"no such call in the message before; its calls: {known}")
        place = ids.index(message.call_id)
    elif place >= len(calls):
        _refuse(f"{where}.tool_call_id", None, f"more results than the {len(calls)} calls before")
    return dataclasses.replace(message, name=calls[place].name, index=place + 1)
