"""A local folder is a place of checkpoints."""

import pytest

from conformance.place import *  # noqa: F403  the shared tests
from trueline.state.place import place_of


@pytest.fixture
def place(tmp_path):
    return place_of(tmp_path / "checkpoints", seal="seal")
