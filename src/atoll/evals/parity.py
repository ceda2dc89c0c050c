"""Are two implementations the same model? Another one's logits against ours: how far apart, and whether near ties explain it.

Equality of float32 logits does not survive a router: two right implementations may take different experts where scores are tied to
within rounding. So the report lists the near-tied decisions, and where outputs differ it searches for the ones that, taken the other
way, make the difference vanish. A difference that no tie explains is a difference of formulas, weights or settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.config import UserError
from atoll.evals.ties import Pass, Tie, near_ties, observe

DEPTH = 3  # flips looked for together to explain one token


@dataclass(frozen=True)
class Reference:
    """What another implementation computed: input_ids int64 [B,T], logits [B,T,V], and its experts [B·T,k] a MoE layer if known."""

    input_ids: Tensor
    logits: Tensor
    routing: list[Tensor] | None = None
    name: str = "reference"


def read_reference(path: str | Path) -> Reference:
    """A safetensors file with `input_ids` [B,T], `logits` [B,T,V] and, if it has them, `routing.0`, `routing.1`, … one a MoE layer.

    Other tensors in it are passed over. Raises `UserError`.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).expanduser().is_file():
        raise UserError(f"{path}: no such file; give a safetensors file with input_ids and logits")
    try:
        with safe_open(Path(path).expanduser(), framework="pt") as file:
            names = set(file.keys())
            for wanted in ("input_ids", "logits"):
                if wanted not in names:
                    raise UserError(f"{path}: no tensor {wanted}; input_ids [B,T] and logits [B,T,V] are expected")
            ids, logits = file.get_tensor("input_ids").long(), file.get_tensor("logits")
            routes = [file.get_tensor(f"routing.{i}").long() for i in itertools.takewhile(lambda i: f"routing.{i}" in names, range(10**6))]
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({' '.join(str(error).split())[:120]})") from None
    if ids.dim() != 2 or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise UserError(f"{path}: input_ids {list(ids.shape)} and logits {list(logits.shape)}: [B,T] and [B,T,V] are expected")
    return Reference(ids, logits, [r.flatten(0, -2) for r in routes] or None, str(path))


def compare(model: Any, reference: Reference, *, atol: float = 1e-3, tie: float = 1e-5, max_passes: int = 200) -> dict[str, Any]:
    """Hold `model` (an `atoll.Model`, in the dtype to be judged) against `reference`; returns a report ready for JSON.

    `atol`: logits further apart count as different. `tie`: margins of biased router scores up to this are near ties. `max_passes`
    bounds the search for flips. Keys: `plain` (numbers with our own routing), `ties`, `differing` (tokens over `atol`), `flips`
    (decisions reversed), `resolved` (whether no token differs then), `after` (numbers with them reversed), `passes`; and where the
    reference gives its routing, `forced` (numbers under it) and `disagreements` (decisions it took otherwise). Raises `UserError`.
    """
    _check(model, reference)
    theirs = reference.logits.double()
    ours = observe(model, reference.input_ids)
    different = _apart(ours.logits, theirs) > atol
    ties = near_ties(model, ours, tie)
    flips, after, passes = _search(model, reference.input_ids, theirs, ours, atol, tie, max_passes) if different.any() else ([], ours, 1)
    report: dict[str, Any] = {
        "reference": reference.name,
        "tokens": reference.input_ids.numel(),
        "dtype": str(model.language_model.lm_head.weight.dtype).removeprefix("torch."),
        "atol": atol,
        "tie": tie,
        "plain": measure(theirs, ours.logits),
        "ties": [asdict(t) for t in ties],
        "differing": different.nonzero().tolist(),
        "flips": [asdict(f) for f in flips],
        "resolved": not bool((_apart(after.logits, theirs) > atol).any()),
        "after": measure(theirs, after.logits),
        "passes": passes,
    }
    if reference.routing is not None:
        report |= _forced(model, reference, ours, theirs)
    return report


def _check(model: Any, reference: Reference) -> None:
    vocab = model.config.vocab_size
    if reference.logits.shape[-1] != vocab:
        raise UserError(f"{reference.name}: logits over {reference.logits.shape[-1]} tokens, the model has vocab_size = {vocab}")
    if int(reference.input_ids.max()) >= vocab or int(reference.input_ids.min()) < 0:
        raise UserError(f"{reference.name}: input_ids outside 0 to {vocab - 1}")
    layers = len(model.moe_layers())
    if reference.routing is not None and len(reference.routing) != layers:
        raise UserError(f"{reference.name}: routing for {len(reference.routing)} layers, the model has {layers} with experts")


def measure(theirs: Tensor, ours: Tensor) -> dict[str, float]:
    """Largest difference of logits [..., V], KL(theirs‖ours) in nats a position (mean, largest), share of positions with one favourite."""
    theirs, ours = theirs.double(), ours.double()
    p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return {
        "max_abs": float((theirs - ours).abs().max()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1": float((theirs.argmax(-1) == ours.argmax(-1)).double().mean()),
    }


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """Largest difference of each token's logits [B,T]; what is not finite counts as infinitely far."""
    return (ours - theirs).abs().amax(-1).nan_to_num(nan=torch.inf)


def _forced(model: Any, reference: Reference, ours: Pass, theirs: Tensor) -> dict[str, Any]:
    """Numbers under the reference's own routing, and how many decisions it took otherwise (order within a token does not matter)."""
    assert reference.routing is not None
    forced = observe(model, reference.input_ids, routing=reference.routing)
    pairs = zip(ours.routing, reference.routing, strict=True)
    apart = [int((a.sort(1).values != b.sort(1).values).any(1).sum()) for a, b in pairs]
    return {"forced": measure(theirs, forced.logits), "disagreements": apart}


# ---------------------------------------------------------------- the search


def _search(model: Any, ids: Tensor, theirs: Tensor, ours: Pass, atol: float, tie: float, max_passes: int) -> tuple[list[Tie], Pass, int]:
    """Flips of near ties, row by row, from each row's first differing token on; the run with them; forward passes spent."""
    flips: list[Tie] = []
    spent = 1
    for row in range(ids.shape[0]):
        mine = Pass(ours.logits[row : row + 1], _rows(ours.routing, row, ids), _rows(ours.scores, row, ids))
        found, passes = _search_row(model, ids[row : row + 1], theirs[row : row + 1], mine, atol, tie, max_passes - spent)
        flips += [Tie(**{**asdict(f), "row": row}) for f in found]
        spent += passes
    return flips, observe(model, ids, flips), spent


def _rows(per_layer: list[Tensor], row: int, ids: Tensor) -> list[Tensor]:
    length = ids.shape[1]
    return [t[row * length : (row + 1) * length] for t in per_layer]


def _search_row(model: Any, ids: Tensor, theirs: Tensor, seen: Pass, atol: float, tie: float, budget: int) -> tuple[list[Tie], int]:
    """One row: make its first differing token agree, then the next that differs, until none does or no flips help."""
    flips: list[Tie] = []
    passes = 0
    while True:
        apart = (_apart(seen.logits, theirs) > atol)[0].nonzero().flatten()
        if not len(apart):
            return flips, passes
        first = int(apart[0])

        def agrees(trial: Pass, first: int = first) -> bool:
            return not bool((_apart(trial.logits, theirs) > atol)[0, : first + 1].any())

        found, spent = _explain(model, ids, flips, seen, first, agrees, tie, budget - passes)
        passes += spent
        if found is None:
            return flips, passes
        flips, seen = found


Explained = tuple[list[Tie], Pass]


def _explain(
    model: Any, ids: Tensor, flips: list[Tie], seen: Pass, first: int, agrees: Callable[[Pass], bool], tie: float, budget: int
) -> tuple[Explained | None, int]:
    """Up to `DEPTH` further flips, at token `first` or before it, after which `agrees`; nearest tokens first, fewest flips first.

    A flip changes what later layers see, so the next flip is looked for among the ties of the run with the flips before it.
    """
    frontier: list[Explained] = [(flips, seen)]
    spent = 0
    for depth in range(DEPTH):
        deeper: list[Explained] = []
        for before, run in frontier:
            for t in _candidates(model, run, before, first, tie, fresh=depth > 0):
                cost = len({f.layer for f in (*before, t)}) + 1
                if spent + cost > budget:
                    return None, spent
                trial = observe(model, ids, [*before, t])
                spent += cost
                if agrees(trial):
                    return ([*before, t], trial), spent
                deeper.append(([*before, t], trial))
        frontier = deeper
    return None, spent


def _candidates(model: Any, run: Pass, before: list[Tie], first: int, tie: float, fresh: bool) -> list[Tie]:
    """Near ties of `run` not reversed yet, at token `first` or before; with `fresh`, only those after the last flip: new sets alone."""
    taken = {_pair(f) for f in before}
    found = [t for t in near_ties(model, run, tie) if t.position <= first and _pair(t) not in taken]
    if fresh:
        last = before[-1]
        found = [t for t in found if (t.position, t.layer) > (last.position, last.layer)]
    return sorted(found, key=lambda t: (first - t.position, abs(t.margin)))


def _pair(t: Tie) -> tuple[int, int, frozenset[int]]:
    return t.layer, t.position, frozenset((t.chosen, t.other))


# ---------------------------------------------------------------- greedy text


def judge_greedy(model: Any, ours: Tensor, theirs: Tensor, logits_of: Callable[[Tensor], Tensor], atol: float = 1e-3) -> dict[str, Any]:
    """Two greedy continuations of one prompt, ids [T] each: equal, parted at a tie, or different.

    `logits_of` gives the other implementation's logits [1,T,V] for ids [1,T]. Where the texts part, the tokens before are compared:
    "near tie of logits" when both agree within `atol` and the two favourites lie that close, "near tie of experts" when flips of
    near-tied experts explain the difference, else "different".
    """
    apart = (ours != theirs).nonzero().flatten()
    if not len(apart):
        return {"verdict": "equal", "tokens": len(ours)}
    at = int(apart[0])
    prefix = ours[None, :at]
    report = compare(model, Reference(prefix, logits_of(prefix)), atol=atol)
    last = observe(model, prefix).logits[0, -1]
    gap = float((last[int(ours[at])] - last[int(theirs[at])]).abs())
    if not report["differing"]:
        verdict = "near tie of logits" if gap <= 2 * atol else "different"
    else:
        verdict = "near tie of experts" if report["resolved"] else "different"
    return {"verdict": verdict, "tokens": at, "gap": gap, "parity": report}


# ---------------------------------------------------------------- text


def render(report: dict[str, Any], limit: int = 10) -> str:
    """The report as aligned text; at most `limit` ties are listed."""
    lines = [f"against {report['reference']}, {report['tokens']:,} tokens in {report['dtype']}"]
    lines.append(f"{'':<22} {'max |Δ|':>10} {'KL mean':>10} {'KL max':>10} {'top-1':>8}")
    rows = [("our routing", "plain"), ("near ties reversed", "after"), ("reference's routing", "forced")]
    for name, key in rows:
        if key in report and (key != "after" or report["flips"]):
            m = report[key]
            lines.append(f"{name:<22} {m['max_abs']:>10.2e} {m['kl_mean']:>10.2e} {m['kl_max']:>10.2e} {m['top1']:>8.2%}")
    lines.append(f"near ties of the router, within {report['tie']:g}: {len(report['ties'])}")
    lines += [_tie(t) for t in report["ties"][:limit]]
    lines.append(_verdict(report))
    return "\n".join(lines)


def _tie(t: dict[str, Any]) -> str:
    return f"  layer {t['layer']}, row {t['row']}, token {t['position']}: expert {t['chosen']} before {t['other']} by {t['margin']:.1e}"


def _verdict(report: dict[str, Any]) -> str:
    tokens = f"{len(report['differing']):,} tokens differ by more than {report['atol']:g}"
    if not report["differing"]:
        return f"agrees within {report['atol']:g}"
    if report["resolved"]:
        flips = ", ".join(f"layer {f['layer']} token {f['row']}:{f['position']} {f['chosen']}→{f['other']}" for f in report["flips"])
        return f"{tokens}; none with these near ties reversed: {flips}"
    return f"{tokens}; no near ties explain all of them ({report['passes']} passes): weights, settings or formulas differ"
