"""The settings of a job, in `JOB/job.json`: launcher, master and workers read the same file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from trueline import files
from trueline.engine.hosts.ssh import parse_hosts
from trueline.errors import UsageError, closest, join_names
from trueline.full_disk import write_when_room
from trueline.recipe.settings import LossReduction, Precision, Shuffle, Strategy, TrainingSettings
from trueline.settings import check, declared_settings
from trueline.train.job_dir import JobDir

Phase = Literal[
    "before", "backward", "allreduced", "applied",
    "entering", "forming", "healing", "observing", "evaluating", "saving", "finishing",
]  # fmt: skip


MASTERS: Mapping[Strategy, str] = {
    "allreduce": "trueline.train.master.server",
    "ps": "trueline.ps.master.server",
    "hybrid": "trueline.ps.hybrid.master",
}
"""The module of each strategy's master, by name: what stands above train is never imported here."""
WORKERS: Mapping[Strategy, str] = {
    "allreduce": "trueline.train.worker.main",
    "ps": "trueline.ps.worker",
    "hybrid": "trueline.ps.hybrid.worker",
}
OF_SERVERS = ("servers", "staleness", "tables_above", "hot_rows", "server_memory_mb", "half_rows", "grpc_port")
NOT_OF_HYBRID = ("staleness", "hot_rows", "grpc_port", "bitwise", "compile")
NOT_OF_SERVERS = (
    "micro_batch", "bitwise", "precision", "ema", "find_unused_parameters", "compile", "readers", "backend",
    "evaluate_every", "monitor", "patience", "profile", "autoscale",
)  # fmt: skip
"""Settings that a job with parameter servers does not have."""
NOT_OF: Mapping[Strategy, tuple[str, ...]] = {"allreduce": OF_SERVERS, "ps": NOT_OF_SERVERS, "hybrid": NOT_OF_HYBRID}
"""By strategy: the settings that its jobs do not have."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An injected signal, which incarnation `incarnation` of worker `slot` sends to itself after `step` applied steps.

    Phases of a step: `before` it, in the `backward`, after the all-reduce (`allreduced`), after the optimizer and
    before the report (`applied`). Of a regroup: `entering` a view, `forming` its group, transferring the state
    (`healing`), taking part without a state (`observing`). Others: `evaluating`, `saving` a checkpoint, `finishing`.
    """

    step: int
    slot: int
    incarnation: int = 0
    """-1: the first one that gets there, once in the job's life; a file in JOB/faults records it."""
    phase: Phase = "backward"
    signal: int = 9
    """9: SIGKILL; 19: SIGSTOP, a hang."""


def beyond(faults: Sequence[Fault], total_steps: int) -> list[Fault]:
    """The faults that no worker reaches: the phases of a step exist for steps 0 to `total_steps` - 1.

    >>> [fault.step for fault in beyond([Fault(step=step, slot=0) for step in (0, 9, 10)], 10)]
    [10]
    """
    last = {"before": 1, "backward": 1, "allreduced": 1, "applied": 1}
    return [fault for fault in faults if fault.step > total_steps - last.get(fault.phase, 0)]


@dataclass(frozen=True, kw_only=True)
class JobSettings(TrainingSettings):
    name: str
    recipe: str
    """Absolute path of the recipe, or `module:object`; empty for a job that runs `script`. On a joined host the path is
    relative to the job's folder."""
    recipe_digest: str
    script: tuple[str, ...] = ()
    """A Python file with a custom loop over `trueline.Elastic`, and its arguments. Its path is as that of `recipe`."""
    workers: int
    min_workers: int = 1
    faults: tuple[Fault, ...] = ()
    threads: int = 1
    """Intra-op threads of each worker."""
    started_from: dict[str, Any] = field(default_factory=dict)
    """Of `weights`: digest and name of their file, number of tensors, new layers; the job's folder has a copy."""

    @property
    def wants_best(self) -> bool:
        """Whether the job's result is the checkpoint of its best evaluation, and not the last one."""
        return bool(self.monitor or self.patience)


def device_kind(wanted: str) -> tuple[str, int | None]:
    """Kind and number of a device, by its name alone. Raises UsageError.

    >>> device_kind("cuda:1"), device_kind("auto")
    (('cuda', 1), ('auto', None))
    """
    kind, colon, number = wanted.partition(":")
    if kind == "cuda" and colon and number.isdecimal():
        return kind, int(number)
    if kind in ("auto", "cpu", "cuda") and not colon:
        return kind, None
    raise UsageError(
        f"device is '{wanted}', which is none",
        hint="say auto, cpu, cuda, or cuda:N for device N of each machine; name a value of your own `_device`",
    )


def check_strategy(job: JobSettings) -> None:
    """Raises UsageError for settings that the job's strategy does not have."""
    unused = NOT_OF[job.strategy]
    for one in declared_settings(TrainingSettings):
        if one.name in unused and getattr(job, one.name) != one.default:
            raise UsageError(
                f"--{one.flag} does not apply to --strategy {job.strategy}",
                hint="leave it out, or choose another strategy; docs/guides/parameter-server.md has the settings",
            )
    if job.strategy == "hybrid" and job.precision == "fp16":
        raise UsageError(
            "--precision fp16 scales the loss, and the servers would get the scaled gradients of rows",
            hint="--precision bf16 needs no scaling",
        )
    if job.strategy == "hybrid" and (job.listen or job.hosts) and "://" in job.checkpoints:
        raise UsageError(
            f"--checkpoints is {job.checkpoints}, expected a folder: servers of several hosts write their tables there",
            hint="name a folder that all hosts mount; --strategy ps takes an object store",
        )
    if job.hot_rows and job.staleness < 1:
        raise UsageError(
            "--hot-rows keeps rows for as many steps as --staleness says, and it is "
            + ("0: synchronous" if job.staleness == 0 else "not given"),
            hint="--staleness 3",
        )
    if bool(job.publish_every) != bool(job.publish_to):
        raise UsageError(
            "--publish-every and --publish-to belong together", hint="--publish-every 10 --publish-to models/"
        )
    if "://" in job.publish_to:
        raise UsageError(
            f"--publish-to is {job.publish_to}, expected a folder", hint="publish to a folder, and copy it"
        )
    if job.script and job.publish_every:
        raise UsageError("a script with a loop of its own has no recipe to publish", hint="leave --publish-every out")
    if job.script and job.strategy != "allreduce":
        raise UsageError(
            "a script with a loop of its own has no parameter servers",
            hint=f"write the model as a recipe: trueline train RECIPE --strategy {job.strategy}",
        )


def check_backend(wanted: str) -> None:
    """Raises UsageError for an invalid backend name; workers find out whether the backend is installed.

    >>> check_backend("nccl"), check_backend("ours.planes:connect")
    (None, None)
    """
    module, colon, name = wanted.partition(":")
    if wanted in ("gloo", "nccl") or (colon and name.isidentifier() and all(map(str.isidentifier, module.split(".")))):
        return
    if wanted == "mpi":
        raise UsageError(
            "backend is 'mpi', and a step is not proven to stay exact when MPI loses a rank",
            hint="leave --backend out: gradients are summed in host memory, over gloo",
        )
    raise UsageError(
        f"backend is '{wanted}', which is none",
        hint="say gloo, nccl or module:function, or leave --backend out; name a value of your own `_backend`",
    )


def save(settings: JobSettings, job_dir: Path, *, patient: bool = False) -> None:
    """`patient`: the job runs, and waits while the disk is full."""
    write = write_when_room if patient else files.write_atomic
    write(JobDir(job_dir).settings, msgspec.json.format(msgspec.json.encode(settings), indent=1))


def load(job_dir: Path) -> JobSettings:
    """Raises UsageError if `job_dir` holds no job, or one of a newer version: it would be another one without what that
    has written."""
    file = JobDir(job_dir).settings
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        if unknown := sorted(found.keys() - JobSettings.__dataclass_fields__.keys()):
            raise UsageError(
                f"{file} has settings that this version does not know: {join_names(unknown)}",
                hint="continue the job with the version of Trueline that began it; the checkpoints can still be "
                "evaluated and captured: name one of them",
            )
        job = msgspec.convert(found, JobSettings)
        if job.script and not Path(job.script[0]).is_absolute():  # it has travelled to this host
            return replace(job, script=(str(job_dir / job.script[0]), *job.script[1:]))
        travelled = job.recipe and ":" not in job.recipe and not Path(job.recipe).is_absolute()
        return replace(job, recipe=str(job_dir / job.recipe)) if travelled else job
    except FileNotFoundError as error:
        why = f"{job_dir} holds no job: it has no job.json"
        raise UsageError(why, hint="name the folder of an earlier job") from error
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{file} is not a job's settings: {error}",
            hint="the job's checkpoints can still be evaluated and captured: name one of them",
        ) from error


def settle(job_dir: Path, *, epochs: int, global_batch: int, seed: int) -> JobSettings:
    """The job's settings with a script's values, saved when they are new. Raises UsageError if the job has others."""
    job = load(job_dir)
    if not job.epochs:
        job = replace(job, epochs=epochs, global_batch=global_batch, seed=seed)
        save(job, job_dir, patient=True)
    for name, value in (("epochs", epochs), ("global_batch", global_batch), ("seed", seed)):
        if getattr(job, name) != value:
            raise UsageError(
                f"the script made an Elastic with {name}={value}, and the job began with {getattr(job, name)}",
                hint="make one Elastic, the same in every worker and after every resume",
            )
    return job


def parse_workers(text: str) -> tuple[int, int]:
    """`"3"` or `"2:8"` as (min_workers, workers). Raises UsageError.

    >>> parse_workers("3"), parse_workers("2:8")
    ((1, 3), (2, 8))
    """
    low, colon, high = str(text).partition(":")
    try:
        numbers = (int(low), int(high)) if colon else (1, int(low))
    except ValueError:
        numbers = (0, 0)
    if not 1 <= numbers[0] <= numbers[1]:
        raise UsageError(f"'{text}' is no number of workers", hint="write 3, or 2:8 for at least two and at most eight")
    return numbers


def parse_steps(text: str) -> range:
    """The steps of `--profile`: none, one, or those before a stop. Raises UsageError.

    >>> parse_steps(""), parse_steps("7"), parse_steps("10:15")
    (range(0, 0), range(7, 8), range(10, 15))
    """
    first, colon, stop = text.partition(":")
    if not text:
        return range(0)
    if first.isdecimal() and (stop.isdecimal() if colon else True):
        steps = range(int(first), int(stop) if colon else int(first) + 1)
        if steps:
            return steps
    raise UsageError(f"profile is '{text}', which names no steps", hint="write 10, or 10:15 for five steps")


class Overrides(TypedDict, total=False):
    """Settings of `JobSettings` that a caller may give; None or left out: the recipe's, else the default."""

    epochs: int | None
    global_batch: int | None
    seed: int | None
    micro_batch: int | None
    shuffle: Shuffle | None
    reduction: LossReduction | None
    readers: int | None
    bitwise: bool | None
    precision: Precision | None
    clip_norm: float | None
    ema: float | None
    compile: bool | None
    evaluate_every: int | None
    monitor: str | None
    patience: int | None
    checkpoint_every: int | None
    checkpoints: str | None
    keep: int | None
    set_aside: int | None
    autoscale: bool | None
    lease_s: float | None
    max_failures: int | None
    page_port: int | None
    profile: str | None
    device: str | None
    backend: str | None
    strategy: Strategy | None
    servers: int | None
    staleness: int | None
    tables_above: int | None
    hot_rows: int | None
    server_memory_mb: int | None
    half_rows: bool | None
    grpc_port: int | None
    publish_every: float | None
    publish_to: str | None
    find_unused_parameters: bool | None
    weights: str | None
    new_layers: str | None
    hosts: str | None
    remote_trueline: str | None
    listen: str | None
    cores: int | None
    interface: str | None
    ports: str | None


def apply_overrides(
    job: JobSettings, overrides: Overrides, *, cores: int, metrics: Mapping[str, Any] | None = None
) -> JobSettings:
    """`job` with the overrides, checked. `metrics`: the recipe's, by name. Raises UsageError."""
    for name in overrides:
        if name not in Overrides.__annotations__:
            near = closest(name, Overrides.__annotations__)
            raise UsageError(f"there is no setting '{name}'", hint=f"did you mean '{near}'?" if near else "")
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    job = replace(job, **given)
    # Threads change the order of a sum, so bitwise reproducibility means one thread.
    job = replace(job, threads=1 if job.bitwise else max(1, cores // job.workers))
    try:
        job = msgspec.convert(msgspec.to_builtins(job), JobSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"a setting of the job is of the wrong kind: {error}") from error
    check(job, unchecked=("epochs", "global_batch") if job.script else ())
    check_strategy(job)
    device_kind(job.device)
    check_backend(job.backend)
    parse_steps(job.profile)
    parse_hosts(job.hosts)
    known = ("loss", *(metrics or ()))
    if job.monitor and job.monitor.removeprefix("-") not in known:
        raise UsageError(
            f"monitor is '{job.monitor}', and the recipe has no such metric",
            hint=f"one of {', '.join(known)}; smaller is better, -NAME: larger is",
        )
    return job


def refuse_changes(earlier: JobSettings, later: JobSettings, where: str) -> None:
    """Raises UsageError when `later` would train something else than `earlier` did."""
    if later.recipe_digest != earlier.recipe_digest:
        raise UsageError(
            f"the recipe {later.recipe or later.script[0]} was changed since the job in {where} began",
            hint="restore the recipe, or train the changed one in a new job",
        )
    fixed = [item.name for item in declared_settings(TrainingSettings) if item.setting.fixed]
    changed = [name for name in fixed if getattr(earlier, name) != getattr(later, name)]
    if changed:
        before = ", ".join(f"{name} was {getattr(earlier, name)}" for name in changed)
        raise UsageError(f"the job in {where} is another one: {before}", hint="leave these out to resume with the same")
