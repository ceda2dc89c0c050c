"""What `atoll plan` says: parameters, bytes of weights, state of a sequence; as a dict for programs and as text for people."""

from __future__ import annotations

from typing import Any

from atoll.config import ModelConfig
from atoll.plan import flops, memory, meta, parameters


def report(config: ModelConfig, build: bool = True) -> dict[str, Any]:
    """Plan of `config`, ready for JSON: counts in numbers, sizes in bytes. With `build` the model is also built on the meta device and
    compared group by group."""
    counts = parameters.count(config)
    total_moe, active_moe = parameters.moe_layer(config)
    plan: dict[str, Any] = {
        "total": counts.total,
        "active": counts.active,
        "active_without_head": counts.active_without_head,
        "active_with_embedding": counts.active_with_embedding,
        "a_log_padding": meta.a_log_padding(config),
        "groups": [
            {"name": g.name, "number": g.number, "total": g.total, "active": g.active, "share": g.total / counts.total}
            for g in counts.groups
        ],
        "one": {
            "KDA mixer": parameters.kda_mixer(config, config.a_log_storage),
            "MLA mixer": parameters.mla_mixer(config),
            "routed expert": parameters.routed_expert(config),
            "MoE layer": total_moe,
            "MoE layer, active": active_moe,
        },
        "weight_bytes": memory.weight_bytes(config),
        "state_bytes": memory.state_bytes(config),
        "flops": flops.report(config),
    }
    if config.quantization != "none":
        from atoll.hub import quantized  # with torch, which the arithmetic does without

        plan["quantized"] = quantized.report(config)
    if build:
        wrong = meta.disagreements(config)
        plan["built"] = {"agrees": not wrong, "differs": {name: list(pair) for name, pair in wrong.items()}}
    return plan


def render(plan: dict[str, Any]) -> str:
    """The plan as aligned text, at most 100 columns."""
    parts = [_groups(plan), _convention(plan), _weights(plan["weight_bytes"]), _state(plan["state_bytes"]), _flops(plan["flops"])]
    if "quantized" in plan:
        parts.append(_quantized(plan["quantized"]))
    return "\n\n".join(parts) + "\n"


def _groups(plan: dict[str, Any]) -> str:
    rows = [("group", "number", "parameters", "active", "share")]
    for g in plan["groups"]:
        if g["total"]:
            rows.append((g["name"], f"{g['number']:,}", f"{g['total']:,}", f"{g['active']:,}", _share(g["share"])))
    rows.append(("total", "", f"{plan['total']:,}", f"{plan['active']:,}", ""))
    return _align(rows, rule_before_last=True)


def _share(share: float) -> str:
    return "<0.01%" if 0 < share < 5e-5 else f"{share:.2%}"


def _convention(plan: dict[str, Any]) -> str:
    lines = [
        f"{short(plan['total'])} parameters, {short(plan['active'])} active: head counted, input embedding not.",
        f"Active without the head {plan['active_without_head']:,}; with head and embedding {plan['active_with_embedding']:,}.",
    ]
    if plan["a_log_padding"]:
        lines.append(f"The total counts A_log as stored, {plan['a_log_padding']:,} zeros of padding with it.")
    if "built" in plan:
        lines.append(_built(plan["built"]))
    return "\n".join(lines)


def _built(built: dict[str, Any]) -> str:
    if built["agrees"]:
        return "Built on the meta device: every group agrees."
    pairs = "; ".join(f"{name}: built {b:,}, counted {c:,}" for name, (b, c) in built["differs"].items())
    return f"Built on the meta device: DIFFERS in {pairs}."


def _weights(sizes: dict[str, int]) -> str:
    names = {
        "float32": "float32",
        "bfloat16": "bfloat16 (convolutions, decay and router bias in float32)",
        "mxfp4": "the same, routed experts in MXFP4",
    }
    return _align([("weights", "bytes", ""), *((names[k], f"{v:,}", binary(v)) for k, v in sizes.items())])


def _quantized(listed: dict[str, Any]) -> str:
    """Which tensors are quantised: layers that follow one another share a row."""
    runs: dict[tuple[str, ...], list[tuple[int, dict[str, Any]]]] = {}
    for row in listed["tensors"]:
        layer = int(row["name"].split(".layers.")[1].split(".")[0])
        runs.setdefault((row["name"].replace(f".layers.{layer}.", ".layers.{L}."), *map(str, row["shape"])), []).append((layer, row))
    rows: list[tuple[str, ...]] = [("quantised, and nothing else", "matrices", listed["dtype"], "MXFP4")]
    for (name, *_), found in runs.items():
        layers, every = [layer for layer, _ in found], [row for _, row in found]
        label = name.replace("{L}", f"{layers[0]}-{layers[-1]}").replace("{}", f"0-{every[0]['experts'] - 1}")
        number, before, after = (sum(r[key] for r in every) for key in ("experts", "before", "after"))
        rows.append((label, f"{number:,}", binary(before), binary(after)))
    rows.append(("total", f"{listed['matrices']:,}", binary(listed["bytes_before"]), binary(listed["bytes_after"])))
    rounded = {"mxfp4": "weights in MXFP4", "mxfp4+mxfp8": "weights in MXFP4, the rows that enter them in MXFP8"}[listed["quantization"]]
    return f"{_align(rows, rule_before_last=True)}\nIn every pass of the routed experts: {rounded}."


def _state(sizes: dict[str, int]) -> str:
    names = {
        "kda_state": "KDA state, float32, whatever the length",
        "kda_conv": "KDA convolution window, bfloat16, whatever the length",
        "mla_per_token": "MLA cache, bfloat16, a token",
        "depth_bank_per_token": "bank over depth, bfloat16, a token (while computed)",
    }
    return _align([("state of one sequence", "bytes", ""), *((names[k], f"{v:,}", binary(v)) for k, v in sizes.items())])


def _flops(found: dict[str, dict[str, int]]) -> str:
    lengths = list(found)
    rows = [("operations of a token, forward", *(f"{int(n) // 1024:,}K" for n in lengths))]
    rows += [(name, *(short(found[n][name]) for n in lengths)) for name in found[lengths[0]]]
    rows.append(("total; in training three times that", *(short(sum(found[n].values())) for n in lengths)))
    return _align(rows, rule_before_last=True)


def _align(rows: list[tuple[str, ...]], rule_before_last: bool = False) -> str:
    """Rows as columns: the first flush left, the rest flush right; a rule under the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]).rstrip() for row in rows
    ]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    lines.insert(1, rule)
    if rule_before_last:
        lines.insert(-1, rule)
    return "\n".join(lines)


def short(number: float) -> str:
    """2,779,484,478,208 → "2.78T"."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:g}"


def binary(size: float) -> str:
    """Bytes in binary units: 434110464 → "414 MiB"."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
