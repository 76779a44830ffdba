"""The control plane, in a network namespace of its own: etcd, API server, controllers, scheduler; and two nodes.

`PYTHONPATH=tests python -m worlds.kubernetes.cluster FOLDER` starts it by hand, prints how to use it, and ends it with
Ctrl-C.
`make kubernetes` builds the programs. The API server has the service's address, so that pods reach it without a proxy;
this machine reaches it at a port of 127.0.0.1. The pods' addresses are those of one bridge.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from trueline import files
from worlds.certificates import Authority
from worlds.kubernetes import images
from worlds.kubernetes.nodes import Node
from worlds.waiting import until

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "etcd", "containerd", "runc")
SERVICE, NODES_AT, PODS = "10.96.0.1", "10.96.0.2", "10.244.0.0/24"
NODES = ("n1", "n2")
ADMIN, STRANGER = "admin-token", "stranger-token"
SPACE = "jobs"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "clusters.md"


def find_binaries() -> Path:
    return files.user_cache() / "kubernetes" / "bin"


def find_lack() -> str:
    """Why Kubernetes cannot run here; empty: it can."""
    if absent := [name for name in PROGRAMS if not (find_binaries() / name).is_file()]:
        return f"no {', '.join(absent)} in {find_binaries()}: make kubernetes"
    if absent := [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"no {', '.join(absent)}: apt-get install iproute2 util-linux"
    return "" if os.geteuid() == 0 else "nodes need root"


def read_manifests() -> list[dict[str, Any]]:
    """What the guide of clusters gives for jobs: an account, its role and their binding."""
    (text,) = re.findall("^```yaml\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return list(yaml.safe_load_all(text))


class Kubernetes:
    """A cluster whose files are in `folder`."""

    def __init__(self, folder: Path, nodes: int = len(NODES)) -> None:
        self.folder, self.binaries = folder, find_binaries()
        self._network = f"tlk{os.getpid()}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._door = socket.create_server(("127.0.0.1", 0))
        self.server = f"https://127.0.0.1:{self._door.getsockname()[1]}"
        self.nodes = {
            name: Node(name, number, folder, self.binaries, network=self._network, address=NODES_AT)
            for number, name in enumerate(NODES[:nodes])
        }
        self._http: httpx.Client | None = None

    @property
    def env(self) -> dict[str, str]:
        return {"KUBECONFIG": str(self.kubeconfig)}

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "admin.conf"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_network()
        authority = Authority(self.folder, "ca", addresses=("127.0.0.1", SERVICE))
        authority.issue("server")
        authority.issue("accounts")
        (self.folder / "tokens.csv").write_text(f"{ADMIN},admin,1,system:masters\n{STRANGER},stranger,2\n")
        self.write_kubeconfig("admin.conf", ADMIN)
        self.write_kubeconfig("stranger.conf", STRANGER)
        self.write_kubeconfig("inside.conf", ADMIN, server=f"https://{SERVICE}")
        self._run("etcd", "etcd", f"--data-dir={self.folder}/etcd", "--log-level=error")
        self.start_api()
        with (self.folder / "forward.log").open("ab") as log:
            self._daemons["forward"] = subprocess.Popen(
                self._inside(sys.executable, str(Path(__file__).with_name("forward.py")), str(self._door.fileno()),
                             SERVICE, "443"),
                stdout=log, stderr=log, pass_fds=[self._door.fileno()], start_new_session=True,
            )  # fmt: skip
        until(self.answers, self.read_logs)
        config = f"--kubeconfig={self.folder}/inside.conf"
        self._run(
            "controllers", "kube-controller-manager", config, "--leader-elect=false", "--node-monitor-period=1s",
            "--node-monitor-grace-period=8s", f"--service-account-private-key-file={self.folder}/accounts.key",
            f"--root-ca-file={self.folder}/ca.pem",
        )  # fmt: skip
        self._run("scheduler", "kube-scheduler", config, "--leader-elect=false")
        self._write_images()
        for node in self.nodes.values():
            node.start()
        self.make("", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}}, "namespaces")
        until(lambda: self.read(f"api/v1/namespaces/{SPACE}/serviceaccounts/default").get("secrets"), self.read_logs)
        for manifest in read_manifests():
            self.make(manifest["metadata"]["namespace"], manifest, f"{manifest['kind'].lower()}s")
        for name in self.nodes:
            self.wait_ready(name)

    def _make_network(self) -> None:
        subprocess.run(["ip", "netns", "add", self._network], check=True)
        for command in (f"addr add {SERVICE}/32 dev lo", f"addr add {NODES_AT}/32 dev lo", "link set lo up"):
            subprocess.run(["ip", "-n", self._network, *command.split()], check=True)
        (self.folder / "cni").mkdir(exist_ok=True)
        (self.folder / "cni" / "10-bridge.conflist").write_text(json.dumps({
            "cniVersion": "0.4.0", "name": "pods", "plugins": [{
                "type": "bridge", "bridge": "pods0", "isGateway": True, "ipMasq": False, "hairpinMode": True,
                "ipam": {"type": "host-local", "dataDir": f"{self.folder}/addresses", "ranges": [[{"subnet": PODS}]],
                         "routes": [{"dst": "0.0.0.0/0"}]},
            }],
        }))  # fmt: skip

    def _write_images(self) -> None:
        (self.folder / "images").mkdir(exist_ok=True)
        images.write_pause(self.folder / "images" / "pause.tar", self.binaries / "pause")
        images.write_host(self.folder / "images" / "host.tar")

    def start_api(self) -> None:
        self._run(
            "api", "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--secure-port=443",
            f"--advertise-address={NODES_AT}", f"--tls-cert-file={self.folder}/server.pem",
            f"--tls-private-key-file={self.folder}/server.key", f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC", "--allow-privileged", "--service-cluster-ip-range=10.96.0.0/24",
            f"--service-account-key-file={self.folder}/accounts.pem", "--service-account-issuer=https://trueline.test",
            f"--service-account-signing-key-file={self.folder}/accounts.key",
            "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip

    def stop_api(self) -> None:
        daemon = self._daemons.pop("api")
        daemon.kill()  # it would wait for its clients, of which each node is one
        daemon.wait()

    def _inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._network}", *command]

    def _run(self, key: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{key}.log").open("ab") as log:
            self._daemons[key] = subprocess.Popen(
                self._inside(str(self.binaries / program), *arguments), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def write_kubeconfig(self, name: str, token: str, *, server: str = "") -> Path:
        path = self.folder / name
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {
                "server": server or self.server, "certificate-authority": str(self.folder / "ca.pem"),
            }}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": SPACE}}],
        }))  # fmt: skip
        path.chmod(0o600)
        return path

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        if self._http is None:
            trust = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
            self._http = httpx.Client(
                base_url=self.server, verify=trust, headers={"authorization": f"Bearer {ADMIN}"},
                limits=httpx.Limits(max_keepalive_connections=0), timeout=30.0,
            )  # fmt: skip
        return self._http.request(method, path, json=body, **more)

    def answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.call("GET", "readyz").status_code == 200
        return False

    def read(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", path).json()
        return found

    def make(self, space: str, body: dict[str, Any], kind: str) -> None:
        group = body["apiVersion"]
        base = "api/v1" if group == "v1" else f"apis/{group}"
        answer = self.call("POST", f"{base}/namespaces/{space}/{kind}" if space else f"{base}/{kind}", body)
        assert answer.is_success or answer.status_code == 409, answer.text

    def find_node(self, pod: str) -> str:
        return str(self.read(f"api/v1/namespaces/{SPACE}/pods/{pod}")["spec"].get("nodeName", ""))

    def is_ready(self, node: str) -> bool:
        answer = self.call("GET", f"api/v1/nodes/{node}")
        conditions = answer.json()["status"].get("conditions", ()) if answer.is_success else ()
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def wait_ready(self, node: str) -> None:
        until(lambda: self.is_ready(node), lambda: f"{node} is ready: {self.nodes[node].read_logs()}")

    def count_cores(self) -> int:
        """Of a node."""
        return int(self.read("api/v1/nodes/n1")["status"]["allocatable"]["cpu"])

    def remove_pods(self) -> None:
        self.call("DELETE", f"api/v1/namespaces/{SPACE}/pods", params={"gracePeriodSeconds": 0})
        until(
            lambda: not self.read(f"api/v1/namespaces/{SPACE}/pods")["items"],
            lambda: self.read(f"api/v1/namespaces/{SPACE}/pods"),
        )

    def read_logs(self) -> str:
        found = "\n".join(f"{path.name}: {path.read_text()[-1000:]}" for path in sorted(self.folder.glob("*.log")))
        return found + "".join(node.read_logs() for node in self.nodes.values())

    def stop(self) -> None:
        try:
            if self.answers():
                self.remove_pods()
        finally:
            for node in self.nodes.values():
                node.stop()
            for daemon in reversed([*self._daemons.values()]):
                daemon.kill()
                daemon.wait()
            self._daemons.clear()
            self._door.close()
            if self._http is not None:
                self._http.close()
            subprocess.run(["ip", "netns", "del", self._network], check=False)


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    if lack := find_lack():
        sys.exit(lack)
    cluster = Kubernetes(folder)
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    try:
        cluster.start()
        print(f"export KUBECONFIG={cluster.kubeconfig}  # Ctrl-C ends the cluster", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
