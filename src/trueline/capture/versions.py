"""What a proof was made with: versions without importing what they are of."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata

PACKAGES = ("trueline", "torch", "onnx", "onnxscript", "onnxruntime", "openvino", "numpy")


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version()), ("machine", platform.machine())]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    return tuple(found)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that emit, run and prove programs."""
    return dict(_versions())
