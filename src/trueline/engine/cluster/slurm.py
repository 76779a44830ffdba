"""Slurm: sbatch, scancel and squeue by their command lines.

A submission is a batch job of one task, by its name. It is never requeued: Slurm would start it again 121 s later
without knowing the job. Slurm lists a dead node's jobs as running for half a minute; jobs that have ended are
forgotten after `MinJobAge` (five minutes by default). Sources: sbatch(1), squeue(1), scancel(1) of Slurm 22.05.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from trueline import files
from trueline.engine.cluster.contract import Submission, SubmissionReport, SubmissionState, job_of
from trueline.engine.cluster.settings import SlurmSettings
from trueline.engine.local.process import LIFELINE
from trueline.errors import EngineAway, UsageError

CALL_S = 20.0
"""How long a command may take; it usually takes 10 ms."""
NOTICE_S = 30
"""Seconds between SIGTERM and the end of a job's time, for a checkpoint."""
SEPARATOR = "|"
FORMAT = SEPARATOR.join(("%i", "%j", "%T", "%r", "%N"))
QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "REQUEUE_FED"}
RUNNING = {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
AWAY = ("Unable to contact slurm controller", "Connection refused", "Socket timed out", "Zero Bytes were transmitted",
        "slurmctld", "Transport endpoint")  # fmt: skip
"""What commands print when the controller does not answer; anything else is a refusal."""
WAITS: Mapping[str, str] = {
    "None": "Slurm has not looked at it yet",
    "Priority": "it waits behind jobs of a higher priority",
    "Resources": "it waits for free cores or memory",
    "PartitionConfig": "it asks for more than a node of its partition has, so that it never starts",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs",
    "PartitionNodeLimit": "it asks for more than its partition allows, so that it never starts",
    "PartitionTimeLimit": "it asks for more time than its partition allows, so that it never starts",
    "ReqNodeNotAvail": "the nodes that it could have are down or reserved",
    "BeginTime": "its time to begin has not come",
    "Dependency": "it waits for another job",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held: scontrol release",
    "Licenses": "it waits for a licence",
    "Reservation": "it waits for its reservation",
    "NodeDown": "a node that it could have is down",
    "BadConstraints": "no node has what it asks for, so that it never starts",
}
"""Reasons for pending jobs, from squeue(1); limits of associations and QOS are named as Slurm names them."""
ENDS: Mapping[str, str] = {
    "CANCELLED": "it was cancelled (scancel)",
    "NODE_FAIL": "its node failed",
    "TIMEOUT": "its time is over",
    "OUT_OF_MEMORY": "it took more memory than it asked for",
    "PREEMPTED": "it was preempted",
    "COMPLETED": "exit code 0",
    "BOOT_FAIL": "its node did not boot",
    "DEADLINE": "its deadline has passed",
    "FAILED": "it failed",
}


class SlurmScheduler:
    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings

    def submit(self, submission: Submission) -> str:
        folder = Path(submission.log).parent
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as submitting:
            with suppress(OSError):  # a file system without locks; to Slurm a name may have any number of jobs
                submitting.enter_context(files.hold_lock(folder / f".slurm-{os.getuid()}.lock"))
            if known := self._find(submission.name):
                return known[0]
            script = make_script(submission)
            return _call("sbatch", *make_options(submission, self._settings), stdin=script).partition(";")[0].strip()

    def _find(self, name: str) -> list[str]:
        """The numbers of the jobs with this name, also of those that have ended lately."""
        lines = _call("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i").split()
        return [line for line in lines if line]

    def cancel(self, name: str, *, grace: bool = True) -> None:
        for number in self._find(name):
            # --full would take KillWait; what the command has started ends with it, or is killed by slurmd then. A job
            # that waits gets no signal; it may start after the first of two calls.
            ways: tuple[tuple[str, ...], ...] = ((),) if grace else (("--state=PENDING",), ("--signal=KILL", "--batch"))
            for how in ways:
                with suppress(UsageError):  # it has ended meanwhile
                    _call("scancel", *how, number)

    def list(self, job: str) -> Sequence[SubmissionReport]:
        text = _call("squeue", "--noheader", "--states=all", "--me", f"--format={FORMAT}")
        return parse_queue(text, job)

    def read_log(self, name: str) -> bytes:
        for number in self._find(name):
            shown = _call("scontrol", "show", "job", number)
            match = re.search(r"^\s*StdOut=(.*)$", shown, re.MULTILINE)
            with suppress(OSError):
                return Path(match[1]).read_bytes() if match else b""
        return b""


def make_options(submission: Submission, settings: SlurmSettings) -> list[str]:
    """The options of sbatch."""
    options = [
        "--parsable", "--no-requeue", "--ntasks=1", f"--job-name={submission.name}",
        f"--cpus-per-task={submission.slots}", f"--output={submission.log}", "--open-mode=append", "--chdir=/",
        f"--signal=B:TERM@{NOTICE_S}",
    ]  # fmt: skip
    for name in ("partition", "account", "qos", "time"):
        if value := getattr(settings, name):
            options.append(f"--{name}={value}")
    if submission.memory_mb:
        options.append(f"--mem={submission.memory_mb}M")
    return [*options, *settings.options]


def make_script(submission: Submission) -> str:
    """The batch script: the command replaces the shell, so that it gets the signals."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in submission.env.items()]
    return "\n".join(["#!/bin/sh", f"unset {LIFELINE}", *exports, f"exec {shlex.join(submission.command)}", ""])


def parse_queue(text: str, job: str) -> list[SubmissionReport]:
    """What squeue prints with `FORMAT`, for the submissions of a launch.

    >>> parse_queue("7|digits-1.1.head|PENDING|Resources|", "digits-1.1")[0].reason
    'it waits for free cores or memory (Resources)'
    """
    found: dict[str, SubmissionReport] = {}
    for line in text.splitlines():
        _, name, state, reason, node = line.split(SEPARATOR, 4)
        if job_of(name) == job:
            found[name] = _describe(name, state, reason, node)
    return list(found.values())


def _describe(name: str, state: str, reason: str, node: str) -> SubmissionReport:
    if state in QUEUED:
        words = WAITS.get(reason.partition(",")[0], "it waits")
        shown = words if reason == "None" else f"{words} ({reason})"
        return SubmissionReport(name=name, state=SubmissionState.QUEUED, reason=shown)
    if state in RUNNING:
        return SubmissionReport(name=name, state=SubmissionState.RUNNING, node=node)
    words = ENDS.get(state, f"Slurm's state is {state}")
    more = f": {reason}" if reason not in ("None", "") else ""
    return SubmissionReport(
        name=name, state=SubmissionState.ENDED, reason=words + more, node=node,
        code=0 if state == "COMPLETED" else None,
    )  # fmt: skip


def _call(*command: str, stdin: str = "") -> str:
    """Runs a command of Slurm; returns what it prints. Raises EngineAway, UsageError."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=CALL_S, check=False)
    except FileNotFoundError as error:
        raise EngineAway(
            f"there is no {command[0]} in PATH", hint="use a machine of the cluster that has Slurm's commands"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineAway(f"{command[0]} did not answer within {CALL_S:.0f} s", hint="try again") from error
    if done.returncode == 0:
        return done.stdout
    why = done.stderr.strip().splitlines()
    shown = why[-1].rpartition("error: ")[2] if why else f"exit code {done.returncode}"
    if any(words in done.stderr for words in AWAY):
        raise EngineAway(f"Slurm's controller does not answer: {shown}", hint="try again; what runs continues")
    raise UsageError(f"Slurm refuses it: {shown}", hint="correct [engine.slurm] in trueline.toml")
