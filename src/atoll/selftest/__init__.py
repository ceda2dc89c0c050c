"""`atoll selftest`: every op with a fast path against its definition in float64, on the device that is there.

On a GPU that is each Triton kernel; on a CPU the plain torch twins against the formulas. A new kernel joins by a line in `ROOMS`.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from atoll.ops import kernel_report
from atoll.selftest import kda_cases, layer_cases
from atoll.selftest.case import run_case

ROOMS = (kda_cases.cases, layer_cases.cases)

__all__ = ["ROOMS", "render", "selftest"]


def selftest(device: str | None = None) -> dict[str, Any]:
    """Run all checks on `device` ("cuda" where there is one, else "cpu"): ok, device, versions, seconds, rows and the paths taken."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place, card, start = torch.device(name), name.startswith("cuda"), time.perf_counter()
    kernel_report(clear=True)
    rows = [run_case(case, place, 7 if card else 1) for room in ROOMS for case in room(card)]
    return {
        "ok": all(row["ok"] for row in rows),
        "device": torch.cuda.get_device_name(place) if card else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - start, 1),
        "kernels": card,
        "rows": rows,
        "paths": kernel_report(clear=True),
    }


def render(result: dict[str, Any]) -> str:
    """The table and one line of sum."""
    rows = [("op", "shape", "dtype", "worst", "error", "limit", "ms", "")]
    for row in result["rows"]:
        if "message" in row:
            rows.append((row["op"], row["shape"], row["dtype"], "", "", "", "", "FAILED"))
            continue
        close = row["error"] is not None and row["error"] <= row["limit"]
        verdict = "ok" if row["ok"] else "OTHER BITS" if close else "FAILED"
        wrong = "not finite" if row["error"] is None else f"{row['error']:.1e}"
        numbers = (wrong, f"{row['limit']:.0e}", f"{row['ms']:.2f}")
        rows.append((row["op"], row["shape"], row["dtype"], row["value"], *numbers, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(8)]
    lines = [
        "  ".join(cell.ljust(w) if i < 4 else cell.rjust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=True))).rstrip()
        for r in rows
    ]
    lines += [f"{row['op']} {row['shape']} {row['dtype']}: {row['message']}" for row in result["rows"] if "message" in row]
    failed = sum(not row["ok"] for row in result["rows"])
    ran = f"on {result['device']}" if result["kernels"] else "on the CPU: plain torch against the formulas; no kernel ran"
    return "\n".join([*lines, f"{len(result['rows'])} checks, {failed} failed, {result['seconds']} s {ran} (torch {result['torch']})"])
