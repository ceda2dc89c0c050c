"""Optimizers: Muon per head, AdamW beside it, which parameter goes where, schedule and clips."""

from atoll.optim.build import AdamW, ModelOptimizer
from atoll.optim.groups import Rule, describe, rule, rules
from atoll.optim.muon import Blocks, Muon, newton_schulz

__all__ = ["AdamW", "Blocks", "ModelOptimizer", "Muon", "Rule", "describe", "newton_schulz", "rule", "rules"]
