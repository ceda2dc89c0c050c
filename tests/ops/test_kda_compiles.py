"""Every KDA kernel a call can reach, compiled for Hopper without a card: the interpreter takes what a compiler may not.

The launches are recorded from real calls on tensors without memory, so what is compiled is what a card would be given. Compiled in a
process of its own, because Triton reads TRITON_INTERPRET when it is imported:

    PYTHONPATH=src python tests/ops/test_kda_compiles.py [--all]      # prints a table: seconds, registers, spills, shared memory
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import torch

SHARED = 227 * 1024  # bytes of shared memory a program can have on sm_90
WIDTHS = (32, 64, 128, 256)
KERNELS = (
    "gate_kernel", "gradient_kernel", "join_kernel", "local_kernel", "pair_gradient_kernel", "prepare_kernel", "scan_back_kernel",
    "scan_kernel", "table_kernel",
)  # fmt: skip


def record(width, value, dtype, heads=96):
    """(kernel, arguments, options) of every launch of a forward and a backward call with states, without them, packed on the device."""
    from atoll.ops.kda import table as tables
    from atoll.ops.kda import triton_launches as launches

    found = []

    def launch(kernel, grid, where, *arguments, **options):
        found.append((kernel, arguments, {"num_stages": 1, **options}))

    shape, card = (1, 8192, heads), {"device": "meta", "dtype": dtype}
    floats = {"device": "meta", "dtype": torch.float32}
    inputs = [torch.empty(*shape, d, **card) for d in (width, width, value, width)]
    inputs += [torch.empty(*shape, **card), torch.empty(heads, **floats), torch.empty(heads, width, **floats)]
    state, up = torch.empty(2, heads, width, value, **floats), torch.empty(*shape, value, **card)
    with contextlib.ExitStack() as stack:
        for module in (launches, tables):
            stack.callback(setattr, module, "launch", module.launch)
            module.launch = launch
        tables.device_table(torch.empty(3, device="meta", dtype=torch.int64), 8192, 16)
        for size, held in itertools.product((0, 16), (None, state)):
            table = tables.host_table((0, 8100, 8192), torch.device("meta"), size)
            call = launches.make_call(inputs[0], inputs[2], table, 0.1, -5.0, None)
            final = None if held is None else torch.empty_like(state)
            launches.forward(tuple(inputs), held, final, up, call)
            launches.backward(tuple(inputs), up, held, up, final, final, call)
    return found


def signature(kernel, arguments, options):
    """What Triton specialises on: types, constants, divisibility by 16."""
    kinds, constants, hints = {}, {}, {}
    names = {"torch.bfloat16": "*bf16", "torch.float32": "*fp32", "torch.int64": "*i64", "torch.int32": "*i32"}
    for i, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if value is None or (type(value) is int and value == 1):
            kinds[name], constants[(i,)] = "constexpr", value
            continue
        kinds[name] = names[str(value.dtype)] if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            hints[(i,)] = [["tt.divisibility", 16]]
    for name in kernel.arg_names[len(arguments) :]:
        kinds[name], constants[(kernel.arg_names.index(name),)] = "constexpr", options[name]
    launch = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg") if options.get(name) is not None}
    return kinds, constants, hints, launch


def build(kernel, arguments, options):
    """Seconds of one core, shared memory, registers and spilled bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds, constants, hints, launch = signature(kernel, arguments, options)
    source = ASTSource(fn=kernel, signature={n: kinds[n] for n in kernel.arg_names}, constexprs=constants, attrs=hints)
    start = sum(os.times()[:4])  # of a core, the assembler's included: other work on the machine does not count
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    seconds = sum(os.times()[:4]) - start
    return {"seconds": round(seconds, 1), "shared": made.metadata.shared, **resources(made.asm["cubin"])}


def resources(cubin):
    """Registers a thread and bytes of spills, read from the compiled code."""
    import tempfile
    from pathlib import Path

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {key.lower(): int(re.search(rf"{key}:(\d+)", text).group(1)) for key in ("REG", "STACK", "LOCAL")}


def combinations(everything):
    """(K, V, dtype, heads, kernels): the standard heads, and of the widest what needs most memory; every pair with `everything`."""
    if everything:
        for dtype, width, value in itertools.product((torch.bfloat16, torch.float32), WIDTHS, WIDTHS):
            yield width, value, dtype, 96, KERNELS
        yield 128, 128, torch.bfloat16, 5, KERNELS
        return
    yield 128, 128, torch.bfloat16, 96, KERNELS
    yield 256, 256, torch.bfloat16, 96, ("join_kernel", "local_kernel")


def results(everything):
    seen, table = set(), {}
    for width, value, dtype, heads, wanted in combinations(everything):
        for kernel, arguments, options in record(width, value, dtype, heads):
            key = repr((kernel.__name__, signature(kernel, arguments, options)))
            if key in seen or kernel.__name__ not in wanted:
                continue
            seen.add(key)
            flags = " ".join(n for n, x in options.items() if x is True)
            name = f"{kernel.__name__} {str(dtype)[6:]} K{width} V{value} H{heads} {flags}"
            while name in table:
                name += "'"
            table[name] = build(kernel, arguments, options)
            print(name, table[name], file=sys.stderr, flush=True)
    return table


def compiled(*words):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_standard_setting_compiles_almost_without_spills():
    found = compiled()
    assert {name.split()[0] for name in found} == set(KERNELS)
    for name, numbers in found.items():
        assert numbers["shared"] <= SHARED, name
        assert numbers["stack"] <= 256, name


@pytest.mark.slow
def test_every_setting_compiles_and_fits():
    for name, numbers in compiled("--all").items():
        assert numbers["shared"] <= SHARED, name
        assert numbers["seconds"] < 20, name  # the slowest, value gradients of 256 float32 columns, takes 8 to 15


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(results("--all" in sys.argv)))
