"""Requests that cannot be: each gets an error of OpenAI's shape that names the field, and none reaches the engine."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Scripted, served, written

SAY = [{"role": "user", "content": "x"}]
CHAT, TEXT, IDS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def asked():
    engine = Scripted(lambda request: written({"content": "hi"}))
    with served(engine, max_schema=2000, max_body=100_000) as s, httpx.Client(base_url=s.url, timeout=30) as client:

        def ask(path, body):
            before = len(engine.requests)
            raw = body if isinstance(body, (str, bytes)) else json.dumps(body)
            answer = client.post(path, content=raw, headers={"content-type": "application/json"})
            return answer, len(engine.requests) - before

        yield ask


def image(url):
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def form(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


CASES = [
    (CHAT, "{", 400, None, "not JSON"),
    (CHAT, '{"messages": [1, NaN]}', 400, None, ""),
    (CHAT, "[]", 400, None, "dictionary"),
    (CHAT, '{"messages": ' + "[" * 20_000 + "]" * 20_000 + "}", 400, None, ""),
    (CHAT, {}, 400, "messages", ""),
    (CHAT, {"messages": []}, 400, "messages", ""),
    (CHAT, {"messages": "hi"}, 400, "messages", ""),
    (CHAT, {"messages": [7]}, 400, "messages[0]", "object"),
    (CHAT, {"messages": [{"role": "usr", "content": "x"}]}, 400, "messages[0].role", "did you mean 'user'"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", ""),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages[0].content", "surrogate"),
    (CHAT, {"messages": SAY, "model": "other"}, 404, "model", "is served here"),
    (CHAT, {"messages": SAY, "n": 0}, 400, "n", ""),
    (CHAT, {"messages": SAY, "n": -1}, 400, "n", ""),
    (CHAT, {"messages": SAY, "n": 10**9}, 400, "n", "128"),
    (CHAT, {"messages": SAY, "n": 100}, 400, "n", "64 answers at most"),
    (CHAT, {"messages": SAY, "max_tokens": -5}, 400, "max_tokens", ""),
    (CHAT, {"messages": SAY, "max_tokens": 5000}, 400, "messages", "maximum context length is 2048"),
    (CHAT, {"messages": SAY, "temperature": -1}, 400, "temperature", ""),
    (CHAT, '{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, "temperature", "finite"),
    (CHAT, {"messages": SAY, "top_p": 0}, 400, "top_p", ""),
    (CHAT, {"messages": SAY, "logit_bias": {"a": 1}}, 400, None, ""),
    (CHAT, {"messages": SAY, "logit_bias": {"1": 1e9}}, 400, None, ""),
    (CHAT, {"messages": SAY, "seed": 2**70}, 400, "seed", ""),
    (CHAT, {"messages": SAY, "top_logprobs": 3}, 400, "top_logprobs", "logprobs"),
    (CHAT, {"messages": SAY, "logprobs": True, "top_logprobs": 500}, 400, "top_logprobs", "20 at most"),
    (CHAT, {"messages": SAY, "stop": [""]}, 400, None, ""),
    (CHAT, {"messages": SAY, "stop": ["a"] * 100}, 400, None, ""),
    (CHAT, {"messages": SAY, "tools": [{"type": "function"}]}, 400, "tools[0]", "function.name"),
    (CHAT, {"messages": SAY, "tool_choice": "required"}, 400, "tool_choice", "no tools"),
    (CHAT, {"messages": SAY, "tool_choice": "perhaps"}, 400, "tool_choice", ""),
    (CHAT, {"messages": SAY, "response_format": {"type": "xml"}}, 400, "response_format.type", ""),
    (CHAT, {"messages": SAY, "response_format": form({"type": "odd"})}, 400, "response_format", ""),
    (CHAT, {"messages": SAY, "response_format": form({"enum": ["x" * 3000]})}, 400, "response_format", "2,000"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role", "tool_calls"),
    (CHAT, image(PIXEL), 400, "messages[0].content[0]", "no vision tower"),
    (CHAT, {"messages": SAY, "reasoning_effort": "extreme"}, 400, "reasoning_effort", ""),
    (TEXT, {"prompt": -1}, 400, None, ""),
    (TEXT, {"prompt": []}, 400, "prompt", "empty"),
    (TEXT, {"prompt": [[]]}, 400, "prompt", "empty"),
    (TEXT, {"prompt": [-1]}, 400, None, ""),
    (TEXT, {"prompt": [400]}, 400, "prompt", "0 to 399"),
    (TEXT, {"prompt": [[1, 2], [10**30]]}, 400, None, ""),
    (TEXT, {"prompt": "\ud800"}, 400, None, ""),
    (TEXT, {"prompt": ["a"] * 65}, 400, "n", "64 answers"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "echo"),
    (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix", ""),
    (TEXT, {"prompt": "a", "best_of": 3}, 400, "best_of", ""),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs", "20 at most"),
    (IDS, {"token_ids": []}, 400, "token_ids", ""),
    (IDS, {"token_ids": [1, -1]}, 400, None, ""),
    (IDS, {"token_ids": [1, 5000]}, 400, "token_ids", "0 to 399"),
    (IDS, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, 400, "sampling_params.max_tokens", ""),
    ("/tokenize", {}, 400, "prompt", ""),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens", "0 to 399"),
    ("/v1/nothing", {}, 404, None, "no such endpoint"),
    (TEXT, "x" * 200_000, 413, None, "larger than"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), CASES, ids=range(len(CASES)))
def test_a_wrong_request_is_answered_by_name(asked, path, body, status, param, message):
    answer, reached = asked(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert "\n" not in error["message"]
    if param is not None:
        assert (error["param"] or "").startswith(param)
    assert reached == 0


LONG = "n" * 50_000


@pytest.mark.parametrize(
    "body",
    [
        {"messages": SAY, "model": LONG},
        {"messages": SAY, "logit_bias": {LONG: 1}},
        {"messages": SAY, "max_tokens": int("9" * 4000)},
        {"messages": [{"role": LONG, "content": "x"}]},
        {"messages": SAY, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"function": {"name": LONG}}},
    ],
)
def test_an_error_does_not_send_back_what_was_sent(asked, body):
    answer, reached = asked(CHAT, body)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 1000
    assert reached == 0


def test_unknown_fields_are_passed_over(asked):
    answer, reached = asked(
        CHAT, {"messages": SAY, "service_tier": "auto", "store": False, "anything": {"else": 1}, "metadata": {"a": "b"}}
    )
    assert answer.status_code == 200
    assert reached == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "messages",
    "prompt",
    "token_ids",
    "sampling_params",
    "n",
    "stop",
    "tools",
    "tool_choice",
    "response_format",
    "logit_bias",
    "seed",
]
FIELDS += ["stream_options", "max_tokens", "temperature", "chat_template_kwargs", "logprobs", "tokens", "model"]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([CHAT, TEXT, IDS, "/tokenize", "/detokenize"]),
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
    st.booleans(),
)
def test_no_request_makes_the_server_fail(asked, path, body, sound):
    if sound:
        body = {"messages": SAY, "prompt": "a", "token_ids": [1], **body}
    answer, _ = asked(path, body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
