"""A reader's terminal: one folder, one environment; what it starts in the background ends with it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from docs.shown import ELLIPSIS, difference
from worlds.waiting import until

PORTS = (8080, 8081, 8090, 8091, 5000)
"""Ports that pages name. A session has a free one in the place of each, so that pages run beside other servers."""
LIMIT_S = 600


class Failed(Exception):
    """A block did not do what its page shows."""


def _free_ports(number: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Session:
    """The terminal in which the blocks of one page are typed, one after the other."""

    def __init__(self, binaries: Path) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="trueline-docs-"))
        self.folder = self._home / "work"
        self.folder.mkdir()
        self._state = self._home / ".session"
        self._ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self._running: list[subprocess.Popen[bytes]] = []
        kept = {name: os.environ[name] for name in ("LANG", "PIP_FIND_LINKS", "SSL_CERT_FILE") if name in os.environ}
        self._environment = {
            **kept,
            "HOME": str(self._home),
            "PATH": f"{binaries}:/usr/local/bin:/usr/bin:/bin",
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "TRUELINE_SERVE_PORT": str(self._ports[8080]),
            "TRUELINE_SERVE_MANAGEMENT_PORT": str(self._ports[8081]),
        }

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if error is None or not os.environ.get("KEEP"):
            shutil.rmtree(self._home, ignore_errors=True)
        else:
            print(f"kept: {self._home}", file=sys.stderr)

    def _typed(self, text: str) -> str:
        for page, here in self._ports.items():
            text = re.sub(rf"(?<=[: =]){page}\b", str(here), text)
        return f"[ -f {self._state} ] && . {self._state}\nset -eo pipefail\n{text}"

    def _seen(self, text: str) -> str:
        for page, here in self._ports.items():
            text = text.replace(f":{here}", f":{page}")
        return text.replace(str(self._home), "~")

    def write(self, title: str, text: str) -> None:
        """Saves a file; `title` is relative to the folder that the session began in."""
        path = self.folder / title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, script: str, *, fails: bool = False) -> str:
        """What `script` prints, both streams together.

        Raises:
            Failed: it did not end within `LIMIT_S`, or its exit status is not 0; with `fails`, is 0.
        """
        keeps = f"\n{{ declare -px; printf 'cd %q\\n' \"$PWD\"; }} >{self._state}"
        process = self._start(self._typed(script) + keeps, subprocess.PIPE)
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Failed(f"did not end within {LIMIT_S} s") from None
        text = self._seen(printed.decode(errors="replace"))
        if bool(process.returncode) != fails:
            raise Failed(f"exit status {process.returncode}\n{text}")
        return text

    def start(self, script: str, shown: str) -> str:
        """Starts `script`, whose last command keeps running, and waits until it has printed what the page shows.

        Raises:
            Failed: it ended, or printed something else.
        """
        shown = f"{shown.rstrip()}\n{ELLIPSIS}"  # it may print more at any time
        log = self._home / f".started-{len(self._running)}"
        with log.open("wb") as sink:
            process = self._start("exec 2>&1\n" + self._typed(script.rstrip().removesuffix("&")), sink)
        self._running.append(process)

        def printed() -> str:
            return self._seen(log.read_text(errors="replace"))

        try:
            until(lambda: difference(shown, printed()) is None or process.poll() is not None, "the shown output")
        except AssertionError:
            raise Failed(f"{difference(shown, printed())}\nall of it:\n{printed()}") from None
        if process.poll() is not None:
            raise Failed(f"ended with exit status {process.returncode}\n{printed()}")
        return printed()

    def _start(self, script: str, sink: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,  # type: ignore[call-overload]
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
