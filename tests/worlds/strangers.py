"""Another process of the machine that attacks every port on which given processes listen, and no other port.

It has no secret. It connects to each listening port as soon as there is one, in every way that once did harm: it takes
a member's place in gloo, sends garbage behind it, speaks torch's store protocol, and holds connections open.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

KINDS = {
    **{f"place {rank}": struct.pack("<q", rank) for rank in range(3)},
    **{f"garbage {rank}": struct.pack("<q", rank) + b"\x7f" * 400 for rank in range(3)},
    "store": b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\x0c" + struct.pack("<I", 7),
    "greeting": b"TLP1" + struct.pack("!Bqq", 2, 1, 0) + bytes(64),
    "state": struct.pack("!Q", 33) + b'{"secret": "guess", "generation": 2}'[:33],
    "silence": b"",
}
MOST_HELD = 400


class Strangers:
    """Runs the attack until it is stopped, on the processes that `aim` has named last."""

    def __init__(self, folder: Path) -> None:
        self._targets = folder / "targets"
        self._targets.write_text("")
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._targets)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def aim(self, pids: Iterable[int]) -> None:
        beside = self._targets.with_suffix(".new")
        beside.write_text(" ".join(map(str, pids)))
        beside.replace(self._targets)

    def tried(self) -> int:
        """How many connections it has tried to make so far."""
        try:
            return int(self._targets.with_suffix(".tried").read_text() or 0)
        except FileNotFoundError:
            return 0

    def stop(self) -> dict[str, int]:
        """Ends the attack; returns how many ports there were, and connections that were made and that were dropped."""
        counts: dict[str, int] = json.loads(self._process.communicate("stop\n")[0])
        return counts


LISTEN = """
import json, os, socket, sys, threading
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
foreign = sys.argv[1] == "0"
options = (socket.SO_REUSEADDR, socket.SO_REUSEPORT) if foreign else (socket.SO_REUSEADDR,)
over = threading.Event()
port = int(sys.stdin.readline())
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
tried = heard = 0
while not over.is_set():
    for option in options:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
            tried += 1
            try:
                listener.bind(("127.0.0.1", port))
                listener.listen()
                heard += 1
            except OSError:
                continue
    if tried % 100 == 0:
        os.pwrite(int(sys.argv[2]), str(tried).encode(), 0)
print(json.dumps({"tried": tried, "listened": heard}))
"""


class PortThief:
    """Another user of the machine (the same one without SO_REUSEPORT, if tests do not run as root) that tries without a
    pause to listen on a port."""

    def __init__(self, folder: Path) -> None:
        self._tried = folder / "tried"
        with self._tried.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LISTEN, str(os.geteuid()), str(file.fileno())], pass_fds=[file.fileno()],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip

    def aim(self, port: int) -> None:
        """Begins; the port stays the same from then on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{port}\n")
        self._process.stdin.flush()

    def tried(self) -> int:
        """How often it has tried so far."""
        return int(self._tried.read_text() or 0)

    def stop(self) -> dict[str, int]:
        """Ends the attempts; returns how many there were, and how often it listened."""
        counts: dict[str, int] = json.loads(self._process.communicate()[0])
        return counts


class Ports:
    """The loopback's TCP ports on which one of the targets listens. New ones are found within a millisecond."""

    def __init__(self, targets: Path) -> None:
        self._targets = targets
        self._owned: dict[str, bool] = {}
        """Listening sockets, by inode: whether a target has it."""

    def look(self) -> tuple[set[int], set[int]]:
        """All ports, and those that were not there at the last look."""
        ports, new = {}, set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports[fields[9]] = int(fields[1].partition(":")[2], 16)
        if ports.keys() - self._owned.keys():
            owned = self._list_sockets()
            for inode in ports.keys() - self._owned.keys():
                self._owned[inode] = inode in owned
                if self._owned[inode]:
                    new.add(ports[inode])
        return {port for inode, port in ports.items() if self._owned[inode]}, new

    def _list_sockets(self) -> set[str]:
        sockets = set()
        for pid in self._targets.read_text().split():
            try:
                for name in os.listdir(f"/proc/{pid}/fd"):
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
            except OSError:  # it has ended, or closed one since
                continue
        return sockets


def takes_more(connection: socket.socket) -> bool:
    """Whether a send would not block. By poll(2): select(2) takes no descriptor above 1,023."""
    watched = select.poll()
    watched.register(connection, select.POLLOUT)
    return bool(watched.poll(0))


def attack(targets: Path) -> dict[str, int]:
    counts, held = {"ports": 0, "made": 0, "dropped": 0}, list[socket.socket]()
    found, all_at = Ports(targets), 0.0
    while not select.select([sys.stdin], [], [], 0)[0]:
        ports, new = found.look()
        counts["ports"] += len(new)
        if not new and time.monotonic() > all_at:
            new, all_at = ports, time.monotonic() + 0.05
        for port in new:
            begun = [(knock(port), data) for data in KINDS.values()]
            for connection, data in begun:
                try:
                    made = takes_more(connection) and connection.send(data) == len(data)
                except OSError:
                    made = False
                counts["made" if made else "dropped"] += 1
                held.append(connection)
        targets.with_suffix(".tried").write_text(str(counts["made"] + counts["dropped"]))
        while len(held) > MOST_HELD:
            held.pop(0).close()
    return counts


def knock(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
    return connection


if __name__ == "__main__":
    print(json.dumps(attack(Path(sys.argv[1]))))
