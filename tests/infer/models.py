"""Small models for the engine's tests, and what a whole forward pass says of an answer."""

from __future__ import annotations

import dataclasses

import torch

from atoll.config import ModelConfig
from atoll.infer.engine import Engine, EngineSettings
from atoll.infer.request import Answer, Request, Sampling
from atoll.model import Model

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=5, num_attention_heads=2, kda_num_heads=2, kda_head_dim=16, q_lora_rank=8,
    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=48, num_experts=40,
    num_experts_per_token=4, moe_intermediate_size=16, routed_expert_hidden_size=16, attn_res_block_size=2, initializer_range=0.2,
)  # fmt: skip


def build(dtype: torch.dtype = torch.float64, seed: int = 0, **changes) -> Model:
    """A model whose pseudo-queries are not at their start, so that every term counts."""
    torch.manual_seed(seed)
    model = Model(dataclasses.replace(CONFIG, **changes), dtype=dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_res_proj" in name:
                p.normal_(std=0.5)
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


GREEDY = Sampling(temperature=0)
REPEATING = Sampling(seed=1, logit_bias={5: 60.0, 6: 60.0, 7: 59.0})  # three tokens: what followed the last two will often follow again


def ask(tokens: list[int], count: int = 6, **more) -> Request:
    return Request(tokens, count, **{"sampling": GREEDY, "top_logprobs": 4, **more})


def engine(model, draft=None, **settings) -> Engine:
    return Engine(model, settings=EngineSettings(**settings), draft=draft)


def cold(model, request: Request, **settings) -> Answer:
    """The answer of an engine that has seen nothing."""
    return engine(model, **settings).run([request])[0]


def same_bits(a: Answer, b: Answer) -> bool:
    return (a.ids, a.logprobs, a.top, a.finish) == (b.ids, b.logprobs, b.top, b.finish)


@torch.no_grad()
def forced_logprobs(model, request: Request, answer: Answer) -> torch.Tensor:
    """Log-probabilities [prompt + answer - 1] of every token but the first, by one forward pass of the whole sequence."""
    ids = torch.tensor([request.prompt + answer.ids])
    logprobs = model(ids).logits.log_softmax(-1)[0, :-1]
    return logprobs.gather(1, ids[0, 1:, None])[:, 0]


def check_forced(model, request: Request, answer: Answer, atol: float = 1e-9) -> None:
    """The answer's log-probabilities are those of the whole forward pass."""
    expected = forced_logprobs(model, request, answer)[len(request.prompt) - 1 :]
    torch.testing.assert_close(torch.tensor(answer.logprobs, dtype=expected.dtype), expected, rtol=0, atol=atol)
