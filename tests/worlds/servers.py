"""Servers for tests: processes over bundles and stores, apps without a socket, requests on connections of their own."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import httpx

from trueline import serve
from trueline.bundle import Bundle
from trueline.bundle.values import Values
from trueline.serve import RunningServer
from trueline.serve.batching import execution_plan
from trueline.serve.batching.policy import Policy
from trueline.serve.handlers.loader import name_in_store
from trueline.serve.models.catalog import Models
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import ResolvedSource, RuntimeOptions, VersionOptions, load
from trueline.serve.models.servable import Loaded
from trueline.serve.models.sources import Store
from trueline.serve.protocols.oip.rest import Repository
from trueline.serve.protocols.router import Routes
from trueline.torchserve.extension import TorchServe
from trueline.torchserve.management import Management
from trueline.web.messages import InlineFuture, Request, Response
from worlds import bundles
from worlds.waiting import until

_OWN = {"verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "timeout": 250.0}
"""Reading all certificate authorities takes longer than a request. No test reaches the limit; a machine may be slow."""

request = partial(httpx.request, **_OWN)
get, post, put = (partial(one, **_OWN) for one in (httpx.get, httpx.post, httpx.put))
delete, options = (partial(one, **_OWN) for one in (httpx.delete, httpx.options))


@contextmanager
def running(source: Path | None = None, *, store: Path | None = None, **settings: Any) -> Iterator[RunningServer]:
    """A process that serves a bundle or an archive, or the models `load` of the folder `store`; paths may be Paths."""
    told = settings | ({} if store is None else {"model_store": store})
    told = {name: str(value) if isinstance(value, Path) else value for name, value in told.items()}
    with serve.start(source, **told) as server:
        yield server


def keys_in(key_file: Path) -> dict[str, str]:
    """The tokens that a server wrote to its `key_file`, by kind: management, inference, API."""
    return {kind: one["key"] for kind, one in json.loads(key_file.read_text()).items()}


def eventually(true: Callable[[], object]) -> None:
    """Returns once `true` holds for servers that may not listen yet.

    Ten times: all connections of one attempt may reach the same one of several processes.
    """

    def holds() -> object:
        try:
            return all(true() for _ in range(10))
        except httpx.TransportError:
            return False

    until(holds, "servers apply a change that another server got")


class Answers:
    """An App that returns a fixed response."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def answer(self, request: Request) -> Any:
        return self._answer

    def refuse(self, path: str, status: int, message: str) -> Response:
        return Response(status, message.encode())


class _WithoutSocket:
    """Apps on a loop that runs while one of them handles a request."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self, work: Awaitable[Any] | InlineFuture) -> Any:
        async def waited() -> Any:
            if not isinstance(work, InlineFuture):
                return await work
            done = self.loop.create_future()
            work.add_done_callback(lambda answer: done.set_result(answer.result()))
            return await done

        return self.loop.run_until_complete(waited())

    def respond(self, app: Any, method: str, path: str, body: bytes, headers: dict[str, str]) -> Response:
        named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        found = app.answer(Request(method, path.encode(), named, body))
        response: Response = found if isinstance(found, Response) else self.run(found)
        return response

    def close(self) -> None:
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_as_if(bundle: Bundle, run_s: float) -> Loaded:
    """`bundle`, loaded as if each run took `run_s` seconds, however busy this machine is."""
    with mock.patch.object(execution_plan, "median_s", return_value=run_s):
        return load(bundle, RuntimeOptions(threads=1), max_batch=64)


class TinyApp(_WithoutSocket):
    """Routes over one ready model `tiny`, in rows of three: y = 2x + 1. Without `inline` never on the loop. `values`:
    the condition on x."""

    def __init__(
        self, folder: Path, *, inline: bool = True, policy: Policy | None = None, values: Values | None = None
    ) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(1)
        self.models = Models()
        loaded = load_as_if(bundles.double_plus(folder / "b", max_rows=8, values=values), 20e-6 if inline else 1e-3)
        self.tiny = self.models.add("tiny", "1")
        self.tiny.make_ready(loaded, policy or Policy(), self.pool, self.loop)
        self.routes = Routes(self.models, self.loop, extension=TorchServe())

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Response:
        return self.respond(self.routes, method, path, body, headers)

    def close(self) -> None:
        self.pool.shutdown()
        self.routes.close()
        super().close()


class StoreApp(_WithoutSocket):
    """A fleet over a store with nothing loaded, and the apps of both its ports."""

    def __init__(self, folder: Path, *, state: Path | None = None) -> None:
        super().__init__()
        self.store = Store(folder, name_in_store)
        self.models = Models()
        self.fleet = Fleet(
            self.models, self.loop, self._thread, how=VersionOptions(way=RuntimeOptions(threads=1)), state=state
        )
        self.management = Management(self.fleet, self.store, self.find, self.loop)
        repository = Repository(self.fleet, self.store, self.loop)
        self.routes = Routes(self.models, self.loop, loader=repository, extension=TorchServe())

    async def _thread(self, work: Callable[[], Loaded]) -> Loaded:
        return await self.loop.run_in_executor(None, work)

    async def find(self, url: str) -> ResolvedSource:
        return ResolvedSource(path=self.store.find(url))

    def manage(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        return self._ask(self.management, method, path, body, headers)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        return self._ask(self.routes, method, path, body, headers)

    def _ask(self, app: Any, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
        response = self.respond(app, method, path, body, headers)
        return response.status, json.loads(response.body) if response.body else None
