"""From a setting to a corpus: read, split, train or load the tokenizer, tokenise, and keep what was made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.config import DataConfig, ModelConfig, UserError
from atoll.data import documents as docs
from atoll.data.cache import cache_folder
from atoll.data.documents import TokenSet
from atoll.data.sources import Source, open_source
from atoll.data.split import STRETCH, TOKENIZER_BYTES, Survey, survey
from atoll.data.tokenizer import (
    LONGEST,
    PATTERN,
    VERSION,
    Tokenizer,
    cached_tokenizer,
    check_fits,
    keep_tokenizer,
    load_tokenizer,
    special_layout,
)
from atoll.data.tokenizer import train_tokenizer as fit

Progress = Callable[[str], None]
PROBE = "def f(x):\n\treturn  x+1  # \u00e9\u4e2d\U0001f600\r\n\n        <|eos|>\ufffd\x00 "  # what a lossless tokenizer gives back


@dataclass(frozen=True)
class Corpus:
    """Both splits, tokenised. Everything in it is a function of the files' contents and the settings."""

    tokenizer: Tokenizer
    train: TokenSet
    heldout: TokenSet
    heldout_files: list[tuple[str, bytes]]  # name, UTF-8 text as the model reads it: what gzip and xz are measured on
    has_tests: bool | None  # whether the standard library's tests are in it; None for other sources
    undecodable: int  # bytes that were not UTF-8 and were replaced
    notes: list[str] = field(default_factory=list)  # one line each on what was left out, repaired or chosen


def open_text(config: DataConfig, model: ModelConfig, say: Progress) -> Corpus:
    """The corpus of files of text that `config.source` names. Raises `UserError`."""
    source = open_source(config)
    say(f"reading {len(source.files):,} files of {config.source}" if not source.single else f"reading {config.source}")
    found = survey(source, config)
    notes = _notes(found)
    if config.tokenizer == "train":
        tokenizer = fitted(found.train_digest, lambda: found.tokenizer_texts(source), config, model, say)
    else:
        tokenizer = given_tokenizer(config, model)
        if tokenizer.decode(tokenizer.encode(PROBE)) != PROBE:
            notes.append(
                f"data.tokenizer = {config.tokenizer!r} does not keep every text exactly; bits are counted per byte of the original"
            )
    sets = {side: _tokenised(source, found, side, tokenizer, config, model, say) for side in (True, False)}
    return Corpus(tokenizer, sets[False], sets[True], found.heldout_files, source.has_tests, found.stats.undecodable, notes)


def fitted(digest: str, texts: Callable[[], Iterable[str]], config: DataConfig, model: ModelConfig, say: Progress) -> Tokenizer:
    """The tokenizer trained on `texts`, or the one kept from the last time; `digest` names the texts."""
    settings = repr((VERSION, PATTERN, LONGEST, TOKENIZER_BYTES, STRETCH, model.vocab_size, sorted(special_layout(model).items())))
    key = hashlib.blake2b(f"{digest} {settings}".encode(), digest_size=16).hexdigest()
    path = cache_folder(config.cache, "tokenizers") / f"{key}.json"
    tokenizer = cached_tokenizer(path)
    if tokenizer is None:
        say(f"training a tokenizer of {model.vocab_size:,} tokens")
        tokenizer = fit(texts(), model)
        keep_tokenizer(tokenizer, path)
    check_fits(tokenizer, model, "the trained tokenizer")
    return tokenizer


def given_tokenizer(config: DataConfig, model: ModelConfig) -> Tokenizer:
    """The tokenizer that `config.tokenizer` names, if it fits the model. Raises `UserError`."""
    tokenizer = load_tokenizer(config.tokenizer)
    check_fits(tokenizer, model, f"data.tokenizer = {config.tokenizer!r}")
    return tokenizer


def _tokenised(
    source: Source, found: Survey, heldout: bool, tokenizer: Tokenizer, config: DataConfig, model: ModelConfig, say: Progress
) -> TokenSet:
    side = "heldout" if heldout else "train"
    stem: Path = cache_folder(config.cache, "tokens") / f"{docs.stem_name(found.digest, tokenizer, model)}-{side}"
    if (kept := docs.read_tokens(stem, tokenizer, model)) is not None:
        return kept
    if not heldout:
        say(f"tokenising {found.train_bytes / 1e6:,.1f} MB" if found.train_bytes >= 1e5 else f"tokenising {found.train_bytes:,} bytes")
    texts = ((d.name, d.text) for d in found.documents(source, heldout))
    docs.write_tokens(stem, docs.encode_documents(texts, tokenizer), model)
    kept = docs.read_tokens(stem, tokenizer, model)
    if kept is None:
        raise UserError(f"data.cache = {config.cache!r}: what was written there does not read back; check the disk, or set another folder")
    return kept


def _notes(found: Survey) -> list[str]:
    stats, notes = found.stats, []
    if stats.undecodable:
        few = "1 byte is not UTF-8 and was" if stats.undecodable == 1 else f"{stats.undecodable:,} bytes are not UTF-8 and were"
        notes.append(f"{few} replaced by U+FFFD")
    left_out = [(stats.binary, "binary"), (stats.empty, "empty"), (stats.links, "symbolic links")]
    if any(count for count, _ in left_out):
        notes.append("left out: " + ", ".join(f"{count:,} {what}" for count, what in left_out if count))
    if found.forced is not None:
        side = "held-out" if sum(found.heldout) == 1 else "training"
        notes.append(f"the hash gave no {side} document in so small a corpus: {found.forced!r} was taken")
    return notes
