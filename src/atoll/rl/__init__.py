"""Reinforcement learning in one process that owns model, tokens and rollout."""
