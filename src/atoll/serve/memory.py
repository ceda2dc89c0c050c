"""What was sampled for which message: (salt, conversation so far) → ids. A conversation that a client sends back as text gets the
very ids again, thinking included, so that its prefix is exact and cached states stay good."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from atoll.data.messages import Message
from atoll.infer.parsed import Parsed

Found = Literal["exact", "edited", "unknown"]
MOST = 64  # answers kept for one place in a conversation (n > 1, or asked again)


class Place:
    """A place in a conversation: everything before it, as a running hash of ids and images. Grows by `add`."""

    def __init__(self, salt: str, thinking: bool) -> None:
        self._hash = hashlib.blake2b(f"{salt}/{thinking}".encode(), digest_size=16)

    def add(self, ids: Iterable[int]) -> None:
        """`ids` follow."""
        self._hash.update(array("q", ids).tobytes())

    def add_image(self, digest: bytes) -> None:
        """An image that the ids alone do not tell from another follows."""
        self._hash.update(b"image" + digest)

    def key(self) -> bytes:
        """Its name."""
        return self._hash.copy().digest()


@dataclass(frozen=True)
class Remembered:
    """What a client was shown of an answer, and the ids from after the generation prefix to the end of the message."""

    content: str
    thinking: str
    calls: tuple[tuple[str, object], ...]
    ids: array

    def is_sent_back_in(self, message: Message) -> bool:
        """Whether `message` is this answer as clients send it back: its text and calls, with or without its thinking."""
        if message.name is not None or not all(isinstance(part, str) for part in message.parts):
            return False
        content = "".join(part for part in message.parts if isinstance(part, str))
        calls = tuple((call.name, call.arguments) for call in message.calls)
        return content == self.content and calls == self.calls and message.reasoning in ("", self.thinking)


class Memory:
    """Answers by their place, the least recently used forgotten beyond `tokens` of them."""

    def __init__(self, tokens: int) -> None:
        self.limit, self.held = tokens, 0
        self._answers: OrderedDict[bytes, list[Remembered]] = OrderedDict()
        self._lock = threading.Lock()  # prompts are built in threads of their own

    def put(self, place: bytes, answer: Parsed, ids: Iterable[int]) -> None:
        """Remember `ids` for what `answer` says."""
        calls = tuple((call.name, call.arguments) for call in answer.tool_calls)
        made = Remembered(answer.content, answer.thinking or "", calls, array("i", ids))
        with self._lock:
            here = self._answers.setdefault(place, [])
            self._answers.move_to_end(place)
            here.append(made)
            self.held += len(made.ids)
            while len(here) > MOST:
                self.held -= len(here.pop(0).ids)
            while self.held > self.limit and self._answers:
                _, old = self._answers.popitem(last=False)
                self.held -= sum(len(answer.ids) for answer in old)

    def find(self, place: bytes, message: Message) -> tuple[Found, list[int]]:
        """The ids that were sampled for `message` at `place`, the latest first; or why there are none."""
        with self._lock:
            here = self._answers.get(place)
            if here is None:
                return "unknown", []
            self._answers.move_to_end(place)
            found = next((answer for answer in reversed(here) if answer.is_sent_back_in(message)), None)
        return ("edited", []) if found is None else ("exact", list(found.ids))
