"""One training step (forward, backward) of a row up to a million tokens, a segment at a time. Checks first; prints tables, writes JSON.

    python benchmarks/long_step.py [--out long_step.json] [--parts check,attention,step,offload] [--smoke]

The model: the shapes of preset 7b-a310m at width 704, 3.3 B parameters, 168 M active, 9 KDA and 3 MLA layers, bfloat16, random weights, no
optimizer. Every segment is computed three times forward (the sweep that keeps what enters it, the pass with gradients, each layer's
recomputation) and once backward. `--smoke` runs all parts at tiny shapes on the CPU, for their logic.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from atoll.config import load_config
from atoll.model import Model
from atoll.ops.prefix_attention import prefix_attention
from atoll.train.segments import Segments, Weights, accumulate_rows

SHAPE = {
    "model.hidden_size": 704,
    "model.kda_num_heads": 10,
    "model.num_attention_heads": 10,
    "model.routed_expert_hidden_size": 352,
    "model.moe_intermediate_size": 304,
    "model.intermediate_size": 3296,
}
SMALL = {"model.num_experts": 16, "model.num_experts_per_token": 2, "model.num_hidden_layers": 4, "model.vocab_size": 512}
BF16 = torch.bfloat16


def model_for(smoke: bool) -> Model:
    config = load_config("tiny", {**SMALL}) if smoke else load_config("7b-a310m", SHAPE)
    torch.manual_seed(0)
    model = Model(config.model, dtype=torch.float32 if smoke else BF16, device="cpu" if smoke else "cuda").train()
    model.gradient_checkpointing = True
    return model


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def text(model: Model, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, model.config.vocab_size - 8, (1, tokens), generator=generator).to(model.device)
    return ids, torch.tensor([0, tokens], device=model.device)


def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    error = (a.double() - b.double()).square().mean().sqrt()
    return float(error / b.double().square().mean().sqrt().clamp_min(1e-30))


def step(model: Model, tokens: int, segment: int, offload: bool = False) -> dict[str, Any]:
    """Seconds, peak memory and loss of one accumulated row."""
    ids, bounds = text(model, tokens)
    model.zero_grad(set_to_none=True)
    device = model.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    begun = wait(device)
    loss = accumulate_rows(model, ids, ids, bounds, Segments(tokens, segment, offload), Weights(tokens - 1, tokens))
    seconds = wait(device) - begun
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    found = {"tokens": tokens, "segment": segment, "offload": offload, "seconds": round(seconds, 3), "loss": round(float(loss), 4)}
    return found | {"ns_per_token": round(seconds / tokens * 1e9), "peak_gib": peak and round(peak, 2)}


def check(model: Model, tokens: int, segment: int) -> dict[str, Any]:
    """Gradients of a segmented row against the whole row's, the widest ratio over the parameters that routing cannot flip."""
    ids, bounds = text(model, tokens)
    model.zero_grad(set_to_none=True)
    out = model(ids, labels=ids, cu_seqlens=bounds)
    out.loss.backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and ".experts." not in n and ".gate." not in n}
    model.zero_grad(set_to_none=True)
    loss = accumulate_rows(model, ids, ids, bounds, Segments(tokens, segment), Weights(tokens - 1, tokens))
    mine = dict(model.named_parameters())
    ratios = {n: ratio(mine[n].grad, g) for n, g in whole.items()}  # pyright: ignore[reportArgumentType]
    worst = max(ratios, key=lambda n: ratios[n])
    return {"loss": float(out.loss), "segmented": float(loss), "worst": worst, "ratio": round(ratios[worst], 4)}


def attention(queries: int, keys: int, heads: int, smoke: bool) -> dict[str, Any]:
    """Forward and backward of the last segment's attention, FLOPs counted as 2 a multiply-add, backward 2.5 times forward."""
    card: dict[str, Any] = {"device": "cpu", "dtype": torch.float32} if smoke else {"device": "cuda", "dtype": BF16}
    q, k, v = (torch.randn(1, n, heads, w, **card, requires_grad=True) for n, w in ((queries, 192), (keys, 192), (keys, 128)))
    grad = torch.randn(1, queries, heads, 128, **card)
    pairs = queries * (keys - queries) + queries * queries / 2
    flops = 2 * pairs * heads * (192 + 128)
    times = []
    for _ in range(3):
        begun = wait(q.device)
        out = prefix_attention(q, k, v, scale=192**-0.5)
        between = wait(q.device)
        torch.autograd.grad(out, (q, k, v), grad)
        times.append((between - begun, wait(q.device) - between))
    forward, backward = (sorted(t)[1] for t in zip(*times, strict=True))
    return {
        "queries": queries,
        "keys": keys,
        "forward_ms": round(forward * 1e3, 2),
        "backward_ms": round(backward * 1e3, 2),
        "forward_tflops": round(flops / forward / 1e12, 1),
        "both_tflops": round(3.5 * flops / (forward + backward) / 1e12, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("long_step.json"))
    parser.add_argument("--parts", default="check,attention,step,offload")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    unit = 64 if args.smoke else 65536
    lengths = [unit // 8, unit, 4 * unit, 16 * unit]
    parts = args.parts.split(",")
    found: dict[str, Any] = {"torch": torch.__version__, "device": "cpu" if args.smoke else torch.cuda.get_device_name()}

    def keep(name: str, value: Any) -> None:
        print(f"{name}: {json.dumps(value)}", flush=True)
        found.setdefault(name, []).append(value)
        args.out.write_text(json.dumps(found, indent=1))  # after every line: a run that is cut off keeps what it has

    if "attention" in parts:
        for keys in lengths[1:]:
            keep("attention", attention(unit, keys + unit, 10 if not args.smoke else 2, args.smoke))
    model = model_for(args.smoke)
    if "check" in parts:
        keep("check", check(model, unit // 4, unit // 16))
        worst = found["check"][-1]
        if not worst["ratio"] < 0.2 or abs(worst["loss"] - worst["segmented"]) > 0.05:
            sys.exit(f"the segmented row is not the whole row: {worst}")
    if "step" in parts:
        step(model, lengths[0], unit)  # kernels are compiled here
        for tokens in lengths:
            keep("step", step(model, tokens, unit))
    if "offload" in parts:
        keep("offload", step(model, 4 * unit, unit, offload=True))


if __name__ == "__main__":
    main()
