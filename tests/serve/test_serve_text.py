"""Stop strings across borders, names of tokens, the pages of numbers."""

from __future__ import annotations

import itertools

from conversations import TOKENIZER
from hypothesis import given
from hypothesis import strategies as st

from atoll.infer.request import Step
from atoll.serve.answers import CompletionReader
from atoll.serve.metrics import Metrics
from atoll.serve.text import Output, StopStrings, Token, TokenNames

letters = st.text("abc", max_size=20)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def cut(text, stops):
    """`text` up to the first stop, by definition."""
    return text[: min((at for s in stops if (at := text.find(s)) >= 0), default=len(text))]


@given(letters, stops, st.data())
def test_a_stop_string_is_found_wherever_the_text_is_split(text, stops, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    reader, out = StopStrings(stops), []
    for part in parts:
        out.append(reader.feed(part))
        assert cut(text, stops).startswith("".join(out))  # nothing of a stop is ever given out
    out.append(reader.close())
    assert "".join(out) == cut(text, stops)
    assert (reader.hit is not None) == any(s in text for s in stops)


@given(letters, stops)
def test_tokens_come_with_their_text(text, stops):
    output, shown, tokens = Output(stops), "", []
    for i, c in enumerate(text):
        for piece, more in [output.feed(c, [Token(i, -1.0, offset=output.decoded)])]:
            shown, tokens = shown + piece, tokens + more
            assert len(tokens) <= len(shown)  # none runs ahead of its text
    piece, more = output.close()
    assert [t.id for t in tokens + more] == list(range(len(shown + piece)))


def test_an_unfinished_character_is_given_out_at_the_end():
    ids = TOKENIZER.encode("a😀")
    reader, text = CompletionReader(TOKENIZER), ""
    for i, id in enumerate(ids[:-1]):
        text += reader.feed(Step(0, id, finish="length" if i == len(ids) - 2 else None))[0]
    assert text == "a\ufffd"


@given(st.text(max_size=20))
def test_the_bytes_of_tokens_join_to_the_text(text):
    names = TokenNames(TOKENIZER)
    assert b"".join(names.bytes(i) for i in TOKENIZER.encode(text)) == text.encode()


def test_no_two_ordinary_tokens_share_a_name():
    names = TokenNames(TOKENIZER)
    ordinary = [i for i in range(TOKENIZER.vocab_size) if not TOKENIZER.is_special(i)]
    assert len({names.text(i) for i in ordinary}) == len(ordinary)


def test_metrics_are_prometheus_text():
    metrics = Metrics(lambda: {"running": 3, "name": "no number"})
    metrics.requests.add(endpoint='a"b\\c\nd', status="200")
    metrics.first_token.observe(0.02)
    metrics.first_token.observe(1000)
    lines = metrics.text(live=2).splitlines()
    assert r'atoll_requests_total{endpoint="a\"b\\c\nd",status="200"} 1' in lines
    assert 'atoll_time_to_first_token_seconds_bucket{le="0.025"} 1' in lines
    assert 'atoll_time_to_first_token_seconds_bucket{le="+Inf"} 2' in lines
    assert "atoll_time_to_first_token_seconds_count 2" in lines
    assert "atoll_engine_running 3" in lines
    assert "atoll_live 2" in lines
    assert not any("name" in line for line in lines if not line.startswith("#") and "engine" in line)
    named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    samples = [line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")]
    assert all(any(s == n or s in (n + "_bucket", n + "_sum", n + "_count") for n in named) for s in samples)
