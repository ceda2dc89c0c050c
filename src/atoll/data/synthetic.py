"""Generated tasks as training data: rows by global index, the loss on answers alone, mixed with rows of text where that is asked for.

Row n is a function of the tasks, the row's length, `data.seed`, n, and of the text that needles lie in. It holds 2^g samples of one task,
each a segment of its own, of an equal share of the row, down to the shortest that the task's form takes; every g is as likely, so that a
model meets short samples, from which it learns what is asked, beside those of the whole length.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from atoll.config import DataConfig, ModelConfig, UserError
from atoll.data.corpus import Corpus, Progress, open_text
from atoll.data.documents import TokenSet, from_tasks
from atoll.data.loader import Sampler
from atoll.data.tasks import FORMED, LEAST, Draw, Sample, Tasks, check
from atoll.data.tokenizer import Tokenizer, byte_symbols

HELDOUT = (64, 512)  # held-out samples, and tokens of the longest
ROW, KEPT = 128, 1 << 20  # an epoch is said to be so many rows; tokens of rows that are kept, since each is read twice
TRAIN, ELSEWHERE = 1, 2  # keys of the two splits


@dataclass(frozen=True)
class TaskMix:
    """What a training split of tasks draws from; in `TokenSet.tasks`."""

    tasks: Tasks
    names: tuple[str, ...]
    text_share: float


def open_synthetic(config: DataConfig, model: ModelConfig, say: Progress) -> Corpus:
    """The corpus of `config.source`, whose training split gives rows of `config.tasks`. Raises `UserError`.

    Held out are generated samples of their own; with rows of text among the training rows it is that text's held-out split.
    """
    check("data.tasks", config.tasks)
    corpus = open_text(config, model, say)
    mix = TaskMix(Tasks(corpus.tokenizer, model.bos_token_id, corpus.train), config.tasks, config.text_share)
    train = dataclasses.replace(corpus.train, tasks=mix)
    notes = [*corpus.notes, f"tasks: {', '.join(mix.names)}; {mix.text_share:.0%} of the rows are text"]
    if mix.text_share:
        return dataclasses.replace(corpus, train=train, notes=notes)
    tasks = Tasks(corpus.tokenizer, model.bos_token_id, corpus.heldout)
    samples = [heldout_sample(tasks, mix.names, i) for i in range(HELDOUT[0])]
    heldout = from_tasks(((f"task-{i}", s.ids, s.answers()) for i, s in enumerate(samples)), corpus.tokenizer, model)
    files = [(f"task-{i}", _spelled(corpus.tokenizer, s.ids[s.answers()])) for i, s in enumerate(samples)]
    return dataclasses.replace(corpus, train=train, heldout=heldout, heldout_files=files, has_tests=None, notes=notes)


def _spelled(tokenizer: Tokenizer, ids: np.ndarray) -> bytes:
    """The bytes behind `ids` under a byte-level vocabulary, also where they are no text; question marks under another."""
    byte = {symbol: number for number, symbol in enumerate(byte_symbols())}
    return bytes(byte.get(symbol, 63) for token in ids.tolist() for symbol in tokenizer.token(token) or "")


def heldout_sample(tasks: Tasks, names: tuple[str, ...], index: int) -> Sample:
    """Held-out sample `index`: no training row has its key."""
    draw = Draw(ELSEWHERE, index)
    return _drawn(tasks, names[draw.integer(len(names))], HELDOUT[1], draw)


def _drawn(tasks: Tasks, name: str, length: int, draw: Draw) -> Sample:
    return tasks.make(name, draw, length, draw.integer(1 << 20) / ((1 << 20) - 1))


def shortest(name: str) -> int:
    """Tokens of the shortest sample of a task that training rows hold."""
    task, _, form = name.partition(":")
    return LEAST if task not in FORMED else 64 if form == "raw" else 512


class TaskSampler:
    """Endless rows of `length` tokens by global index, as `atoll.data.loader.Rows`."""

    epoch_rows = float(ROW)  # generated rows have no end: an epoch is a count

    def __init__(self, token_set: TokenSet, length: int, seed: int) -> None:
        """`token_set.tasks` says what is drawn."""
        assert token_set.tasks is not None
        self.token_set, self.length, self.seed, self.mix = token_set, length, seed, token_set.tasks
        self._text = Sampler(token_set, length, seed)
        self._least = {name: min(length, shortest(name)) for name in self.mix.names}
        for name, least in self._least.items():  # a length too short is refused before the first step
            if self.mix.tasks.make(name, Draw(0), least).truncated:
                raise UserError(f"stages: length = {length}: too short for the task {name!r}; raise it, or leave the task out")
        self._rows: OrderedDict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = OrderedDict()

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Row `index` (0 or more): ids int64 [length], padded, and the positions in it where a segment starts."""
        ids, starts, _ = self._row(index)
        return ids, starts

    def trained(self, index: int) -> np.ndarray:
        """Which tokens of row `index` are answers, or text, bool [length]."""
        return self._row(index)[2]

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if index < 0:
            raise IndexError(f"sample index {index}: 0 or more is expected")
        if index not in self._rows:
            self._rows[index] = self._made(index)
            while len(self._rows) > max(2, KEPT // self.length):
                self._rows.popitem(last=False)
        return self._rows[index]

    def _made(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        draw = Draw(TRAIN, self.seed, index, self.length)
        if draw.integer(1 << 30) < self.mix.text_share * (1 << 30):
            ids, starts = self._text[index]
            return ids, starts, np.ones(self.length, dtype=bool)
        name = self.mix.names[draw.integer(len(self.mix.names))]
        size = self.length >> draw.integer((self.length // self._least[name]).bit_length())
        ids = np.full(self.length, self.token_set.pad, dtype=np.int64)
        trained, starts, at = np.zeros(self.length, dtype=bool), [], 0
        for slot in range(self.length // size):
            sample = _drawn(self.mix.tasks, name, size, Draw(TRAIN, self.seed, index, self.length, slot))
            end = at + len(sample.ids)
            ids[at:end], trained[at:end] = sample.ids, sample.answers()
            starts.append(at)
            at = end
        return ids, np.asarray([*starts, *([at] if at < self.length else [])], dtype=np.int64), trained
