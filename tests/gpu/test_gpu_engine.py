"""The engine on a card: rows of different lengths, kept prefixes and guesses against whole passes, routing forced to what it chose."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: no device is visible to torch")

from infer.models import GREEDY, REPEATING, ask, build, engine, prompt  # noqa: E402

from atoll.infer.request import Sampling  # noqa: E402

REQUESTS = [
    ask(prompt(1), 30, sampling=Sampling(seed=1), routing=True),
    ask(prompt(200, 3), 40, sampling=Sampling(top_k=5, seed=3), routing=True),
    ask(prompt(20) * 8, 40, sampling=REPEATING, routing=True),
    ask(prompt(200, 3), 9, sampling=GREEDY, routing=True),
]


def check(model, request, answer, atol):
    ids = torch.tensor([request.prompt + answer.ids], device="cuda")
    with torch.no_grad():
        logits = model(ids[:, :-1], routing=[r.cuda() for r in answer.routing]).logits[0]
    expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[len(request.prompt) - 1 :, 0].cpu()
    difference = (torch.tensor(answer.logprobs) - expected).abs()
    assert float(difference.max()) < atol


@pytest.mark.parametrize("speculate", ["none", "lookup"])
def test_answers_are_those_of_whole_passes(speculate):
    """Widths that the kernels take; float32 with the contract's 1e-5 loosened for tf32x3 dots."""
    model = build(torch.float32, kda_head_dim=64, initializer_range=0.05).cuda()
    e = engine(model, speculate=speculate, prefill_chunk=256)
    for _ in range(2):
        for request, answer in zip(REQUESTS, e.run(REQUESTS), strict=True):
            check(model, request, answer, 5e-5)
    stats = e.stats()
    assert stats["prefix_hits"] >= 4
    assert (stats["accepted"] > 0) == (speculate == "lookup")
    assert stats["slots_used"] == stats["pages_promised"] == 0


def test_bfloat16_runs_and_evicts():
    model = build(torch.bfloat16, kda_head_dim=64, initializer_range=0.05).cuda()
    e = engine(model, slots=2, device_mib=0.5, host_mib=8)
    for seed in range(6):
        e.run([dataclasses.replace(ask(prompt(280, seed), 6), routing=True)])
    assert e.stats()["evictions"] > 0
    request = dataclasses.replace(ask(prompt(280), 6), routing=True)
    (answer,) = e.run([request])
    assert answer.cached == 256
    assert e.stats()["restores"] > 0
    check(model, request, answer, 0.2)
