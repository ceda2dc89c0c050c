"""How needles and word lists are said: in raw tokens of a `Vocabulary`, or in English through a tokenizer. And what they lie in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from atoll.data.tasks.sample import Draw, Vocabulary

Ids = np.ndarray
FACT, ASSIGN, ALIAS, NAME, LIST, ASK = 2, 3, 4, 5, 6, 1  # markers
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
DIGITS = 7
PIECE = 4096  # fewest tokens of a corpus read at once: more than there are specials in a row


class RawForm:
    """A name is a symbol of one half, a value four of the other; a sign says what follows."""

    VALUE = 4

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.v = vocabulary
        self._names, self._values = vocabulary.halves()
        self.separator = np.zeros(0, dtype=np.int64)
        self.value_chance = float(len(self._values)) ** -self.VALUE
        self.word_names = len(self._names)

    def names(self, draw: Draw, count: int) -> list[Ids]:
        return [self._names[i : i + 1] for i in draw.order(len(self._names))[:count]]

    def values(self, draw: Draw, count: int) -> list[Ids]:
        return [self._values[draw.integers(len(self._values), self.VALUE)] for _ in range(count)]

    def _say(self, marker: int, *parts: Ids) -> Ids:
        return np.concatenate([self.v.markers[marker : marker + 1], *parts])

    def fact(self, name: Ids, value: Ids) -> Ids:
        return self._say(FACT, name, value)

    def ask(self, name: Ids, count: int) -> Ids:
        return self._say(ASK, name)

    def assign(self, name: Ids, value: Ids) -> Ids:
        return self._say(ASSIGN, name, value)

    def alias(self, name: Ids, other: Ids) -> Ids:
        return self._say(ALIAS, name, other)

    def ask_names(self, value: Ids) -> Ids:
        return self._say(NAME, value)

    def ask_words(self, which: str, count: int) -> Ids:
        return self._say(LIST, self.v.markers[NAME : NAME + 1] if which == "common" else self.v.markers[ASSIGN : ASSIGN + 1])

    def noise(self, draw: Draw, count: int) -> Ids:
        return self.v.symbols[draw.integers(len(self.v.symbols), count)]


class TextForm:
    """English: a name is a made-up word, a value a number of seven digits. `encode`: text to ids."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._known: dict[str, Ids] = {}
        self.separator = self.say(",")
        self.value_chance = 1 / (9 * 10 ** (DIGITS - 1))
        self.word_names = len(SYLLABLES) ** 3

    def say(self, text: str) -> Ids:
        """Ids of `text`, kept: the pieces of a task return."""
        if text not in self._known:
            if len(self._known) > 1 << 14:
                self._known.clear()
            self._known[text] = np.asarray(self._encode(text), dtype=np.int64)
        return self._known[text]

    def names(self, draw: Draw, count: int) -> list[Ids]:
        return [self.say(" " + word) for word in made_up(draw, count)]

    def values(self, draw: Draw, count: int) -> list[Ids]:
        low = 10 ** (DIGITS - 1)
        return [self.say(f" {low + int(n)}") for n in draw.integers(9 * low, count)]

    def _join(self, *parts: str | Ids) -> Ids:
        return np.concatenate([self.say(p) if isinstance(p, str) else p for p in parts])

    def fact(self, name: Ids, value: Ids) -> Ids:
        return self._join("\nA fact to keep: the number of", name, " is", value, ".\n")

    def ask(self, name: Ids, count: int) -> Ids:
        if count == 1:
            return self._join("\n\nWhich number of", name, " was given in the text above? The number of", name, " is")
        return self._join(f"\n\nWhich {count} numbers of", name, " were given above, in order? The numbers of", name, " are")

    def assign(self, name: Ids, value: Ids) -> Ids:
        return self._join("\nLet", name, " =", value, ".\n")

    alias = assign  # of another name

    def ask_names(self, value: Ids) -> Ids:
        return self._join("\n\nWhich names above stand for", value, ", in order? They are")

    def ask_words(self, which: str, count: int) -> Ids:
        order = "in the order in which they first appear" if which == "common" else "the most frequent first"
        return self.say(f"\n\nWhich {count} words are the most frequent in the list above, {order}? They are")

    def noise(self, draw: Draw, count: int) -> Ids:
        parts, length = [], 0
        while length < count:
            a, b, c, d = made_up(draw, 4)
            parts.append(self.say(f" The {a} {b} was near the {c} and the {d} was not."))
            length += len(parts[-1])
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])[:count]


Form = RawForm | TextForm  # both say the same things; every method gives ids, int64


def made_up(draw: Draw, count: int) -> list[str]:
    """`count` different words of three syllables."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(SYLLABLES[i] for i in draw.integers(len(SYLLABLES), 3))] = None
    return list(words)


class Haystack:
    """Text that needles lie in: `count` tokens of a corpus from a pseudo-random place on, its special tokens left out; or noise."""

    def __init__(self, form: Form, token_set: Any = None) -> None:
        """`token_set`: a `TokenSet`, read as it stands and from its start again at its end; None makes noise of the form's own."""
        self.form, self.text = form, token_set
        self.what = "noise" if token_set is None else "text"

    def take(self, draw: Draw, count: int) -> Ids:
        """`count` ids, int64."""
        if self.text is None:
            return self.form.noise(draw, count)
        tokens, table = self.text.tokens, self.text.token_bytes
        at, parts, length = draw.integer(len(tokens)), [np.zeros(0, dtype=np.int64)], 0
        while length < count:
            size = max(count - length, PIECE)
            piece = tokens[at : at + size].astype(np.int64)
            piece = piece[table[piece] > 0]
            if at == 0 and not len(piece):
                raise ValueError("haystack: a corpus without text")
            parts.append(piece)
            at, length = at + size if at + size < len(tokens) else 0, length + len(piece)
        return np.concatenate(parts)[:count]
