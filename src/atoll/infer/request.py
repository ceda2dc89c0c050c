"""What is asked of the engine and what it answers, token by token: plain data, shared by the shell, the server and rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Constraint(Protocol):
    """A grammar being followed: which tokens may come next, and what came. One a sequence; not shared."""

    def allowed(self) -> Tensor | None:
        """A mask bool [vocabulary] of the tokens that may come next, or None where all may."""
        ...

    def accept(self, id: int) -> None:
        """`id` came next."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Penalties count over prompt and answer (repetition) or over the answer (presence, frequency), as OpenAI's do.

    The order: logit bias, penalties, constraint, temperature, top-k, top-p, min-p. `seed` None draws from the operating system's entropy;
    with a seed the answer does not depend on what else is in the batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0  # share of the most likely token's probability below which a token is dropped
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    Args:
        prompt: token ids, one at least; a placeholder a feature where an image stands.
        max_tokens: tokens to add at most.
        stop_ids: tokens that end the answer; they are part of it.
        top_logprobs: how many of the most likely tokens come with each token's log-probability.
        prompt_logprobs: whether the prompt's own log-probabilities are wanted (its first token has none). Such a prompt is not read
            from the prefix cache.
        routing: whether the experts chosen for each token are recorded.
        turns: positions in the prompt where a turn ends, ascending: good places for a snapshot of the state.
        salt: prefixes are shared among requests of the same salt alone.
        pixel_values, grid_thws: images, as `Model.forward` takes them.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    routing: bool = False
    turns: tuple[int, ...] = ()
    salt: str = ""
    constraint: Constraint | None = None
    pixel_values: Tensor | None = None
    grid_thws: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One token of the answer. Its log-probability is the model's own, before bias, penalties, temperature and cuts.

    `routing` int [layers, k] are the experts of the token that was fed to draw this one. `finish` is set on the last step alone.
    A sequence that ends without a token of its own (cancelled, failed) gives a last step whose `id` is None.
    """

    sequence: int
    id: int | None
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    routing: Tensor | None = None
    version: int = 0  # of the weights
    finish: FinishReason | None = None
    error: str = ""
    answer: Answer | None = None  # on the last step alone: all of it together


@dataclass
class Answer:
    """A finished sequence: what its steps add up to. `cached` tokens of the prompt were read from the prefix cache.

    `prompt_logprobs` and `prompt_top` have an entry for each token of the prompt but its first, as `Step`'s.
    `routing` int [layers, prompt + answer - 1, k] where asked for: the experts of every token that was fed.
    """

    ids: list[int]
    logprobs: list[float]
    top: list[tuple[tuple[int, float], ...]]
    finish: FinishReason
    cached: int = 0
    prompt_logprobs: list[float] | None = None
    prompt_top: list[tuple[tuple[int, float], ...]] | None = None
    routing: Tensor | None = None
    versions: list[int] = field(default_factory=list)
    error: str = ""
