"""The programs of this environment are the ones that docs/interop.md speaks of."""

from importlib.metadata import version

import pytest


@pytest.mark.parametrize("name", ["mlx-lm", "transformers", "trl", "peft", "compressed-tensors"])
def test_every_program_is_installed(name):
    assert version(name)
