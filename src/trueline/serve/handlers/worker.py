"""One handler's process, seen from the server: starts it, sends it one batch at a time, ends it. Never blocks the loop.

A process that dies, exceeds its timeout or sends a malformed frame is ended with its process group; its batch fails.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trueline.serve.handlers import framing, orphans
from trueline.serve.handlers.budget import Limits
from trueline.serve.handlers.config import HandlerPlan
from trueline.serve.handlers.failures import DIED, HandlerFailed, Hung, StartFailed
from trueline.serve.models.servable import HandlerAnswer, HandlerRequest

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_PATHS = re.compile(r"(?:/[\w.+-]+){2,}")
SHARED_WEIGHTS = "TRUELINE_SHARED_WEIGHTS"
"""Environment variable: the folder of the weights that the workers of a recipe's model share."""
LONG_BYTES = 2**20
"""Longer requests are sent, and longer answers read, in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    model: str
    version: str
    folder: Path
    config_file: str
    plan: HandlerPlan
    limits: Limits = field(default_factory=Limits)
    weights: Path | None = None  # folder for the weights that workers share; None: each has its own copy
    beside: bool = False  # whether workers of other server processes use the folder too


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The server's environment without variables that look like secrets; PYTHONPATH becomes absolute, since the process
    starts in another folder.

    >>> environment({"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "y"})
    {'PATH': '/bin'}
    """
    kept = {name: value for name, value in own.items() if not _SECRET.search(name)}
    if "PYTHONPATH" in kept:
        folders = [os.path.abspath(folder) for folder in kept["PYTHONPATH"].split(os.pathsep) if folder]
        kept["PYTHONPATH"] = os.pathsep.join(folders)
    return kept


class Worker:
    """One process. `ended` is done when it is gone and reaped."""

    def __init__(
        self,
        launch: Launch,
        loop: asyncio.AbstractEventLoop,
        *,
        gpu: int | None = None,
        on_metrics: Callable[[Any], None] | None = None,
        together: bool = False,
    ) -> None:
        """Starts the process; `together`: the model has further workers. Raises OSError."""
        self.since = time.time()
        self.ended: asyncio.Future[str] = loop.create_future()  # why it ended
        self.ready = False
        self.load_s = 0.0
        self.answered = 0
        self._launch, self._loop, self._gpu, self._on_metrics = launch, loop, gpu, on_metrics
        self._shares = launch.weights if together or launch.beside else None
        self._why = ""
        self._starting: asyncio.Future[None] = loop.create_future()
        self._answering: asyncio.Future[list[HandlerAnswer]] | None = None
        self._asks: Sequence[HandlerRequest] = ()
        self._piece_bytes = 0
        self._reading: asyncio.Future[Any] | None = None
        """A long frame that a thread reads; those after it wait."""
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _begin(self) -> None:
        cores = len(os.sched_getaffinity(0))  # divided among the workers, unless the operator has set OMP_NUM_THREADS
        env = {"OMP_NUM_THREADS": str(max(1, cores // max(1, self._launch.plan.workers)))} | environment(os.environ)
        if self._shares is not None:
            env[SHARED_WEIGHTS] = str(self._shares)
        env[orphans.MARK] = self._mark = orphans.next_mark()
        ours, theirs = framing.pair()
        command = [sys.executable, "-P", "-m", "trueline.serve.handlers.child", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output carries the server's announcement
                pass_fds=[theirs.fileno()],
                cwd=self._launch.folder,
                env=env,
                start_new_session=True,
            )
        self._exit = os.pidfd_open(self._process.pid)
        self._sock: socket.socket = ours
        ours.setblocking(False)
        self._loop.add_reader(self._exit, self._reap)
        self._loop.add_reader(ours.fileno(), self._read)
        self._arm(self._launch.plan.startup_timeout_s, "was not ready")

    @property
    def _frame_bytes(self) -> int:
        return self._launch.limits.max_bytes * self._launch.plan.batch_size + 16 * 2**20

    def _encode_launch(self) -> dict[str, Any]:
        from importlib import metadata

        launch = self._launch
        return {
            "model": launch.model,
            "folder": str(launch.folder),
            "handler": launch.plan.handler,
            "config_file": launch.config_file,
            "envelope": launch.plan.envelope,
            "decode": launch.plan.decode,
            "batch_size": launch.plan.batch_size,
            "gpu": self._gpu,
            "server_version": metadata.version("trueline"),
            "address_space": launch.limits.address_space,
            "open_files": launch.limits.open_files,
            "max_bytes": self._frame_bytes,
        }

    async def wait_started(self) -> None:
        """Returns when the handler is initialized. Raises StartFailed when the process is gone."""
        with contextlib.suppress(framing.Closed, BlockingIOError):  # it has ended, and _starting holds the reason
            framing.send(self._sock, self._encode_launch())
        try:
            await asyncio.shield(self._starting)
        except StartFailed:
            self.kill("failed to start")
            await asyncio.shield(self.ended)
            raise

    def ask(self, asks: Sequence[HandlerRequest]) -> asyncio.Future[list[HandlerAnswer]]:
        """The answers of a batch; call it for one at a time. The future raises HandlerFailed, DeadlineExceeded."""
        assert self._answering is None
        assert self.ready
        self._answering = answering = self._loop.create_future()
        self._asks = asks
        self._piece_bytes = 0
        requests = [
            {"id": ask.request_id, "headers": ask.headers, "parts": [[name, kind] for name, kind, _ in ask.parts]}
            for ask in asks
        ]
        self._arm(self._launch.plan.response_timeout_s, "gave no answer")
        head, parts = {"kind": "batch", "requests": requests}, [part[2] for ask in asks for part in ask.parts]
        if sum(map(len, parts)) > LONG_BYTES:
            sending = self._loop.run_in_executor(None, _send_apart, self._sock.dup(), head, parts)
            sending.add_done_callback(lambda sent: self._note_sent(None if sent.cancelled() else sent.exception()))
            return answering
        try:
            framing.send(self._sock, head, parts)
        except (framing.Closed, OSError) as error:
            self._note_sent(error)
        return answering

    def _note_sent(self, error: BaseException | None) -> None:
        if error is not None:
            self.kill(f"takes no requests ({type(error).__name__})")

    def kill(self, why: str) -> None:
        """Ends the process group and fails its batch. Harmless when repeated."""
        self._fail(why, HandlerFailed(DIED))
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _arm(self, timeout_s: float, what: str) -> None:
        self._timer = self._loop.call_later(timeout_s, self._late, timeout_s, what)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, timeout_s: float, what: str) -> None:
        text = f"{what} within {timeout_s:g} s"
        self._fail(text, Hung(f"the handler {text}; its worker was ended"))
        self.kill(text)

    def _fail(self, why: str, error: Exception) -> None:
        """Fails the start or the batch that waits for this process."""
        self.ready = False
        self._why = self._why or why
        self._disarm()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        if not self._starting.done():
            self._starting.set_exception(StartFailed(f"its worker {why}"))
            self._starting.exception()  # there may be no waiter
        answering, self._answering = self._answering, None
        if answering is not None and not answering.done():
            answering.set_exception(error)

    def _reap(self) -> None:
        self._loop.remove_reader(self._exit)
        os.close(self._exit)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its children
        threading.Thread(target=orphans.kill_marked, args=(self._mark,), daemon=True).start()  # those of other sessions
        code = self._process.wait()
        self._read()  # an answer that arrived before the end counts
        self._end(code)

    def _end(self, code: int) -> None:
        if self._reading is not None:
            self._reading.add_done_callback(lambda _: self._end(code))
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._fail(f"ended with {how}", HandlerFailed(DIED))
        if not self.ended.done():
            self.ended.set_result(self._why)

    def _read(self) -> None:
        while self._sock.fileno() >= 0 and self._reading is None:
            try:
                frame = framing.receive_frame(self._sock, self._frame_bytes)
            except BlockingIOError:
                return
            except framing.Closed:
                self._loop.remove_reader(self._sock.fileno())
                if self._answering is not None or not self._starting.done():
                    return  # _reap knows how it ended
                self.kill("closed its socket")
                return
            except (framing.Malformed, OSError) as error:
                self.kill(f"sent a malformed frame: {error}")
                return
            if frame.num_bytes > LONG_BYTES:  # 64 MiB would take 30 ms
                self._loop.remove_reader(self._sock.fileno())
                self._reading = self._loop.run_in_executor(None, frame.read, bytes)
                self._reading.add_done_callback(self._on_read)
                return
            self._take(partial(frame.read, bytes))

    def _on_read(self, done: asyncio.Future[Any]) -> None:
        self._reading = None
        if self._sock.fileno() < 0:
            return
        self._loop.add_reader(self._sock.fileno(), self._read)
        self._take(done.result)
        self._read()

    def _take(self, read: Callable[[], tuple[framing.Head, list[bytes]]]) -> None:
        try:
            self._handle(*read())
        except (framing.Malformed, MemoryError, asyncio.CancelledError) as error:
            self.kill(f"sent a malformed frame: {error}")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            self.kill(f"sent a frame that is not understood: {type(error).__name__}")

    def _handle(self, head: Mapping[str, Any], parts: Sequence[bytes]) -> None:
        kind = head["kind"]
        if "metrics" in head and self._on_metrics is not None:
            self._on_metrics(head["metrics"])
        if kind == "ready" and not self._starting.done():
            self._disarm()
            self.ready = True
            self.load_s = time.time() - self.since
            self._starting.set_result(None)
        elif kind == "failed" and not self._starting.done():
            self._starting.set_exception(StartFailed(_PATHS.sub("", str(head["why"]))))
            self._starting.exception()
        elif kind == "answers" and self._answering is not None:
            if len(head["answers"]) != len(self._asks) or len(parts) != len(self._asks):
                raise ValueError("as many answers as requests")
            found = [_answer(answer, part) for answer, part in zip(head["answers"], parts, strict=True)]
            self._settle(lambda answering: answering.set_result(found))
        elif kind == "refused" and self._answering is not None:
            refusal = HandlerFailed(str(head["message"])[:2000], int(head["code"]))
            self._settle(lambda answering: answering.set_exception(refusal))
        elif kind == "piece" and self._answering is not None:
            self._piece_bytes += len(parts[0])
            if self._piece_bytes > self._frame_bytes:
                raise ValueError("pieces over the bytes of an answer")
            listener = self._asks[int(head["index"])].on_piece
            if listener is not None:
                listener(_answer(head["answer"], parts[0]))
        else:
            raise ValueError(f"unexpected frame '{kind}'")

    def _settle(self, act: Callable[[asyncio.Future[list[HandlerAnswer]]], None]) -> None:
        self._disarm()
        answering, self._answering = self._answering, None
        self.answered += 1
        assert answering is not None
        if not answering.done():
            act(answering)


def _send_apart(sock: socket.socket, head: dict[str, Any], parts: Sequence[framing.Part]) -> None:
    """In a thread: writing 64 MiB into a frame takes 30 ms."""
    with sock:
        framing.send(sock, head, parts)


def _answer(head: Mapping[str, Any], body: bytes) -> HandlerAnswer:
    """Raises ValueError for headers or a status that HTTP does not allow."""
    headers = {str(name).lower(): str(value) for name, value in head["headers"].items()}
    status = int(head["status"])
    text = f"{head['phrase']}{''.join(headers)}{''.join(headers.values())}"
    if any(ord(char) < 32 or ord(char) == 127 for char in text) or not 200 <= status <= 599:
        raise ValueError("a header or status that cannot be sent")
    kept = {name: value for name, value in headers.items() if name not in _OURS}
    return HandlerAnswer(body=body, status=status, phrase=str(head["phrase"])[:128], headers=kept)


_OURS = frozenset({"content-length", "transfer-encoding", "connection", "date", "keep-alive", "upgrade"})
"""Headers that a handler does not set."""
