"""A joined host keeps the laws of an engine, over TLS and one stream."""

import os

import pytest

from conformance.engine import *  # noqa: F403  the shared tests
from worlds import TESTS
from worlds.hosts import joined


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with joined(tmp_path) as world:
        yield world.engine
