"""What a model wrote in the chat format, as a message: fed token by token or piece by piece, the same whatever the pieces.

Nothing here raises for what a model wrote. What breaks the format stays readable: a tag that is not closed is closed by what must
follow it, a marker that leads nowhere becomes its own text, and the message is flagged `malformed`. Fed ids, the parser tells the
markers from text that only spells them; fed text, it cannot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from atoll.data.chat import MARKERS, marker_ids
from atoll.data.tokenizer import Tokenizer
from atoll.infer.parsed import Event, GrowingCall, Parsed, ParsedCall
from atoll.infer.stream import TextStream

OPEN, CLOSE, SEP, END = MARKERS
# Element → what it stands in. Elements open in a wrong place end whatever is open below their parent.
PARENT = {
    "message": None,
    "think": "message",
    "response": "message",
    "tools": "message",
    "call": "tools",
    "argument": "call",
    "json": "call",
}
ATTRIBUTE = re.compile(r'\s+(\w+)="([^"]*)"')
TAG = re.compile(rf"\s*\w+(?:{ATTRIBUTE.pattern})*\s*")
SPELT = re.compile("|".join(re.escape(m) for m in MARKERS))


def parse(written: str | Iterable[int], tokenizer: Tokenizer | None = None, thinking: bool = True, opened: bool = True) -> Parsed:
    """The message in a text, or in ids (with their tokenizer); for the arguments see `ChatParser`."""
    parser = ChatParser(tokenizer, thinking, opened)
    for piece in [written] if isinstance(written, str) else written:
        parser.feed(piece)
    parser.close()
    return parser.message


class ChatParser:
    """Feed ids or text, get events; `message` is what they add up to.

    Args:
        tokenizer: needed for ids.
        thinking, opened: what the generation prefix was: `opened` says that the model goes on within its message, in the think
            channel or (without `thinking`) in the response. Otherwise the message's own opening tag is read.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, thinking: bool = True, opened: bool = True) -> None:
        self.message = Parsed()
        self._names: dict[int, str] = {}
        self._stream: TextStream | None = None
        if tokenizer is not None:
            marker_ids(tokenizer)
            self._names = {i: name for name, i in tokenizer.special.items()}
            self._stream = TextStream(tokenizer)
        self._held = ""  # text whose end may be the beginning of a marker
        self._tag: tuple[str, str] | None = None  # the marker that began a tag, and the tag so far
        self._open: list[str] = []
        self._seen: set[str] = set()  # channels that have been opened
        self._events: list[Event] = []
        self._call = GrowingCall(0, "")
        self._over = False
        self._stray = False  # text outside every channel has begun: its spaces count
        if opened:
            for tag in ("message", "think" if thinking else "response"):
                self._enter(tag, {})

    def feed(self, piece: int | str) -> list[Event]:
        """What a token id, or a piece of text, completes."""
        if isinstance(piece, str):
            self._text_piece(piece)
        else:
            self._id(piece)
        return self._take()

    def close(self) -> list[Event]:
        """What is left when nothing more comes. A tag cut off is dropped; a message not ended stays unfinished."""
        if self._stream is not None:
            self._text(self._stream.close())
        self._text(self._held)
        self._held = ""
        if not self._over:
            self._over = True
            self._events.append(Event("end"))
        return self._take()

    @property
    def channels(self) -> frozenset[str]:
        """The channels (think, response, tools) that have been opened."""
        return frozenset(self._seen)

    def unclosed(self) -> list[str] | None:
        """Elements that are open, the outermost first; None within a tag."""
        return None if self._tag is not None else list(self._open)

    def _take(self) -> list[Event]:
        """Events so far, neighbours of one kind joined."""
        out: list[Event] = []
        for event in self._events:
            last = out[-1] if out else None
            if last is not None and last.kind == event.kind and last.call == event.call and event.kind != "call":
                out[-1] = Event(last.kind, last.text + event.text, last.call)
            else:
                out.append(event)
        self._events = []
        return out

    # ---------------------------------------------------------------- from ids and text to markers and text

    def _id(self, token: int) -> None:
        if self._stream is None:
            raise ValueError("ids need a tokenizer")
        name = self._names.get(token)
        if name is None:
            self._text(self._stream.feed(token))
            return
        self._text(self._stream.close())
        if name in MARKERS:
            self._marker(name)
        else:  # bos, eos, padding, media: no part of an answer
            self._flag(not self._over)

    def _text_piece(self, piece: str) -> None:
        text, at = self._held + piece, 0
        for found in SPELT.finditer(text):
            self._text(text[at : found.start()])
            self._marker(found[0])
            at = found.end()
        rest = text[at:]
        keep = next((n for n in range(min(len(rest), max(map(len, MARKERS)) - 1), 0, -1) if _may_grow(rest[-n:])), 0)
        self._text(rest[: len(rest) - keep])
        self._held = rest[len(rest) - keep :]

    # ---------------------------------------------------------------- tags

    def _text(self, text: str) -> None:
        if not text or self._over:
            self._flag(bool(text.strip()))
        elif self._tag is not None:
            self._tag = (self._tag[0], self._tag[1] + text)
        else:
            self._put(text)

    def _marker(self, name: str) -> None:
        self._stray = False
        if self._over:
            self._flag()
        elif self._tag is not None and name == SEP:
            (kind, tag), self._tag = self._tag, None
            if kind == OPEN:
                self._opening(tag)
            else:
                self._closing(tag)
        else:
            if self._tag is not None:  # a tag without its end
                self._literal("".join(self._tag))
                self._tag = None
            if name == END:
                self._end()
            elif name == SEP:
                self._literal(SEP)
            else:
                self._tag = (name, "")

    def _opening(self, tag: str) -> None:
        name = tag.split(maxsplit=1)[0] if tag.strip() else ""
        parent = PARENT.get(name)
        begins = parent is None and not self._open and not self.message.finished
        if name not in PARENT or not (begins or parent in self._open):
            self._literal(OPEN + tag + SEP)
            return
        while self._open and self._open[-1] != parent:
            self._flag()
            self._leave()
        self._flag(not TAG.fullmatch(tag))
        attributes = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in ATTRIBUTE.findall(tag)}
        self._enter(name, attributes)

    def _closing(self, tag: str) -> None:
        if tag.strip() not in self._open:
            self._literal(CLOSE + tag + SEP)
            return
        while self._open[-1] != tag.strip():
            self._flag()
            self._leave()
        self._leave()

    def _end(self) -> None:
        while self._open:
            self._flag()
            self._leave()
        self.message.finished = self._over = True
        self._events.append(Event("end"))

    # ---------------------------------------------------------------- elements

    def _enter(self, name: str, attributes: dict[str, str]) -> None:
        self._open.append(name)
        if name in ("think", "response", "tools"):
            self._flag(name in self._seen)
            self._seen.add(name)
        if name == "think" and self.message.thinking is None:
            self.message.thinking = ""
        elif name == "message":
            self._flag(bool(attributes) and attributes.get("role") != "assistant")
        elif name == "call":
            number = len(self.message.tool_calls) + 1
            self._flag(not attributes.get("tool") or attributes.get("index") != str(number))
            self._call = GrowingCall(number, attributes.get("tool", ""))
            self._events.append(Event("call", call=number, name=self._call.name))
        elif name == "argument":
            self._flag("key" not in attributes or attributes["key"] in self._call.arguments)
            self._call.enter(attributes.get("key", ""), attributes.get("type", ""))
            self._arguments(self._call.begun())
        elif name == "json":
            self._call.enter_json()

    def _leave(self) -> None:
        name = self._open.pop()
        if name in ("argument", "json"):
            piece, sound = self._call.leave()
            self._flag(not sound)
            self._arguments(piece)
        elif name == "call":
            self._arguments(self._call.end())
            self.message.tool_calls.append(ParsedCall(self._call.name, self._call.result()))
        elif name == "message":
            self._flag("response" not in self._seen)
            self.message.finished = True

    def _put(self, text: str) -> None:
        place = self._open[-1] if self._open else ""
        if place == "think":
            self.message.thinking = (self.message.thinking or "") + text
            self._events.append(Event("thinking", text))
        elif place in ("argument", "json"):
            self._arguments(self._call.put(text))
        elif place == "response":
            self._content(text)
        elif kept := text if self._stray else text.lstrip():  # space between elements is nothing, other text is not lost
            self._stray = True
            self._flag()
            self._content(kept)

    def _content(self, text: str) -> None:
        self.message.content += text
        self._events.append(Event("content", text))

    def _literal(self, text: str) -> None:
        self._flag()
        self._put(text)

    def _arguments(self, piece: str) -> None:
        if piece:
            self._events.append(Event("arguments", piece, self._call.number))

    def _flag(self, broken: bool = True) -> None:
        self.message.malformed |= broken


def _may_grow(text: str) -> bool:
    return any(m.startswith(text) for m in MARKERS)


def events_of(parser: ChatParser, pieces: Iterable[int | str]) -> Iterator[Event]:
    """All events of `pieces` and of the end."""
    for piece in pieces:
        yield from parser.feed(piece)
    yield from parser.close()
