"""The process that publishes versions of a running job's model (`--publish-every`), beside its launcher.

It is named by its module, since train does not import it. It ends after a last version when its standard input does:
with the launcher, by whatever means, or when the job has finished.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from trueline.train.job_dir import JobDir
from trueline.train.settings import JobSettings

MODULE = "trueline.ps.publish"


class PublisherProcess:
    """`emit` gets its events."""

    def __init__(self, job: JobSettings, folder: JobDir, emit: Callable[..., None]) -> None:
        self._command = [
            sys.executable, "-P", "-m", MODULE, str(folder.path), job.publish_to, str(job.publish_every),
        ]  # fmt: skip
        self._log, self._emit = folder.log("publisher"), emit
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process = self._start()
        self._thread = threading.Thread(target=self._follow, name="publisher", daemon=True)
        self._thread.start()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with Path(self._log).open("ab") as log:
            return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    def _follow(self) -> None:
        while True:
            with self._process as process:  # closes its pipes
                assert process.stdout is not None
                for line in process.stdout:
                    name, fields = json.loads(line)
                    self._emit(name, **fields)
            code = process.returncode
            with self._lock:
                if code and not self._closing.is_set():
                    self._emit("publisher.lost", code=code, log=str(self._log))
                if self._closing.is_set() or code >= 0:  # else it was killed, and continues after what it published
                    return
                self._process = self._start()

    def finish(self) -> None:
        """Has it publish a last version, and waits for it."""
        with self._lock:
            self._closing.set()
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._thread.join()

    def end(self) -> None:
        """At once."""
        with self._lock:
            self._closing.set()
            self._process.kill()
        self._thread.join()
