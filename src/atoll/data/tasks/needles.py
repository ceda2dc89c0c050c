"""Needles in a haystack, and lists of words: RULER's synthetic tasks (Hsieh et al. 2024), written from their description.

A needle of the wished depth d stands before token round(d · H) of H tokens of haystack; the sample's `depth` is what came of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from atoll.data.tasks.forms import Form, Haystack, Ids
from atoll.data.tasks.sample import Draw, Sample, Writer

KEYS, VALUES, CHAIN, CHAINS = 4, 4, 4, 2
COMMON, FREQUENT, OFTEN = 4, 3, 6  # common words are asked for, frequent ones; a common word is so many times as frequent as another


def _woven(bos: int, hay: Haystack, draw: Draw, needles: list[Ids], places: list[float], tail: int, length: int) -> tuple[Writer, float]:
    """bos, then a haystack that fills `length` up to `tail`, each needle at its place, 0 to 1; and the first needle's depth."""
    room = max(0, length - 1 - tail - sum(map(len, needles)))
    text = hay.take(draw, room)
    spots = [round(place * room) for place in places]
    out, read = Writer().add([bos]), 0
    for i in sorted(range(len(needles)), key=lambda i: (spots[i], i)):
        out.add(text[read : spots[i]]).add(needles[i])
        read = spots[i]
    return out.add(text[read:]), spots[0] / room if room else 0.0


def _answer(out: Writer, form: Form, answers: list[Ids], chance: float) -> Writer:
    for i, answer in enumerate(answers):
        if i:
            out.add(form.separator)
        out.ask(answer, chance)
    return out


def _place(draw: Draw, low: float = 0.0) -> float:
    return low + (1 - low) * draw.integer(1 << 20) / (1 << 20)


def _needle(draw: Draw, hay: Haystack, bos: int, length: int, depth: float, keys: int, values: int) -> Sample:
    """`keys` names; the first has `values` facts and is asked for, the first fact at `depth`, its others after it."""
    form = hay.form
    names, numbers = form.names(draw, keys), form.values(draw, keys - 1 + values)
    needles = [form.fact(names[0], n) for n in numbers[:values]] + [
        form.fact(name, n) for name, n in zip(names[1:], numbers[values:], strict=True)
    ]
    places = [depth, *sorted(_place(draw, depth) for _ in range(values - 1)), *(_place(draw) for _ in range(keys - 1))]
    question, answers = form.ask(names[0], values), numbers[:values]
    out, found = _woven(bos, hay, draw, needles, places, _answer(Writer().add(question), form, answers, 0).length, length)
    return _answer(out.add(question), form, answers, form.value_chance).sample(length, found)


def needle_single(draw: Draw, hay: Haystack, bos: int, length: int, depth: float) -> Sample:
    """One fact; its value is asked for."""
    return _needle(draw, hay, bos, length, depth, 1, 1)


def needle_multi(draw: Draw, hay: Haystack, bos: int, length: int, depth: float) -> Sample:
    """Four facts of four names; one is asked for, which stands at the depth."""
    return _needle(draw, hay, bos, length, depth, KEYS, 1)


def needle_values(draw: Draw, hay: Haystack, bos: int, length: int, depth: float) -> Sample:
    """Four facts of one name, the first at the depth; all are asked for, in their order."""
    return _needle(draw, hay, bos, length, depth, 1, VALUES)


def variables(draw: Draw, hay: Haystack, bos: int, length: int, depth: float) -> Sample:
    """Two chains X1 = value, X2 = X1, … X4 = X3; the four names of the first, whose head is at the depth, are asked for in order."""
    form = hay.form
    names, numbers = form.names(draw, CHAIN * CHAINS), form.values(draw, CHAINS)
    needles, places = [], []
    for c in range(CHAINS):
        chain = names[c * CHAIN : (c + 1) * CHAIN]
        needles += [form.assign(chain[0], numbers[c]), *(form.alias(b, a) for a, b in itertools.pairwise(chain))]
        head = depth if c == 0 else _place(draw)
        places += [head, *sorted(_place(draw, head) for _ in chain[1:])]
    question, answers = form.ask_names(numbers[0]), names[:CHAIN]
    out, found = _woven(bos, hay, draw, needles, places, _answer(Writer().add(question), form, answers, 0).length, length)
    return _answer(out.add(question), form, answers, 1 / len(names)).sample(length, found)


# ---------------------------------------------------------------- lists of words


def common_words(draw: Draw, hay: Haystack, bos: int, length: int) -> Sample:
    """A shuffled list in which four words are six times as frequent as every other; they are asked for as they first appear."""

    def counts(slots: int, pool: int) -> list[int]:
        times = max(1, -(-slots // (pool - COMMON + OFTEN * COMMON)))
        others = min(pool - COMMON, slots // times - OFTEN * COMMON)
        return [OFTEN * times] * COMMON + [times] * max(1, others)

    return _listed(draw, hay.form, bos, length, "common", COMMON, counts)


def frequent_words(draw: Draw, hay: Haystack, bos: int, length: int) -> Sample:
    """A shuffled list in which the word of rank r appears in proportion to 1/r²; the first three are asked for, the most frequent first."""

    def counts(slots: int, pool: int) -> list[int]:
        share = 1 / np.arange(1, min(pool, max(8, slots // 4)) + 1) ** 2.0
        found = np.maximum(1, np.floor(slots * share / share.sum())).astype(int)
        for r in range(FREQUENT, 0, -1):  # the asked ones differ, however short the list
            found[r - 1] = max(found[r - 1], found[r] + 1)
        return found.tolist()

    return _listed(draw, hay.form, bos, length, "frequent", FREQUENT, counts)


def _listed(draw: Draw, form: Form, bos: int, length: int, which: str, asked: int, counts: Callable[[int, int], list[int]]) -> Sample:
    question = form.ask_words(which, asked)
    pool = form.names(draw, min(form.word_names, 512))
    room = length - 1 - len(question) - asked * (max(map(len, pool)) + len(form.separator))
    slots = room // min(map(len, pool))
    while True:  # fewer until they fit; a list too short to be one is cut, and says so
        times = counts(max(slots, 8), len(pool))
        size = sum(n * len(pool[i]) for i, n in enumerate(times))
        if size <= room or slots <= 8:
            break
        slots = min(slots - 1, slots * room // size)
    words = np.repeat(np.arange(len(times)), times)
    words = words[draw.order(len(words))]
    out = Writer().add([bos]).add(np.concatenate([pool[i] for i in words])).add(question)
    first = dict.fromkeys(words.tolist())
    best = [w for w in first if w < asked] if which == "common" else range(asked)
    return _answer(out, form, [pool[w] for w in best], 1 / len(times)).sample(length)
