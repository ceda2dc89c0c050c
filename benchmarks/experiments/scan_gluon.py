"""The scans of chunked KDA in Gluon for Hopper: state and updates stay in registers as wgmma operands. An experiment.

    PYTHONPATH=src python benchmarks/experiments/scan_gluon.py compile     # for sm_90a, without a card: registers, spills, shared memory
    PYTHONPATH=src python benchmarks/experiments/scan_gluon.py run         # on a card: against the Triton scans, then times

The Triton scans (ops/kda/triton_scan.py) spend 8,450 cycles a chunk where the tensor cores need 1,800: every product waits for itself,
and the state goes through shared memory to become an operand. Here everything is transposed: the state S^T [V, K] is the accumulator
of one product and, rounded, the left operand of the next straight from registers; X^T likewise. Only what the chunks bring is in
shared memory, fetched three chunks ahead by the copy engine.

    X^T = U^T - S^T W^T        o^T = S^T query^T + X^T A_qk^T        S'^T = S^T diag(fade) + X^T tail
    dX^T = do^T A_qk + dS'^T tail^T        dS^T = dS'^T diag(fade) + do^T query - dX^T W
"""

# ruff: noqa: B023  (closures are called in the turn that makes them; calls of kernels are long lists of the same names)

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TOKENS = 64


@gluon.jit
def scan_kernel(
    query, erase, tail, write, scores, entering, updates, decay_end, starts, counts, first_chunk, initial, final, o, H,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, HAS_INITIAL: gl.constexpr, STORE_FINAL: gl.constexpr, KEEP: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One (head, segment), all V = 128 columns, 8 warps. `query` … `updates` are descriptors; states [., V, K], updates [., 64, V]."""
    dtype: gl.constexpr = gl.bfloat16
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])  # [V, K]
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])  # [V, 64]
    A_NARROW: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)  # left operand of a [V, 64] product
    A_X: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)  # of a [V, K] product
    FADE: gl.constexpr = gl.SliceLayout(0, ACC)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    h, n = gl.program_id(0), gl.program_id(1)
    first = gl.load(first_chunk + n)
    last = gl.load(first_chunk + n + 1)
    channel = gl.arange(0, K, FADE)
    value = gl.arange(0, V, gl.SliceLayout(1, ACC))
    at_state = (n * H + h).to(gl.int64) * (K * V) + channel[None, :] * V + value[:, None]  # states outside are [K, V]
    if HAS_INITIAL:
        state = gl.load(initial + at_state)
    else:
        state = gl.zeros([V, K], gl.float32, ACC)
    w_s = gl.allocate_shared_memory(dtype, [STAGES, 64, K], erase.layout)
    t_s = gl.allocate_shared_memory(dtype, [STAGES, 64, K], tail.layout)
    u_s = gl.allocate_shared_memory(dtype, [STAGES, 64, V], write.layout)
    if KEEP:
        s_s = gl.allocate_shared_memory(dtype, [V, K], entering.layout)
    else:
        q_s = gl.allocate_shared_memory(dtype, [STAGES, 64, K], query.layout)
        p_s = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], scores.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    BYTES: gl.constexpr = 2 * 64 * (2 * K + V) if KEEP else 2 * 64 * (3 * K + V + 64)
    for i in gl.static_range(STAGES):
        row = ((first + i) * H + h) * 64
        more = first + i < last
        mbarrier.expect(ready.index(i), BYTES, pred=more)
        tma.async_copy_global_to_shared(erase, [row, 0], ready.index(i), w_s.index(i), pred=more)
        tma.async_copy_global_to_shared(tail, [row, 0], ready.index(i), t_s.index(i), pred=more)
        tma.async_copy_global_to_shared(write, [row, 0], ready.index(i), u_s.index(i), pred=more)
        if not KEEP:
            tma.async_copy_global_to_shared(query, [row, 0], ready.index(i), q_s.index(i), pred=more)
            tma.async_copy_global_to_shared(scores, [row, 0], ready.index(i), p_s.index(i), pred=more)
    stage = 0
    phase = 0
    for chunk in range(first, last):
        place = chunk * H + h
        fade = gl.load(decay_end + place.to(gl.int64) * K + channel)
        held = state.to(dtype)
        if KEEP:
            tma.store_wait(0)
            gl.thread_barrier()
            s_s.store(held)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(entering, [place * V, 0], s_s)
        operand = gl.convert_layout(held, A_NARROW)
        mbarrier.wait(ready.index(stage), phase)
        y = warpgroup_mma(operand, w_s.index(stage).permute((1, 0)), gl.zeros([V, 64], gl.float32, NARROW), use_acc=False, is_async=True)
        if not KEEP:
            out = warpgroup_mma(
                operand, q_s.index(stage).permute((1, 0)), gl.zeros([V, 64], gl.float32, NARROW), use_acc=False, is_async=True
            )
        u = u_s.index(stage).permute((1, 0)).load(NARROW).to(gl.float32)
        state = state * fade[None, :]
        if KEEP:
            y = warpgroup_mma_wait(0, deps=(y,))
        else:
            y = warpgroup_mma_wait(1, deps=(y,))
        x = (u - y).to(dtype)
        state = warpgroup_mma(gl.convert_layout(x, A_X), t_s.index(stage), state, is_async=True)
        if KEEP:
            state = warpgroup_mma_wait(0, deps=(state,))
            gl.thread_barrier()
            u_s.index(stage).permute((1, 0)).store(x)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(updates, [place * 64, 0], u_s.index(stage))
            tma.store_wait(0)
        else:
            out = warpgroup_mma(gl.convert_layout(x, A_NARROW), p_s.index(stage).permute((1, 0)), out, is_async=True)
            state = warpgroup_mma_wait(1, deps=(state,))
            out = warpgroup_mma_wait(0, deps=(out,))
            gl.thread_barrier()  # all have read U, whose place the outputs take on their way
            u_s.index(stage).permute((1, 0)).store(out.to(dtype))
            gl.thread_barrier()
            rows = gl.arange(0, 64, gl.SliceLayout(1, OUT))[:, None]
            cols = gl.arange(0, V, gl.SliceLayout(0, OUT))[None, :]
            base = (gl.load(starts + chunk).to(gl.int64) * H + h) * V
            gl.store(o + base + rows * (H * V) + cols, u_s.index(stage).load(OUT), mask=rows < gl.load(counts + chunk))
        gl.thread_barrier()  # this stage's buffers are free
        row = (place + STAGES * H) * 64
        more = chunk + STAGES < last
        fence_async_shared()
        mbarrier.expect(ready.index(stage), BYTES, pred=more)
        tma.async_copy_global_to_shared(erase, [row, 0], ready.index(stage), w_s.index(stage), pred=more)
        tma.async_copy_global_to_shared(tail, [row, 0], ready.index(stage), t_s.index(stage), pred=more)
        tma.async_copy_global_to_shared(write, [row, 0], ready.index(stage), u_s.index(stage), pred=more)
        if not KEEP:
            tma.async_copy_global_to_shared(query, [row, 0], ready.index(stage), q_s.index(stage), pred=more)
            tma.async_copy_global_to_shared(scores, [row, 0], ready.index(stage), p_s.index(stage), pred=more)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if KEEP:
        tma.store_wait(0)
    if STORE_FINAL:
        gl.store(final + at_state, state)


@gluon.jit
def scan_back_kernel(
    query, erase, tail, scores, leaving, decay_end, starts, counts, first_chunk, do, dfinal, dinitial, dupdates, H,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, HAS_DFINAL: gl.constexpr, STORE_DINITIAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The reverse scan; leaving [., V, K] through a descriptor, dupdates [., V, 64] float32."""
    dtype: gl.constexpr = gl.bfloat16
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])
    A_NARROW: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    A_X: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    FADE: gl.constexpr = gl.SliceLayout(0, ACC)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    h, n = gl.program_id(0), gl.program_id(1)
    first = gl.load(first_chunk + n)
    last = gl.load(first_chunk + n + 1)
    channel = gl.arange(0, K, FADE)
    value = gl.arange(0, V, gl.SliceLayout(1, ACC))
    at_state = (n * H + h).to(gl.int64) * (K * V) + channel[None, :] * V + value[:, None]
    if HAS_DFINAL:
        dstate = gl.load(dfinal + at_state)
    else:
        dstate = gl.zeros([V, K], gl.float32, ACC)
    w_s = gl.allocate_shared_memory(dtype, [STAGES, 64, K], erase.layout)
    t_s = gl.allocate_shared_memory(dtype, [STAGES, 64, K], tail.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 64, K], query.layout)
    p_s = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], scores.layout)
    d_s = gl.allocate_shared_memory(dtype, [STAGES, 64, V], query.layout)
    s_s = gl.allocate_shared_memory(dtype, [V, K], leaving.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    rows = gl.arange(0, 64, gl.SliceLayout(1, ROWS))[:, None]
    cols = gl.arange(0, V, gl.SliceLayout(0, ROWS))[None, :]
    BYTES: gl.constexpr = 2 * 64 * (3 * K + 64)
    for i in gl.static_range(STAGES):
        chunk = gl.maximum(last - 1 - i, 0)
        row = (chunk * H + h) * 64
        more = last - 1 - i >= first
        mbarrier.expect(ready.index(i), BYTES, pred=more)
        tma.async_copy_global_to_shared(erase, [row, 0], ready.index(i), w_s.index(i), pred=more)
        tma.async_copy_global_to_shared(tail, [row, 0], ready.index(i), t_s.index(i), pred=more)
        tma.async_copy_global_to_shared(query, [row, 0], ready.index(i), q_s.index(i), pred=more)
        tma.async_copy_global_to_shared(scores, [row, 0], ready.index(i), p_s.index(i), pred=more)
        base = (gl.load(starts + chunk, mask=more, other=0).to(gl.int64) * H + h) * V
        here = rows < gl.load(counts + chunk, mask=more, other=0)
        async_copy.async_copy_global_to_shared(d_s.index(i), do + base + rows * (H * V) + cols, mask=here)
        async_copy.commit_group()
    stage = 0
    phase = 0
    for step in range(first, last):
        chunk = first + last - 1 - step
        place = chunk * H + h
        fade = gl.load(decay_end + place.to(gl.int64) * K + channel)
        held = dstate.to(dtype)
        tma.store_wait(0)
        async_copy.wait_group(STAGES - 1)
        gl.thread_barrier()
        s_s.store(held)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(leaving, [place * V, 0], s_s)
        mbarrier.wait(ready.index(stage), phase)
        up = d_s.index(stage).permute((1, 0))
        dx = warpgroup_mma(up, p_s.index(stage), gl.zeros([V, 64], gl.float32, NARROW), use_acc=False, is_async=True)
        dx = warpgroup_mma(gl.convert_layout(held, A_NARROW), t_s.index(stage).permute((1, 0)), dx, is_async=True)
        dstate = dstate * fade[None, :]
        dstate = warpgroup_mma(up, q_s.index(stage), dstate, is_async=True)
        dx = warpgroup_mma_wait(1, deps=(dx,))
        down = gl.convert_layout((-dx).to(dtype), A_X)
        dstate = warpgroup_mma(down, w_s.index(stage), dstate, is_async=True)
        token = gl.arange(0, 64, gl.SliceLayout(0, NARROW))[None, :]
        line = gl.arange(0, V, gl.SliceLayout(1, NARROW))[:, None]
        gl.store(dupdates + place.to(gl.int64) * (64 * V) + line * 64 + token, dx)
        dstate = warpgroup_mma_wait(0, deps=(dstate,))
        gl.thread_barrier()
        ahead = gl.maximum(chunk - STAGES, 0)
        row = (ahead * H + h) * 64
        more = chunk - STAGES >= first
        fence_async_shared()
        mbarrier.expect(ready.index(stage), BYTES, pred=more)
        tma.async_copy_global_to_shared(erase, [row, 0], ready.index(stage), w_s.index(stage), pred=more)
        tma.async_copy_global_to_shared(tail, [row, 0], ready.index(stage), t_s.index(stage), pred=more)
        tma.async_copy_global_to_shared(query, [row, 0], ready.index(stage), q_s.index(stage), pred=more)
        tma.async_copy_global_to_shared(scores, [row, 0], ready.index(stage), p_s.index(stage), pred=more)
        base = (gl.load(starts + ahead, mask=more, other=0).to(gl.int64) * H + h) * V
        here = rows < gl.load(counts + ahead, mask=more, other=0)
        async_copy.async_copy_global_to_shared(d_s.index(stage), do + base + rows * (H * V) + cols, mask=here)
        async_copy.commit_group()
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    tma.store_wait(0)
    if STORE_DINITIAL:
        gl.store(dinitial + at_state, dstate)


def compile_for_hopper() -> None:
    """Registers, spills and shared memory for sm_90a, without a card."""
    import os
    import re
    import subprocess
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    wide = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    square = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    state = gl.NVMMASharedLayout.get_default_for([128, 128], gl.bfloat16)

    def descriptor(rows: int, cols: int, layout: gl.NVMMASharedLayout) -> str:
        return f"tensordesc<bf16[{rows}, {cols}],{layout!r}>"

    types = {
        **dict.fromkeys(("query", "erase", "tail", "write", "updates"), descriptor(64, 128, wide)),
        "scores": descriptor(64, 64, square),
        **dict.fromkeys(("entering", "leaving"), descriptor(128, 128, state)),
        **dict.fromkeys(("decay_end", "initial", "final", "dfinal", "dinitial", "dupdates"), "*fp32"),
        "starts": "*i64", **dict.fromkeys(("counts", "first_chunk"), "*i32"), **dict.fromkeys(("o", "do"), "*bf16"), "H": "i32",
    }  # fmt: skip
    binary = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    shared = {"K": 128, "V": 128, "num_warps": 8}
    for name, kernel, constants in (
        ("scan, outputs", scan_kernel, {**shared, "STAGES": 3, "HAS_INITIAL": False, "STORE_FINAL": False, "KEEP": False}),
        ("scan, states", scan_kernel, {**shared, "STAGES": 3, "HAS_INITIAL": True, "STORE_FINAL": True, "KEEP": True}),
        ("scan back", scan_back_kernel, {**shared, "STAGES": 2, "HAS_DFINAL": True, "STORE_DINITIAL": True}),
    ):
        names = [p.name for p in kernel.params]
        signature = {n: "constexpr" if n in constants else types[n] for n in names}
        attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*") or n == "H"}
        source = GluonASTSource(kernel, signature, {n: constants[n] for n in names if n in constants}, attrs)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(built.asm["cubin"])
            f.flush()
            usage = subprocess.run([binary, "-res-usage", f.name], capture_output=True, text=True).stdout
            sass = subprocess.run([binary, "-sass", f.name], capture_output=True, text=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        count = {
            op: len(re.findall(rf"\b{op}\b", sass))
            for op in ("HGMMA", "WARPGROUP", "BAR", "LDS", "STS", "STSM", "LDSM", "LDG", "STG", "MOV")
        }
        print(f"{name}: registers {found[1]}, stack {found[2]}, shared {built.metadata.shared}", count)


def run_on_card() -> None:
    """Both scans against the Triton ones on the same prepared chunks, then the times of each."""
    import triton
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    sys.path.insert(0, "benchmarks")
    import kda as bench

    from atoll.ops.kda import triton_path as path

    def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
        flat = x.view(-1, x.shape[-1])
        block = [rows, flat.shape[1]]
        return TensorDescriptor.from_tensor(flat, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))

    def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.double() - b.double()).norm() / b.double().norm())

    for length, heads, edges in ((8192, 96, None), (500, 3, [0, 1, 1, 18, 85, 300, 364, 500])):
        tensors = bench.inputs(1, length, heads, 128, 128, torch.bfloat16)
        table = path.chunk_table(tuple(edges or (0, length)), tensors[0].device, heads)
        call = path._call(tensors[0], tensors[2], table, 128**-0.5, -5.0, None)
        made = path._prepare(tuple(tensors), call, True)[0]
        places = table.chunks * heads
        start = torch.randn(table.segments, heads, 128, 128, device="cuda")
        o, do, final = torch.empty_like(tensors[2]), torch.randn_like(tensors[2]), torch.empty_like(start)
        path._scan(made, start, call, o, final, keep=False)
        entering, updates = path._scan(made, start, call, None, None, keep=True)
        dstart = torch.empty_like(start)
        leaving, dupdates = path._scan_back(made, do, start, dstart, call)
        new_o, new_final, new_dstart = torch.full_like(o, float("nan")), torch.empty_like(final), torch.empty_like(dstart)
        new_entering, new_leaving = (torch.empty(places, 128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        new_updates = torch.empty(places, 64, 128, device="cuda", dtype=torch.bfloat16)
        new_dupdates = torch.empty(places, 128, 64, device="cuda")
        d = {n: descriptor(getattr(made, n), 64) for n in ("query", "erase", "tail", "write", "scores")}
        d |= {"entering": descriptor(new_entering, 128), "leaving": descriptor(new_leaving, 128), "updates": descriptor(new_updates, 64)}
        tables = (table.starts, table.counts, table.first)

        def forward(
            keep: bool, d=d, made=made, tables=tables, start=start, new_final=new_final, new_o=new_o, heads=heads, table=table
        ) -> None:
            scan_kernel[(heads, table.segments)](
                d["query"], d["erase"], d["tail"], d["write"], d["scores"], d["entering"], d["updates"], made.decay_end, *tables,
                start, new_final, new_o, heads, K=128, V=128, STAGES=3, HAS_INITIAL=True, STORE_FINAL=True, KEEP=keep, num_warps=8,
            )  # fmt: skip

        def backward(
            d=d, made=made, tables=tables, start=start, do=do, new_dstart=new_dstart, new_dupdates=new_dupdates, heads=heads, table=table
        ) -> None:
            scan_back_kernel[(heads, table.segments)](
                d["query"], d["erase"], d["tail"], d["scores"], d["leaving"], made.decay_end, *tables, do, start, new_dstart,
                new_dupdates, heads, K=128, V=128, STAGES=2, HAS_DFINAL=True, STORE_DINITIAL=True, num_warps=8,
            )  # fmt: skip

        forward(False), forward(True), backward()
        torch.cuda.synchronize()
        print(f"{length} x {heads}:", {
            "o": ratio(new_o, o), "final": ratio(new_final, final), "entering": ratio(new_entering.mT, entering),
            "updates": ratio(new_updates, updates), "leaving": ratio(new_leaving.mT, leaving), "dupdates": ratio(new_dupdates.mT, dupdates),
            "dstart": ratio(new_dstart, dstart),
        }, flush=True)  # fmt: skip
        if length > 1000:
            timed = {
                "triton outputs": lambda: path._scan(made, start, call, o, final, keep=False),
                "gluon outputs": lambda: forward(False),
                "triton states": lambda: path._scan(made, start, call, None, None, keep=True),
                "gluon states": lambda: forward(True),
                "triton back": lambda: path._scan_back(made, do, start, dstart, call),
                "gluon back": backward,
            }
            print({name: round(triton.testing.do_bench(f, return_mode="median"), 4) for name, f in timed.items()}, flush=True)


if __name__ == "__main__":
    compile_for_hopper() if sys.argv[1:] == ["compile"] else run_on_card()
