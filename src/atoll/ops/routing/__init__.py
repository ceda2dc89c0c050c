"""Routing tokens to experts, and keeping experts level with no auxiliary loss (Kimi K3 report, arXiv 2607.24653, §2.3.3, app. C, D)."""

from atoll.ops.routing.balance import QuantileHistogram, QuantileMargins, QuantileMean, quantile_bias
from atoll.ops.routing.rules import balance_loss, sign_bias, within_capacity
from atoll.ops.routing.select import route, route_weights

__all__ = [
    "QuantileHistogram",
    "QuantileMargins",
    "QuantileMean",
    "balance_loss",
    "quantile_bias",
    "route",
    "route_weights",
    "sign_bias",
    "within_capacity",
]
