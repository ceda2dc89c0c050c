"""The attention residual's kernels compiled for Hopper, which needs no card: registers, spills, shared memory, width of the loads.

Compiled in a process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

import importlib
import json
import re

import pytest
import torch
from ops.hopper import SHARED, compile_kernel, elsewhere, resources

BF16, F32 = "*bf16", "*fp32"


def mix_case(sources, width, back=False, fused=True, carry=False, kind=BF16, tokens=8192):
    from atoll.ops.attn_res.mix_launch import mix_config

    c = mix_config(width, sources, fused)
    flags = {"R": sources, "D": width, "ROWS": c.rows, "BLOCK": c.block, "PIECES": c.pieces, "CARRY": carry, "OUT_NORM": fused}
    rows = (kind,) * max(sources, 1)
    given = [kind if carry else None, F32 if carry else None, BF16, BF16, BF16 if fused else None]  # mean, lse, the vectors
    extra = kind if fused and sources else None  # the last source's delta, or its gradient
    if not back:
        values = [rows, extra, kind, *given, kind, F32, tokens, 1e-5, 1e-5]
        flags |= {"STAGES": c.stages, "HAS_DELTA": extra is not None, "KEEP": False}
        return "mix_kernels", "mix_kernel", values, flags, {"num_warps": c.warps}
    values = [rows, *given, kind, extra, None, rows, kind, F32, F32, tokens, tokens, c.programs, 1e-5, 1e-5]
    flags |= {"RP": max(2, 1 << (sources - 1).bit_length()), "STAGES": c.back_stages, "HAS_LAST": extra is not None, "HAS_LSE": False}
    return "mix_kernels", "mix_back_kernel", values, flags, {"num_warps": c.back_warps, "maxnreg": c.back_registers}


def block_cases(sources, queries, width, tokens, kind=BF16, partial=BF16):
    from atoll.ops.attn_res import block_launch as launch

    c, rows, dtypes = launch.BlockConfig(), (kind,) * sources, {BF16: torch.bfloat16, F32: torch.float32}
    precision = launch._precision(dtypes[kind])
    flags = {"R": sources, "Q": queries, "D": width, "QP": launch._padded(queries), "PRECISION": precision}
    parts = 1 if kind == F32 else 2
    made = {}
    columns = launch._columns(width, 1024)
    tile = {"Q": queries, "D": width, "BLOCK": columns, "PARTS": parts}
    made["keys"] = ("keys_kernel", [(BF16,) * queries, (BF16,) * queries, kind], tile, 4)
    lines, columns, stages, warps = c.many if tokens > 256 else c.few
    tile = {"BM": lines, "BK": launch._columns(width, columns), "PARTS": parts, "STAGES": stages}
    made["scores"] = ("scores_kernel", [rows, kind, F32, F32, tokens, 1e-5], {**flags, **tile}, warps)
    made["weights"] = ("weights_kernel", [F32, F32, F32, tokens, queries], {"R": sources, "BLOCK": 256}, 2)
    columns, lines = launch._tile(width, c.values[0])
    tile = {"R": sources, "D": width, "ROWS": lines, "BLOCK": columns}
    made["values"] = ("values_kernel", [rows, F32, partial, tokens, queries], tile, c.values[1])
    kinds = (dtypes[kind], dtypes[partial])
    columns, stages, warps = c.scores_back
    tile = {"RP": launch._padded(sources), "BK": launch._columns(width, launch._narrowed(columns, queries, *kinds)), "STAGES": stages}
    made["scores back"] = ("scores_back_kernel", [partial, F32, rows, *[F32] * 5, tokens], {**flags, **tile}, warps)
    lines, columns, stages, warps = c.sources_back
    tile["BK"], tile["STAGES"] = launch._columns(width, launch._narrowed(columns, queries, *kinds)), stages
    made["sources back"] = ("sources_back_kernel", [partial, rows, kind, F32, F32, F32, kind, tokens, lines], {**flags, **tile}, warps)
    lines, columns, stages, warps = c.keys_back
    tile = {"BM": lines, "BK": launch._columns(width, columns), "PARTS": parts, "STAGES": stages}
    made["keys back"] = ("keys_back_kernel", [rows, F32, F32, tokens, 1024], {**flags, **tile}, warps)
    return {name: ("block_kernels", kernel, values, each, {"num_warps": w}) for name, (kernel, values, each, w) in made.items()}


def cases():
    made = {
        "mix of 9, 7168": mix_case(9, 7168, fused=False),
        "mix of 9, 7168, fused": mix_case(9, 7168),
        "mix of 9, 7168, back": mix_case(9, 7168, True, fused=False),
        "mix of 9, 7168, fused, back": mix_case(9, 7168, True),
        "mix of 9, 2048": mix_case(9, 2048, fused=False),
        "mix of 9, 2048, back": mix_case(9, 2048, True, fused=False),
        "mix of 64, 7168": mix_case(64, 7168),
        "mix of 64, 7168, back": mix_case(64, 7168, True, fused=False),
        "mix of 5, 1000, float32": mix_case(5, 1000, kind=F32, tokens=1),
        "mix of 5, 1000, float32, back": mix_case(5, 1000, True, kind=F32, tokens=1),
        "phase two": mix_case(1, 7168, carry=True),
        "phase two, back": mix_case(1, 7168, True, carry=True),
        "phase two, first of a block": mix_case(0, 7168, carry=True),
        "phase two, first of a block, back": mix_case(0, 7168, True, carry=True),
    }
    shapes = {
        "": (8, 24, 7168, 8192),
        "one token ": (8, 24, 7168, 1),
        "float32 ": (16, 64, 7168, 8192, F32, F32),
        "small ": (1, 1, 16, 300),
    }
    for name, shape in shapes.items():
        made |= {f"{name}{part}": case for part, case in block_cases(*shape).items()}
    return made


def compile_case(module, name, values, flags, options):
    """What the compiler made of it, in numbers."""
    made = compile_kernel(getattr(importlib.import_module(f"atoll.ops.attn_res.{module}"), name), values, flags, **options)
    used = resources(made)
    return {
        "registers": used["reg"],
        "stack": used["stack"],
        "shared": made.metadata.shared,
        "threads": 32 * options["num_warps"],
        "wide_loads": len(re.findall(r"(?:ld\.global|cp\.async)[^\n]*(?:\.v4\.b32|, 0x10|, 16)", made.asm["ptx"])),
    }


@pytest.fixture(scope="module")
def compiled():
    return elsewhere(__file__)


def test_every_kernel_compiles_and_fits(compiled):
    assert set(compiled) == set(cases())
    for name, made in compiled.items():
        assert made["shared"] <= SHARED, name
        assert made["registers"] * made["threads"] <= 65536, name


def test_rows_are_fetched_ahead_in_wide_loads(compiled):
    """Two rows wait in shared memory; phase one's tiles are read in 16 bytes."""
    for name in ("mix of 9, 7168", "mix of 9, 7168, fused", "mix of 9, 7168, back"):
        assert compiled[name]["shared"] >= 2 * 7168 * 2
    for name in ("scores", "values", "scores back", "sources back", "keys back", "mix of 9, 2048", "mix of 9, 2048, back"):
        assert compiled[name]["wide_loads"] >= 8, name


def test_registers_hold_what_a_row_needs(compiled):
    """Two programs of 8 warps, or one of 16, share a multiprocessor's registers; few or none are spilled."""
    for name, made in compiled.items():
        if "7168" in name or name.startswith("phase two"):
            assert made["registers"] <= 128, name
        assert made["stack"] <= (112 if "back" in name else 0), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: compile_case(*case) for name, case in cases().items()}))
