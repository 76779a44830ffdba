"""A node: containerd and kubelet in mounts of their own, as on a machine of their own.

Two kubelets of one machine would remove each other's logs from /var/log/pods, whose place is fixed. Cgroups are those
of the machine, and so is what the node says of its size.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

from worlds.kubernetes.images import PAUSE
from worlds.waiting import until

OWN = ("/var/log/pods", "/var/log/containers", "/var/lib/kubelet", "/run/containerd", "/var/lib/cni", "/run/netns")
"""Folders that are fixed in the programs."""


class Node:
    """`network`: the namespace's name; `address`: of all nodes, which have ports of their own."""

    def __init__(self, name: str, number: int, folder: Path, binaries: Path, *, network: str, address: str) -> None:
        self.name, self.folder, self.binaries = name, folder / name, binaries
        self._number, self._network, self._address = number, network, address
        self._kubeconfig, self._images = folder / "inside.conf", folder / "images"
        self._cni = folder / "cni"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._socket = self.folder / "containerd.sock"

    def start(self) -> None:
        for name in ("root", "state", "kubelet", *(f"own{number}" for number in range(len(OWN)))):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        mounts = "".join(f"mkdir -p {place} && mount --bind {self.folder}/own{number} {place} && "
                         for number, place in enumerate(OWN))  # fmt: skip
        self._run("holder", [
            "nsenter", f"--net=/run/netns/{self._network}", "unshare", "--mount", "--propagation", "private",
            "sh", "-c", f"{mounts}touch {self.folder}/mounted && exec sleep infinity",
        ])  # fmt: skip
        until((self.folder / "mounted").exists, self.read_logs)
        self._write_containerd()
        self._enter("containerd", str(self.binaries / "containerd"), "--config", str(self.folder / "containerd.toml"))
        until(lambda: self._call_ctr("version") == 0, self.read_logs)
        for image in self._images.glob("*.tar"):
            assert self._call_ctr("--namespace=k8s.io", "images", "import", str(image)) == 0, self.read_logs()
        self._write_kubelet()
        self._enter(
            "kubelet", str(self.binaries / "kubelet"), f"--config={self.folder}/kubelet.json",
            f"--kubeconfig={self._kubeconfig}", f"--root-dir={self.folder}/kubelet", f"--cert-dir={self.folder}/pki",
            f"--hostname-override={self.name}", f"--node-ip={self._address}", "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{self._socket}", f"--pod-infra-container-image={PAUSE}",
            f"--volume-plugin-dir={self.folder}/plugins", f"--node-labels=trueline.test/node={self.name}",
        )  # fmt: skip

    def _run(self, key: str, command: list[str]) -> None:
        path = f"{self.binaries}:{os.environ['PATH']}:/usr/sbin:/sbin"
        with (self.folder / f"{key}.log").open("ab") as log:
            self._daemons[key] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"PATH": path, "LD_LIBRARY_PATH": str(self.binaries / "lib")},
            )  # fmt: skip

    def _enter(self, key: str, *command: str) -> None:
        self._run(key, ["nsenter", f"--target={self._daemons['holder'].pid}", "--net", "--mount", *command])

    def _call_ctr(self, *command: str) -> int:
        with (self.folder / "ctr.log").open("ab") as log:
            return subprocess.run(
                [str(self.binaries / "ctr"), f"--address={self._socket}", *command], stdout=log, stderr=log, check=False
            ).returncode

    def _write_containerd(self) -> None:
        (self.folder / "containerd.toml").write_text(f"""version = 2
root = "{self.folder}/root"
state = "{self.folder}/state"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.internal.v1.opt"]
[grpc]
address = "{self._socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
disable_apparmor = true
disable_tcp_service = true
stream_server_address = "127.0.0.1"
tolerate_missing_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{self.binaries}/cni"
conf_dir = "{self._cni}"
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{self.binaries}/runc"
""")

    def _write_kubelet(self) -> None:
        (self.folder / "kubelet.json").write_text(json.dumps({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"}, "address": self._address, "port": 10350 + self._number,
            "healthzPort": 0, "readOnlyPort": 0, "failSwapOn": False, "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False, "enforceNodeAllocatable": [], "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 8, "imageGCHighThresholdPercent": 100, "serializeImagePulls": False,
            "evictionHard": {"nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
        }))  # fmt: skip

    def kill(self) -> None:
        """As a power cut: the daemons, and all that runs there."""
        for key in ("kubelet", "containerd"):
            if (daemon := self._daemons.pop(key, None)) is not None:
                daemon.kill()
                daemon.wait()
        for one in psutil.process_iter(["cmdline"]):
            if str(self._socket) in " ".join(one.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    for process in (*one.children(recursive=True), one):
                        process.kill()

    def restart(self) -> None:
        self.stop()
        (self.folder / "mounted").unlink()
        self.start()

    def stop(self) -> None:
        self.kill()
        if (holder := self._daemons.pop("holder", None)) is not None:
            holder.kill()
            holder.wait()

    def read_logs(self) -> str:
        return "\n".join(
            f"{path}: {path.read_text(errors='replace')[-1500:]}" for path in sorted(self.folder.glob("*.log"))
        )
