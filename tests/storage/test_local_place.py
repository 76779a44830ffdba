"""A local folder is a place of checkpoints."""

import pytest

from conformance.place import *  # noqa: F403  the shared tests
from conformance.place import PARTS
from trueline.storage import place as places
from trueline.storage.place import place_of


@pytest.fixture
def place(tmp_path):
    return place_of(tmp_path / "checkpoints", seal="seal")


def test_a_name_is_gone_before_its_parts_are_removed_one_by_one(place, monkeypatch):
    remove, removed = places.shutil.rmtree, []

    def watched(path, **how):
        removed.append(path.name)
        remove(path, **how)

    place.put("step-1", PARTS)
    monkeypatch.setattr(places.shutil, "rmtree", watched)
    place.remove("step-1")
    assert "step-1" not in removed
    assert place.names() == place.names(unfinished=True) == []
