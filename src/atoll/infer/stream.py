"""Text from tokens as they come: a byte-level token may end inside a UTF-8 character, whose bytes wait for the rest."""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """What `TextStream` needs of a tokenizer: the bytes of one token."""

    def token_bytes(self, id: int) -> bytes:
        """The bytes that token `id` stands for."""
        ...


class TextStream:
    """Feed token ids, get the text that is certain so far.

    Joining what `feed` and `close` return gives exactly the decoding of all bytes together; bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """Text completed by token `id`; empty while a character is incomplete."""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def close(self) -> str:
        """What an unfinished character at the end becomes."""
        return self._decoder.decode(b"", final=True)
