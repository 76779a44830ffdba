"""A version of a model that a bundle's program answers through its queue, and the loader that makes it ready."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline.bundle.read import open_bundle
from trueline.bundle.signature import Check, Signature
from trueline.bundle.signing import Trusted
from trueline.errors import NotReady, Overloaded, RequestError
from trueline.runtime.session import Bindable
from trueline.serve.batching.execution_plan import batch_symbol
from trueline.serve.batching.latency_model import LatencyModel
from trueline.serve.batching.pieces import PIECE_S, cut, join, slices, submit_in_pieces
from trueline.serve.batching.policy import USUAL, Policy
from trueline.serve.batching.queue import Batcher
from trueline.serve.fastpath.bound_run import BoundRuns
from trueline.serve.fastpath.templates import TemplateCache
from trueline.serve.models.desired_state import DesiredVersion
from trueline.serve.models.loader import MAX_LANES, ResolvedSource, VersionOptions, check_lanes, load, without_paths
from trueline.serve.models.servable import NO_WORKER, NO_WORKERS, Loaded, VersionRecord

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.columns.fitted import FittedColumns
    from trueline.serve.batching.execution_plan import ExecutionPlan
    from trueline.serve.models.servable import Outputs
    from trueline.serve.tensors.bounds import RequestBounds

MAX_RUNS = 64
"""Of one piece of a large request."""


@dataclass(slots=True, eq=False, kw_only=True)
class ProgramVersion(VersionRecord):
    """A version that a program answers. It is ready once the program has reproduced its golden records."""

    _loaded: Loaded | None = None
    _executor: Executor | None = None
    _batcher: Batcher | None = None
    _templates: TemplateCache | None = None
    _names: tuple[str, ...] = ()
    _first: str = ""
    _check: Check | None = None
    _run_rows: int = sys.maxsize
    """Most rows of one run; a request with more is cut, or refused by the check."""
    _piece_rows: int = 1
    bound_runs: BoundRuns | None = None

    @property
    def loaded(self) -> Loaded:
        if self._loaded is None or self.state != "ready":
            raise self.not_ready()
        return self._loaded

    @property
    def handler(self) -> None:
        return None

    @property
    def program(self) -> ProgramVersion:
        return self

    @property
    def obstacle(self) -> str:
        if self.state != "ready":
            return self.reason or self.state
        return "" if self._batcher is None or self._batcher.policy.lanes else NO_WORKERS

    @property
    def sick(self) -> bool:
        return self.state == "failed" and not self.optional

    @property
    def digest(self) -> str:
        return self.loaded.digest

    @property
    def signature(self) -> Signature:
        return self.loaded.session.signature

    @property
    def bounds(self) -> RequestBounds:
        return self.loaded.bounds

    @property
    def columns(self) -> FittedColumns | None:
        return self.loaded.columns

    @property
    def templates(self) -> TemplateCache:
        self.check_ready()
        assert self._templates is not None
        return self._templates

    @property
    def load_times(self) -> dict[str, float]:
        return {f"W-9000-{self.model}_{self.version}": self.load_s} if self.state == "ready" else {}

    @property
    def num_waiting(self) -> int:
        return self._batcher.num_waiting if self._batcher else 0

    @property
    def full(self) -> bool:
        return self._batcher is not None and self._batcher.full and self.state == "ready"

    def no_room(self, priority: int) -> Overloaded | None:
        return self._batcher.no_room(priority) if self._batcher is not None else None

    def stands(self, refused: Overloaded) -> bool:
        return self._batcher is not None and self._batcher.standing is refused

    @property
    def policy(self) -> Policy:
        _ = self.loaded
        assert self._batcher is not None
        return self._batcher.policy

    def make_ready(self, loaded: Loaded, policy: Policy, executor: Executor, loop: asyncio.AbstractEventLoop) -> None:
        """Opens the version to requests."""
        self._loaded, self._executor = loaded, executor
        self.since = time.time()
        self._templates = TemplateCache(loaded.session.signature, loaded.bounds)
        self._names = tuple([spec.name for spec in loaded.session.signature.inputs])
        self._first = self._names[0]
        self._check = Check(loaded.session.signature, loaded.bounds.check)
        if loaded.plan.cuts:
            self._run_rows, self._piece_rows = loaded.plan.max_batch, rows_of_piece(loaded.plan)
        elif loaded.bounds.rows is not None:
            self._run_rows = loaded.bounds.rows
        self._batcher = Batcher(
            self._run_counted,
            policy,
            executor,
            loop,
            on_batch=self.stats.count_run,
            model=LatencyModel(loaded.plan.latency_s),
            padding=loaded.plan.padding,
            short_values=loaded.plan.inline_values,
        )
        if loaded.plan.inline_values and isinstance(loaded.session, Bindable):
            by_rows, values = batch_symbol(loaded.session.signature)[0] is not None, loaded.plan.inline_values
            self.bound_runs = BoundRuns(loaded.session, self._names, self._batcher, self.stats, loop, by_rows, values)
        self.state = "ready"
        self.optional = self.optional and not policy.lanes

    def scale(self, lanes: int) -> None:
        _ = self.loaded
        assert self._batcher is not None
        check_lanes(self.model, lanes)
        self._batcher.scale(lanes)
        self.optional = self.optional and not lanes

    async def retire(self) -> None:
        if self._batcher is None:
            self.state = "retiring"
            return
        await self._batcher.wait_empty()
        self.state = "retiring"
        if self.bound_runs is not None:
            self.bound_runs.close()
        self._loaded = None
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def ask(
        self, inputs: Mapping[str, Array], timeout_s: float | None = None, priority: int = USUAL
    ) -> Outputs | asyncio.Future[Outputs]:
        loaded, batcher = self._loaded, self._batcher
        if loaded is None or batcher is None or self.state != "ready":
            raise self.not_ready()
        if not batcher.policy.lanes:
            raise NotReady(f'Model "{self.model}" {NO_WORKER}')
        values = 0
        for array in inputs.values():
            values += array.size
        rows = _rows(inputs, self._first)
        if values <= loaded.plan.inline_values and rows <= self._run_rows and batcher.alone():
            began = time.perf_counter()
            outputs = self._run(inputs)
            self.stats.count_run(1, rows, time.perf_counter() - began, 0.0)
            return outputs
        assert self._check is not None
        self._check(inputs)
        padding = loaded.plan.padding
        key = padding.key(inputs) if padding else tuple([inputs[name].shape[1:] for name in self._names])
        if rows <= self._piece_rows or not loaded.plan.cuts:
            return batcher.submit(inputs, rows, key, timeout_s, priority)
        return self._ask_in_pieces(inputs, rows, key, timeout_s, priority)

    def _ask_in_pieces(
        self, inputs: Mapping[str, Array], rows: int, key: object, timeout_s: float | None, priority: int
    ) -> asyncio.Future[Outputs]:
        loaded, batcher = self._loaded, self._batcher
        assert loaded is not None
        assert batcher is not None
        sizes = cut(rows, self._piece_rows, _row_step(loaded))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def submit(piece: Mapping[str, Array], rows: int, first: bool) -> asyncio.Future[Outputs]:
            left_s = None if deadline is None else deadline - time.monotonic()
            return batcher.submit(piece, rows, key, left_s, priority, accepted=not first)

        answer = submit_in_pieces(submit, slices(inputs, sizes), asyncio.get_running_loop())
        batcher.hold()  # between two pieces, none of them waits
        answer.add_done_callback(lambda _: batcher.release(1))
        return answer

    def _run_counted(self, inputs: Mapping[str, Array]) -> Outputs:
        thread = threading.get_ident()
        self.stats.running.add(thread)
        try:
            return self._run_cut(inputs)
        finally:
            self.stats.running.discard(thread)
            self.stats.count_size(sum([array.size for array in inputs.values()]), time.monotonic())

    def _run_cut(self, inputs: Mapping[str, Array]) -> Outputs:
        """In runs of at most as many rows as one may have."""
        loaded, rows = self.loaded, _rows(inputs, self._first)
        if rows <= self._run_rows or not loaded.plan.cuts:
            return self._run(inputs)
        sizes = cut(rows, self._run_rows, _row_step(loaded))
        return join([self._run(piece) for piece, _ in slices(inputs, sizes)])

    def _run(self, inputs: Mapping[str, Array]) -> Outputs:
        began = time.perf_counter()
        try:
            loaded = self.loaded
            outputs = loaded.session.run(inputs)
            if loaded.bounds.open_answer:
                loaded.bounds.check_answer(outputs)
            return outputs
        except RequestError as error:
            error.message = without_paths(error.message)
            raise
        except Exception:
            self.stats.failed += 1
            self.stats.failed_s += time.perf_counter() - began
            raise


def _row_step(loaded: Loaded) -> int:
    symbol, _ = batch_symbol(loaded.session.signature)
    return 1 if symbol is None else loaded.session.signature.dims[symbol].multiple_of


def rows_of_piece(plan: ExecutionPlan) -> int:
    """Rows of a piece of a large request, which takes about PIECE_S: its runs follow each other in one thread."""
    rows, took_s = max(plan.latency_s.items())
    run_s = max(1e-6, took_s * plan.max_batch / rows)
    return plan.max_batch * min(MAX_RUNS, max(1, int(PIECE_S / run_s)))


def _rows(inputs: Mapping[str, Array], first: str) -> int:
    """Of inputs without the `first`, which the check refuses, more than any run takes."""
    array = inputs.get(first)
    if array is None:
        return sys.maxsize
    return array.shape[0] if array.ndim else 1


@dataclass(frozen=True, slots=True)
class BundleLoader:
    """Makes the programs of bundles ready."""

    how: VersionOptions
    loop: asyncio.AbstractEventLoop
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]

    def accepts(self, path: Path) -> bool:
        return True

    def create(self, found: ResolvedSource, model: str, version: str, source: str) -> ProgramVersion:
        return ProgramVersion(model=model, version=version, source=source)

    async def load(
        self, made: ProgramVersion, found: ResolvedSource, how: VersionOptions | None, digest: str | None
    ) -> DesiredVersion:
        """Raises BundleError, NotProven."""
        usual, how = self.how, how or self.how.of_bundle(made.model, made.version)
        check_lanes(made.model, how.workers or 0)
        loaded: Loaded = await self.in_thread(lambda: _load(found, how, digest, usual.trusted))
        lanes = how.workers if how.workers is not None else (1 if loaded.plan.batch else 2)
        policy = Policy(
            batch=loaded.plan.batch,
            max_batch=loaded.plan.max_batch,
            max_delay_s=how.max_delay_s,
            lanes=lanes,
            max_requests=how.max_queue,
        )
        made.make_ready(loaded, policy, ThreadPoolExecutor(MAX_LANES, thread_name_prefix="run"), self.loop)
        return DesiredVersion(
            source=made.source,
            digest=loaded.digest,
            workers=made.policy.lanes,
            max_batch=None if how.max_batch == usual.max_batch else how.max_batch,
            max_delay_s=None if how.max_delay_s == usual.max_delay_s else how.max_delay_s,
        )


def _load(found: ResolvedSource, how: VersionOptions, digest: str | None, trusted: Trusted | None) -> Loaded:
    """Opens, verifies, replays and measures. Blocks. Raises BundleError, NotProven."""
    bundle = open_bundle(found.path)
    found.check(trusted, bundle.digest)
    loaded = load(bundle, how.way, max_batch=how.max_batch, digest=digest or found.digest)
    if how.max_delay_s:  # requests are to wait for a batch
        return replace(loaded, plan=replace(loaded.plan, inline_values=0))
    return loaded
