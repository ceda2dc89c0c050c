"""Several prompts at once, by the engine: what `atoll sample` prints of more than one, or for a program to read."""

from __future__ import annotations

import dataclasses
from typing import Any

from atoll.config import ModelConfig
from atoll.data.chat import render, tokenize
from atoll.data.tokenizer import Tokenizer, check_fits
from atoll.infer.chat_parser import parse
from atoll.infer.engine import Engine, EngineSettings
from atoll.infer.request import Answer, Request, Sampling
from atoll.infer.stream import TextStream

SLOTS = 16


def answer_all(
    model: Any,
    tokenizer: Tokenizer,
    prompts: list[str],
    tokens: int,
    sampling: Sampling,
    chat: bool = False,
    thinking: bool = True,
) -> list[dict[str, Any]]:
    """An answer to each of `prompts`: the start of a document to continue, or with `chat` a user's message. Prompt i draws with seed + i.

    Each has "prompt", "text", "ids", "logprobs" and "finish" ("stop" or "length"); with `chat` also "message", as OpenAI writes one, and
    whether it is "malformed". Raises `UserError` for settings that cannot be and for a tokenizer that does not fit the model.
    """
    config: ModelConfig = model.config
    check_fits(tokenizer, config, "tokenizer.json")
    ids = [_ids(prompt, tokenizer, config, chat, thinking) for prompt in prompts]
    ends = {config.eos_token_id} | ({tokenizer.special["<|end_of_msg|>"]} if chat else set())
    longest = max((len(i) for i in ids), default=0) + max(tokens, 0)
    engine = Engine(model, settings=EngineSettings(slots=min(max(len(ids), 1), SLOTS), max_length=max(longest, 1)))
    seeds = [None if sampling.seed is None else sampling.seed + i for i in range(len(ids))]
    draws = [dataclasses.replace(sampling, seed=seed) for seed in seeds]
    requests = [Request(prompt, tokens, each, stop_ids=frozenset(ends)) for prompt, each in zip(ids, draws, strict=True)]
    found = []
    for prompt, answer in zip(prompts, engine.run(requests), strict=True):
        found.append(_told(prompt, answer, tokenizer))
        if chat:
            parsed = parse(answer.ids, tokenizer, thinking)
            found[-1] |= {"message": parsed.as_message(), "malformed": parsed.malformed}
    return found


def _ids(prompt: str, tokenizer: Tokenizer, config: ModelConfig, chat: bool, thinking: bool) -> list[int]:
    if not chat:
        return [config.bos_token_id, *tokenizer.encode(prompt)]
    return tokenize(render([{"role": "user", "content": prompt}], None, thinking, add_generation_prompt=True), tokenizer)[0]


def _told(prompt: str, answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    stream = TextStream(tokenizer)
    text = "".join(stream.feed(id) for id in answer.ids if not tokenizer.is_special(id)) + stream.close()
    return {"prompt": prompt, "text": text, "ids": answer.ids, "logprobs": answer.logprobs, "finish": answer.finish}


def show(found: dict[str, Any]) -> str:
    """Answers for a person: each prompt with what follows it, or the assistant's message under it, a line between."""
    parts = []
    for answer in found["answers"]:
        message = answer.get("message")
        if message is None:
            parts.append(answer["prompt"] + answer["text"])
            continue
        lines = [f"> {answer['prompt']}"]
        lines += [f"(thinks) {message['reasoning']}"] if message.get("reasoning") else []
        lines += [f"(calls {call['function']['name']}) {call['function']['arguments']}" for call in message.get("tool_calls", [])]
        parts.append("\n".join([*lines, message["content"]]))
    return "\n----\n".join(parts)
