"""Generated tasks: every answer is found again by a solver that reads the prompt alone; needles lie where they were asked for."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import ModelConfig, UserError
from atoll.data.documents import from_ids
from atoll.data.tasks import DEEP, FORMED, NAMES, RAW, SUITES, Draw, Tasks, check
from atoll.data.tasks.forms import made_up
from atoll.data.tasks.sample import Vocabulary
from atoll.data.tokenizer import train_tokenizer

MODEL = ModelConfig(vocab_size=700)
PROSE = ["The quick brown fox jumps over the lazy dog, and nobody minds. ", "Rivers run to the sea; hills stand still for a while.\n"]
TOKENIZER = train_tokenizer([p * 20 for p in PROSE], MODEL)
TEXT = from_ids([(str(i), TOKENIZER.encode(p * 30), 0) for i, p in enumerate(PROSE)], TOKENIZER, MODEL)
NOISY, TEXTUAL = Tasks(TOKENIZER, 0), Tasks(TOKENIZER, 0, TEXT)
V = NOISY.vocabulary
BLANK, ASK, PUSH, POP = (int(V.markers[i]) for i in range(4))


def answers(sample) -> list[list[int]]:
    return [sample.ids[q.start : q.stop].tolist() for q in sample.questions]


def prompt(sample) -> list[int]:
    """What comes before the first answer."""
    return sample.ids[: sample.questions[0].start].tolist()


# ---------------------------------------------------------------- solvers


def solve_mqar(ids: list[int]) -> list[list[int]]:
    at = ids.index(ASK)
    pairs = [i for i in ids[1:at] if i != BLANK]
    known = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return [[known[key]] for key in ids[at + 1 :: 2]]


def solve_copy(ids: list[int]) -> list[list[int]]:
    return [ids[1 : ids.index(ASK)]]


def solve_palindrome(ids: list[int]) -> list[list[int]]:
    return [list(reversed(ids[1 : ids.index(ASK)]))]


def solve_stack(ids: list[int]) -> list[list[int]]:
    stacks: dict[int, list[int]] = {}
    found = []
    for sign, name, symbol in zip(ids[1::3], ids[2::3], ids[3::3], strict=True):
        if sign == PUSH:
            stacks.setdefault(name, []).append(symbol)
        else:
            assert sign == POP
            found.append([stacks[name].pop()])
    return found


def solve_group(ids: list[int], things: int, cyclic: bool) -> list[list[int]]:
    """A row of things is moved step by step; the element that moves them so at once is the answer."""
    word = [int(np.flatnonzero(V.symbols == i)[0]) for i in ids[1 : ids.index(ASK)]]
    if cyclic:
        elements = [tuple((x + s) % things for x in range(things)) for s in range(things)]
    else:
        elements = list(itertools.permutations(range(things)))
    ends = []
    for thing in range(things):
        for w in word:
            thing = elements[w][thing]
        ends.append(thing)
    return [[int(V.symbols[elements.index(tuple(ends))])]]


SOLVERS = {
    "mqar": solve_mqar,
    "copy": solve_copy,
    "palindrome": solve_palindrome,
    "stack": solve_stack,
    "parity": lambda ids: solve_group(ids, 2, True),
    "modular": lambda ids: solve_group(ids, 5, True),
    "s3": lambda ids: solve_group(ids, 3, False),
    "s5": lambda ids: solve_group(ids, 5, False),
}


@pytest.mark.parametrize("name", RAW)
@settings(max_examples=40, deadline=None)
@given(index=st.integers(0, 10**9), length=st.integers(16, 300))
def test_raw_answers_are_those_of_a_solver_that_reads_the_tokens(name, index, length):
    sample = NOISY.make(name, Draw(0, index), length)
    assert answers(sample) == SOLVERS[name](sample.ids.tolist())
    assert len(sample.ids) <= length < len(sample.ids) + 6
    assert not sample.truncated
    assert sample.ids[0] == 0
    assert set(sample.ids[1:].tolist()) <= {*V.markers.tolist(), *V.symbols.tolist()}


def solve_text(text: str) -> list[str]:
    """The answers to an English prompt, from its words."""
    if found := re.search(r"\n\nWhich (?:number|\d numbers) of (\w+) w", text):
        return re.findall(rf"A fact to keep: the number of {found[1]} is (\d+)\.", text)
    if found := re.search(r"\n\nWhich names above stand for (\d+),", text):
        lines = re.findall(r"\nLet (\w+) = (\w+)\.\n", text)
        value = {}
        for name, other in lines:
            value[name] = value.get(other, other)
        return [name for name, _ in lines if value[name] == found[1]]
    listed, question = text.split("\n\n")
    words = listed.split()
    counts = Counter(words)
    assert counts.most_common()[4][1] < counts.most_common()[3][1] or "first appear" not in question
    if "first appear" in question:
        best = {word for word, _ in counts.most_common(4)}
        return [word for word in dict.fromkeys(words) if word in best]
    return [word for word, _ in counts.most_common(3)]


@pytest.mark.parametrize("tasks", [NOISY, TEXTUAL], ids=["noise", "text"])
@pytest.mark.parametrize("name", FORMED)
@settings(max_examples=15, deadline=None)
@given(index=st.integers(0, 10**9), length=st.integers(500, 1500), depth=st.floats(0, 1))
def test_english_answers_are_those_of_a_solver_that_reads_the_text(tasks, name, index, length, depth):
    sample = tasks.make(name, Draw(1, index), length, depth)
    text = TOKENIZER.decode(prompt(sample)[1:])
    assert [TOKENIZER.decode(a).strip() for a in answers(sample)] == solve_text(text)
    assert len(sample.ids) <= length
    assert len(sample.ids) > 0.9 * length
    assert not sample.truncated


@pytest.mark.parametrize("name", FORMED)
@settings(max_examples=30, deadline=None)
@given(index=st.integers(0, 10**9), length=st.integers(128, 600), depth=st.floats(0, 1))
def test_raw_forms_of_needles_and_lists_have_their_answers_in_the_prompt(name, index, length, depth):
    sample = NOISY.make(f"{name}:raw", Draw(2, index), length, depth)
    ids, marks = prompt(sample), {int(m): i for i, m in enumerate(V.markers)}
    signs = [i for i, t in enumerate(ids) if t in marks]
    asked = ids[signs[-1] :] if name not in ("common_words", "frequent_words") else ids[signs[-2] :]
    if name.startswith("needle"):
        found = [ids[i + 2 : i + 6] for i in signs[:-1] if ids[i + 1] == asked[1]]
    elif name == "variables":
        value = {}
        for i in signs[:-1]:
            value[ids[i + 1]] = ids[i + 2 : i + 6] if marks[ids[i]] == 3 else value[ids[i + 2]]
        found = [[n] for n in dict.fromkeys(ids[i + 1] for i in signs[:-1]) if value[n] == asked[1:]]
    else:
        counts = Counter(ids[1 : signs[-2]])
        best = [w for w, _ in counts.most_common(4 if name == "common_words" else 3)]
        found = [[w] for w in ([w for w in dict.fromkeys(ids[1:]) if w in best] if name == "common_words" else best)]
    assert answers(sample) == found
    assert len(sample.ids) <= length


@pytest.mark.parametrize("name", [*DEEP, *(f"{n}:raw" for n in DEEP)])
@settings(max_examples=15, deadline=None)
@given(index=st.integers(0, 10**9), depth=st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)))
def test_the_needle_lies_at_the_depth_that_was_asked_for(name, index, depth):
    """The haystack is text of one token here, so that what is no needle is counted with ease."""
    straw = int(np.flatnonzero(TOKENIZER.bytes_table)[255])  # the byte 255: in no needle
    dull = dataclasses.replace(TEXT, tokens=np.full(1000, straw, dtype=np.uint16))
    sample = Tasks(TOKENIZER, 0, dull).make(name, Draw(3, index), 700, depth)
    assert len(sample.ids) == 700
    hay = (sample.ids == straw).astype(int)
    answer = sample.ids[sample.questions[0].start : sample.questions[0].stop]
    windows = np.lib.stride_tricks.sliding_window_view(sample.ids, len(answer))
    at = int(np.flatnonzero((windows == answer).all(1))[0])
    while not hay[at]:  # back to the start of the needle, or of those that touch it
        at -= 1
        if at == 0:
            break
    before, room = int(hay[: at + 1].sum()), int(hay.sum())
    assert before == round(depth * room)
    assert sample.depth == before / room


def test_samples_are_a_function_of_their_key_alone():
    for name in NAMES:
        one, two = (TEXTUAL.make(name, Draw(5, 7), 512, 0.3) for _ in range(2))
        assert np.array_equal(one.ids, two.ids)
        assert one.questions == two.questions
        assert not np.array_equal(one.ids, TEXTUAL.make(name, Draw(5, 8), 512, 0.3).ids), name


def test_draws_are_fixed_for_ever_and_level():
    assert Draw(1, 2, 3).integers(1000, 5).tolist() == DRAWN
    assert Draw(3, 2, 1).integers(1000, 5).tolist() != DRAWN
    counts = np.bincount(Draw(0).integers(10, 100_000), minlength=10)
    assert np.abs(counts - 10_000).max() < 5 * np.sqrt(9_000)
    assert sorted(Draw(9).order(50).tolist()) == list(range(50))
    assert len(set(made_up(Draw(4), 500))) == 500


DRAWN = [871, 683, 483, 1, 401]


def test_a_prompt_too_long_is_cut_at_its_front_and_says_so():
    whole, short = NOISY.make("needle_multi", Draw(0, 1), 400), NOISY.make("needle_multi", Draw(0, 1), 90)
    assert not whole.truncated
    assert short.truncated
    assert len(short.ids) == 90
    assert short.ids[0] == 0
    assert answers(short) == answers(whole)
    with pytest.raises(UserError, match="needle_multi: length = 5"):
        NOISY.make("needle_multi", Draw(0, 1), 5)


def test_a_haystack_of_text_is_the_corpus_without_its_specials():
    hay = TEXTUAL.haystacks["text"]
    flat = [t for _, ids, _ in TEXT.documents() for t in ids[1:-1].tolist()]
    taken = hay.take(Draw(6), 3 * len(flat)).tolist()
    assert len(taken) == 3 * len(flat)
    at = next(i for i in range(len(flat)) if (flat + flat)[i : i + 50] == taken[:50])
    assert taken == (flat * 5)[at : at + len(taken)]


def test_names_and_vocabulary_are_checked():
    assert {n for suite in SUITES.values() for n in suite} <= set(NAMES)
    with pytest.raises(UserError, match="did you mean 'palindrome'"):
        check("data.tasks", ("palindrom",))
    with pytest.raises(UserError, match=r"model\.vocab_size: 20 ordinary tokens"):
        Vocabulary.of(np.ones(20, dtype=np.int64), 0)
    small = Vocabulary.of(np.ones(60, dtype=np.int64), 0)
    with pytest.raises(UserError, match="120 elements"):
        RAW["s5"](Draw(0), small, 32)
