"""Text samples as the model learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atoll.data.chat import render, tokenize
from atoll.infer.stream import printable
from atoll.train.callbacks.base import Callback, record

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer

TOKENS = 48
PICTURES = 3  # of a kind


class Samples(Callback):
    """Continues `train.sample_prompt` with random numbers of its own: a function of seed and step, outside torch's generators."""

    def __init__(self, every: int) -> None:
        self.every = every

    def act(self, trainer: Trainer) -> None:
        text = sample(trainer)
        record(trainer, {"kind": "sample", "step": trainer.step, "text": text})
        shown = printable(text.expandtabs(4))
        trainer.screen.say("  | " + shown.replace("\n", "\n  | "))


def sample(trainer: Trainer) -> str:
    """The prompt and its continuation."""
    from atoll.infer.generate import generate

    if trainer.corpus.heldout.pictures is not None:
        return captions(trainer)
    c, tokenizer, m = trainer.config.train, trainer.corpus.tokenizer, trainer.config.model
    prompt = _prompt(trainer)
    stops = (m.eos_token_id, *(tokenizer.special[n] for n in ("<|end_of_msg|>",) if n in tokenizer.special))
    ids = torch.tensor([prompt], device=trainer.device)
    seed = c.seed + trainer.step
    # Over several processes all must make the same number of steps, also where the last bits of their logits differ.
    alone = trainer.ranks.size == 1
    out = generate(trainer.model, ids, TOKENS, temperature=0.7, top_p=0.95, seed=seed, stop_ids=stops if alone else ())[0].tolist()
    end = next((i for i in range(len(prompt), len(out)) if out[i] in stops), len(out))
    return tokenizer.decode([i for i in out[: end + 1] if i not in (m.bos_token_id, m.eos_token_id, m.pad_token_id)])


def captions(trainer: Trainer) -> str:
    """What the model says of a few held-out pictures, and what they show: always the same ones."""
    from atoll.evals.pictures import answers, choose

    asked = choose(trainer.corpus.heldout.pictures.samples, PICTURES)
    said = answers(trainer.model, asked, trainer.corpus.tokenizer, trainer.ranks.size == 1)
    return "\n".join(f"{a.said or '(nothing)'}  ({'right' if a.said == a.truth else 'it is ' + a.truth})" for a in said)


def _prompt(trainer: Trainer) -> list[int]:
    """`train.sample_prompt` as the beginning of a document, or as a user's message and the assistant's first tag."""
    c, tokenizer = trainer.config, trainer.corpus.tokenizer
    if c.data.kind != "chat":
        return [c.model.bos_token_id, *tokenizer.encode(c.train.sample_prompt)]
    question = [{"role": "user", "content": c.train.sample_prompt}]
    return tokenize(render(question, thinking=c.data.thinking, add_generation_prompt=True), tokenizer)[0]
