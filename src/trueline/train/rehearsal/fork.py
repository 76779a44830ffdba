"""Runs the trial of a loop in a fork, so that counters, schedules and lines of the loop's own see no batch of it.

The fork continues the user's loop with the trial's batches, sends what they show, and ends before the code after the
loop. Its parent reads the records, since open files share their offsets, and then begins with step 0:

    fork    loop body ◀── batches of the trial      ──"records?"─▶  parent: reads
                      ◀── two that are "applied"     ──traits────▶
                                                     ──a fault───▶  settles the traits, begins with step 0

A fork that hangs on a lock which a thread of the parent held is followed by one more. Where a fork cannot compute (a
model on a device, rows on servers), or gives no traits, the loop itself gets the batches, with `batch.trial` true.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import math
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, Protocol

import psutil
import torch

from trueline import events
from trueline.data.loading import seeding
from trueline.data.loading.worker_pool import ReaderClient, ReadMemory, answer_request, end_with_parent, receive, send
from trueline.errors import RecipeError, TruelineError, UsageError, find_error_class
from trueline.train import records
from trueline.train.job_dir import note_trial
from trueline.train.rehearsal import applied, joined, places, private_files
from trueline.train.rehearsal.alike import AlikeTrial, load_traits, settle_traits, wants_comparing
from trueline.train.rehearsal.double import DoubleTrial, NumberTrial, wants_double, wants_numbers
from trueline.train.rehearsal.extremes import ExtremesTrial, wants_extremes
from trueline.train.rehearsal.fresh import FreshTrial
from trueline.train.rehearsal.steps.chosen_counts import ChosenCountsTrial
from trueline.train.rehearsal.steps.chosen_steps import ChosenStepsTrial
from trueline.train.rehearsal.steps.many_batches import ManyBatchesTrial
from trueline.train.step.contribution import StepBatch
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.optimizer_step import OptimizerStep
from trueline.train.step.parts import measured
from trueline.train.step.trial import LossTrial, TrialInputs
from trueline.train.step.validation import Validation

ANSWER = -1
"""In place of a request's number: the message has the traits."""
HUNG_S, LOOK_S, FORKS = 5.0, 0.5, 2
"""How long a fork may wait without using processor time, outside of reading; when to look; forks where one hangs."""
AFTER_S = 10.0
"""Processor time for what the loop does after a step: it may evaluate."""
_here = {"forked": False, "hangs": False}
"""Whether this process is a fork, and whether all forks of a trial have hung: no more of them follow then."""
CHOSEN = ChosenCountsTrial, ChosenStepsTrial
_WORDS = {
    ChosenCountsTrial: "where it counts to numbers that its code names",
    ChosenStepsTrial: "at steps that its code names",
    ManyBatchesTrial: "in many batches one after another",
    FreshTrial: "in a process that has computed nothing else",
    LossTrial: "whole and in parts, and at later steps",
    DoubleTrial: "in double precision",
    NumberTrial: "with other numbers where its code looks at one",
    ExtremesTrial: "with records that are far apart",
    AlikeTrial: "beside that of the first worker",
}
"""How the loss is tried, for people who wait."""


class ForkedTrial(Protocol):
    """What a fork tries: batches for the loop, and what they have shown, as JSON has it."""

    inputs: TrialInputs

    def batches(self) -> Generator[StepBatch, None, None]: ...

    def answer(self) -> dict[str, Any]: ...

    def accept(self, answer: dict[str, Any]) -> None: ...


def try_loop(trial: LossTrial, shown: ModelTraits, optimizer_step: OptimizerStep) -> Generator[StepBatch, None, None]:
    """The batches of `trial`, in a fork where there can be one; afterwards `trial.traits` is known.

    `shown`: the traits by the module types. No batches, if another worker of the job has tried the loop. Raises what
    `LossTrial.batches` raises.
    """
    trial.inputs = replace(trial.inputs, kept=(kept := ReadMemory()))
    trial.traits = load_traits(shown) or shown
    if trial.traits is not shown:
        records.compare_with_first(trial.traits.records, trial.inputs.reader)
        yield from _compare(trial, optimizer_step.settings)
        return
    applied.check_schedulers(optimizer_step.optimizer, optimizer_step.scheduler)
    if joined.needs_trial(optimizer_step.model, optimizer_step.optimizer, optimizer_step.scheduler):
        make = functools.partial(joined.copy_step, optimizer_step)
        expect_same_after_join(make, optimizer_step.model, trial.inputs.total_steps)
    found = None
    if can_fork(trial.inputs.model):
        fresh = FreshTrial(trial.inputs, places.list_caller_spaces)
        fresh.belong_to(trial)
        yield from try_again(fresh, optimizer_step.settings)
        found = yield from _in_fork(trial, optimizer_step.settings)
    if isinstance(found, TruelineError):
        raise found
    if found is None:
        trial.expect_same = None
        _leave_for_others(trial)
        yield from trial.batches()
    else:
        trial.accept(found)
        yield from try_again(steps := ChosenStepsTrial(trial, optimizer_step.settings), None)
        if steps.untried:
            events.emit("loop.untried", why=f"what it does at steps that it compares its own with: {steps.untried}")
        yield from try_again(many := ManyBatchesTrial(trial, places.list_caller_spaces, optimizer_step.settings), None)
        if not many.tries:
            events.emit("loop.untried", why="what it does in many batches: it ended, took too long, or its loss drifts")
        if wants_double(trial.inputs, trial.traits):
            yield from try_again(DoubleTrial(trial), optimizer_step.settings)
        if wants_numbers(trial.traits):
            yield from try_again(NumberTrial(trial, trial.traits.numbers), optimizer_step.settings)
        if wants_extremes(trial.inputs, trial.traits):
            yield from try_again(ExtremesTrial(trial, trial.traits.reduction), optimizer_step.settings)
    mine = trial.traits.reads
    sums = records.measure_records(trial.inputs.reader, records.choose_records(kept.read))
    trial.traits = settle_traits(replace(trial.traits, records=sums))
    records.expect_same_records(trial.traits.records, sums)
    if wants_comparing(mine, trial.traits.reads):
        yield from _compare(trial, optimizer_step.settings)


def _leave_for_others(trial: LossTrial) -> None:
    trial.alike = alike = AlikeTrial(trial, places.list_caller_spaces)
    alike.look()


def _compare(trial: LossTrial, settings: OptimizerSettings) -> Generator[StepBatch, None, None]:
    """The batches of a comparison with the first worker. Raises UsageError if the loss of this one is another."""
    if trial.traits.reads:
        forks = can_fork(trial.inputs.model)
        alike = AlikeTrial(trial, places.list_caller_spaces, trial.traits, changes=forks)
        yield from try_again(alike, settings)
        if forks and not alike.compared:  # the fork gave no answer
            yield from AlikeTrial(trial, places.list_caller_spaces, trial.traits, changes=False).batches()
        events.emit("loss.compared", forked=alike.compared)


def try_again(trial: ForkedTrial, settings: OptimizerSettings | None) -> Generator[StepBatch, None, None]:
    """As `try_loop`, for the records that `trial` names: of a step that differs from those that were tried. A fork that
    gives no answer leaves `trial` without one: a record may be damaged, which the step finds."""
    if not can_fork(trial.inputs.model):
        yield from trial.batches()
        return
    found = yield from _in_fork(trial, settings)
    if isinstance(found, TruelineError):
        raise found
    if found is not None:
        trial.accept(found)


def end_fork() -> None:
    """Ends this process if it is such a fork, which has left the loop."""
    if _here["forked"]:
        os._exit(0)


def can_fork(model: torch.nn.Module) -> bool:
    on_host = all(value.is_cpu for value in (*model.parameters(), *model.buffers()))
    alone = all(getattr(part, "works_in_forks", True) for part in model.modules())
    return hasattr(os, "fork") and on_host and alone and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _in_fork(
    trial: ForkedTrial, settings: OptimizerSettings | None
) -> Generator[StepBatch, None, dict[str, Any] | TruelineError | None]:
    if type(trial) in _WORDS and not (isinstance(trial, LossTrial) and trial.inputs.chosen is not None):
        note_trial(_WORDS[type(trial)])
    found, parent = None, os.getpid()
    for left in _count_forks():
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not (pid := _fork()):
            mine.close()
            yield from _rehearse(theirs, trial, settings, parent)
        theirs.close()
        try:
            with mine:
                found = _serve(mine, pid, trial, again=left > 0)
            break
        except TimeoutError:
            _here["hangs"] = not left
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if found is None and trial.inputs.chosen is None:
        events.emit("loss.tried_in_place", why="the fork that tried the loop gave no answer")
    return found


def _count_forks() -> range:
    """How many more there are after each, if it hangs."""
    return range(0 if _here["hangs"] else FORKS - 1, -1, -1)


def _rehearse(
    line: socket.socket, trial: ForkedTrial, settings: OptimizerSettings | None, parent: int
) -> Generator[StepBatch, None, None]:
    """In the fork: the batches. Does not return; if the loop drops this generator, the fork ends."""
    _here["forked"] = True
    try:
        first = isinstance(trial, LossTrial) and trial.inputs.chosen is None
        after = applied.AppliedTrial(trial, settings) if isinstance(trial, LossTrial) and first and settings else None
        if isinstance(trial, LossTrial) and first:
            _leave_for_others(trial)
        _begin_fork(parent)
        places.end_with_loop()
        trial.inputs = replace(trial.inputs, reader=ReaderClient(line))
        caught = (Exception,) if isinstance(trial, CHOSEN) else (UsageError, RecipeError)
        try:
            yield from trial.batches() if after is None else after.expect_one_rule(trial.batches())
            found = trial.answer()
        except caught as error:
            found = _encode(error)
        send(line, ANSWER, 0, json.dumps(found).encode())
        if "code" not in found and (after is not None or isinstance(trial, CHOSEN)):
            applied.spare_files()
            try:
                yield from _take_further(after or trial)
                found = {} if after is None or after.fault is None else _encode(after.fault)
            except Exception as error:  # noqa: BLE001  Trueline's own: those of the loop do not pass through here
                found = _encode(error)
            send(line, ANSWER, 0, json.dumps(found).encode())
    finally:
        os._exit(0)


def _take_further(trial: Any) -> Generator[StepBatch, None, None]:
    """Batches after the answer, up to the first fault: code of the loop may raise for what comes next."""
    if not isinstance(trial, applied.AppliedTrial):
        yield from trial.further()
        return
    for batch in trial.batches():
        if trial.fault is not None:
            return
        yield batch


def _begin_fork(parent: int) -> None:
    """Makes this process, a fork, silent, and end with its parent and without what that does at its end."""
    gc.freeze()  # destructors of the parent's objects may wait for threads, which a fork does not have
    atexit.register(os._exit, 0)
    end_with_parent(parent)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the fork ends
    torch.set_num_threads(1)


def expect_same_after_join(make: Callable[[], OptimizerStep], model: torch.nn.Module, total_steps: int) -> None:
    """Calls `joined.expect_same_after_join` in a fork, where there can be one, and raises what it raises: the trial
    changes no global and no file of an optimizer's, a schedule's or a hook's own code. `model`: of the step."""
    found = _ask_fork(functools.partial(_try_join, make, total_steps)) if can_fork(model) else None
    if found is None:
        found = _try_join(make, total_steps)
    _report(found, "optimizer.untried")


def expect_sums(validation: Validation, model: torch.nn.Module) -> None:
    """Calls `measured.expect_sums` in a fork, where there can be one, and raises what it raises."""

    def ask() -> dict[str, str]:
        try:
            with seeding.preserve_generators():
                return {"untried": measured.expect_sums(validation, model)}
        except UsageError as error:
            return _encode(error)

    found = _ask_fork(ask) if can_fork(model) else ask()
    _report({"untried": "it took too long"} if found is None else found, "evaluation.untried")


def _report(found: dict[str, str], event: str) -> None:
    if "code" in found:
        raise _make_error(found)
    if found["untried"]:
        events.emit(event, why=found["untried"])


def _try_join(make: Callable[[], OptimizerStep], total_steps: int) -> dict[str, str]:
    try:
        return {"untried": joined.expect_same_after_join(make, total_steps)}
    except TruelineError as error:
        return _encode(error)


def _ask_fork(ask: Callable[[], dict[str, str]]) -> dict[str, str] | None:
    """What `ask` returns in a fork whose files are its own; None if the fork ends or hangs without an answer."""
    parent = os.getpid()
    for left in _count_forks():
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not (pid := _fork()):
            try:
                mine.close()
                _begin_fork(parent)
                with private_files.keep_apart():
                    found = ask()
                send(theirs, ANSWER, 0, json.dumps(found).encode())
            finally:
                os._exit(0)
        theirs.close()
        try:
            with mine:
                return _receive_answer(mine, pid, None, most_s=AFTER_S)
        except TimeoutError:
            _here["hangs"] = not left
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return None


def _fork() -> int:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads that may hold locks
        return os.fork()


def _encode(error: Exception) -> dict[str, str]:
    if not isinstance(error, TruelineError):
        return {"untried": f"{type(error).__name__}: {error}"}
    return {"code": error.code, "message": error.message, "hint": error.hint}


def _serve(line: socket.socket, pid: int, trial: ForkedTrial, *, again: bool) -> dict[str, Any] | TruelineError | None:
    """Reads for the fork `pid` until it has its answers; None if it ends without the first one. Raises TimeoutError if
    it hangs, except after the first answer if no other fork follows (`again`)."""
    most_s = AFTER_S if isinstance(trial, (*CHOSEN, ManyBatchesTrial)) else math.inf
    first = _receive_answer(line, pid, trial.inputs, most_s=most_s)
    if first is None or "code" in first:
        return None if first is None else _make_error(first)
    if trial.inputs.chosen is not None and not isinstance(trial, CHOSEN):
        return first
    note_trial("with what follows after a step")
    try:
        second = _receive_answer(line, pid, trial.inputs, most_s=AFTER_S)
    except TimeoutError:
        if again:
            raise
        second = None
    if second is None and not isinstance(trial, CHOSEN):  # code may raise where a number is not finite
        second = {"untried": "no answer"}
    if second and "untried" in second:
        events.emit("loop.untried", why=f"what it does after a step: {second['untried']}")
    return _make_error(second) if second and "code" in second else first


def _make_error(found: dict[str, Any]) -> TruelineError:
    return find_error_class(found["code"], UsageError)(found["message"], hint=found["hint"])


def _receive_answer(
    line: socket.socket, pid: int, inputs: TrialInputs | None, *, most_s: float = math.inf
) -> dict[str, Any] | None:
    """`inputs`: what the fork reads, if it reads; `most_s`: of processor time, after which there is no answer. Raises
    TimeoutError if the fork hangs."""
    line.settimeout(LOOK_S)
    began = used = _used_s(pid)
    idle = 0.0
    while used < began + most_s:
        if idle >= HUNG_S:
            raise TimeoutError
        try:
            head, memory = receive(line)
        except TimeoutError:
            now, waits = _used_s(pid), psutil.Process(pid).status() == psutil.STATUS_SLEEPING  # else it gets no core
            idle, used = (idle + LOOK_S if now == used and waits else 0.0), now
            continue
        except OSError:
            return None
        if memory is None:
            return None
        idle = 0.0
        if head[0] == ANSWER:
            answer: dict[str, Any] = json.loads(memory[:])
            return answer
        assert inputs is not None
        inputs.on_read()
        answer_request(line, head, memory, inputs.reader, inputs.kept)
    return None


def _used_s(pid: int) -> float:
    return float(sum(psutil.Process(pid).cpu_times()[:2]))
