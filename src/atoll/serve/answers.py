"""One sequence's steps as what a client is given: text of a completion, or the pieces of a chat message."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.data.tokenizer import Tokenizer
from atoll.infer.chat_parser import ChatParser
from atoll.infer.parsed import Event, Parsed
from atoll.infer.request import Answer, Step
from atoll.infer.stream import TextStream
from atoll.serve.text import Output, Token

END, IMAGE = "<|end_of_msg|>", "<|media_pad|>"
CLOSABLE = {"message", "think", "response"}


@dataclass
class Ending:
    """How a sequence ended, for usage and the books. `finish` may come before the engine's last step: where a stop string was met."""

    finish: str | None = None
    tokens: int = 0
    thinking_tokens: int = 0
    answer: Answer | None = None  # with the engine's last step
    error: str = ""

    @property
    def over(self) -> bool:
        """Whether the engine's last step has come."""
        return self.answer is not None

    def note(self, step: Step, stopped: bool) -> None:
        """A step has come; `stopped`: a stop string has been met by now."""
        if self.finish is None:
            self.tokens += step.id is not None
            self.finish, self.error = ("stop", "") if stopped else (step.finish, step.error)
        if step.finish is not None:
            self.answer = step.answer or Answer([], [], [], step.finish)


class CompletionReader:
    """Text and tokens of a completion. Feed steps; each gives (text, tokens) to be added to what was given before.

    Tokens come with the text they begin in; those of a stop string are left out. `ending.finish` is set when it is over.
    `offset`: characters of the prompt, where it is echoed.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), offset: int = 0) -> None:
        self._tokenizer, self._stream, self._output = tokenizer, TextStream(tokenizer), Output(stops, offset)
        self.ids: list[int] = []
        self.ending = Ending()

    def feed(self, step: Step) -> tuple[str, list[Token]]:
        """What a step adds."""
        if self.ending.finish is not None:
            self.ending.note(step, True)
            return "", []
        text, tokens = "", []
        if step.id is not None:
            self.ids.append(step.id)
            shown = "" if self._tokenizer.is_special(step.id) else self._stream.feed(step.id)
            text, tokens = self._output.feed(shown, [Token.of(step, self._output.decoded)])
        if step.finish is not None:
            for more, theirs in (self._output.feed(self._stream.close()), self._output.close()):
                text, tokens = text + more, tokens + theirs
        self.ending.note(step, self._output.stopped)
        return text, tokens


@dataclass
class ChatPiece:
    """A delta of a chat message, and the tokens its text came from."""

    delta: dict[str, Any]
    content: list[Token] = field(default_factory=list)
    thinking: list[Token] = field(default_factory=list)


class ChatReader:
    """A chat message read from ids. Stop strings are looked for in its content, not in thoughts or tool calls.

    `message` is what the model wrote, `shown` the content that was given out, `ids` what was sampled.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._parser, self._output = tokenizer, ChatParser(tokenizer, thinking), Output(stops)
        self._pending: list[Token] = []  # tokens of text whose events are not out yet
        self._in_thought = thinking
        self._cut_by: int | None = None  # the stop id that ended it without being a part of the format
        self.call_ids: list[str] = []
        self.ids: list[int] = []
        self.shown = ""
        self.ending = Ending()

    @property
    def message(self) -> Parsed:
        """The message so far."""
        return self._parser.message

    def feed(self, step: Step) -> list[ChatPiece]:
        """What a step adds."""
        if self.ending.finish is not None:
            self.ending.note(step, True)
            return []
        out: list[ChatPiece] = []
        if step.id is not None:
            out += self._token(step, step.id)
        if step.finish is not None:
            out += self._pieces(self._parser.close())
            out += self._content(*self._output.close())
        self.ending.note(step, self._output.stopped)
        return out

    def _token(self, step: Step, id: int) -> list[ChatPiece]:
        self.ids.append(id)
        if not self._tokenizer.is_special(id):
            self._pending.append(Token.of(step, self._output.decoded))
        elif step.finish == "stop" and id != self._tokenizer.special[END]:
            self._cut_by = id
        out = self._pieces(self._parser.feed(id))
        if self._tokenizer.is_special(id):
            self._pending = []  # they were a tag's
        self.ending.thinking_tokens += self._in_thought
        return out

    def finish_reason(self) -> str | None:
        """OpenAI's word for how the message ended."""
        called = self.ending.finish == "stop" and self.message.tool_calls and not self._output.stopped
        return "tool_calls" if called else self.ending.finish

    def _pieces(self, events: list[Event]) -> list[ChatPiece]:
        out: list[ChatPiece] = []
        for event in events:
            self._in_thought &= event.kind in ("thinking", "end")
            if event.kind == "thinking":
                out.append(ChatPiece({"reasoning": event.text, "reasoning_content": event.text}, thinking=self._pending))
            elif event.kind == "content":
                out += self._content(*self._output.feed(event.text, self._pending))
            elif event.kind != "end" and not self._output.stopped:
                out.append(ChatPiece({"tool_calls": [{"index": event.call - 1, **self._call(event)}]}))
            self._pending = []
        return out

    def _content(self, text: str, tokens: list[Token]) -> list[ChatPiece]:
        self.shown += text
        return [ChatPiece({"content": text}, content=tokens)] if text or tokens else []

    def _call(self, event: Event) -> dict[str, Any]:
        if event.kind == "arguments":
            return {"function": {"arguments": event.text}}
        self.call_ids.append(f"call_{uuid.uuid4().hex[:24]}")
        return {"id": self.call_ids[-1], "type": "function", "function": {"name": event.name, "arguments": ""}}

    def kept_ids(self) -> list[int] | None:
        """The sampled ids, completed to a whole message; None where what was shown cannot be completed to what was sampled."""
        unclosed = self._parser.unclosed()
        if self._output.stopped or unclosed is None or not CLOSABLE.issuperset(unclosed):
            return None
        if self._tokenizer.special.get(IMAGE) in self.ids:  # an image's place without an image: no prompt can hold it again
            return None
        ids = self.ids[:-1] if self._cut_by is not None else list(self.ids)
        ended = not unclosed and ids[-1:] == [self._tokenizer.special[END]]
        return ids if ended else ids + self._closing(unclosed)

    def _closing(self, unclosed: list[str]) -> list[int]:
        """Ids that close what is open, with the response that every message has."""
        special = self._tokenizer.special
        out: list[int] = []

        def tag(marker: str, name: str) -> None:
            out.extend([special[marker], *self._tokenizer.encode(name), special["<|sep|>"]])

        if "think" in unclosed:
            tag("<|close|>", "think")
        if unclosed and "response" not in self._parser.channels:
            tag("<|open|>", "response")
            tag("<|close|>", "response")
        elif "response" in unclosed:
            tag("<|close|>", "response")
        if unclosed:
            tag("<|close|>", "message")
        return [*out, special[END]]
