"""The live page of a job, on a loopback address, for clients that have its token.

    master ──add_event──▶ Page ──▶ JobView ──▶ /, /state, /events (pushed once a second and at the end), /metrics

The token is derived from the job's secret, and can only read. A page that fails does not stop the job.
`python -m trueline.train.monitor.server JOB` shows the folder of any job, also of one that has ended.
"""

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from trueline import events, files
from trueline.errors import PortInUse, StorageError, UsageError
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir, parse_events
from trueline.train.monitor import prometheus
from trueline.train.monitor.job_view import Fields, JobView
from trueline.web import sockets
from trueline.web.messages import Request, Response, StreamedBody, query_of
from trueline.web.pages import HTML, page_headers
from trueline.web.parser import HttpLimits
from trueline.web.server import HttpServer

INTERVAL_S = 1.0
CLOSE_S = 1.0
TAIL_BYTES = 1 << 16
_TEXT = b"text/plain; charset=utf-8"
SLICE_BYTES = 1 << 14  # bytes of past events that are read at once, in a millisecond or two
_HTML = Path(__file__).with_name("page.html")
_STATE = b'<script type="application/json" id="state">'
_FACTS = ("name", "recipe", "epochs", "global_batch", "workers", "min_workers", "seed", "bitwise", "precision",
          "micro_batch", "autoscale", "monitor")  # fmt: skip


def token_of(secret: str) -> str:
    """The page's token: it does not give away the job's secret."""
    return hmac.new(secret.encode(), b"trueline page", hashlib.sha256).hexdigest()[:32]


def render_file(view: JobView, now: float) -> bytes:
    """The page as a file that needs no server and shows `view` as it is."""
    state = msgspec.json.encode(view.state(now)).replace(b"<", b"\\u003c")
    return _HTML.read_bytes().replace(_STATE, _STATE + state)


class Page:
    """A job's view and the server that shows it. Make it before the job's next event, so that none is missed.

    `share`: the part of a processor that reading past events may take; a long past is seconds of work.
    """

    def __init__(self, job_dir: Path, token: str, *, share: float = 1.0) -> None:
        self.job_dir, self.token, self.url, self.share = job_dir, token, "", share
        self._folder = JobDir(job_dir)
        self.view = JobView(load_facts(job_dir))
        master = self._folder.read_master()
        self.last_url = "" if master is None else master.page
        """URL of the page that an earlier master had; empty: there was none. Open tabs find the new page there."""
        self._log, self._last_port = self._folder.events, urlsplit(self.last_url).port or 0
        self._past = _size_of_lines(self._log)
        self._early: list[tuple[str, Fields, float]] | None = []
        self._closing = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._viewers: set[asyncio.Task[None]] = set()
        self._server: HttpServer | None = None
        self._listening: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._last_state: tuple[float, bytes] = (0.0, b"")

    def add_event(self, name: str, fields: Fields, at: float) -> None:
        """Enters an event, after the past ones when these are still being read."""
        if self._early is not None:
            self._early.append((name, fields, at))
            return
        self.view.apply(name, fields, at)
        if self.view.ended and not self._ended.is_set():
            self._ended.set()
            self._write(self._folder.page, render_file(self.view, time.time()))  # stays when the job has ended
        elif not self.view.ended:
            self._ended.clear()

    async def open(self, port: int = 0, say: Callable[..., None] = events.emit) -> str:
        """Serves the page on 127.0.0.1; returns its URL. For port 0 or one in use: the last port, or any."""
        self._tasks = [asyncio.ensure_future(self._replay())]
        for choice in dict.fromkeys((port or self._last_port, self._last_port, 0)):
            try:
                listener = sockets.listen("127.0.0.1", choice)
            except (PortInUse, UsageError) as error:
                say("page.failed", why=f"the live page cannot have port {choice} and takes another: {error.message}")
                continue
            loop = asyncio.get_running_loop()
            self._server = HttpServer(_App(self), HttpLimits(), loop)
            self._listening = await loop.create_server(self._server, sock=listener)
            self._sweep()
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={self.token}"
            self._write(self._folder.page_token, self.token.encode())  # for scrapers
            break
        return self.url

    def _sweep(self) -> None:
        if self._server is not None:
            self._server.sweep()
            self._sweeping = self._server.loop.call_later(1.0, self._sweep)

    @property
    def reading(self) -> bool:
        """Whether past events are still being read, so that the view lacks some."""
        return self._early is not None

    async def close(self) -> None:
        """Sends viewers the last state, then closes."""
        self._closing.set()
        if self._early is not None:  # the file of the page gets the whole story, if that is soon read
            self._tasks = self._tasks or [asyncio.ensure_future(self._replay())]
            await asyncio.wait(self._tasks[:1], timeout=CLOSE_S)
        if self._viewers:
            await asyncio.wait(self._viewers, timeout=CLOSE_S)
        if self._server is not None and self._listening is not None and self._sweeping is not None:
            self._listening.close()
            self._sweeping.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.drain(), CLOSE_S)
        for task in (*self._tasks, *self._viewers):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._viewers, return_exceptions=True)
        self._folder.page_token.unlink(missing_ok=True)

    async def _replay(self) -> None:
        """Reads earlier events, in slices with pauses: decisions do not wait and training gets its share."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            torn = b""
            while piece := log.read(min(SLICE_BYTES, self._past - log.tell())):
                began = time.monotonic()
                *lines, torn = (torn + piece).split(b"\n")
                for event in parse_events(lines):
                    self.view.apply(*event)
                took_s = time.monotonic() - began
                await asyncio.sleep(0 if self._closing.is_set() else took_s * (1 / self.share - 1))
        early, self._early = self._early or [], None
        for name, fields, at in early:
            self.add_event(name, fields, at)

    async def follow(self) -> None:
        """Shows what another process appends to the job's events, without end."""
        await self._tasks[0]
        with self._log.open("rb") as log:
            log.seek(self._past)
            while True:
                await asyncio.sleep(INTERVAL_S / 2)  # another process appends to the file
                while (line := log.readline()).endswith(b"\n"):
                    for event in parse_events([line]):
                        self.view.apply(*event)
                log.seek(-len(line), os.SEEK_CUR)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            files.write_atomic(path, content, mode=0o600)
        except StorageError as error:
            events.emit("page.failed", why=error.message)

    def encode_state(self) -> bytes:
        """The state as JSON; viewers share one for half a second."""
        now = time.time()
        if not 0 <= now - self._last_state[0] < INTERVAL_S / 2 or self.view.ended:
            self._last_state = (now, msgspec.json.encode(self.view.state(now)))
        return self._last_state[1]

    def stream(self) -> StreamedBody:
        """Server-sent events: the state every second while the job runs, and at once when it ends."""

        def stop() -> None:
            viewer.cancel()

        pieces = StreamedBody(stop)
        viewer = asyncio.ensure_future(self._push(pieces))
        self._viewers.add(viewer)
        viewer.add_done_callback(self._viewers.discard)
        return pieces

    async def _push(self, pieces: StreamedBody) -> None:
        seen = -1
        while True:
            unchanged, seen = self.view.changes == seen and self.view.ended, self.view.changes
            pieces.add(b": still here\n\n" if unchanged else b"data: " + self.encode_state() + b"\n\n")
            if self._closing.is_set():
                pieces.end()
                return
            next_change = self._closing if self._ended.is_set() else self._ended
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(next_change.wait(), INTERVAL_S)


def _size_of_lines(log: Path) -> int:
    """Bytes of the whole lines of `log`; the last line may be incomplete."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        end = file.read(TAIL_BYTES)
    return size - len(end) + end.rfind(b"\n") + 1


def load_facts(job_dir: Path) -> dict[str, Any]:
    settings = job_settings.load(job_dir)
    return {name: getattr(settings, name) for name in _FACTS}


class _App:
    """Answers GET and HEAD on the page's four paths to clients that have its token."""

    def __init__(self, page: Page) -> None:
        self._page, self._html = page, _HTML.read_bytes()
        self._headers = page_headers(self._html, cache="no-store")

    def answer(self, request: Request) -> Response:
        """The response; 404, 405 and 401 in plain text."""
        if request.path not in ("/", "/state", "/events", "/metrics"):
            return self.refuse(request.path, 404, "this page has /, /state, /events and /metrics")
        if request.method not in ("GET", "HEAD"):
            return self._plain(405, "this page is read with GET", b"allow: GET, HEAD\r\n")
        bearer = request.headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        token = query_of(request.target).get("token", "").encode() or bearer
        if not hmac.compare_digest(token, self._page.token.encode()):
            why = "the token is missing or wrong. The page's address, with its token, is in the job's master.json."
            return self._plain(401, why, b"www-authenticate: Bearer\r\n")
        match request.path:
            case "/":
                return Response(200, self._html, HTML, self._headers)
            case "/state":
                return Response(200, self._page.encode_state(), headers=self._headers)
            case "/events":
                pieces = self._page.stream()
                return Response(200, b"", b"text/event-stream; charset=utf-8", self._headers, pieces=pieces)
        if self._page.reading:  # incomplete counts would look like another job's
            return self._plain(503, "the job's past is still being read")
        content_type = prometheus.CONTENT_TYPE.encode()
        return Response(200, prometheus.render(self._page.view, time.time()), content_type, self._headers)

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The response to a request that could not be received."""
        return self._plain(status, message)

    def _plain(self, status: int, message: str, headers: bytes = b"") -> Response:
        return Response(status, f"{status}: {message}\n".encode(), _TEXT, self._headers + headers)


async def _show(job_dir: Path, port: int) -> None:
    page = Page(job_dir, secrets.token_hex(16))
    sys.stdout.write(await page.open(port) + "\n")
    sys.stdout.flush()
    await page.follow()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trueline.train.monitor.server", description="Shows a job's folder."
    )
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_show(arguments.job_dir, arguments.port))


if __name__ == "__main__":
    main()
