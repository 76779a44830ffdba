"""A local folder is a place of checkpoints."""

import pytest

from conformance.checkpoint_store import *  # noqa: F403  the shared tests
from conformance.checkpoint_store import PARTS
from trueline.storage import checkpoint_store
from trueline.storage.checkpoint_store import open_checkpoint_store


@pytest.fixture
def place(tmp_path):
    return open_checkpoint_store(tmp_path / "checkpoints", seal="seal")


def test_a_name_is_gone_before_its_parts_are_removed_one_by_one(place, monkeypatch):
    remove, removed = checkpoint_store.shutil.rmtree, []

    def watched(path, **how):
        removed.append(path.name)
        remove(path, **how)

    place.write("step-1", PARTS)
    monkeypatch.setattr(checkpoint_store.shutil, "rmtree", watched)
    place.remove("step-1")
    assert "step-1" not in removed
    assert place.names() == place.names(unfinished=True) == []
