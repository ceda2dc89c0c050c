"""The tokenizer loses nothing, never makes a special token of text, and comes out the same every time."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config import ModelConfig, UserError
from atoll.data.tokenizer import Tokenizer, byte_symbols, check_fits, load_tokenizer, special_layout, train_tokenizer

MODEL = ModelConfig(vocab_size=400)
WORDS = ["def", "class", "return", "self", "value", "function", "prose", "comment", "tokenizer", "merges", "every", "text", "bytes"]
TEXTS = [f"def {w}_{i}(self, {v}):\n    return self.{v} + {i * 37}\n\n\n# a {w}, and {v}\n" for i, w in enumerate(WORDS) for v in WORDS]
TOKENIZER = train_tokenizer(TEXTS, MODEL)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_decode_gives_every_text_back(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert sum(map(TOKENIZER.token_bytes, ids)) == len(text.encode())


@settings(max_examples=100, deadline=None)
@given(st.binary())
def test_every_bytes_value_survives_as_its_replacement(raw):
    text = raw.decode("utf-8", "replace")
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_every_character_of_a_byte_and_long_texts_survive(monkeypatch):
    text = "".join(map(chr, range(256))) + "\n\t \r\n   \u3000x" + "\U0010ffff"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    monkeypatch.setattr("atoll.data.tokenizer.SLICE", 100)
    for long in (("word " * 7 + "\n") * 20, "a" * 107, "ab\n" * 34, "\n" * 300):
        assert TOKENIZER.decode(TOKENIZER.encode(long)) == long


def test_text_never_becomes_a_special_token():
    for name, index in TOKENIZER.special.items():
        ids = TOKENIZER.encode(f"x{name}y")
        assert index not in ids
        assert TOKENIZER.decode(ids) == f"x{name}y"
    assert TOKENIZER.decode([MODEL.bos_token_id, *TOKENIZER.encode("ab"), MODEL.eos_token_id]) == "<|bos|>ab<|eos|>"
    assert TOKENIZER.decode([MODEL.bos_token_id, *TOKENIZER.encode("ab"), MODEL.eos_token_id], skip_special=True) == "ab"


def test_the_layout_is_specials_then_bytes_then_merges():
    names = ["bos", "eos", "pad", "end_of_msg", "open", "close", "sep", "media_begin", "media_content", "media_end", "media_pad"]
    assert TOKENIZER.special == {f"<|{n}|>": i for i, n in enumerate(names)}
    assert [TOKENIZER.token(11 + b) for b in range(256)] == byte_symbols()
    assert [TOKENIZER.token_bytes(i) for i in range(11 + 256)] == [0] * 11 + [1] * 256
    assert TOKENIZER.vocab_size == MODEL.vocab_size
    assert all(TOKENIZER.token_bytes(i) > 1 for i in range(267, 400))
    assert (TOKENIZER.token_bytes(400), TOKENIZER.token_bytes(-1)) == (0, 0)


def test_specials_may_lie_anywhere_and_share_ids():
    model = ModelConfig(vocab_size=512, bos_token_id=500, eos_token_id=502, pad_token_id=511)
    assert special_layout(model)[501] == "<|end_of_msg|>"
    tokenizer = train_tokenizer(TEXTS[:2], model)  # too little text for all merges: ids between stay reserved
    assert tokenizer.special["<|pad|>"] == 511
    assert tokenizer.vocab_size == 512
    assert tokenizer.token(0) == byte_symbols()[0]
    assert tokenizer.token(499) == "<|reserved_token_499|>"
    assert tokenizer.decode(tokenizer.encode(TEXTS[3])) == TEXTS[3]
    assert max(tokenizer.encode(TEXTS[3])) < 499
    shared = special_layout(ModelConfig(vocab_size=512, bos_token_id=7, eos_token_id=7, pad_token_id=7))
    assert shared[7] == "<|eos|>"
    assert len(shared) == 9


def test_training_gives_the_same_tokenizer_in_another_process(tmp_path):
    program = (
        "import sys, json; from atoll.config import ModelConfig; from atoll.data.tokenizer import train_tokenizer;"
        "print(train_tokenizer(json.load(sys.stdin), ModelConfig(vocab_size=400)).fingerprint)"
    )
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(TEXTS), env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == TOKENIZER.fingerprint, done.stderr


def test_a_saved_tokenizer_is_the_same_one(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path)  # a folder that holds one will do
    assert again.fingerprint == TOKENIZER.fingerprint
    assert again.special == TOKENIZER.special
    assert again.encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])
    other = train_tokenizer([t.upper() for t in TEXTS], MODEL)
    assert other.fingerprint != TOKENIZER.fingerprint


def test_a_foreign_tokenizer_is_accepted(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {"<s>": 0, "</s>": 1, "<0x0A>": 2, "\u2581": 3, "\u2581caf\u00e9": 4, "x": 5}
    backend = Backend(models.WordLevel(vocab, unk_token="x"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "foreign.json"))
    tokenizer = load_tokenizer(tmp_path / "foreign.json")
    assert tokenizer.encode("caf\u00e9 caf\u00e9") == [4, 4]
    assert [tokenizer.token_bytes(i) for i in range(6)] == [0, 0, 1, 1, 6, 1]
    check_fits(tokenizer, ModelConfig(vocab_size=6, pad_token_id=1), "it")
    with pytest.raises(UserError, match=r"model.pad_token_id = 2.*'<0x0A>'.*</s> = 1"):
        check_fits(tokenizer, ModelConfig(vocab_size=6), "it")
    with pytest.raises(UserError, match=r"it: 6 tokens, over model.vocab_size = 5"):
        check_fits(tokenizer, dataclasses.replace(MODEL, vocab_size=5), "it")


def test_a_wrong_tokenizer_file_gets_one_line(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"model": ')
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\0")
    for path, word in ((tmp_path / "none.json", "no such file"), (broken, "not a readable"), (binary, "not a readable")):
        with pytest.raises(UserError, match=word) as caught:
            load_tokenizer(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"."):
        Tokenizer("{}")


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(UserError, match=r"model.vocab_size = 200.*at least 267"):
        train_tokenizer(TEXTS, ModelConfig(vocab_size=200))
