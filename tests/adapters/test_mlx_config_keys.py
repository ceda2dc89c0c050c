"""Every setting that mlx-lm's classes declare stands in the config.json that Atoll writes."""

from __future__ import annotations

import dataclasses

import pytest
from adapters.forms import FLAT, NESTED, SMALL

from atoll.config import ModelConfig
from atoll.hub.config_json import to_json

pytest.importorskip("mlx_lm")
OURS = {"router_weights", "latent_norm_eps", "residual"}  # written where they differ from what every engine takes for granted


@pytest.mark.parametrize("form", NESTED)
def test_the_nested_form(form):
    from mlx_lm.models.kimi_k3 import ModelArgs, TextArgs

    tree = to_json(ModelConfig(**{**SMALL, **NESTED[form]}))
    assert {f.name for f in dataclasses.fields(ModelArgs)} <= set(tree)
    assert {f.name for f in dataclasses.fields(TextArgs)} <= set(tree["text_config"])
    read = ModelArgs.from_dict(tree).text_config
    assert {f.name: getattr(read, f.name) for f in dataclasses.fields(TextArgs)} == {
        f.name: tree["text_config"][f.name] for f in dataclasses.fields(TextArgs)
    }
    assert not OURS & set(tree["text_config"])


def test_the_flat_form():
    from mlx_lm.models.kimi_linear import ModelArgs

    tree = to_json(ModelConfig(**{**SMALL, **FLAT}))
    assert {f.name for f in dataclasses.fields(ModelArgs)} <= set(tree)
    ModelArgs.from_dict(tree)
