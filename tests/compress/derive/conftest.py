"""A model with its weights beside its recipe, which trains for one epoch; searches measure briefly."""

import pytest
from safetensors.torch import save_file

from trueline.compress import search
from worlds import compressible


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    made = compressible.make(tmp_path_factory.mktemp("trained"), recipe=compressible.BRIEF_RECIPE)
    save_file(made.module.state_dict(), made.recipe.with_name("weights.safetensors"))
    return made


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "QUICK_S", 0.02)
    monkeypatch.setattr(search, "FULL_S", 0.05)
