"""State tracking in raw tokens: word problems of finite groups. The elements of a word are read, their product is the answer.

Parity is Z2, the modular counter Z5; S3 and S5 are the permutations of three and of five things. All are permutations here, and the
state after w1 … wn is w1 ∘ … ∘ wn, where (a ∘ b)(x) = b(a(x)): first a, then b.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from atoll.config import UserError
from atoll.data.tasks.recall import ASK
from atoll.data.tasks.sample import Draw, Sample, Vocabulary, Writer


@functools.cache
def group(name: str, things: int) -> np.ndarray:
    """Elements of the cyclic ("Z") or symmetric ("S") group on range(things), int64 [order, things]: symbol i stands for row i.

    Row s of Z is the shift by s; the rows of S are in dictionary order.
    """
    if name == "Z":
        return (np.arange(things) + np.arange(things)[:, None]) % things
    return np.asarray(list(itertools.permutations(range(things))), dtype=np.int64)


def _word(draw: Draw, v: Vocabulary, length: int, elements: np.ndarray) -> Sample:
    order, state = len(elements), np.arange(elements.shape[1])
    if order > len(v.symbols):
        raise UserError(f"model.vocab_size: {len(v.symbols)} symbols; a group of {order} elements needs as many, so raise it")
    word = draw.integers(order, max(1, length - 3))
    for element in word:
        state = elements[element][state]
    answer = np.flatnonzero((elements == state).all(1))
    out = Writer().add([v.bos]).add(v.symbols[word]).add([v.markers[ASK]])
    return out.ask(v.symbols[answer], 1 / order).sample(length)


def parity(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Zeros and ones; whether the ones are odd in number."""
    return _word(draw, v, length, group("Z", 2))


def modular(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Steps of 0 to 4; their sum modulo 5."""
    return _word(draw, v, length, group("Z", 5))


def s3(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Permutations of three things; their product."""
    return _word(draw, v, length, group("S", 3))


def s5(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Permutations of five things; their product. Needs 120 symbols."""
    return _word(draw, v, length, group("S", 5))
