"""The head of a submitted manifest: gathers the learners, starts and ends them together, and writes how they are.

`python -m trueline.train.learners.head STORE/JOB LAUNCH`, started by a scheduler. It starts learner 1 beside itself and
submits the others. What is to be done is decided in `decide.py` and `hosts.py`. If the head dies, its learners end,
and `trueline resume` starts them again with the same TRAINING_ID and folders.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any

from trueline.engine.cluster.contract import Scheduler, SubmissionReport, make_group, make_name, role_of
from trueline.engine.cluster.open import open_scheduler
from trueline.engine.cluster.settings import HostsSettings
from trueline.engine.local.process import LIFELINE
from trueline.errors import TruelineError, UsageError
from trueline.files import TemporaryFolder
from trueline.registry import event_file
from trueline.train.cluster.address import find_address
from trueline.train.cluster.commands import WITHOUT_GANGS, describe_submission, queue_again
from trueline.train.cluster.store import HostStatus, JobLaunch, JobStore, SubmittedJob
from trueline.train.learners import decide as plans
from trueline.train.learners import hosts, messages, places
from trueline.train.learners.links import LearnerLink, LearnerLinks
from trueline.train.learners.metrics.extract import find_loss
from trueline.train.learners.record import LaunchRecorder
from trueline.train.learners.rendezvous import MemberFault, Rendezvous
from trueline.train.learners.submission import read_stored_manifest

TICK_S, ORDERS_S, LISTING_S = 0.05, 0.25, 1.0
PARTED_S = 5.0
"""The connections of processes that have ended end at once, but for a network that loses packets."""
PART_S = 600.0
"""Learners that push results to a bucket have so long at the end."""


class LearnersHead:
    """Leads one launch. Everything runs in one event loop; calls of store and scheduler run in threads."""

    def __init__(
        self, store: JobStore, job: SubmittedJob, launch: JobLaunch, scheduler: Scheduler, scratch: Path
    ) -> None:
        self._store, self._job, self._launch, self._scheduler = store, job, launch, scheduler
        self._manifest, self._scratch = read_stored_manifest(job), scratch
        numbers = range(1, self._manifest.learners + 1)
        self._group = plans.Group({number: plans.Learner(number) for number in numbers})
        self._entries = {number: hosts.LearnerEntry(number) for number in numbers}
        self.recorder = LaunchRecorder(store, launch, scratch)
        self._emit = self.recorder.emit
        self._links = LearnerLinks(self._is_current, self._hear, self._lose, self._find_rendezvous)
        self._rendezvous: Rendezvous | None = None
        self._first: asyncio.subprocess.Process | None = None
        self._end: plans.EndJob | None = None
        self._listed: dict[str, SubmissionReport] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._began_at, self.gives_way = time.monotonic(), False
        """The launch ends before it has begun, and another one follows."""

    def halt(self, why: str) -> None:
        if not self._group.halting:
            self._group.halting = why
            self._emit("learners.halting", why=why)

    def _take_notice(self) -> None:
        """At SIGTERM. A lent host takes its cores back: the job queues again, for another one."""
        self.gives_way = self.gives_way or (isinstance(self._launch.engine, HostsSettings) and not self._group.halting)
        self.halt("the head got SIGTERM")

    async def run(self) -> plans.EndJob:
        """Leads the launch to its end. Raises TruelineError."""
        engine = self._launch.engine
        address = find_address(engine.interface or ("127.0.0.1" if self._launch.machine else ""))
        self._emit("head.started", host=socket.gethostname(), engine=self._launch.on)
        for note in self._manifest.notes:
            self._emit("manifest.noted", why=note)
        server, kit = await self._links.listen(self._job.name, address, engine.ports, self._scratch)
        await asyncio.to_thread(self._store.write_kit, self._launch.number, kit)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._take_notice)
        publish = self.recorder.publish(self._describe_all)
        loops = [
            asyncio.ensure_future(one)
            for one in (self._links.pulse(), self._take_orders(), self._follow_hosts(), publish)
        ]
        try:
            with event_file.writing(self._scratch):
                end = await self._lead()
                await self._part(end)
        finally:
            for one in loops:
                one.cancel()
            await asyncio.wait(loops)
            await self._end_first()
            server.close()
        return end

    async def _lead(self) -> plans.EndJob:
        while self._end is None:
            for action in plans.decide(self._group, time.monotonic()):
                self._carry_out(action)
            await asyncio.sleep(TICK_S)
        return self._end

    def _carry_out(self, action: plans.GroupAction) -> None:
        match action:
            case plans.StartGroup(generation=generation):
                self._rendezvous = self._make_rendezvous(generation)
                if isinstance(self._store.where, Path):
                    places.clear_state(self._store.where / "state")
                self._links.send_all(messages.StartCommand(generation))
                self._emit("learners.started", learners=len(self._entries), start=generation)
            case plans.StopGroup(grace_s=grace_s, why=why, ending=ending):
                if self._rendezvous is not None:
                    self._rendezvous.closed = True
                self._links.send_all(messages.StopCommand(grace_s))
                if not ending:
                    self._emit("learners.restarting", why=why)
            case plans.EndJob():
                self._end = action

    def _make_rendezvous(self, generation: int) -> Rendezvous:
        def report(fault: MemberFault) -> None:
            what = f"failed with exit code {fault.code}" if fault.code else "left its process group without an end"
            plans.enter_fault(self._group, fault.learner, generation, plans.LearnerFault(
                time.monotonic(), f"its process {fault.pid} {what}", died=not fault.code, code=fault.code or 137,
            ))  # fmt: skip

        return Rendezvous(self._manifest.learners, self._emit, report)

    def _find_rendezvous(self, generation: int) -> Rendezvous | None:
        return self._rendezvous if generation == self._group.generation else None

    def _is_current(self, role: str) -> bool:
        return any(one.role == role for one in self._entries.values())

    def _hear(self, number: int, message: object) -> None:
        match message:
            case messages.LearnerReady(host=host, address=address):
                self._group.learners[number].connected = True
                hosts.enter_joined(self._entries[number])
                self._emit("learner.joined", learner=number, host=host, address=address)
            case messages.CommandEnded(generation=generation, code=code):
                self._begin(self._enter_end(number, generation, code))
            case messages.LearnerMetric():
                self._enter_metric(number, message)
            case messages.LearnerEvent(name=name, fields=fields):
                self._emit(name, **fields)
                if name == "learner.refused":
                    self._fail(f"learner {number}: {fields['why']}")

    async def _enter_end(self, number: int, generation: int, code: int) -> None:
        """Notes the end of a learner's command, once it is known how its processes left their groups: a command may end
        well although one of them died, and their connections are others than the learner's."""
        if (rendezvous := self._find_rendezvous(generation)) is not None:
            await rendezvous.wait_parted(number, PARTED_S)
        plans.enter_end(self._group, number, generation, code, time.monotonic())
        self._emit("learner.ended", learner=number, why=plans.describe_code(code)[0])

    def _fail(self, why: str) -> None:
        if self._end is None:
            self._end = plans.EndJob("failed", why, 1)

    def _enter_metric(self, number: int, metric: messages.LearnerMetric) -> None:
        step = metric.step or 0
        prefix = "".join(f"{part}/" for part in (f"learner-{number}" if number > 1 else "", metric.group) if part)
        self._emit("loop.logged", step=step, **{f"{prefix}{key}": value for key, value in metric.scalars.items()})
        if number == 1:
            loss = find_loss(metric.scalars)
            self.recorder.step, self.recorder.loss = step, self.recorder.loss if loss is None else loss

    def _lose(self, link: LearnerLink, why: str) -> None:
        """Gives a learner up whose connection has ended."""
        plans.enter_loss(self._group, link.number, why, time.monotonic())
        role = hosts.enter_lost(self._entries[link.number], why, time.monotonic())
        if self._end is None:
            self._emit("learner.lost", learner=link.number, why=why)
            if role and link.number > 1:
                self._begin(self._cancel(role))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _cancel(self, role: str, *, grace: bool = False) -> None:
        name = make_name(self._job.unique_name, self._launch.number, role)
        await self.recorder.attempt("the scheduler", lambda: self._scheduler.cancel(name, grace=grace))

    async def _take_orders(self) -> None:
        while True:
            await self.recorder.attempt("the store", lambda: self.recorder.read_orders(self.halt))
            await asyncio.sleep(ORDERS_S)

    async def _follow_hosts(self) -> None:
        """Keeps every learner submitted, and learner 1 running beside this process."""
        others = [entry for number, entry in self._entries.items() if number > 1]
        while True:
            if not self._group.halting and self._end is None:
                await self._keep_first()
                if others and await self.recorder.attempt("the scheduler", self._read_listing):
                    for action in hosts.review(others, self._listed, time.monotonic()):
                        await self._enter_action(action)
                    self._consider_giving_way(others)
            await asyncio.sleep(ORDERS_S if self._group.phase is plans.Phase.GATHERING else LISTING_S)

    def _consider_giving_way(self, others: Collection[hosts.LearnerEntry]) -> None:
        """Where the scheduler starts learners one by one: gives this launch's slots back, and queues again."""
        waited_s, launch = time.monotonic() - self._began_at, self._launch
        if self._group.generation or not isinstance(launch.engine, WITHOUT_GANGS):
            return
        if hosts.gives_way(others, waited_s=waited_s, name=self._job.unique_name, number=launch.number):
            why = f"it queues again: after {waited_s:.0f} s there is no room to begin, and others may wait for its part"
            self._emit("launch.given_back", why=why)
            self.gives_way = True
            self.halt(why)

    def _read_listing(self) -> None:
        group = make_group(self._job.unique_name, self._launch.number)
        self._listed = {role_of(one.name): one for one in self._scheduler.list(group)}

    async def _keep_first(self) -> None:
        entry = self._entries[1]
        if self._first is not None and self._first.returncode is not None:
            if entry.role and not entry.joined:
                hosts.fail(entry, f"its process ended with exit code {self._first.returncode}", time.monotonic())
            self._first = None
            if entry.failures >= hosts.MOST_FAILURES:
                self._fail(f"learner 1 cannot be started: {entry.reason}")
        if self._first is None and time.monotonic() >= entry.retry_at:
            entry.count += 1
            entry.role, entry.reason, entry.running_at = f"learner-1-{entry.count}", "", time.monotonic()
            env = {name: value for name, value in os.environ.items() if name != LIFELINE}
            self._first = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "trueline.train.learners.learner", str(self._store.where),
                str(self._launch.number), entry.role, stdin=asyncio.subprocess.DEVNULL, env=env,
            )  # fmt: skip

    async def _enter_action(self, action: hosts.EntryAction) -> None:
        match action:
            case hosts.SubmitLearner(number=number, role=role):
                submission = describe_submission(self._store, self._job, self._launch, role)
                try:
                    await asyncio.to_thread(self._scheduler.submit, submission)
                except TruelineError as error:
                    wait_s = hosts.fail(self._entries[number], error.message, time.monotonic())
                    self._emit("host.not_submitted", host=role, why=error.message, again_s=wait_s)
                else:
                    self._emit("host.submitted", host=role, why=f"it is learner {number} of {len(self._entries)}")
            case hosts.CancelLearner(role=role, why=why):
                self._emit("host.cancelled", host=role, why=why)
                await self._cancel(role)
            case hosts.GiveUp(why=why):
                self._fail(why)

    def _describe_all(self) -> tuple[HostStatus, ...]:
        return tuple(self._describe(one) for one in self._group.learners.values())

    def _describe(self, one: plans.Learner) -> HostStatus:
        entry, name = self._entries[one.number], f"learner-{one.number}"
        if one.running:
            return HostStatus(role=name, state="running", workers=1)
        if one.connected:
            return HostStatus(role=name, state="ended" if one.ended else "here")
        return HostStatus(role=name, state="starting" if entry.running_at else "queued", reason=entry.reason)

    async def _part(self, end: plans.EndJob) -> None:
        """Sends the learners away, and waits until they have written what they have."""
        self._links.send_all(messages.Dismiss(end.why or "the job is done"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._links.empty.wait(), PART_S)
        self._emit("launcher.ended", outcome=end.outcome, why=end.why)
        for entry in self._entries.values():
            if entry.role and entry.number > 1:
                await self._cancel(entry.role, grace=True)

    async def _end_first(self) -> None:
        if self._first is not None and self._first.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._first.kill()  # its connection is closed: it has ended, or does not answer
            await self._first.wait()


def run(store: JobStore, number: int) -> int:
    """Leads the launch to its end; returns the exit code. Raises TruelineError."""
    job, launch = store.read_job(), store.last_launch()
    if launch is None or launch.number != number or store.read_end(number) is not None:
        raise UsageError(f"launch {number} of {store.where} has ended, or another one has begun")
    temporary = TemporaryFolder.after_sweep("head")
    scratch = temporary.path
    os.chdir(scratch)
    try:
        head = LearnersHead(store, job, launch, open_scheduler(launch.engine), scratch)
        try:
            end = asyncio.run(head.run())
        except BaseException as error:
            why = error.message if isinstance(error, TruelineError) else f"{type(error).__name__}: {error}"
            head.recorder.write_end(plans.EndJob("failed", why, 1))
            raise
        if head.gives_way and end.outcome == "stopped":
            queue_again(store, job, launch, open_scheduler(launch.engine))
        head.recorder.write_end(end)
        return end.code
    finally:
        temporary.remove()


def main() -> None:
    where, number = sys.argv[1:]
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    try:
        code = run(JobStore(where), int(number))
    except TruelineError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    sys.exit(code)


if __name__ == "__main__":
    main()
