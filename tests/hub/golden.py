"""The golden folders, and how a model is compared with one: the numbers come from independent implementations."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.model import Model, load

GOLDEN = Path(__file__).parents[1] / "golden"
ATOL = 1e-3  # float32 logits: two right implementations differ by at most 1.3e-4, the smallest wrong formula by 8e-3


def arrays(folder: str, name: str) -> dict[str, Tensor]:
    """All tensors of one golden file."""
    return load_file(GOLDEN / folder / f"{name}.safetensors")


def model(folder: str, dtype: torch.dtype) -> Model:
    """The golden checkpoint, loaded strictly."""
    return load(GOLDEN / folder, dtype=dtype)


def distance(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference."""
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max())


def packed_logits(m: Model, io: dict[str, Tensor]) -> Tensor:
    """Logits of the packed documents in one pass."""
    return m(io["input_ids_packed"], cu_seqlens=io["cu_seqlens"]).logits


def decode(m: Model, ids: Tensor, prefill: int, steps: int) -> tuple[Tensor, Tensor]:
    """Logits of a cached prefill, and of `steps` single tokens after it."""
    cache = m.new_cache(ids.shape[0])
    first = m(ids[:, :prefill], cache=cache).logits
    rest = [m(ids[:, t : t + 1], cache=cache).logits for t in range(prefill, prefill + steps)]
    return first, torch.cat(rest, 1)


def gradients(m: Model, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and, under the hub's names and shapes, its gradient with respect to every stored weight."""
    from atoll.hub.layout import slots

    out = m(ids, labels=ids)
    out.loss.backward()
    inner = dict(m.named_parameters())
    grads = {}
    for slot in slots(m):
        if slot.inner not in inner:
            continue
        whole = inner[slot.inner].grad
        offset = slot.tensor.storage_offset()
        part = torch.zeros_like(slot.tensor) if whole is None else whole.flatten()[offset : offset + slot.tensor.numel()]
        padding = torch.Size(slot.shape).numel() - slot.tensor.numel()
        grads[slot.name] = torch.cat([part.flatten(), part.new_zeros(padding)]).reshape(slot.shape)
    return float(out.loss.detach()), grads


def check_gradients(m: Model, ids: Tensor, golden: dict[str, Tensor], rtol: float) -> None:
    """Loss, every norm and every stored gradient agree within `rtol` of the gradient's own size."""
    loss, grads = gradients(m, ids)
    assert abs(loss - float(golden["loss"])) < 1e-6
    norms = {k.removeprefix("norm."): float(v) for k, v in golden.items() if k.startswith("norm.")}
    assert set(norms) == set(grads)
    for name, norm in norms.items():
        assert abs(float(grads[name].double().norm()) - norm) <= rtol * norm, name
    for key, value in golden.items():
        if key.startswith("grad."):
            name = key.removeprefix("grad.")
            assert float((grads[name].double() - value.double()).norm()) <= rtol * norms[name] + 1e-12, name
