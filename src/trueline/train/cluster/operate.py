"""Submitted jobs from outside: submit, list, scale, halt, resume.

Client and job meet in the store alone. The scheduler is called where only that knows whether a head waits, runs or has
ended. No torch.
"""

import contextlib
import json
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import msgspec

from trueline import events, files
from trueline.engine.cluster.contract import (
    Scheduler,
    SubmissionReport,
    SubmissionState,
    make_group,
    make_name,
    role_of,
)
from trueline.engine.cluster.open import open_scheduler
from trueline.engine.cluster.settings import AnySettings, HostsSettings, LocalSettings, PodmanSettings
from trueline.engine.hosts import folder as travel
from trueline.errors import EngineAway, TrainError, UsageError, closest, join_names
from trueline.storage.location import Location, is_remote, join_location, parse_location, split_location
from trueline.train.cluster.code import expect_script_settings, locate
from trueline.train.cluster.commands import HEAD, describe_submission
from trueline.train.cluster.store import HostStatus, JobLaunch, JobStore, LaunchEnd, LaunchStatus, Order, SubmittedJob
from trueline.train.settings import parse_workers

State = Literal["queued", "starting", "running", "finished", "failed", "stopped", "dead", "silent"]
"""`dead`: its head has gone without writing an end; `silent`: so it seems, and the scheduler does not answer."""
FRESH_S = 15.0
"""A leader that has written no status for longer is gone, or cut off from the store."""
POLL_S = 0.1
ANSWER_S, END_S = 60.0, 30.0
"""How long an order may wait for its answer; and a launch that nothing leads, for its processes to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A submitted job as the store and its scheduler have it."""

    name: str
    state: State
    why: str
    engine: str
    launch: int
    step: int = 0
    total: int = 0
    workers: int = 0
    loss: float | None = None
    checkpoint: int = 0
    core_h: float = 0.0
    priority: int = 0
    asked: str = ""
    """MIN:MAX workers."""
    started: float
    launched: float = 0.0
    """When the newest launch was submitted."""
    ended: float = 0.0
    store: str
    hosts: tuple[HostStatus, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        hosts = [{name: getattr(host, name) for name in host.__struct_fields__} for host in self.hosts]
        return {name: getattr(self, name) for name in self.__slots__} | {"hosts": hosts}


def submit(
    recipe: str | Path,
    *arguments: str,
    on: str,
    engine: AnySettings,
    store: Location,
    workers: str = "3",
    settings: Mapping[str, Any] | None = None,
    name: str = "",
    priority: int = 0,
) -> JobStore:
    """Copies the folder of a recipe, or of a script with a loop over `trueline.Elastic`, into the store and submits the
    head; returns where the job is, under STORE/NAME-N. `arguments`: of the script.

    Raises UsageError, RecipeError, StorageError; EngineAway when the scheduler does not answer.
    """
    parse_workers(workers)
    found = locate(recipe, settings or {})
    _note_shadowed(found.folder)
    if found.is_script:
        expect_script_settings(settings or {})
    elif arguments:
        raise UsageError(
            f"{recipe} is a recipe, which takes no arguments: {' '.join(arguments)}",
            hint="arguments after -- are for a script with a loop over trueline.Elastic",
        )
    kind = {"script": (found.there, *arguments)} if found.is_script else {"recipe": found.there}
    return submit_code(
        found.folder, base=name or found.name, on=on, engine=engine, store=store, workers=workers,
        settings={**(settings or {}), **found.settings}, servers=found.servers, priority=priority, **kind,
    )  # fmt: skip


def submit_code(code: Path, *, base: str, on: str, engine: AnySettings, store: Location, **job: Any) -> JobStore:
    """Submits a job whose code is the folder `code` and whose record has the fields `job`. Raises as `submit`."""
    blank: dict[str, Any] = {"name": "", "recipe": "", "files": (), "settings": {}}
    made = SubmittedJob(**(blank | {"id": secrets.token_hex(3), "submitted": time.time()} | job))
    where = _add_job(store, base, made, code)
    engine = choose_pool(engine, store)
    launch = JobLaunch(number=1, on=on, engine=engine, machine=find_machine(engine), submitted=time.time())
    where.begin_launch(launch)
    remember(store)
    _submit_head(where, launch)
    return where


def _note_shadowed(code: Path) -> None:
    if (code / ".gitignore").is_file():
        events.emit("job.packed", folder=str(code), without="what .gitignore names")


def _add_job(store: Location, base: str, job: SubmittedJob, code: Path) -> JobStore:
    """Makes STORE/BASE-N, for the first N that is free."""
    with TemporaryDirectory(prefix="trueline-") as scratch:
        packed = travel.pack(travel.code_files(code), Path(scratch))
        blobs = {one.digest: (Path(scratch) / one.digest).read_bytes() for one in packed}
    number, plain = 1, re.sub("[^A-Za-z0-9_.-]+", "-", base).strip("-.") or "job"
    while True:
        name = f"{plain}-{number}"
        where = JobStore(join_location(store, name))
        with contextlib.suppress(FileNotFoundError):
            if where.get("submitted.json") is None:
                for digest, data in blobs.items():
                    where.write(f"files/{digest}", data, replace=False)
                made = SubmittedJob(**{field: getattr(job, field) for field in job.__struct_fields__} | {
                    "name": name, "files": packed,
                })  # fmt: skip
                if where.write_record("submitted.json", made, replace=False):
                    return where
        number += 1


def _submit_head(where: JobStore, launch: JobLaunch) -> None:
    """Submits the head; a scheduler that refuses it ends the launch."""
    job = where.read_job()
    try:
        open_scheduler(launch.engine).submit(describe_submission(where, job, launch, HEAD))
    except UsageError as error:
        where.end_launch(launch.number, LaunchEnd(outcome="failed", why=error.message, ended=time.time()))
        raise


def read(where: JobStore, now: float | None = None) -> StoredJob:
    """The job as it is. Raises UsageError where there is none, StorageError."""
    job, launch = where.read_job(), where.last_launch()
    common: dict[str, Any] = {"name": job.name, "store": str(where.where), "started": job.submitted}
    if launch is None:
        return StoredJob(**common, state="dead", why="it was never launched", engine="", launch=0)
    end, status = where.read_end(launch.number), where.read_status(launch.number)
    listing = None if end is not None else list_launch(where, launch)
    end = end or where.read_end(launch.number)  # a head that ends writes it before the scheduler lists its end
    state, why = judge(end, status, listing, now or time.time())
    shown = find_progress(where, launch.number)
    return StoredJob(
        **common, state=state, why=why, engine=launch.on, launch=launch.number, launched=launch.submitted,
        priority=job.priority, asked=launch.workers or job.workers, ended=end.ended if end is not None else 0.0,
        step=shown.step if shown else 0, total=shown.total if shown else 0,
        workers=status.workers if status is not None and state == "running" else 0,
        loss=status.loss if status else None, checkpoint=shown.checkpoint if shown else 0,
        core_h=_sum_core_hours(where, launch.number), hosts=status.hosts if status and state == "running" else (),
    )  # fmt: skip


def find_progress(where: JobStore, launches: int) -> LaunchEnd | LaunchStatus | None:
    """How far the newest launch came that has trained."""
    for number in range(launches, 0, -1):
        for record in (where.read_end(number), where.read_status(number)):
            if record is not None and (record.total or record.step):
                return record
    return None


def _sum_core_hours(where: JobStore, launches: int) -> float:
    statuses = (where.read_status(number) for number in range(1, launches + 1))
    return sum(status.core_s for status in statuses if status is not None) / 3600


def choose_pool(engine: AnySettings, store: Location) -> AnySettings:
    """The settings with the pool of `store`, if hosts are to run the job and no other pool is named."""
    if isinstance(engine, HostsSettings) and not engine.pool:
        place = parse_location(store)
        return msgspec.structs.replace(engine, pool=str(place.absolute() if isinstance(place, Path) else place))
    return engine


def find_machine(engine: AnySettings) -> str:
    """The name of this machine if the engine is one machine; empty: it is a cluster."""
    return socket.gethostname() if isinstance(engine, LocalSettings | PodmanSettings) else ""


class Listing(NamedTuple):
    """What the scheduler says of a launch. `hosts`: whether one runs, which could lead in the head's place."""

    head: SubmissionReport | None
    hosts: bool


def list_launch(where: JobStore, launch: JobLaunch) -> Listing | None:
    """None: the scheduler does not answer, or is that of another machine."""
    if launch.machine != find_machine(launch.engine):
        return None
    try:
        listed = open_scheduler(launch.engine).list(make_group(where.read_job().unique_name, launch.number))
    except EngineAway:
        return None
    head = next((one for one in listed if role_of(one.name) == HEAD), None)
    return Listing(head, any(one.state is SubmissionState.RUNNING for one in listed if one is not head))


def judge(end: LaunchEnd | None, status: LaunchStatus | None, listing: Listing | None, now: float) -> tuple[State, str]:
    """State and reason of a launch."""
    if end is not None:
        return end.outcome or "stopped", end.why
    head = listing.head if listing is not None else None
    gone = listing is not None and not listing.hosts and (head is None or head.state is SubmissionState.ENDED)
    silent = f"nothing came from {status.host} for {now - status.at:.0f} s" if status else "its head wrote nothing"
    if gone:
        return "dead", f"{silent}; its head has ended: {head.reason if head else 'the scheduler lists it no more'}"
    if status is not None and now - status.at < FRESH_S:
        return "running", "; ".join(f"{host.role} {host.state}: {host.reason}" for host in status.hosts if host.reason)
    if head is not None and head.state is SubmissionState.QUEUED:
        return "queued", head.reason
    if head is not None and head.state is SubmissionState.RUNNING and status is None:
        return "starting", f"its head starts on {head.node}" if head.node else "its head starts"
    if listing is None:
        return "silent", f"{silent}, and the scheduler does not answer"
    if head is not None and head.state is SubmissionState.RUNNING:
        return "silent", f"{silent}, while the scheduler lists its head as running"
    return "dead", f"{silent}; its head has ended, and no host has taken the job over"


def read_output(where: JobStore, role: str) -> bytes:
    """What the head or a host of the newest launch has written, as its engine has it. Raises EngineAway."""
    launch = where.last_launch()
    if launch is None:
        return b""
    return open_scheduler(launch.engine).read_log(make_name(where.read_job().unique_name, launch.number, role))


def scale(where: JobStore, workers: int) -> None:
    """Sets the job's number of workers. Raises UsageError when the job refuses it or does not run, TrainError."""
    number = _expect_running(where)
    name = where.give_order(number, Order(workers=workers, why="trueline scale", given=time.time()))
    deadline = time.monotonic() + ANSWER_S
    while (answer := where.read_answer(name)) is None:
        if time.monotonic() > deadline:
            raise TrainError(f"{where.name} does not answer; the order stays in the store", hint="trueline logs -f")
        _expect_running(where)
        time.sleep(POLL_S)  # a store sends no notice
    if answer.fault:
        raise UsageError(answer.fault)


def _expect_running(where: JobStore) -> int:
    """The number of the launch."""
    job = read(where)
    if job.state in ("queued", "starting", "running", "silent"):
        return job.launch
    why = f" ({job.why})" if job.why else ""
    hint = "" if job.state == "finished" else f"continue with `trueline resume {job.name}`"
    raise UsageError(f"job '{job.name}' is not running: it is {job.state}{why}", hint=hint)


def halt(where: JobStore, *, why: str = "trueline halt") -> StoredJob:
    """Ends the job at a step whose checkpoint is written; one that is queued, or dead, is ended at once. Returns its
    state then. Raises UsageError when it has ended, TrainError, StorageError."""
    job = read(where)
    launch = where.last_launch()
    if launch is None or where.read_end(launch.number) is not None:
        _expect_running(where)
    assert launch is not None
    if job.state in ("queued", "dead"):
        clear(where, launch, why="halted while it waited" if job.state == "queued" else job.why)
        return read(where)
    where.give_order(launch.number, Order(why=why, given=time.time()))
    events.emit("learners.halting" if where.read_job().manifest else "job.halting", why=why)
    while where.read_end(launch.number) is None:
        if read(where).state == "dead":
            clear(where, launch, why=read(where).why)
            break
        time.sleep(POLL_S)  # a store sends no notice
    return read(where)


def clear(where: JobStore, launch: JobLaunch, *, why: str) -> None:
    """Ends a launch that nothing leads: what the scheduler still lists, then the launch. Raises EngineAway."""
    scheduler = open_scheduler(launch.engine)
    where.end_launch(launch.number, LaunchEnd(outcome="stopped", why=why, ended=time.time()))
    deadline = time.monotonic() + END_S
    while left := _list_living(scheduler, where, launch):
        for one in left:
            scheduler.cancel(one.name, grace=False)
        if time.monotonic() > deadline:
            raise TrainError(
                f"{left[0].name} did not end within {END_S:.0f} s", hint="cancel it by the engine's own command"
            )
        time.sleep(POLL_S)  # the scheduler ends them


def _list_living(scheduler: Scheduler, where: JobStore, launch: JobLaunch) -> list[SubmissionReport]:
    listed = scheduler.list(make_group(where.read_job().unique_name, launch.number))
    return [one for one in listed if one.state is not SubmissionState.ENDED]


def resume(where: JobStore, *, on: str = "", engine: AnySettings | None = None, workers: str = "") -> JobLaunch:
    """Submits the next launch of a job that has ended before its last step, on `engine` or that of the launch before.

    Raises UsageError if it runs or is finished, EngineAway, StorageError.
    """
    job, before = read(where), where.last_launch()
    if job.state in ("queued", "starting", "running", "silent"):
        raise UsageError(f"job '{job.name}' is {job.state}", hint=f"follow it with `trueline logs -f {job.name}`")
    if job.state == "finished":
        raise UsageError(f"job '{job.name}' has finished already", hint="capture its last checkpoint")
    if before is None:
        raise UsageError(f"job '{job.name}' was never launched", hint="submit it again")
    if workers:
        parse_workers(workers)
    if job.state == "dead":
        clear(where, before, why=job.why)
    engine = choose_pool(engine if engine is not None else before.engine, split_location(where.where)[0])
    launch = JobLaunch(
        number=before.number + 1, on=on or before.on, engine=engine, workers=workers or before.workers,
        machine=find_machine(engine), submitted=time.time(),
    )  # fmt: skip
    if not where.begin_launch(launch):
        raise UsageError(f"another client resumes job '{job.name}' at this moment")
    _submit_head(where, launch)
    return launch


def list_jobs(store: Location) -> list[StoredJob]:
    """The jobs of a store, the one that was submitted first at the beginning."""
    top = JobStore(store)
    found = []
    for name in sorted(top.names("")):
        where = JobStore(join_location(store, name))
        with contextlib.suppress(UsageError):  # a folder of something else
            found.append(read(where))
    return sorted(found, key=lambda job: job.started)


def find(given: str, stores: Sequence[Location]) -> JobStore | None:
    """The submitted job that `given` names: a path or URL, or a name in one of `stores`."""
    candidates: list[Location] = [given] if "/" in given else [join_location(store, given) for store in stores]
    for candidate in candidates:
        where = JobStore(candidate)
        if where.get("submitted.json") is not None and where.names("launches"):
            return where
    return None


def describe_missing(given: str, stores: Sequence[Location]) -> UsageError:
    names = sorted({name for store in stores for name in JobStore(store).names("")})
    near = closest(given, names)
    where = join_names(str(store) for store in stores)
    return UsageError(
        f"there is no job '{given}' in {where} (has: {join_names(names)})",
        hint=f"did you mean '{near}'?" if near else "",
    )


def remember(store: Location) -> None:
    """Notes a store for the verbs that get none; the newest one first."""
    shown = str(store) if is_remote(store) else str(Path(parse_location(store)).absolute())
    known = [shown, *(one for one in list_remembered() if one != shown)]
    files.write_atomic(_memory(), json.dumps(known[:20]).encode())


def list_remembered() -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        return [str(one) for one in json.loads(_memory().read_bytes())]
    return []


def _memory() -> Path:
    return files.user_cache() / "stores.json"
