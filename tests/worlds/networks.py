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
    """A namespace; `hidden` folders are empty for its processes, `replaced` files have the content of others."""

    def __init__(self, name: str, address: str, hidden: tuple[Path, ...] = (), address6: str = "") -> None:
        self.name, self.address, self.hidden, self.address6 = name, address, hidden, address6
        self.replaced: dict[str, Path] = {}

    def run(self, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.name, *command], check=True, capture_output=True)

    def start(self, *command: str, log: Path, folder: Path | None = None, **env: str) -> subprocess.Popen[bytes]:
        """Starts a command there, in a session of its own; `folder`: where it runs, if not here."""
        mounts = "".join(f"mount -t tmpfs tmpfs '{folder}' && " for folder in self.hidden)
        mounts += "".join(f"mount --bind '{other}' '{file}' && " for file, other in self.replaced.items())
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

    def take_only(self, *ports: range) -> None:
        """A firewall here that drops new connections from other machines to all but these ports, by either version of
        IP."""
        first = 1
        for taken in (*sorted(ports, key=lambda one: one.start), range(65536, 65536)):
            if first < taken.start:
                rule = ["-i", DEVICE, "-p", "tcp", "--syn", "--dport", f"{first}:{taken.start - 1}", "-j", "DROP"]
                self.run("iptables", "-w", "-A", "INPUT", *rule)
                self.run("ip6tables", "-w", "-A", "INPUT", *rule)
            first = taken.stop


@contextlib.contextmanager
def open_machines(count: int, hidden_from_others: tuple[Path, ...] = ()) -> Iterator[list[Machine]]:
    """Machines at 10.77.0.1 and fd77::1, 10.77.0.2 and fd77::2 and so on, on one switch; `hidden_from_others`: folders
    of the first alone."""
    switch = Machine(f"tl{os.getpid()}s", "")
    machines = [
        Machine(
            f"tl{os.getpid()}{'abcdef'[number]}", f"10.77.0.{number + 1}", hidden_from_others if number else (),
            f"fd77::{number + 1}",
        )
        for number in range(count)
    ]  # fmt: skip
    with contextlib.ExitStack() as exits:
        for machine in (switch, *machines):
            subprocess.run(["ip", "netns", "add", machine.name], check=True)
            exits.callback(subprocess.run, ["ip", "netns", "del", machine.name], check=False)
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        for number, machine in enumerate(machines):
            ends = ["name", DEVICE, "netns", machine.name, "type", "veth", "peer", "name", f"p{number}"]
            subprocess.run(["ip", "link", "add", *ends, "netns", switch.name], check=True)
            switch.run("ip", "link", "set", f"p{number}", "master", "switch", "up")
            machine.run("ip", "addr", "add", f"{machine.address}/24", "dev", DEVICE)
            if Path("/proc/net/if_inet6").exists():
                machine.run("ip", "addr", "add", f"{machine.address6}/64", "dev", DEVICE, "nodad")
            for device in ("lo", DEVICE):
                machine.run("ip", "link", "set", device, "up")
        yield machines
