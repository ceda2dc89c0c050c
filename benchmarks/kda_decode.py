"""Decoding step, short convolution and norms on a GPU: every setting checked against float64, then timed. Prints tables, writes JSON.

    python benchmarks/kda_decode.py [--out kda_decode.json] [--parts decode,conv,norm]

Floors are bytes over 4.27 TB/s, the copy bandwidth of an H200; this run's own copy is measured too. A small state would stay in the
cache, so a run goes through as many layers' states as fill it several times; times are medians, microseconds a layer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from atoll.ops import conv_launch, norm_launch
from atoll.ops.conv import short_conv
from atoll.ops.kda.step import kda_step
from atoll.ops.kda.step_launch import StepConfig, launch_step, step_config
from atoll.ops.kda.step_reference import ConvState, OutputNorm
from atoll.ops.norm import gated_rms_norm, l2_norm, rms_norm

BANDWIDTH = 4.27e12
HEADS, WIDTH, TAPS, RING = 96, 128, 4, 12
CHANNELS = 3 * HEADS * WIDTH
ROWS = 8192
FUSED = [StepConfig(128, 8), StepConfig(128, 8, 128), StepConfig(128, 16), StepConfig(128, 8, 128, "")]
SPLIT = [StepConfig(16, 2), StepConfig(32, 4), StepConfig(32, 8), StepConfig(64, 4), StepConfig(64, 8), StepConfig(64, 8, 80)]
CONV = [conv_launch.ConvConfig(), *(conv_launch.ConvConfig(rows=r, channels=c) for r, c in ((8, 512), (32, 128), (32, 256)))]
CONV_BACK = [conv_launch.ConvConfig()] + [
    conv_launch.ConvConfig(back_channels=c, back_warps=w, back_group=g) for c, w, g in ((512, 4, 2), (512, 4, 8), (256, 2, 4), (1024, 4, 2))
]
NORMS = {7168: [(1, 1024, 7, 8), (1, 1024, 7, 4), (1, 2048, 4, 8)], 128: [(16, 128, 1, 4), (8, 128, 1, 4), (32, 128, 1, 8)]}


def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    """RMS of the error over RMS of the reference."""
    error = (a.double() - b.double()).square().mean().sqrt()
    return float(error / b.double().square().mean().sqrt().clamp_min(1e-30)) if torch.isfinite(error) else float("inf")


def verdict(name: str, errors: list[float], limit: float) -> dict:
    bad = not all(e <= limit for e in errors)
    if bad:
        print(f"BAD {name}: {[f'{e:.1e}' for e in errors]} over {limit:.0e}", flush=True)
    return {"worst": max(errors), "bad": bad}


def bench(run: Callable[[], object], rep: int = 40) -> float:
    """Median microseconds."""
    return float(triton.testing.do_bench(run, warmup=8, rep=rep, return_mode="median")) * 1e3


def graph_of(run: Callable[[], object]) -> Callable[[], object]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def line(name: str, entry: dict) -> None:
    numbers = "  ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in entry.items())
    print(f"{name:66s} {numbers}", flush=True)


class Decode:
    """`layers` pools of n states with their rings, and one step's tokens. Sequence s owns slot s."""

    def __init__(self, n: int, layers: int, state: torch.dtype, tokens: int = 1, major: bool = True) -> None:
        torch.manual_seed(0)
        card, half = {"device": "cuda"}, torch.bfloat16
        lead = (n,) if tokens == 1 else (n, tokens)
        self.n, self.tokens = n, tokens
        self.x = torch.randn(*lead, CHANNELS, **card, dtype=half)
        self.g = torch.randn(*lead, HEADS, WIDTH, **card, dtype=half)
        self.beta = torch.randn(*lead, HEADS, **card, dtype=half)
        self.rest = (0.3 * torch.randn(HEADS, **card), torch.randn(HEADS, WIDTH, **card) - 1.0)
        self.norm = OutputNorm(torch.rand(WIDTH, **card), torch.randn(*lead, HEADS * WIDTH, **card, dtype=half))
        shape = (n, *([tokens] if tokens > 1 else []), HEADS, WIDTH, WIDTH)
        self.states = [(0.3 * torch.randn(shape, **card)).to(state) for _ in range(layers)]
        if major:
            self.states = [s.transpose(-1, -2) for s in self.states]
        self.position = torch.randint(0, 99, (n,), **card)
        weight = torch.randn(CHANNELS, 1, TAPS, **card)
        self.convs = [ConvState(weight, torch.randn(n, RING, CHANNELS, **card, dtype=half), self.position) for _ in range(layers)]
        self.slots = torch.arange(n, **card)
        self.accepted = torch.ones(n, **card, dtype=torch.int64) if tokens > 1 else None
        self.out = torch.empty(*lead, HEADS, WIDTH, **card, dtype=half)

    def bytes(self) -> int:
        """A layer's floor: state in and out, window rows in and one out, filters, tokens, gates and outputs."""
        state = self.states[0][:, 0] if self.tokens > 1 else self.states[0]
        moved = state.numel() * state.element_size() * (1 + self.tokens)
        rows = self.n * CHANNELS * 2 * (TAPS - 1 + 2 * self.tokens)
        return moved + rows + CHANNELS * TAPS * 4 + self.n * self.tokens * 2 * (3 * HEADS * WIDTH + HEADS)

    def run(self, config: StepConfig | None, fused: bool) -> None:
        """All layers once, by the launcher; a split step is followed by the norm's own kernel."""
        for state, conv in zip(self.states, self.convs, strict=True):
            norm = self.norm if fused else None
            launch_step(
                (self.x,), self.g, self.beta, *self.rest, state, conv, -5.0, self.slots, self.accepted, norm, self.out, config
            )  # fmt: skip
            if not fused:
                gated_rms_norm(self.out, self.norm.weight, self.norm.gate.view(self.out.shape))

    def run_public(self) -> None:
        """All layers once, as a model calls them."""
        for state, conv in zip(self.states, self.convs, strict=True):
            kda_step(
                self.x, self.g, self.beta, *self.rest, state, conv, slots=self.slots, accepted=self.accepted, norm=self.norm, out=self.out
            )


def check_step(config: StepConfig | None, fused: bool, state: torch.dtype, tokens: int = 1, major: bool = True) -> dict:
    """Three sequences, the same compiled kernel as the timed one, against the twin in float64; and the same bits again."""
    results = []
    for _ in range(2):
        case = Decode(3, 1, state, tokens, major)
        norm = case.norm if fused else None
        case.out.fill_(float("nan"))
        launch_step(
            (case.x,), case.g, case.beta, *case.rest, case.states[0], case.convs[0], -5.0, case.slots, case.accepted, norm, case.out, config
        )
        results.append((case.out, case.states[0], case.convs[0].window))
    case, wide = Decode(3, 1, state, tokens, major), torch.float64
    conv = ConvState(case.convs[0].weight.to(wide), case.convs[0].window.to(wide), case.position)
    norm = OutputNorm(case.norm.weight.to(wide), case.norm.gate.to(wide)) if fused else None
    o, expected, conv = kda_step(
        case.x.to(wide), case.g.to(wide), case.beta.to(wide), *(t.to(wide) for t in case.rest), case.states[0].to(wide), conv,
        slots=case.slots, accepted=case.accepted, norm=norm, backend="torch",
    )  # fmt: skip
    errors = [ratio(a, b) for a, b in zip(results[0], (o, expected, conv.window), strict=True)]
    name = f"step {config} fused {fused} {state} T {tokens} major {major}"
    entry = verdict(name, errors, 6e-3)
    entry["deterministic"] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    if not entry["deterministic"]:
        print("NOT DETERMINISTIC", name, flush=True)
    return entry


def time_decode(report: dict) -> None:
    short, long = [(1, 32), (8, 6)], [(64, 1)]
    for n, layers in short + long:
        case = Decode(n, layers, torch.float32)
        floor = case.bytes() / BANDWIDTH * 1e6
        for fused, configs in ((True, FUSED), (False, SPLIT)):
            for config in configs:
                key = f"{n} x {HEADS}, float32, {'norm inside' if fused else 'norm apart'}, {tuple(config)}"
                entry = check_step(config, fused, torch.float32)
                replay = graph_of(lambda case=case, config=config, fused=fused: case.run(config, fused))
                entry |= {"graph_us": bench(replay) / layers, "floor_us": floor}
                report[key] = entry
                line(key, {"graph": entry["graph_us"], "of floor": floor / entry["graph_us"]})
        for fused in (True, False):
            chosen = step_config(n, HEADS, WIDTH, WIDTH, fused)
            key = f"{n} x {HEADS}, chosen, {'norm inside' if fused else 'norm apart'}"
            entry = {"config": tuple(chosen), **check_step(chosen, fused, torch.float32)}
            entry["graph_us"] = bench(graph_of(lambda case=case, chosen=chosen, fused=fused: case.run(chosen, fused))) / layers
            if fused:
                entry["eager_us"] = bench(case.run_public) / layers
            report[key] = entry | {"floor_us": floor}
            line(key, {"graph": entry["graph_us"], "eager": entry.get("eager_us", "-"), "floor": floor})
        del case
        torch.cuda.empty_cache()


def time_other_states(report: dict) -> None:
    """Half-width states, the other memory layout, four drafts a call: 64 sequences."""
    for name, state, tokens, major, configs in (
        ("bfloat16 state", torch.bfloat16, 1, True, [StepConfig(128, 8, 128), StepConfig(128, 8), StepConfig(64, 4), StepConfig(32, 4)]),
        ("K-major float32 state", torch.float32, 1, False, [StepConfig(128, 8, 128), StepConfig(64, 8)]),
        ("four drafts, float32", torch.float32, 4, True, [StepConfig(128, 8), StepConfig(64, 8), StepConfig(32, 4)]),
    ):
        case = Decode(64, 1, state, tokens, major)
        floor = case.bytes() / BANDWIDTH * 1e6
        for config in configs:
            fused = config.columns == WIDTH
            key = f"64 x {HEADS}, {name}, {'norm inside' if fused else 'norm apart'}, {tuple(config)}"
            entry = check_step(config, fused, state, tokens, major)
            entry |= {"graph_us": bench(graph_of(lambda case=case, c=config, f=fused: case.run(c, f))), "floor_us": floor}
            report[key] = entry
            line(key, {"graph": entry["graph_us"], "of floor": floor / entry["graph_us"]})
        del case
        torch.cuda.empty_cache()


def conv_both(tensors: tuple, config: conv_launch.ConvConfig | None, edges: torch.Tensor | None, length: int) -> list[torch.Tensor]:
    x, weight, dy = tensors
    y, _ = conv_launch._forward(x, weight, None, edges, length, False, config)
    dx, dweight, _ = conv_launch._backward(dy, None, x, weight, None, edges, length, config)
    return [y, dx, dweight]


def check_conv(config: conv_launch.ConvConfig, edges: torch.Tensor | None) -> dict:
    torch.manual_seed(0)
    tokens = 700
    x, dy = (torch.randn(tokens, CHANNELS // 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(CHANNELS // 16, TAPS, device="cuda")
    got, again = (conv_both((x, weight, dy), config, edges, tokens) for _ in range(2))
    leaves = [x.double()[None].requires_grad_(), weight.double()[:, None].requires_grad_()]
    y, _ = short_conv(leaves[0], leaves[1], cu_seqlens=edges, backend="torch")
    expected = [y[0].detach(), *torch.autograd.grad(y[0], leaves, dy.double())]
    entry = verdict(f"conv {tuple(config)}", [ratio(a, b.view_as(a)) for a, b in zip(got, expected, strict=True)], 8e-3)
    entry["deterministic"] = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    return entry


def time_conv(report: dict) -> None:
    """Queries, keys and values of all heads in one launch."""
    x, dy = (torch.randn(ROWS, CHANNELS, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(CHANNELS, TAPS, device="cuda")
    small = torch.tensor([0, 1, 1, 18, 300, 700], device="cuda")
    edges = torch.tensor([0, 1000, 1000, 5000, 5001, ROWS], device="cuda")
    array = x.numel() * 2 / BANDWIDTH * 1e6
    for name, table, check in (("fixed", None, None), ("packed", edges, small)):
        for config in CONV if table is None else CONV[:1]:
            key = f"convolution forward, {name}, {tuple(config)[:3]}"
            entry = check_conv(config, check)
            run = lambda config=config, table=table: conv_launch._forward(x, weight, None, table, ROWS, False, config)  # noqa: E731
            report[key] = entry | {"us": bench(run), "floor_us": 2 * array}
            line(key, {"us": report[key]["us"], "of floor": 2 * array / report[key]["us"]})
        for config in CONV_BACK if table is None else CONV_BACK[:1]:
            key = f"convolution backward, {name}, {tuple(config)[3:]}"
            entry = check_conv(config, check)
            run = lambda config=config, table=table: conv_launch._backward(dy, None, x, weight, None, table, ROWS, config)  # noqa: E731
            report[key] = entry | {"us": bench(run), "floor_us": 3 * array}
            line(key, {"us": report[key]["us"], "of floor": 3 * array / report[key]["us"]})
    time_torch_conv(x, weight, dy, report)


def time_torch_conv(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, report: dict) -> None:
    """torch's own, in the layout it likes: channels before tokens, all in bfloat16."""
    turned, up = (t.t().contiguous()[None].requires_grad_() for t in (x, dy))
    filters = weight.bfloat16()[:, None].requires_grad_()

    def forward() -> torch.Tensor:
        return F.silu(F.conv1d(turned, filters, padding=TAPS - 1, groups=CHANNELS)[..., :ROWS])

    with torch.no_grad():
        report["torch conv1d + silu forward"] = {"us": bench(forward)}
    both = bench(lambda: torch.autograd.grad(forward(), (turned, filters), up.detach()))
    report["torch conv1d + silu forward + backward"] = {"us": both}
    for key in ("torch conv1d + silu forward", "torch conv1d + silu forward + backward"):
        line(key, report[key])


def norm_call(kind: str, tensors: tuple, config: norm_launch.NormConfig) -> tuple[Callable, Callable]:
    """Forward and backward of one norm as bare launches."""
    x, weight, gate, dy = tensors
    given = {"rms": (x, weight, None), "gated": (x, weight, gate), "l2": (x, None, None)}[kind]
    mean, eps = kind != "l2", 1e-5 if kind != "l2" else 1e-6
    _, rstd = norm_launch._forward(*given, eps, mean, True, config)
    return (
        lambda: norm_launch._forward(*given, eps, mean, True, config)[0],
        lambda: norm_launch._backward(dy, *given, rstd, mean, config),
    )


def norm_inputs(rows: int, width: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, gate, dy = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return x, torch.rand(width, device="cuda"), gate, dy


def check_norm(kind: str, width: int, config: norm_launch.NormConfig) -> dict:
    tensors = norm_inputs(1001, width)
    forward, backward = norm_call(kind, tensors, config)
    x, weight, gate, dy = (t.double().requires_grad_() for t in tensors)
    used = {"rms": (x, weight), "gated": (x, weight, gate), "l2": (x,)}[kind]
    y = {"rms": rms_norm, "gated": gated_rms_norm, "l2": l2_norm}[kind](*used, backend="torch")
    gradients = torch.autograd.grad(y, used, dy)
    got = [g for g in backward() if g.numel()][: len(gradients)]
    entry = verdict(
        f"{kind} {width} {tuple(config)}", [ratio(a, b) for a, b in zip((forward(), *got), (y.detach(), *gradients), strict=True)], 8e-3
    )
    entry["deterministic"] = all(torch.equal(a, b) for a, b in zip(backward(), backward(), strict=True))
    return entry


def time_norms(report: dict) -> None:
    for kind, rows, width in (("rms", ROWS, 7168), ("gated", ROWS * HEADS, 128), ("l2", ROWS * HEADS, 128)):
        tensors = norm_inputs(rows, width)
        array = rows * width * 2 / BANDWIDTH * 1e6
        reads = {"rms": (2, 3), "gated": (3, 5), "l2": (2, 3)}[kind]
        for settings in NORMS[width]:
            config = norm_launch.NormConfig(*settings)
            forward, backward = norm_call(kind, tensors, config)
            entry = check_norm(kind, width, config)
            entry |= {"forward_us": bench(forward), "forward_floor_us": reads[0] * array}
            entry |= {"backward_us": bench(backward), "backward_floor_us": reads[1] * array}
            key = f"{kind} {rows} x {width} {settings}"
            report[key] = entry
            shares = [entry[f"{p}_floor_us"] / entry[f"{p}_us"] for p in ("forward", "backward")]
            line(key, {"forward": entry["forward_us"], "of floor": shares[0], "backward": entry["backward_us"], "of its floor": shares[1]})
        time_torch_norm(kind, tensors, report)
        del tensors
        torch.cuda.empty_cache()


def time_torch_norm(kind: str, tensors: tuple, report: dict) -> None:
    """torch's own operators for the same formula, in bfloat16."""
    x, weight, gate = (t.bfloat16().requires_grad_() for t in tensors[:3])
    shape = (x.shape[-1],)
    forward: dict[str, Callable[[], torch.Tensor]] = {
        "rms": lambda: F.rms_norm(x, shape, weight, 1e-5),
        "gated": lambda: F.rms_norm(x, shape, weight, 1e-5) * torch.sigmoid(gate),
        "l2": lambda: F.normalize(x, dim=-1, eps=1e-6),
    }
    used = {"rms": (x, weight), "gated": (x, weight, gate), "l2": (x,)}[kind]
    with torch.no_grad():
        entry = {"forward_us": bench(forward[kind])}
    entry["both_us"] = bench(lambda: torch.autograd.grad(forward[kind](), used, tensors[3]))
    key = f"torch {kind} {tuple(x.shape)}"
    report[key] = entry
    line(key, entry)


def copy_bandwidth() -> float:
    """Bytes read and written a second."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    return 4 * source.numel() / bench(lambda: target.copy_(source)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="decode,conv,norm")
    options = parser.parse_args()
    start, parts = time.perf_counter(), options.parts.split(",")
    bandwidth = copy_bandwidth()
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_TBps": round(bandwidth / 1e12, 3),
    }
    print(f"copy {bandwidth / 1e12:.2f} TB/s; microseconds below", flush=True)
    with torch.no_grad():
        if "decode" in parts:
            decode: dict = {}
            report["decode"] = decode
            time_decode(decode)
            time_other_states(decode)
    for part, run in (("conv", time_conv), ("norm", time_norms)):
        if part in parts:
            entry: dict = {}
            report[part] = entry
            run(entry)
    report["seconds"] = round(time.perf_counter() - start, 1)
    print(f"{report['seconds']} s", flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
