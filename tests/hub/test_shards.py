"""The writer that takes one tensor at a time gives the bytes of the safetensors package."""

from __future__ import annotations

import pytest
import torch
from hub.models import FLAT, build
from safetensors.torch import load_file, save_file

from atoll.hub.layout import Slot, pack, slots
from atoll.hub.shards import KINDS, split, write_shard


def slot(name: str, tensor: torch.Tensor) -> Slot:
    return Slot(name, tuple(tensor.shape), tensor.dtype, tensor, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", [{}, {"a_log_storage": 16}, FLAT], ids=["k3", "padded", "flat"])
def test_a_models_file_is_the_packages(tmp_path, dtype, change):
    parts = slots(build(dtype, **change))
    write_shard(parts, tmp_path / "mine", pack)
    save_file({s.name: pack(s) for s in parts}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_type_name_and_shape(tmp_path):
    """All stored types, odd sizes, an empty tensor, a scalar, a name with a quote and one outside ASCII."""
    tensors = {f"{k}-{n}".replace("torch.", ""): torch.arange(n).to(k) for k in KINDS for n in (1, 3, 5)}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.0), 'a"b\\': torch.ones(2), "größe": torch.ones(2, 2)}
    write_shard([slot(n, t) for n, t in tensors.items()], tmp_path / "mine", lambda s: s.tensor)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "theirs").read_bytes()
    back = load_file(tmp_path / "mine")
    assert all(torch.equal(back[n], t) for n, t in tensors.items())


def test_a_tensor_that_is_not_its_slots_is_a_fault(tmp_path):
    part = slot("a", torch.zeros(2))
    with pytest.raises(ValueError, match="a: "):
        write_shard([part], tmp_path / "x", lambda _s: torch.zeros(3))
    with pytest.raises(ValueError, match="float64"):
        write_shard([part], tmp_path / "x", lambda _s: torch.zeros(2, dtype=torch.float64))


def test_splitting_keeps_order_and_size():
    parts = [slot(str(i), torch.zeros(n)) for i, n in enumerate([5, 5, 100, 1, 9])]
    assert [[s.name for s in shard] for shard in split(parts, 40)] == [["0", "1"], ["2"], ["3", "4"]]
