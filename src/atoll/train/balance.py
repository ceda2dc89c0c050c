"""The experts' load of a step as it stands in metrics.jsonl."""

from __future__ import annotations

from typing import Any

from atoll.config import Config


def balance_line(report: dict[str, list[Any]], config: Config) -> dict[str, Any]:
    """The keys of a step's line, from `nn.balancer.load_report` (lists with an entry a layer).

    max_vio, max_vio_mean: of the worst layer, and over layers. dead_experts, dead_share: experts without a token, over all layers.
    max_load, mean_load: tokens of the busiest expert of all and of the mean one. load_map: a layer each, load over its mean of the idlest
    expert, at 10, 50 and 90 per cent of them, and of the busiest. dropped_share, bare_tokens: under a capacity, choices dropped, and
    tokens (summed over layers) left with the shared experts alone. balance_loss: the auxiliary loss, summed over layers.
    """
    vio, dead = report["max_vio"], report["dead"]
    line = {
        "max_vio": max(vio, default=0.0),
        "max_vio_mean": _mean(vio),
        "dead_experts": round(sum(dead) * config.model.num_experts),
        "dead_share": _mean(dead),
        "max_load": round(max(report["max_load"], default=0)),
        "mean_load": _mean(report["mean_load"]),
        "load_map": [[round(x, 4) for x in layer] for layer in report["spread"]],
    }
    if config.balance.limits():
        line |= {"dropped_share": _mean(report["dropped"]), "bare_tokens": round(sum(report["bare"]))}
    if config.balance.kind == "aux":
        line["balance_loss"] = sum(report["balance_loss"])
    return line


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
