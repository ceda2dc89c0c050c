"""The one way in: a corpus of whatever kind the settings name."""

from __future__ import annotations

from atoll.config import DataConfig, ModelConfig, UserError
from atoll.data.conversations import open_chat
from atoll.data.corpus import Corpus, Progress, open_text
from atoll.data.images.corpus import open_images
from atoll.data.synthetic import open_synthetic


def open_corpus(config: DataConfig, model: ModelConfig, progress: Progress | None = None) -> Corpus:
    """Read and split the source, train or load the tokenizer, tokenise both splits (text cached by content in `config.cache`).

    `progress` is called with one line before each slow step. Raises `UserError` for a mistake in a setting or a file.
    """
    say = progress or (lambda line: None)
    if not config.source:  # as a path it would be the folder one stands in
        raise UserError("data.source = '': empty; name a folder or a file")
    if config.kind == "synthetic":
        return open_synthetic(config, model, say)
    if config.kind == "images":
        return open_images(config, model, say)
    return open_chat(config, model, say) if config.kind == "chat" else open_text(config, model, say)
