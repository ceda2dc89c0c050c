"""`atoll chat`: a conversation in the terminal. The engine runs here; what it sampled stays as it was, so that only new text is read."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from atoll.config import UserError
from atoll.data.chat import marker_ids
from atoll.data.tokenizer import Tokenizer, check_fits
from atoll.infer.request import Request, Sampling
from atoll.infer.stream import printable
from atoll.serve.answers import ChatReader
from atoll.serve.memory import Memory
from atoll.serve.prompt import Options, build_prompt

HELP = """\
/reset         forget the conversation
/system TEXT   tell the model TEXT before it; without TEXT, nothing
/exit          end, as does Ctrl-D
/help          this list
Ctrl-C stops an answer. What it said until then stays in the conversation.
"""
PROMPT = "> "
REMEMBERED = 1 << 20


class Terminal:
    """A conversation with one model.

    Args:
        read: gives the next line; raises EOFError at the end. write: shows a piece of text at once.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Tokenizer,
        system: str = "",
        tokens: int = 2048,
        sampling: Sampling | None = None,
        thinking: bool = True,
        read: Callable[[], str] = lambda: input(PROMPT),
        write: Callable[[str], object] = lambda text: (sys.stdout.write(text), sys.stdout.flush()),
    ) -> None:
        self.engine, self.tokenizer, self.tokens, self.thinking = engine, tokenizer, tokens, thinking
        self.sampling = sampling or Sampling()
        self.read, self.write = read, write
        self.system, self.messages = system, list[dict[str, Any]]()
        self._memory, self._asked = Memory(REMEMBERED), 0

    @classmethod
    def open(cls, folder: Path, system: str, tokens: int, sampling: Sampling, thinking: bool) -> Terminal:
        """With the model in `folder`. Raises `UserError`."""
        from atoll.hub.load import load_tokenizer
        from atoll.infer.draw import check as check_sampling
        from atoll.infer.engine import Engine, EngineSettings
        from atoll.model import load

        if tokens < 1:
            raise UserError(f"tokens = {tokens}: 1 or more is expected")
        model, tokenizer = load(folder), load_tokenizer(folder)
        check_sampling(sampling, model.config.vocab_size)
        check_fits(tokenizer, model.config, "tokenizer.json")
        marker_ids(tokenizer)
        return cls(Engine(model, settings=EngineSettings(slots=1)), tokenizer, system, tokens, sampling, thinking)

    def talk(self) -> None:
        """Read and answer until /exit or the end of the input. Arrow keys find earlier lines where the terminal can."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() uses it from here on
        for line in self._lines():
            word, _, rest = line.partition(" ")
            if word == "/exit":
                return
            if word in ("/reset", "/system"):
                self.messages = []
                self.system = rest.strip() if word == "/system" else self.system
            elif word.startswith("/"):
                self.write(HELP if word == "/help" else f"{word}: no such command; /help lists them\n")
            elif line.strip():
                self._say(line)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                line = self.read()
            except EOFError:
                self.write("\n")
                return
            except KeyboardInterrupt:  # at the prompt: a fresh line
                self.write("\n")
                continue
            yield line

    def _say(self, text: str) -> None:
        """Answer a message. What cannot be asked is said, and not kept in the conversation."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._answer()
        except (UserError, KeyboardInterrupt) as error:  # an interrupt here came before there was anything to stop
            self.messages.pop()
            self.write(f"{str(error) or '(stopped)'}\n")
            return
        self.messages.append(answer)

    def _answer(self) -> dict[str, Any]:
        said = [{"role": "system", "content": self.system}] if self.system else []
        prompt = build_prompt(said + self.messages, Options(thinking=self.thinking), self.tokenizer, self._memory, "")
        sampling = self.sampling
        if sampling.seed is not None:  # every answer has numbers of its own, the first those of the seed
            sampling, self._asked = dataclasses.replace(sampling, seed=sampling.seed + self._asked), self._asked + 1
        stops = frozenset({self.engine.model.config.eos_token_id, self.tokenizer.special["<|end_of_msg|>"]})
        number = self.engine.submit(Request(prompt.ids, self.tokens, sampling, stops, turns=prompt.turns))
        reader, show = ChatReader(self.tokenizer, self.thinking), _Shown(self.write)
        while not reader.ending.over:
            try:
                for step in self.engine.step():
                    for piece in reader.feed(step):
                        show.piece(piece.delta)
            except KeyboardInterrupt:
                self.engine.cancel(number)
        self.write(show.end(reader.ending.finish, reader.ending.error))
        if (ids := reader.kept_ids()) is not None:
            self._memory.put(prompt.place, reader.message, ids)
        return reader.message.as_message()


class _Shown:
    """Pieces of a message for a terminal, thoughts and calls marked as such."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self._last = write, ""

    def piece(self, delta: dict[str, Any]) -> None:
        """A piece as the server would send it."""
        for kind, head in (("reasoning", "(thinks) "), ("content", "")):
            if delta.get(kind):
                self._part(kind, head, delta[kind])
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            name = function.get("name")
            self._part(f"call {call['index']}", f"(calls {name}) ", function.get("arguments", ""))

    def _part(self, kind: str, head: str, text: str) -> None:
        if kind != self._last:
            self._write(("\n" if self._last else "") + printable(head))
        self._last = kind
        self._write(printable(text))

    def end(self, finish: str | None, error: str) -> str:
        """The line's end, and why it came if not by itself."""
        why = {"length": "(cut off: --tokens)", "cancelled": "(stopped)", "error": f"(failed: {error})"}.get(finish or "", "")
        return ("\n" if self._last else "") + (why + "\n" if why else "")
