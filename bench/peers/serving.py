"""The servers that bench/serve.py compares with: how each is written, started and asked. Every one runs the same ONNX
model in ONNX Runtime with one thread, in one worker, with batches of at most 32 after at most a millisecond, or where
the name ends in `-unbatched` without batches, which suits some of them better for a small model.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from _clients import Body, constant, oip

READY_S = 180.0


class Ask(NamedTuple):
    """How a peer is asked."""

    path: str
    body: Body
    """Some protocols have no id: BentoML's does not."""


_RUNTIME = """
import numpy as np, onnxruntime
def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
"""
_LITSERVE = """
import litserve
class Api(litserve.LitAPI):
    def setup(self, device):
        self.session = session(MODEL)
    def decode_request(self, request):
        return np.asarray(request["x"], np.float32)
    def batch(self, inputs):
        return np.stack(inputs)
    def predict(self, x):
        if BATCH == 1:
            return self.session.run(None, {"x": x[None]})[0][0]
        return self.session.run(None, {"x": x})[0]
    def unbatch(self, outputs):
        return list(outputs)
    def encode_response(self, output):
        return {"y": output.tolist()}
if __name__ == "__main__":
    api = Api(max_batch_size=BATCH, batch_timeout=0.001 if BATCH > 1 else 0.0)
    litserve.LitServer(api, accelerator="cpu").run(port=PORT, num_api_servers=1, generate_client_file=False)
"""
_MLSERVER = """
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse
class Model(MLModel):
    async def load(self):
        self.session = session(MODEL)
        return True
    async def predict(self, payload):
        x = NumpyCodec.decode_input(payload.inputs[0])
        y = self.session.run(None, {"x": x.astype(np.float32)})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])
"""
_BENTOML = """
import bentoml
@bentoml.service(workers=1)
class Mlp:
    def __init__(self):
        self.session = session(MODEL)
    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=10000)
    def infer(self, x: np.ndarray) -> np.ndarray:
        return self.session.run(None, {"x": x.astype(np.float32)})[0]
"""
_RAY = """
import time, ray
from ray import serve
@serve.deployment(max_ongoing_requests=64)
class Mlp:
    def __init__(self):
        self.session = session(MODEL)
    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.001)
    async def run(self, xs):
        return list(self.session.run(None, {"x": np.stack(xs)})[0])
    async def __call__(self, request):
        x = np.asarray((await request.json())["x"], np.float32)
        return {"y": (await self.run(x)).tolist()}
if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(Mlp.bind())
    while True:
        time.sleep(1)
"""


class NotServed(Exception):
    """The peer did not come up; its log says why."""


PEERS: dict[str, tuple[str, str, list[str], Ask]] = {
    "litserve": (
        "server.py",
        _LITSERVE,
        ["server.py"],
        Ask("/predict", lambda values, request_id: {"id": request_id, "x": values}),
    ),
    "mlserver": (
        "peer_model.py",
        _MLSERVER,
        ["-c", "from mlserver.cli import main; main()", "start", "."],
        Ask("/v2/models/mlp/infer", oip),
    ),
    "bentoml": (
        "service.py",
        _BENTOML,
        ["-m", "bentoml", "serve", "service:Mlp", "--port", "PORT"],
        Ask("/infer", lambda values, request_id: {"x": [values]}),
    ),
    "ray": ("server.py", _RAY, ["server.py"], Ask("/", lambda values, request_id: {"id": request_id, "x": values})),
}
"""By name: file, source, command line after `python`, and its request."""
PEERS |= {f"{name}-unbatched": PEERS[name] for name in ("litserve", "mlserver")}


def venv_of(name: str) -> str:
    """The environment of a peer."""
    return name.partition("-")[0]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _write(name: str, folder: Path, model: Path, port: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    file, source, command, _ = PEERS[name]
    batch = 1 if name.endswith("-unbatched") else 32
    (folder / file).write_text(f"MODEL = {str(model)!r}\nPORT = {port}\nBATCH = {batch}\n{_RUNTIME}\n{source}")
    if venv_of(name) == "mlserver":
        further = {"grpc_port": _free_port(), "metrics_port": _free_port(), "metrics_endpoint": None}
        (folder / "settings.json").write_text(
            json.dumps({"host": "127.0.0.1", "http_port": port, "parallel_workers": 0, "debug": False} | further)
        )
        (folder / "model-settings.json").write_text(
            json.dumps(
                {"name": "mlp", "implementation": "peer_model.Model"}
                | ({"max_batch_size": batch, "max_batch_time": 0.001} if batch > 1 else {})
            )
        )
    return [str(port) if word == "PORT" else word for word in command]


@contextlib.contextmanager
def running(name: str, python: Path, model: Path, folder: Path) -> Iterator[tuple[int, int, Ask]]:
    """The peer's process, its port and how to ask it, once it has answered. Raises NotServed."""
    port = _free_port()
    command = _write(name, folder, model, port)
    ask = PEERS[name][3]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "BENTOML_DO_NOT_TRACK": "1"}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [str(python), *command], cwd=folder, stdout=log, stderr=log, env=settings, start_new_session=True
        )
        try:
            _wait(process, port, constant(ask.path, ask.body), folder / "log.txt")
            yield process.pid, port, ask
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, request: bytes, log: Path) -> None:
    head, _, body = request.partition(b"\r\n\r\n")
    path = head.split(b" ")[1].decode()
    until = time.monotonic() + READY_S
    said = "no answer"
    while time.monotonic() < until and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            said = f"{answer.status} {answer.read()[:200]!r}"
            connection.close()
            if answer.status == 200:
                return
        except OSError:
            time.sleep(0.3)
    how = f"ended with {process.returncode}" if process.poll() is not None else f"not ready within {READY_S:g} s"
    lines = log.read_text(errors="replace").strip().splitlines()
    wrong = [line for line in lines if "Error" in line or "error" in line][:1]
    raise NotServed(f"{how} ({said}); its log says: {' ... '.join([*wrong, *lines[-1:]])[:400]}")
