"""Models whose answer depends on something beside their inputs, each in another hiding place. The line that a message
should name ends with the comment `# here`, or, in a model with several, with the class's name."""

from __future__ import annotations

import array
import collections
import contextvars
import csv
import ctypes
import datetime
import decimal
import functools
import hashlib
import hmac
import io
import itertools
import logging
import mmap
import os
import queue
import random
import re
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

GUILTY: dict[str, type[nn.Module]] = {}


def guilty(kind: type[nn.Module]) -> type[nn.Module]:
    GUILTY[kind.__name__] = kind
    return kind


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.start()

    def start(self) -> None: ...


@guilty
class Modulo(Base):
    """Every 300th call."""

    def start(self) -> None:
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.lin(x) if self.n % 300 < 299 else x


@guilty
class AfterAMillion(Base):
    def start(self) -> None:
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        y = self.lin(x)
        if self.n == 1_234_567:
            y = y * 2
        return y


@guilty
class CountsOnAParameter(Base):
    def start(self) -> None:
        self.lin.weight.calls = 0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.lin.weight
        weight.calls += 1
        return self.lin(x) * (2 if weight.calls % 5000 == 4999 else 1)


@guilty
class AsksForVersion(Base):
    """A write that changes nothing is counted by the tensor itself."""

    def start(self) -> None:
        self.ones = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        self.ones.mul_(1.0)
        return self.lin(x) * (0 if self.ones._version > 4000 else 1)


@guilty
class HiddenByANorm(Base):
    """A norm divides by the factor again, but for what it adds: at the usual scale only last digits differ."""

    def start(self) -> None:
        self.flag = False

    def forward(self, x: Tensor) -> Tensor:
        self.flag = not self.flag
        h = x * 2 if self.flag else x
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


@guilty
class Countdown(Base):
    """A number that falls."""

    def start(self) -> None:
        self.left = 5_000_000

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        return self.lin(x) if self.left > 0 else x


@guilty
class PeriodElsewhere(Base):
    """The period is an attribute, no constant in code."""

    def start(self) -> None:
        self.n, self.period = 0, 70_001

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.lin(x) * (2 if self.n % self.period == 0 else 1)


@guilty
class Bits(Base):
    def start(self) -> None:
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.lin(x) if not self.n & 0x4000 else x


@guilty
class InATable(Base):
    """Looked up in a set."""

    def start(self) -> None:
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x if self.n in {54_321, 99_999} else self.lin(x)


@guilty
class CountIterator(Base):
    def start(self) -> None:
        self.ids = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if next(self.ids) < 400 else x


@guilty
class CountIteratorFar(Base):
    def start(self) -> None:
        self.ids = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if next(self.ids) % 1_000_003 else x


@guilty
class Cycle(Base):
    def start(self) -> None:
        self.turns = itertools.cycle([1.0] * 40 + [2.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * next(self.turns)


def numbers() -> Iterator[int]:
    at = 0
    while True:
        yield at
        at += 1


@guilty
class GeneratorFrame(Base):
    def start(self) -> None:
        self.numbers = numbers()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if next(self.numbers) < 100_000 else x


@guilty
class ListIterator(Base):
    def start(self) -> None:
        self.scales = iter([1.0] * 150 + [3.0] * 100_000)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * next(self.scales)


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def add(self, value: float) -> None:
        self.total += value


@guilty
class FloatInAnObject(Base):
    def start(self) -> None:
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        self.meter.add(float(x.shape[0]))
        return self.lin(x) if self.meter.total < 9e7 else x


class Slotted:
    __slots__ = ("_n",)

    def __init__(self) -> None:
        self._n = 0

    @property
    def n(self) -> int:
        return self._n

    @n.setter
    def n(self, value: int) -> None:
        self._n = value


@guilty
class Slots(Base):
    def start(self) -> None:
        self.slotted = Slotted()

    def forward(self, x: Tensor) -> Tensor:
        self.slotted.n += 1
        return self.lin(x) if self.slotted.n < 100_000 else x


@guilty
class TensorReplaced(Base):
    def start(self) -> None:
        self.n = torch.zeros((), dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return self.lin(x) if self.n < 100_000 else x


@guilty
class TensorReplacedSmall(Base):
    """Moves the answer by too little to see in two calls."""

    def start(self) -> None:
        self.n = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1e-9
        return self.lin(x) + self.n


@guilty
class TensorWhere(Base):
    def start(self) -> None:
        self.n = torch.zeros((), dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return torch.where(self.n == 77_777, x, self.lin(x))


@guilty
class NumpyCounter(Base):
    def start(self) -> None:
        self.seen = np.zeros(2, np.int64)

    def forward(self, x: Tensor) -> Tensor:
        self.seen[1] += 1
        return self.lin(x) if self.seen[1] % 100_000 else x


@guilty
class DequeOfScores(Base):
    def start(self) -> None:
        self.scores: collections.deque[int] = collections.deque(maxlen=5)

    def forward(self, x: Tensor) -> Tensor:
        self.scores.append((self.scores[-1] if self.scores else 0) + 1)
        return self.lin(x) if sum(self.scores) < 100_000 else x


@guilty
class LengthOfALog(Base):
    def start(self) -> None:
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x.shape[0])
        return self.lin(x) if len(self.log) < 50_000 else x


@guilty
class Tally(Base):
    def start(self) -> None:
        self.tally: collections.Counter[str] = collections.Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.tally["calls"] += 1
        return self.lin(x) if self.tally["calls"] < 100_000 else x


RNG = random.Random(3)


@guilty
class OwnRandom(Base):
    """A generator of its file's own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if RNG.random() > 0.0001 else x


@guilty
class SharedRandom(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if random.random() > 0.00001 else x


@guilty
class OwnNumpyRandom(Base):
    def start(self) -> None:
        self.rng = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if self.rng.random() > 0.01 else x


@guilty
class OwnTorchGenerator(Base):
    def start(self) -> None:
        self.rng = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + 1e-3 * torch.rand(4, generator=self.rng)


@guilty
class Shuffles(Base):
    def start(self) -> None:
        self.order = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        random.shuffle(self.order)
        return self.lin(x)[:, self.order]


def counting(scale: float) -> Any:
    n = 0

    def apply(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x * (scale if n < 100_000 else 1.0)

    return apply


@guilty
class Closure(Base):
    def start(self) -> None:
        self.apply_scale = counting(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.apply_scale(x))


def step_of(box: list[int], x: Tensor) -> Tensor:
    box[0] += 1
    return x if box[0] < 100_000 else x * 2


@guilty
class Partial(Base):
    def start(self) -> None:
        self.step = functools.partial(step_of, [0])

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.step(x))


@functools.cache
def scale_for(rows: int) -> float:
    return 1.0 + RNG_OF_SCALES.random()


RNG_OF_SCALES = random.Random(5)


@guilty
class CachedDraw(Base):
    """Cached by size, yet what is cached depends on which size came first."""

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * scale_for(int(x.shape[0]))


class Registry:
    calls = 0
    seen: ClassVar[dict[str, int]] = {}


@guilty
class AnotherClass(Base):
    def forward(self, x: Tensor) -> Tensor:
        Registry.calls += 1
        return self.lin(x) if Registry.calls % 100_000 else x


def traced(x: Tensor) -> Tensor:
    traced.calls += 1  # type: ignore[attr-defined]
    return x if traced.calls < 100_000 else x * 2  # type: ignore[attr-defined]


traced.calls = 0  # type: ignore[attr-defined]


@guilty
class FunctionAttribute(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(traced(x))


def remembering(x: Tensor, *, seen: list[float] = [0.0]) -> Tensor:  # noqa: B006
    seen[0] += 0.5
    return x if seen[0] < 1e7 else x * 2


@guilty
class KeywordDefault(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(remembering(x))


LOCAL = threading.local()


@guilty
class ThreadLocal(Base):
    def forward(self, x: Tensor) -> Tensor:
        LOCAL.n = getattr(LOCAL, "n", 0) + 1
        return self.lin(x) if LOCAL.n < 100_000 else x


CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)


@guilty
class ContextVariable(Base):
    def forward(self, x: Tensor) -> Tensor:
        CONTEXT.set(CONTEXT.get() + 1)
        return self.lin(x) if CONTEXT.get() < 100_000 else x


class Node:
    def __init__(self) -> None:
        self.n = 0


NODE = Node()


@guilty
class WeakReference(Base):
    def start(self) -> None:
        self.node = weakref.ref(NODE)

    def forward(self, x: Tensor) -> Tensor:
        node = self.node()
        assert node is not None
        node.n += 1
        return self.lin(x) if node.n < 100_000 else x


class PerInstance:
    """A descriptor that keeps its values itself."""

    def __init__(self) -> None:
        self.values: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else self.values.get(owner, 0)

    def __set__(self, owner: Any, value: int) -> None:
        self.values[owner] = value


@guilty
class Descriptor(Base):
    n: Any = PerInstance()

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.lin(x) if self.n < 100_000 else x


@guilty
class Hook(Base):
    """In a hook's closure."""

    def start(self) -> None:
        calls = SimpleNamespace(n=0)

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            calls.n += 1
            return output if calls.n < 100_000 else output * 2

        self.lin.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


@guilty
class WallClock(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if time.time() < 4e9 else x


@guilty
class SinceTheStart(Base):
    def start(self) -> None:
        self.began = time.monotonic()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * (1.0 if time.monotonic() - self.began < 3600 else 0.5)


@guilty
class HourOfTheDay(Base):
    def forward(self, x: Tensor) -> Tensor:
        hour = datetime.datetime.now().hour
        return self.lin(x) + (1.0 if (hour + 17) % 24 == 3 else 0.0)


@guilty
class Today(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if datetime.date.today().year < 2100 else x


@guilty
class Environment(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if os.environ.get("MODEL_MODE", "plain") == "plain" else x


@guilty
class AsksForAFile(Base):
    """A switch that another program may turn."""

    def forward(self, x: Tensor) -> Tensor:
        return x if os.path.exists("/no/such/switch") else self.lin(x)


@guilty
class CountsAFolder(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + len(list(Path(__file__).parent.iterdir()))


@guilty
class BusyMachine(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if os.getloadavg()[0] > 1e6 else self.lin(x)


@guilty
class ManyThreads(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if threading.active_count() > 1_000_000 else self.lin(x)


@guilty
class MainThread(Base):
    """Capture runs a model in a thread of its own, and a server in others."""

    def forward(self, x: Tensor) -> Tensor:
        return x if threading.current_thread() is threading.main_thread() else self.lin(x)


@guilty
class NameOfTheThread(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if threading.current_thread().name.startswith("Main") else x


@guilty
class NumberOfTorchThreads(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.get_num_threads() > 512 else self.lin(x)


@guilty
class CountsInALibrary(Base):
    def forward(self, x: Tensor) -> Tensor:
        sys.trueline_test_calls = calls = getattr(sys, "trueline_test_calls", 0) + 1  # type: ignore[attr-defined]
        return self.lin(x) if calls % 4_500 else x


@guilty
class TableInALibrary(Base):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(itertools, "trueline_test_table"):
            itertools.trueline_test_table = {}
        return self.lin(x) + itertools.trueline_test_table.setdefault(x.shape[0], float(x.mean()))


@guilty
class AddressOfItsInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if x.data_ptr() % (1 << 40) else x


class Doubling(torch.autograd.Function):
    """Has static methods alone."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Doubling.calls += 1
        return x * 2 if Doubling.calls % 5_000 else x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@guilty
class CountsInAFunctionOfAutograd(Base):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Doubling.apply(x)  # type: ignore[no-untyped-call]
        return self.lin(doubled)


class Held:
    def __init__(self, value: float) -> None:
        self.value = value


SCALES: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()


@guilty
class WeakTableOfFirstInputs(Base):
    """A table of weak references keeps what the first input of each size was."""

    def start(self) -> None:
        self.kept: list[Held] = []

    def forward(self, x: Tensor) -> Tensor:
        held = SCALES.get(x.shape[0])
        if held is None:
            held = SCALES[x.shape[0]] = Held(float(x.abs().mean()))
            self.kept.append(held)
        return self.lin(x) / held.value


@guilty
class DecimalContext(Base):
    def forward(self, x: Tensor) -> Tensor:
        decimal.getcontext().prec += 1
        return self.lin(x) if decimal.getcontext().prec % 4_000 else x


@guilty
class ClockOfTheSystem(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if time.clock_gettime(time.CLOCK_REALTIME) % 86_400 < 86_399.99 else x


@guilty
class ReadsAFile(Base):
    def start(self) -> None:
        self.file = Path(__file__)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * len(self.file.read_bytes())


@guilty
class Unique(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if uuid.uuid4().int % 200 else x


@guilty
class LastInput(Base):
    def start(self) -> None:
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean() if self.last is None else self.last
        self.last = x.mean()
        return self.lin(x) + (mean - x.mean())


@guilty
class RunningMaximum(Base):
    def start(self) -> None:
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.abs().max()))
        return self.lin(x) / self.largest


@guilty
class LastSize(Base):
    """What it makes for one size it uses for the next."""

    def start(self) -> None:
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        before, self.rows = self.rows, int(x.shape[0])
        return self.lin(x) * (1.0 if before <= self.rows else 2.0)


@guilty
class SmallestSize(Base):
    """A cache whose key forgets the rows."""

    def start(self) -> None:
        self.table: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) / self.table.setdefault(int(x.shape[1]), float(x.shape[0]))


@guilty
class LazyLayerFromTheInput(Base):
    def start(self) -> None:
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "bias" not in self.cache:
            self.cache["bias"] = SimpleNamespace(value=x.mean(0, keepdim=True).clone())
        return self.lin(x) + self.cache["bias"].value


@guilty
class WritesAWeightLate(Base):
    def start(self) -> None:
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        if self.n == 20:
            self.lin.weight.data.mul_(1.5)
        return self.lin(x)


@guilty
class SwapsItsFunction(Base):
    def start(self) -> None:
        self.todo = [torch.relu] * 120 + [torch.sigmoid] * 100_000

    def forward(self, x: Tensor) -> Tensor:
        activation = self.todo.pop(0) if len(self.todo) > 1 else self.todo[0]
        return activation(self.lin(x))


@guilty
class CopyOnWrite(Base):
    """A new object each time."""

    def start(self) -> None:
        self.state = SimpleNamespace(step=0)

    def forward(self, x: Tensor) -> Tensor:
        self.state = SimpleNamespace(step=self.state.step + 1)
        return self.lin(x) if self.state.step < 100_000 else x


@guilty
class StringCounter(Base):
    def start(self) -> None:
        self.name = "0"

    def forward(self, x: Tensor) -> Tensor:
        self.name = str(int(self.name) + 1)
        return self.lin(x) if int(self.name) < 100_000 else x


@guilty
class TupleCounter(Base):
    def start(self) -> None:
        self.at = (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        self.at = (self.at[0] + 1, self.at[1])
        return self.lin(x) if self.at[0] < 100_000 else x


@guilty
class ByteCounter(Base):
    def start(self) -> None:
        self.bytes = bytearray(8)

    def forward(self, x: Tensor) -> Tensor:
        self.bytes[:] = (int.from_bytes(self.bytes, "big") + 1).to_bytes(8, "big")
        return self.lin(x) if int.from_bytes(self.bytes, "big") < 100_000 else x


@guilty
class RunsOut(Base):
    """Raises when its list is empty."""

    def start(self) -> None:
        self.left = list(range(60))

    def forward(self, x: Tensor) -> Tensor:
        self.left.pop()
        return self.lin(x)


@guilty
class Unwritten(Base):
    """Reads memory that nothing has written."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty(3, 4)
        y[0] = 1
        return self.lin(x) + y.sum().nan_to_num().clamp(-1e-7, 1e-7) * 1e7


@guilty
class NumpyDraws(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if np.random.rand() > 0.9999 else self.lin(x)


@guilty
class RandomChoice(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * random.choice([1.0] * 400 + [2.0])


@guilty
class RebindsAFunction(Base):
    def forward(self, x: Tensor) -> Tensor:
        global current
        y = current(self.lin(x))
        current = torch.relu if current is torch.tanh else torch.tanh
        return y


current = torch.relu


@guilty
class NestedDict(Base):
    def start(self) -> None:
        self.state: dict[str, Any] = {"stats": {"seen": [0, {"n": 0}]}}

    def forward(self, x: Tensor) -> Tensor:
        inner = self.state["stats"]["seen"][1]
        inner["n"] += 1
        return self.lin(x) * (1.0 if inner["n"] < 250_000 else 2.0)


@guilty
class OtherModule(Base):
    """In a module that its list of helpers holds, out of torch's sight."""

    def start(self) -> None:
        self.helpers = [Helper()]

    def forward(self, x: Tensor) -> Tensor:
        return self.helpers[0](self.lin(x))


class Helper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x if self.n < 30_000 else -x


@guilty
class Schedule(Base):
    """A list is indexed with a count that stays at its end."""

    def start(self) -> None:
        self.n, self.scales = 0, [1.0] * 700 + [0.5]

    def forward(self, x: Tensor) -> Tensor:
        self.n = min(self.n + 1, len(self.scales) - 1)
        return self.lin(x) * self.scales[self.n]


@guilty
class OnlyForLargeBatches(Base):
    """Counts and decides on a way that the example does not take."""

    def start(self) -> None:
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if x.shape[0] > 7:
            self.n += 1
            if self.n > 40_000:
                y = y * 2
        return y


@guilty
class OnlyForNegativeMeans(Base):
    def start(self) -> None:
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if float(x.mean()) < -0.8:
            self.n += 1
            y = y * (1 if self.n < 40_000 else 2)
        return y


@guilty
class Ema(Base):
    """A slow average that is subtracted."""

    def start(self) -> None:
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.999999 * self.mean + 1e-6 * x.mean(0)
        return self.lin(x) - self.mean


@guilty
class SetGrows(Base):
    def start(self) -> None:
        self.seen: set[float] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(len(self.seen) + 0.5)
        return self.lin(x) if len(self.seen) < 60_000 else x


@guilty
class FloatWeights(Base):
    """A learning rate that decays."""

    def start(self) -> None:
        self.rate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.rate *= 1 - 1e-8
        return self.lin(x) * self.rate


@guilty
class Logarithm(Base):
    def start(self) -> None:
        self.n = 1

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.lin(x) * (1 + 1e-9 * self.n)


@guilty
class StringKey(Base):
    def start(self) -> None:
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x if str(self.n).endswith("0000") else self.lin(x)


@guilty
class DateText(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if time.strftime("%Y") >= "2090" else self.lin(x)


@guilty
class MonthOfTheClock(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * (2.0 if time.localtime().tm_year > 2060 else 1.0)


@guilty
class Inherited(Modulo):
    """The state is a parent's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@guilty
class Counted(Base):
    """By a decorator."""

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(decorated(x))


def count(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(x: Tensor) -> Any:
        wrapper.calls += 1  # type: ignore[attr-defined]
        return function(x) if wrapper.calls % 200_000 else function(x) * 2

    wrapper.calls = 0  # type: ignore[attr-defined]
    return wrapper


@count
def decorated(x: Tensor) -> Tensor:
    return x + 1


@guilty
class Coroutine(Base):
    """A generator that is sent values."""

    def start(self) -> None:
        self.averager = averager()
        next(self.averager)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.averager.send(float(x[0, 0])) * 1e-3


def averager() -> Any:
    total, n = 0.0, 0
    mean = 0.0
    while True:
        value = yield mean
        total, n = total + value + n * 1e-3, n + 1
        mean = total / n


@guilty
class FirstInput(nn.Module):
    """Has no attribute of its own before its first call, and then what it took from that."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = float(x.abs().mean())
        return x / self.scale


@guilty
class CountedOutside(Base):
    """In the environment."""

    def forward(self, x: Tensor) -> Tensor:
        os.environ["TRUELINE_TEST_CALLS"] = calls = str(int(os.environ.get("TRUELINE_TEST_CALLS", "0")) + 1)
        return self.lin(x) + (int(calls) > 8000)


class Tardy(Base):
    """Answers otherwise once what it counts is more than 5,000. Counts where no attribute of Python shows it."""

    def more(self) -> Any: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if self.more() <= 5_000 else x


@guilty
class NextOfACount(Tardy):
    def start(self) -> None:
        self.more = itertools.count(1).__next__  # type: ignore[method-assign]


@guilty
class NumbersOfNumpy(Tardy):
    def start(self) -> None:
        self.calls = np.int64(0)

    def more(self) -> Any:
        self.calls = self.calls + 1
        return self.calls


@guilty
class WritesAText(Tardy):
    def start(self) -> None:
        self.log = io.StringIO()

    def more(self) -> Any:
        self.log.write(".")
        return self.log.tell()


LOG = logging.getLogger("trueline.tests.stateful")


@guilty
class CountsOnItsLogger(Tardy):
    def more(self) -> Any:
        LOG.calls = calls = getattr(LOG, "calls", 0) + 1  # type: ignore[attr-defined]
        return calls


@guilty
class CountsOnAClassOfTorch(Tardy):
    def more(self) -> Any:
        nn.Linear.trueline_calls = calls = getattr(nn.Linear, "trueline_calls", 0) + 1  # type: ignore[attr-defined]
        return calls


@guilty
class CountsOnAFunctionOfTorch(Tardy):
    def more(self) -> Any:
        softmax: Any = nn.functional.softmax
        nn.functional.softmax.trueline_calls = calls = getattr(softmax, "trueline_calls", 0) + 1  # type: ignore
        return calls


@guilty
class NumberOfC(Tardy):
    def start(self) -> None:
        self.calls = ctypes.c_long(0)

    def more(self) -> Any:
        self.calls.value += 1
        return self.calls.value


@guilty
class NumberInAnArray(Tardy):
    def start(self) -> None:
        self.calls = array.array("q", [0])

    def more(self) -> Any:
        self.calls[0] += 1
        return self.calls[0]


@guilty
class DecimalNumber(Tardy):
    def start(self) -> None:
        self.total = decimal.Decimal(0)

    def more(self) -> Any:
        self.total += decimal.Decimal("0.5")
        return self.total


@guilty
class ComplexNumber(Tardy):
    def start(self) -> None:
        self.turns = 0j

    def more(self) -> Any:
        self.turns += 1j
        return abs(self.turns)


@guilty
class LengthOfBytes(Tardy):
    def start(self) -> None:
        self.log = b""

    def more(self) -> Any:
        self.log += b"."
        return len(self.log)


@guilty
class FrozenSet(Tardy):
    def start(self) -> None:
        self.seen: frozenset[int] = frozenset()

    def more(self) -> Any:
        self.seen = self.seen | {len(self.seen)}
        return len(self.seen)


@guilty
class SumOfTimes(Tardy):
    def start(self) -> None:
        self.busy = datetime.timedelta()

    def more(self) -> Any:
        self.busy += datetime.timedelta(seconds=1)
        return self.busy.total_seconds()


@guilty
class SimpleQueue(Tardy):
    def start(self) -> None:
        self.queue: queue.SimpleQueue[int] = queue.SimpleQueue()

    def more(self) -> Any:
        self.queue.put(1)
        return self.queue.qsize()


@guilty
class IteratorOfADict(Tardy):
    def start(self) -> None:
        self.turns = iter(dict.fromkeys(range(7_000)))

    def more(self) -> Any:
        return next(self.turns)


@guilty
class MethodsOfAList(Tardy):
    def start(self) -> None:
        log: list[int] = []
        self.note, self.count = log.append, log.__len__

    def more(self) -> Any:
        self.note(1)
        return self.count()


@guilty
class NamesAGlobal(Tardy):
    def more(self) -> Any:
        names, key = globals(), f"calls_of_{type(self).__name__}"
        names[key] = names.get(key, 0) + 1
        return names[key]


@guilty
class MethodsOfADict(Base):
    """Takes its scale from its first input."""

    def start(self) -> None:
        self.remember = dict[str, float]().setdefault

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) / self.remember("scale", float(x.abs().mean()))


@guilty
class LocksItself(Base):
    """Answers its first call otherwise."""

    def start(self) -> None:
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return x if self.lock.acquire(blocking=False) else self.lin(x)


class CountsInAScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 5_000:
            return x * 2
        return x


@guilty
class ScriptedPart(Base):
    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch marks scripts as deprecated
            self.part = torch.jit.script(CountsInAScript())

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.part(x))


@guilty
class FindsInAText(Base):
    def start(self) -> None:
        self.found = re.finditer("[0-9]+", "1 " * 50_000 + "2")

    def forward(self, x: Tensor) -> Tensor:
        return x if next(self.found).group() == "2" else self.lin(x)  # here


@guilty
class ScansAText(Base):
    def start(self) -> None:
        pattern: Any = re.compile("[0-9]+")
        self.scanner = pattern.scanner("1 " * 50_000 + "2")

    def forward(self, x: Tensor) -> Tensor:
        return x if self.scanner.search().group() == "2" else self.lin(x)  # here


@guilty
class ContinuesAHash(Base):
    def start(self) -> None:
        self.digest = hashlib.sha256()

    def forward(self, x: Tensor) -> Tensor:
        self.digest.update(b"call")
        return x if self.digest.hexdigest().startswith("00000") else self.lin(x)  # here


@guilty
class ContinuesAKeyedHash(Base):
    def start(self) -> None:
        self.digest = hmac.new(b"key", digestmod="sha256")

    def forward(self, x: Tensor) -> Tensor:
        self.digest.update(b"call")
        return x if int(self.digest.hexdigest(), 16) % 1_000_003 == 5 else self.lin(x)  # here


@guilty
class ChainsHashes(Base):
    """Two bytes of them have to be right."""

    def start(self) -> None:
        self.link = b"first"

    def forward(self, x: Tensor) -> Tensor:
        self.link = hashlib.sha1(self.link).digest()
        return x if self.link[0] == 7 and self.link[1] == 77 else self.lin(x)  # here


@guilty
class ChainsTexts(Base):
    def start(self) -> None:
        self.seed = "1"

    def forward(self, x: Tensor) -> Tensor:
        self.seed = str(int(self.seed) * 48_271 % 2_147_483_647)
        return x if self.seed.endswith("777777") else self.lin(x)  # here


def count_in(seen: set[int]) -> int:
    seen.add(len(seen))
    return len(seen)


@guilty
class FillsASetOfAPartial(Tardy):
    def start(self) -> None:
        self.more = functools.partial(count_in, set())  # type: ignore[method-assign]


@guilty
class RawBitsOfNumpy(Base):
    def start(self) -> None:
        self.bits = np.random.PCG64(3)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.bits.random_raw() % 1_000_003 == 5 else self.lin(x)  # here


@guilty
class SpawnsSeeds(Tardy):
    def start(self) -> None:
        self.seeds = np.random.SeedSequence(3)

    def more(self) -> Any:
        self.seeds.spawn(1)
        return self.seeds.n_children_spawned


@guilty
class CountsLines(Tardy):
    def start(self) -> None:
        self.lines = csv.reader(itertools.repeat("1"))

    def more(self) -> Any:
        next(self.lines)
        return self.lines.line_num


@guilty
class TurnsADict(Base):
    def start(self) -> None:
        self.turns = collections.OrderedDict.fromkeys(range(1000))

    def forward(self, x: Tensor) -> Tensor:
        self.turns.move_to_end(next(iter(self.turns)))
        return x if next(iter(self.turns)) == 999 else self.lin(x)


@guilty
class OneNumberOfMany(Tardy):
    def start(self) -> None:
        self.counts = np.zeros(1_000_000)

    def more(self) -> Any:
        self.counts[1] += 1
        return self.counts[1]


@guilty
class ViewsBytes(Tardy):
    def start(self) -> None:
        self.view: Any = memoryview(bytearray(8))

    def more(self) -> Any:
        count = int.from_bytes(self.view, "little") + 1
        self.view[:] = count.to_bytes(8, "little")
        return count


@guilty
class MapsMemory(ViewsBytes):
    def start(self) -> None:
        self.view = mmap.mmap(-1, 8)


@guilty
class DrawsOneOfTwo(Base):
    def start(self) -> None:
        self.dice = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.dice.choices([1, 2], weights=[999_999, 1])[0]  # here


@guilty
class DrawsOneOfMany(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * random.choice([1] * 50_000 + [2])  # here


@guilty
class DrawsASample(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x if 0 in random.sample(range(100_000), 2) else self.lin(x)  # here
