"""Guesses change no token: greedy or seeded, looked up or drafted; what was wrong leaves no trace in any state."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from infer.models import GREEDY, REPEATING, ask, build, check_forced, cold, engine, prompt

from atoll.config import UserError
from atoll.infer.request import Request, Sampling
from atoll.infer.speculate import Lookup


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def near():
    """A draft that is often right: the model itself, a little off."""
    draft = build()
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.002 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    return draft


REQUESTS = [
    ask(prompt(20) * 6, 60, sampling=REPEATING, routing=True),
    ask(prompt(70, 1), 40, routing=True),
    ask(prompt(1, 2), 50, sampling=dataclasses.replace(REPEATING, seed=9, frequency_penalty=0.3), routing=True),
    ask(prompt(128, 3), 9, sampling=Sampling(seed=4), routing=True),
    ask(prompt(20) * 6, 60, sampling=dataclasses.replace(REPEATING, temperature=0.5), stop_ids=frozenset({7}), routing=True),
]


@pytest.mark.parametrize("kind", ["lookup", "draft"])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_same_tokens_as_without(model, near, kind, count):
    plain = [cold(model, request) for request in REQUESTS]
    e = engine(model, near if kind == "draft" else None, speculate=kind, draft_tokens=count, slots=3)
    for request, answer, expected in zip(REQUESTS, e.run(REQUESTS), plain, strict=True):
        assert (answer.ids, answer.finish) == (expected.ids, expected.finish)
        check_forced(model, request, answer)
        assert torch.equal(answer.routing, expected.routing)
    stats = e.stats()
    assert 0 < stats["accepted"] < stats["drafted"]
    assert stats["slots_used"] == stats["pages_promised"] == 0
    assert stats["generated"] == sum(len(a.ids) for a in plain)


def test_guesses_save_calls(model, near):
    calls = {}
    for kind, draft in (("none", None), ("draft", near)):
        e, calls[kind] = engine(model, draft, speculate=kind), 0
        e.submit(ask(prompt(70, 1), 40))
        while not e.idle():
            e.step()
            calls[kind] += 1
    assert calls["draft"] < 0.7 * calls["none"]


def test_a_sequence_cancelled_amid_guesses_leaves_nothing(model, near):
    e = engine(model, near, speculate="draft", slots=2)
    first, second = e.submit(REQUESTS[0]), e.submit(REQUESTS[1])
    for _ in range(5):
        e.step()
    e.cancel(first)
    answers = {}
    while not e.idle():
        answers |= {s.sequence: s.answer for s in e.step() if s.answer}
    assert answers[second].ids == cold(model, REQUESTS[1]).ids
    assert e.stats()["slots_used"] == e.stats()["pages_promised"] == 0
    assert e.drafter._caches == {}


def test_a_grammar_holds_under_guesses(model):
    class Alternate:
        """6 after 5, 5 after 6."""

        def __init__(self):
            self.last = 6

        def allowed(self):
            mask = torch.zeros(64, dtype=torch.bool)
            mask[11 - self.last] = True
            return mask

        def accept(self, id):
            self.last = id

    e = engine(model, speculate="lookup")
    (answer,) = e.run([ask(prompt(9), 30, constraint=Alternate())])
    assert answer.ids == [5, 6] * 15
    assert e.stats()["accepted"] > 15
    check_forced(model, ask(prompt(9), 30), answer)


def test_lookup_finds_what_followed_the_last_tokens():
    class Holder:
        id, tokens = 0, [1, 2, 3, 4, 9, 1, 2, 3]

    s, lookup = Holder(), Lookup()
    assert lookup.propose(s, 3) == [4, 9, 1]
    s.tokens = [*s.tokens, 7, 8, 2, 3]
    assert lookup.propose(s, 2) == [7, 8]  # the latest place where 2, 3 stood
    s.tokens = [*s.tokens, 60]
    assert lookup.propose(s, 2) == []
    lookup.forget(s)
    assert lookup._seen == {}


def test_a_draft_of_another_vocabulary_is_refused(model):
    with pytest.raises(UserError, match="vocabulary of 32"):
        engine(model, build(vocab_size=32), speculate="draft")


def test_a_new_version_amid_guesses(model):
    mixed, other = build(), build(seed=7)
    e = engine(mixed, speculate="lookup")
    request = Request(prompt(20) * 5, 40, REPEATING)
    e.submit(request)
    steps = []
    while len(steps) < 12:
        steps += e.step()
    mixed.load_state_dict(other.state_dict())
    e.set_version(1)
    while not e.idle():
        steps += e.step()
    answer = steps[-1].answer
    cut = answer.versions.index(1)
    tail = Request(request.prompt + answer.ids[:cut], 40 - cut, GREEDY)
    check_forced(other, tail, dataclasses.replace(answer, ids=answer.ids[cut:], logprobs=answer.logprobs[cut:]))
