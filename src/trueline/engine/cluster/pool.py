"""The scheduler of hosts that lend their cores to the jobs of a store: `trueline join STORE` runs on each of them.

No service runs. Clients and hosts meet in the store (`pool_records.py`), and each host takes what it has room for
(`pool_lender.py`): heads by priority, each when there are slots for all that its job needs to begin.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from trueline.engine.cluster.contract import Submission, SubmissionReport, SubmissionState, job_of
from trueline.engine.cluster.pool_records import LEASE_S, WITHDRAWN, PoolEnd, PoolSubmission, PoolTurn, PoolView
from trueline.engine.cluster.settings import HostsSettings
from trueline.errors import EngineAway, StorageError, UsageError

POLL_S = 0.25


class PoolScheduler:
    def __init__(self, settings: HostsSettings) -> None:
        if not settings.pool:
            raise UsageError("the engine 'hosts' has no pool", hint="set pool = STORE in [engine.hosts]")
        self._view, self._env = PoolView(settings.pool), settings.env

    def submit(self, submission: Submission) -> str:
        env = {name: os.environ[name] for name in self._env if name in os.environ} | submission.env
        try:
            queued = PoolSubmission(submission=replace(submission, env=env), submitted_at=time.time())
            self._view.files.write_record(f"submissions/{submission.name}.json", queued, replace=False)
        except StorageError as error:
            raise _away(error) from error
        return submission.name

    def cancel(self, name: str, *, grace: bool = True) -> None:
        try:
            self._look()
            while name in self._view.submissions and self._view.report(name).state is SubmissionState.QUEUED:
                if self._view.take_turn(PoolTurn(name=name)):
                    self._view.end(name, PoolEnd(reason=WITHDRAWN, at=time.time()))
                self._view.look()
            if name in self._view.submissions and name not in self._view.ends:
                self._view.files.write(f"cancels/{name}" if grace else f"cancels/{name}.kill", b"")
        except StorageError as error:
            raise _away(error) from error

    def list(self, job: str) -> Sequence[SubmissionReport]:
        try:
            self._look()
            return [self._view.report(name) for name in sorted(self._view.submissions) if job_of(name) == job]
        except StorageError as error:
            raise _away(error) from error

    def _look(self) -> None:
        """Reads the pool. A host that seems to be dead for long is watched for a lease: clocks differ."""
        self._view.look()
        until = time.monotonic() + LEASE_S + POLL_S
        while self._view.needs_watching(time.time()) and time.monotonic() < until:
            time.sleep(POLL_S)  # a store sends no notice
            self._view.look()
        self._view.give_up_silent(time.time())

    def read_log(self, name: str) -> bytes:
        try:
            self._view.look()
            queued = self._view.submissions.get(name)
            if queued is None:
                return b""
            if isinstance(self._view.files.where, Path):
                path = Path(queued.submission.log)
                return path.read_bytes() if path.exists() else b""
            return self._view.files.read_log(f"logs/{name}.log")
        except (StorageError, OSError) as error:
            raise _away(error) from error


def _away(error: Exception) -> EngineAway:
    return EngineAway(f"the pool of hosts does not answer: {error}")
