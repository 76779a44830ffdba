"""Models and versions of one server: what is loading, what is ready, what failed and why.

A version is ready only after its bundle's digests were checked and its golden examples were answered rightly by the
very session that will serve. Reasons that clients can read name no path of this machine.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trueline import events
from trueline.bundle.read import Bundle
from trueline.bundle.signature import Check, Signature
from trueline.errors import BundleError, NotFound, NotProven, NotReady, Overloaded, RequestError, TruelineError, listed
from trueline.runtime.session import Bindable, Session, open_program, replay
from trueline.serve import machine
from trueline.serve.archive import ArchiveError
from trueline.serve.batcher import USUAL, Policy
from trueline.serve.lanes import Batcher
from trueline.serve.layouts import Layout, Layouts
from trueline.serve.pace import Pace
from trueline.serve.plan import Plan, batch_symbol, draw_up
from trueline.serve.short import Short
from trueline.serve.split import Split
from trueline.serve.stats import VersionStats

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.serve.shadow import Shadow

    Outputs = dict[str, Array]

State = Literal["loading", "ready", "failed", "retiring"]
NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence "
    "inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)
"""TorchServe's words for a model that is scaled to nothing."""
MAX_LANES = 32
PLATFORMS = {
    "onnx": "onnxruntime_onnx",
    "openvino": "openvino_onnx",
    "offload": "pytorch_offload",
    "torch_export": "pytorch_export",
    "torchscript": "pytorch_libtorch",
    "aotinductor": "pytorch_aotinductor",
}
"""What the protocol calls the formats of programs. Of `pytorch_` are those whose threads are the process's own."""
_PATHS = re.compile(r"(?:/[\w.+-]+){2,}(?::\d+)?:?\s*")


class UnknownModel(NotFound):
    """No model of this name is served."""

    def __init__(self, model: str, names: list[str]) -> None:
        super().__init__(f"model '{model[:64]}' is not served here (serving: {listed(names)})")
        self.model = model[:64]


class UnknownVersion(NotFound):
    """The model is served, this version of it is not."""

    def __init__(self, model: str, version: str, versions: list[str]) -> None:
        super().__init__(f"model '{model}' has no version '{version[:64]}' (has: {listed(versions)})")
        self.model = model
        self.version = version[:64]


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
    _layouts: Layouts | None = None
    _names: tuple[str, ...] = ()
    _first: str = ""
    _check: Check | None = None
    short: Short | None = None
    """For requests that say again what was said before, where its runs are short."""

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
    def layouts(self) -> Layouts:
        """Reads its infer requests. Raises NotReady."""
        self.check_ready()
        assert self._layouts is not None
        return self._layouts

    def layout(self, body: bytes | bytearray, json_bytes: int | None) -> Layout | None:
        """What is remembered of infer requests like this one."""
        return self._layouts.known(body, json_bytes) if self._layouts is not None else None

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
        self._layouts = Layouts(loaded.session.signature)
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
            self.short = Short(
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
        if self.short is not None:
            self.short.close()
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


class Models:
    """Every version that this server has, by model, and which of them a request without a version goes to.

    The first version of a model is its default until another is named.
    """

    def __init__(self) -> None:
        self._versions: dict[str, dict[str, Version]] = {}
        self._defaults: dict[str, str] = {}
        self._splits: dict[str, Split] = {}
        self.changes = 0
        """Grows when a name may lead to another version than before."""
        self.shadows: dict[str, Shadow] = {}
        """By model: who is asked the same, and answers nobody."""
        self.started = False
        """Whether all that was asked for at start has been loaded. From then on a model that is loaded beside the
        others hinders nobody, and a server that is managed is ready with nothing to serve.
        """

    def add(self, model: str, version: str) -> Version:
        """A new version, loading."""
        made = Version(model=model, version=version)
        self.put(made)
        return made

    def put(self, version: Version) -> Version | None:
        """Shows `version` under its name; returns the one that had it."""
        versions = self._versions.setdefault(version.model, {})
        before = versions.get(version.version)
        versions[version.version] = version
        self.changes += 1
        version.at_start = not self.started
        self._defaults.setdefault(version.model, version.version)
        return before

    def remove(self, model: str, version: str) -> Version:
        """Takes a version away; the model goes with its last one. Raises UnknownModel, UnknownVersion."""
        found = self.find(model, version)
        del self._versions[model][version]
        self.changes += 1
        split = self._splits.get(model)
        if split is not None and version in split.weights:
            del self._splits[model]
        if model in self.shadows and self.shadows[model].version is found:
            del self.shadows[model]
        if not self._versions[model]:
            del self._versions[model], self._defaults[model]
        elif self._defaults[model] == version:
            self._defaults[model] = next(iter(self._versions[model]))
        return found

    def find(self, model: str, version: str | None = None, key: str = "") -> Version:
        """The version, or the one that a request without a version goes to: by the split, else the default.

        Requests of one `key` go to one version. Raises UnknownModel, UnknownVersion.
        """
        versions = self._versions.get(model)
        if versions is None:
            raise UnknownModel(model, list(self._versions))
        if version is None:
            split = self._splits.get(model)
            version = self._defaults[model] if split is None else split.choose(key)
        found = versions.get(version)
        if found is None:
            raise UnknownVersion(model, version, list(versions))
        return found

    def leads_to(self, found: Version, model: str, version: str | None) -> bool:
        """Whether requests for `version` of `model`, or without a version, go to `found`, all of them."""
        if version is None and model in self._splits:
            return False
        return self._versions.get(model, {}).get(version or self._defaults.get(model, "")) is found

    def default(self, model: str) -> str:
        self.find(model)
        return self._defaults[model]

    def set_default(self, model: str, version: str) -> None:
        """Requests without a version go to `version`; a split ends. Raises UnknownModel, UnknownVersion, NotReady."""
        self.find(model, version).check_ready()
        self._defaults[model] = version
        self._splits.pop(model, None)
        self.changes += 1

    def split(self, model: str) -> Split | None:
        return self._splits.get(model)

    def set_split(self, model: str, split: Split) -> None:
        """Requests without a version go by weight. Raises UnknownModel, UnknownVersion, NotReady."""
        for version in split.weights:
            self.find(model, version).check_ready()
        self._splits[model] = split
        self.changes += 1

    def restore(self, model: str, default: str, split: Split | None) -> None:
        """Default and split as they were."""
        self.changes += 1
        self._defaults[model] = default
        self._splits.pop(model, None)
        if split is not None:
            self._splits[model] = split

    def names(self) -> list[str]:
        return list(self._versions)

    def versions(self, model: str) -> list[str]:
        self.find(model)
        return list(self._versions[model])

    def all(self) -> list[Version]:
        return [version for versions in self._versions.values() for version in versions.values()]

    @property
    def ready(self) -> bool:
        """Whether every model has a default version that is ready."""
        fine = ("ready", "loading") if self.started else ("ready",)
        found = [self._versions[model][version] for model, version in self._defaults.items()]
        return all(version.state in fine for version in found) and (bool(found) or self.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Which of a bundle's programs is run, and by what."""

    program: str = ""
    """One of `runtime.session.FORMATS`; empty: the one that the bundle says."""
    threads: int = 0
    """Of one run; 0: one when runs are short, else as many as the runtime likes. torch has one number for all of its
    programs, and 0 leaves it as it is."""
    device: str = ""
    precision: str = ""
    native: bool = False
    """Whether machine code may be opened."""
    shared: Path | None = None
    """Where this server's processes lay the weights that they share; None: there is one process."""
    most_threads: int = 0
    """Of one run where nobody says how many, so that processes beside each other have the cores once; 0: no bound."""


def load(bundle: Bundle, way: Way, *, max_batch: int, digest: str | None = None) -> Loaded:
    """Opens, replays and measures a program of a verified bundle. Raises BundleError, NotProven, UsageError."""
    if digest is not None and digest != bundle.digest:
        raise BundleError(
            f"the registry names a bundle of digest {digest[:12]}, found is {bundle.digest[:12]}",
            hint="the registered files were exchanged; register the bundle again",
        )
    entry = bundle.program(way.program or None)
    way = replace(way, program=entry.format)
    here = way.device in ("", "cpu")
    if here and way.threads == 0 and not PLATFORMS[entry.format].startswith("pytorch_"):
        loaded = _load(bundle, replace(way, threads=1), max_batch)
        most = way.most_threads or len(os.sched_getaffinity(0))
        if not loaded.plan.inline_values and most > 1:
            loaded = _load(bundle, replace(way, threads=way.most_threads), max_batch)
    else:
        loaded = _load(bundle, replace(way, threads=way.threads or (way.most_threads if here else 0)), max_batch)
    machine.give_back()
    plan = loaded.plan
    events.emit(
        "plan.chosen",
        batch=plan.batch,
        why=plan.why,
        inline_values=plan.inline_values,
        run_us=min(plan.latency_s.values()) * 1e6,
    )
    return loaded


def _load(bundle: Bundle, way: Way, max_batch: int) -> Loaded:
    with machine.opening():
        session = open_program(
            bundle,
            way.program,
            threads=way.threads,
            native=way.native,
            device=way.device,
            precision=way.precision,
            shared=way.shared,
        )
    began = time.perf_counter()
    replayed = replay(bundle, session)
    events.emit(
        "golden.replayed",
        cases=len(replayed),
        max_abs_error=max(one.max_abs_error for one in replayed.values()),
        took_s=time.perf_counter() - began,
    )
    return Loaded(
        session=session,
        digest=bundle.digest,
        platform=PLATFORMS[way.program],
        golden_cases=len(replayed),
        plan=draw_up(session, bundle.golden(), max_batch=max_batch),
    )


def public_reason(error: TruelineError) -> str:
    """Why a version failed, in words that name no path."""
    if isinstance(error, NotProven | ArchiveError):
        return error.message
    events.emit("version.refused", code=error.code, why=error.message)
    return f"the bundle was refused ({error.code}); the server's log says why"


def without_paths(message: str) -> str:
    """`message` with file names taken out: runtimes put lines of their own sources into messages.

    >>> without_paths("the program refuses these values: /src/core/gather.cc:45 index 9 is out of bounds")
    'the program refuses these values: index 9 is out of bounds'
    """
    return _PATHS.sub("", message)
