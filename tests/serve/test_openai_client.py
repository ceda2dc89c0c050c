"""The `openai` package, as its users call it, against a running server."""

from __future__ import annotations

import json

import openai
import pytest
import torch
from conversations import TOKENIZER, TOOLS
from serving import CLOSE, END, Scripted, served, small_engine, small_model, written

from atoll.data.chat import render, tokenize
from atoll.infer.request import Request, Sampling

ASK = [{"role": "user", "content": "What is 2 + 3?"}]
CHAT = {"model": "atoll", "messages": ASK, "max_tokens": 24, "seed": 5}
STOPS = frozenset({END, 1})
HURRY = {str(CLOSE): 100}  # close every text at once


def prompt_of(messages, **options):
    return tokenize(render(messages, add_generation_prompt=True, **options), TOKENIZER)[0]


def teacher(ids):
    """Log-probability of each token after the first, by one forward pass of the same model."""
    with torch.no_grad():
        logprobs = small_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]


def joined(stream):
    """A stream's chunks as one message, its tool calls put together, and its last usage."""
    said, calls, finish, usage = {"content": "", "reasoning": ""}, {}, None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            said["content"] += choice.delta.content or ""
            said["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                held = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                held["arguments"] += call.function.arguments or ""
    return said, [calls[i] for i in sorted(calls)], finish, usage


def test_models_say_how_long_a_context_may_be(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("atoll", 2048)


def test_chat_is_what_the_engine_alone_says(client):
    answer = client.chat.completions.create(**CHAT, temperature=0, extra_body={"return_token_ids": True})
    prompt = prompt_of(ASK)
    assert answer.prompt_token_ids == prompt
    (alone,) = small_engine().run([Request(prompt, 24, Sampling(temperature=0), STOPS)])
    assert answer.choices[0].token_ids == alone.ids
    assert answer.choices[0].finish_reason == alone.finish
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(alone.ids))


def test_a_stream_joins_to_the_whole_answer(client):
    whole = client.chat.completions.create(**CHAT, logit_bias={str(CLOSE): 6}).choices[0]
    stream = client.chat.completions.create(**CHAT, logit_bias={str(CLOSE): 6}, stream=True, stream_options={"include_usage": True})
    said, _, finish, usage = joined(stream)
    assert said["content"] == (whole.message.content or "")
    assert said["reasoning"] == whole.message.reasoning
    assert finish == whole.finish_reason
    assert usage.completion_tokens > 0


def test_n_answers_have_seeds_of_their_own(client):
    def texts(**more):
        return [c.message.reasoning for c in client.chat.completions.create(**{**CHAT, **more}).choices]

    three = texts(n=3)
    assert len(set(three)) == 3
    assert three == [texts(seed=5)[0], texts(seed=6)[0], texts(seed=7)[0]]


def test_streams_of_several_answers_are_told_apart_by_index(client):
    whole = client.chat.completions.create(**CHAT, n=2).choices
    found = ["", ""]
    for chunk in client.chat.completions.create(**CHAT, n=2, stream=True):
        for choice in chunk.choices:
            found[choice.index] += getattr(choice.delta, "reasoning", None) or ""
    assert found == [c.message.reasoning for c in whole]


def test_logprobs_of_chat_are_the_models_own_and_join_to_the_text(client):
    bias = {str(CLOSE): -100}  # one channel to the end
    thought = client.chat.completions.create(
        **CHAT, logit_bias=bias, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True, "min_p": 0.0}
    )
    choice = thought.choices[0]
    entries = choice.logprobs.reasoning
    expected = teacher(thought.prompt_token_ids + choice.token_ids)[len(thought.prompt_token_ids) - 1 :]
    plain = [v for v, i in zip(expected, choice.token_ids, strict=True) if not TOKENIZER.is_special(i)]
    assert [e["logprob"] for e in entries] == pytest.approx(plain[: len(entries)], abs=1e-4)
    assert len(entries) >= len(plain) - 3  # a character that is cut off has no text yet
    assert b"".join(bytes(e["bytes"]) for e in entries).decode("utf-8", "replace") == choice.message.reasoning
    assert all(len(e["top_logprobs"]) == 3 for e in entries)


def test_content_has_logprobs_of_content_alone():
    engine = Scripted(lambda request: written({"reasoning": "hm hm", "content": "Héllo 😀!"}))
    with served(engine) as s, openai.OpenAI(base_url=s.url + "/v1", api_key="x", max_retries=0) as client:
        choice = client.chat.completions.create(model="atoll", messages=ASK, logprobs=True).choices[0]
        chunks = client.chat.completions.create(model="atoll", messages=ASK, logprobs=True, stream=True)
        streamed = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content or []]
    for entries in (choice.logprobs.content, streamed):
        assert b"".join(bytes(e.bytes) for e in entries).decode() == choice.message.content == "Héllo 😀!"
    assert (choice.message.reasoning, choice.finish_reason) == ("hm hm", "stop")


def test_tools_are_called_with_arguments_of_their_types_and_answered(client):
    ask = {"model": "atoll", "tools": TOOLS, "tool_choice": "required", "temperature": 0, "logit_bias": HURRY, "max_tokens": 400}
    answer = client.chat.completions.create(**ask, messages=ASK).choices[0]
    assert answer.finish_reason == "tool_calls"
    calls = answer.message.tool_calls
    assert {c.function.name for c in calls} <= {"weather", "add"}
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert isinstance(arguments["city"], str)
            assert isinstance(arguments.get("days", 1), int)
    _, streamed, finish, _ = joined(client.chat.completions.create(**ask, messages=ASK, stream=True))
    assert finish == "tool_calls"
    assert [(c["name"], json.loads(c["arguments"])) for c in streamed] == [
        (c.function.name, json.loads(c.function.arguments)) for c in calls
    ]
    results = [{"role": "tool", "tool_call_id": c.id, "content": "5"} for c in calls]
    again = client.chat.completions.create(model="atoll", messages=[*ASK, answer.message, *results], tools=TOOLS, max_tokens=4)
    assert again.choices[0].finish_reason == "length"


def test_a_named_tool_is_called_once(client):
    choice = {"type": "function", "function": {"name": "add"}}
    answer = client.chat.completions.create(
        model="atoll", messages=ASK, tools=TOOLS, tool_choice=choice, logit_bias=HURRY, max_tokens=400, temperature=0
    ).choices[0]
    assert [c.function.name for c in answer.message.tool_calls] == ["add"]


def test_a_response_follows_its_schema(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="atoll", messages=ASK, response_format=form, logit_bias=HURRY, max_tokens=300, seed=seed,
            extra_body={"chat_template_kwargs": {"thinking": False}},
        ).choices[0]  # fmt: skip
        assert answer.finish_reason == "stop"
        person = json.loads(answer.message.content)
        assert set(person) == {"name", "age"}
        assert len(person["name"]) <= 5
        assert person["age"] in range(10)


def test_a_stop_string_is_found_across_tokens_and_left_out():
    text = "one two STOP three" + " and on" * 400
    with served(Scripted(lambda request: written({"reasoning": "STOP", "content": text}), pace=0.002)) as s:
        client = openai.OpenAI(base_url=s.url + "/v1", api_key="x", max_retries=0)
        for stop in ("STOP", ["nowhere", "two ST"], "STOP thr"):
            whole = client.chat.completions.create(model="atoll", messages=ASK, stop=stop, logprobs=True).choices[0]
            expected = text.partition(stop if isinstance(stop, str) else stop[1])[0]
            assert (whole.message.content, whole.finish_reason) == (expected, "stop")
            assert "".join(e.token for e in whole.logprobs.content).startswith(expected)
            said, _, finish, _ = joined(client.chat.completions.create(model="atoll", messages=ASK, stop=stop, stream=True))
            assert (said["content"], said["reasoning"], finish) == (expected, "STOP", "stop")
        s.until(lambda: s.service.runner.live == 0)
        assert len(s.engine.cancelled) == 6  # nothing is generated after a stop


# ---------------------------------------------------------------- completions


def test_a_text_is_continued(client):
    answer = client.completions.create(model="atoll", prompt="def parse", max_tokens=12, temperature=0)
    (alone,) = small_engine().run([Request([0, *TOKENIZER.encode("def parse")], 12, Sampling(temperature=0), frozenset({1}))])
    assert answer.choices[0].text == TOKENIZER.decode([i for i in alone.ids if not TOKENIZER.is_special(i)])
    stream = client.completions.create(model="atoll", prompt="def parse", max_tokens=12, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in stream) == answer.choices[0].text


def test_prompts_of_token_ids_are_scored_with_echo(client):
    prompts = [[0, 20, 30, 40, 50], [0, 60, 70]]
    answer = client.completions.create(model="atoll", prompt=prompts, max_tokens=1, temperature=0, echo=True, logprobs=1, seed=1234)
    assert [c.index for c in answer.choices] == [0, 1]
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        values = choice.logprobs.token_logprobs
        assert len(values) == len(prompt) + 1
        assert values[0] is None
        assert values[1:-1] == pytest.approx(teacher(prompt), abs=1e-4)
        assert all(max(top.values()) >= value for top, value in zip(choice.logprobs.top_logprobs[1:], values[1:], strict=True))


def test_a_prompt_is_scored_without_a_token_more(client):
    answer = client.completions.create(model="atoll", prompt=[0, 20, 30], max_tokens=0, echo=True, logprobs=2)
    assert answer.choices[0].logprobs.token_logprobs[1:] == pytest.approx(teacher([0, 20, 30]), abs=1e-4)
    assert answer.usage.completion_tokens == 0


def test_echo_and_offsets_tell_where_each_token_begins(client):
    text = "naïve 😀 and six words after"
    answer = client.completions.create(model="atoll", prompt=text, max_tokens=6, temperature=0, echo=True, logprobs=0).choices[0]
    assert answer.text.startswith("naïve 😀 and six words after")
    starts = answer.logprobs.text_offset
    assert starts == sorted(starts)
    names = answer.logprobs.tokens
    whole = [i for i, name in enumerate(names) if not name.startswith(("bytes:", "<|")) and not names[i - 1].startswith("bytes:")]
    assert len(whole) > 4
    for i in whole:
        assert answer.text[starts[i] : starts[i] + len(names[i])] == names[i]


def test_several_texts_with_several_answers_keep_their_order(client):
    answer = client.completions.create(model="atoll", prompt=["a", "b"], n=2, max_tokens=5, seed=1)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model="atoll", prompt="b", n=2, max_tokens=5, seed=1)
    assert [c.text for c in answer.choices[2:]] == [c.text for c in alone.choices]


# ---------------------------------------------------------------- errors


def test_errors_are_the_clients_own_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="'atoll' is served here"):
        client.chat.completions.create(model="gpt-4", messages=ASK)
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="atoll", prompt=[20] * 2040, max_tokens=20)
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(model="atoll", messages=[{"role": "user", "content": "x" * 200_000}])


def test_without_the_key_401():
    with served(Scripted(lambda request: written({"content": "hi"})), keys=("a-secret-key",)) as s:
        for wrong in ("another-key", "a-secret-ke", "a-secret-key2"):
            with pytest.raises(openai.AuthenticationError):
                openai.OpenAI(base_url=s.url + "/v1", api_key=wrong, max_retries=0).models.list()
        right = openai.OpenAI(base_url=s.url + "/v1", api_key="a-secret-key", max_retries=0)
        assert right.chat.completions.create(model="atoll", messages=ASK).choices[0].message.content == "hi"


def test_a_full_queue_is_429_with_a_time_to_come_back():
    engine = Scripted(lambda request: written({"content": "hi"}))
    engine.gate.clear()
    with served(engine, max_live=2) as s:
        client = openai.OpenAI(base_url=s.url + "/v1", api_key="x", max_retries=0)
        stream = client.chat.completions.create(model="atoll", messages=ASK, n=2, stream=True)
        with pytest.raises(openai.RateLimitError) as found:
            client.chat.completions.create(model="atoll", messages=ASK)
        assert int(found.value.response.headers["retry-after"]) >= 1
        engine.gate.set()
        assert joined(stream)[2] == "stop"
        assert client.chat.completions.create(model="atoll", messages=ASK).choices[0].message.content == "hi"
