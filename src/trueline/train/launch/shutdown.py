"""How a launch ends: by a signal, an error, or with its scripts. Each becomes an exception that leaves `LocalJob`."""

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec

from trueline import errors
from trueline.engine.contract import Seen
from trueline.engine.open import open_engine
from trueline.train.job_dir import JobDir, Outcome
from trueline.train.launch import jobs

POLL_S = 0.1
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_STOPPED = "the job was stopped: "
_RAISED, _LAST_LINES = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b: "), 20


@contextlib.contextmanager
def signals_as_errors(job_dir: Path, halt: Callable[[str], bool]) -> Iterator[None]:
    """While the block runs, the first Ctrl-C, SIGTERM or SIGHUP calls `halt(why)`: the job ends after a checkpoint.

    A second one, or the first if `halt` returns False, ends the block by an exception. Signals that the caller handles
    or ignores stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    halted = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal halted
        name = "Ctrl-C" if number == signal.SIGINT else f"the launcher got {signal.Signals(number).name}"
        if not halted and halt(name):
            halted = True
            return
        for ours in usual:
            signal.signal(ours, signal.SIG_IGN)  # cleaning up follows
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise make_stopped_error(name, job_dir)

    before = {number: signal.getsignal(number) for number in _ENDING}
    usual = [number for number, how in before.items() if how in (signal.SIG_DFL, signal.default_int_handler)]
    for ours in usual:
        signal.signal(ours, end)
    try:
        yield
    finally:
        for ours in usual:
            signal.signal(ours, before[ours])


@contextlib.contextmanager
def no_second_signal() -> Iterator[None]:
    """Lets no signal interrupt the end of the processes, which takes less than a second: one that `signals_as_errors`
    handles is ignored until that block ends, one that the caller handles (pytest, a notebook) is sent again afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in _ENDING}
    handled = {number: how for number, how in found.items() if callable(how)}
    theirs = {number: how for number, how in handled.items() if getattr(how, "__module__", "") != __name__}
    later: list[int] = []
    for number in handled:
        signal.signal(number, (lambda sent, _: later.append(sent)) if number in theirs else signal.SIG_IGN)
    try:
        yield
    finally:
        for number, how in theirs.items():
            signal.signal(number, how)
        for sent in later:
            os.kill(os.getpid(), sent)


def describe_end(error: BaseException | None) -> tuple[Outcome, str]:
    """Outcome and reason of a launch that `error` ended."""
    if error is None:
        return "finished", ""
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "Ctrl-C"
    if isinstance(error, errors.JobStopped):
        return "stopped", error.message.removeprefix(_STOPPED)
    return "failed", error.message if isinstance(error, errors.TruelineError) else f"{type(error).__name__}: {error}"


def make_stopped_error(why: str, job_dir: Path) -> errors.JobStopped:
    """The error of a job that an operator or a signal has ended."""
    return errors.JobStopped(f"{_STOPPED}{why}", hint=f"continue with `trueline resume {job_dir}`")


def wait_for_scripts(job_dir: Path, agent: Path, keep_alive: Callable[[], None] | None = None) -> None:
    """Returns when the processes of the last group have ended: a script may continue after its training.

    Newcomers that still wait for a view do not count. `keep_alive`, of a job on several hosts, keeps the master alive,
    which knows their processes. Raises TrainError when a process fails.
    """
    engine, trained = open_engine(str(agent)), jobs.last_view(job_dir)

    def list_processes() -> list[Seen]:
        return asyncio.run(engine.list()) if keep_alive is None else _ask_master(job_dir, keep_alive)

    waited = {seen.ref for seen in list_processes() if seen.alive and seen.ref in trained}
    while True:
        processes = [seen for seen in list_processes() if seen.ref in waited]
        for seen in processes:
            if not seen.alive and seen.code != 0:
                log = JobDir(job_dir).log(seen.ref)
                raise errors.TrainError(
                    f"all steps are trained, but then {seen.ref} ended: {seen.reason}{_read_cause(log)}",
                    hint=f"see {log}; the last checkpoint holds what was trained",
                )
        if not any(seen.alive for seen in processes):
            return
        time.sleep(POLL_S)  # as long as the script takes


def _read_cause(log: Path) -> str:
    """The exception that the end of `log` names, with what comes before it; empty if there is none."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    except OSError:
        return ""
    return next((f": {line[:300]}" for line in reversed(lines) if _RAISED.match(line)), "")


def _ask_master(job_dir: Path, keep_alive: Callable[[], None]) -> list[Seen]:
    """The processes of all hosts."""
    while "processes" not in (status := jobs.status(job_dir) or {}):
        keep_alive()
        time.sleep(POLL_S)  # a master starts
    return msgspec.convert(status["processes"], list[Seen])
