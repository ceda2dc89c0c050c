"""Attention residual on a GPU: every case checked against float64, then timed beside its bytes and its peers. Prints tables, writes JSON.

    python benchmarks/attn_res.py [--out attn_res.json] [--parts check,mix,model,decode,first,step,variants]

Kernels are compiled side by side in processes of their own first. Floors are bytes over 4.27 TB/s, the copy bandwidth of an H200; this
run's own copy is measured too. Peers, where they can be imported: fla's `fused_attnres`, and torch.compile of the plain formula. Times are
medians, milliseconds; decoding is timed inside CUDA graphs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from atoll.nn.block_residual import Reader, Stream, read
from atoll.ops.attn_res import attn_res, attn_res_reference, attn_res_sum, open_block, two_phase_pays
from atoll.ops.attn_res.block_launch import BlockConfig, phase_one, phase_one_backward
from atoll.ops.attn_res.mix_launch import mix_backward, mix_config, mix_forward
from atoll.ops.norm import rms_norm

BANDWIDTH = 4.27e12
TOKENS, WIDTH, LAYERS, BLOCK = 8192, 7168, 93, 12
BF16, F32 = torch.bfloat16, torch.float32
SHAPES = [(9, TOKENS, 7168), (5, TOKENS, 7168), (9, TOKENS, 2048)]
TARGETS = {(9, 7168): (0.31, 1.05), (5, 7168): (0.22, 0.70), (9, 2048): (0.12, 0.40)}
MIXES = [{}, {"warps": 4}, {"warps": 16}, {"stages": 2}, {"stages": 4}, {"stages": 5}]
MIXES_BACK = [{}, {"back_stages": 1}, {"back_stages": 4}, {"back_registers": 0}, {"back_warps": 16, "programs": 132}, {"programs": 528}]
BLOCKS = [
    {}, {"many": (64, 64, 3, 4)}, {"many": (128, 64, 3, 4)}, {"many": (64, 128, 3, 4)}, {"many": (32, 128, 4, 2)},
    {"values": (512, 2)}, {"values": (2048, 4)}, {"values": (1024, 2)}, {"scores_back": (256, 3, 2)}, {"scores_back": (128, 4, 1)},
    {"sources_back": (64, 256, 2, 4)}, {"sources_back": (64, 128, 3, 2)}, {"sources_back": (64, 128, 4, 4)},
    {"sources_back": (32, 512, 2, 8)},
    {"keys_back": (64, 128, 3, 4)}, {"keys_back": (32, 128, 4, 4)}, {"keys_back": (64, 64, 3, 4)},
]  # fmt: skip


def floor(rows: float, tokens: int, width: int) -> float:
    """Milliseconds for `rows` rows of bfloat16 a token."""
    return round(rows * tokens * width * 2 / BANDWIDTH * 1e3, 4)


def bench(run: Callable[[], object], rep: int = 60) -> float:
    return round(float(triton.testing.do_bench(run, warmup=10, rep=rep, return_mode="median")), 4)


def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    """RMS of the error over RMS of the reference."""
    error = (a.double() - b.double()).square().mean().sqrt()
    return float(error / b.double().square().mean().sqrt().clamp_min(1e-30)) if torch.isfinite(error) else float("inf")


def made(sources: int, tokens: int, width: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sources of different sizes; query, key norm and output norm."""
    torch.manual_seed(sources)
    card = {"device": "cuda", "dtype": BF16}
    rows = [torch.randn(tokens, width, **card).mul_(0.2 * 2.0 ** (r % 4)) for r in range(sources)]
    return rows, [torch.randn(width, **card) * s for s in (width**-0.5, 1.0, 1.0)]


# ---------------------------------------------------------------- checks


def outcome(function: Callable, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = function(*leaves)
    torch.manual_seed(9)
    up = torch.randn(out.shape, device="cuda").bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, up)]


def verdict(name: str, got: list[torch.Tensor], expected: list[torch.Tensor], limit: float = 1.5e-2) -> dict:
    errors = [ratio(a, b) for a, b in zip(got, expected, strict=True)]
    bad = not all(e <= limit for e in errors)
    print(f"{'BAD' if bad else 'ok '} {name:46s} worst {max(errors):.1e}", flush=True)
    return {"case": name, "worst": max(errors), "bad": bad}


def block_mixes(backend: str, partial: torch.dtype | None, sources: int, queries: int) -> Callable:
    """All mixes of a block as one function of its leaves: sources, queries, norms, steps, output norm."""

    def run(*leaves: torch.Tensor) -> torch.Tensor:
        rows, vectors, steps = leaves[:sources], leaves[sources:-queries], leaves[-queries:-1]
        block = open_block(rows, vectors[:queries], vectors[queries:], partial_dtype=partial, backend=backend)
        prefix, outs = None, []
        for i in range(queries):
            prefix = steps[0] if i == 1 else prefix
            out, prefix = block.mix(i, prefix, delta=steps[i - 1] if i > 1 else None, out_norm=leaves[-1])
            outs.append(out)
        block.close()
        return torch.stack(outs)

    return run


def check_mix(sources: int, width: int, fused: bool) -> dict:
    rows, (query, weight, norm) = made(sources, 333, width)

    def run(*leaves: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        query, weight, norm, delta, *rows = leaves
        given = {"delta": delta, "out_norm": norm} if fused else {}
        out, last = attn_res_sum(rows, query, weight, backend=backend, **given)
        return out + last + (0 if fused else 0 * (norm + delta))

    leaves = [query, weight, norm, torch.randn_like(rows[0]), *rows]
    # a lone source's score has no gradient
    skip = (1, 2) if sources == 1 else ()
    return compare(
        f"mix {sources} x {width}{' fused' if fused else ''}", run, leaves, functools.partial(run, backend="torch"), 1.5e-2, skip
    )


def check_block(sources: int, queries: int, tokens: int, width: int, partial: torch.dtype) -> dict:
    rows, (_, _, norm) = made(sources, tokens, width)
    vectors = [torch.randn(width, device="cuda").bfloat16() * (width**-0.5 if i < queries else 1) for i in range(2 * queries)]
    leaves = [*rows, *vectors, *(torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(queries - 1)), norm]
    name = f"block {sources} sources {queries} queries {width} {str(partial)[6:]}"
    return compare(
        name, block_mixes("auto", partial, sources, queries), leaves, block_mixes("torch", None, sources, queries), 2e-2
    )  # fmt: skip


def compare(name: str, run: Callable, leaves: list[torch.Tensor], twin: Callable, limit: float, skip: tuple[int, ...] = ()) -> dict:
    """Output and gradients twice, and once by the twin in float64."""
    got, again, expected = outcome(run, leaves), outcome(run, leaves), outcome(twin, [t.double() for t in leaves])
    keep = [i for i, e in enumerate(expected) if e.any() and i not in skip]
    result = verdict(name, [got[i] for i in keep], [expected[i] for i in keep], limit)
    return {**result, "deterministic": all(torch.equal(a, b) for a, b in zip(got, again, strict=True))}


def checks() -> list[Callable[[], dict]]:
    shapes = [*((s, w) for s, _, w in SHAPES), (1, 7168), (64, 1024), (6, 2880), (3, 128)]
    blocks = [(8, 24, 200, 7168, BF16), (4, 24, 300, 7168, F32), (1, 8, 70, 1024, BF16)]
    mixes = [functools.partial(check_mix, *shape, fused) for shape in shapes for fused in (False, True)]
    return [*mixes, *(functools.partial(check_block, *case) for case in blocks)]


def check() -> list[dict]:
    results = [run() for run in checks()]
    unsure = [r["case"] for r in results if r["bad"] or not r["deterministic"]]
    print("all right and deterministic" if not unsure else f"BAD: {unsure}", flush=True)
    return results


# ---------------------------------------------------------------- one mix


def peers() -> dict[str, Callable]:
    """Functions of rows, query, weight."""
    found: dict[str, Callable] = {}
    try:
        from fla.ops.attnres import fused_attnres  # pyright: ignore[reportMissingImports]

        found["fla"] = lambda rows, query, weight: fused_attnres(query, rows, weight, rms_eps=1e-5)
    except ImportError:
        print("fla is not installed: no peer of that name", flush=True)
    found["compiled formula"] = torch.compile(lambda rows, query, weight: attn_res_reference(rows, query, weight))
    return found


def copy_bandwidth() -> float:
    """TB/s of this card, read and written."""
    half = torch.empty(2**28, device="cuda", dtype=BF16)
    other = torch.empty_like(half)
    return round(2 * half.numel() * 2 / bench(lambda: other.copy_(half)) / 1e9, 3)


def time_mix(sources: int, tokens: int, width: int) -> dict:
    """[forward, forward and backward] of every function."""
    rows, (query, weight, norm) = made(sources, tokens, width)
    leaves = [t.requires_grad_() for t in (query, weight, *rows)]
    up, delta = torch.randn_like(rows[0]), torch.randn_like(rows[0])

    def fused(rows: list, query: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return attn_res_sum(rows, query, weight, delta=delta, out_norm=norm)[0]

    def apart(rows: list, query: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(attn_res([*rows[:-1], rows[-1] + delta], query, weight), norm)

    floors = [floor(sources + 1, tokens, width), floor(3 * sources + 2, tokens, width)]
    line: dict[str, object] = {"floor": floors, "reach": TARGETS[sources, width]}
    functions = {"atoll": attn_res, **peers(), "atoll, add and norm inside": fused, "atoll, add and norm apart": apart}
    for name, function in functions.items():
        call = functools.partial(function, leaves[2:], *leaves[:2])
        try:
            with torch.no_grad():
                forward = bench(call)
            line[name] = [forward, bench(lambda call=call: torch.autograd.grad(call(), leaves, up))]
        except Exception as error:  # a peer's failure is a result
            line[name] = str(error).splitlines()[0][:80]
    return line


def time_mixes() -> dict:
    result: dict[str, object] = {"copy_TB_s": copy_bandwidth()}
    print(result, flush=True)
    for sources, tokens, width in SHAPES:
        name = f"{sources} x {tokens} x {width}"
        result[name] = time_mix(sources, tokens, width)
        print(name, result[name], flush=True)
        torch.cuda.empty_cache()
    return result


# ---------------------------------------------------------------- all mixes of the blueprint


class Depth:
    """The blueprint's reads over depth, its sublayers replaced by handing on what they read."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(0)
        card = {"device": "cuda", "dtype": BF16}
        self.queries = [(torch.randn(1, WIDTH, **card) * WIDTH**-0.5).requires_grad_() for _ in range(2 * LAYERS + 1)]
        self.norms = [torch.rand(WIDTH, **card).requires_grad_() for _ in self.queries]
        self.out_norm = torch.ones(WIDTH, **card).requires_grad_()
        self.x = torch.randn(1, tokens, WIDTH, **card).requires_grad_()

    def run(self, schedule: str, partial: torch.dtype, fused: bool = True) -> torch.Tensor:
        stream, span = Stream((), self.x), 2 * BLOCK
        readers = [Reader(n, q, 1e-5) for n, q in zip(self.norms, self.queries, strict=True)]
        h = self.x
        for i, reader in enumerate(readers):
            if i % span == 0 and i < 2 * LAYERS:
                block = readers[i : i + span] if i + span < 2 * LAYERS else readers[i:]
                stream = stream.close(block, schedule=schedule, partial_dtype=partial)
            h, stream = read(stream, reader, out_norm=self.out_norm if fused else None)
            if i < 2 * LAYERS:
                stream = stream.add(h)
                stream = stream if fused else stream.settle()
        if stream.block is not None:
            stream.block.close()
        return h


def blueprint_rows(schedule: str, c: float) -> float:
    """Rows a token of all forward mixes and nothing else: the floor's count. c: bytes of a partial over bytes of a source."""
    total, mixes = 0.0, 2 * LAYERS + 1
    for first in range(0, 2 * LAYERS, 2 * BLOCK):
        finished, queries = first // (2 * BLOCK) + 1, min(2 * BLOCK, mixes - first)
        lone = first == 0
        single = sum((finished if i == 0 else finished + 1) + 1 for i in range(lone, queries))
        double = finished + queries * c + (c + 1) + (queries - 1) * (c + 2)
        pays = {"one-pass": False, "two-phase": not lone}.get(schedule, two_phase_pays(finished, queries, 1, int(c), training=False))
        total += double if pays else single
    return total


def time_model() -> dict:
    depth, result = Depth(TOKENS), {}
    names = [("one-pass", BF16), ("two-phase", BF16), ("two-phase", F32), ("auto", BF16), ("auto", F32)]
    for fused in (False, True):
        for schedule, partial in names:
            with torch.no_grad():
                forward = bench(lambda s=schedule, p=partial, f=fused: depth.run(s, p, f), rep=300)
            name = f"{schedule} {str(partial)[6:]}{', add and norm inside' if fused else ', mixes and adds'}"
            result[name] = {"forward_ms": forward, "floor_mixes_ms": floor(blueprint_rows(schedule, partial.itemsize / 2), TOKENS, WIDTH)}
            print(f"all mixes, {name:44s}", result[name], flush=True)
    leaves = [depth.x, *depth.queries[1:], *depth.norms[1:], depth.out_norm]
    for schedule, partial in names[:2] + names[3:4]:

        def both(s: str = schedule, p: torch.dtype = partial) -> object:
            return torch.autograd.grad(depth.run(s, p).sum(), leaves, allow_unused=True)

        both()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        torch.cuda.synchronize()
        peak = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
        result[f"{schedule} {str(partial)[6:]}, with gradients"] = {"ms": bench(both, rep=400), "peak_GiB": peak}
        print(f"all mixes with gradients, {schedule}", result[f"{schedule} {str(partial)[6:]}, with gradients"], flush=True)
    return result


def time_decode() -> dict:
    """One step of every mix, its add and its norm, microseconds, in a CUDA graph."""
    result: dict[str, dict] = {}
    for tokens in (1, 8, 64):
        depth, line = Depth(tokens), {}
        for schedule, partial in (("one-pass", BF16), ("two-phase", BF16), ("two-phase", F32), ("auto", BF16)):
            with torch.no_grad():
                depth.run(schedule, partial)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    depth.run(schedule, partial)
            line[f"{schedule} {str(partial)[6:]}"] = round(bench(graph.replay) * 1e3, 1)
        result[str(tokens)] = line
        print(f"decoding {tokens} tokens, us a step of {2 * LAYERS} mixes", line, flush=True)
    return result


def time_step(preset: str = "1b-a50m", tokens: int = 8192) -> dict:
    """Forward and backward of a preset in bfloat16, no optimizer: block and full against plain, and what is allocated at the loss."""
    from atoll.config import load_config
    from atoll.model import Model

    result: dict[str, dict] = {}
    ids = torch.randint(1, 1000, (1, tokens), device="cuda")
    for residual in ("plain", "block", "full"):
        torch.manual_seed(0)
        model = Model(load_config(preset, {"model.residual": residual}).model, dtype=BF16, device="cuda").train()

        def step(model: Model = model) -> None:
            loss = model(ids, labels=ids).loss
            assert loss is not None
            loss.backward()
            model.zero_grad()

        step()
        before = torch.cuda.memory_allocated()
        loss = model(ids, labels=ids).loss
        kept = round((torch.cuda.memory_allocated() - before) / 2**30, 3)
        del loss
        result[residual] = {"ms": bench(step, rep=2000), "kept_GiB": kept}
        print(f"{preset}, {residual}", result[residual], flush=True)
        del model, step
        torch.cuda.empty_cache()
    return result


# ---------------------------------------------------------------- variants, compiling, first calls


def variant_runs(sources: int, tokens: int, width: int, out_norm: bool) -> list[tuple[str, Callable]]:
    """(name, run) of every setting of the mix, forward and backward."""
    rows, (query, weight, norm) = made(sources, tokens, width)
    base, up = mix_config(width, sources, out_norm), torch.randn_like(rows[0])
    given = (rows, None, None, query, weight, norm if out_norm else None, 1e-5, 1e-5)

    def forward(change: dict) -> object:
        return mix_forward(rows, None, *given[1:], BF16, False, base._replace(**change))

    def backward(change: dict) -> object:
        return mix_backward(up, None, None, *given, None, base._replace(**change))

    runs: list[tuple[str, Callable]] = [(f"mix {c}", functools.partial(forward, c)) for c in MIXES]
    return [*runs, *((f"mix back {c}", functools.partial(backward, c)) for c in MIXES_BACK)]


def block_runs(sources: int, queries: int, tokens: int, width: int) -> list[tuple[str, Callable]]:
    rows, _ = made(sources, tokens, width)
    vectors = [torch.randn(width, device="cuda").bfloat16() * 0.02 for _ in range(2 * queries)]
    held = phase_one(rows, vectors[:queries], vectors[queries:], 1e-5, BF16)
    d_mean, d_lse = torch.randn_like(held.mean), torch.randn_like(held.lse)
    runs: list[tuple[str, Callable]] = []
    for change in BLOCKS:
        config = BlockConfig(**change)
        if not any("back" in key for key in change):
            runs.append(
                (f"phase one {change}", lambda c=config: phase_one(rows, vectors[:queries], vectors[queries:], 1e-5, BF16, None, c))
            )
        if not change or any("back" in key for key in change):
            runs.append((f"phase one back {change}", lambda c=config: phase_one_backward(d_mean, d_lse, rows, held, c)))
    return runs


def kernel_times(run: Callable[[], object], repeats: int = 6) -> dict[str, float]:
    """Median milliseconds of each kernel of one call."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name[:24], []).append(event.device_time / 1e3)
    return {name: round(sorted(each)[len(each) // 2], 4) for name, each in times.items()}


def all_variants() -> dict[str, Callable[[], list[tuple[str, Callable]]]]:
    """Groups of runs that share their tensors."""
    groups: dict[str, Callable[[], list[tuple[str, Callable]]]] = {}
    for sources, tokens, width in SHAPES:
        for out_norm in (False, True):
            name = f"{sources} x {width}{' norm' if out_norm else ''}"
            groups[name] = functools.partial(variant_runs, sources, tokens, width, out_norm)
    for sources in (8, 4):
        groups[f"block, {sources} sources"] = functools.partial(block_runs, sources, 24, TOKENS, WIDTH)
    return groups


def time_variants() -> dict:
    result: dict[str, dict] = {}
    for group, runs in all_variants().items():
        line: dict[str, object] = {}
        for name, run in runs():
            try:
                line[name] = kernel_times(run)
            except Exception as error:  # too much shared memory, for instance: that setting is out
                line[name] = str(error).splitlines()[0][:80]
            print(f"{group}: {name:44s}", line[name], flush=True)
        result[group] = line
        torch.cuda.empty_cache()
    return result


def compile_group(kind: str, index: int, count: int) -> None:
    """This process's share of the checks or of all variants, run once each: Triton's cache is then filled."""
    if kind == "check":
        for run in checks()[index::count]:
            run()
        return
    number = 0
    for group, runs in all_variants().items():
        for name, run in runs():
            number += 1
            if number % count == index:
                try:
                    run()
                    torch.cuda.synchronize()
                except Exception as error:
                    print("failed:", group, name, str(error).splitlines()[0][:100], flush=True)
        torch.cuda.empty_cache()


def compile_all(kind: str, processes: int = 10) -> None:
    start = time.perf_counter()
    command = [sys.executable, __file__, "--parts"]
    quiet = subprocess.DEVNULL if kind == "check" else None  # its lines come again
    running = [subprocess.Popen([*command, f"compile:{kind}:{i}:{processes}"], stdout=quiet) for i in range(processes)]
    failed = [p.args for p in running if p.wait()]
    print(f"{kind}: compiled in {time.perf_counter() - start:.0f} s", *failed, flush=True)


def first_call(which: str) -> None:
    """Seconds from call to result, the device already awake, Triton's cache empty."""
    rows, (query, weight, _) = made(9, 1024, WIDTH)
    leaves = [t.requires_grad_() for t in (query, weight, *rows)]
    torch.cuda.synchronize()
    function = attn_res if which == "atoll" else peers()[which]
    times = []
    for _ in range(2):
        start = time.perf_counter()
        out = function(leaves[2:], *leaves[:2])
        torch.cuda.synchronize()
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, rows[0].detach())
        torch.cuda.synchronize()
        times.append([round(middle - start, 2), round(time.perf_counter() - middle, 2)])
    print(json.dumps({"forward_s": times[0][0], "backward_s": times[0][1], "again_s": times[1]}))


def time_first_calls() -> dict:
    result = {}
    for which in ("atoll", "fla"):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
            command = [sys.executable, __file__, "--parts", f"first:{which}"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
                result[which] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr.splitlines()[-1:]
            except subprocess.TimeoutExpired:
                result[which] = "more than 120 s"
        print("first call,", which, result[which], flush=True)
    return result


PARTS: dict[str, Callable[[], object]] = {
    "check": check, "mix": time_mixes, "model": time_model, "decode": time_decode, "first": time_first_calls, "step": time_step,
    "variants": time_variants,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="check,mix,model,decode,first,step,variants")
    options = parser.parse_args()
    if options.parts.startswith("compile:"):
        _, kind, index, count = options.parts.split(":")
        compile_group(kind, int(index), int(count))
        return
    if options.parts.startswith("first:"):
        first_call(options.parts.split(":")[1])
        return
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    chosen = options.parts.split(",")
    for kind in {"check", "variants"} & set(chosen):
        compile_all(kind)
    for part in chosen:
        report[part] = PARTS[part]()
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
