"""A small model that was trained, with its recipe and bundle; searches measure for a moment only."""

import pytest

from trueline.compress import search
from worlds import compressible


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    return compressible.make(tmp_path_factory.mktemp("trained"))


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "QUICK_S", 0.02)
    monkeypatch.setattr(search, "FULL_S", 0.05)
