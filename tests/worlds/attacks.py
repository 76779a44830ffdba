"""A server under attack, what surrounds it on the disk, and something on this machine that it should not call."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field
from pathlib import Path

from trueline.serve import RunningServer
from worlds import archives, bundles, servers

BOOM = """
    def handle(data, context):
        if data is None:
            return None
        raise ValueError("/srv/secret/weights.bin hunter2 " + repr(data))
"""
ECHO = """
    def handle(data, context):
        if data is None:
            return None
        context.set_response_header(0, "x-echo", bytes(data[0]["body"]).decode("latin-1"))
        return ["ok"]
"""


@dataclass
class Target:
    """A server, what surrounds it on the disk, and something on this machine that it should not call."""

    server: RunningServer
    store: Path
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def ports(self) -> dict[str, str]:
        found = {"data": self.server.url, "management": self.server.management_url, "metrics": self.server.metrics_url}
        return {name: url for name, url in found.items() if url is not None}

    def send(self, data: bytes, port: str = "data") -> bytes:
        """What comes back for `data` on a connection of its own, to its end."""
        number = int(self.ports[port].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", number), timeout=60) as wire:
            answer = b""
            with contextlib.suppress(OSError):  # it has answered and closed
                wire.sendall(data)
            with contextlib.suppress(ConnectionError):
                while more := wire.recv(65536):
                    answer += more
            return answer

    def files(self) -> set[str]:
        """Every file and link of the world: what an attack leaves behind is beside the store."""
        return {str(path.relative_to(self.store.parent)) for path in self.store.parent.rglob("*")}

    def lives(self) -> bool:
        return servers.get(f"{self.server.url}/v2/health/live").status_code == 200


class Listener:
    """Something on this machine that should not be called."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.port = self.socket.getsockname()[1]

    def was_called(self) -> bool:
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def store_of(folder: Path) -> Path:
    """A store, a bundle beside it, and a link in it that leads out."""
    store = bundles.store(folder / "store", "tiny", "pair/1")
    bundles.store(folder, "outside")
    (store / "link.bundle").symlink_to(folder / "outside.bundle")
    archives.mar(store / "boom.mar", BOOM, modelName="boom")
    archives.mar(store / "echo.mar", ECHO, modelName="echo")
    torn = bundles.store(store, "torn") / "torn.bundle" / "programs" / "model.onnx"
    torn.write_bytes(torn.read_bytes()[:-1] + b"?")
    bundles.double_plus(store / "wrong.bundle", wrong=True)
    return store
