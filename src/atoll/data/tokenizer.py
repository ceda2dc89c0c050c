"""Byte-level BPE (library `tokenizers`): trained on the corpus, or read from any `tokenizer.json`.

What our own adds to the library is a layout (special tokens at the ids the model's config names, then the 256 bytes, then the
merges), a pre-tokeniser for source code and prose, and the rule that *text never becomes a special token*: `encode` reads
`"<|eos|>"` in a document as its seven characters; specials are put in by id.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config import ModelConfig, UserError
from atoll.data.cache import seal, write_text

MARKERS = ("end_of_msg", "open", "close", "sep", "media_begin", "media_content", "media_end", "media_pad")  # chat and media
# Markers that a file calls `special: false`, as released: engines that drop special tokens from an answer leave its structure in.
# Here they are special all the same, for else the library would find them in a user's words.
STRUCTURE = ("<|open|>", "<|close|>", "<|sep|>")
SLICE = 1 << 20  # characters encoded at once; a longer text is cut at a line end
VERSION = 2  # of layout and pre-tokeniser: part of the cache's key

# Pieces a merge never crosses, tried in this order. Within a line merges may cross words ("self.assert", " in the "): at 4,096
# tokens that is 4.1 bytes a token of Python where pieces of single words give 3.7, and a 4-gram model of equally many tokens
# needs 2.5 % fewer bits a byte. The bounds keep one endless line from slowing the training.
PATTERN = (
    r"\p{N}{1,3}"  # up to three digits
    r"|\n\s{0,200}"  # a line end, blank lines, and the next line's indentation
    r"|[^\n\p{N}]{1,200}"  # the rest of a line
)
LONGEST = 24  # bytes of a token: no merge learns a whole line by heart


class Tokenizer:
    """Text to ids and back. `vocab_size` is one more than the largest id; `fingerprint` names vocabulary, merges and pre-tokeniser."""

    def __init__(self, text: str) -> None:
        """`text` is the content of a `tokenizer.json`. Raises `ValueError` if the library cannot read it."""
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_str(_guarded(text))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(str(error)) from error
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.text = text
        content = json.loads(self._backend.to_str())
        self.fingerprint = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
        self.special = {t["content"]: int(t["id"]) for t in content["added_tokens"] if t["special"]}
        self._skipped = {i for name, i in self.special.items() if name not in STRUCTURE}
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.bytes_table = _bytes_table(vocab, content, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without specials; `decode` gives the text back (for a byte-level tokenizer: every text)."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each, on the library's threads."""
        slices = [list(_slices(text)) for text in texts]
        encoded = self._backend.encode_batch_fast(list(itertools.chain.from_iterable(slices)), add_special_tokens=False)
        ids = iter(encoded)
        return [list(itertools.chain.from_iterable(next(ids).ids for _ in parts)) for parts in slices]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; a character cut off at an end shows as U+FFFD. Specials are shown; `skip_special` leaves those of `STRUCTURE`."""
        kept = [int(i) for i in ids if not (skip_special and int(i) in self._skipped)]
        return self._backend.decode(kept, skip_special_tokens=False)

    def token_bytes(self, token: int) -> int:
        """Bytes of text behind an id; 0 for special and unused ids."""
        return int(self.bytes_table[token]) if 0 <= token < len(self.bytes_table) else 0

    def token(self, token: int) -> str | None:
        """The vocabulary's spelling of an id, or None."""
        return self._backend.id_to_token(token)

    def is_special(self, token: int) -> bool:
        """Whether text never becomes this id: a special token, or an id without one."""
        name = self._backend.id_to_token(token)
        return name is None or name in self.special

    def guarded_text(self) -> str:
        """`text` with the tokens of `STRUCTURE` special, for other readers that must not find them in words."""
        return _guarded(self.text)

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json` (at `path`, or in it where it is a folder), whole or not at all. Raises `UserError`."""
        where = Path(path)
        write_text(where / "tokenizer.json" if where.is_dir() else where, self.text, "tokenizer")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a `tokenizer.json`, our own or another's. Raises `UserError`: no such file, not a tokenizer."""
    where = Path(path).expanduser()
    if where.is_dir():
        where = where / "tokenizer.json"
    try:
        return Tokenizer(where.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f'data.tokenizer = {str(path)!r}: no such file; give a tokenizer.json, or "train"') from error
    except (OSError, ValueError) as error:  # ValueError holds bad UTF-8 and bad JSON too
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"data.tokenizer = {str(path)!r}: not a readable tokenizer.json ({reason})") from error


def check_fits(tokenizer: Tokenizer, model: ModelConfig, setting: str) -> None:
    """Refuse a tokenizer whose ids the model cannot take, or in which a special id of the model's is an ordinary token.

    Raises `UserError`; `setting` names the tokenizer in it.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(f"{setting}: {tokenizer.vocab_size} tokens, over model.vocab_size = {model.vocab_size}; raise that to fit")
    ids = {name: getattr(model, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if model.vision is not None:
        ids["vision.media_placeholder_token_id"] = model.vision.media_placeholder_token_id
    for name, token in ids.items():
        if not tokenizer.is_special(token):
            there = ", ".join(f"{n} = {i}" for n, i in itertools.islice(tokenizer.special.items(), 8)) or "none"
            text = tokenizer.token(token)
            raise UserError(f"model.{name} = {token}: the ordinary token {text!r} of {setting}; take one of its special tokens: {there}")


# ---------------------------------------------------------------- training


def train_tokenizer(texts: Iterable[str], model: ModelConfig) -> Tokenizer:
    """Fit a byte-level BPE of `model.vocab_size` ids (fewer if the texts give fewer merges). The same texts give the same one.

    Raises `UserError` when the vocabulary cannot hold the 256 bytes and the special tokens.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    special = special_layout(model)
    room = model.vocab_size - len(special)
    if room < 256:
        least = 256 + len(special)
        raise UserError(f"model.vocab_size = {model.vocab_size}: 256 bytes and {len(special)} special tokens need at least {least}")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        initial_alphabet=alphabet,
        min_frequency=2,
        max_token_length=LONGEST,
        show_progress=False,
        special_tokens=[],
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return Tokenizer(_laid_out(json.loads(backend.to_str()), special))


def special_layout(model: ModelConfig) -> dict[int, str]:
    """Id → special token: those the config names where it puts them, the other chat and media markers on the free ids after the lowest."""
    named: dict[int, str] = {}
    for name in ("eos", "bos", "pad"):  # a shared id is the end of the document first
        named.setdefault(getattr(model, f"{name}_token_id"), f"<|{name}|>")
    start = min(named)
    if model.vision is not None:
        named[model.vision.media_placeholder_token_id] = "<|media_pad|>"
    markers = [m for m in MARKERS if f"<|{m}|>" not in named.values()]
    free = (i for i in itertools.chain(range(start, model.vocab_size), range(start)) if i not in named)
    taken = list(itertools.islice(free, len(markers)))
    return {**named, **{i: f"<|{m}|>" for i, m in zip(taken, markers, strict=False)}}


def _laid_out(content: dict[str, Any], special: dict[int, str]) -> str:
    """The trained tokenizer's JSON with our ids: specials where they belong, the bytes in order, then the merges in order."""
    merges = [m if isinstance(m, list) else m.split(" ") for m in content["model"]["merges"]]
    tokens = list(dict.fromkeys([*byte_symbols(), *(a + b for a, b in merges)]))
    vocab: dict[str, int] = {name: i for i, name in special.items()}
    ids = (i for i in itertools.count() if i not in special)
    vocab.update(zip(tokens, ids, strict=False))
    used = set(vocab.values())
    vocab.update({f"<|reserved_token_{i}|>": i for i in range(max(used)) if i not in used})  # the library wants no gaps
    content["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    content["added_tokens"] = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": name not in STRUCTURE}
        for name, i in content["model"]["vocab"].items()
        if re.fullmatch(r"<\|\w+\|>", name) and (i in special or name.startswith("<|reserved_token_"))
    ]
    return json.dumps(content, ensure_ascii=False, indent=1)


def byte_symbols() -> list[str]:
    """The character that stands for each of the 256 bytes in a byte-level vocabulary: itself where it prints, else one from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(b if b in plain else next(others)) for b in range(256)]


# ---------------------------------------------------------------- helpers


def _guarded(text: str) -> str:
    """A `tokenizer.json` in which the tokens of `STRUCTURE` are special: `encode` then never makes them of text."""
    content = json.loads(text)
    added = content.get("added_tokens") if isinstance(content, dict) else None
    open_to_text = [t for t in added or [] if t["content"] in STRUCTURE and not t["special"]]
    for token in open_to_text:
        token["special"] = True
    return json.dumps(content) if open_to_text else text


def _slices(text: str) -> Iterable[str]:
    start = 0
    while len(text) - start > SLICE:
        cut = text.rfind("\n", start, start + SLICE) + 1
        cut = cut if cut > start else start + SLICE
        yield text[start:cut]
        start = cut
    yield text[start:]


def _bytes_table(vocab: dict[str, int], content: dict[str, Any], size: int) -> np.ndarray:
    """Bytes of text behind each id, int64 [size]."""
    added = {t["content"]: t["special"] for t in content["added_tokens"]}
    byte_level = '"ByteLevel"' in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
    table = np.zeros(size, dtype=np.int64)
    for token, index in vocab.items():
        if token in added:
            table[index] = 0 if added[token] else len(token.encode("utf-8"))
        elif byte_level:
            table[index] = len(token)  # one character stands for one byte
        else:  # SentencePiece spelling: U+2581 is a space, <0x0A> is a byte
            table[index] = 1 if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else len(token.replace("\u2581", " ").encode("utf-8"))
    return table


def cached_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer kept at `path`, or None when it is missing or damaged (its checksum lies beside it)."""
    try:
        if path.with_suffix(".seal").read_text(encoding="ascii") != seal(path):
            return None
        return Tokenizer(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def keep_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write the tokenizer and then its checksum, so that a cut between the two reads as damaged."""
    write_text(path, tokenizer.text)
    write_text(path.with_suffix(".seal"), seal(path))
