"""The chat format: messages to segments to token ids. Kimi K3 technical report, appendix F (XTML).

An element is `<|open|>tag key="value"<|sep|> ... <|close|>tag<|sep|>`; a message is one, followed by `<|end_of_msg|>`. The markers
are special tokens, put in by id; the text between two of them is encoded by itself and as text, whatever it says. So nobody can
write a marker into a conversation by spelling it, and the ids of a message do not depend on what follows it:

    ids(messages[:k] + generation prefix) begins ids(messages[:k + 1])      where messages[k] is an assistant's without a name

but for `tool_choice` and `response_format`, which the format puts behind the conversation, and tool results out of call order.
`chat_template.jinja` beside this file says the same for engines that read templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from typing import Any, Protocol

from atoll.config import UserError
from atoll.data.messages import Call, Image, Message, dump, read_messages, read_tools, short, whole

EFFORTS = ("low", "medium", "high", "max")
MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")  # what every conversation needs
MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")

TOOLS = "You can call these tools."
MORE_TOOLS = "From here on you can call these tools too."
EFFORT = "Think with {} effort."
CHOICES = {"none": "Do not call a tool in the next message.", "required": "Call at least one tool in the next message."}
CHOICE = "Call the tool {} in the next message."
JSON_OBJECT = "Write the next response as one JSON object."
JSON_SCHEMA = "Write the next response as JSON that fits this schema."


@dataclass(frozen=True)
class Segment:
    """A marker, or the text between two markers. `trained`: whether its tokens are targets of supervised fine-tuning."""

    text: str
    marker: bool = False
    trained: bool = False


class Encodes(Protocol):
    """What `tokenize` needs of a tokenizer (`atoll.data.Tokenizer` is one)."""

    special: dict[str, int]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, none of them special."""
        ...


def render(
    messages: Any,
    tools: Any = None,
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: Any = None,
    response_format: Any = None,
    add_generation_prompt: bool = False,
) -> list[Segment]:
    """A conversation as segments.

    Args:
        messages: OpenAI-style dicts: role, content (text, or parts of type text or image with width and height), name; of an assistant
            also reasoning (or reasoning_content) and tool_calls; of a tool's result tool_call_id. A system message with `tools`
            in place of content declares more of them.
        tools: OpenAI-style declarations.
        thinking: assistants have a think channel, an empty one where there is no reasoning; without it reasoning is left out.
        effort: one of `EFFORTS`; said only when thinking. None says nothing.
        tool_choice: "auto", "none", "required", or {"type": "function", "function": {"name": ...}}.
        response_format: {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ...}}.
        add_generation_prompt: open an assistant's message, up to where the model goes on.

    Raises `UserError`, one line, naming the message and the field that cannot be.
    """
    out = _Segments()
    if tools:
        out.option("tool-declare", TOOLS + _fenced(read_tools(tools), "tools"))
    if effort is not None and effort not in EFFORTS:
        raise UserError(f"effort = {short(effort)}: one of {', '.join(EFFORTS)} is expected")
    if effort is not None and thinking:
        out.option("thinking-effort", EFFORT.format(effort))
    for message in read_messages(messages):
        out.message(message, thinking)
    if text := _choice(tool_choice):
        out.option("tool-choice", text)
    if text := _format(response_format):
        out.option("response-format", text)
    if add_generation_prompt:
        out.open("message", role="assistant")
        out.open("think" if thinking else "response")
    return out.segments


def text_of(segments: Sequence[Segment]) -> str:
    """The segments as one text, markers spelt out: what `chat_template.jinja` gives."""
    return "".join(s.text for s in segments)


def tokenize(segments: Sequence[Segment], tokenizer: Encodes) -> tuple[list[int], list[bool]]:
    """(ids, whether each is trained). Raises `UserError` naming a marker that the tokenizer lacks."""
    return tokenize_batch([segments], tokenizer)[0]


def tokenize_batch(conversations: Sequence[Sequence[Segment]], tokenizer: Encodes) -> list[tuple[list[int], list[bool]]]:
    """`tokenize` of each, on the tokenizer's threads."""
    markers = marker_ids(tokenizer, {s.text for s in chain.from_iterable(conversations) if s.marker})
    encoded = iter(tokenizer.encode_batch([s.text for s in chain.from_iterable(conversations) if not s.marker]))
    out = []
    for segments in conversations:
        pieces = [[markers[s.text]] if s.marker else next(encoded) for s in segments]
        trained = [s.trained for s, piece in zip(segments, pieces, strict=True) for _ in piece]
        out.append((list(chain.from_iterable(pieces)), trained))
    return out


def marker_ids(tokenizer: Encodes, wanted: set[str] | None = None) -> dict[str, int]:
    """Marker → id, of those that every conversation needs and those `wanted`. Raises `UserError` naming one that is not there."""
    names = [m for m in (*MARKERS, *MEDIA) if m in MARKERS or m in (wanted or ())]
    for name in names:
        if name not in tokenizer.special:
            raise UserError(f"tokenizer.json: no special token {name}, which the chat format needs; add it to the tokenizer's added_tokens")
    return {name: tokenizer.special[name] for name in names}


def template() -> str:
    """The format as a Jinja chat template."""
    return (resources.files("atoll.data") / "chat_template.jinja").read_text(encoding="utf-8")


# ---------------------------------------------------------------- drawing


class _Segments:
    """Grows `segments`; text next to text becomes one of them, so that what is encoded by itself is what lies between two markers."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.trained = False

    def text(self, text: str) -> None:
        last = self.segments[-1] if self.segments else None
        if last is not None and not last.marker and last.trained == self.trained:
            self.segments[-1] = Segment(last.text + text, False, self.trained)
        elif text:
            self.segments.append(Segment(text, False, self.trained))

    def marker(self, name: str) -> None:
        self.segments.append(Segment(name, True, self.trained))

    def open(self, tag: str, **attributes: object) -> None:
        self.marker("<|open|>")
        self.text(tag + "".join(f' {key}="{_escaped(str(value))}"' for key, value in attributes.items() if value is not None))
        self.marker("<|sep|>")

    def close(self, tag: str) -> None:
        self.marker("<|close|>")
        self.text(tag)
        self.marker("<|sep|>")

    def element(self, tag: str, content: str, **attributes: object) -> None:
        self.open(tag, **attributes)
        self.text(content)
        self.close(tag)

    def option(self, kind: str, body: str) -> None:
        self.element("message", body, role="system", type=kind)
        self.marker("<|end_of_msg|>")

    def message(self, message: Message, thinking: bool) -> None:
        if message.tools is not None:
            self.option("tool-declare", MORE_TOOLS + _fenced(message.tools, "tools"))
            return
        if message.role == "tool":
            self.open("message", role="tool", tool=message.name, index=message.index)
        else:
            self.open("message", role=message.role, name=message.name)
        if message.role == "assistant":
            self.trained = True
            self.assistant(message, thinking)
        else:
            self.parts(message)
        self.close("message")
        self.marker("<|end_of_msg|>")
        self.trained = False

    def assistant(self, message: Message, thinking: bool) -> None:
        if thinking:
            self.element("think", message.reasoning)
        self.open("response")
        self.parts(message)
        self.close("response")
        if message.calls:
            self.open("tools")
            for number, call in enumerate(message.calls, 1):
                self.call(call, number)
            self.close("tools")

    def parts(self, message: Message) -> None:
        for part in message.parts:
            if isinstance(part, Image):
                self.image(part)
            else:
                self.text(part)

    def image(self, image: Image) -> None:
        self.marker("<|media_begin|>")
        self.text(f"image {image.width}x{image.height}")
        for name in ("<|media_content|>", "<|media_pad|>", "<|media_end|>"):
            self.marker(name)

    def call(self, call: Call, number: int) -> None:
        self.open("call", tool=call.name, index=number)
        if isinstance(call.arguments, str):  # not an object: shown as it came, never learnt
            self.trained = False
            self.element("json", call.arguments, type="object")
            self.trained = True
        else:
            for key, value in call.arguments.items():
                kind = kind_of(value)
                self.element("argument", value if kind == "string" else dump(value, key), key=key, type=kind)
        self.close("call")


def kind_of(value: Any) -> str:
    """JSON's name for the type of `value`."""
    if value is None:
        return "null"
    kinds = ((str, "string"), (bool, "boolean"), ((int, float), "number"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "array")


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _fenced(value: Any, where: str) -> str:
    return f"\n```json\n{dump(value, where, sort_keys=True)}\n```"


def _choice(choice: Any) -> str | None:
    if choice in (None, "auto"):
        return None
    if isinstance(choice, str) and choice in CHOICES:
        return CHOICES[choice]
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise UserError(f'tool_choice = {short(choice)}: "auto", "none", "required" or {{"function": {{"name": ...}}}} is expected')
    return CHOICE.format(whole(function["name"], "tool_choice.function.name"))


def _format(wanted: Any) -> str | None:
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return JSON_OBJECT
    form = wanted.get("json_schema") if isinstance(wanted, dict) and kind == "json_schema" else None
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(schema, dict):
        raise UserError(f"response_format.type = {short(kind)}: text, json_object, or json_schema with json_schema.schema is expected")
    return JSON_SCHEMA + _fenced(schema, "response_format.json_schema.schema")
