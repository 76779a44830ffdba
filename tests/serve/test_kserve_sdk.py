"""KServe's own SDK asks a real server, from a venv of its own: it wants other versions of its libraries than we do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trueline import serve
from worlds import bundles

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TRUELINE_CLIENTS", ROOT / "bench" / ".venvs")) / "kserve" / "bin" / "python"
SCRIPT = Path(__file__).parent / "clients" / "kserve_sdk.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="KServe's SDK is not installed: make clients"),
]


def test_kserves_sdk_works_unmodified_over_rest_and_grpc(tmp_path: Path) -> None:
    source = bundles.double_plus(tmp_path / "tiny.bundle").path
    with serve.start(source, grpc_port=0) as server:
        address = f"127.0.0.1:{server.grpc_port}"
        done = subprocess.run([PYTHON, SCRIPT, server.url, address], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all calls of the SDK were answered\n"
