"""All kernels but chunked KDA's compiled for Hopper, which needs no card: the interpreter takes what a compiler may not.

Compiled in a process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

import importlib
import json
import re

import pytest
import torch
from ops.hopper import SHARED, compile_kernel, elsewhere

BF16, F32, I32, I64, NONE = "*bf16", "*fp32", "*i32", "*i64", None


def step_case(width, value, columns, tokens=1, ring=True, drafts=False, fused=False, state=F32, major=True, bounded=True, warps=8):
    heads, taps = 96, 4
    channels = heads * (2 * width + value)
    rows = 8 if ring else taps - 1
    optional = [NONE if ring else BF16, I64, I64 if ring else NONE, I64 if drafts else NONE, *([BF16, F32] if fused else [NONE, NONE])]
    size = heads * width * value
    strides = [8 * size, size, width * value, *((1, width) if major else (value, 1))]
    values = (
        [BF16] * 3 + [F32] * 3 + [BF16, BF16, F32, F32, state, BF16, *optional, BF16, *[channels] * 3, *strides, heads, 0.1, -5.0, 1e-5]
    )
    flags = {
        "K": width, "V": value, "BV": columns, "T": tokens, "W": taps, "TAPS": 4, "ROWS": rows, "MAJOR": major, "RING": ring,
        "DRAFTS": drafts, "HAS_SLOTS": True, "HAS_ACCEPTED": drafts, "BOUNDED": bounded, "FUSED": fused, "EVICT": "evict_first",
    }  # fmt: skip
    return "step_kernels", "step_kernel", values, flags, warps


def conv_case(packed, state, taps=4):
    edges, held = (I64 if packed else NONE), (BF16 if state else NONE)
    values = [BF16, F32, held, edges, BF16, 8192, 36864, 8192, 8, 4]
    return "conv_kernels", "conv_kernel", values, {"W": taps, "BT": 16, "BC": 256, "PACKED": packed, "HAS_STATE": state}, 4


def conv_back_case(packed, state, taps=4):
    edges, held = (I64 if packed else NONE), (BF16 if state else NONE)
    values = [BF16, F32, held, edges, BF16, held, BF16, F32, 8192, 36864, 8192, 8, 4, 256]
    flags = {"W": taps, "BC": 512, "GROUP": 4, "PACKED": packed, "HAS_STATE": state, "HAS_DFINAL": state}
    return "conv_kernels", "conv_back_kernel", values, flags, 4


def norm_cases(width, gated):
    from atoll.ops.norm_launch import norm_config

    c = norm_config(width)
    gate = BF16 if gated else NONE
    flags = {"D": width, "COUNT": width, "ROWS": c.rows, "BLOCK": c.block, "PIECES": c.pieces, "WEIGHT": True, "GATED": gated}
    forward = [BF16, F32, gate, BF16, F32, 8192, 1e-5]
    backward = [BF16, F32, gate, F32, BF16, BF16, gate, F32, 8192, 8192, 528]
    return [
        ("norm_kernels", "norm_kernel", forward, {**flags, "CAST": not gated, "KEEP": True}, c.warps),
        ("norm_kernels", "norm_back_kernel", backward, flags, c.warps),
    ]


def product_case(config, kind, dtype=BF16, latent=3584, inner=3072, keep="nothing"):
    up, back = kind == "up", kind in ("back", "dx")
    depth, width = (latent, inner) if kind in ("up", "back") else (inner, latent)
    blocks = -(-width // (config.weights // 2 if up else config.weights))
    values = [dtype, *[I32] * 3, *[dtype] * 4, depth, width, blocks, 4.0, 25.0]
    flags = {
        "FULL": config.full, "HALVES": config.halves, "FIRST": config.first, "SECOND": config.second, "GROUP": config.group,
        "MW": config.weights, "BK": config.depth, "STAGES": config.stages, "TOPK": 16, "GATHER": kind in ("up", "back"),
        "SCATTER": kind in ("down", "dx"), "TRANSPOSED": back, "TWICE": kind == "dx",
        "EVEN": depth % config.depth == 0 and (not back or width % config.weights == 0), "ACT": "situ" if up else "none", "KEEP": keep,
        "PRECISION": "tf32x3",
    }  # fmt: skip
    return "experts.rows_kernels", "rows_kernel", values, flags, config.warps


def weight_case(config, sides, dtype=BF16, latent=3584, inner=3072):
    m, n = (inner, latent) if sides == 2 else (latent, inner)
    tall, wide = min(config.tall, 1 << (m - 1).bit_length()), min(config.wide, 1 << (n - 1).bit_length())
    flags = {
        "SIDES": sides, "BM": tall, "BN": wide, "BK": config.deep, "GROUP": config.grad_group, "STAGES": config.grad_stages, "TOPK": 16,
        "LEFT_GATHER": sides == 1, "RIGHT_GATHER": sides == 2, "EVEN": m % tall == 0 and n % wide == 0, "PRECISION": "tf32x3",
    }  # fmt: skip
    values = [dtype, dtype, I32, I32, dtype, dtype, m, n, -(-m // tall), -(-n // wide)]
    return "experts.weight_kernels", "weight_kernel", values, flags, config.grad_warps


def route_case(counted):
    held = [I64, I64] if counted else [NONE, NONE]
    values = [F32, F32, "*i1" if counted else NONE, *(["*fp64"] * 2 if counted else [NONE] * 2), I64, F32, F32, *held]
    flags = {
        "E": 896, "LANES": 1024, "K": 16, "PLACES": 16, "BINS": 1000 if counted else 0, "MASKED": counted, "COUNTED": counted,
        "LOADED": counted,
    }  # fmt: skip
    return "routing.route_kernels", "route_kernel", values, flags, 1


def sort_cases():
    sizes = {"FULL": 256, "WIDEST": 192}
    return {
        "count": ("experts.sort_kernels", "count_kernel", [I64, I32, 131072, 896], {"BLOCK": 256, "BINS": 1024}, 4),
        "scan": ("experts.sort_kernels", "scan_kernel", [I32, I32, 512, 896], {"ROWS": 256, "COLUMNS": 16}, 4),
        "layout": ("experts.sort_kernels", "layout_kernel", [I32, I32, I32, 896], {**sizes, "HALVES": 2, "BINS": 1024}, 4),
        "place": ("experts.sort_kernels", "place_kernel", [I64, *[I32] * 3, 131072, 896], {"BLOCK": 256, "PART": 32}, 4),
        "table": ("experts.sort_kernels", "table_kernel", [I32, I32, I32, 1920, 896, 10], {**sizes, "BLOCK": 32}, 4),
    }


def expert_cases():
    from atoll.ops.experts.plan import HOPPER, choose

    few, small = choose(20, 3584, 3072, torch.bfloat16, True), choose(8192, 192, 160, torch.bfloat16, True)
    single, other = choose(8192, 3584, 3072, torch.float32, True), choose(8192, 3584, 3072, torch.bfloat16, False)
    points = {"ROWS": 1, "BLOCK": 1024, "PIECES": 3, "ACT": "situ"}
    return {
        **{f"experts {kind}": product_case(HOPPER, kind) for kind in ("up", "down", "back", "dx")},
        "experts up, kept": product_case(HOPPER, "up", keep="also"),
        "experts up, few tokens": product_case(few, "up"),
        "experts up, narrow": product_case(small, "up", latent=192, inner=160),
        "experts dx, narrow, of no round size": product_case(small, "dx", latent=101, inner=50),
        "experts dx, float32": product_case(single, "dx", F32),
        "experts down, other cards": product_case(other, "down"),
        "experts, gradient of w1 and w3": weight_case(HOPPER, 2),
        "experts, gradient of w2, narrow": weight_case(small, 1, latent=192, inner=160),
        "experts, gradient of w2, float32": weight_case(single, 1, F32),
        "experts slope": (
            "experts.point_kernels", "slope_kernel", [BF16, BF16, F32, I32, I32, BF16, BF16, F32, 3072, 4.0, 25.0], points, 4,
        ),
        "experts sum": (
            "experts.point_kernels", "sum_kernel", [BF16, I64, F32, BF16, 8192, 896, 3584],
            {"ROWS": 1, "BLOCK": 512, "TOPK": 16, "WEIGHTED": True}, 2,
        ),
    }  # fmt: skip


def cases():
    small = {"W": 4, "ROWS": 4, "BC": 512, "PACKED": True}
    return {
        "step of one sequence": step_case(128, 128, 32, warps=4),
        "step of many sequences": step_case(128, 128, 64),
        "step with norm": step_case(128, 128, 128, fused=True),
        "step, bfloat16 state": step_case(128, 128, 64, state=BF16, warps=4),
        "step, four drafts": step_case(128, 128, 64, tokens=4, drafts=True),
        "step, plain window, strides, softplus": step_case(64, 32, 16, ring=False, major=False, bounded=False, warps=1),
        "commit": ("step_kernels", "commit_kernel", [BF16, BF16, I64, 110592], {"BLOCK": 1024}, 4),
        "convolution": conv_case(False, False),
        "convolution, packed, state": conv_case(True, True, taps=3),
        "convolution back": conv_back_case(False, False),
        "convolution back, packed, state": conv_back_case(True, True, taps=3),
        "final state": ("conv_kernels", "final_kernel", [BF16, BF16, I64, BF16, 8192, 36864, 8192], {**small, "HAS_STATE": True}, 4),
        "initial state back": (
            "conv_kernels", "initial_back_kernel", [BF16, F32, BF16, I64, *[BF16] * 3, 8192, 36864, 8192], {**small, "HAS_DFINAL": True}, 4,
        ),
        **dict(zip(("norm 7168", "norm 7168 back"), norm_cases(7168, False), strict=True)),
        **dict(zip(("gated norm 128", "gated norm 128 back"), norm_cases(128, True), strict=True)),
        "route": route_case(False),
        "route and count": route_case(True),
        **sort_cases(),
        **expert_cases(),
    }  # fmt: skip


def compile_case(module, name, values, flags, warps):
    """What the compiler made of it, in numbers."""
    folder = "atoll.ops.kda." if module == "step_kernels" else "atoll.ops."
    made = compile_kernel(getattr(importlib.import_module(folder + module), name), values, flags, num_warps=warps)
    shape = f"{flags['BV']}x{flags['K']}x" if "BV" in flags else "none"
    return {
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", made.asm["ptx"])),
        "wide_stores": len(re.findall(r"st\.global[.\w:]*\.v4\.b32", made.asm["ptx"])),
        "shared": made.metadata.shared,
        "products": len(re.findall(r"wgmma\.mma_async", made.asm["ptx"])),
        "awaited": len(re.findall(r"warp_group_dot_wait .*pendings = [1-9]", made.asm["ttgir"])),
        "state_moves": sum("convert_layout" in line and f"tensor<{shape}" in line for line in made.asm["ttgir"].splitlines()),
    }


@pytest.fixture(scope="module")
def compiled():
    return elsewhere(__file__)


def test_every_kernel_compiles(compiled):
    assert set(compiled) == set(cases())


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith("step")])
def test_the_state_is_read_in_16_bytes_and_stays_in_its_registers(compiled, name):
    """A change of layout would send the whole slab through shared memory."""
    assert compiled[name]["state_moves"] == 0
    _, _, values, flags, warps = cases()[name]
    if not flags["MAJOR"]:
        return
    per_load = 8 if values[10] == BF16 else 4
    slab = flags["K"] * flags["BV"] // (per_load * 32 * warps)
    assert compiled[name]["wide_loads"] >= slab
    assert compiled[name]["wide_stores"] >= slab


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith("experts")])
def test_experts_fit_a_multiprocessor_and_their_products_overlap(compiled, name):
    """Tensor cores' own instructions, whose results are not awaited in the step that issues them.

    Except float32's three-fold products, and rows that do not start on 4 bytes, which no asynchronous copy takes.
    """
    assert compiled[name]["shared"] <= SHARED
    _, kernel, _, flags, _ = cases()[name]
    if kernel not in ("rows_kernel", "weight_kernel"):
        return
    assert compiled[name]["products"] > 0
    loops = 1 if kernel == "weight_kernel" else len(flags["FIRST"]) + (flags["HALVES"] > 1)
    assert compiled[name]["awaited"] == (0 if "float32" in name or "no round size" in name else loops)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: compile_case(*case) for name, case in cases().items()}))
