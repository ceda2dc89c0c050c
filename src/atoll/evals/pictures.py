"""What a model says of held-out pictures: its loss on the text beside them, and its answers, letter by letter, beside the truth."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atoll.data.documents import TokenSet
from atoll.data.images.picture import Picture, stack
from atoll.data.images.rendered import KINDS
from atoll.data.images.samples import Sample
from atoll.data.loader import batch_of, permutation
from atoll.data.tokenizer import Tokenizer

ROWS = 8  # of held-out documents in a forward pass
ASKED = 64  # pictures answered at once
ANSWER = 48  # most tokens of an answer
FEW, ALL = 96, 512  # pictures of each kind asked about while training, and at the end
SHOWN = 12  # pictures of each kind on the report's page


@dataclass(frozen=True)
class Answer:
    """What the model said of a held-out picture."""

    sample: Sample
    said: str
    truth: str


def measure(
    model: Any, corpus: Any, length: int, tokens: int | None = None, stop: bool = True
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Loss and answers on the held-out split (with `tokens`: about so many, and some pictures), and some answers to be shown.

    The first: `losses` and `accuracy`, and "pictures", how many were asked about. Over several processes `stop` is False (`answers`).
    """
    token_set = corpus.heldout
    said = answers(model, choose(token_set.pictures.samples, FEW if tokens else ALL), corpus.tokenizer, stop)
    measured = {**losses(model, token_set, length, tokens), **accuracy(said), "pictures": len(said)}
    return measured, [] if tokens else gallery(said)


def described(line: dict[str, Any]) -> str:
    """What `measure` found, in words."""
    parts = [f"{line['bits_per_byte']:.4f} bits per byte"]
    if "digit_accuracy" in line:
        parts.append(f"{line['digit_accuracy']:.1%} of {line['digits']:,} digits")
    if "character_accuracy" in line:
        parts.append(f"{line['character_accuracy']:.1%} of {line['characters']:,} letters of unseen words")
    return ", ".join(parts) + f"; {line['pictures']:,} held-out pictures"


@torch.no_grad()
def losses(model: Any, token_set: TokenSet, length: int, limit_tokens: int | None = None) -> dict[str, float]:
    """{"bits_per_byte", "nats_per_token"} of the text of `token_set`, in rows of `length` tokens; of about `limit_tokens` where given."""
    rows = token_set.pictures.rows(token_set, length, 0)
    count = int(rows.epoch_rows)
    count = count if limit_tokens is None else max(1, min(count, limit_tokens // length))
    nats, targets, num_bytes = 0.0, 0, 0
    was_training = model.training
    model.eval()
    for start in range(0, count, ROWS):
        batch = batch_of(rows, range(start, min(count, start + ROWS)))
        out = model(**{k: t.to(model.device) for k, t in arguments(batch).items()})
        nats += float(out.loss) * int(out.num_targets)
        targets, num_bytes = targets + int(out.num_targets), num_bytes + batch.num_bytes
    model.train(was_training)
    return {"bits_per_byte": nats / math.log(2) / max(1, num_bytes), "nats_per_token": nats / max(1, targets)}


def arguments(batch: Any) -> dict[str, torch.Tensor]:
    """The model's arguments of a batch that may hold pictures."""
    names = ("input_ids", "labels", "cu_seqlens", "pixel_values", "grid_thws")
    return {name: value for name in names if (value := getattr(batch, name)) is not None}


def answers(model: Any, samples: Iterable[Sample], tokenizer: Tokenizer, stop: bool = True) -> list[Answer]:
    """The likeliest continuation after each sample's `prompt`, token by token, in the order of `samples`.

    Prompts of one length go together. `stop` False: all answers are made to their longest, for processes that must keep step.
    """
    asked = list(samples)
    said: dict[int, str] = {}
    by_length: dict[int, list[int]] = {}
    for i, sample in enumerate(asked):
        by_length.setdefault(sample.prompt, []).append(i)
    for _, alike in sorted(by_length.items()):
        for start in range(0, len(alike), ASKED):
            some = alike[start : start + ASKED]
            said |= dict(zip(some, _answered(model, [asked[i] for i in some], tokenizer, stop), strict=True))
    return [Answer(s, said[i], s.truth or _spoken(tokenizer, s.ids[s.prompt :], model.config)) for i, s in enumerate(asked)]


def _answered(model: Any, samples: Sequence[Sample], tokenizer: Tokenizer, stop: bool) -> list[str]:
    c, device = model.config, model.device
    ids = torch.tensor(np.stack([s.ids[: s.prompt] for s in samples]), device=device)
    pixels, grids = stack([item.load() for s in samples for item in s.items])
    room = min(ANSWER, max(len(s.ids) - s.prompt for s in samples) + 4)
    stops = (c.eos_token_id,) if stop else ()
    shown = {"pixel_values": pixels.to(device), "grid_thws": grids}
    out = model.generate(ids, room, temperature=0, stop_ids=stops, **shown)[:, ids.shape[1] :]
    return [_spoken(tokenizer, row, c) for row in out.tolist()]


def _spoken(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray, config: Any) -> str:
    """The text of `ids` up to the end of the document."""
    given = [int(i) for i in ids]
    end = given.index(config.eos_token_id) if config.eos_token_id in given else len(given)
    left_out = (config.bos_token_id, config.pad_token_id)
    return tokenizer.decode([i for i in given[:end] if i not in left_out]).strip()


# ---------------------------------------------------------------- right and wrong


def choose(samples: Sequence[Sample], each: int | None) -> list[Sample]:
    """A fixed pseudo-random choice of `each` of every kind (None: all) of the samples that can be asked about: one item or more."""
    found: dict[str, list[Sample]] = {}
    for i in permutation(len(samples), 0, 0).tolist():
        if samples[i].items and 0 < samples[i].prompt < len(samples[i].ids):
            found.setdefault(samples[i].kind, []).append(samples[i])
    return [s for kind in sorted(found) for s in found[kind][:each]]


def all_over_few(samples: Sequence[Sample]) -> float:
    """How many times as many pictures are asked about at the end as while training."""
    return len(choose(samples, ALL)) / max(1, len(choose(samples, FEW)))


def accuracy(said: Sequence[Answer]) -> dict[str, float]:
    """{"digit_accuracy", "digits", "character_accuracy", "characters"} of answers about rendered pictures.

    A digit is right where the whole answer is. Of words, 1 - (letters to insert, delete or replace) / letters, over all of them; a word
    counts as many wrong as it has, at most.
    """
    found: dict[str, float] = {}
    digits = [a.said == a.truth for a in said if a.sample.kind == "digit"]
    words = [(_name(a.said), _name(a.truth)) for a in said if a.sample.kind == "word"]
    if digits:
        found |= {"digit_accuracy": sum(digits) / len(digits), "digits": len(digits)}
    if words:
        letters = sum(len(truth) for _, truth in words)
        wrong = sum(min(len(truth), edits(said, truth)) for said, truth in words)
        found |= {"character_accuracy": 1 - wrong / letters, "characters": letters}
    return found


def _name(answer: str) -> str:
    return answer.removeprefix(KINDS["word"])


def edits(a: str, b: str) -> int:
    """Fewest letters to insert, delete or replace that make `b` of `a`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
    return row[-1]


# ---------------------------------------------------------------- shown


def gallery(said: Sequence[Answer]) -> list[dict[str, Any]]:
    """Some answers for a page: {"png" in base64, "kind", "truth", "said"}, `SHOWN` of each kind."""
    kinds: dict[str, list[Answer]] = {}
    for answer in said:
        kinds.setdefault(answer.sample.kind, []).append(answer)
    some = [answer for kind in sorted(kinds) for answer in kinds[kind][:SHOWN]]
    return [{"png": as_png(a.sample.items[-1].load()), "kind": a.sample.kind, "truth": a.truth, "said": a.said} for a in some]


def as_png(picture: Picture) -> str:
    """The first frame as a PNG in base64, without what fills it up below and to the right where it was not scaled."""
    from PIL import Image

    (_, rows, columns), p = picture.grid, picture.patches.shape[-1]
    pixels = picture.patches[: rows * columns].reshape(rows, columns, 3, p, p).transpose(0, 3, 1, 4, 2).reshape(rows * p, columns * p, 3)
    width, height = picture.size
    inside = pixels[:height, :width] if height <= rows * p and width <= columns * p else pixels
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(inside)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode("ascii")
