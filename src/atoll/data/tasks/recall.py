"""Recall in raw tokens: multi-query associative recall, copy, palindrome, stacks. At most `length` tokens each.

Tasks as described by Arora et al. 2023 (Zoology: MQAR) and in the Kimi Linear report, section 5.1 (palindrome, MQAR, stack).
"""

from __future__ import annotations

import numpy as np

from atoll.data.tasks.sample import Draw, Sample, Vocabulary, Writer

BLANK, ASK, PUSH, POP = 0, 1, 2, 3  # markers
STACKS = 4


def mqar(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Pairs of a key and a value, each key once, spread over blanks; then every key again in another order, its value the answer."""
    keys, values = v.halves()
    pairs = max(1, min(len(keys), (length - 2) // 4))
    key, value = keys[draw.order(len(keys))[:pairs]], values[draw.integers(len(values), pairs)]
    blanks = max(0, length - 2 - 4 * pairs)
    body = np.full(2 * pairs + blanks, v.markers[BLANK])
    at = np.sort(draw.integers(blanks + 1, pairs)) + 2 * np.arange(pairs)
    body[at], body[at + 1] = key, value
    out = Writer().add([v.bos]).add(body).add([v.markers[ASK]])
    for i in draw.order(pairs):
        out.add(key[i : i + 1]).ask(value[i : i + 1], 1 / len(values))
    return out.sample(length)


def copy(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Symbols, then the same symbols."""
    return _repeated(draw, v, length, 1)


def palindrome(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Symbols, then the same from last to first."""
    return _repeated(draw, v, length, -1)


def _repeated(draw: Draw, v: Vocabulary, length: int, step: int) -> Sample:
    count = max(1, (length - 2) // 2)
    text = v.symbols[draw.integers(len(v.symbols), count)]
    out = Writer().add([v.bos]).add(text).add([v.markers[ASK]])
    return out.ask(text[::step], float(len(v.symbols)) ** -count).sample(length)


def stack(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Four stacks: `PUSH s x` lays x on s, `POP s x` takes it off again, and x is the answer. The last operation is a POP."""
    names, symbols = v.symbols[:STACKS], v.symbols[STACKS:]
    steps = max(2, (length - 1) // 3)
    coins, where, what = draw.integers(2, steps), draw.integers(STACKS, steps), draw.integers(len(symbols), steps)
    stacks: list[list[int]] = [[] for _ in names]
    out = Writer().add([v.bos])
    for i in range(steps):
        s = int(where[i])
        if i == steps - 1 and not stacks[s]:
            s = next((k for k in range(STACKS) if stacks[k]), s)
        if stacks[s] and (coins[i] or i == steps - 1):
            out.add([v.markers[POP], names[s]]).ask([stacks[s].pop()], 1 / len(symbols))
        elif i < steps - 1:
            stacks[s].append(int(symbols[what[i]]))
            out.add([v.markers[PUSH], names[s], stacks[s][-1]])
    return out.sample(length)
