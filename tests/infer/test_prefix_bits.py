"""A prompt read from a kept prefix gives what it gives read cold, bit for bit, on a CPU in float32; counters prove the hits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from infer.models import REPEATING, ask, build, cold, engine, prompt, same_bits


@pytest.fixture(scope="module")
def model():
    return build(torch.float32)


def warm(e, request, hits: int = 1):
    """The answer, after checking how many prefixes were found for it."""
    before = e.stats()["prefix_hits"]
    (answer,) = e.run([request])
    assert e.stats()["prefix_hits"] - before == hits
    assert (answer.cached > 0) == bool(hits)
    return answer


@pytest.mark.parametrize("length", [65, 66, 100, 127, 128, 129, 200, 321])
def test_the_same_prompt(model, length):
    request = ask(prompt(length))
    e = engine(model)
    first = warm(e, request, hits=0)
    again = warm(e, request)
    assert again.cached == (length - 1) // 64 * 64
    assert same_bits(first, again)
    assert same_bits(first, cold(model, request))
    assert e.stats()["prefilled"] == length + length - again.cached


@pytest.mark.parametrize("length", [1, 2, 63, 64])
def test_a_prompt_within_the_first_page_has_no_prefix(model, length):
    e = engine(model)
    assert same_bits(warm(e, ask(prompt(length)), hits=0), warm(e, ask(prompt(length)), hits=0))


@pytest.mark.parametrize(("first", "more"), [(64, 1), (100, 30), (130, 100), (128, 64), (191, 70)])
def test_an_extended_prompt(model, first, more):
    whole = prompt(first + more)
    e = engine(model)
    e.run([ask(whole[:first])])
    answer = warm(e, ask(whole))
    assert answer.cached == first // 64 * 64
    assert same_bits(answer, cold(model, ask(whole)))


def test_a_conversation_turn_by_turn(model):
    """Each prompt holds the answer before it, which was decoded and is now read; where a turn ends never moves a bit."""
    e, tokens, turns = engine(model), [], []
    for turn in range(5):
        tokens = tokens + prompt(90, seed=turn)
        request = ask(tokens, 7, turns=tuple(turns))
        answer = warm(e, request, hits=int(turn > 0))
        assert same_bits(answer, cold(model, dataclasses.replace(request, turns=())))
        tokens = tokens + answer.ids
        turns = [*turns, len(tokens)]
    assert e.stats()["prefix_tokens"] > 0


def test_turns_leave_prefixes_that_others_find(model):
    system, e = prompt(150), engine(model)
    e.run([ask(system + prompt(200, seed=1), turns=(150,))])
    other = ask(system + prompt(100, seed=2), turns=(150,))
    answer = warm(e, other)
    assert answer.cached == 128
    assert same_bits(answer, cold(model, other))


@pytest.mark.parametrize("host", [8.0, 0.0])
def test_eviction_to_the_host_and_back(model, host):
    request = ask(prompt(300))
    before = cold(model, request)
    e = engine(model, slots=1, device_mib=0.08, host_mib=host)
    e.run([request])
    for seed in range(1, 6):
        e.run([ask(prompt(280, seed))])
    stats = e.stats()
    assert stats["evictions"] > 0
    assert (stats["host_bytes"] > 0) == (host > 0)
    answer = warm(e, request, hits=int(host > 0))
    assert (e.stats()["restores"] > 0) == (host > 0)
    assert same_bits(answer, before)
    assert e.stats()["device_bytes"] <= 0.08 * 2**20


def test_forks(model):
    request = ask(prompt(180), 5)
    before, e = cold(model, request), engine(model, slots=1)  # one at a time: the same calls as alone
    numbers = e.fork(request, 3)
    answers = {}
    while not e.idle():
        answers |= {step.sequence: step.answer for step in e.step() if step.answer}
    assert [answers[n].cached for n in numbers] == [0, 128, 128]
    assert all(same_bits(answers[n], before) for n in numbers)
    beside = engine(model, slots=4)
    beside.fork(request, 4)
    while not beside.idle():
        beside.step()
    assert beside.stats()["prefix_hits"] == 3
    assert same_bits(warm(beside, request), before)


def test_cancellation_while_reading_and_while_answering(model):
    request = ask(prompt(300), 20)
    before = cold(model, request)
    for turns in (1, 4, 8):
        e = engine(model, prefill_chunk=64)
        number = e.submit(request)
        for _ in range(turns):
            e.step()
        e.cancel(number)
        e.step()
        kept = e.stats()["prefix_nodes"] > 0
        assert same_bits(warm(e, request, hits=int(kept)), before)
        assert same_bits(warm(e, request), before)


def test_with_guesses(model):
    request = ask(prompt(20) * 8, 40, sampling=REPEATING)
    before = cold(model, request, speculate="lookup")
    e = engine(model, speculate="lookup")
    first, again = warm(e, request, hits=0), warm(e, request)
    assert e.stats()["accepted"] > 0
    assert same_bits(first, before)
    assert same_bits(again, before)


def test_another_salt_finds_nothing(model):
    e = engine(model)
    mine = warm(e, ask(prompt(200), salt="a"), hits=0)
    other = warm(e, ask(prompt(200), salt="b"), hits=0)
    assert same_bits(mine, other)
    assert same_bits(warm(e, ask(prompt(200), salt="b")), other)


def test_a_new_version_finds_nothing(model):
    e = engine(model, version=3)
    first = warm(e, ask(prompt(200)), hits=0)
    e.set_version(4)
    assert e.stats()["prefix_nodes"] == e.stats()["pages_used"] == e.stats()["snapshots"] == 0
    second = warm(e, ask(prompt(200)), hits=0)
    assert (first.versions, second.versions) == ([3] * 6, [4] * 6)
    assert same_bits(first, second)  # the weights are in truth the same


def test_the_size_of_a_turn_moves_no_bit(model):
    request = ask(prompt(500), prompt_logprobs=True)
    answers = [cold(model, request, prefill_chunk=size) for size in (64, 128, 512)]
    assert all(a == answers[0] for a in answers)


def test_what_follows_a_page_moves_none_of_its_bits(model):
    long, short = ask(prompt(300), 1, prompt_logprobs=True), ask(prompt(300)[:192], 1, prompt_logprobs=True)
    a, b = cold(model, long), cold(model, short)
    assert a.prompt_logprobs[:191] == b.prompt_logprobs


def test_prompt_logprobs_read_no_prefix_but_leave_one(model):
    e, request = engine(model), ask(prompt(200))
    asked = dataclasses.replace(request, prompt_logprobs=True)
    first, second = warm(e, asked, hits=0), warm(e, asked, hits=0)
    assert first == second
    assert same_bits(warm(e, request), cold(model, request))
    assert e.stats()["prefix_queries"] == 1


def test_routing_comes_with_a_prefix_or_the_prefix_is_passed_over(model):
    request = ask(prompt(200), 5)
    recorded = dataclasses.replace(request, routing=True)
    e = engine(model)
    e.run([request])  # leaves a prefix without routing
    first = warm(e, recorded, hits=0)
    again = warm(e, recorded)
    assert first.routing is not None
    assert first.routing.shape == (len(model.moe_layers()), 204, 4)
    assert torch.equal(first.routing, again.routing)
    assert same_bits(first, again)
