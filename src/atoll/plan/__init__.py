"""What a model costs before it is built: parameters, bytes of weights, state of a sequence."""

from atoll.plan.parameters import Counts, Group, count
from atoll.plan.summary import render, report

__all__ = ["Counts", "Group", "count", "render", "report"]
