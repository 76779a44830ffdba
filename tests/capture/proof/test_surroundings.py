"""What a model reads of its process, machine or thread is in no program, whatever function tells it."""

from __future__ import annotations

import asyncio
import atexit
import enum
import functools
import gc
import json
import logging
import math
import operator
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import Unsteady, check_rare
from trueline.capture.proof.state.influence import ask
from trueline.capture.proof.surroundings.reading_log import ReadingLog, is_plain
from trueline.capture.proof.surroundings.replay import replay_elsewhere
from trueline.capture.proof.surroundings.rewritten import find_readers
from worlds import marks
from worlds.cases import few

LOCAL = threading.local()
LOCAL.scale = 3
MASK = os.umask
SETTINGS = json.loads('{"scale": 2}')


class Reads(nn.Module):
    """Multiplies by what a function returns."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        value = self.read()
        return x * (len(value) + 1 if isinstance(value, str) else value + 1)


class Decides(Reads):
    """Goes another way for a value that hardly ever comes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() if self.read() == 54_321 else x * 2


def find_unsteady(model: nn.Module) -> Unsteady | None:
    torch.manual_seed(0)
    return check_rare(EagerSession(model.eval(), torch.randn(3, 4)))


@functools.lru_cache
def read_once() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)  # once


def has_package() -> bool:
    try:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return False
    return True  # pragma: no cover - it is not installed


READERS: dict[str, Callable[[], Any]] = {
    "a mask of files": lambda: os.umask(0o22),
    "a function under another name": lambda: MASK(0o22),
    "a function that is looked up": lambda: getattr(os, "umask")(0o22),  # noqa: B009 - as a user hides it
    "a partial": functools.partial(os.getpriority, os.PRIO_PROCESS, 0),
    "a method of C": "salt".__hash__,
    "a hash that is called by its name": lambda: operator.methodcaller("__hash__")("salt") % 7,
    "a function that is given to another": lambda: max(map(hash, ["salt"])) % 7,
    "an address in a text": lambda: int(f"{object()}"[-5:-1], 16) % 9,
    "an attribute of Python": lambda: getattr(sys, "frozen", False),
    "a list of Python": lambda: len(sys.path),
    "an interval": sys.getswitchinterval,
    "the number of variables": lambda: len(os.environ),
    "the end of the process": atexit._ncallbacks,
    "a tracer of memory": tracemalloc.is_tracing,
    "a collector": lambda: gc.get_threshold()[0],
    "a loop of events": lambda: asyncio._get_running_loop() is None,
    "a handler of signals": lambda: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "what belongs to a thread": lambda: getattr(LOCAL, "scale", 1),
    "a folder": lambda: len(str(pathlib.Path.home())),
    "a flag of torch": torch.is_anomaly_enabled,
    "a backend of torch": lambda: torch.backends.cudnn.benchmark,
    "the name of a file": lambda: __name__,
    "the place of a file": lambda: len(__file__),
    "a package that may be there": has_package,
    "a cache": read_once,
    "a variable that a cache reads": functools.lru_cache(lambda: os.environ.get("NO_SUCH_VARIABLE", "a")),
    "a partial of a flag": functools.partial(torch.is_anomaly_enabled),
    "a precision of matrices": lambda: torch.backends.cuda.matmul.allow_tf32,
    "a number of the system": lambda: os.sysconf("SC_PHYS_PAGES") % 7,
    "a place of Python": lambda: len(sys.prefix),
    "a level of logging": lambda: len(logging.getLogger().handlers),
}


@pytest.mark.jobs
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_value_of_the_process_machine_or_thread_that_changes_the_answer_is_refused(read: Callable[[], Any]) -> None:
    found = find_unsteady(Reads(read))
    assert found is not None
    assert "something beside its inputs" in found.why
    assert "differently" in found.why


@pytest.mark.jobs
def test_the_refusal_names_what_is_read_and_its_line() -> None:
    found = find_unsteady(Reads(read_once))
    assert found is not None
    assert "(posix.getpriority): it answers differently in another process, machine or thread" in found.why
    assert marks.place_of(__file__, "once") in str(found.place)


@pytest.mark.parametrize(
    "read", few([lambda: os.umask(0o22), sys.getswitchinterval, threading.stack_size], 1, pytest.mark.jobs)
)
def test_a_decision_that_such_a_value_hardly_ever_takes_is_refused(read: Callable[[], Any]) -> None:
    assert find_unsteady(Decides(read)) is not None


@pytest.mark.jobs
@pytest.mark.parametrize(
    "read",
    [
        lambda: math.sqrt(64),
        lambda: SETTINGS["scale"],
        lambda: len(os.path.join("a", "b")),
        lambda: random.Random(3).random(),
        lambda: hash(7) % 5,
        lambda: {id(LOCAL): 2}[id(LOCAL)],
        lambda: torch.compiler.is_compiling(),
        lambda: sys.maxsize > 2**32,
        functools.lru_cache(lambda: sum(range(5))),
    ],
)  # fmt: skip
def test_a_value_that_is_the_same_in_every_process_is_no_reason_to_refuse(read: Callable[[], Any]) -> None:
    assert find_unsteady(Reads(read)) is None


def test_a_model_that_starts_a_program_on_each_call_is_refused() -> None:
    found = find_unsteady(Reads(lambda: subprocess.run([sys.executable, "-c", ""], check=False).returncode))
    assert found is not None
    assert "(another program): it asks that on each call" in found.why


@pytest.mark.jobs
def test_small_numbers_that_this_process_flushes_to_zero_are_those_of_a_new_one() -> None:
    torch.set_flush_denormal(True)
    try:
        assert find_unsteady(Reads(lambda: float(torch.tensor(1e-30) * 1e-10 > 0))) is not None
    finally:
        torch.set_flush_denormal(False)
    assert find_unsteady(Reads(lambda: float(torch.tensor(1e-30) * 1e-10 > 0))) is None


def test_what_is_read_and_decides_nothing_is_no_reason_to_refuse() -> None:
    class Counts(Reads):
        def forward(self, x: Tensor) -> Tensor:
            self.threads = self.read()
            return x * 2

    assert find_unsteady(Counts(sys.getswitchinterval)) is None


def test_steps_are_replayed_in_their_order_and_change_nothing_outside(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "written"

    def named(module: str, name: str, *args: Any) -> tuple[Any, ...]:
        return "call", ("named", module, name), [("plain", one) for one in args], {}

    steps = [named("builtins", "iter", (4, 5)), *[("call", ("named", "builtins", "next"), [("made", 0)], {})] * 2]
    steps += [named("builtins", "open", str(file), "w"), named("os", "mkdir", str(file)), named("posix", "umask", 18)]
    steps += [named("subprocess", "run", ["touch", str(file)])]
    found = replay_elsewhere(steps)
    assert found[1:3] == [(("value", 4),) * 2, (("value", 5),) * 2]
    assert [like[0] for like, _ in (found[3], found[4], found[6])] == ["raised"] * 3
    assert found[5][0] != found[5][1]
    assert not file.exists()


def test_functions_run_as_before_with_hooks_in_them() -> None:
    class Base(nn.Module):
        def forward(self, x: Tensor, *, more: int = 1) -> Tensor:
            return x + more

    class Own(Base):
        __hidden = 2

        def forward(self, x: Tensor, *, more: int = 1) -> Tensor:
            found = super().forward(x, more=more)
            match [more, "a"]:
                case [int(), str()]:
                    found = found * self.__hidden
            return found + len(f"{more:>3}") + sum(one for one in locals() and (1, 2))

    eager = EagerSession(Own().eval(), torch.zeros(2, 2))
    question = ask(eager, eager.example)
    assert question is not None
    readers = find_readers(question.way, eager.module)
    log = ReadingLog()
    from trueline.capture.proof.state.literal_sets import running_changed

    with running_changed(readers, log.hooks()):
        assert eager.run(eager.example)["output"].tolist() == question.answer["output"].tolist()
    assert len(readers) == 2
    assert all(is_plain(one) for values in log.values.values() for one in values)


OLD_NAMES = {"ONE": "SINGLE"}


class RenamesMeta(enum.EnumMeta):
    """As a library's enumeration that warns of names that have changed."""

    def __getattribute__(cls, name: str) -> Any:
        if name in OLD_NAMES:
            warnings.warn(f"'{name}' is deprecated. Use '{OLD_NAMES[name]}' instead.", DeprecationWarning, stacklevel=2)
        return super().__getattribute__(name)


class Scales(enum.IntEnum, metaclass=RenamesMeta):
    SINGLE = 1
    DOUBLE = 2
    ONE = 1


class Watches:
    """Its attributes are looked up by Python code."""

    scale = 2

    def __getattribute__(self, name: str) -> Any:
        if name in OLD_NAMES:
            raise AttributeError(name)
        return super().__getattribute__(name)


WATCHES = Watches()


@pytest.mark.jobs
@pytest.mark.filterwarnings("ignore:'ONE' is deprecated")
@pytest.mark.parametrize("read", [lambda: int(Scales.DOUBLE), lambda: WATCHES.scale], ids=["its class's", "its own"])
def test_attributes_that_python_code_looks_up_are_no_state_and_end_no_capture(read: Callable[[], Any]) -> None:
    """The code of the look-up runs where what it belongs to is described."""
    assert check_rare(EagerSession(Reads(read).eval(), torch.ones(2, 3))) is None
