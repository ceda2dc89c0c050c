"""Text samples as the model learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atoll.train.callbacks.base import Callback, record

if TYPE_CHECKING:
    from atoll.train.trainer import Trainer

TOKENS = 48


class Samples(Callback):
    """Continues `train.sample_prompt` with random numbers of its own: a function of seed and step, outside torch's generators."""

    def __init__(self, every: int) -> None:
        self.every = every

    def act(self, trainer: Trainer) -> None:
        text = sample(trainer)
        record(trainer, {"kind": "sample", "step": trainer.step, "text": text})
        trainer.screen.say("  | " + text.replace("\n", "\n  | "))


def sample(trainer: Trainer) -> str:
    """The prompt and its continuation."""
    from atoll.infer.generate import generate

    c, tokenizer, m = trainer.config.train, trainer.corpus.tokenizer, trainer.config.model
    prompt = [m.bos_token_id, *tokenizer.encode(c.sample_prompt)]
    ids = torch.tensor([prompt], device=trainer.device)
    seed = c.seed + trainer.step
    out = generate(trainer.model, ids, TOKENS, temperature=0.7, top_p=0.95, seed=seed, stop_ids=(m.eos_token_id,))
    return tokenizer.decode([i for i in out[0].tolist() if i not in (m.bos_token_id, m.eos_token_id, m.pad_token_id)])
