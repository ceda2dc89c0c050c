"""Atoll trains, post-trains and serves sparse multimodal models of one blueprint, from a laptop's CPU to a cluster."""
