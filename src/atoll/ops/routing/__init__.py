"""Routing tokens to experts, and keeping experts level with no auxiliary loss (Kimi K3 report, arXiv 2607.24653, §2.3.3, app. C, D)."""

from atoll.ops.routing.balance import QuantileHistogram, quantile_bias
from atoll.ops.routing.select import route, route_weights

__all__ = ["QuantileHistogram", "quantile_bias", "route", "route_weights"]
