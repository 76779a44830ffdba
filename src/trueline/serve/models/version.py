"""One version of a model: loading, ready, failed or retiring, and asked through its queue.

It is ready only after its bundle's digests were checked and its golden examples were answered rightly by the very
session that will serve (`loading`); which of several versions is asked, `models` knows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trueline.bundle.signature import Check, Signature
from trueline.errors import NotReady, Overloaded, RequestError
from trueline.runtime.session import Bindable, Session
from trueline.serve.batching.execution_plan import Plan, batch_symbol
from trueline.serve.batching.latency_model import Pace
from trueline.serve.batching.policy import USUAL, Policy
from trueline.serve.batching.queue import Batcher
from trueline.serve.counters import VersionStats
from trueline.serve.fastpath.bound_run import BoundRuns
from trueline.serve.fastpath.templates import TemplateCache
from trueline.serve.redaction import without_paths

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

    Outputs = dict[str, Array]

State = Literal["loading", "ready", "failed", "retiring"]
NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence "
    "inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)
"""TorchServe's words for a model that is scaled to nothing."""
MAX_LANES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A program that has answered its golden examples, and how it is to be run."""

    session: Session
    digest: str
    platform: str
    golden_cases: int
    plan: Plan


@dataclass(slots=True, eq=False, kw_only=True)
class Version:
    """One version of a model."""

    model: str
    version: str
    state: State = "loading"
    reason: str = ""
    """Why it failed, for clients to read."""
    source: str = ""
    """What it was loaded from, as it was asked for."""
    workflow: str = ""
    """The workflow that it is a node of; it comes and goes with that alone."""
    at_start: bool = False
    """Whether it was there before the server had started."""
    since: float = 0.0
    """When it became ready, in seconds since the epoch."""
    load_s: float = 0.0
    """From the act that loaded it until it was ready."""
    stats: VersionStats = field(default_factory=VersionStats)
    _loaded: Loaded | None = None
    _executor: Executor | None = None
    _batcher: Batcher | None = None
    _templates: TemplateCache | None = None
    _names: tuple[str, ...] = ()
    _first: str = ""
    _check: Check | None = None
    bound_runs: BoundRuns | None = None
    """For the fast path; None: its runs are too long for the event loop."""

    @property
    def loaded(self) -> Loaded:
        """What is loaded. Raises NotReady."""
        if self._loaded is None or self.state != "ready":
            raise self._not_ready()
        return self._loaded

    def check_ready(self) -> None:
        """Raises NotReady."""
        if self.state != "ready":
            raise self._not_ready()

    def _not_ready(self) -> NotReady:
        why = f": {self.reason}" if self.reason else ""
        return NotReady(f"model '{self.model}' version '{self.version}' is {self.state}{why}")

    @property
    def sick(self) -> bool:
        """Whether it cannot answer, and will not by itself."""
        return self.state == "failed"

    @property
    def digest(self) -> str:
        """Of the bytes that it was loaded from. Raises NotReady."""
        return self.loaded.digest

    @property
    def signature(self) -> Signature:
        return self.loaded.session.signature

    @property
    def templates(self) -> TemplateCache:
        """Decodes its infer requests. Raises NotReady."""
        self.check_ready()
        assert self._templates is not None
        return self._templates

    def load_times(self) -> dict[str, float]:
        """Seconds from start to ready, by TorchServe's names of workers."""
        return {f"W-9000-{self.model}_{self.version}": self.load_s} if self.state == "ready" else {}

    @property
    def num_waiting(self) -> int:
        return self._batcher.num_waiting if self._batcher else 0

    @property
    def full(self) -> bool:
        """Whether its queue takes no further request, unless in the place of a less urgent one."""
        return self._batcher is not None and self._batcher.full and self.state == "ready"

    def no_room(self, priority: int) -> Overloaded | None:
        """Why no request of `priority` is let in now, whatever it holds; the same one as long as that stands."""
        return self._batcher.no_room(priority) if self._batcher is not None else None

    def stands(self, refused: Overloaded) -> bool:
        """Whether `refused`, which `no_room` said, would be said again."""
        return self._batcher is not None and self._batcher.standing is refused

    @property
    def policy(self) -> Policy:
        """How its requests are put together. Raises NotReady."""
        _ = self.loaded
        assert self._batcher is not None
        return self._batcher.policy

    def make_ready(self, loaded: Loaded, policy: Policy, executor: Executor, loop: asyncio.AbstractEventLoop) -> None:
        """Opens the version to requests; call it on the loop."""
        self._loaded = loaded
        self._executor = executor
        self.since = time.time()
        self._templates = TemplateCache(loaded.session.signature)
        self._names = tuple([spec.name for spec in loaded.session.signature.inputs])
        self._first = self._names[0]
        self._check = Check(loaded.session.signature)
        self._batcher = Batcher(
            self._run,
            policy,
            executor,
            loop,
            on_batch=self.stats.count_run,
            pace=Pace(loaded.plan.latency_s),
            padding=loaded.plan.padding,
            short_values=loaded.plan.inline_values,
        )
        if loaded.plan.inline_values and isinstance(loaded.session, Bindable):
            signature, by_rows = loaded.session.signature, batch_symbol(loaded.session.signature)[0] is not None
            values = loaded.plan.inline_values
            self.bound_runs = BoundRuns(
                loaded.session, signature, self._batcher, self.stats, loop, by_rows=by_rows, values=values
            )
        self.state = "ready"

    def fail(self, reason: str) -> None:
        self.state, self.reason = "failed", reason

    def scale(self, lanes: int) -> None:
        """How many runs go on at the same time; with 0 requests are refused. What waits already is answered."""
        _ = self.loaded
        assert self._batcher is not None
        self._batcher.scale(min(lanes, MAX_LANES))

    async def settled(self) -> None:
        """Returns when what `scale` asked for is there."""

    async def retire(self) -> None:
        """Returns when the last request that it was asked is answered, and lets go of its program.

        The caller has taken it out of Models: nobody asks it any more.
        """
        if self._batcher is None:
            self.state = "retiring"
            return
        await self._batcher.emptied()
        self.state = "retiring"
        if self.bound_runs is not None:
            self.bound_runs.close()
        self._loaded = None
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def ask(
        self, inputs: Mapping[str, Array], timeout_s: float | None = None, priority: int = USUAL
    ) -> Outputs | asyncio.Future[Outputs]:
        """The outputs, at once when the run is short, else a future. Raises RequestError."""
        loaded, batcher = self._loaded, self._batcher
        if loaded is None or batcher is None or self.state != "ready":
            raise self._not_ready()
        if not batcher.policy.lanes:
            raise NotReady(f'Model "{self.model}" {NO_WORKER}')
        values = 0
        for array in inputs.values():
            values += array.size
        if values <= loaded.plan.inline_values and batcher.alone():
            began = time.perf_counter()
            outputs = self._run(inputs)
            self.stats.count_run(1, _rows(inputs, self._first), time.perf_counter() - began, 0.0)
            return outputs
        assert self._check is not None
        self._check(inputs)
        padding = loaded.plan.padding
        key = padding.key(inputs) if padding else tuple([inputs[name].shape[1:] for name in self._names])
        return batcher.submit(inputs, _rows(inputs, self._first), key, timeout_s, priority)

    def _run(self, inputs: Mapping[str, Array]) -> Outputs:
        began = time.perf_counter()
        try:
            return self.loaded.session.run(inputs)
        except RequestError as error:
            error.message = without_paths(error.message)
            raise
        except Exception:
            self.stats.failed += 1
            self.stats.failed_s += time.perf_counter() - began
            raise


def _rows(inputs: Mapping[str, Array], first: str) -> int:
    shape = inputs[first].shape
    return shape[0] if shape else 1
