"""What reading a model's message gives: events as it grows, the message itself, and the arguments of a call on their way to JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from atoll.data.chat import kind_of
from atoll.data.messages import decode_object


@dataclass(frozen=True)
class Event:
    """A piece of the message, to be joined with the ones before of its kind.

    "thinking" and "content" carry text. "call" starts a tool call `name`, numbered from 1; "arguments" carries a piece of that call's
    arguments as JSON. "end": the message is over.
    """

    kind: Literal["thinking", "content", "call", "arguments", "end"]
    text: str = ""
    call: int = 0
    name: str = ""


@dataclass
class ParsedCall:
    """`arguments` is an object, or text where the model wrote none."""

    name: str
    arguments: dict[str, Any] | str


@dataclass
class Parsed:
    """A message as far as it was written. `thinking` is None without a think channel; calls that were cut off are not listed."""

    thinking: str | None = None
    content: str = ""
    tool_calls: list[ParsedCall] = field(default_factory=list)
    finished: bool = False  # the message was ended, not cut off
    malformed: bool = False  # it broke the format somewhere

    def as_message(self) -> dict[str, Any]:
        """An OpenAI-style assistant message, which `atoll.data.chat.render` takes. Calls get the ids call_1, call_2, ..."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.thinking is not None:
            message["reasoning"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": f"call_{n}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for n, call in enumerate(self.tool_calls, 1)
            ]
        return message


class GrowingCall:
    """A tool call being written: its arguments, and the same as JSON piece by piece. A string comes out as it comes in."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.arguments: dict[str, Any] = {}
        self._key, self._kind, self._text = "", "", ""
        self._json: str | None = None  # arguments in one piece

    def enter(self, key: str, kind: str) -> None:
        """Begin an argument whose value has JSON's type `kind`."""
        self._key, self._kind, self._text = key, kind, ""

    def begun(self) -> str:
        """The JSON that leads to the argument's value."""
        head = ("{" if not self.arguments else ",") + json.dumps(self._key, ensure_ascii=False) + ":"
        return head + '"' if self._kind == "string" else head

    def enter_json(self) -> None:
        """Begin arguments given in one piece."""
        self._kind, self._text = "json", ""

    def put(self, text: str) -> str:
        """More of the value; what of its JSON is certain."""
        self._text += text
        return json.dumps(text, ensure_ascii=False)[1:-1] if self._kind == "string" else text if self._kind == "json" else ""

    def leave(self) -> tuple[str, bool]:
        """What completes the argument's JSON, and whether its value was of its type."""
        if self._kind == "json":
            sound = not self.arguments and self._json is None
            self._json = self._text
            return "", sound and isinstance(decode_object(self._text), dict)
        if self._kind == "string":
            self.arguments[self._key] = self._text
            return '"', True
        value, sound = _typed(self._text, self._kind)
        self.arguments[self._key] = value
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")), sound

    def end(self) -> str:
        """What completes the call's JSON."""
        return "" if self._json is not None else "}" if self.arguments else "{}"

    def result(self) -> dict[str, Any] | str:
        """The arguments, as an object where they are one."""
        return self.arguments if self._json is None else decode_object(self._json)


def _typed(text: str, kind: str) -> tuple[Any, bool]:
    """The JSON value that `text` spells, if it is of `kind`; else the text itself, and False."""
    wrapped = decode_object('{"value":' + text + "}")
    if isinstance(wrapped, dict) and list(wrapped) == ["value"] and kind_of(wrapped["value"]) == kind:
        return wrapped["value"], True
    return text, False
