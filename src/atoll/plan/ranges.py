"""Is a linear attention's decay safe in dense tiles: what can overflow, vanish or be rounded away, proved from the settings alone.

Within a tile of n tokens the weight of a pair is exp(G_i - G_j), G the log-decays summed up to a token. A matmul needs it as two factors,
exp(G_i - C) on the queries and exp(C - G_j) on the keys, with one anchor C a channel. A log-decay in [b, 0] keeps G_i - G_0 in
[(n - 1) b, 0], hence both exponents in an interval, and an interval is held against a number format: that is the whole proof. Kimi K3
report §2.1.1 (arXiv 2607.24653) for n = 16 and b = -5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["float16", "bfloat16", "tf32", "float32"]
Anchor = Literal["centred", "first", "middle"]

# (logarithm of the largest finite number, of the smallest normal one, bits of the significand with the hidden one)
FORMATS: dict[str, tuple[float, float, int]] = {
    "float16": (math.log(65504), math.log(2.0**-14), 11),
    "bfloat16": (math.log(3.3895e38), math.log(2.0**-126), 8),
    "tf32": (math.log(3.4012e38), math.log(2.0**-126), 11),
    "float32": (math.log(3.4028e38), math.log(2.0**-126), 24),
}


@dataclass(frozen=True)
class Decay:
    """A linear attention's settings, one's own or somebody else's.

    tile: tokens of a dense diagonal tile. bound: least log-decay a token, below 0; None is unbounded (softplus). anchor: "centred", the
    tile's first row shifted by half of what the bound allows; "first", the first row; "middle", a row in the middle, which lies in the
    future of the rows above it. operands: what the two factors are rounded to before the matmul. gate: what log-decays, their sums and
    decays are held in; state: what the state is. chunk: tokens over which log-decays are summed.
    """

    tile: int = 16
    bound: float | None = -5.0
    anchor: Anchor = "centred"
    operands: Format = "bfloat16"
    gate: Format = "float32"
    state: Format = "float32"
    chunk: int = 64


@dataclass(frozen=True)
class Finding:
    """One thing looked at. level: "ok", "note" or "fault"; `numbers` are what it was decided by."""

    level: Literal["ok", "note", "fault"]
    what: str
    says: str
    numbers: dict[str, Any]


def prove(d: Decay) -> list[Finding]:
    """What follows from the settings, whatever the data."""
    return [_factors(d), _causal(d), _upper(d), _slow(d), _sums(d), _state(d)]


def _rows(tile: int, anchor: Anchor) -> float:
    """Steps of decay between the anchor and the row farthest from it."""
    return {"centred": (tile - 1) / 2, "first": tile - 1, "middle": tile // 2}[anchor]


def exponents(d: Decay) -> float | None:
    """The largest exponent, either sign, that a factor of a tile can have; None where there is no largest."""
    return None if d.bound is None else _rows(d.tile, d.anchor) * -d.bound


def safe_bound(tile: int, anchor: Anchor, operands: Format) -> float:
    """The least log-decay that a tile stands."""
    return -_range(operands) / max(_rows(tile, anchor), 1e-9)


def safe_tile(bound: float, anchor: Anchor, operands: Format) -> int:
    """The largest tile that a bound allows."""
    steps = _range(operands) / -bound
    return {"centred": int(2 * steps) + 1, "first": int(steps) + 1, "middle": 2 * int(steps) + 1}[anchor]


def _range(operands: Format) -> float:
    """Exponents that a format holds on both sides: a factor and its inverse must both be numbers."""
    top, bottom, _ = FORMATS[operands]
    return min(top, -bottom)


def _factors(d: Decay) -> Finding:
    limit, most = _range(d.operands), exponents(d)
    if most is None or d.bound is None:
        says = "an unbounded decay fits no dense tile: whatever its size, one strong gate overflows the keys' factor; bound the decay"
        return Finding("fault", "factors of a tile", f"{says}, or form the diagonal's weights pair by pair", {"limit": limit})
    numbers = {"exponent": most, "limit": limit, "operands": d.operands}
    numbers |= {"safe_bound": safe_bound(d.tile, d.anchor, d.operands), "safe_tile": safe_tile(d.bound, d.anchor, d.operands)}
    if most <= limit:
        says = (
            f"factors within e^±{most:.4g}, {d.operands} holds e^±{limit:.4g}; this tile stands bounds down to {numbers['safe_bound']:.3g}"
        )
        return Finding("ok", "factors of a tile", says, numbers)
    says = f"factors reach e^±{most:.4g} and {d.operands} ends at e^±{limit:.4g}: they overflow, or vanish; "
    return Finding("fault", "factors of a tile", says + _remedy(d, numbers), numbers)


def _remedy(d: Decay, numbers: dict[str, Any]) -> str:
    options = [f"a bound of {numbers['safe_bound']:.3g} or nearer to 0"]
    if numbers["safe_tile"] >= 2:
        options.insert(0, f"a tile of {numbers['safe_tile']} tokens at most")
    if d.anchor == "first" and d.tile <= safe_tile(d.bound or -5.0, "centred", d.operands):
        options.insert(0, "the centred anchor")
    if d.operands == "float16":
        options.insert(0, "bfloat16 operands")
    return "safe: " + ", or ".join(options)


def _causal(d: Decay) -> Finding:
    if d.anchor == "middle":
        says = "the anchor of a tile's early rows is a later row: a later gate moves an earlier output by rounding; anchor on the first row"
        return Finding("fault", "causality", says, {"anchor": d.anchor})
    return Finding("ok", "causality", "the anchor is known at the tile's first row: no later token moves a bit of an earlier output", {})


def _upper(d: Decay) -> Finding:
    if d.bound is None:
        return Finding("note", "masked half of a tile", "unbounded too: form only the lower half", {})
    high = (d.tile - 1) * -d.bound
    numbers = {"exponent": high, "limit": FORMATS["float32"][0]}
    if high <= FORMATS["float32"][0]:
        return Finding("ok", "masked half of a tile", f"sums up to e^{high:.4g} stay finite in float32 before they are masked", numbers)
    says = f"sums up to e^{high:.4g} overflow float32: select after the product (where), never multiply by a mask"
    return Finding("note", "masked half of a tile", says, numbers)


def _slow(d: Decay) -> Finding:
    """A decay within a quarter of epsilon of 1 rounds to 1."""
    lost = 2.0 ** -(FORMATS[d.gate][2] + 1)
    half_life = math.log(2) / lost
    numbers = {"rounds_to_one_within": lost, "longest_half_life": half_life}
    if half_life < 1e5:
        says = f"in {d.gate} a decay with a half-life over {half_life:,.0f} tokens rounds to none; hold decays in float32"
        return Finding("fault", "slow decays", says, numbers)
    return Finding("ok", "slow decays", f"half-lives up to {half_life:,.0f} tokens are told from none in {d.gate}", numbers)


def _sums(d: Decay) -> Finding:
    if d.bound is None:
        return Finding("note", "sums of log-decays", "unbounded: their rounding grows with the strongest gate of a chunk", {})
    most = d.chunk * -d.bound
    error = most * 2.0 ** -FORMATS[d.gate][2]
    numbers = {"largest": most, "rounding": error}
    if error > 1e-3:
        says = f"a chunk's sums reach {most:.4g}, rounded by up to {error:.2g} in {d.gate}: weights off by e^{error:.2g}; sum in float32"
        return Finding("fault", "sums of log-decays", says, numbers)
    return Finding("ok", "sums of log-decays", f"up to {most:.4g}, rounded by at most {error:.1e} in {d.gate}", numbers)


def _state(d: Decay) -> Finding:
    lost = 2.0 ** -FORMATS[d.state][2]
    numbers = {"update_lost_below": lost}
    if d.state == "float16":
        return Finding(
            "fault", "state", "float16 ends at 65,504 and a state that forgets slowly grows past it; hold it in float32", numbers
        )
    if d.state == "bfloat16":
        says = f"in bfloat16 an update below {lost:.2g} of an entry is lost; hold the state in float32, store snapshots as you like"
        return Finding("fault", "state", says, numbers)
    return Finding("ok", "state", f"updates down to {lost:.1e} of an entry are kept in {d.state}", numbers)
