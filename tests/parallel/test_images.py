"""Images on some processes and none on others equal one process that has all rows; quantised experts too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from runs import config_in, run_on
from safetensors.torch import load_file
from test_equal import assert_equal
from training import config_for, layout, train, train_on, whole

from atoll.config import Config
from atoll.parallel.ranks import ALONE, Ranks
from atoll.train import setup

MARK, PATCH = 10, 2
SEES: dict[str, Any] = {
    "model__vision__vt_num_hidden_layers": 2,
    "model__vision__vt_hidden_size": 8,
    "model__vision__vt_num_attention_heads": 2,
    "model__vision__qkv_hidden_size": 16,
    "model__vision__vt_intermediate_size": 12,
    "model__vision__patch_size": PATCH,
    "model__vision__init_pos_emb_height": 4,
    "model__vision__init_pos_emb_width": 4,
    "model__vision__norm_eps": 1e-6,
}


def step_on(config: Config, pictures: tuple[int, ...], ranks: Ranks = ALONE) -> dict[str, Any]:
    """One step on two rows, one a process where there are two; those in `pictures` hold an image of two features."""
    model, optimizer = setup.build(config, ranks=ranks)
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(11, config.model.vocab_size, (2, 8), generator=g)
    pixels = torch.randn(2, 8, 3, PATCH, PATCH, generator=g, dtype=torch.float64)
    ids[1, -1] = config.model.pad_token_id
    for row in pictures:
        ids[row, 2:4] = MARK
    rows = range(2) if ranks.size == 1 else [ranks.rank // (ranks.size // 2)]
    seen = [r for r in rows if r in pictures]
    images = {"pixel_values": torch.cat([pixels[r] for r in seen]), "grid_thws": torch.tensor([[1, 2, 4]] * len(seen))} if seen else {}
    labels = ids.masked_fill(ids == MARK, -100)
    out = model.train()(ids[list(rows)], labels=labels[list(rows)], **images)
    total = ranks.totals([int(out.num_targets) * optimizer.counts])[0]
    (out.loss * out.num_targets / total).backward()
    norm = optimizer.clip()
    held = optimizer.sharded.held if ranks.size > 1 else dict(model.named_parameters())
    wrap = optimizer.sharded.wrap if ranks.size > 1 else lambda name, t: t
    gradients = {n: whole(wrap(n, p.grad)) for n, p in held.items() if p.grad is not None}
    optimizer.step(1.0)
    weights = {n: whole(t) for n, t in optimizer.weights().items()}
    return {"targets": 0, "loss": 0.0, "vio": 0.0, "norm": float(norm), "gradients": gradients, "weights": weights, "state": {}}


def step_together(config: Config, pictures: tuple[int, ...]) -> dict[str, Any]:
    return step_on(config, pictures, Ranks(dist.get_rank(), dist.get_world_size()))


LAYOUTS = [{"data_shard": 2}, {"data_shard": 2, "tensor": 2}]


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: "-".join(axes))
@pytest.mark.parametrize("pictures", [(0,), (1,), (0, 1), ()])
def test_a_process_without_an_image_equals_one_that_has_all(axes: dict[str, int], pictures: tuple[int, ...]) -> None:
    config = layout(config_for(**SEES), **axes)
    found, one = on_ranks(2 * axes.get("tensor", 1), step_together, config, pictures)[0], step_on(config_for(**SEES), pictures)
    towers = [n for n in one["gradients"] if n.startswith("vision_tower.")]
    assert bool(towers) == bool(pictures)
    assert all(float(one["gradients"][n].abs().max()) > 1e-9 for n in towers)
    assert_equal(found, one)


QUANTISED: dict[str, Any] = {"model__moe_intermediate_size": 32, "model__routed_expert_hidden_size": 32}


@pytest.mark.parametrize("axes", [{"data_shard": 2}, {"data_shard": 2, "expert": 2}, {"expert": 2, "tensor": 2}], ids="-".join)
def test_quantised_experts_equal_one_process(axes: dict[str, int]) -> None:
    config = config_for(model__quantization="mxfp4+mxfp8", **QUANTISED)
    found, one = on_ranks(2 ** len(axes), train_on, layout(config, **axes))[0], train(config)
    assert any(n.endswith("experts.w1_scale") for n in found["weights"])
    assert_equal(found, one)


def test_a_quantised_run_writes_the_model_that_one_process_writes(tmp_path: Path) -> None:
    config = config_in(tmp_path, model__quantization="mxfp4", train__export=True, **QUANTISED)
    assert run_on(config, str(tmp_path / "alone")) == ""
    assert on_ranks(2, run_on, layout(config, expert=2), str(tmp_path / "two")) == ["", ""]
    mine, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "alone"))
    packed = [n for n in theirs if n.endswith("_packed")]
    assert packed
    assert mine.keys() == theirs.keys()
    for name, t in theirs.items():
        torch.testing.assert_close(mine[name], t, atol=1e-6, rtol=1e-6)
