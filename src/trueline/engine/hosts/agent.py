"""The agent of a host that lends its cores, and its folders. It may begin to import before the host has joined."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trueline.engine.hosts import folder as job_folder
from trueline.engine.local.client import start_agent
from trueline.engine.local.process import Lifeline
from trueline.files import TemporaryFolder


class HostAgent:
    def __init__(self) -> None:
        self._temporary = TemporaryFolder.after_sweep("launch")
        self.scratch = self._temporary.path
        self.job, self.socket = self.scratch / "job", self.scratch / "agent"
        self.lifeline = Lifeline()
        self.process: subprocess.Popen[bytes] | None = None
        self.serves = False
        """It takes requests, and may have processes."""
        self._ended = False

    @property
    def code(self) -> Path:
        """The folder of the recipe, in which workers run."""
        return self.job / job_folder.CODE

    def begin(self, preload: Sequence[str]) -> None:
        """Starts it, unless it has begun; it imports these modules."""
        log = self.job / "logs" / "agent.log"
        for made in (self.code, log.parent):
            made.mkdir(parents=True, exist_ok=True)
        if self.process is None:
            self.process = start_agent(
                self.socket, preload=preload, life=self.lifeline.reading, log=log, folder=self.code
            )

    def end(self) -> None:
        """Ends it and its processes, and removes the folders. May be repeated."""
        if self._ended:
            return
        self._ended = True
        self.lifeline.end()
        if self.process is not None:
            if not self.serves:
                self.process.kill()  # it would import to the end
            self.process.wait()
        os.close(self.lifeline.reading)
        self._temporary.remove()
