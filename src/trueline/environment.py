"""`trueline env`: what a report of a fault needs to know about this machine and installation, without secrets.

Everything has a time limit. Values of environment variables whose names or contents look like secrets are masked.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trueline.errors import redact_urls
from trueline.extras import EXTRA_OF
from trueline.version import __version__

BASE = ("numpy", "onnxruntime", "grpcio", "protobuf", "uvloop", "httptools", "msgspec", "safetensors", "fsspec")
OPTIONAL = (
    "torch", "pyarrow", "onnx", "onnxscript", "mlflow", "sqlalchemy", "pillow", "scikit-learn", "openvino",
    "transformers", "s3fs", "gcsfs", "captum", "cryptography", "opentelemetry-sdk", "array_record",
)  # fmt: skip
_SPARE = {"openvino"}
"""Extras that the line does without; no advice names them."""
_SECRET = re.compile(r"(?i)token|secret|passw|credential|key|auth|cookie|signature")
_SHOWN = re.compile(r"TRUELINE_|MLFLOW_|AWS_|GOOGLE_|AZURE_|OMP_|MKL_|CUDA_|NCCL_|GLOO_|(?i:https?_proxy|no_proxy)")
STORES = ("MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "FSSPEC_S3_ENDPOINT_URL")
PORTS = {8080: "serve", 8081: "serve, management", 8082: "serve, metrics"}
REACH_S = 1.0
"""Longest wait for each store."""
GPU_S = 5.0


def collect(environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """The facts, as JSON's values. `folder`: of whose disk the room is shown."""
    return {
        "trueline": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": {"usable": len(os.sched_getaffinity(0)), "of": os.cpu_count(), "limit": _cpu_limit()},
        "memory_gb": _memory(),
        "disk_gb": _disk(folder),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in BASE},
        "optional": {name: _version(name) for name in OPTIONAL},
        "ports": {str(port): {"for": use, "free": _is_free(port)} for port, use in PORTS.items()},
        "stores": {name: _reach(environment[name]) for name in STORES if environment.get(name)},
        "environment": {name: mask(name, value) for name, value in sorted(environment.items()) if _SHOWN.match(name)},
    }


def as_text(facts: Mapping[str, Any]) -> str:
    """The facts as lines for a report."""
    cores, memory, disk = facts["cores"], facts["memory_gb"], facts["disk_gb"]
    limit = f", limited to {cores['limit']:g} by the container" if cores["limit"] else ""
    free = f"{memory['available']:g} GB available of {memory['total']:g}"
    bound = f", limited to {memory['limit']:g} by the container" if memory["limit"] else ""
    missing = [name for name, version in facts["optional"].items() if version is None]
    rows = [
        ("trueline", facts["trueline"]),
        ("python", facts["python"]),
        ("system", facts["system"]),
        ("cores", f"{cores['usable']} usable of {cores['of']}{limit}"),
        ("memory", free + bound),
        ("disk", f"{disk['free']:g} GB free of {disk['total']:g} at {disk['at']}"),
        ("GPUs", "; ".join(facts["gpus"]) or "none found by nvidia-smi"),
        ("packages", _join(facts["packages"])),
        ("optional", _join(facts["optional"])),
        ("not here", ", ".join(missing) or "nothing"),
        ("extras", _advise(missing)),
    ]
    rows += [
        (f"port {port}", f"{'free' if one['free'] else 'in use'} ({one['for']})")
        for port, one in facts["ports"].items()
    ]
    rows += [(name, state) for name, state in facts["stores"].items()]
    rows += [(name, value) for name, value in facts["environment"].items()]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def mask(name: str, value: str) -> str:
    """`value` as it may be shown: not at all where `name` is that of a secret, without users and tokens in URLs.

    >>> mask("AWS_SECRET_ACCESS_KEY", "abc"), mask("MLFLOW_TRACKING_URI", "https://me:pw@host/x")
    ('***', 'https://host/x')
    """
    return "***" if _SECRET.search(name) else redact_urls(value)


def _advise(missing: Sequence[str]) -> str:
    modules = {"pillow": "PIL"}
    extras = {EXTRA_OF[name] for one in missing if (name := modules.get(one, one)) in EXTRA_OF} - _SPARE
    return (
        f"pip install 'trueline[{','.join(sorted(extras))}]' adds what is missing" if extras else "the line is complete"
    )


def _join(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None) or "none"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gb(size: float) -> float:
    return round(size / 1e9, 1)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _cpu_limit() -> float | None:
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    return round(int(quota) / int(period), 2) if quota.isdigit() and period.isdigit() else None


def _memory() -> dict[str, float | None]:
    found = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return {
        "total": _gb(int(found.get("MemTotal", 0)) * 1024),
        "available": _gb(int(found.get("MemAvailable", 0)) * 1024),
        "limit": _gb(int(limit)) if limit.isdigit() else None,
    }


def available_bytes() -> int:
    """Memory that new processes can get, 0 if unknown: what the machine has free, within the control group's limit."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    free = int(found[1]) * 1024 if found else 0
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return min(free, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else free


def _disk(folder: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(folder)
    return {"free": _gb(usage.free), "total": _gb(usage.total), "at": str(folder)}


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _reach(uri: str) -> str:
    """Whether a store can be reached, within REACH_S: its file is there, or its host takes connections."""
    shown, parts = redact_urls(uri), urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        path = Path(uri.removeprefix("sqlite:///").removeprefix("file://"))
        return f"{shown}: {'is there' if path.exists() else 'not there yet'}" if "://" not in str(path) else shown
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=REACH_S).close()
    except (OSError, ValueError) as error:
        return f"{shown}: not reachable ({error})"
    return f"{shown}: reachable"
