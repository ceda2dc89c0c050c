"""Routed experts on a CPU: batched tiles against a Python loop over experts. Prints one JSON object a case.

python benchmarks/experts_cpu.py [--threads 2] [--repeat 5] [--no-loop] [--only N]
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from atoll.ops.experts import experts_mlp, experts_mlp_reference
from atoll.ops.routing import quantile_bias, route

CASES = {  # tokens, k, experts, latent, inner, skew of the scores, quantile-balanced first
    "train, balanced": (8192, 16, 896, 64, 56, 0.5, True),
    "train, first steps (MaxVio 10)": (8192, 16, 896, 64, 56, 0.5, False),
    "train, 2048 tokens": (2048, 16, 896, 64, 56, 0.5, True),
    "8 experts, top 2": (8192, 2, 8, 64, 56, 0.5, True),
    "decode, 64 tokens": (64, 16, 896, 64, 56, 0.5, False),
    "decode, 1 token": (1, 16, 896, 64, 56, 0.5, False),
}


def inputs(tokens: int, k: int, experts: int, latent: int, inner: int, skew: float, balanced: bool) -> tuple[list, float]:
    torch.manual_seed(0)
    scores = torch.sigmoid(torch.randn(tokens, experts) + skew * torch.randn(experts))
    bias = quantile_bias(scores, torch.zeros(experts), k) if balanced else torch.zeros(experts)
    if balanced:  # a fresh batch, as in training: what is left of the imbalance is sampling noise
        torch.manual_seed(1)
        scores = torch.sigmoid(torch.randn(tokens, experts) + torch.logit(scores).mean(0))
    ids, weights, _ = route(scores, bias, k)
    load = torch.bincount(ids.view(-1), minlength=experts)
    shapes = ((experts, inner, latent), (experts, inner, latent), (experts, latent, inner))
    x = torch.randn(tokens, latent, requires_grad=True)
    return [x, ids, weights.requires_grad_(), *(torch.randn(s, requires_grad=True) for s in shapes)], float(
        load.max() / load.float().mean() - 1
    )


def milliseconds(run, repeat: int) -> float:
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return round(1e3 * min(times), 2)


def measure(f, arguments: list, repeat: int) -> tuple[float, float]:
    leaves = [a for a in arguments if a.requires_grad]
    grad = torch.randn_like(arguments[0])

    def forward() -> None:
        with torch.no_grad():
            f(*arguments)

    def both() -> None:
        torch.autograd.grad(f(*arguments), leaves, grad)

    return milliseconds(forward, repeat), milliseconds(both, repeat)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-loop", action="store_true", help="measure the tiles only")
    parser.add_argument("--only", type=int, default=None, help="number of the one case to measure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for number, (name, case) in enumerate(CASES.items()):
        if options.only not in (None, number):
            continue
        arguments, violation = inputs(*case)
        forward, both = measure(experts_mlp, arguments, options.repeat)
        row = {"case": name, "max_vio": round(violation, 2), "forward_ms": forward, "forward_backward_ms": both, "threads": options.threads}
        if not options.no_loop:
            row["loop_forward_ms"], row["loop_forward_backward_ms"] = measure(experts_mlp_reference, arguments, 1)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
