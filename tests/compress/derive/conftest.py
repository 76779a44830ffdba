"""A model with its weights beside its recipe, which trains for one epoch."""

import pytest
from safetensors.torch import save_file

from worlds import compressible


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    made = compressible.make(tmp_path_factory.mktemp("trained"), recipe=compressible.BRIEF_RECIPE)
    save_file(made.module.state_dict(), made.recipe.with_name("weights.safetensors"))
    return made
