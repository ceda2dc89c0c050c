"""Math without parameters: every op as a plain function of tensors."""

# Bound here, at once, and not on first use: importing the folder atoll.ops.kda would put the module where the function belongs.
from atoll.ops.attn_res import attn_res
from atoll.ops.dispatch import kernel_report, strict
from atoll.ops.experts import experts_mlp
from atoll.ops.kda import kda, kda_step
from atoll.ops.mxfp4 import mxfp4_dequantize, mxfp4_quantize
from atoll.ops.mxfp8 import mxfp8_dequantize, mxfp8_quantize
from atoll.ops.routing import QuantileHistogram, quantile_bias, route
from atoll.ops.situ import situ_glu

__all__ = [
    "QuantileHistogram",
    "attn_res",
    "experts_mlp",
    "kda",
    "kda_step",
    "kernel_report",
    "mxfp4_dequantize",
    "mxfp4_quantize",
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "quantile_bias",
    "route",
    "situ_glu",
    "strict",
]
