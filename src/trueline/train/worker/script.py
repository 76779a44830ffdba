"""A worker that runs a user's own loop over `trueline.Elastic`; what a step is, is the script's business.

The script runs as `__main__` with its arguments, in every worker the same. It leaves between two steps when it is asked
to (SIGTERM), and an exception ends the job: every worker would meet it.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch

from trueline import files
from trueline.errors import CheckpointError, TruelineError, UsageError
from trueline.train import devices
from trueline.train import settings as job_settings
from trueline.train.launch import jobs
from trueline.train.link import connect
from trueline.train.settings import JobSettings
from trueline.train.worker.main import LOST_EXIT, place_of


def main() -> int:
    """Runs the script of the job that the environment names (TRUELINE_JOB); returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    job_dir = Path(os.environ["TRUELINE_JOB"])
    settings = job_settings.load(job_dir)
    torch.set_num_threads(settings.threads)
    signal.signal(signal.SIGTERM, _leave)
    try:
        run(settings)
        expect_finished(jobs.status(job_dir), settings.script[0])
        return 0
    except Exception as error:  # noqa: BLE001  the process boundary: everybody would meet this error, so the job ends
        traceback.print_exc()
        if devices.is_lost(error):
            return LOST_EXIT
        if not _finished(jobs.status(job_dir)):  # else only this process is concerned: the launcher sees its exit code
            _fail(error)
        return 1


def run(settings: JobSettings) -> None:
    """The script as `__main__`, with its arguments and its folder on the path. Raises what it raises."""
    script, *arguments = settings.script
    if files.sha256_file(Path(script)) != settings.recipe_digest:
        raise CheckpointError(
            f"the script {script} was changed since the job began",
            hint="start a new job with the changed script, or restore the old one",
        )
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def expect_finished(status: dict[str, object] | None, script: str) -> None:
    """Raises UsageError when the script has ended and its job has not; a master that is away (None) says nothing."""
    if status is not None and not _finished(status):
        raise UsageError(
            f"the script {script} ended before its loop over trueline.Elastic did",
            hint="make one Elastic in every worker and iterate over it to its end",
        )


def _leave(*_: object) -> None:
    link = connect(lambda _: None)
    threading.Thread(target=link.leave, name="leave", daemon=True).start()  # gRPC must not run in a signal handler


def _finished(status: dict[str, object] | None) -> bool:
    return status is not None and status.get("phase") == "finished"


def _fail(error: Exception) -> None:
    if isinstance(error, TruelineError):
        what, detail = f"{error.code}|{error.message}", error.hint
    else:
        what, detail = f"script_raised|{type(error).__name__}: {error}", place_of(error)
    connect(lambda _: None).fail(what, detail)
