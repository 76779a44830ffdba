"""`--profile STEPS`: a trace of some steps of one worker, for chrome://tracing, Perfetto or TensorBoard.

The worker that leads when the first of the steps begins writes JOB/traces/steps-FIRST-LAST.json. If it dies, the next
one traces what is left of them. A step that is repeated is in the trace as often as it was computed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trueline import events
from trueline.train import settings as job_settings
from trueline.train.job_dir import current_job


class StepProfiler:
    """Traces the steps `steps` into `folder`. `begin` is called before each step, `close` after the last one."""

    def __init__(self, steps: range, folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._trace: profile | None = None
        self._first = self._last = 0

    @classmethod
    def of_job(cls) -> StepProfiler:
        """As the settings of this process's job have it; a process that trains alone traces nothing."""
        folder = current_job()
        if folder is None:
            return cls(range(0), Path())
        return cls(job_settings.parse_steps(job_settings.load(folder).profile), folder / "traces")

    def begin(self, step: int, *, leads: bool) -> None:
        """A step begins; `leads`: this worker is the first of its group."""
        if self._trace is not None and step not in self._steps:
            self.close()
        elif self._trace is None and leads and step in self._steps:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._trace = profile(activities=activities, record_shapes=True)
            self._trace.start()
            self._first = step
        self._last = step if step in self._steps else self._last

    def close(self) -> None:
        """Writes the trace, if there is one. A full disk does not end the training."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.stop()
        path = self._folder / f"steps-{self._first}-{self._last}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            events.emit("trace.failed", path=str(path), why=str(error))
            return
        events.emit("trace.written", path=str(path))
