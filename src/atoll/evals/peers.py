"""Other implementations, running here: a folder in the hub's layout in, float32 logits out. What they need is imported when asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.config import UserError
from atoll.evals.parity import Reference
from atoll.hub.export import carries_our_code

Logits = Callable[[Tensor], Tensor]  # input_ids int64 [B,T] → logits float32 [B,T,V]


def mlx_lm(folder: Path) -> Logits:
    """mlx-lm's model of `folder`, loaded strictly, computing in float32 on the CPU. Raises `UserError` when it refuses the folder."""
    try:
        import mlx.core as mx  # pyright: ignore[reportMissingImports]
        from mlx_lm.utils import load_model  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"check = 'mlx-lm': {error.name} is not installed; pip install 'mlx[cpu]' mlx-lm") from None
    mx.set_default_device(mx.cpu)
    try:
        model, _ = load_model(folder, strict=True)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder}: mlx-lm refuses it ({' '.join(str(error).split())[:200]})") from None
    model.set_dtype(mx.float32)

    def logits(input_ids: Tensor) -> Tensor:
        return torch.from_numpy(np.array(model(mx.array(input_ids.numpy())).astype(mx.float32)))

    return logits


def transformers(folder: Path) -> Logits:
    """transformers' own class for `folder` in float32, or the code that Atoll writes beside a model; no other code of a folder is run.

    Raises `UserError` when transformers refuses the folder.
    """
    try:
        from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"check = 'transformers': {error.name} is not installed; pip install transformers") from None
    ours = carries_our_code(folder)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=ours, output_loading_info=True, local_files_only=True
        )
    except (ValueError, OSError, KeyError, RuntimeError, ImportError) as error:
        if "custom code" in str(error):
            raise UserError(f"{folder}: its code is not what this Atoll writes and is not run; write it anew by atoll export") from None
        raise UserError(f"{folder}: transformers refuses it ({' '.join(str(error).split())[:200]})") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise UserError(f"{folder}: transformers reports {kind.replace('_', ' ')}: {min(map(str, info[kind]))}")
    model.eval()

    def logits(input_ids: Tensor) -> Tensor:
        with torch.no_grad():
            return model(input_ids).logits

    return logits


PEERS = {"mlx-lm": mlx_lm, "transformers": transformers}


def reference(name: str, folder: Path, vocab: int, rows: int = 2, length: int = 64, seed: int = 0) -> Reference:
    """What the peer `name` computes for `rows` x `length` pseudo-random tokens with the model in `folder`."""
    ids = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    return Reference(ids, PEERS[name](folder)(ids), name=name)
