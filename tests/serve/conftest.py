"""Two servers under attack: one on the loopback without tokens, one with tokens; all ports open, handlers allowed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worlds import servers
from worlds.attacks import Listener, Target, store_of


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.socket.close()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    store = store_of(tmp_path_factory.mktemp("hidden-place"))
    with servers.running(
        store=store, load="tiny,boom,echo", management_port=0, grpc_port=0, grpc_management_port=0, metrics_port=0,
        allow_code=True,
    ) as server:  # fmt: skip
        for model in ("boom", "echo"):
            assert servers.put(f"{server.management_url}/models/{model}?min_worker=1&synchronous=true").is_success
        yield Target(server, store)


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    store = store_of(tmp_path_factory.mktemp("guarded"))
    keys = store.parent / "key_file.json"
    with servers.running(
        store=store, load="tiny", management_port=0, grpc_port=0, grpc_management_port=0, metrics_port=0, key_file=keys
    ) as server:
        yield Target(server, store, servers.keys_in(keys))
