"""A naive inference server, as an engineer would write it in an hour: asyncio, a JSON library, ONNX Runtime.

It parses the head of each request, reads one tensor of its JSON, runs the program once for each request and answers
in the Open Inference Protocol with the request's id. It validates, counts, batches and limits nothing. A server that
costs more than this has to say why.

    python bench/_sketch.py PROGRAM [--uvloop]       prints its port, serves until its standard input ends
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import orjson

    loads, dumps = orjson.loads, orjson.dumps
except ImportError:
    import msgspec

    loads, dumps = msgspec.json.decode, msgspec.json.encode


@contextlib.contextmanager
def sketch(program: Path, *, uvloop: bool = False) -> Iterator[tuple[int, int]]:
    """The process and the port of such a server of `program`."""
    command = [sys.executable, str(Path(__file__).resolve()), str(program), *(["--uvloop"] if uvloop else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.stdin.close()


class Connection(asyncio.Protocol):
    """Answers whole requests as they come."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, end, rest = self.buffer.partition(b"\r\n\r\n")
            if not end:
                return
            request_line, *lines = head.decode("latin-1").split("\r\n")
            headers = {}
            for line in lines:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            length = int(headers.get("content-length", 0))
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            _, path, _ = request_line.split(" ")
            answer = self.infer(path.split("/")[3], rest[:length])
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )

    def infer(self, model: str, body: bytes) -> bytes:
        import numpy as np

        request = loads(body)
        tensor = request["inputs"][0]
        x = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
        (y,) = self.session.run(None, {tensor["name"]: x})
        output = {"name": "y", "shape": y.shape, "datatype": "FP32", "data": y.ravel().tolist()}
        return dumps({"id": request.get("id"), "model_name": model, "outputs": [output]})


async def serve(program: str) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program, options, providers=["CPUExecutionProvider"])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(session), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()


if __name__ == "__main__":
    if "--uvloop" in sys.argv:
        import uvloop

        uvloop.run(serve(sys.argv[1]))
    else:
        asyncio.run(serve(sys.argv[1]))
