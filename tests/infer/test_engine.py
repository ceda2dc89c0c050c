"""The engine's contract: many sequences as each alone, prefill as step by step, endings, versions, what is recorded, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from infer.models import GREEDY, ask, build, check_forced, cold, engine, forced_logprobs, prompt

from atoll.config import UserError
from atoll.infer.engine import Engine, EngineSettings
from atoll.infer.request import Request, Sampling


@pytest.fixture(scope="module")
def model():
    return build()


MIXED = [
    ask(prompt(1), 40, sampling=Sampling(seed=1)),
    ask(prompt(64, 1), 12),
    ask(prompt(65, 2), 25, sampling=Sampling(temperature=0.7, top_p=0.9, seed=2)),
    ask(prompt(200, 3), 70, sampling=Sampling(top_k=5, seed=3)),
    ask(prompt(130, 4), 1),
    ask(prompt(17, 5), 33, sampling=Sampling(min_p=0.05, seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)),
]


@pytest.fixture(scope="module")
def each_alone(model):
    return [cold(model, request) for request in MIXED]


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_many_together_are_each_alone(model, each_alone, slots):
    together = engine(model, slots=slots, prefill_chunk=64).run(MIXED)
    for request, answer, alone in zip(MIXED, together, each_alone, strict=True):
        assert answer.ids == alone.ids
        assert len(answer.ids) == request.max_tokens
        torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-9)
        check_forced(model, request, answer)


def test_float32_stays_within_the_contract_where_no_expert_flips():
    """Prefill and steps against one whole pass, routing forced to the engine's own: 1e-5 in log-probability.

    Weights of a usual size: with initializer_range = 0.2 the whole pass is itself 2e-5 from float64.
    """
    model = build(torch.float32, initializer_range=0.05)
    requests = [dataclasses.replace(r, routing=True) for r in MIXED]
    for request, answer in zip(requests, engine(model).run(requests), strict=True):
        ids = torch.tensor([request.prompt + answer.ids])
        with torch.no_grad():
            logits = model(ids[:, :-1], routing=list(answer.routing)).logits[0]
        expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[len(request.prompt) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-5)


def test_one_sequence_is_what_generate_gives(model):
    for sampling in (GREEDY, Sampling(seed=11), Sampling(temperature=0.8, top_p=0.7, top_k=9, seed=12)):
        ids = prompt(70)
        expected = model.generate(
            torch.tensor([ids]), 20, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed
        )
        assert cold(model, Request(ids, 20, sampling)).ids == expected[0, 70:].tolist()


def test_prefill_of_an_answer_is_the_answer_step_by_step(model):
    request = ask(prompt(100), 90, sampling=Sampling(seed=5))
    answer = cold(model, request)
    read = cold(model, Request(request.prompt + answer.ids, 0, prompt_logprobs=True, top_logprobs=4))
    assert read.ids == []
    assert len(read.prompt_logprobs) == 189
    torch.testing.assert_close(read.prompt_logprobs[99:], answer.logprobs, rtol=0, atol=1e-9)
    assert [[id for id, _ in top] for top in read.prompt_top[99:]] == [[id for id, _ in top] for top in answer.top]
    expected = forced_logprobs(model, request, answer)
    torch.testing.assert_close(torch.tensor(read.prompt_logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-9)


def test_log_probabilities_are_the_models_own_whatever_is_drawn(model):
    request = ask(prompt(30), 20, sampling=Sampling(temperature=2.0, top_k=3, seed=1, logit_bias={4: 3.0, 9: -80.0}, frequency_penalty=1.5))
    answer = cold(model, request)
    check_forced(model, request, answer)
    for value, top in zip(answer.logprobs, answer.top, strict=True):
        assert [v for _, v in top] == sorted((v for _, v in top), reverse=True)
        assert value <= top[0][1] + 1e-12


def test_routing_is_that_of_the_whole_pass(model):
    requests = [dataclasses.replace(r, routing=True) for r in MIXED]
    e, steps = engine(model), {}
    for request in requests:
        e.submit(request)
    while not e.idle():
        for step in e.step():
            steps.setdefault(step.sequence, []).append(step)
    for number, request in enumerate(requests):
        answer = steps[number][-1].answer
        with torch.no_grad():
            expected = torch.stack(model(torch.tensor([request.prompt + answer.ids[:-1]])).routing)
        assert torch.equal(answer.routing, expected)
        told = torch.stack([step.routing for step in steps[number]], 1)
        assert torch.equal(told, expected[:, len(request.prompt) - 1 :])


def test_steps_add_up_to_the_answer(model):
    e = engine(model)
    number, steps = e.submit(ask(prompt(90), 9)), []
    while not e.idle():
        steps += e.step()
    *before, last = steps
    assert all(step.sequence == number and step.finish is None and step.answer is None for step in before)
    assert (last.finish, last.answer.finish) == ("length", "length")
    assert [step.id for step in steps] == last.answer.ids
    assert [step.logprob for step in steps] == last.answer.logprobs
    assert [step.top for step in steps] == last.answer.top


def test_a_stop_token_ends_and_is_kept(model):
    free = cold(model, ask(prompt(20), 30, sampling=Sampling(seed=8)))
    stop = free.ids[12]
    first = free.ids.index(stop)
    answer = cold(model, ask(prompt(20), 30, sampling=Sampling(seed=8), stop_ids=frozenset({stop})))
    assert answer.finish == "stop"
    assert answer.ids == free.ids[: first + 1]


def test_a_turn_reads_a_bounded_part_and_steps_everyone(model):
    e = engine(model, prefill_chunk=64, slots=2)
    a = e.submit(ask(prompt(10), 50))
    assert [s.sequence for s in e.step()] == [a]
    b = e.submit(ask(prompt(200), 3))
    turns = [[s.sequence for s in e.step()] for _ in range(4)]
    assert turns == [[a], [a], [a], [a, b]] or turns == [[a], [a], [a], [b, a]]


def test_cancelled_at_once_and_said_once(model):
    e = engine(model, slots=1)
    running, waiting = e.submit(ask(prompt(100), 50)), e.submit(ask(prompt(5), 5))
    e.step()
    e.step()
    e.cancel(running)
    assert e.stats()["slots_used"] == e.stats()["pages_promised"] == 0
    e.cancel(waiting)
    e.cancel(running)
    e.cancel(77)
    steps = e.step()
    assert {(s.sequence, s.id, s.finish) for s in steps} == {(running, None, "cancelled"), (waiting, None, "cancelled")}
    assert len(next(s for s in steps if s.sequence == running).answer.ids) == 2
    assert e.idle()
    assert e.step() == []


def test_a_new_version_reads_again_and_keeps_what_was_recorded(model):
    """Weights changed on the way: the tokens before and after are those of each model on the same text."""
    other, mixed = build(seed=7), build()
    request = ask(prompt(100), 30, routing=True)
    e = engine(mixed)
    e.submit(request)
    steps = [step for _ in range(11) for step in e.step()]
    mixed.load_state_dict(other.state_dict())
    e.set_version(1)
    assert e.stats()["slots_used"] == 0
    while not e.idle():
        steps += e.step()
    answer = steps[-1].answer
    assert answer.versions == [0] * 11 + [1] * 19
    old, new = (forced_logprobs(m, request, answer)[99:] for m in (model, other))
    expected = torch.cat([old[:11], new[11:]])
    torch.testing.assert_close(torch.tensor(answer.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-9)
    assert answer.routing.shape[1] == 129
    with torch.no_grad():
        before = torch.stack(model(torch.tensor([request.prompt + answer.ids[:10]])).routing)
    assert torch.equal(answer.routing[:, :110], before)


def test_training_mode_comes_back_and_counts_nothing():
    model = build().train()
    engine(model).run([ask(prompt(70), 4)])
    assert model.training
    assert all(layer.load is None for layer in model.moe_layers())


def test_nothing_to_add_and_only_the_prompts_log_probabilities(model):
    assert cold(model, ask(prompt(5), 0)).finish == "length"
    answer = cold(model, ask(prompt(5), 0, prompt_logprobs=True))
    assert (answer.ids, answer.finish, len(answer.prompt_logprobs)) == ([], "length", 4)
    assert cold(model, ask(prompt(1), 0, prompt_logprobs=True)).prompt_logprobs == []


def test_forks_draw_apart_and_share_the_prompt(model):
    e, answers = engine(model), {}
    numbers = e.fork(ask(prompt(150), 12, sampling=Sampling(seed=3)), 4)
    while not e.idle():
        answers |= {s.sequence: s.answer for s in e.step() if s.answer}
    for i, number in enumerate(numbers):
        assert answers[number].ids == cold(model, ask(prompt(150), 12, sampling=Sampling(seed=3 + i))).ids
    assert len({tuple(a.ids) for a in answers.values()}) == 4
    assert e.stats()["prefix_hits"] == 3
    assert e.stats()["prefilled"] == 150 + 3 * 22


def test_a_fork_shares_no_grammar(model):
    e = engine(model)
    with pytest.raises(UserError, match="constraint"):
        e.fork(ask(prompt(5), constraint=object()), 2)
    assert e.idle()


def test_a_failing_call_leaves_nothing_half_written(model, monkeypatch):
    e = engine(model)
    e.submit(ask(prompt(70), 10))
    e.step()
    e.step()
    with monkeypatch.context() as broken:
        broken.setattr(type(model), "_logits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            e.step()
    steps = []
    while not e.idle():
        steps += e.step()
    check_forced(model, ask(prompt(70), 10), steps[-1].answer)
    assert len(steps[-1].answer.ids) == 10


def test_states_of_delta_attention_do_not_grow(model):
    sizes = []
    for length in (10, 400):
        e = engine(model, slots=2)
        e.submit(ask(prompt(length), 80))
        for _ in range(60):
            e.step()
        sizes.append((e.pool.states.numel(), e.pool.windows.numel(), e.stats()["slot_bytes"], e.stats()["pages_used"]))
    assert sizes[0][:3] == sizes[1][:3]
    assert sizes[0][3] < sizes[1][3]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [3, -1]}, "prompt holds token -1"),
        ({"prompt": [3, 64]}, "prompt holds token 64"),
        ({"prompt": [3, 2.0]}, r"prompt holds token 2\.0"),
        ({"stop_ids": frozenset({99})}, "stop_ids holds token 99"),
        ({"max_tokens": -1}, "max_tokens = -1"),
        ({"max_tokens": 60}, "over max_length = 64"),
        ({"top_logprobs": -1}, "top_logprobs = -1"),
        ({"turns": (3, 2)}, "turns = "),
        ({"turns": (11,)}, "turns = "),
        ({"sampling": Sampling(temperature=-1)}, "temperature = -1"),
        ({"sampling": Sampling(top_p=0)}, "top_p = 0"),
        ({"sampling": Sampling(top_k=0)}, "top_k = 0"),
        ({"sampling": Sampling(min_p=1.5)}, "min_p = 1.5"),
        ({"sampling": Sampling(repetition_penalty=0)}, "repetition_penalty = 0"),
        ({"sampling": Sampling(presence_penalty=float("nan"))}, "presence_penalty = nan"),
        ({"sampling": Sampling(logit_bias={64: 1.0})}, "logit_bias of token 64"),
        ({"sampling": Sampling(logit_bias={4: float("inf")})}, "logit_bias of token 4"),
        ({"sampling": Sampling(seed=2**70)}, "seed = "),
        ({"pixel_values": torch.zeros(1)}, "no vision tower"),
    ],
)
def test_requests_that_cannot_be_are_refused_in_one_line(model, change, says):
    e = engine(model, max_length=64)
    with pytest.raises(UserError, match=says) as refused:
        e.submit(dataclasses.replace(ask(prompt(10)), **change))
    assert "\n" not in str(refused.value)
    assert e.idle()


def test_a_request_beyond_all_memory_is_refused(model):
    with pytest.raises(UserError, match="device_mib"):
        engine(model, device_mib=0.02).submit(ask(prompt(400), 10))


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 0}, {"prefill_chunk": 100}, {"prefill_chunk": 0}, {"device_mib": 0}, {"host_mib": -1}, {"max_length": 0},
        {"speculate": "magic"}, {"speculate": "draft"}, {"draft_tokens": 0},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(model, change):
    with pytest.raises(UserError, match=next(iter(change))):
        Engine(model, settings=EngineSettings(**change))


def test_run_leaves_the_steps_of_others_alone(model):
    e = engine(model)
    e.submit(ask(prompt(5)))
    with pytest.raises(UserError, match="under way"):
        e.run([ask(prompt(5))])
    while not e.idle():
        e.step()
    with pytest.raises(UserError, match="prompt is empty"):
        e.run([ask(prompt(5)), ask([])])
    assert e.idle()
    assert e.stats()["slots_used"] == 0


def test_every_kind_of_mixer_and_residual():
    for changes in (
        {"residual": "plain", "q_lora_rank": None, "use_full_rank_gate": False, "gate_lower_bound": None},
        {"residual": "full", "mla_use_output_gate": False, "routed_expert_hidden_size": None, "latent_moe_use_norm": False},
        {"full_attn_layers": (1, 2, 3, 4, 5)},
        {"full_attn_layers": ()},
    ):
        model = build(**changes)
        request = ask(prompt(140), 12)
        e = engine(model)
        first, again = e.run([request])[0], e.run([request])[0]
        check_forced(model, request, first)
        assert again.ids == first.ids
        assert again.cached == 128
