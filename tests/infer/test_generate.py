"""Generation: cache and whole sequence agree, seeds repeat, rows stop by themselves, text streams whole characters."""

from __future__ import annotations

import pytest
import torch
from atoll.config import ModelConfig, UserError
from atoll.infer.generate import generate
from atoll.infer.sample import check_tokenizer, continue_text
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
    assert torch.equal(generate(model, prompt()[:, 4:], 6, temperature=0, cache=cache)[:, 5:], generate(model, prompt(), 6, temperature=0)[:, 9:])


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


class Bytes:
    """A tokenizer of the 61 bytes of a text's alphabet: ids 3 and up."""

    vocab_size = 64
    alphabet = sorted(set("héllo wörld, ça va? 日本 🙂".encode()))

    def encode(self, text):
        return [3 + self.alphabet.index(b) for b in text.encode()]

    def token_bytes(self, id):
        return bytes([self.alphabet[(id - 3) % len(self.alphabet)]])


TEXT = "héllo wörld, ça va? 日本 🙂"


def test_characters_arrive_whole_and_join_to_the_text():
    stream = TextStream(Bytes())
    pieces = [stream.feed(id) for id in Bytes().encode(TEXT)]
    assert "".join(pieces) + stream.close() == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) == len(TEXT.encode())
    assert sum(piece == "" for piece in pieces) == len(TEXT.encode()) - len(TEXT)


@pytest.mark.parametrize("cut", range(1, 5))
def test_an_unfinished_or_broken_character_is_replaced_as_in_one_decoding(cut):
    data = TEXT.encode()[:-cut] + b"a" * (cut % 2)
    by_byte = {i: bytes([i]) for i in range(256)}
    stream = TextStream(type("T", (), {"token_bytes": lambda _self, id: by_byte[id]})())
    assert "".join(map(stream.feed, data)) + stream.close() == data.decode("utf-8", "replace")


def test_text_is_written_piece_by_piece(model):
    pieces: list[str] = []
    text = continue_text(model, Bytes(), "héllo", tokens=30, seed=4, write=pieces.append)
    assert "".join(pieces) == text
    assert text
    assert text == continue_text(model, Bytes(), "héllo", tokens=30, seed=4)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model):
    big = type("T", (), {"vocab_size": 65})()
    with pytest.raises(UserError, match="65 tokens, but the model knows 64"):
        check_tokenizer(big, 64)
    with pytest.raises(UserError, match="65 tokens"):
        continue_text(model, big, "x")
