"""The corpus of `data.kind = "images"`: rendered pictures, or documents of text and pictures that a source holds."""

from __future__ import annotations

import numpy as np

from atoll.config import DataConfig, ModelConfig
from atoll.data.corpus import Corpus, Progress, fitted, given_tokenizer
from atoll.data.images.files import open_files
from atoll.data.images.gallery import Gallery, token_set
from atoll.data.images.rendered import KINDS, QUESTION, Renderer, Shown
from atoll.data.images.samples import Item, Sample, document
from atoll.data.tokenizer import Tokenizer

HELDOUT = 512  # held-out pictures drawn
KNOWN = 64  # training pictures that stand for the endless rest


class Artist:
    """A rendered picture by key as a document: bos, the picture, the question, the answer spelt letter by letter, eos."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, model: ModelConfig) -> None:
        self.renderer, self.model = renderer, model
        self.question = tokenizer.encode(QUESTION)
        self.openings = {kind: tokenizer.encode(words) for kind, words in KINDS.items()}
        self.letters = dict(zip(LETTERS, tokenizer.encode_batch(list(LETTERS)), strict=True))

    def sample(self, *key: int) -> Sample:
        """The document of `key`; its answer alone is trained."""
        return self.asked(self.renderer.picture(*key))

    def asked(self, shown: Shown) -> Sample:
        """What `shown` becomes: reading is learnt, not the merges of a tokenizer, so each letter is a token."""
        answer = [*self.openings[shown.kind], *(i for letter in shown.name for i in self.letters[letter])]
        item = Item(shown.picture.grid, lambda: shown.picture)
        whole = document([item, self.question, answer], self.model)
        prompt = len(whole.ids) - len(answer) - 1
        trained = np.arange(len(whole.ids)) >= prompt
        return Sample(whole.ids, trained, whole.items, shown.kind, KINDS[shown.kind] + shown.name, prompt)


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def open_images(config: DataConfig, model: ModelConfig, say: Progress) -> Corpus:
    """The corpus that `config.source` names. Raises `UserError`."""
    return _rendered(config, model, say) if config.source == "rendered" else open_files(config, model, say)


def _rendered(config: DataConfig, model: ModelConfig, say: Progress) -> Corpus:
    assert model.vision is not None
    say("drawing words of the Python library and handwritten digits")
    train, heldout = (Renderer(config, model.vision, side) for side in (False, True))
    if config.tokenizer == "train":
        phrases = [QUESTION, *KINDS.values()] * 4
        tokenizer = fitted("rendered:" + "|".join(phrases), lambda: phrases, config, model, say)
    else:
        tokenizer = given_tokenizer(config, model)
    artist, other = Artist(train, tokenizer, model), Artist(heldout, tokenizer, model)
    known = [artist.sample(0, i) for i in range(KNOWN)]
    shown = [other.asked(heldout.digit(i)) for i in range(len(heldout.names))]
    words = [other.sample(0, i) for i in range(HELDOUT)]
    apart = [*shown, *(s for s in words if s.kind == "word")]
    note = (
        f"{len(train.words):,} words and {len(train.names):,} digits are drawn, "
        f"{len(heldout.words):,} other words and {len(heldout.names):,} other digits held out"
    )
    sets = (
        token_set(known, tokenizer, model, Gallery(known, model, draw=artist.sample)),
        token_set(apart, tokenizer, model, Gallery(apart, model)),
    )
    texts = [(name, s.truth.encode()) for name, s in zip(sets[1].names, apart, strict=True)]
    return Corpus(tokenizer, *sets, texts, None, 0, [note])
