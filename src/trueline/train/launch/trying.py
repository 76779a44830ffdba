"""Says how the first worker tries the loss, while that takes long: each record may take 10 ms to read."""

import json
import time
from collections.abc import Callable

from trueline.train.job_dir import JobDir

PATIENCE_S = 5.0
"""Of a line, since the job began or the last one."""


class TrialWatch:
    def __init__(self, folder: JobDir, emit: Callable[..., None]) -> None:
        self._folder, self._emit, self._began = folder, emit, time.monotonic()
        self._told, self._told_at, self._over = "", self._began, False

    def hear(self, event: str) -> None:
        """A group forms once a worker has tried the loss."""
        self._over = self._over or event == "view.published"

    def look(self) -> None:
        """Emits what is tried, if that is something else than before."""
        now = time.monotonic()
        if self._over or now < self._told_at + PATIENCE_S:
            return
        try:
            what = str(json.loads(self._folder.trial.read_bytes())["what"])
        except (OSError, ValueError, KeyError):  # no trial is under way
            return
        if what != self._told:
            self._told, self._told_at = what, now
            self._emit("job.trying", what=what, seconds=now - self._began)
