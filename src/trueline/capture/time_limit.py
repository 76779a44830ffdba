"""The time that a capture may take, and what becomes of a stage that does not end in it.

A stage (an export, a proof) runs in a thread of its own. When its time is over, TimeUp is raised in that thread; a
thread that is inside an operator and does not come back is left behind. The caller has the time and the user's line in
either case, and continues with what is proven. While a stage takes long, an event says what runs and at which line.

What a thread that is left behind had switched on for the whole process (torch's flags of an export, a silenced stderr)
is put back as it was, and no further stage begins beside it: its patches may still be in force.

CPython delivers an exception to another thread between two instructions (PyThreadState_SetAsyncExc), so the wait for
`sleep` or for a long operator cannot be cut short, only left.
"""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from trueline import events
from trueline.capture.model import code_paths
from trueline.errors import CaptureError, UsageError

Result = TypeVar("Result")

USUAL_MINUTES = 30.0
"""Of a capture without a limit of its own, beside what its weights add."""
BYTES_A_MINUTE = 50e6
"""Weights of a model add to the usual limit a minute for this many bytes: 100 million parameters are proven in one."""
EXPORT_SHARE = 0.6
"""Of the time that is left, for torch.export: TorchScript, which does without, is tried in the rest."""
QUIET_S = 10.0
"""Seconds of a stage before the first event that says what it does; then twice as many each time."""
GRACE_S = 5.0
"""Seconds that an interrupted stage has to clean up after itself before its thread is left behind."""
_NAME = "trueline: "
_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
"""Of torch.compiler."""
_STACK_BYTES = 64 << 20
"""Of a stage's thread, at least: sympy and copy.deepcopy recurse in C."""


class TimeUp(BaseException):
    """Raised in a stage's thread when its time is over; no handler of `Exception` swallows it."""


class OutOfTime(CaptureError):
    """A stage that did not end, or did not begin, within the limit; `place` is where the user's code was."""

    code = "out_of_time"

    def __init__(self, message: str, *, hint: str = "", place: code_paths.SourceLine | None = None) -> None:
        super().__init__(message, hint=hint)
        self.place = place

    def with_line(self) -> OutOfTime:
        """The same with the line in its message, for an error that ends the capture."""
        at = f"; it was at {self.place}" if self.place else ""
        return OutOfTime(self.message + at, hint=self.hint, place=self.place)


@dataclass(slots=True)
class TimeLimit:
    """Minutes for a whole capture. Raises UsageError for a number that is not above 0."""

    minutes: float | None = None
    """None: the usual ones."""
    _started: float = field(default_factory=time.monotonic)
    _more: float = 0.0
    """Minutes for the model's weights."""
    _left: list[threading.Thread] = field(default_factory=list)
    """Threads of stages that did not come back."""

    def __post_init__(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise UsageError(f"a time limit of {self.minutes:g} minutes is none", hint="name minutes above 0")

    def allow_weights(self, num_bytes: int) -> None:
        """Adds to the usual limit what a model of that size takes."""
        self._more = num_bytes / BYTES_A_MINUTE

    @property
    def total(self) -> float:
        """Minutes in all."""
        return USUAL_MINUTES + self._more if self.minutes is None else self.minutes

    @property
    def left_s(self) -> float:
        return self._started + 60 * self.total - time.monotonic()

    def run(self, what: str, stage: Callable[[], Result], *, share: float = 1.0) -> Result:
        """The result of `stage`, within `share` of the time that is left. Raises what `stage` raises, and OutOfTime,
        with the line of the user's code that ran."""
        allowed = share * self.left_s
        if allowed <= 0:
            raise self._out_of_time(f"not tried for want of time: {what}")
        stuck = next((thread for thread in self._left if thread.is_alive()), None)
        if stuck is not None:
            why = f"{what}, since {stuck.name.removeprefix(_NAME)} does not end"
            raise self._out_of_time(f"not tried for want of time: {why}", _users_line(stuck))
        outcome: list[Result | BaseException] = []
        put_back = _keep_globals()
        context = contextvars.copy_context()

        def work() -> None:
            try:
                outcome.append(context.run(stage))
            except BaseException as error:  # noqa: BLE001 - the boundary of a thread: its caller raises it
                outcome.append(error)

        started = time.monotonic()
        thread = _start(work, f"{_NAME}{what}")
        try:
            place = _wait(thread, what, allowed)
        except BaseException:  # Ctrl-C: the stage cleans up, if it can, before the caller does
            self._stop(thread, put_back)
            raise
        if thread.is_alive():
            self._stop(thread, put_back)
            spent = time.monotonic() - started
            raise self._out_of_time(f"not tried for want of time: {what} did not end in {spent:.0f} s", place)
        result = outcome[0]
        if isinstance(result, BaseException):
            raise result
        return result

    def wait_for_threads(self) -> None:
        """Waits, a grace period at most, for stages that were left behind and may still write files."""
        deadline = time.monotonic() + GRACE_S
        for thread in self._left:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _stop(self, thread: threading.Thread, put_back: Callable[[], None]) -> None:
        _interrupt(thread)
        if thread.is_alive():
            self._left.append(thread)
            put_back()

    def _out_of_time(self, why: str, place: code_paths.SourceLine | None = None) -> OutOfTime:
        more = f"allow it more: --minutes {max(1.0, 4 * self.total):.0f}"
        return OutOfTime(f"{why} (the limit is {self.total:.3g} minutes in all)", hint=more, place=place)


def _keep_globals() -> Callable[[], None]:
    """Puts back, when it is called, what an export switches on for the whole process."""
    out, err = sys.stdout, sys.stderr
    compiler = sys.modules.get("torch.compiler")
    flags = {name: getattr(compiler, name) for name in _FLAGS if hasattr(compiler, name)}

    def put_back() -> None:
        sys.stdout, sys.stderr = out, err
        for name, value in flags.items():
            setattr(compiler, name, value)

    return put_back


def _start(work: Callable[[], None], name: str) -> threading.Thread:
    before = threading.stack_size()
    threading.stack_size(max(before, _STACK_BYTES))
    try:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _wait(thread: threading.Thread, what: str, seconds: float) -> code_paths.SourceLine | None:
    """Until `thread` ends, or for `seconds`: then the line of the user's code that runs, if one does."""
    started, quiet = time.monotonic(), QUIET_S
    while True:
        spent = time.monotonic() - started
        thread.join(max(0.0, min(quiet, seconds) - spent))
        spent = time.monotonic() - started
        if not thread.is_alive():
            return None
        place = _users_line(thread)
        if spent >= seconds:
            return place
        if spent >= quiet:
            quiet *= 2
            events.emit("stage.runs", what=what, seconds=round(spent), at=f", at {place}" if place else "")


def _users_line(thread: threading.Thread) -> code_paths.SourceLine | None:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if code_paths.is_users(frame.f_code.co_filename):
            return code_paths.line_at(frame)
        frame = frame.f_back
    return None


def _interrupt(thread: threading.Thread) -> None:
    """Raises TimeUp in `thread`, and waits for its end for a grace period."""
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeUp))
        thread.join(GRACE_S)
