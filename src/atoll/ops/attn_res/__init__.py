"""Attention over depth: mix the block sums a token has seen so far (Attention Residuals, arXiv 2603.15031; Kimi K3 report, eq. 8-10)."""

from atoll.ops.attn_res.one_pass import attn_res
from atoll.ops.attn_res.reference import attn_res_reference
from atoll.ops.attn_res.two_phase import finished_sources, merge_partial

__all__ = ["attn_res", "attn_res_reference", "finished_sources", "merge_partial"]
