"""State tracking in raw tokens: word problems of finite groups. The elements of a word are read, their product is the answer.

Parity is Z2, the modular counter Z5; S3 and S5 are the permutations of three and of five things. A word is read left to right:
the state after w1 … wn is w1 ∘ … ∘ wn, where (a ∘ b)(x) = b(a(x)): first a, then b.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from atoll.config import UserError
from atoll.data.tasks.recall import ASK
from atoll.data.tasks.sample import Draw, Sample, Vocabulary, Writer

MODULUS = 5


@functools.cache
def permutations(things: int) -> np.ndarray:
    """All permutations of range(things) in dictionary order, int64 [n!, n]; symbol i of S_n stands for row i."""
    return np.asarray(list(itertools.permutations(range(things))), dtype=np.int64)


def _product(word: np.ndarray, things: int) -> int:
    """Row of the product of the permutations numbered in `word`."""
    table = permutations(things)
    state = np.arange(things)
    for element in word:
        state = table[element][state]
    return int(np.flatnonzero((table == state).all(1))[0])


def _word(draw: Draw, v: Vocabulary, length: int, order: int) -> tuple[Writer, np.ndarray]:
    if order > len(v.symbols):
        raise UserError(f"model.vocab_size: {len(v.symbols)} symbols; a group of {order} elements needs as many, so raise it")
    word = draw.integers(order, max(1, length - 3))
    return Writer().add([v.bos]).add(v.symbols[word]).add([v.markers[ASK]]), word


def _cyclic(draw: Draw, v: Vocabulary, length: int, order: int) -> Sample:
    out, word = _word(draw, v, length, order)
    return out.ask(v.symbols[[int(word.sum()) % order]], 1 / order).sample(length)


def _symmetric(draw: Draw, v: Vocabulary, length: int, things: int) -> Sample:
    order = len(permutations(things))
    out, word = _word(draw, v, length, order)
    return out.ask(v.symbols[[_product(word, things)]], 1 / order).sample(length)


def parity(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Zeros and ones; whether the ones are odd in number."""
    return _cyclic(draw, v, length, 2)


def modular(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Steps of 0 to 4; their sum modulo 5."""
    return _cyclic(draw, v, length, MODULUS)


def s3(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Permutations of three things; their product."""
    return _symmetric(draw, v, length, 3)


def s5(draw: Draw, v: Vocabulary, length: int) -> Sample:
    """Permutations of five things; their product. Needs 120 symbols."""
    return _symmetric(draw, v, length, 5)
