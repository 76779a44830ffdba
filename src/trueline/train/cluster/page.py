"""The page of all submitted jobs, on a loopback address, for clients that have its token. It can only read.

A thread reads the stores every two seconds, as `trueline jobs` does; viewers share what it found.
"""

import asyncio
import contextlib
import hmac
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec

from trueline.errors import TruelineError
from trueline.train.cluster import operate, overview
from trueline.web import sockets
from trueline.web.messages import Request, Response, query_of
from trueline.web.pages import HTML, page_headers, read_page
from trueline.web.parser import HttpLimits
from trueline.web.server import HttpServer

EVERY_S = 2.0
_TEXT = b"text/plain; charset=utf-8"
_HTML = Path(__file__).with_name("jobs.html")
_STATE = b'<script type="application/json" id="state">'


def render_file(state: bytes) -> bytes:
    """The page as a file that needs no server and shows a state as it is."""
    return read_page(_HTML).replace(_STATE, _STATE + state.replace(b"<", b"\\u003c"))


class JobsReader:
    """What the stores have. `list_stores` is called each time, since new stores are used meanwhile."""

    def __init__(self, list_stores: Callable[[], Sequence[str]]) -> None:
        self._list_stores, self._stop = list_stores, threading.Event()
        self.state = b"{}"
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def begin(self) -> None:
        self.read()
        self._thread.start()

    def end(self) -> None:
        self._stop.set()

    def read(self) -> None:
        found, faults = {}, {}
        for store in self._list_stores():
            try:
                found[store] = operate.list_jobs(store)
            except (TruelineError, OSError) as error:
                faults[store] = str(error)
        self.state = msgspec.json.encode(overview.summarize(found, faults, time.time()))

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.read()


class JobsApp:
    """Answers GET and HEAD on / and /state."""

    def __init__(self, reader: JobsReader, token: str) -> None:
        self._reader, self._token, self._html = reader, token.encode(), read_page(_HTML)
        self._headers = page_headers(self._html, cache="no-store")

    def answer(self, request: Request) -> Response:
        if request.path not in ("/", "/state"):
            return self.refuse(request.path, 404, "this page has / and /state")
        if request.method not in ("GET", "HEAD"):
            return self._refuse(405, "this page is read with GET", b"allow: GET, HEAD\r\n")
        bearer = request.headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not hmac.compare_digest(query_of(request.target).get("token", "").encode() or bearer, self._token):
            why = "the token is missing or wrong: open the address that `trueline jobs --page` shows"
            return self._refuse(401, why, b"www-authenticate: Bearer\r\n")
        if request.path == "/":
            return Response(200, self._html, HTML, self._headers)
        return Response(200, self._reader.state, headers=self._headers)

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The response to a request that could not be received."""
        return self._refuse(status, message)

    def _refuse(self, status: int, message: str, headers: bytes = b"") -> Response:
        return Response(status, f"{status}: {message}\n".encode(), _TEXT, self._headers + headers)


@contextlib.asynccontextmanager
async def serve_page(list_stores: Callable[[], Sequence[str]], port: int = 0) -> AsyncIterator[str]:
    """Serves the page on 127.0.0.1 while the block runs; yields its URL. Raises PortInUse."""
    reader, token = JobsReader(list_stores), secrets.token_hex(16)
    listener = sockets.listen("127.0.0.1", port)
    loop = asyncio.get_running_loop()
    server = HttpServer(JobsApp(reader, token), HttpLimits(), loop)
    await asyncio.to_thread(reader.begin)
    listening = await loop.create_server(server, sock=listener)
    sweeping = asyncio.ensure_future(_sweep(server))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/?token={token}"
    finally:
        reader.end()
        sweeping.cancel()
        listening.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.drain(), 1.0)


async def _sweep(server: HttpServer) -> None:
    while True:
        await asyncio.sleep(1.0)
        server.sweep()


async def show(list_stores: Callable[[], Sequence[str]], port: int, say: Callable[[str], None]) -> None:
    """Serves the page until the task is cancelled; `say` gets its URL."""
    async with serve_page(list_stores, port) as url:
        say(url)
        await asyncio.Event().wait()
