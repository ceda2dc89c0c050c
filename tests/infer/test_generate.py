"""Generation: cache and whole sequence agree, seeds repeat, rows stop by themselves, text streams whole characters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import ModelConfig, UserError
from atoll.data.tokenizer import train_tokenizer
from atoll.infer.generate import generate
from atoll.infer.sample import continue_text
from atoll.infer.stream import TextStream
from atoll.model import Model

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, kda_num_heads=2, kda_head_dim=8, q_lora_rank=8,
    kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=48, num_experts=6,
    num_experts_per_token=2, moe_intermediate_size=16, routed_expert_hidden_size=16, initializer_range=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model(CONFIG, dtype=torch.float64).eval()


def prompt(rows: int = 1, tokens: int = 9) -> torch.Tensor:
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def test_greedy_equals_the_argmax_of_whole_sequences(model):
    ids = prompt(2)
    out = generate(model, ids, 12, temperature=0)
    assert out.shape == (2, 21)
    assert torch.equal(out[:, :9], ids)
    with torch.no_grad():
        logits = model(out).logits
    assert torch.equal(out[:, 9:], logits[:, 8:-1].argmax(-1))


def test_seed_decides_and_leaves_torch_alone(model):
    before = torch.get_rng_state()
    first, second, third = (generate(model, prompt(), 20, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_seed_runs_differ(model):
    assert not torch.equal(generate(model, prompt(), 40), generate(model, prompt(), 40))


def test_a_cache_continues_where_it_stands(model):
    whole = generate(model, prompt(), 10, temperature=0)
    cache = model.new_cache(1)
    first = generate(model, prompt(), 4, temperature=0, cache=cache)
    assert cache.length == 12  # all but the last sampled token
    rest = generate(model, first[:, -1:], 6, temperature=0, cache=cache)
    assert torch.equal(torch.cat([first, rest[:, 1:]], 1), whole)


def test_a_cache_may_follow_a_longer_prompt(model):
    cache = model.new_cache(1)
    with torch.no_grad():
        model(prompt()[:, :4], cache=cache)
    rest = generate(model, prompt()[:, 4:], 6, temperature=0, cache=cache)
    assert torch.equal(rest[:, 5:], generate(model, prompt(), 6, temperature=0)[:, 9:])


def test_rows_stop_by_themselves_and_are_padded(model):
    free = generate(model, prompt(3), 30, seed=3)[:, 9:]
    stop = int(free[0, 5])
    out = generate(model, prompt(3), 30, seed=3, stop_ids=[stop])[:, 9:]
    for row, before in zip(out.tolist(), free.tolist(), strict=True):
        end = before.index(stop) + 1 if stop in before else len(row)
        assert row[:end] == before[:end]
        assert set(row[end:]) <= {CONFIG.pad_token_id}


def test_the_loop_ends_with_the_last_row(model):
    steps = []
    stop = int(generate(model, prompt(), 1, temperature=0)[0, -1])
    out = generate(model, prompt(), 50, temperature=0, stop_ids=[stop], on_token=steps.append)
    assert out.shape[1] == 10
    assert [ids.tolist() for ids in steps] == [[stop]]


def test_training_mode_comes_back_and_counts_nothing(model):
    model.train()
    try:
        generate(model, prompt(), 3, seed=0)
        assert model.training
        assert all(layer.load is None for layer in model.moe_layers())
    finally:
        model.eval()


def test_nothing_to_add(model):
    assert torch.equal(generate(model, prompt(), 0), prompt())


@pytest.mark.parametrize(
    ("ids", "count", "name"),
    [
        (torch.zeros(3, dtype=torch.int64), 1, "input_ids"),
        (torch.zeros(1, 0, dtype=torch.int64), 1, "input_ids"),
        (torch.zeros(1, 2, dtype=torch.int64), -1, "max_new_tokens"),
    ],
)
def test_impossible_requests_are_refused(model, ids, count, name):
    with pytest.raises(UserError, match=name):
        generate(model, ids, count)


# ---------------------------------------------------------------- text


TEXT = "héllo wörld, ça va? 日本 🙂"


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, and a few merges that end inside characters or not."""
    return train_tokenizer([TEXT] * 3, dataclasses.replace(CONFIG, vocab_size=280))


class Bytes:
    """Id = byte."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


def feed(tokenizer, ids) -> tuple[list[str], str]:
    stream = TextStream(tokenizer)
    return [stream.feed(id) for id in ids], stream.close()


def test_characters_arrive_whole_and_join_to_the_text():
    data = TEXT.encode()
    pieces, rest = feed(Bytes(), data)
    assert "".join(pieces) == TEXT
    assert rest == ""
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_tokens_of_a_trained_tokenizer_join_to_the_text(tokenizer):
    pieces, rest = feed(tokenizer, tokenizer.encode(TEXT))
    assert "".join(pieces) + rest == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*TEXT.encode(), 0xEF, 0xBF, 0xBD, 0xFF, 0x80]), max_size=30))
def test_broken_bytes_stream_as_in_one_decoding(data):
    pieces, rest = feed(Bytes(), data)
    assert "".join(pieces) + rest == Bytes().decode(data)


def test_nothing_certain_is_held_back():
    pieces, rest = feed(Bytes(), [0x80, 0x80, 0x80, 0xF0, 0x9F])
    assert "".join(pieces) == "\ufffd" * 3
    assert rest == "\ufffd"


def test_a_decoder_that_drops_the_first_space():
    class Spaced:
        def decode(self, ids):
            return "".join(f" {id}" for id in ids)[1:]

    pieces, rest = feed(Spaced(), [7, 8, 9])
    assert pieces == ["7", " 8", " 9"]
    assert rest == ""


def test_text_is_written_piece_by_piece(tokenizer):
    torch.manual_seed(0)
    model = Model(dataclasses.replace(CONFIG, vocab_size=280)).eval()
    pieces: list[str] = []
    text = continue_text(model, tokenizer, "héllo", tokens=30, seed=4, write=pieces.append)
    assert "".join(pieces) == text
    assert text
    assert text == continue_text(model, tokenizer, "héllo", tokens=30, seed=4)
    assert text != continue_text(model, tokenizer, "héllo", tokens=30, seed=5)
    assert not any(name in text for name in tokenizer.special)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model, tokenizer):
    with pytest.raises(UserError, match=r"tokenizer\.json: \d+ tokens, over model\.vocab_size = 64"):
        continue_text(model, tokenizer, "x")
