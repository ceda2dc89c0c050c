"""Atoll trains, post-trains and serves sparse multimodal models of one blueprint, from a laptop's CPU to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Model", "load"]

if TYPE_CHECKING:
    from atoll.model import Model, load


def __getattr__(name: str) -> Any:
    if name in __all__:
        from atoll import model

        return getattr(model, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
