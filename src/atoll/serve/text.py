"""Tokens as text: names and bytes of single ones, and stop strings that are found across their borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.data.tokenizer import Tokenizer, byte_symbols
from atoll.infer.request import Step


@dataclass(frozen=True)
class Token:
    """A token with its log-probability (None for a prompt's first) and the likeliest in its place; `offset` in characters of the text."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    offset: int = 0

    @staticmethod
    def of(step: Step, offset: int = 0) -> Token:
        """The token of a step that has one."""
        assert step.id is not None
        return Token(step.id, step.logprob, step.top, offset)


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it: what is impossible, or no number, is -9999, as elsewhere."""
    return logprob if logprob > -9999.0 else -9999.0


class TokenNames:
    """What a token is called in an answer, as OpenAI's API calls it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = {symbol: value for value, symbol in enumerate(byte_symbols())} if '"ByteLevel"' in tokenizer.text else {}

    def bytes(self, id: int) -> bytes:
        """The bytes of text behind `id`; of a special token its name."""
        spelt = self._tokenizer.token(id)
        if spelt is not None and not self._tokenizer.is_special(id) and all(c in self._bytes for c in spelt):
            return bytes(self._bytes[c] for c in spelt)
        return self._tokenizer.decode([id]).encode("utf-8", "replace")

    def text(self, id: int) -> str:
        """Its text; "bytes:\\xe4" where its bytes are no whole characters, so that no two tokens share a name for that alone."""
        raw = self.bytes(id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def chat_logprob(self, token: Token) -> dict[str, Any]:
        """An entry of a chat answer's logprobs."""
        top = [self._entry(id, value) for id, value in token.top]
        return {**self._entry(token.id, token.logprob or 0.0), "top_logprobs": top}

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(id), "token_id": id, "logprob": finite(logprob), "bytes": list(self.bytes(id))}

    def completion_logprobs(self, tokens: Sequence[Token], as_ids: bool = False) -> dict[str, Any]:
        """The logprobs of a completion. Of two tokens with one name the likelier stands in `top_logprobs`."""
        name = (lambda id: f"token_id:{id}") if as_ids else self.text
        tops: list[dict[str, float] | None] = []
        for token in tokens:
            if token.logprob is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for id, value in (*token.top, (token.id, token.logprob)):
                top.setdefault(name(id), finite(value))
            tops.append(top)
        return {
            "tokens": [name(t.id) for t in tokens],
            "token_logprobs": [None if t.logprob is None else finite(t.logprob) for t in tokens],
            "top_logprobs": tops,
            "text_offset": [t.offset for t in tokens],
        }


class StopStrings:
    """Text passes through until one of `stops` is complete. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.hit: str | None = None  # the stop that was met; nothing passes after it

    def feed(self, text: str) -> str:
        """What of the text so far can be given out."""
        if self.hit is not None or not text:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def close(self) -> str:
        """What was held back, when nothing more comes."""
        text, self._held = self._held, ""
        return text


class Output:
    """Text and the tokens it came from, on their way to a client together. What a stop string holds, and all after it, stays behind."""

    def __init__(self, stops: Sequence[str], offset: int = 0) -> None:
        self._stops = StopStrings(stops)
        self._held: list[Token] = []
        self.decoded = self._given = offset  # characters taken in, and given out

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._stops.hit is not None

    def feed(self, text: str, tokens: Sequence[Token] = ()) -> tuple[str, list[Token]]:
        """Take in `text` that `tokens` (their offsets counted by `decoded` before them) have made; give out what is certain."""
        self._held += tokens
        self.decoded += len(text)
        return self._give(self._stops.feed(text), every=False)

    def close(self) -> tuple[str, list[Token]]:
        """What was held back, when nothing more comes."""
        return self._give(self._stops.close(), every=not self.stopped)

    def _give(self, text: str, every: bool) -> tuple[str, list[Token]]:
        self._given += len(text)
        ready = [t for t in self._held if every or t.offset < self._given]
        self._held = self._held[len(ready) :]
        return text, ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
