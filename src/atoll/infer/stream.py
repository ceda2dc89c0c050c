"""Text from tokens as they come: a byte-level token may end inside a UTF-8 character, whose bytes wait for the rest."""

from __future__ import annotations

from typing import Protocol

BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character, or not one yet


class Decodes(Protocol):
    """What `TextStream` needs of a tokenizer: the text of several tokens together."""

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; bytes that are no character, or only a part of one, show as U+FFFD."""
        ...


class TextStream:
    """Feed token ids, get the text that is certain so far. Joining what `feed` and `close` return gives the decoding of all ids.

    Only the last U+FFFD of a decoding can still become a character, so everything before it is given out at once.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # tokens given out last: some decoders treat a text's first token unlike the rest
        self._open: list[int] = []  # tokens since the last whole character
        self._given = 0  # characters of the open tokens' text that are out already

    def feed(self, id: int) -> str:
        """Text completed by token `id`; empty while a character is incomplete."""
        self._open.append(id)
        text = self._text()
        if text.endswith(BROKEN):
            return self._give(text[:-1])
        piece = self._give(text)
        self._before, self._open, self._given = self._open, [], 0
        return piece

    def close(self) -> str:
        """What an unfinished character at the end becomes."""
        piece = self._give(self._text())
        self._before, self._open, self._given = [], [], 0
        return piece

    def _text(self) -> str:
        lead = self._tokenizer.decode(self._before) if self._before else ""
        return self._tokenizer.decode([*self._before, *self._open])[len(lead) :]

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._given += len(piece)
        return piece


def printable(text: str) -> str:
    """`text` without what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else BROKEN for c in text)
