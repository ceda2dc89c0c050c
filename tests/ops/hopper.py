"""Compiling kernels for Hopper, which needs no card: the interpreter takes what a compiler may not.

In a process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SHARED = 227 * 1024  # bytes of shared memory a program can have on sm_90


def specialise(kernel, values, flags):
    """(signature, constants, hints) of a launch, as Triton would find them. values: types as text ("*bf16"), tuples of them, or numbers."""
    signature, constants, hints = {}, {}, {}
    aligned = [["tt.divisibility", 16]]
    for i, (argument, value) in enumerate(zip(kernel.arg_names, values, strict=False)):
        if value is None or (isinstance(value, int) and value == 1):
            signature[argument], constants[(i,)] = "constexpr", value
        elif isinstance(value, tuple):
            signature[argument] = value
            hints |= {(i, j): aligned for j in range(len(value))}
        else:
            signature[argument] = value if isinstance(value, str) else "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, str) or (isinstance(value, int) and value % 16 == 0):
                hints[(i,)] = aligned
    for argument, value in flags.items():
        signature[argument], constants[(kernel.arg_names.index(argument),)] = "constexpr", value
    return signature, constants, hints


def compile_kernel(kernel, values, flags, **options):
    """What the compiler made of it; options as at a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, hints = specialise(kernel, values, flags)
    source = ASTSource(fn=kernel, signature={n: signature[n] for n in kernel.arg_names}, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 1, **options})


def resources(made):
    """Registers a thread ("reg") and bytes of spills ("stack", "local"), read from the compiled code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {key.lower(): int(re.search(rf"{key}:(\d+)", text).group(1)) for key in ("REG", "STACK", "LOCAL")}


def elsewhere(file, *words):
    """The JSON in the last line that `file`, run as a program outside the interpreter, prints."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, file, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
