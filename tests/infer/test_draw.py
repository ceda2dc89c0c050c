"""One sequence's draws: penalties, bias, min-p and grammars against their formulas; random numbers of its own."""

from __future__ import annotations

import pytest
import torch
from infer.models import GREEDY, ask, build, cold, engine, prompt

from atoll.infer.draw import Drawer, report
from atoll.infer.request import Sampling
from atoll.infer.sampling import add_bias, distribution, keep_min_p, penalise


def test_penalties_by_hand():
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    seen, counts = torch.tensor([True, True, False, False]), torch.tensor([0, 3, 0, 1])
    out = penalise(logits, seen, counts, repetition=2.0, presence=0.5, frequency=0.25)
    assert out.tolist() == [1.0, -4.0 - 0.5 - 0.75, 1.0, 0.5 - 0.5 - 0.25]
    assert penalise(logits, seen, counts) is logits


def test_repetition_counts_the_prompt_presence_and_frequency_the_answer():
    logits = torch.tensor([1.0, 1.2, 0.0, 0.0])
    assert Drawer(GREEDY, [1], 4).draw(logits) == 1
    repeats = Drawer(Sampling(temperature=0, repetition_penalty=2.0), [1], 4)
    assert repeats.draw(logits) == 0
    for sampling in (Sampling(temperature=0, presence_penalty=0.3), Sampling(temperature=0, frequency_penalty=0.3)):
        drawer = Drawer(sampling, [1], 4)
        assert drawer.draw(logits) == 1
        drawer.accept(1)
        assert drawer.draw(logits) == 0
    often = Drawer(Sampling(temperature=0, frequency_penalty=0.15), [1], 4)
    drawn = []
    for _ in range(3):
        drawn.append(often.draw(logits))
        often.accept(drawn[-1])
    assert drawn == [1, 1, 0]


def test_min_p_keeps_what_reaches_its_share_of_the_likeliest():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert torch.isfinite(keep_min_p(logits, 0.29)).tolist() == [True, True, True, False]
    assert torch.isfinite(keep_min_p(logits, 0.31)).tolist() == [True, True, False, False]
    assert keep_min_p(logits, 0.0) is logits
    # after temperature: at 0.5 the shares are squared
    assert distribution(logits, temperature=0.5, min_p=0.3).gt(0).tolist() == [True, True, False, False]
    assert distribution(logits, temperature=0.5, min_p=0.37).gt(0).tolist() == [True, False, False, False]


def test_bias_is_added_and_everything_else_left():
    logits = torch.zeros(2, 5)
    assert add_bias(logits, {1: 2.0, 4: -3.0}).tolist() == [[0, 2, 0, 0, -3]] * 2
    assert add_bias(logits, {}) is logits


@pytest.mark.parametrize("temperature", [1e-320, 1e-8, 1e-3])
def test_the_least_temperatures_are_greedy(temperature):
    logits = torch.tensor([3.0, 9.0, -torch.inf, 8.0])
    assert distribution(logits, temperature).tolist() == [0, 1, 0, 0]


def test_report_names_the_likeliest():
    logprobs = torch.tensor([0.1, 0.6, 0.3]).log()
    value, top = report(logprobs, 0, 2)
    assert value == float(logprobs[0])
    assert [id for id, _ in top] == [1, 2]
    assert report(logprobs, 0, 0)[1] == ()
    assert len(report(logprobs, 0, 9)[1]) == 3


class Only:
    """Allows the ids it is told, until it says that it is done or breaks."""

    def __init__(self, *masks):
        self.masks, self.seen = list(masks), []

    def allowed(self):
        ids = self.masks.pop(0) if self.masks else None
        if ids is None:
            return None
        mask = torch.zeros(64, dtype=torch.bool)
        mask[list(ids)] = True
        return mask

    def accept(self, id):
        if id == 13:
            raise ValueError("13 is no word")
        self.seen.append(id)


@pytest.fixture(scope="module")
def model():
    return build()


def test_a_grammar_masks_and_hears_every_token(model):
    grammar = Only([40], [41, 42], None, [43])
    answer = cold(model, ask(prompt(10), 4, sampling=Sampling(seed=1), constraint=grammar))
    assert answer.ids[0] == 40
    assert answer.ids[1] in (41, 42)
    assert answer.ids[3] == 43
    assert grammar.seen == answer.ids
    assert answer.logprobs[0] < -1e-3  # the model's own, not the grammar's certainty


@pytest.mark.parametrize(("masks", "says", "kept"), [(([5], []), "allows no token", [5]), (([5], [13]), "13 is no word", [5])])
def test_a_grammars_fault_ends_its_own_sequence_only(model, masks, says, kept):
    e = engine(model)
    numbers = [e.submit(ask(prompt(10), 6, constraint=Only(*masks))), e.submit(ask(prompt(12), 6))]
    last = {}
    while not e.idle():
        last |= {s.sequence: s for s in e.step() if s.finish}
    broken, sound = (last[n] for n in numbers)
    assert (broken.finish, broken.id) == ("error", None)
    assert says in broken.error
    assert broken.answer.ids == kept
    assert sound.answer.ids == cold(model, ask(prompt(12), 6)).ids
    assert e.stats()["slots_used"] == 0


def test_a_seed_does_not_depend_on_the_batch_nor_on_others_seeds(model):
    requests = [ask(prompt(10), 15, sampling=Sampling(seed=s)) for s in (1, 2, 1, 3)]
    a, b, c, d = (x.ids for x in engine(model).run(requests))
    assert a == c
    assert len({tuple(a), tuple(b), tuple(d)}) == 3
    assert cold(model, requests[0]).ids == a


def test_without_a_seed_answers_differ(model):
    answers = engine(model).run([ask(prompt(10), 30, sampling=Sampling()) for _ in range(2)])
    assert answers[0].ids != answers[1].ids
