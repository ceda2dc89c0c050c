"""Training: `run` does the whole job, from text to report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["run"]

if TYPE_CHECKING:
    from atoll.train.trainer import run


def __getattr__(name: str) -> Any:
    if name == "run":
        from atoll.train.trainer import run

        return run
    raise AttributeError(f"module 'atoll.train' has no attribute {name!r}")
