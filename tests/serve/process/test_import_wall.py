"""A server process whose imports of training packages fail serves a bundle, over every protocol."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from trueline.extras import EXTRA_OF
from worlds import bundles

pytestmark = pytest.mark.slow

BLOCKED = {*EXTRA_OF, "scipy", "pandas", "sklearn", "transformers", "matplotlib"}
CODE = f"""
import atexit, sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Wall())
atexit.register(lambda: print("LOADED", *{{name.partition(".")[0] for name in sys.modules}}, file=sys.stderr))
from trueline.serve.__main__ import main
sys.exit(main())
"""


def test_a_server_answers_over_http_and_grpc_where_no_package_of_training_can_be_imported(tmp_path: Path) -> None:
    path = bundles.double_plus(tmp_path / "tiny.bundle").path
    command = [sys.executable, "-c", CODE, "--port=0", "--grpc-port=0", "--management-port=0", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            ready = json.loads(line or "{}")
            assert ready.get("event") == "server.ready", line or process.communicate()[1]
            with httpx.Client(base_url=ready["url"], timeout=60) as client:
                body = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
                assert client.post("/v2/models/tiny/infer", json=body).json()["outputs"][0]["data"] == [3, 5, 7]
                assert client.post("/predictions/tiny", json=[1, 2, 3]).json() == [3, 5, 7]
                assert client.post("/predictions/tiny", files={"data": b"[1, 2, 3]"}).status_code < 500
                for page in ("/metrics", "/v2/models/tiny", "/openapi.json"):
                    assert client.get(page).status_code == 200
            with grpc.insecure_channel(f"127.0.0.1:{ready['grpc_port']}") as channel:
                live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
                assert live(b"", timeout=60) == b"\x08\x01"
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    loaded = set(errors.rpartition("LOADED ")[2].split())
    assert "onnxruntime" in loaded
    assert not loaded & BLOCKED
