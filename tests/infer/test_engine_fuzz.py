"""Sequences that come, fork, are cancelled and end at random, in little memory: each answer its own, and no slot or page lost."""

from __future__ import annotations

import random

import pytest
import torch
from infer.models import REPEATING, ask, build, check_forced, engine, prompt

from atoll.infer.request import Sampling


@pytest.fixture(scope="module")
def model():
    return build(num_hidden_layers=3, full_attn_layers=(2,))


PAGE_MIB = 64 * 20 * 8 / 2**20  # one MLA layer, 16 + 4 channels, float64


def books(e) -> None:
    """What the pool says it holds is what sequences and prefixes hold."""
    running = e.scheduler.running
    held = [page for s in running for page in s.pages] + [page for n in e.cache for page in n.pages]
    assert e.pool.pages_used == len(set(held))
    assert 0 not in held
    references = [0] * len(e.pool._references)
    for page in held:
        references[page] += 1
    assert references[1:] == e.pool._references[1:]
    assert e.pool.promised == sum(s.promised for s in running)
    assert sorted([*e.pool.free_slots, *(s.slot for s in running)]) == list(range(e.settings.slots))
    assert e.pool.bytes_used() <= e.pool.limit
    assert e.cache.host_bytes == sum(n.host_bytes() for n in e.cache) <= e.cache.host_limit


def random_request(rng: random.Random, stems: list[list[int]]):
    stem = rng.choice(stems)[: rng.choice([1, 40, 64, 130, 200])]
    tokens = stem + prompt(rng.choice([0, 1, 30, 64, 100]), rng.randrange(4))
    sampling = rng.choice([Sampling(seed=rng.randrange(99)), REPEATING, Sampling(temperature=0)])
    turns = tuple(sorted(rng.sample(range(len(tokens)), min(2, len(tokens)))))
    return ask(tokens, rng.choice([1, 3, 20, 50]), sampling=sampling, turns=turns, salt=rng.choice(["", "", "x"]), top_logprobs=0)


@pytest.mark.parametrize("speculate", ["none", "lookup"])
@pytest.mark.parametrize("seed", range(3))
def test_random_lives(model, seed, speculate):
    rng = random.Random(seed)
    stems = [prompt(200, s) for s in range(3)]
    e = engine(model, slots=3, prefill_chunk=64, device_mib=0.12, host_mib=rng.choice([0.0, 0.05, 8.0]), speculate=speculate)
    requests, ended, version = {}, {}, 0
    for _ in range(70):
        action = rng.random()
        if action < 0.25:
            request = random_request(rng, stems)
            for number in e.fork(request, rng.choice([1, 1, 3])):
                requests[number] = request
        elif action < 0.33 and requests:
            e.cancel(rng.choice(list(requests)))
        elif action < 0.35:
            version += 1
            e.set_version(version)
        for step in e.step():
            assert step.sequence not in ended
            if step.finish:
                ended[step.sequence] = step
        books(e)
    while not e.idle():
        ended |= {s.sequence: s for s in e.step() if s.finish}
        books(e)
    assert sorted(ended) == sorted(requests)
    finishes = {step.finish for step in ended.values()}
    assert {"length", "cancelled"} <= finishes <= {"length", "cancelled"}
    for number, step in rng.sample(sorted(ended.items()), 8):
        check_forced(model, requests[number], step.answer, atol=1e-8)
        assert step.finish == "cancelled" or len(step.answer.ids) == requests[number].max_tokens
    stats = e.stats()
    assert stats["prefix_hits"] > 0
    assert stats["evictions"] > 0
    assert stats["slots_used"] == stats["pages_promised"] == stats["running"] == stats["waiting"] == 0
    e.cache.clear()
    assert (e.pool.pages_used, e.pool.snapshots, e.cache.host_bytes) == (0, 0, 0)


def test_little_memory_makes_others_wait_and_nobody_starve(model):
    e = engine(model, slots=4, device_mib=7 * PAGE_MIB)  # five pages each
    answers = e.run([ask(prompt(280, s), 20) for s in range(4)])
    for s, answer in enumerate(answers):
        check_forced(model, ask(prompt(280, s), 20), answer)


def test_a_found_prefix_never_stands_in_its_own_way(model):
    """Memory for just the request's pages: the kept state makes way once it is read, and the request is not waited for in vain."""
    e = engine(model, slots=1, device_mib=5 * PAGE_MIB, host_mib=0)
    request = ask(prompt(64) + prompt(200, 1), 30, turns=(64,))
    e.run([ask(prompt(64) + prompt(16, 2), 2)])
    assert e.stats()["prefix_nodes"] == 1
    (answer,) = e.run([request])
    assert answer.cached == 64
    assert e.stats()["evictions"] == 1
    check_forced(model, request, answer)


def test_the_end_frees_memory_at_once(model):
    e = engine(model, slots=1)
    e.run([ask(prompt(30), 5)])
    assert e.stats()["pages_used"] == 0
    assert torch.equal(torch.tensor(e.pool._references[1:]), torch.zeros(len(e.pool._references) - 1, dtype=torch.int64))
