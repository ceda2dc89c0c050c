"""Modules with parameters. Each is independent: `from atoll.nn import DeltaAttention, LatentMoE, BlockResidual, VisionTower`."""

from atoll.config import BalanceConfig
from atoll.nn.balancer import Balancer
from atoll.nn.block_residual import BlockResidual, Stream
from atoll.nn.cache import Cache
from atoll.nn.decoder import LanguageModel
from atoll.nn.delta_attention import DeltaAttention
from atoll.nn.latent_attention import LatentAttention
from atoll.nn.latent_moe import LatentMoE, Routing
from atoll.nn.vision import Projector, VisionTower

__all__ = [
    "BalanceConfig",
    "Balancer",
    "BlockResidual",
    "Cache",
    "DeltaAttention",
    "LanguageModel",
    "LatentAttention",
    "LatentMoE",
    "Projector",
    "Routing",
    "Stream",
    "VisionTower",
]
