"""Two GPUs against one, at equal work a GPU: is it right, then what does each axis cost. Writes JSON.

    torchrun --nproc-per-node 2 benchmarks/scale.py --out benchmarks/results/scale.json
    torchrun --nproc-per-node 2 benchmarks/scale.py --smoke --out /tmp/scale.json         # tiny shapes, on a CPU too

Checked first: loss, gradient norm and weights of three steps of a small float64 model under each axis against one process's. Then timed,
whole optimizer steps, the median over steps and the slowest process: `one` is every process by itself on B rows; an axis is all of them
together on N B rows, and its efficiency is the time of `one` over its own. `context` takes a row of N times the length, and is held
against N times less than the time one process takes for that row (attention of a longer row is more work). `context_exchange` is the
time of KDA's exchange over that of the layer; `save` what a checkpoint holds training up, and what it takes to write beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from atoll import parallel
from atoll.config import Config, UserError, load_config
from atoll.data.documents import TokenSet
from atoll.data.loader import Sampler
from atoll.nn.delta_attention import DeltaAttention
from atoll.parallel.context import cut_context
from atoll.parallel.mesh import make_mesh
from atoll.parallel.ranks import ALONE, Ranks
from atoll.train import setup
from atoll.train.guard import Guard
from atoll.train.saver import Saver
from atoll.train.step import micro_batches, train_step

SMALL: dict[str, Any] = {
    "model.vocab_size": 64, "model.hidden_size": 32, "model.num_hidden_layers": 4, "model.num_attention_heads": 4,
    "model.kda_num_heads": 4, "model.kda_head_dim": 16, "model.q_lora_rank": 16, "model.kv_lora_rank": 16, "model.v_head_dim": 8,
    "model.qk_nope_head_dim": 8, "model.qk_rope_head_dim": 4, "model.intermediate_size": 64, "model.num_experts": 16,
    "model.num_experts_per_token": 4, "model.moe_intermediate_size": 16, "model.routed_expert_hidden_size": 16,
}  # fmt: skip
AXES = {"fsdp": "data_shard", "expert": "expert", "tensor": "tensor", "context": "context", "pipeline": "pipeline"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is timed: rows a process and their length, the length of a row for `context`, of KDA's share, and steps."""

    rows: int
    length: int
    long: int
    share: int
    steps: int


FULL, SMOKE = Sizes(4, 8192, 65536, 65536, 8), Sizes(2, 16, 32, 32, 2)


def settings(preset: str, rows: int, length: int, axis: str | None, processes: int, **changes: Any) -> Config:
    """A config of one stage, cut over `processes` along one axis."""
    config = load_config(preset, changes)
    layout = dataclasses.replace(config.parallel, **({} if axis is None else {axis: processes}))
    stage = dataclasses.replace(config.stages[0], length=length, batch=rows, share=1.0)
    return dataclasses.replace(config, parallel=layout, stages=(stage,))


def text(config: Config) -> TokenSet:
    """Documents of pseudo-random tokens, the same everywhere, some longer than a row."""
    stage, v = config.stages[0], config.model.vocab_size
    sizes = np.random.RandomState(1).randint(2, 3 * stage.length, size=8 * stage.batch + 32)
    cuts = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.random.RandomState(2).randint(3, v, size=int(cuts[-1])).astype(np.uint32)
    return TokenSet(tokens, cuts, np.diff(cuts), [str(i) for i in range(len(sizes))], np.ones(v, dtype=np.int64), 0, 1, 2)


class Job:
    """A model being trained, over `ranks` or by this process alone."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks, self.step = config, ranks, 0
        self.model, self.optimizer = setup.build(config, ranks=ranks)
        self.sampler, self.guard = Sampler(text(config), config.stages[0].length, 0), Guard(None, setup.device_of(config.train))
        self.place, self.places = parallel.place(config.parallel, ranks.rank)

    def train(self) -> tuple[float, float]:
        """A step; its loss and gradient norm."""
        share = self.config.stages[0].batch // self.places
        first = self.step * self.config.stages[0].batch + self.place * share
        batches = micro_batches(self.sampler, first, share, self.config.train.micro_batch)
        self.step += 1
        return train_step(self.model, self.optimizer, self.guard, batches, 0.1, self.ranks).read()[:2]

    def weights(self) -> dict[str, torch.Tensor]:
        """All of them, whole."""
        return {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in self.optimizer.weights().items()}  # pyright: ignore


def seconds(work: Callable[[], Any], times: int, ranks: Ranks) -> float:
    """Median of `times` calls after two more, of the slowest process."""
    taken = []
    for _ in range(times + 2):
        wait(ranks)
        begun = time.perf_counter()
        work()
        wait(ALONE)
        taken.append(ranks.longest(time.perf_counter() - begun))
    return statistics.median(taken[2:])


def wait(ranks: Ranks) -> None:
    """For this process's GPU, and for the other processes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ranks.any(False)


def forget() -> None:
    """Give back the memory of what was measured."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- right


def check(ranks: Ranks, axes: dict[str, str]) -> dict[str, float]:
    """Largest relative difference to one process over three float64 steps, an axis each. Raises AssertionError over 1e-9."""
    made = {"train.dtype": "float64", "train.micro_batch": 1, "optim.qk_clip": 0.01, **SMALL}
    one = Job(settings("tiny", 2 * ranks.size, 32, None, 1, **made), ALONE)
    expected, found = [one.train() for _ in range(3)], {}
    weights = one.weights()
    for name, axis in axes.items():
        job = Job(settings("tiny", 2 * ranks.size, 32, axis, ranks.size, **made), ranks)
        apart = [_apart(torch.tensor(job.train()), torch.tensor(numbers)) for numbers in expected]
        apart += [_apart(t, weights[n]) for n, t in job.weights().items()]
        found[name] = max(apart)
        assert found[name] < 1e-9, (name, found[name])
    return found


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1))


# ---------------------------------------------------------------- fast


def steps(preset: str, ranks: Ranks, axes: dict[str, str], s: Sizes, **changes: Any) -> dict[str, Any]:
    """Seconds of a step of one process and of all along each axis, and the efficiency."""

    def timed(rows: int, length: int, axis: str | None, who: Ranks) -> float:
        job = Job(settings(preset, rows, length, axis, who.size, **changes), who)
        taken = seconds(job.train, s.steps, ranks)
        del job
        forget()
        return taken

    one = timed(s.rows, s.length, None, ALONE)
    found: dict[str, Any] = {"one": {"seconds": one, "rows": s.rows, "length": s.length}}
    for name, axis in axes.items():
        if name == "context":
            alone, taken = timed(1, s.long, None, ALONE), timed(1, s.long, axis, ranks)
            found[name] = {"seconds": taken, "one": alone, "efficiency": alone / (ranks.size * taken), "length": s.long}
        else:
            taken = timed(s.rows * ranks.size, s.length, axis, ranks)
            found[name] = {"seconds": taken, "efficiency": one / taken, "rows": s.rows * ranks.size}
    return found


def context_exchange(preset: str, ranks: Ranks, s: Sizes, device: str, **changes: Any) -> dict[str, float]:
    """Forward and backward of one KDA layer over a document cut among the processes, and of what it exchanges alone."""
    c = settings(preset, 1, s.share * ranks.size, "context", ranks.size, **changes).model
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = DeltaAttention(c.hidden_size, c.kda_num_heads, c.kda_head_dim, conv_size=c.short_conv_kernel_size, device=device, dtype=dtype)
    layer.reset_parameters()
    mesh = make_mesh(dataclasses.replace(load_config("tiny").parallel, context=ranks.size), device)
    assert mesh.context is not None
    context = cut_context(nn.ModuleList([layer]), mesh.context)
    x = torch.randn(1, s.share, c.hidden_size, device=device, dtype=dtype, requires_grad=True)
    state = torch.randn(c.kda_num_heads, c.kda_head_dim, 2 * c.kda_head_dim, device=device, requires_grad=True)
    bounds = torch.tensor([0, s.share], device=device)

    def whole() -> None:
        with context.taking([0, s.share * ranks.size]):
            layer(x, cu_seqlens=bounds).sum().backward()

    def exchange() -> None:
        context.gather(x[0, -3:]).sum().backward()
        context.gather(state).sum().backward()

    times = {"layer": seconds(whole, s.steps, ranks), "exchange": seconds(exchange, s.steps, ranks)}
    return {**times, "share": times["exchange"] / times["layer"], "tokens": s.share}


def save(preset: str, ranks: Ranks, s: Sizes, **changes: Any) -> dict[str, float]:
    """Seconds that training waits for a checkpoint written beside it, and that writing takes; the first save, which allocates, apart."""
    job = Job(settings(preset, ranks.size * s.rows, s.length, "data_shard", ranks.size, **changes), ranks)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(ranks.on_main(lambda: own))
        found = {}
        with Saver(folder, 1, True, ranks) as saver:
            for name in ("first", "second"):
                job.train()
                tensors = {f"{kind}.{n}": t for kind in ("weights", "state") for n, t in getattr(job.optimizer, kind)().items()}
                saver.save(job.step, tensors, {})
                found[f"{name}_stall"] = ranks.longest(saver.take()["save_stall"])
                job.train()
                saver.wait()
                found[f"{name}_written"] = ranks.longest(saver.written)
        found["bytes"] = sum(t.numel() * t.element_size() for t in tensors.values())
        ranks.any(False)
    forget()
    return {**found, "share_of_a_minute": found["second_stall"] / 60}


def measure(ranks: Ranks, preset: str, save_preset: str, smoke: bool, only: list[str]) -> dict[str, Any]:
    """All of it."""
    if ranks.size == 1:
        raise UserError("scale.py: one process; start it by torchrun --nproc-per-node 2")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    axes = {name: axis for name, axis in AXES.items() if not only or name in only}
    s, changes = (SMOKE, SMALL) if smoke else (FULL, {"train.micro_batch": 1, "train.gradient_checkpointing": True})
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "processes": ranks.size,
        "preset": preset,
        "save_preset": save_preset,
        "smoke": smoke,
        "difference": check(ranks, axes),
        "steps": steps(preset, ranks, axes, s, **changes),
    }
    if "context" in axes:
        found["context_exchange"] = context_exchange(preset, ranks, s, device, **changes)
    if not only or "save" in only:
        found["save"] = save(save_preset, ranks, s, **changes)
    return found


def main() -> None:
    """Of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--preset", default="1b", help="of what is timed")
    parser.add_argument("--save-preset", default="150m", help="of what is saved")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--only", nargs="*", default=[], help=f"some of {', '.join(AXES)}, save")
    given = parser.parse_args()
    with parallel.started("auto") as ranks:
        presets = ("tiny", "tiny") if given.smoke else (given.preset, given.save_preset)
        found = measure(ranks, *presets, given.smoke, given.only)
        if ranks.main:
            given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
