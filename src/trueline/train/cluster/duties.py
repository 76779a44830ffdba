"""What the process that leads a submitted job does beside training: orders, hosts, status and logs.

A thread beside the launcher. It reads the clients' orders from the store, keeps the number of hosts that the job has
room for (`engine/cluster/decide.py`), and writes how the job is. The store and the scheduler may be away: training
continues, and the thread tells so once.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from trueline.engine.cluster import decide as plans
from trueline.engine.cluster.contract import (
    Scheduler,
    Submission,
    SubmissionReport,
    SubmissionState,
    make_group,
    make_name,
    role_of,
)
from trueline.engine.cluster.settings import HostsSettings
from trueline.engine.hosts.token import read_token
from trueline.errors import TruelineError, UsageError, first_line
from trueline.storage.location import is_remote
from trueline.train.cluster.commands import HEAD, WITHOUT_GANGS, describe_submission, queue_again
from trueline.train.cluster.kept import keep_files
from trueline.train.cluster.store import (
    HostStatus,
    JobLaunch,
    JobStore,
    JoinKit,
    LaunchEnd,
    LaunchStatus,
    OrderAnswer,
    SubmittedJob,
)
from trueline.train.launch import jobs
from trueline.train.launch.launcher import LocalJob, Superseded
from trueline.train.launch.shutdown import describe_end
from trueline.train.master.claims import SUPERSEDED
from trueline.train.master.hosts import HostsFolder
from trueline.train.settings import parse_workers

TICK_S = 0.25
STATUS_S, LISTING_S = 1.0, 1.0
KIT_S = 5.0
"""Two hosts may begin to lead, and the one that gives up have written last where hosts join."""
REMOTE_S = 2.0
"""Time between two writes of logs to an object store: each is an object."""


class LeaderDuties:
    """`role`: the submission that leads: head, or a host after the head's death."""

    def __init__(
        self,
        store: JobStore,
        job: SubmittedJob,
        launch: JobLaunch,
        scheduler: Scheduler,
        *,
        role: str,
        leader: LocalJob,
    ) -> None:
        self._store, self._submitted, self._launch, self._scheduler = store, job, launch, scheduler
        self._role, self._leader, self._folder = role, leader, leader.folder
        self._group = make_group(job.unique_name, launch.number)
        self._plan = plans.HostPlan()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duties", daemon=True)
        self._away: dict[str, str] = {}
        self._offsets = {"logs/events.log": leader.inherited_bytes}
        self._live: dict[str, Any] = {}
        self._listed: dict[str, SubmissionReport] = {}
        self._kit: JoinKit | None = None
        self._due = dict.fromkeys(("hosts", "status", "logs", "kit"), 0.0)
        self._kept_step = -1
        self._core_s, self._counted_at = 0.0, time.monotonic()
        self._halting = self._gives_way = False
        self._began_at, self._first_step = time.monotonic(), -1
        low, _ = parse_workers(launch.workers or job.workers)
        self._may_give_way = isinstance(launch.engine, WITHOUT_GANGS) and role == HEAD and low > launch.engine.slots

    def begin(self) -> None:
        """Lets hosts join, and takes over those of a leader before."""
        before = self._store.read_status(self._launch.number)
        if before is not None:
            self._plan.next, self._core_s = before.next_host, before.core_s
        launch = HostsFolder(self._folder).read_launch()
        if launch is not None:
            token = read_token(HostsFolder(self._folder).token)
            self._kit = JoinKit(address=launch.leader.address, token=token)
            self._store.write_kit(self._launch.number, self._kit)
            with self._noting("the scheduler"):
                plans.adopt(self._plan, self._list(), self._role, time.monotonic())
        keep_files(self._store, self._folder, journal=False)
        self._leader.on_event = self._hear
        self._thread.start()

    def _hear(self, event: str) -> None:
        """Replaces a lost host at once, before the next regular look at the scheduler."""
        if event in ("host.lost", "host.left"):
            self._due["hosts"] = 0.0

    def end(self, error: BaseException | None) -> None:
        """Writes what is left to write: logs, files for the next launch, how this one ended."""
        self._stop.set()
        self._thread.join()
        if isinstance(error, Superseded):
            return
        with self._noting("the scheduler"):
            for role, report in self._list().items():
                if role != self._role and report.state is not SubmissionState.ENDED:
                    self._scheduler.cancel(make_name(self._submitted.unique_name, self._launch.number, role))
        outcome, why = describe_end(error)
        with self._noting("the store"):
            keep_files(self._store, self._folder, journal=True)
            self._copy_logs()
            record = jobs.read_job(self._folder.path)
            taken_back = isinstance(self._launch.engine, HostsSettings) and not self._halting
            if outcome == "stopped" and (self._gives_way or taken_back):
                queue_again(self._store, self._submitted, self._launch, self._scheduler)
            self._store.end_launch(self._launch.number, LaunchEnd(
                outcome=outcome, why=why, step=record.step, total=record.total, checkpoint=record.checkpoint,
                ended=time.time(),
            ))  # fmt: skip

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            for what, work in (
                ("the store", self._take_orders),
                ("the scheduler", self._follow_hosts),
                ("the store", self._publish),
            ):
                with self._noting(what):
                    work()

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Reports once that `what` is away, and once that it is back."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - training does not end for it
            why = error.message if isinstance(error, TruelineError) else f"{type(error).__name__}: {first_line(error)}"
            if self._away.get(what) != why:
                self._leader.emit("duties.delayed", what=what, why=why)
            self._away[what] = why
        else:
            if self._away.pop(what, None) is not None and what not in self._away:
                self._leader.emit("duties.resumed", what=what)

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + every_s
        return True

    def _list(self) -> dict[str, SubmissionReport]:
        return {role_of(one.name): one for one in self._scheduler.list(self._group)}

    def _expect_leadership(self) -> None:
        """Ends this process, and with it all workers, where a client has declared the launch dead: it was cut off."""
        number = self._launch.number
        newest = self._store.last_launch()
        if newest is not None and newest.number == number and self._store.read_end(number) is None:
            return
        self._leader.emit("job.superseded", host="a later launch", address=str(self._store.where), token="")
        os._exit(SUPERSEDED)

    def _take_orders(self) -> None:
        self._expect_leadership()
        for name, order in self._store.list_orders(self._launch.number):
            fault = ""
            try:
                if order.workers and self._submitted.servers:
                    fault = "its slots are those of its submission: halt it, and resume it with --workers N"
                elif order.workers:
                    jobs.scale(self._folder.path, order.workers)
                else:
                    self._halting = True
                    self._leader.halt(order.why)
            except TruelineError as error:
                if not isinstance(error, UsageError):
                    raise  # the master does not answer at the moment
                fault = error.message
            self._store.answer_order(name, OrderAnswer(fault=fault))

    def _follow_hosts(self) -> None:
        if self._halting or not self._is_due("hosts", LISTING_S):
            return
        live = jobs.status(self._folder.path)
        self._live = live or self._live
        if self._submitted.servers:
            return
        self._listed = self._list()
        here = {host["host"]: host for host in live["hosts"] if host["cores"]} if live else None
        arriving = [host["host"] for host in live["hosts"] if not host["cores"]] if live else []
        target = self._live.get("workers", self._leader.settings.workers)
        count = plans.count_hosts(target, self._launch.engine.slots)
        for action in plans.decide(self._plan, count, self._listed, here, time.monotonic(), arriving=arriving):
            self._carry_out(action)
        if self._may_give_way:
            self._consider_giving_way()

    def _consider_giving_way(self) -> None:
        step, now = jobs.read_job(self._folder.path).step, time.monotonic()
        self._first_step = step if self._first_step < 0 else self._first_step
        self._may_give_way = step == self._first_step
        waited_s = now - self._began_at
        name, number = self._submitted.unique_name, self._launch.number
        if self._may_give_way and plans.gives_way(self._plan, waited_s=waited_s, name=name, number=number):
            why = f"it queues again: after {waited_s:.0f} s there is no room to begin, and others may wait for its part"
            self._gives_way = self._halting = True
            self._leader.emit("launch.given_back", why=why)
            self._leader.halt(why)

    def _carry_out(self, action: plans.HostAction) -> None:
        name = make_name(self._submitted.unique_name, self._launch.number, action.role)
        match action:
            case plans.SubmitHost(role=role, why=why):
                try:
                    self._scheduler.submit(self._describe(role))
                except TruelineError as error:
                    del self._plan.hosts[role]
                    wait_s = plans.fail(self._plan, time.monotonic())
                    self._leader.emit("host.not_submitted", host=role, why=error.message, again_s=wait_s)
                else:
                    self._leader.emit("host.submitted", host=role, why=why)
            case plans.CancelHost(role=role, why=why, grace=grace):
                self._scheduler.cancel(name, grace=grace)
                self._leader.emit("host.cancelled", host=role, why=why)
            case plans.HostEnded(role=role, why=why):
                self._leader.emit("host.ended", host=role, why=why)

    def _describe(self, role: str) -> Submission:
        return describe_submission(self._store, self._submitted, self._launch, role)

    def _publish(self) -> None:
        if self._is_due("logs", REMOTE_S if is_remote(str(self._store.where)) else TICK_S):
            self._copy_logs()
        if self._kit is not None and self._is_due("kit", KIT_S):
            self._store.keep_kit(self._launch.number, self._kit)
        if not self._is_due("status", STATUS_S):
            return
        with self._noting("the copy of a checkpoint"):  # without it the job still shows that it lives
            self._keep_checkpoint()
        record, live, now = jobs.read_job(self._folder.path), self._live, time.monotonic()
        joined = [host for host in live.get("hosts", ()) if host["cores"]]
        held = self._leader.settings.workers + self._submitted.servers if self._submitted.servers else 0
        self._core_s += (held or sum(host["cores"] for host in joined)) * (now - self._counted_at)
        self._counted_at = now
        self._store.write_status(self._launch.number, LaunchStatus(
            leader=self._role, host=socket.gethostname(), total=record.total,
            step=max(record.step, live.get("committed", 0)),
            loss=live.get("loss") if record.loss is None else record.loss,
            workers=record.workers or len(live.get("members", ())), target=live.get("workers", 0),
            checkpoint=record.checkpoint, core_s=self._core_s, next_host=self._plan.next,
            hosts=self._describe_hosts(joined), at=time.time(),
        ))  # fmt: skip

    def _describe_hosts(self, joined: Sequence[dict[str, Any]]) -> tuple[HostStatus, ...]:
        found = [
            HostStatus(
                role=host["host"] if host["host"] != "this host" else self._role, state=host["state"],
                workers=len(host["workers"]),
            )
            for host in joined
        ]  # fmt: skip
        there = {one.role for one in found}
        for role, entry in sorted(self._plan.hosts.items()):
            if role not in there:
                state = "starting" if entry.running_at else "queued"
                found.append(HostStatus(role=role, state=state, reason=entry.reason))
        return tuple(found)

    def _keep_checkpoint(self) -> None:
        """Keeps what the next launch needs to continue from a checkpoint that is new."""
        step = jobs.read_job(self._folder.path).checkpoint
        if step != self._kept_step:
            keep_files(self._store, self._folder, journal=True)
            self._kept_step = step

    def _copy_logs(self) -> None:
        """Appends to the store what events and processes have written since the last time. A checkpoint is kept before
        the event that says so is there: a launch that follows continues from each one that users have seen."""
        logs = {f"logs/{path.name}": path for path in sorted(self._folder.logs.glob("*.log"))}
        for name, path in {"logs/events.log": self._folder.events, **logs}.items():
            at = self._offsets.get(name, 0)
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(at)
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                if whole:
                    if path == self._folder.events and b'"checkpoint.saved"' in whole:
                        self._keep_checkpoint()
                    self._store.append(name, whole)
                    self._offsets[name] = at + len(whole)


@contextlib.contextmanager
def leading(
    store: JobStore, job: SubmittedJob, launch: JobLaunch, scheduler: Scheduler, *, role: str, leader: LocalJob
) -> Iterator[None]:
    """Leads a submitted job while the block runs, and writes how it ended."""
    duties = LeaderDuties(store, job, launch, scheduler, role=role, leader=leader)
    duties.begin()
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        duties.end(error)
