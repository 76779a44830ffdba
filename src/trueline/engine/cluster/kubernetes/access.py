"""Where the API server is and as whom it is called: from a kubeconfig, or in a pod of a job from its service account.

A kubeconfig's `exec` plugins are run as kubectl runs them. Sources: the kubeconfig format (v1) and
client.authentication.k8s.io/v1 of Kubernetes' documentation.
"""

import base64
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from trueline.errors import EngineAway, UsageError, join_names

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POD, POD_UID = "TRUELINE_POD", "TRUELINE_POD_UID"
"""Environment variables of the pods of jobs: their own name and identity."""
PLUGIN_S = 60.0
"""How long a plugin may take; it may ask a person."""


@dataclass(slots=True, kw_only=True)
class KubeAccess:
    """`token_file` is read for each call: Kubernetes exchanges the token hourly."""

    server: str
    namespace: str
    context: ssl.SSLContext
    token: str = ""
    token_file: Path | None = None
    plugin: "TokenPlugin | None" = None

    def read_token(self) -> str:
        if self.plugin is not None:
            return self.plugin.read()
        if self.token_file is not None:
            try:
                return self.token_file.read_text().strip()
            except OSError as error:
                raise EngineAway(f"cannot read the token {self.token_file}: {error.strerror}") from error
        return self.token


@dataclass(slots=True)
class TokenPlugin:
    """A program that prints an ExecCredential. It is run again shortly before the token ends."""

    command: list[str]
    env: Mapping[str, str]
    version: str
    _token: str = ""
    _until: float = field(default=0.0)

    def read(self) -> str:
        if self._token and time.time() < self._until:
            return self._token
        asked = json.dumps({"apiVersion": self.version, "kind": "ExecCredential", "spec": {"interactive": False}})
        try:
            done = subprocess.run(
                self.command, env=os.environ | self.env | {"KUBERNETES_EXEC_INFO": asked}, capture_output=True,
                text=True, timeout=PLUGIN_S, check=True,
            )  # fmt: skip
            status = json.loads(done.stdout)["status"]
            self._token = str(status["token"])
        except subprocess.CalledProcessError as error:
            raise EngineAway(
                f"{self.command[0]}, which the kubeconfig names, failed: {error.stderr.strip()}"
            ) from error
        except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
            raise EngineAway(f"{self.command[0]}, which the kubeconfig names, gave no token: {error}") from error
        ends = status.get("expirationTimestamp")
        self._until = parse_time(ends) - 30.0 if ends else float("inf")
        return self._token


def parse_time(text: str) -> float:
    """
    >>> parse_time("1970-01-01T00:01:00Z")
    60.0
    """
    return datetime.fromisoformat(text).timestamp()


def find_access(kubeconfig: str = "", context: str = "") -> KubeAccess:
    """In a pod of a job its service account; else the kubeconfig; else the service account of any pod. Raises
    EngineAway where there is none, UsageError for one that cannot be used."""
    if POD not in os.environ:
        named = kubeconfig or os.environ.get("KUBECONFIG", "")
        files = [Path(one).expanduser() for one in named.split(":") if one] or [Path.home() / ".kube" / "config"]
        found = [path for path in files if path.is_file()]
        if found:
            return read_kubeconfig(found[0], context)
        if named:
            raise EngineAway(f"there is no kubeconfig {named}", hint="correct kubeconfig in [engine.kubernetes]")
    elif not (ACCOUNT / "token").is_file():
        raise EngineAway(f"this pod has no {ACCOUNT}/token", hint="let the service account of the pods mount its token")
    if "KUBERNETES_SERVICE_HOST" not in os.environ or not (ACCOUNT / "token").is_file():
        raise EngineAway(
            "there is no kubeconfig (~/.kube/config, or what KUBECONFIG names)",
            hint="use a machine where kubectl reaches the cluster, or set kubeconfig in [engine.kubernetes]",
        )
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return KubeAccess(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=(ACCOUNT / "namespace").read_text().strip(), token_file=ACCOUNT / "token",
        context=ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")),
    )  # fmt: skip


def read_kubeconfig(path: Path, context: str = "") -> KubeAccess:
    """One context of a kubeconfig, the current one by default."""
    try:
        config = yaml.safe_load(path.read_text())
        chosen = context or config.get("current-context") or ""
        names = [one["name"] for one in config.get("contexts") or ()]
        if chosen not in names:
            raise UsageError(
                f"{path} has no context '{chosen}' (has: {join_names(names)})",
                hint="set context in [engine.kubernetes], or kubectl config use-context",
            )
        where = _find(config, "context", chosen)
        cluster, user = _find(config, "cluster", where["cluster"]), _find(config, "user", where.get("user", ""))
        server = str(cluster["server"]).rstrip("/")
        trust = _make_context(path.parent, cluster, user)
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"the kubeconfig {path} cannot be used: {type(error).__name__}: {error}") from error
    if "auth-provider" in user:
        raise UsageError(
            f"{path}: the user of '{chosen}' has an auth-provider, which Kubernetes 1.26 removed",
            hint="let your provider's tool write the kubeconfig again: with an exec plugin, or a token",
        )
    return KubeAccess(
        server=server, namespace=where.get("namespace") or "default", context=trust, token=user.get("token", ""),
        token_file=path.parent / user["tokenFile"] if user.get("tokenFile") else None,
        plugin=_make_plugin(user.get("exec"), path.parent),
    )  # fmt: skip


def _find(config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    """The entry of this name in the list of its kind; empty: there is no such user."""
    for one in config.get(f"{kind}s") or ():
        if one["name"] == name:
            return dict(one[kind] or {})
    if kind == "user":
        return {}
    raise KeyError(f"no {kind} '{name}'")


def _make_plugin(described: Mapping[str, Any] | None, folder: Path) -> TokenPlugin | None:
    if not described:
        return None
    command = str(described["command"])
    program = str(folder / command) if "/" in command else command
    env = {str(one["name"]): str(one["value"]) for one in described.get("env") or ()}
    return TokenPlugin([program, *map(str, described.get("args") or ())], env, str(described["apiVersion"]))


def _make_context(folder: Path, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    """The authority that the API server's certificate must be of, and the user's own certificate."""
    authority = _read_data(folder, cluster, "certificate-authority")
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate, key = _read_data(folder, user, "client-certificate"), _read_data(folder, user, "client-key")
    if certificate and key:
        with tempfile.NamedTemporaryFile(prefix="trueline-") as file:  # OpenSSL takes a path alone; the file is 0600
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _read_data(folder: Path, entry: Mapping[str, Any], name: str) -> bytes:
    if data := entry.get(f"{name}-data"):
        return base64.b64decode(data)
    return (folder / str(entry[name])).read_bytes() if entry.get(name) else b""
