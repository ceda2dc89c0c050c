"""What a policy is trained to do with sampled tokens: each objective one file, a masked sum over tokens with its source.

All of them take the same `Sampled`, which holds the tokens that the policy itself drew and nothing else: a prompt's, a tool's or padding's
tokens are not in it, so no objective can give them a gradient.
"""

from atoll.rl.objectives.base import Objective, Outcome, Sampled, baseline, truncated_weights
from atoll.rl.objectives.blueprint import Blueprint
from atoll.rl.objectives.cispo import Cispo
from atoll.rl.objectives.dr_grpo import DrGrpo
from atoll.rl.objectives.grpo import Grpo

OBJECTIVES: dict[str, type[Objective]] = {"blueprint": Blueprint, "grpo": Grpo, "dr_grpo": DrGrpo, "cispo": Cispo}

__all__ = [
    "OBJECTIVES",
    "Blueprint",
    "Cispo",
    "DrGrpo",
    "Grpo",
    "Objective",
    "Outcome",
    "Sampled",
    "baseline",
    "truncated_weights",
]
