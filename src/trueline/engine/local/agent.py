"""The agent of the local engine: a zygote that has torch imported and forks a process on request.

A new interpreter with torch takes one to three seconds to start, a fork of this one about twenty milliseconds. As their
parent the agent sees every exit code; a new agent adopts the processes of a dead one. It has one thread, and never
starts gRPC or a tensor operation: both break in a forked child. It speaks JSON lines on a Unix socket; "watch" replies
with a line for every known process and every later change, the other requests with one line.
"""

import contextlib
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import msgspec

from trueline.engine.contract import Kind, ProcessSpec, Seen
from trueline.engine.local import process


class AgentRequest(msgspec.Struct, kw_only=True):
    op: str
    spec: ProcessSpec | None = None
    ref: str = ""
    grace_s: float = 0.0
    modules: tuple[str, ...] = ()


class Agent:
    """One thread, one selector: requests, exits and kill deadlines."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen: dict[str, Seen] = {}
        self.births = Path(f"{path}.born")
        self.adopted: dict[str, int] = {}  # pidfds of processes that a former agent forked
        self.deadlines: dict[str, float] = {}
        self.watchers: set[socket.socket] = set()
        self.buffers: dict[socket.socket, bytes] = {}
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.wake, self.waker = socket.socketpair()
        self.waker.setblocking(False)
        self.wake.setblocking(False)
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.life = int(os.environ.get(process.LIFELINE, "-1"))
        if self.life >= 0:
            process.wake_at_end(self.life)
            self.selector.register(self.life, selectors.EVENT_READ)
        for birth in process.read_births(self.births):
            handle = process.adopt_orphan(birth)
            if handle is None:
                self.seen[birth.ref] = describe_loss(birth.ref, birth.pid)
                continue
            self.seen[birth.ref] = Seen(ref=birth.ref, kind=Kind.STARTED, pid=birth.pid)
            self.adopted[birth.ref] = handle
            self.selector.register(handle, selectors.EVENT_READ, birth.ref)

    def run(self) -> None:
        signal.set_wakeup_fd(self.waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            deadline = min(self.deadlines.values(), default=None)
            for key, _ in self.selector.select(None if deadline is None else max(0.0, deadline - time.monotonic())):
                if key.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    connection.setblocking(False)
                    self.buffers[connection] = b""
                    self.selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj is self.wake:
                    self.wake.recv(4096)
                elif key.fileobj == self.life:
                    return
                elif key.data is not None:
                    self._report_orphan_end(key.data)
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)
            self._reap()
            self._kill_overdue(time.monotonic())

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        *lines, rest = (self.buffers[connection] + data).split(b"\n")
        self.buffers[connection] = rest
        for line in lines:
            self._answer(connection, msgspec.json.decode(line, type=AgentRequest))

    def _drop(self, connection: socket.socket) -> None:
        self.watchers.discard(connection)
        if self.buffers.pop(connection, None) is not None:
            self.selector.unregister(connection)
            connection.close()

    def _send(self, connection: socket.socket, message: object) -> None:
        try:
            connection.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:  # a client that is gone or does not read; it can reconnect
            self._drop(connection)

    def _answer(self, connection: socket.socket, request: AgentRequest) -> None:
        if request.op == "add" and request.spec is not None:
            self._add(request.spec)
        elif request.op == "kill":
            self._kill(request.ref, request.grace_s)
        elif request.op == "import":
            import_modules(request.modules)
        elif request.op == "watch":
            self.watchers.add(connection)
            for seen in tuple(self.seen.values()):
                self._send(connection, seen)
            return
        self._send(connection, list(self.seen.values()) if request.op == "list" else {"ok": True})

    def _publish(self, seen: Seen) -> None:
        self.seen[seen.ref] = seen
        for watcher in tuple(self.watchers):
            self._send(watcher, seen)

    def _add(self, spec: ProcessSpec) -> None:
        if spec.ref in self.seen:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            process.run_child(lambda: self._run_process(spec))
        process.record_birth(self.births, spec.ref, pid)
        self._publish(Seen(ref=spec.ref, kind=Kind.STARTED, pid=pid))

    def _run_process(self, spec: ProcessSpec) -> int | None:
        """Runs the child process, without what is the agent's; returns its exit code."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.selector.close()
        process.forked_by.path = self.path
        for connection in (self.listener, self.wake, self.waker, *self.buffers):
            connection.close()
        for handle in self.adopted.values():
            os.close(handle)
        process.record_birth(self.births, spec.ref, os.getpid())
        _set_up_process(spec)
        module, _, function = spec.entry.partition(":")
        code: int | None = getattr(importlib.import_module(module), function)()
        return code

    def _kill(self, ref: str, grace_s: float) -> None:
        seen = self.seen.get(ref)
        if seen is None or not seen.alive:
            return
        if grace_s > 0:
            self.deadlines.setdefault(ref, time.monotonic() + grace_s)
        self._signal(seen, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)

    def _signal(self, seen: Seen, number: signal.Signals) -> None:
        if seen.ref in self.adopted:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.adopted[seen.ref], number)
        else:
            os.kill(seen.pid, number)

    def _kill_overdue(self, now: float) -> None:
        for ref in [ref for ref, at in self.deadlines.items() if at <= now]:
            del self.deadlines[ref]
            self._kill(ref, 0.0)

    def end(self) -> None:
        """Kills all processes that still run, with what they have started, and waits for their ends."""
        running = [seen for seen in self.seen.values() if seen.alive]
        for seen in running:
            self._signal(seen, signal.SIGKILL)
        for seen in running:
            if seen.ref in self.adopted:
                select.select([self.adopted[seen.ref]], [], [])
            else:
                os.waitid(os.P_PID, seen.pid, os.WEXITED | os.WNOWAIT)
        process.end_groups(seen.pid for seen in running)

    def _report_orphan_end(self, ref: str) -> None:
        """An adopted process has ended; only its parent could read its exit code."""
        handle = self.adopted.pop(ref)
        self.selector.unregister(handle)
        os.close(handle)
        self.deadlines.pop(ref, None)
        self._publish(describe_loss(ref, self.seen[ref].pid))

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            process.signal_group(ended.si_pid, signal.SIGTERM)  # before its number can be used again
            pid, status = os.waitpid(ended.si_pid, 0)
            ref = next((seen.ref for seen in self.seen.values() if seen.pid == pid and seen.alive), None)
            if ref is not None:
                self.deadlines.pop(ref, None)
                self._publish(describe_exit(ref, pid, os.waitstatus_to_exitcode(status)))


def describe_exit(ref: str, pid: int, code: int) -> Seen:
    """The report of an exit; `code` is negative for a signal, as in subprocess."""
    if code < 0:
        name = signal.Signals(-code).name
        return Seen(ref=ref, kind=Kind.EXITED, pid=pid, signal=-code, reason=f"killed by {name}")
    return Seen(ref=ref, kind=Kind.EXITED, pid=pid, code=code, reason=f"exit code {code}")


def describe_loss(ref: str, pid: int) -> Seen:
    reason = "ended after its agent had died, so that its exit code is unknown"
    return Seen(ref=ref, kind=Kind.LOST, pid=pid, reason=reason)


def _set_up_process(spec: ProcessSpec) -> None:
    os.setsid()
    log = process.open_log(spec.log)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    process.log_output()
    os.environ.update(spec.env)
    process.watch_lifeline()


def import_modules(modules: Iterable[str]) -> None:
    """Imports what forked processes need; one that fails is printed and left to the process that needs it."""
    importlib.invalidate_caches()
    gc.disable()  # it would take a quarter of the imports' time
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            traceback.print_exc()  # the process that needs it raises the same error, where it is reported
    gc.freeze()  # children neither scan these objects nor copy their pages
    gc.enable()


def main() -> None:
    """`python -m trueline.engine.local.agent SOCKET [MODULE ...]`: imports, then serves until the lifeline ends."""
    path, *modules = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = Agent(path)
    import_modules(modules)
    agent.run()
    Path(path).unlink(missing_ok=True)
    agent.end()
    agent.births.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the launcher's folder, if the launcher could not remove it
        Path(f"{path}.log").unlink(missing_ok=True)
        os.rmdir(Path(path).parent)


if __name__ == "__main__":
    main()
