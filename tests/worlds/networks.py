"""Two machines in one: network namespaces with a link between them, and a file system of their own where it matters."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

DEVICE = "wire0"


def find_lack() -> str:
    """What this machine lacks for network namespaces; empty: nothing."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "iptables", "unshare") if shutil.which(tool) is None]:
        return f"there is no {missing[0]}"
    name = f"tl{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.stderr.strip()


class Machine:
    """A namespace; `hidden` folders are empty for its processes."""

    def __init__(self, name: str, address: str, hidden: tuple[Path, ...] = ()) -> None:
        self.name, self.address, self.hidden = name, address, hidden

    def run(self, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.name, *command], check=True, capture_output=True)

    def start(self, *command: str, log: Path, folder: Path | None = None, **env: str) -> subprocess.Popen[bytes]:
        """Starts a command there, in a session of its own; `folder`: where it runs, if not here."""
        mounts = "".join(f"mount -t tmpfs tmpfs '{folder}' && " for folder in self.hidden)
        shell = ["unshare", "-m", "sh", "-c", f'{mounts}exec "$@"', "sh"]
        with log.open("ab") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *shell, *command],
                env=os.environ | env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                cwd=folder,
            )  # fmt: skip

    def cut(self) -> None:
        """Drops every packet from and to other machines."""
        for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o")):
            self.run("iptables", "-w", "-A", chain, way, DEVICE, "-j", "DROP")

    def heal(self) -> None:
        for chain in ("INPUT", "OUTPUT"):
            self.run("iptables", "-w", "-F", chain)

    def refuse_from(self, address: str, ports: str) -> None:
        """A firewall here that drops connections from `address` to the ports FIRST:LAST."""
        self.run("iptables", "-w", "-A", "INPUT", "-p", "tcp", "-s", address, "--dport", ports, "-j", "DROP")


@contextlib.contextmanager
def two_machines(hidden_from_second: tuple[Path, ...] = ()) -> Iterator[tuple[Machine, Machine]]:
    """Two machines at 10.77.0.1 and 10.77.0.2."""
    one, two = Machine(f"tl{os.getpid()}a", "10.77.0.1"), Machine(f"tl{os.getpid()}b", "10.77.0.2", hidden_from_second)
    with contextlib.ExitStack() as exits:
        for machine in (one, two):
            subprocess.run(["ip", "netns", "add", machine.name], check=True)
            exits.callback(subprocess.run, ["ip", "netns", "del", machine.name], check=False)
        ends = ["name", DEVICE, "netns", one.name, "type", "veth", "peer", "name", DEVICE, "netns", two.name]
        subprocess.run(["ip", "link", "add", *ends], check=True)
        for machine in (one, two):
            machine.run("ip", "addr", "add", f"{machine.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                machine.run("ip", "link", "set", device, "up")
        yield one, two
