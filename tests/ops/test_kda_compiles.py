"""Every KDA kernel a call can reach, compiled for Hopper without a card: the interpreter takes what a compiler may not.

The launches are recorded from real calls on tensors without memory, so what is compiled is what a card would be given. Compiled in a
process of its own, because Triton reads TRITON_INTERPRET when it is imported:

    PYTHONPATH=src python tests/ops/test_kda_compiles.py [--all]      # prints a table: seconds, registers, spills, shared memory
"""

import contextlib
import itertools
import json
import os
import sys

import pytest
import torch
from ops.hopper import SHARED, compile_kernel, elsewhere, resources, specialise

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


def given(kernel, arguments, options):
    """(types and numbers, flags, options) of a recorded launch, as `hopper.compile_kernel` takes them."""
    names = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
    values = [names[value.dtype] if isinstance(value, torch.Tensor) else value for value in arguments]
    flags = {name: options[name] for name in kernel.arg_names[len(arguments) :]}
    launch = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg") if options.get(name) is not None}
    return values, flags, launch


def build(kernel, arguments, options):
    """Seconds of one core, shared memory, registers and spilled bytes."""
    values, flags, launch = given(kernel, arguments, options)
    start = sum(os.times()[:4])  # of a core, the assembler's included: other work on the machine does not count
    made = compile_kernel(kernel, values, flags, **launch)
    seconds = sum(os.times()[:4]) - start
    return {"seconds": round(seconds, 1), "shared": made.metadata.shared, **resources(made)}


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
            values, flags, launch = given(kernel, arguments, options)
            key = repr((kernel.__name__, specialise(kernel, values, flags), launch))
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


def test_the_standard_setting_compiles_almost_without_spills():
    found = elsewhere(__file__)
    assert {name.split()[0] for name in found} == set(KERNELS)
    for name, numbers in found.items():
        assert numbers["shared"] <= SHARED, name
        assert numbers["stack"] <= 256, name


@pytest.mark.slow
def test_every_setting_compiles_and_fits():
    for name, numbers in elsewhere(__file__, "--all").items():
        assert numbers["shared"] <= SHARED, name
        assert numbers["seconds"] < 20, name  # the slowest, value gradients of 256 float32 columns, takes 8 to 15


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(results("--all" in sys.argv)))
