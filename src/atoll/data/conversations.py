"""Conversations in JSON lines to token sets: rendered, split by a hash of their own, tokenised, with what is trained marked.

One object a line: `messages`, and what else `atoll.data.chat.render` takes of `OPTIONS`. Other fields are passed over.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config import DataConfig, ModelConfig, UserError
from atoll.data.chat import MEDIA, Segment, marker_ids, render, tokenize_batch
from atoll.data.corpus import Corpus, Progress, fitted, given_tokenizer
from atoll.data.documents import TokenSet, from_conversations, token_dtype
from atoll.data.messages import NEAR, short
from atoll.data.sources import walk
from atoll.data.split import TOKENIZER_BYTES, unit_hash
from atoll.data.tokenizer import Tokenizer

OPTIONS = ("tools", "thinking", "effort", "tool_choice", "response_format")
CHUNK = 512  # conversations handed to the tokenizer's threads at once


@dataclass(frozen=True)
class Conversation:
    """One line: `name` is file:line, `place` its number in [0, 1) that the split goes by."""

    name: str
    place: float
    segments: list[Segment]


@dataclass(frozen=True)
class Tokenised:
    """A conversation's ids, and which of them are trained (bool)."""

    name: str
    place: float
    ids: np.ndarray
    trained: np.ndarray


def open_chat(config: DataConfig, model: ModelConfig, say: Progress) -> Corpus:
    """Read, split and tokenise `config.source`. Raises `UserError`, one line with file and line number, for a bad conversation."""
    files = _files(config.source)
    if config.tokenizer == "train":
        tokenizer = _trained(files, config, model, say)
    else:
        tokenizer = given_tokenizer(config, model)
    say(f"reading {config.source}")
    left_out: list[str] = []
    found = list(_tokenised(read_conversations(files, config, left_out), tokenizer, model))
    sides = _sides([c.place for c in found], config)
    train, heldout = (_token_set(itertools.compress(found, (s == side for s in sides)), tokenizer, model) for side in (False, True))
    notes = [_about(train, heldout)]
    if left_out:
        notes.append(f"left out: {len(left_out):,} without an assistant's message, the first {left_out[0]}")
    replies = [(name, _reply(heldout, i, tokenizer)) for i, name in enumerate(heldout.names)]
    return Corpus(tokenizer, train, heldout, replies, None, 0, notes)


def read_conversations(files: Iterable[Path], config: DataConfig, left_out: list[str] | None = None) -> Iterator[Conversation]:
    """Every conversation with something to train on, in order, until `config.max_bytes` of training text.

    The names of the others go to `left_out`.
    """
    train_bytes = 0
    for path in files:
        for number, line in _lines(path):
            conversation = _conversation(line, f"{path.name}:{number}", f"{path}:{number}", config)
            if not any(s.trained for s in conversation.segments):
                (left_out if left_out is not None else []).append(conversation.name)
                continue
            yield conversation
            if conversation.place >= config.heldout:
                train_bytes += sum(len(s.text.encode()) for s in conversation.segments if not s.marker)
            if config.max_bytes is not None and train_bytes >= config.max_bytes:
                return


# ---------------------------------------------------------------- reading


def _files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        names, _ = walk(path, (".jsonl",))
        if not names:
            raise UserError(f"data.source = {source!r}: no .jsonl file in this folder; give conversations, one JSON object a line")
        return [path / name for name in names]
    if not path.is_file():
        raise UserError(f"data.source = {source!r}: no such file or folder; give a .jsonl file of conversations, or a folder of them")
    return [path]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UserError(f"data.source = {str(path)!r}: cannot be read ({error.strerror or error})") from error


def _conversation(line: bytes, name: str, where: str, config: DataConfig) -> Conversation:
    record = _record(line, where)
    options: dict[str, Any] = {key: record[key] for key in OPTIONS if record.get(key) is not None}
    if not isinstance(options.setdefault("thinking", config.thinking), bool):
        raise UserError(f"{where}: thinking = {short(options['thinking'])}: true or false is expected")
    try:
        segments = render(record["messages"], **options)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if any(s.marker and s.text in MEDIA for s in segments):
        raise UserError(f"{where}: an image in a message; conversations are trained on text alone, take that line out")
    key = json.dumps(record["messages"], sort_keys=True)  # not the options: one conversation under two of them stays on one side
    return Conversation(name, unit_hash(key), segments)


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); repair or remove that line") from None
    if not isinstance(record, dict):
        raise UserError(f'{where}: not a JSON object; {{"messages": [...]}} is expected')
    known = ("messages", *OPTIONS)
    for key in record:
        near = difflib.get_close_matches(key, known, 1, NEAR)
        if key not in known and near:
            raise UserError(f"{where}: {key}: no such field; did you mean {near[0]}?")
    if "messages" not in record:
        there = ", ".join(map(repr, itertools.islice(record, 5))) or "nothing"
        raise UserError(f"{where}: messages is missing; the line has {there}")
    return record


# ---------------------------------------------------------------- splitting and tokenising


def _sides(places: list[float], config: DataConfig) -> list[bool]:
    """Whether each is held out; where the hash leaves a side empty, the one nearest to it goes there."""
    if len(places) < 2:
        what = "one conversation cannot be both for training and held out" if places else "no conversation with an assistant's message"
        raise UserError(f"data.source = {config.source!r}: {what}; give at least two")
    sides = [place < config.heldout for place in places]
    if all(sides) or not any(sides):
        pick: Callable[..., int] = max if all(sides) else min
        index = pick(range(len(places)), key=places.__getitem__)
        sides[index] = not sides[index]
    return sides


def _trained(files: list[Path], config: DataConfig, model: ModelConfig, say: Progress) -> Tokenizer:
    """A tokenizer fitted on the first texts of the training split."""
    sides = _sides([c.place for c in read_conversations(files, config)], config)
    texts: list[str] = []
    room = TOKENIZER_BYTES
    for conversation in itertools.compress(read_conversations(files, config), (not side for side in sides)):
        if room <= 0:
            break
        texts += [s.text for s in conversation.segments if not s.marker]
        room -= sum(len(s.text) for s in conversation.segments)
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()
    return fitted(digest, lambda: texts, config, model, say)


def _tokenised(conversations: Iterable[Conversation], tokenizer: Tokenizer, model: ModelConfig) -> Iterator[Tokenised]:
    marker_ids(tokenizer)
    rest = iter(conversations)
    while chunk := list(itertools.islice(rest, CHUNK)):
        for c, (ids, trained) in zip(chunk, tokenize_batch([c.segments for c in chunk], tokenizer), strict=True):
            yield Tokenised(c.name, c.place, np.asarray(ids, dtype=token_dtype(model)), np.asarray(trained, dtype=bool))


def _token_set(chosen: Iterable[Tokenised], tokenizer: Tokenizer, model: ModelConfig) -> TokenSet:
    return from_conversations(((c.name, c.ids, c.trained) for c in chosen), tokenizer, model)


def _reply(token_set: TokenSet, index: int, tokenizer: Tokenizer) -> bytes:
    """What a conversation's assistants wrote, markers aside: the bytes that bits per byte counts."""
    assert token_set.trained is not None
    span = slice(token_set.offsets[index], token_set.offsets[index + 1])
    ids = token_set.tokens[span][token_set.trained[span]]
    return tokenizer.decode(ids[token_set.token_bytes[ids] > 0]).encode("utf-8")


def _about(train: TokenSet, heldout: TokenSet) -> str:
    assert train.trained is not None
    counted, every = int(train.trained.sum()), train.num_tokens
    return (
        f"{len(train):,} conversations and {len(heldout):,} held out; {counted:,} of {every:,} tokens ({counted / every:.0%}) "
        "are an assistant's and trained on"
    )
