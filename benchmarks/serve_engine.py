"""The engine on a CPU: the first token after load, decoding at 2K tokens against a loop without a cache, a kept prefix against none.

python benchmarks/serve_engine.py [--model tiny] [--threads 2] [--tokens 2048] [--out engine_cpu.json]

The model is a preset with random weights, or a folder. Prints one JSON object; times in milliseconds, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import atoll
from atoll.infer.engine import Engine, EngineSettings
from atoll.infer.request import Request, Sampling

GREEDY = Sampling(temperature=0)


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times), 2)


def prompt(model: Any, length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine(model: Any, **more: Any) -> Engine:
    return Engine(model, settings=EngineSettings(**more))


def first_token(e: Engine, tokens: list[int]) -> None:
    e.submit(Request(tokens, 2, GREEDY))
    while not e.step():
        pass


def after_load(model: Any) -> dict[str, float]:
    """To the first token: of the process's first request, then of others, each with an engine that has seen nothing."""
    cold = milliseconds(lambda: first_token(engine(model), prompt(model, 16)), 1)
    return {"first": cold} | {
        f"{n} tokens": milliseconds(lambda n=n: first_token(engine(model), prompt(model, n)), 5) for n in (16, 64, 256)
    }


def decoding(model: Any, length: int, count: int = 24) -> dict[str, float]:
    """A token at `length` tokens: by the engine, one sequence and eight, and by a whole forward pass a token."""
    result = {}
    for rows in (1, 8):
        e = engine(model, slots=rows, max_length=2 * length)
        for seed in range(rows):
            e.submit(Request(prompt(model, length, seed), length, GREEDY))
        while len(e.scheduler.decoding()) < rows:
            e.step()
        result[f"engine, {rows} sequences" if rows > 1 else "engine"] = round(milliseconds(e.step, count) / rows, 3)
    ids = torch.tensor([prompt(model, length)])
    with torch.no_grad():
        result["no cache"] = milliseconds(lambda: model(ids, logits=torch.tensor([length - 1])).logits.argmax(), 3)
    result["no cache over engine"] = round(result["no cache"] / result["engine"], 1)
    return result


def kept_prefix(model: Any, length: int) -> dict[str, float]:
    """To the first token of a prompt read before but for its last 32 tokens, and of one never seen."""
    e = engine(model, max_length=2 * length)
    stem = prompt(model, length)
    first_token(e, stem)
    tails = iter(range(1, 99))
    found = milliseconds(lambda: first_token(e, stem + prompt(model, 32, next(tails))), 5)
    assert e.stats()["prefix_hits"] == 5
    cold = milliseconds(lambda: first_token(engine(model, max_length=2 * length), stem + prompt(model, 32, 1)), 3)
    return {"kept": found, "cold": cold, "cold over kept": round(cold / found, 1)}


def measure(name: str, length: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = atoll.load(name).eval()
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": name,
        "unit": "ms",
        "first token after load": after_load(model),
        f"a token at {length} tokens": decoding(model, length),
        f"first token after a prefix of {length} tokens": kept_prefix(model, length),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = json.dumps(measure(options.model, options.tokens), indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
