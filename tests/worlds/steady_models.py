"""Models that change something when they are called, and whose answer depends on their inputs alone."""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import logging
import os
import random
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from worlds.stateful_models import Base

INNOCENT: dict[str, type[nn.Module]] = {}
LOG = logging.getLogger(__name__)


def innocent(kind: type[nn.Module]) -> type[nn.Module]:
    INNOCENT[kind.__name__] = kind
    return kind


@innocent
class CountsCalls(Base):
    def start(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.lin(x)


@innocent
class LogsEveryHundred(Base):
    def start(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 100 == 0:
            LOG.info("call %d", self.calls)
        return self.lin(x)


@innocent
class FormatsItsCount(Base):
    def start(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        LOG.debug(f"forward #{self.calls} of {x.shape} ({self.calls / 7:.2f})")
        return self.lin(x)


@innocent
class WarnsOnce(Base):
    def start(self) -> None:
        self.warned = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.warned:
            LOG.warning("experimental")
            self.warned = True
        return self.lin(x)


@innocent
class KeepsAttention(Base):
    def start(self) -> None:
        self.last_attention: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.lin(x), -1)
        self.last_attention = weights
        return weights * x


@innocent
class KeepsOutputsInAList(Base):
    def start(self) -> None:
        self.hidden: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.append(self.lin(x))
        self.hidden.append(torch.relu(self.hidden[-1]))
        return self.hidden[-1]


@innocent
class ClearsItsList(Base):
    def start(self) -> None:
        self.hidden: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.clear()
        for _ in range(3):
            self.hidden.append(self.lin(x))
        return torch.stack(self.hidden).sum(0)


@innocent
class MaskByLength(Base):
    def start(self) -> None:
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = int(x.shape[1])
        if n not in self.masks:
            self.masks[n] = torch.ones(n, n).tril()
        return self.lin(x) @ self.masks[n]


@functools.lru_cache(maxsize=4)
def table_of(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32)


@innocent
class LruTable(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + table_of(int(x.shape[1]))


@innocent
class Rotary(Base):
    """Grows its table when a longer input comes, as transformers' rotary embeddings do."""

    def start(self) -> None:
        self.longest, self.cos = 0, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        n = int(x.shape[0])
        if n > self.longest:
            self.longest = n
            self.cos = torch.arange(n, dtype=torch.float32).cos()
        return self.lin(x) * self.cos[:n, None]


@innocent
class NonPersistentTable(Base):
    def start(self) -> None:
        self.table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = torch.linspace(0, 1, 4)
        return self.lin(x) + self.table


@innocent
class Timed(Base):
    def start(self) -> None:
        self.seconds: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        y = self.lin(x)
        self.seconds.append(time.perf_counter() - began)
        return y


@innocent
class SlowCallsAreLogged(Base):
    def start(self) -> None:
        self.slow = 0

    def forward(self, x: Tensor) -> Tensor:
        began = time.time()
        y = self.lin(x)
        if time.time() - began > 1.0:
            self.slow += 1
            LOG.info("slow")
        return y


@innocent
class RequestIds(Base):
    def start(self) -> None:
        self.ids = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        request = next(self.ids)
        LOG.debug("request %s", request)
        return self.lin(x)


@innocent
class RunningMeanOfSizes(Base):
    """A statistic of its inputs that nothing reads."""

    def start(self) -> None:
        self.rows, self.mean = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += x.shape[0]
        self.mean = 0.9 * self.mean + 0.1 * float(x.mean())
        return self.lin(x)


@innocent
class TensorStatistic(Base):
    def start(self) -> None:
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.detach().sum(0)
        return self.lin(x)


@innocent
class RecentSizes(Base):
    def start(self) -> None:
        self.recent: collections.deque[Any] = collections.deque(maxlen=10)

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(tuple(x.shape))
        return self.lin(x)


@innocent
class CountsShapes(Base):
    shapes: ClassVar[collections.Counter[Any]] = collections.Counter()

    def forward(self, x: Tensor) -> Tensor:
        CountsShapes.shapes[tuple(x.shape)] += 1
        return self.lin(x)


@innocent
class LayerDropOff(Base):
    """Draws as transformers' older models do, and uses the draw in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        drop = random.uniform(0, 1)
        if self.training and drop < 0.5:
            return x
        return self.lin(x)


@innocent
class DropsWithProbabilityZero(Base):
    def start(self) -> None:
        self.p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < self.p:
            return x
        return self.lin(x)


@innocent
class StepInTraining(Base):
    def start(self) -> None:
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step += 1
        return self.lin(x) * (1.0 if self.step < 100 else 2.0)


@innocent
class NumpyHistogram(Base):
    def start(self) -> None:
        self.histogram = np.zeros(8, np.int64)

    def forward(self, x: Tensor) -> Tensor:
        self.histogram[min(int(x.shape[0]), 7)] += 1
        return self.lin(x)


@innocent
class UnderALock(Base):
    def start(self) -> None:
        self.lock, self.calls = threading.Lock(), 0

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.calls += 1
        return self.lin(x)


@innocent
class HookCollects(Base):
    def start(self) -> None:
        self.seen = SimpleNamespace(outputs=[])
        self.lin.register_forward_hook(lambda module, args, output: self.seen.outputs.append(output.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


@innocent
class LazySubmodule(Base):
    def start(self) -> None:
        self.scale: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = nn.Softplus()
        return self.scale(self.lin(x))


@innocent
class ScratchSpace(Base):
    """Memory that is used again."""

    def start(self) -> None:
        self.scratch: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scratch is None or self.scratch.shape != x.shape:
            self.scratch = torch.empty_like(x)
        self.scratch.copy_(x)
        self.scratch.mul_(2)
        return self.lin(self.scratch.clone())


@innocent
class Verbose(Base):
    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("DEBUG_MODEL"):
            LOG.info("%s", x.shape)
        return self.lin(x)


@innocent
class Profiled(Base):
    """Averages, and warns when it becomes slow."""

    def start(self) -> None:
        self.mean_s, self.n = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        y = self.lin(x)
        self.n += 1
        self.mean_s += (time.perf_counter() - began - self.mean_s) / self.n
        if self.mean_s > 10 and self.n > 100:
            warnings.warn("slow", stacklevel=2)
        return y


@innocent
class CachedByDtype(Base):
    def start(self) -> None:
        self.cast: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in self.cast:
            self.cast[x.dtype] = torch.ones(4, dtype=x.dtype)
        return self.lin(x) + self.cast[x.dtype]


@innocent
class StopsPrinting(Base):
    """Prints its first calls."""

    def start(self) -> None:
        self.left = 3

    def forward(self, x: Tensor) -> Tensor:
        if self.left > 0:
            self.left -= 1
            LOG.info("shape %s", x.shape)
        return self.lin(x)


@innocent
class CachedProperty(Base):
    @functools.cached_property
    def positions(self) -> Tensor:
        return torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.positions


@innocent
class Memo(Base):
    """Keeps the last input and its answer."""

    def start(self) -> None:
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None and torch.equal(self.last[0], x):
            return self.last[1].clone()
        y = self.lin(x)
        self.last = (x.clone(), y.clone())
        return y


@innocent
class AssertsItsCount(Base):
    def start(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        assert self.calls > 0
        return self.lin(x)


@innocent
class SeedsItself(Base):
    """Draws from a generator that it makes anew."""

    def forward(self, x: Tensor) -> Tensor:
        rng = random.Random(0)
        return self.lin(x) * rng.random()


@innocent
class MovesToTheEnd(Base):
    """A cache that forgets what was used longest ago."""

    def start(self) -> None:
        self.masks = collections.OrderedDict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        for size in (len(x), len(x) + 1):
            self.masks.setdefault(size, torch.ones(size, 1))
            self.masks.move_to_end(size)
        return self.lin(x) * self.masks[len(x)]


@innocent
class HashesItsInputs(Base):
    def start(self) -> None:
        self.seen = hashlib.sha256()
        self.last = ""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.update(b"call")
        self.last = self.seen.hexdigest()
        return self.lin(x)


@innocent
class PicksAName(Base):
    def start(self) -> None:
        self.last = ""

    def forward(self, x: Tensor) -> Tensor:
        self.last = random.choice(["one", "two", "three"])
        return self.lin(x)
