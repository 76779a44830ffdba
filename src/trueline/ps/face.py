"""The process in which a job's servers are one gRPC service, for clients in any language (`parameter_server.proto`).

It is a client of the servers with the speed of gRPC, a quarter of theirs, and holds nothing: it may die at any time. A
push has the identity that its client gives it, in an epoch of its own below 0, so it is applied once, counts as no
step, and takes no part in the job's records. No torch.
"""

import asyncio
import hashlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from trueline.errors import TruelineError, UsageError
from trueline.ps.client import PsClient
from trueline.ps.dial import read_address
from trueline.ps.gradients import Gradients, Pulled
from trueline.ps.messages import ModelSpec
from trueline.ps.partition import Ids
from trueline.ps.split import Rows
from trueline.ps.tables.unique import find_unique
from trueline.ps.tasks import TasksLink
from trueline.train import settings as job_settings
from trueline.train.link.grpc_client import resident_bytes
from trueline.train.master.server import SecretInterceptor
from trueline.wire import parameter_server_pb2 as pb

SERVICE = "trueline.parameter_server.ParameterServer"
MAX_BYTES = 1 << 30
Context = Any


class ParameterFace:
    """The service's four calls. Those of a client that asks for what there is not are refused as INVALID_ARGUMENT."""

    def __init__(self, spec: ModelSpec, client: PsClient) -> None:
        self._spec, self._client = spec, client
        self._variables = {one.name: one for one in spec.dense}
        self._tables = {one.name: one for one in spec.tables}
        self._pushing = ThreadPoolExecutor(1)

    def make_handler(self) -> Any:
        calls: Mapping[str, tuple[Callable[[Any], Awaitable[Any]], Any]] = {
            "describe_model": (self.describe, pb.DescribeModelRequest),
            "pull_variable": (self.pull_variable, pb.PullVariableRequest),
            "pull_embedding_vector": (self.pull_vectors, pb.PullEmbeddingVectorRequest),
            "push_gradient": (self.push, pb.PushGradientRequest),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(_refuse_by_status(act), of.FromString, _serialize)
            for name, (act, of) in calls.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def describe(self, request: pb.DescribeModelRequest) -> pb.DescribeModelResponse:
        variables = [pb.DescribeModelResponse.Variable(name=one.name, dims=one.shape, group=one.group)
                     for one in self._spec.dense]  # fmt: skip
        tables = [pb.DescribeModelResponse.Table(name=one.name, dim=one.dim, group=one.group)
                  for one in self._spec.tables]  # fmt: skip
        return pb.DescribeModelResponse(variables=variables, tables=tables, groups=len(self._spec.groups))

    async def pull_variable(self, request: pb.PullVariableRequest) -> pb.PullVariableResponse:
        names = list(request.names) or list(self._variables)
        for name in names:
            self._find_variable(name)
        pulled = await self._pull({}, dense=True)
        variables = [
            pb.Tensor(name=name, dims=self._variables[name].shape, content=pulled.dense[name].tobytes())
            for name in names
        ]
        return pb.PullVariableResponse(variables=variables, version=min(pulled.steps.values()))

    async def pull_vectors(self, request: pb.PullEmbeddingVectorRequest) -> pb.PullEmbeddingVectorResponse:
        self._find_table(request.table)
        ids = _read(request.ids, "<i8", "ids")
        unique, places = find_unique(ids)
        pulled = await self._pull({request.table: unique}, dense=False)
        dim = self._tables[request.table].dim
        rows = pulled.rows[request.table].reshape(-1, dim)[places]
        vectors = pb.Tensor(name=request.table, dims=rows.shape, content=rows.tobytes(), ids=request.ids)
        return pb.PullEmbeddingVectorResponse(vectors=vectors, version=min(pulled.steps.values(), default=0))

    async def push(self, request: pb.PushGradientRequest) -> pb.PushGradientResponse:
        if not request.source or request.minibatch < 0:
            raise UsageError("a push has no source or no minibatch, under which it would be applied once")
        tables, dense = self._read_gradients(request.gradients)
        lrs = tuple(request.learning_rates)
        lrs = lrs * len(self._spec.groups) if len(lrs) == 1 else lrs
        buffers = [one.name for one in self._spec.dense if one.group < 0 and one.name not in dense]
        if buffers:  # what is pushed takes their place
            values = (await self._pull({}, dense=True)).dense
            dense |= {name: values[name] for name in buffers}
        for one in self._spec.dense:
            dense.setdefault(one.name, np.zeros(int(np.prod(one.shape)), np.float32))
        gradients = Gradients(
            epoch=find_epoch(request.source), minibatch=request.minibatch, weight=1.0, lrs=lrs, tables=tables,
            dense=dense,
        )  # fmt: skip
        await asyncio.get_running_loop().run_in_executor(self._pushing, self._send, gradients)
        return pb.PushGradientResponse()

    def _send(self, gradients: Gradients) -> None:
        """In a thread of its own: one push at a time, so that a cut seldom comes into the middle of one."""
        self._client.push(gradients)
        self._client.drain()
        self._client.take_acknowledged()

    async def _pull(self, tables: Mapping[str, Ids], *, dense: bool) -> Pulled:
        return await asyncio.wrap_future(self._client.start_pull(tables, dense))

    def _read_gradients(self, given: Sequence[pb.Tensor]) -> tuple[dict[str, tuple[Ids, Rows]], dict[str, Rows]]:
        tables: dict[str, tuple[Ids, Rows]] = {}
        dense: dict[str, Rows] = {}
        for one in given:
            values = _read(one.content, "<f4", one.name)
            if one.name in tables or one.name in dense:
                raise UsageError(f"two gradients are of '{one.name}'", hint="add them")
            if one.name in self._tables:
                dim, ids = self._find_table(one.name), _read(one.ids, "<i8", one.name)
                if values.size != len(ids) * dim:
                    raise UsageError(f"table {one.name}: {values.size} numbers for {len(ids)} ids of dim {dim}")
                tables[one.name] = ids, values.reshape(-1, dim)
            elif values.size == self._find_variable(one.name):
                dense[one.name] = values
            else:
                raise UsageError(f"{one.name}: {values.size} numbers, expected {self._find_variable(one.name)}")
        return tables, dense

    def _find_table(self, name: str) -> int:
        if name not in self._tables:
            raise UsageError(f"there is no table '{name}'", hint=f"the model has {', '.join(self._tables) or 'none'}")
        return self._tables[name].dim

    def _find_variable(self, name: str) -> int:
        if name not in self._variables:
            raise UsageError(f"there is no variable or table '{name}'", hint="describe_model lists them")
        return int(np.prod(self._variables[name].shape))


def find_epoch(source: str) -> int:
    """The epoch below 0 whose minibatches are those of `source`.

    >>> find_epoch("a") == find_epoch("a") != find_epoch("b") < 0
    True
    """
    return -1 - int.from_bytes(hashlib.blake2b(source.encode(), digest_size=7).digest(), "little")


def _read(data: bytes, dtype: str, what: str) -> Any:
    if len(data) % np.dtype(dtype).itemsize:
        raise UsageError(f"{what}: {len(data)} bytes are no whole number of {np.dtype(dtype).name}")
    return np.frombuffer(data, dtype)


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _refuse_by_status(act: Callable[[Any], Awaitable[Any]]) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await act(request)
        except TruelineError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{error.message}; {error.hint}".rstrip("; "))

    return call


async def open_face(face: ParameterFace, port: int, secret: str, crash: Callable[[Exception], None]) -> tuple[Any, int]:
    """The started server and its port, any free one for 0. Raises UsageError for a port that is in use."""
    options = [("grpc.max_receive_message_length", MAX_BYTES), ("grpc.max_send_message_length", MAX_BYTES),
               ("grpc.so_reuseport", 0)]  # fmt: skip
    server = grpc.aio.server(interceptors=[SecretInterceptor(secret, crash)], options=options)
    server.add_generic_rpc_handlers((face.make_handler(),))
    try:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    except RuntimeError as error:
        raise UsageError(f"port {port} of --grpc-port cannot be opened: {error}", hint="choose another one") from error
    await server.start()
    return server, port


async def serve(face: ParameterFace, port: int, secret: str) -> None:
    """Until SIGTERM. An unexpected exception ends the process, and the master starts it again."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    def crash(error: Exception) -> None:
        logging.getLogger("trueline").error("the gRPC face met an unexpected exception", exc_info=error)
        ended.set()

    server, _ = await open_face(face, port, secret, crash)
    await ended.wait()
    await server.stop(0.2)


def main() -> int:
    """Serves the job that the environment names (TRUELINE_JOB, _MASTER, _SECRET, _REF); returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    job_dir, secret = Path(os.environ["TRUELINE_JOB"]), os.environ["TRUELINE_SECRET"]
    link = TasksLink(os.environ["TRUELINE_REF"])
    link.begin_beats(resident_bytes)
    spec, routing = link.describe()
    client = PsClient(lambda ref: read_address(job_dir, ref), routing, secret.encode(), on_routing=link.route)
    try:
        asyncio.run(serve(ParameterFace(spec, client), job_settings.load(job_dir).grpc_port, secret))
        return 0
    except UsageError as error:
        link.fail(error.code, error.message, error.hint)
        return 1
    except Exception:  # noqa: BLE001  the process boundary
        traceback.print_exc()
        return 1
    finally:
        client.close()
        link.close()
