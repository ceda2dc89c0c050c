"""`atoll audit`: the proof of `ranges.py`, and beside it what a model's own activations do on a text."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from atoll.config import ModelConfig, UserError
from atoll.plan.ranges import FORMATS, Decay, Finding, exponents, prove

TILES = 64  # tiles a layer whose products are emulated
NEAR_TIE = 1e-6  # of two biased scores: less than float32 keeps apart over batch shapes


def settings_of(config: ModelConfig, **given: Any) -> Decay:
    """The decay of a model, with what is `given` in place of its own. Raises `UserError` for what cannot be."""
    own = {"bound": config.gate_lower_bound}
    decay = Decay(**{**own, **{k: v for k, v in given.items() if v is not None}})
    if given.get("bound") == "none":
        decay = dataclasses.replace(decay, bound=None)
    if decay.bound is not None and not -1e4 < decay.bound < 0:
        raise UserError(f'bound = {decay.bound!r}: a number below 0 is expected, or "none" for an unbounded decay')
    if not 1 <= decay.tile <= decay.chunk:
        raise UserError(f"tile = {decay.tile}: 1 to chunk = {decay.chunk} tokens are expected")
    return decay


def report(decay: Decay, model: Any = None, ids: Tensor | None = None, source: str = "") -> dict[str, Any]:
    """The audit, ready for JSON; with a model and its input [1,T] also what it does on it. `source` says what the input is."""
    findings = prove(decay)
    found: dict[str, Any] = {"decay": dataclasses.asdict(decay)}
    if model is not None and ids is not None:
        layers, more = look(model, ids, decay)
        found |= {"input": source, "tokens": ids.shape[1], "layers": layers}
        findings += more
    found["findings"] = [dataclasses.asdict(f) for f in findings]
    found["ok"] = all(f.level != "fault" for f in findings)
    return found


# ---------------------------------------------------------------- on real activations


@torch.no_grad()
def look(model: Any, ids: Tensor, decay: Decay) -> tuple[list[dict[str, Any]], list[Finding]]:
    """What each KDA layer's decays are on `ids` [1,T], and findings over all layers."""
    record: dict[str, Any] = {}
    margins: list[Tensor] = []
    hooks = [layer.gate.register_forward_hook(_margin_hook(layer, margins)) for layer in model.moe_layers()]
    try:
        model.eval()(ids, logits=False, record=record)
    finally:
        for hook in hooks:
            hook.remove()
    c = model.config
    layers = [_layer(i, g.view(-1, c.kda_num_heads, c.kda_head_dim).double(), decay) for i, g in record["decay"]]
    return layers, [*_over_layers(layers, decay), *_ties(margins), *_residual(record["depth_rms"])]


def _layer(index: int, g: Tensor, d: Decay) -> dict[str, Any]:
    """Statistics of one layer's log-decays [T,H,K]."""
    whole = g.shape[0] // d.tile * d.tile
    if not whole:
        raise UserError(f"tokens = {g.shape[0]}: one tile of {d.tile} tokens at least is expected")
    sums = g[:whole].view(-1, d.tile, *g.shape[1:]).cumsum(1)
    sums = sums - sums[:, :1]  # relative to the tile's first row, where the anchor lies
    deepest = -sums[:, -1].amin()
    half = math.log(2) / -g.mean(0).clamp(max=-1e-12)  # of each channel, tokens
    bound = d.bound if d.bound is not None else -math.inf
    return {
        "layer": index,
        "strongest": float(g.min()),
        "at_bound": float((g < 0.98 * bound).double().mean()) if d.bound is not None else 0.0,
        "tile_reach": float(deepest),
        "half_life": [float(x) for x in half.flatten().quantile(torch.tensor([0.05, 0.5, 0.95], dtype=half.dtype))],
        "product_error": _product_error(sums, d),
    }


def _product_error(sums: Tensor, d: Decay) -> float:
    """RMS error of a tile's products q_i · (exp(G_i - G_j) k_j), i >= j, of random unit q and k, with factors rounded as the settings say,
    over their RMS; infinite where one is not finite. sums [tiles,n,H,K] relative to the first row."""
    tiles = sums[:: max(1, len(sums) // TILES)][:TILES].transpose(1, 2).flatten(0, 1)  # [tiles·H,n,K]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(tiles.shape, generator=generator, dtype=torch.float64), dim=-1) for _ in range(2))
    lower = torch.ones(d.tile, d.tile, dtype=torch.bool).tril()
    pairs = torch.where(lower[..., None], tiles[:, :, None] - tiles[:, None], -math.inf).exp_()
    exact = torch.einsum("tik,tjk,tijk->tij", q, k, pairs)
    gate = rounded(tiles, d.gate)
    anchor = _anchor(tiles, d)
    left, right = (rounded(x, d.operands) for x in (q * (gate - anchor).exp(), k * (anchor - gate).exp()))
    made = torch.where(lower, left @ right.mT, 0.0)
    error = (made - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-300)
    return float(error) if bool(torch.isfinite(made).all()) else math.inf


def _anchor(tiles: Tensor, d: Decay) -> Tensor | float:
    if d.anchor == "middle":
        return tiles[:, d.tile // 2 : d.tile // 2 + 1]
    most = exponents(d)
    return 0.0 if d.anchor == "first" or most is None else -most


def rounded(x: Tensor, form: str) -> Tensor:
    """float64 `x` rounded to a format's significand; past its largest number infinite, below its smallest normal one zero."""
    top, bottom, bits = FORMATS[form]
    mantissa, exponent = torch.frexp(x)
    near = torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)
    near = torch.where(near.abs() > math.exp(top) * (1 + 2.0 ** -(bits + 1)), near.sign() * math.inf, near)
    return torch.where(near.abs() < math.exp(bottom), 0.0, near)


def _over_layers(layers: list[dict[str, Any]], d: Decay) -> list[Finding]:
    if not layers:
        return []
    worst = max(layers, key=lambda row: row["product_error"])
    error = worst["product_error"]
    limit = 4 * 2.0 ** -FORMATS[d.operands][2]
    numbers = {"layer": worst["layer"], "error": error, "limit": limit}
    says = f"products of tiles, factors in {d.operands}: worst RMS error {error:.2g} in layer {worst['layer']}"
    found = [Finding("ok" if error <= limit else "fault", "tiles on this text", says, numbers)]
    deepest = max(layers, key=lambda row: row["tile_reach"])
    says = f"the deepest tile forgets e^-{deepest['tile_reach']:.3g} (layer {deepest['layer']}), "
    says += f"{max(row['at_bound'] for row in layers):.1%} of a layer's gates stand at the bound at most"
    found.append(Finding("note", "decays on this text", says, {"layer": deepest["layer"], "reach": deepest["tile_reach"]}))
    longest = max(row["half_life"][2] for row in layers)
    resolved = math.log(2) * 2.0 ** (FORMATS[d.gate][2] + 1)
    says = f"half-lives of channels reach {longest:,.0f} tokens; {d.gate} tells them apart up to {resolved:,.0f}"
    found.append(Finding("ok" if longest < resolved else "fault", "slow channels on this text", says, {"half_life": longest}))
    return found


def _margin_hook(layer: Any, margins: list[Tensor]) -> Any:
    def hook(module: Any, args: Any, scores: Tensor) -> None:
        best = (scores + module.e_score_correction_bias).topk(layer.top_k + 1, -1).values
        margins.append(best[:, -2] - best[:, -1])

    return hook


def _ties(margins: list[Tensor]) -> list[Finding]:
    if not margins:
        return []
    every = torch.cat(margins)
    share, least = float((every < NEAR_TIE).double().mean()), float(every.min())
    says = f"in {share:.2%} of routings the last expert chosen leads the first left out by less than {NEAR_TIE:g}: "
    says += "compare runs with routing forced"
    return [Finding("note", "near-tied experts", says, {"share": share, "least": least})]


def _residual(rms: list[Any]) -> list[Finding]:
    """[(sublayer, RMS of its output, RMS of the running sum)]."""
    if not rms:
        return []
    sums = [float(total) for _, _, total in rms]
    says = f"the running sum's RMS lies between {min(sums):.3g} and {max(sums):.3g} over depth"
    return [Finding("note", "residual stream", says, {"least": min(sums), "most": max(sums)})]


# ---------------------------------------------------------------- as text


def render(found: dict[str, Any]) -> str:
    """The audit as text for people."""
    d = found["decay"]
    bound = "none (softplus)" if d["bound"] is None else f"{d['bound']:g}"
    head = f"tile {d['tile']} tokens, bound {bound}, anchor {d['anchor']}, operands {d['operands']}, gate {d['gate']}, state {d['state']}"
    lines = [head, ""]
    if "layers" in found:
        lines += [f"On {found['tokens']:,} tokens of {found['input']}:", *_table(found["layers"]), ""]
    marks = {"ok": "ok   ", "note": "note ", "fault": "FAULT"}
    lines += [f"{marks[f['level']]}  {f['what']}: {f['says']}" for f in found["findings"]]
    lines += ["", "Safe." if found["ok"] else "Not safe: see the faults above."]
    return "\n".join(lines) + "\n"


def _table(layers: list[dict[str, Any]]) -> list[str]:
    rows = [("layer", "strongest", "at bound", "tile forgets", "half-life 5 % / 50 % / 95 %", "product error")]
    for row in layers:
        lives = " / ".join(f"{x:,.3g}" for x in row["half_life"])
        cells = f"{row['strongest']:.3g}", f"{row['at_bound']:.1%}", f"e^-{row['tile_reach']:.3g}", lives, f"{row['product_error']:.2g}"
        rows.append((str(row["layer"]), *cells))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
