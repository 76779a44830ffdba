"""A headless Chromium, driven over a pipe by the DevTools protocol: open a page, evaluate, click, look.

Source: https://chromedevtools.github.io/devtools-protocol/ and Chromium's `--remote-debugging-pipe`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worlds.waiting import until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
WHY_NOT = "there is no Chromium here to open the page with (Debian: apt-get install chromium)"
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Page:
    """One page in a browser."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._left = b""
        self._last = 0
        self._session = ""
        self.complaints: list[str] = []
        """Errors of scripts, and violations of the page's own policy."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int, height: int = 1000, dark: bool = False) -> None:
        """Goes to `url` in a window of this size."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of an expression as soon as it is true."""
        return until(lambda: self.ask(script), lambda: f"{script}; the page says {self.text()!r}")

    def text(self) -> str:
        """The visible text."""
        return str(self.ask("document.body ? document.body.innerText : ''"))

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        told = {"id": self._last, "method": method, "params": params}
        os.write(
            self._writes, json.dumps(told | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            said = self._message()
            if said.get("id") == self._last:
                assert "error" not in said, said["error"]
                return dict(said["result"])
            if said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            if said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            piece = os.read(self._reads, 2**16)
            assert piece, "the browser has ended"
            self._left += piece
        one, self._left = self._left.split(b"\0", 1)
        return dict(json.loads(one))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a browser that keeps its files in `folder` and ends with the block."""
    to_it, writes = os.pipe()
    reads, from_it = os.pipe()

    def where_it_looks() -> None:
        far = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (to_it, from_it)]
        os.dup2(far[0], 3)
        os.dup2(far[1], 4)

    command = [str(CHROMIUM), *_OPTIONS, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=where_it_looks, stderr=subprocess.DEVNULL)
    os.close(to_it)
    os.close(from_it)
    try:
        yield Page(reads, writes)
    finally:
        process.kill()
        process.wait()
        os.close(reads)
        os.close(writes)
