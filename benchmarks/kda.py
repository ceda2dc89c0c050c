"""KDA on a GPU: checks against float64, then times, many variants in one call. Prints tables, writes JSON.

    python benchmarks/kda.py [--out kda.json] [--parts check,time,variants,profile] [--variants 'scan_columns=32 scan_warps=4;…']

Variants are compiled side by side in processes of their own before anything is timed. Peers were measured in runs of their
own on the same kind of card (see kda_log.md), because fla's autotuning takes minutes a shape.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from atoll.ops.kda import triton_path as path
from atoll.ops.kda.chunk import kda_chunk

FULL = (1, 8192, 96, 128)  # the standard shape of the field: B, T, H, K = V
LIMITS = {
    torch.bfloat16: {
        **dict.fromkeys(("o", "state"), 0.005),
        **dict.fromkeys(("q", "k", "v", "s0"), 0.008),
        **dict.fromkeys(("g", "beta", "A_log", "dt_bias"), 0.02),
    },
    torch.float32: dict.fromkeys(("o", "state", "q", "k", "v", "g", "beta", "A_log", "dt_bias", "s0"), 2e-5),
}  # fmt: skip


def inputs(batch: int, length: int, heads: int, width: int, value: int, dtype: torch.dtype, regime: str = "random") -> list[torch.Tensor]:
    torch.manual_seed(1)
    shape = (batch, length, heads)
    made = [torch.randn(*shape, d, device="cuda") for d in (width, width, value, width)]
    beta = torch.randn(shape, device="cuda")
    if regime in ("high", "low", "mixed"):
        made[3] = {"high": torch.full_like(made[3], 50.0), "low": torch.full_like(made[3], -50.0), "mixed": made[3].sign() * 50}[regime]
    if regime in ("identical", "correlated"):
        made[1] = torch.ones_like(made[1]) + (0.3 * made[1] if regime == "correlated" else 0)
        made[3] = made[3] - 4.0
        beta = beta + 1.0
    if regime == "small":
        made[0], made[1] = made[0] * 1e-3, made[1] * 1e-3
    tensors = [x.to(dtype) for x in (*made, beta)]
    return [*tensors, 0.3 * torch.randn(heads, device="cuda"), torch.randn(heads, width, device="cuda") - 1.0]


def run_all(
    function: Callable,
    tensors: list[torch.Tensor],
    state: torch.Tensor | None,
    edges: list[int] | None,
    dtype: torch.dtype,
    **options: object,
):
    leaves = [
        x.to(dtype).requires_grad_() if i < 5 else x.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        for i, x in enumerate(tensors)
    ]
    state = None if state is None else state.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    o, final = function(*leaves, -5.0, tensors[1].shape[-1] ** -0.5, state, edges, **options)
    torch.manual_seed(2)
    ups = [torch.randn(x.shape, device="cuda").to(torch.bfloat16) for x in (o, final)]
    grads = torch.autograd.grad(
        (o, final), [*leaves, *([] if state is None else [state])], [u.to(x.dtype) for u, x in zip(ups, (o, final), strict=True)]
    )
    return dict(
        zip(("o", "state", "q", "k", "v", "g", "beta", "A_log", "dt_bias", "s0"), (o.detach(), final.detach(), *grads), strict=False)
    )


def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    """RMS of the error over RMS of the reference."""
    error = (a.double() - b).square().mean().sqrt()
    return float(error / b.square().mean().sqrt().clamp_min(1e-12)) if torch.isfinite(error) else float("inf")


def check_case(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, regime: str, edges: list[int] | None, with_state: bool, config: path.Config
) -> dict:
    tensors = inputs(*shape, dtype, regime)
    documents = shape[0] if edges is None else len(edges) - 1
    state = torch.randn(documents, shape[2], shape[3], shape[4], device="cuda") if with_state else None
    got = run_all(path.kda_triton, tensors, state, edges, dtype, config=config)
    again = run_all(path.kda_triton, tensors, state, edges, dtype, config=config)
    expected = run_all(kda_chunk, tensors, state, edges, torch.float64)
    errors = {key: ratio(got[key], expected[key]) for key in got}
    # a gradient that is all but zero (saturated gates) is measured against that of q instead
    scale = expected["q"].square().mean().sqrt()
    for key in ("g", "A_log", "dt_bias"):
        if expected[key].square().mean().sqrt() < 1e-3 * scale:
            errors[key] = float((got[key].double() - expected[key]).square().mean().sqrt() / scale)
    bad = [key for key, error in errors.items() if not error <= LIMITS[dtype][key]]
    same = all(torch.equal(got[key], again[key]) for key in got)
    worst = max(errors, key=lambda key: errors[key] / LIMITS[dtype][key])
    over = ", ".join(f"{key} {errors[key]:.1e}" for key in bad)
    verdict = "BAD" if bad or not same else "ok "
    print(
        f"{verdict} {name:58s} worst {worst} {errors[worst]:.1e} {over}{'' if same else ' NOT DETERMINISTIC'}",
        flush=True,
    )
    return {"case": name, "errors": errors, "bad": bad, "deterministic": same}


def check_causal(config: path.Config | None) -> dict:
    """Outputs before the cut, to the bit, when everything from the cut on changes."""
    a, b = inputs(1, 200, 4, 128, 128, torch.bfloat16), inputs(1, 200, 4, 128, 128, torch.bfloat16, "mixed")
    base, _ = path.kda_triton(*a, -5.0, 0.1, None, None, config=config)
    result = {}
    for cut in (1, 15, 16, 17, 40, 63, 64, 100, 199):
        mixed = [torch.cat((x[:, :cut], y[:, cut:]), 1) if x.dim() > 2 else x for x, y in zip(a, b, strict=True)]
        result[cut] = torch.equal(path.kda_triton(*mixed, -5.0, 0.1, None, None, config=config)[0][:, :cut], base[:, :cut])
    whole, _ = path.kda_triton(*a, -5.0, 0.1, None, [0, 70, 70, 200], config=config)
    parts = [
        path.kda_triton(*[x[:, s:e] if x.dim() > 2 else x for x in a], -5.0, 0.1, None, None, config=config)[0]
        for s, e in ((0, 70), (70, 200))
    ]
    result["packed"] = torch.equal(whole, torch.cat(parts, 1))
    print("causal and packed to the bit:", all(result.values()), result, flush=True)
    return {str(key): value for key, value in result.items()}


def cases() -> list[tuple]:
    """(name, shape, dtype, regime, edges, with_state), grouped by what has to be compiled."""
    packed = [0, 1, 1, 18, 85, 300, 364, 500]
    result: list[tuple] = []
    for dtype, (width, value) in itertools.product(
        (torch.bfloat16, torch.float32), ((32, 32), (64, 64), (32, 128), (128, 64), (256, 256), (256, 64))
    ):
        result.append((f"{str(dtype)[6:]} K {width} V {value} 2x300x5", (2, 300, 5, width, value), dtype, "random", None, True))
    for dtype in (torch.bfloat16, torch.float32):
        for regime in ("random", "high", "low", "mixed", "identical", "correlated", "small"):
            name = f"{str(dtype)[6:]} {regime} packed 500x3x128 states"
            result.append((name, (1, 500, 3, 128, 128), dtype, regime, packed, True))
        name = f"{str(dtype)[6:]} segments 1x6500x2x128, 3 documents, states"
        result.append((name, (1, 6500, 2, 128, 128), dtype, "random", [0, 5000, 5001, 6500], True))
    result.append(("bfloat16 1x4096x8x128 no state", (1, 4096, 8, 128, 128), torch.bfloat16, "random", None, False))
    return result


def check(config: path.Config | None, shard: str = "0/1") -> list[dict]:
    index, count = map(int, shard.split("/"))
    every = cases()
    # a configuration for the full shape: float32 and wide keys have their own
    mine = every[index * len(every) // count : (index + 1) * len(every) // count]
    results = [check_case(*c, config if c[2] == torch.bfloat16 and c[1][3] <= 128 else None) for c in mine]
    return results if index else [*results, {"causal": check_causal(config)}]


def bench(run: Callable[[], object], rep: int = 60) -> float:
    return round(float(triton.testing.do_bench(run, warmup=15, rep=rep, return_mode="median")), 4)


def time_shapes(config: path.Config | None) -> dict:
    result = {}
    for batch, length, heads, width in (FULL, (1, 65536, 16, 128), (1, 8192, 16, 64), (1, 524288, 4, 128)):
        tensors = inputs(batch, length, heads, width, width, torch.bfloat16)
        leaves = [x.requires_grad_() for x in tensors]
        up = torch.randn_like(leaves[2])

        def forward(leaves: list = leaves, width: int = width) -> object:
            with torch.no_grad():
                return path.kda_triton(*leaves, -5.0, width**-0.5, None, None, False, config)

        def both(leaves: list = leaves, width: int = width, up: torch.Tensor = up) -> object:
            o, _ = path.kda_triton(*leaves, -5.0, width**-0.5, None, None, False, config)
            return torch.autograd.grad(o, leaves, up)

        start = time.perf_counter()
        forward(), both()
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        key = f"{batch}x{length}x{heads}x{width}"
        result[key] = {
            "forward_ms": bench(forward),
            "both_ms": bench(both),
            "peak_extra_GiB": round(peak, 3),
            "first_call_s": round(first, 2),
        }
        print(key, result[key], flush=True)
        del tensors, leaves, up
        torch.cuda.empty_cache()
    return result


def kernel_times(config: path.Config | None, shape: tuple[int, ...] = FULL, repeats: int = 12) -> dict[str, float]:
    """Median milliseconds of each kernel in one forward and one forward + backward at `shape`, by the profiler; calls of a name add up."""
    batch, length, heads, width = shape
    leaves = [x.requires_grad_() for x in inputs(batch, length, heads, width, width, torch.bfloat16)]
    up = torch.randn_like(leaves[2])

    def forward() -> None:
        with torch.no_grad():
            path.kda_triton(*leaves, -5.0, width**-0.5, None, None, False, config)

    def both() -> None:
        o, _ = path.kda_triton(*leaves, -5.0, width**-0.5, None, None, False, config)
        torch.autograd.grad(o, leaves, up)

    result: dict[str, float] = {}
    for label, run in (("forward", forward), ("both", both)):
        run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(repeats):
                run()
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times.setdefault(event.name[:40], []).append(event.device_time)
        for name, values in times.items():
            calls = max(1, round(len(values) / repeats))
            result[f"{label} {name}"] = round(sorted(values)[len(values) // 2] * calls / 1e3, 4)
    return result


def parse(text: str) -> path.Config:
    changes = {}
    for item in text.split():
        key, value = item.split("=")
        changes[key] = type(getattr(path.Config(), key))(value)
    return path.Config()._replace(**changes)


def compile_all(variants: list[str]) -> None:
    """Fill Triton's cache from one process a variant."""
    command = [sys.executable, __file__, "--parts", "compile", "--variants"]
    start = time.perf_counter()
    waiting = list(variants)
    running: list[subprocess.Popen] = []
    while waiting or running:
        while waiting and len(running) < 14:
            running.append(subprocess.Popen([*command, waiting.pop(0)], env=os.environ))
        for p in running:
            if p.poll():
                print("failed on few tokens:", p.args[-1], flush=True)  # type: ignore[index]
        running = [p for p in running if p.poll() is None]
        time.sleep(0.1)
    print(f"compiled {len(variants)} variants in {time.perf_counter() - start:.0f} s", flush=True)


def compile_one(config: path.Config) -> None:
    """One variant at the full shape's specialisation, on few tokens."""
    tensors = inputs(1, 128, 96, 128, 128, torch.bfloat16)
    leaves = [x.requires_grad_() for x in tensors]
    o, _ = path.kda_triton(*leaves, -5.0, 128**-0.5, None, None, False, config)
    torch.autograd.grad(o, leaves, torch.randn_like(o))


def time_variants(variants: list[str]) -> dict:
    """Each variant in a process of its own: a bad memory access ends the process it happens in, and is a result."""
    result = {}
    for text in variants:
        command = [sys.executable, __file__, "--parts", "one", "--variants", text]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            # launches one by one, to name the kernel
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"})
        failed = [line.strip() for line in done.stderr.splitlines() if "_kernel[" in line or "Error" in line]
        result[text] = failed[-4:] if done.returncode else json.loads(done.stdout.splitlines()[-1])
        print(f"{text:60s}", result[text], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="check,time,variants")
    parser.add_argument("--variants", default="")
    parser.add_argument("--config", default="")
    parser.add_argument("--shard", default="0/1", help="i/n: this part of the checks, so that kernels compile side by side")
    options = parser.parse_args()
    if options.parts == "one":
        print(json.dumps(kernel_times(parse(options.variants))))
        return
    if options.parts == "compile":
        compile_one(parse(options.variants))
        return
    config, variants, parts = (
        parse(options.config) if options.config else None,
        [x.strip() for x in options.variants.split(";")],
        options.parts.split(","),
    )
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "config": (config or path.BFLOAT16)._asdict(),
    }

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")

    if "variants" in parts:
        compile_all(variants)
        report["variants"] = time_variants(variants)
        save()
    if "check" in parts:
        report["check"] = check(config, options.shard)
        save()
    if "time" in parts:
        report["kernels"] = kernel_times(config)
        report["shapes"] = time_shapes(config)
        save()
    save()


if __name__ == "__main__":
    main()
