"""Token ids in and out, as rollouts use them, and the tokenizer's endpoints."""

from __future__ import annotations

import base64
import io
import json
import threading

import httpx
import numpy as np
import pytest
import torch
from conversations import PLAIN, TOKENIZER, TOOLS
from serving import served, small_engine, small_model

from atoll.data.chat import render, tokenize
from atoll.infer.request import Request, Sampling

PROMPT = [0, 20, 30, 40, 50, 60]


def post(server, path, **body):
    answer = httpx.post(server.url + path, json=body, timeout=60)
    answer.raise_for_status()
    return answer


def generate(server, stream=False, **sampling):
    body = {"model": "atoll", "token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "temperature": 0, **sampling}}
    return post(server, "/inference/v1/generate", **body, stream=stream, return_routed_experts=True)


def test_ids_come_back_with_what_they_were_sampled_with(server):
    found = generate(server, logprobs=2, prompt_logprobs=1).json()
    (choice,) = found["choices"]
    request = Request(PROMPT, 8, Sampling(temperature=0), frozenset({1}), top_logprobs=2, prompt_logprobs=True, routing=True)
    (alone,) = small_engine().run([request])
    assert choice["token_ids"] == alone.ids
    assert choice["finish_reason"] == alone.finish
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in alone.ids]
    assert [e["logprob"] for e in choice["logprobs"]["content"]] == pytest.approx(alone.logprobs, abs=1e-5)
    assert choice["weight_versions"] == [0] * len(alone.ids)
    given = [None] + [entry[str(id)]["logprob"] for entry, id in zip(found["prompt_logprobs"][1:], PROMPT[1:], strict=True)]
    assert given[1:] == pytest.approx(alone.prompt_logprobs, abs=1e-5)


def test_routed_experts_are_those_of_a_forward_pass(server):
    choice = generate(server).json()["choices"][0]
    experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    ids = PROMPT + choice["token_ids"]
    model = small_model()
    with torch.no_grad():
        routing = model(torch.tensor([ids[:-1]])).routing
    assert experts.shape == (len(ids) - 1, len(model.moe_layers()), model.config.num_experts_per_token)
    assert experts.dtype == np.uint8
    for layer, expected in enumerate(routing):
        assert (np.sort(experts[:, layer]) == np.sort(expected.numpy())).mean() > 0.99  # a near tie may fall the other way


def test_a_stream_of_ids_joins_to_the_whole(server):
    whole = generate(server, logprobs=0, n=2, seed=4, temperature=1).json()["choices"]
    lines = [
        line.removeprefix("data: ") for line in generate(server, True, logprobs=0, n=2, seed=4, temperature=1).text.split("\n\n") if line
    ]
    assert lines[-1] == "[DONE]"
    ids = [[], []]
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            ids[choice["index"]] += choice["token_ids"]
    assert ids == [c["token_ids"] for c in whole]
    assert ids[0] != ids[1]


def test_tokens_of_a_text_and_back(server):
    found = post(server, "/tokenize", prompt="naïve <|open|> 😀", return_token_strs=True).json()
    assert found["tokens"] == [0, *TOKENIZER.encode("naïve <|open|> 😀")]
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 2048)
    assert len(found["token_strs"]) == found["count"]
    assert post(server, "/detokenize", tokens=found["tokens"]).json() == {"prompt": "<|bos|>naïve <|open|> 😀"}


def test_tokens_of_a_conversation_are_those_that_chat_reads(server):
    found = post(server, "/tokenize", messages=PLAIN, tools=TOOLS).json()["tokens"]
    assert found == tokenize(render(PLAIN, TOOLS, add_generation_prompt=True), TOKENIZER)[0]


def test_names_of_many_tokens_do_not_hold_up_the_others(monkeypatch):
    with served() as s:
        threads, text = set(), s.service.names.text

        def noted(id):
            threads.add(threading.current_thread())
            return text(id)

        monkeypatch.setattr(s.service.names, "text", noted)
        answer = httpx.post(s.url + "/tokenize", json={"prompt": "some words", "return_token_strs": True}).json()
        assert len(answer["token_strs"]) == answer["count"]
        assert threads
        assert s.thread not in threads  # which is the event loop's
