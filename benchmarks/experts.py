"""Routed experts and routing on a GPU: every setting checked against float64, then timed beside torch's own. Prints tables, writes JSON.

    python benchmarks/experts.py [--out experts.json] [--parts check,route,big,shard,preset,decode,kernels]
    python benchmarks/experts.py --parts variants --variants 'stages=3;weights=128 full=128 halves=1;…'

Peers in the same run: `F.grouped_mm` with an eager and a compiled activation, on stacked gate and up weights ("mlp": rows given,
sorted; "op": sort, gather and weighted sum too), and `torch.topk`. Times are medians, milliseconds. Floors: bytes over 4.27 TB/s, FLOP
over 690 TFLOP/s, both measured on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from atoll.ops.experts import experts_mlp, experts_mlp_reference
from atoll.ops.experts import fused as path
from atoll.ops.experts.plan import HOPPER, Config, Plan, choose, sort
from atoll.ops.routing import QuantileHistogram, route
from atoll.ops.routing.route_launch import _route

BANDWIDTH, RATE = 4.27e12, 690e12
SITU = ("situ", 4.0, 25.0)
BIG = (8192, 16, 896, 3584, 3072)  # tokens, k, experts, latent, inner: the blueprint's layer
SHARD = (8192, 16, 112, 3584, 3072)
PRESET = (32768, 16, 896, 192, 160)  # 1b-a50m: a micro-batch of 8 x 4096
NAMES = ("out", "x", "weights", "w1", "w3", "w2")


def different(tokens: int, k: int, experts: int, skew: float = 0.0) -> torch.Tensor:
    """ids [tokens, k], all different in a row; loads as level as sampling leaves them, or skewed."""
    torch.manual_seed(5)
    logits = torch.randn(tokens, experts, device="cuda") + skew * torch.randn(experts, device="cuda")
    return logits.topk(k).indices


def material(ids: torch.Tensor, experts: int, latent: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(6)
    card: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    x, weights = torch.randn(ids.shape[0], latent, **card), torch.rand(ids.shape, device="cuda") / ids.shape[1]
    shapes = ((experts, inner, latent), (experts, inner, latent), (experts, latent, inner))
    return [x, ids, weights, *(torch.randn(s, **card).mul_(s[2] ** -0.5) for s in shapes)]


def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    """RMS of the error over RMS of the reference."""
    error = (a.double() - b).square().mean().sqrt()
    return float(error / b.square().mean().sqrt().clamp_min(1e-12)) if torch.isfinite(error) else float("inf")


# --- checks ------------------------------------------------------------------------------------------------------------------------


def run_ours(arguments: list[torch.Tensor], config: Config | None, keep: bool) -> list[torch.Tensor]:
    x, ids, weights, *w = arguments
    out, buffer, inner = path.forward(x, ids, weights, *w, SITU, keep, config)
    torch.manual_seed(7)
    up = torch.randn_like(out)
    return [out, *path.backward(up, x, ids, weights, *w, buffer, inner, SITU, (True, True, True), config)]


def run_exact(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    up = torch.randn_like(arguments[0]).double()
    wide = [a.double().requires_grad_() if a.is_floating_point() else a for a in arguments]
    out = experts_mlp_reference(*wide)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad(out, [a for a in wide if a.requires_grad], up)]


def check_case(name: str, arguments: list[torch.Tensor], config: Config | None) -> dict:
    limit = 1e-2 if arguments[0].dtype == torch.bfloat16 else 2e-5
    got, exact = run_ours(arguments, config, keep=False), run_exact(arguments)
    again, kept = run_ours(arguments, config, keep=False), run_ours(arguments, config, keep=True)
    errors = {n: ratio(a, b) for n, a, b in zip(NAMES, got, exact, strict=True)}
    same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    empty = [e for e in range(arguments[3].shape[0]) if not (arguments[1] == e).any()]
    zero = all(not g[empty].any() for g in got[3:])
    near = max(ratio(a, b.double()) for a, b in zip(kept, got, strict=True))
    bad = [n for n, e in errors.items() if not e <= limit] + ["kept"] * (near > limit) + ["empty"] * (not zero)
    print(
        f"{'BAD' if bad or not same else 'ok '} {name:58s} "
        + " ".join(f"{n} {e:.1e}" for n, e in errors.items())
        + f" kept {near:.1e}{'' if same else ' NOT DETERMINISTIC'} {' '.join(bad)}",
        flush=True,
    )
    return {"case": name, "errors": errors, "bad": bad, "deterministic": same}


def loads(config: Config) -> tuple[torch.Tensor, int]:
    """ids [T, 1] whose experts' rests fall into every class and both sides of its edges, a hot one, empty ones; and their number."""
    widths = [a + b for a, b in zip(config.first, config.second, strict=True)]
    rows = [0, 1, *(w + d for w in (*widths, config.full) for d in (-1, 0, 1)), 0, 5 * config.full + 7, 0]
    return torch.tensor([e for e, n in enumerate(rows) for _ in range(n)], device="cuda")[:, None], len(rows)


def cases(config: Config | None) -> list[tuple[str, Callable[[], list[torch.Tensor]], Config | None]]:
    """(name, maker of the arguments, setting), the slowest to compile first."""
    half, made = torch.bfloat16, []
    for dtype, shape in ((half, (512, 512)), (half, (592, 528)), (half, (600, 520)), (torch.float32, (96, 72)), (half, (192, 160))):
        chosen = config or choose(8192, *shape, dtype, True)

        def every(dtype: torch.dtype = dtype, shape: tuple[int, int] = shape, chosen: Config = chosen) -> list[torch.Tensor]:
            ids, experts = loads(chosen)
            torch.manual_seed(2)
            return material(ids[torch.randperm(ids.shape[0], device="cuda")], experts, *shape, dtype)

        made.append((f"{str(dtype)[6:]} {shape} every class", every, chosen))
    for tokens, shape in itertools.product((100, 50, 20, 1, 700), ((512, 768), (192, 160))):
        name = f"{tokens} tokens, 4 of 24, {shape}"
        made.append((name, lambda tokens=tokens, shape=shape: material(different(tokens, 4, 24, 1.0), 24, *shape), config))
    return made


def check_sort() -> dict:
    ids = different(*BIG[:3])
    plan = Plan.read(sort(ids, BIG[2], HOPPER), ids.numel(), BIG[2])
    flat = ids.reshape(-1)
    right = torch.equal(plan.order.long(), flat.argsort(stable=True))
    right &= torch.equal(plan.first[1:].long(), torch.bincount(flat, minlength=BIG[2]).cumsum(0))
    print("ok  sort of 131072" if right else "BAD sort of 131072", flush=True)
    return {"case": "sort", "bad": [] if right else ["order"]}


def check_shard(config: Config | None, shard: str) -> list[dict]:
    """This part i/n of the checks."""
    index, parts = map(int, shard.split("/"))
    results = [check_case(name, make(), setting) for name, make, setting in cases(config)[index::parts]]
    return results if index else [*results, check_sort(), *check_route()]


def check(config: str) -> list[dict]:
    """All checks, in processes of their own that compile side by side and leave their kernels in Triton's cache."""
    parts, running = 8, []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(parts):
            out = Path(folder) / f"{index}.json"
            command = [
                sys.executable,
                __file__,
                "--parts",
                "check_shard",
                "--shard",
                f"{index}/{parts}",
                "--out",
                str(out),
                "--config",
                config,
            ]
            running.append((out, subprocess.Popen(command)))
        results: list[dict] = []
        for out, process in running:
            failed = process.wait() != 0
            results += [{"case": out.stem, "bad": ["did not finish"]}] if failed else json.loads(out.read_text())["check_shard"]
    bad = [r["case"] for r in results if r["bad"] or not r.get("deterministic", True)]
    print(f"{len(results)} checks, bad: {bad or 'none'}", flush=True)
    return results


def check_route() -> list[dict]:
    results = []
    for tokens, experts, k, levels, warps in (
        (8192, 896, 16, 2**24, 1), (3000, 896, 16, 300, 1), (3000, 896, 16, 300, 2), (3000, 896, 16, 300, 4), (500, 1024, 32, 2**20, 1),
        (500, 100, 1, 50, 1), (500, 33, 8, 2**20, 1),
    ):  # fmt: skip
        torch.manual_seed(1)
        scores = torch.randint(0, levels, (tokens, experts), device="cuda") / levels
        bias, mask = torch.randn(experts, device="cuda") / 8, torch.rand(tokens, device="cuda") < 0.7
        histograms = [QuantileHistogram(experts, device="cuda") for _ in range(2)]
        counted = [torch.zeros(experts, dtype=torch.int64, device="cuda") for _ in range(2)]
        for histogram in histograms:
            histogram.set_range(bias)
        h = histograms[0]
        ours = _route(scores, bias, k, h.counts, h.low, h.width, counted[0], mask, warps)
        twin = route(scores, bias, k, histogram=histograms[1], load=counted[1], mask=mask, backend="torch")
        bad = [n for n, a, b in (("ids", ours[0], twin[0]), ("cutoff", ours[2], twin[2])) if not torch.equal(a, b)]
        bad += ["counts"] * (not torch.equal(h.counts, histograms[1].counts)) + ["load"] * (not torch.equal(*counted))
        bad += ["weights"] * (not torch.allclose(ours[1], twin[1], rtol=1e-6, atol=0))
        print(f"{'BAD' if bad else 'ok '} route {tokens} x {experts}, top {k}, {levels} levels, {warps} warps {' '.join(bad)}", flush=True)
        results.append({"case": f"route {tokens} {experts} {k} {levels} {warps}", "bad": bad})
    return results


# --- times -------------------------------------------------------------------------------------------------------------------------


def bench(run: Callable[[], object], rep: int = 300, warmup: int = 50) -> float:
    """Median milliseconds, the cache flushed before each."""
    return round(float(triton.testing.do_bench(run, warmup=warmup, rep=rep, return_mode="median")), 4)


def floors(shape: tuple[int, ...], experts: int) -> dict:
    tokens, k, _, latent, inner = shape
    rows = tokens * k
    moved = 2 * (3 * experts * latent * inner + 2 * tokens * latent + 2 * rows * (latent + inner))
    work = 6 * rows * latent * inner
    return {"bytes": round(1e3 * moved / BANDWIDTH, 2), "flop": round(1e3 * work / RATE, 2), "flop_both": round(3e3 * work / RATE, 2)}


class Peer:
    """`F.grouped_mm` on stacked weights w13 [E, 2 I, L], w2 [E, L, I]."""

    def __init__(self, ids: torch.Tensor, experts: int, latent: int, inner: int) -> None:
        self.ids, self.experts = ids, experts
        self.x, _, self.weights = material(ids, 1, latent, 8)[:3]
        torch.manual_seed(6)
        self.w13 = torch.randn(experts, 2 * inner, latent, device="cuda", dtype=torch.bfloat16).mul_(latent**-0.5)
        self.w2 = torch.randn(experts, latent, inner, device="cuda", dtype=torch.bfloat16).mul_(inner**-0.5)
        self.order, self.ends = self.sort()
        self.rows = self.x[self.order // ids.shape[1]]

    def sort(self) -> tuple[torch.Tensor, torch.Tensor]:
        flat, order = self.ids.reshape(-1).sort(stable=True)
        return order, torch.searchsorted(flat, torch.arange(self.experts, device="cuda"), right=True).to(torch.int32)

    def mlp(self, rows: torch.Tensor, ends: torch.Tensor, act: Callable) -> torch.Tensor:
        gate, up = F.grouped_mm(rows, self.w13.mT, offs=ends).chunk(2, -1)
        return F.grouped_mm(act(gate, up), self.w2.mT, offs=ends)

    def op(self, act: Callable, combine: Callable) -> torch.Tensor:
        order, ends = self.sort()
        y = self.mlp(self.x[order // self.ids.shape[1]], ends, act)
        slot = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device="cuda"))
        return combine(y[slot].view(*self.ids.shape, -1), self.weights)


def eager_act(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.float(), up.float()
    return (4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)).bfloat16()


def combine(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (y.float() * weights[..., None]).sum(1).bfloat16()


def leaves_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in tensors if t.is_floating_point()]


def time_peer(shape: tuple[int, ...], backward: bool) -> dict:
    tokens, k, experts, latent, inner = shape
    peer = Peer(different(tokens, k, experts), experts, latent, inner)
    compiled_act, compiled_sum = torch.compile(eager_act), torch.compile(combine)
    result = {}
    for name, act, total in (("eager", eager_act, combine), ("compiled", compiled_act, compiled_sum)):
        with torch.no_grad():
            result[f"mlp_{name}"] = bench(lambda act=act: peer.mlp(peer.rows, peer.ends, act))
            result[f"op_{name}"] = bench(lambda act=act, total=total: peer.op(act, total))
        if backward:
            leaves = leaves_of([peer.x, peer.weights, peer.w13, peer.w2])
            up = torch.randn_like(peer.x)
            result[f"both_{name}"] = bench(
                lambda act=act, total=total, leaves=leaves, up=up: torch.autograd.grad(peer.op(act, total), leaves, up)
            )
    return result


def time_ours(shape: tuple[int, ...], backward: bool, config: Config | None, skewed: bool = False) -> dict:
    tokens, k, experts, latent, inner = shape
    x, ids, weights, *w = material(different(tokens, k, experts), experts, latent, inner)
    result = {"forward": bench(lambda: path.forward(x, ids, weights, *w, SITU, False, config))}
    result["sort"] = bench(lambda: sort(ids, experts, config or path.config_for(x, inner)), rep=50)
    if skewed:
        uneven = different(tokens, k, experts, 0.5)
        result["forward_skewed"] = bench(lambda: path.forward(x, uneven, weights, *w, SITU, False, config))
    if backward:
        up = torch.randn_like(x)
        for name, keep in (("both", False), ("both_kept", True)):

            def both(keep: bool = keep) -> object:
                _, buffer, inside = path.forward(x, ids, weights, *w, SITU, keep, config)
                return path.backward(up, x, ids, weights, *w, buffer, inside, SITU, (True, True, True), config)

            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both()
            result[f"{name}_GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
            result[name] = bench(both)
        leaves = leaves_of([x, weights, *w])
        result["both_public"] = bench(lambda: torch.autograd.grad(experts_mlp(x, ids, weights, *w), leaves, up))
    return result


def time_shape(name: str, shape: tuple[int, ...], backward: bool, config: Config | None, skewed: bool = False) -> dict:
    visited = min(shape[2], shape[0] * shape[1])
    entry: dict = {"shape": shape, "floors": floors(shape, visited), "peer": time_peer(shape, backward)}
    torch.cuda.empty_cache()
    entry["ours"] = time_ours(shape, backward, config, skewed)
    torch.cuda.empty_cache()
    rate = 6 * shape[0] * shape[1] * shape[3] * shape[4] / entry["ours"]["forward"] / 1e9
    print(f"{name} {shape}: {rate:.0f} TFLOP/s forward", flush=True)
    for key in ("floors", "peer", "ours"):
        print(f"   {key:7s}", "  ".join(f"{n} {v}" for n, v in entry[key].items()), flush=True)
    return entry


def time_decode(config: Config | None) -> dict:
    """The blueprint's layer on few tokens; weights beyond the cache, so every call reads them from memory."""
    arguments = material(different(1, 16, 896), 896, 3584, 3072)
    result = {}
    for tokens in (1, 8, 64, 512):
        ids = different(tokens, 16, 896)
        x, weights = torch.randn(tokens, 3584, device="cuda", dtype=torch.bfloat16), torch.rand(tokens, 16, device="cuda")
        visited = int(ids.unique().numel())
        moved = 2 * 3 * visited * 3584 * 3072
        run = lambda x=x, ids=ids, weights=weights: path.forward(x, ids, weights, *arguments[3:], SITU, False, config)  # noqa: E731
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        result[tokens] = {"floor": round(1e3 * moved / BANDWIDTH, 3), "experts": visited, "eager": bench(run), "graph": bench(graph.replay)}
        print(f"decode {tokens} tokens", result[tokens], flush=True)
    return result


def time_route() -> dict:
    torch.manual_seed(0)
    tokens, experts, k = 8192, 896, 16
    scores, bias = torch.sigmoid(torch.randn(tokens, experts, device="cuda")), torch.randn(experts, device="cuda") / 20
    h = QuantileHistogram(experts, device="cuda")
    h.set_range(bias)
    load = torch.zeros(experts, dtype=torch.int64, device="cuda")
    cutoff = route(scores, bias, k)[2]
    result = {
        "floor": round(1e3 * tokens * experts * 4 / BANDWIDTH, 4),
        "topk alone": bench(lambda: scores.topk(k), 60),
        "torch route": bench(lambda: route(scores, bias, k, backend="torch"), 60),
        "torch histogram": bench(lambda: h.observe(scores, cutoff), 60),
        "kthvalue": bench(lambda: scores.kthvalue(tokens * k // experts, dim=0), 60),
        "solve": bench(lambda: h.solve(k), 60),
        "public, counted": bench(lambda: route(scores, bias, k, histogram=h, load=load), 60),
    }
    for warps in (1, 2, 4):
        result[f"route, {warps} warps"] = bench(lambda warps=warps: _route(scores, bias, k, warps=warps), 60)
        result[f"route and histogram, {warps} warps"] = bench(
            lambda warps=warps: _route(scores, bias, k, h.counts, h.low, h.width, load, None, warps), 60
        )
    for name, value in result.items():
        print(f"   {name:32s} {value}", flush=True)
    return result


def kernel_times(shape: tuple[int, ...], config: Config | None, backward: bool, repeats: int = 5) -> dict[str, float]:
    """Median milliseconds of each launch, in order, of one forward and backward pass, by the profiler."""
    tokens, k, experts, latent, inner = shape
    x, ids, weights, *w = material(different(tokens, k, experts), experts, latent, inner)
    up = torch.randn_like(x)

    def run() -> None:
        _, buffer, inside = path.forward(x, ids, weights, *w, SITU, False, config)
        if backward:
            path.backward(up, x, ids, weights, *w, buffer, inside, SITU, (True, True, True), config)

    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = sorted((e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    each = len(events) // repeats
    result = {}
    for i in range(each):
        times = sorted(events[r * each + i].device_time for r in range(repeats))
        result[f"{i:02d} {events[i].name[:24]}"] = round(times[repeats // 2] / 1e3, 4)
    return result


# --- variants ----------------------------------------------------------------------------------------------------------------------


def parse(text: str) -> Config:
    """Changes to the blueprint's setting; tuples as 32+64+128."""
    changes: dict[str, Any] = {}
    for item in text.split():
        key, value = item.split("=")
        changes[key] = tuple(map(int, value.split("+"))) if key in ("first", "second") else int(value)
    return HOPPER._replace(**changes)


def compile_one(config: Config) -> None:
    """Every kernel of a variant at the blueprint's widths, on few tokens and experts."""
    run_ours(material(different(16, 16, 20), 20, 3584, 3072), config, keep=False)
    torch.cuda.synchronize()


def compile_all(variants: list[str]) -> list[str]:
    """Fill Triton's cache from one process a variant; those that compile."""
    start, waiting, running, good = time.perf_counter(), list(variants), [], []
    while waiting or running:
        while waiting and len(running) < 12:
            text = waiting.pop(0)
            command = [sys.executable, __file__, "--parts", "compile", "--variants", text]
            running.append((text, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        for text, process in running:
            if process.poll() is not None and process.returncode:
                print("failed:", text, process.stderr.read().strip().splitlines()[-1:], flush=True)  # type: ignore[union-attr]
            elif process.poll() == 0:
                good.append(text)
        running = [(t, p) for t, p in running if p.poll() is None]
        time.sleep(0.2)
    print(f"compiled {len(good)} of {len(variants)} variants in {time.perf_counter() - start:.0f} s", flush=True)
    return [v for v in variants if v in good]


def time_variants_at(name: str, arguments: list[torch.Tensor], variants: list[str], result: dict) -> None:
    for text in variants:
        config = parse(text)
        result[text][name] = bench(lambda config=config: path.forward(*arguments, SITU, False, config), rep=200, warmup=20)  # type: ignore[arg-type]
        print(f"{name:8s} {text:60s} {result[text][name]}", flush=True)


def time_variants(variants: list[str], shapes: dict[str, tuple[int, ...]]) -> dict:
    good, result = compile_all(variants), {v: {} for v in variants}
    for name, shape in shapes.items():
        time_variants_at(name, material(different(*shape[:3]), *shape[2:]), good, result)
        torch.cuda.empty_cache()
    if "shard" in shapes:
        for text in good:
            result[text]["kernels"] = kernel_times(SHARD, parse(text), backward=True, repeats=3)
            print(text, result[text]["kernels"], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="check,route,shard,preset,big,decode,kernels")
    parser.add_argument("--variants", default="")
    parser.add_argument("--shapes", default="big,shard", help="of the variants")
    parser.add_argument("--shard", default="0/1", help="which part of the checks, for check_shard")
    parser.add_argument("--config", default="", help="changes to the blueprint's setting, for checks and times")
    options = parser.parse_args()
    parts, variants = options.parts.split(","), [v.strip() for v in options.variants.split(";")]
    config = parse(options.config) if options.config else None
    if parts == ["compile"]:
        compile_one(parse(options.variants))
        return
    every = {"big": BIG, "shard": SHARD, "preset": PRESET}
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    jobs: dict[str, Callable[[], Any]] = {
        "variants": lambda: time_variants(variants, {n: every[n] for n in options.shapes.split(",")}),
        "check": lambda: check(options.config),
        "check_shard": lambda: check_shard(config, options.shard),
        "route": time_route,
        "shard": lambda: time_shape("112 experts", SHARD, True, config),
        "preset": lambda: time_shape("1b preset", PRESET, True, None),
        "big": lambda: time_shape("896 experts", BIG, False, config, skewed=True),
        "decode": lambda: time_decode(config),
        "kernels": lambda: {n: kernel_times(s, config if n == "shard" else None, True) for n, s in (("shard", SHARD), ("preset", PRESET))},
    }
    for name, job in jobs.items():
        if name not in parts:
            continue
        start = time.perf_counter()
        report[name] = job()
        if name == "kernels":
            for shape, times in report[name].items():
                print(shape, times, flush=True)
        torch.cuda.empty_cache()
        print(f"[{name}: {time.perf_counter() - start:.0f} s]", flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
