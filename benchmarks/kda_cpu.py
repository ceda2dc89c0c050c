"""KDA on the CPU: the chunked path against the token recurrence, and the training shape of `tiny`. Prints one JSON object.

python benchmarks/kda_cpu.py [--threads 2] [--out benchmarks/results/kda_cpu.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from atoll.ops.conv import short_conv
from atoll.ops.kda import kda
from atoll.ops.kda.chunk import kda_chunk
from atoll.ops.norm import gated_rms_norm


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 3)


def inputs(length: int, heads: int, width: int, value: int) -> list[torch.Tensor]:
    shapes = [(1, length, heads, d) for d in (width, width, value, width)] + [(1, length, heads), (heads,), (heads, width)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def both_ways(tensors: list[torch.Tensor], **options: object) -> Callable[[], object]:
    upstream = torch.randn_like(tensors[2])

    def run() -> object:
        o, _ = kda(*tensors, **options)  # type: ignore[arg-type]
        return torch.autograd.grad(o, tensors, upstream)

    return run


def documents(length: int) -> list[int]:
    """About 30 documents of 100 to 512 tokens."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, edges[-1] + int(torch.randint(100, 513, ()))))
    return edges


def peak_megabytes(run: Callable[[], object]) -> float:
    """How far the process's high-water mark rises over the run."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)


def chunk_sizes(length: int, heads: int, width: int, edges: list[int] | None) -> dict[str, float]:
    tensors = inputs(length, heads, width, width)
    upstream = torch.randn_like(tensors[2])
    result = {}
    for size in (16, 32, 64):

        def run(size: int = size) -> object:
            o, _ = kda_chunk(*tensors, -5.0, width**-0.5, None, edges, size=size)
            return torch.autograd.grad(o, tensors, upstream)

        result[str(size)] = milliseconds(run, 7)
    return result


def measure() -> dict[str, object]:
    torch.manual_seed(0)
    plain = inputs(2048, 4, 64, 64)
    recurrent, chunk = milliseconds(both_ways(plain, backend="recurrent"), 2), milliseconds(both_ways(plain, backend="chunk"), 9)
    edges = documents(8192)
    cu = torch.tensor(edges)
    tiny = inputs(8192, 4, 32, 32)
    x, weight = torch.randn(1, 8192, 384, requires_grad=True), torch.randn(384, 1, 4, requires_grad=True)
    head, gate, scale = (
        torch.randn(1, 8192, 4, 32, requires_grad=True),
        torch.randn(1, 8192, 4, 32, requires_grad=True),
        torch.ones(32, requires_grad=True),
    )
    short = torch.arange(0, 8193, 8)
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "unit": "ms, forward and backward, float32, median",
        "1x2048x4x64": {"recurrent": recurrent, "chunk": chunk, "speedup": round(recurrent / chunk, 1)},
        "packed 1x8192x4x32": {
            "documents": len(edges) - 1,
            "kda": milliseconds(both_ways(tiny, backend="chunk", cu_seqlens=cu), 9),
            "kda, 1024 documents of 8": milliseconds(both_ways(tiny, backend="chunk", cu_seqlens=short), 5),
            "conv 384 channels": milliseconds(lambda: torch.autograd.grad(short_conv(x, weight, cu_seqlens=cu)[0].sum(), (x, weight)), 9),
            "gated norm": milliseconds(lambda: torch.autograd.grad(gated_rms_norm(head, scale, gate).sum(), (head, scale, gate)), 9),
        },
        "chunk size": {
            "packed 1x8192x4x32": chunk_sizes(8192, 4, 32, edges),
            "1x2048x4x64": chunk_sizes(2048, 4, 64, None),
            "1x2048x4x128": chunk_sizes(2048, 4, 128, None),
        },
        "peak MiB over the tensors given, 1xTx4x64": {
            str(length): peak_megabytes(both_ways(inputs(length, 4, 64, 64), backend="chunk")) for length in (8192, 16384, 32768)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = json.dumps(measure(), indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
