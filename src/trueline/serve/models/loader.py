"""Opens a bundle's program, replays its golden records and measures it, in the session that will serve.

The replay uses the device, the precision and the threads of that session: nothing is served that is not proven here.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np

from trueline import events
from trueline.bundle import signing
from trueline.bundle.read import Bundle
from trueline.bundle.signature import Signature
from trueline.bundle.signing import Trusted
from trueline.errors import BundleError, RequestError, TruelineError
from trueline.runtime.open import open_program, replay, replay_records
from trueline.serve import host
from trueline.serve.batching.execution_plan import batch_symbol, draw_up
from trueline.serve.models.desired_state import DesiredVersion
from trueline.serve.models.example import as_lists
from trueline.serve.models.servable import Loaded, Servable, TooManyWorkers
from trueline.serve.tensors import bounds

MAX_EXAMPLE_VALUES, EXAMPLE_RECORDS = 4096, 2
MAX_LANES = max(32, len(os.sched_getaffinity(0)))
"""Runs of a bundle's program at a time; each has a thread."""
RECORDS = "batch"
"""What a capture calls the symbol that counts records."""
V = TypeVar("V", bound=Servable)
_PATHS = re.compile(r"(?:/[\w.+-]+){2,}(?::\d+)?:?\s*")

PLATFORMS = {
    "onnx": "onnxruntime_onnx",
    "openvino": "openvino_onnx",
    "offload": "pytorch_offload",
    "torch_export": "pytorch_export",
    "torchscript": "pytorch_libtorch",
    "aotinductor": "pytorch_aotinductor",
}
"""Names of program formats in the Open Inference Protocol. The threads of `pytorch_` formats are process-wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Which of a bundle's programs runs, and how."""

    program: str = ""  # one of `runtime.session.FORMATS`; empty: the bundle's default
    threads: int = 0
    """Of one run; 0: one if runs are short, else the runtime decides. torch has one process-wide number; 0 keeps it."""
    device: str = ""
    precision: str = ""
    native: bool = False  # whether machine code may be loaded
    shared: Path | None = None
    """Folder of the weights that several server processes share; None: there is one process."""
    max_values: int = 0
    """Most numbers of one request, and of its answer; 0: from what the bundle proves."""
    max_size: int = 0
    """Largest size of a free dimension of one request; 0: from what the bundle proves."""
    memory_bytes: int = 0
    """Bound of what the runs of all programs hold at once in ONNX Runtime; 0: no bound."""
    hide_examples: bool = False
    """Whether no client sees a golden record."""
    most_threads: int = 0
    """Upper bound where `threads` is 0, so that several processes share the cores; 0: no bound."""


class Refused(RequestError):
    """The version cannot be served; the reason names no path."""

    code = "refused"
    status = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSource:
    """Where the bundle or archive of a source lies, and what the registry knows of it."""

    path: Path
    name: str | None = None
    version: str | None = None
    digest: str | None = None
    signature: str | None = None  # None: the signature file beside it, if there is one

    @classmethod
    def from_registry(cls, reply: Mapping[str, Any]) -> ResolvedSource:
        """From a line of `trueline.registry`. Raises KeyError, TypeError."""
        names = {key: reply[key] for key in ("name", "digest")}
        return cls(path=Path(reply["path"]), version=str(reply["version"]), signature=reply.get("signature"), **names)

    def check(self, trusted: Trusted | None, digest: str) -> None:
        """Raises BundleError unless a trusted key has signed `digest`."""
        if trusted is not None:
            trusted.check(f"'{self.path.name}'", digest, self.signature or signing.beside(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOptions:
    """How a version runs, unless its own configuration says otherwise."""

    way: RuntimeOptions = field(default_factory=RuntimeOptions)
    max_batch: int = 64
    max_delay_s: float | None = None  # how long an idle model waits for more requests; None: learned
    max_queue: int = 256
    workers: int | None = None  # runs at a time; None: as measured; 0: requests are rejected
    shared: bool = False  # whether other processes answer on the same ports
    trusted: Trusted | None = None
    """One of these keys must have signed what is served; None: no signature is needed."""
    usual: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Defaults in the keys of model-config.yaml: by `MODEL/VERSION`, or under "" for every archive."""
    given: Mapping[str, str] = field(default_factory=lambda: {"default_workers": "1"})
    """TorchServe's registration parameters; they override an archive's configuration."""

    def usual_of(self, model: str, version: str) -> dict[str, Any]:
        """The defaults of an archive's configuration."""
        return {**self.usual.get("", {}), **self.usual.get(f"{model}/{version}", {})}

    def of_bundle(self, model: str, version: str) -> VersionOptions:
        """With the batch size, delay and workers set for this version. Raises Refused."""
        own = self.usual.get(f"{model}/{version}", {})
        try:
            found = msgspec.convert({key: own[key] for key in _OF_BUNDLES if key in own}, _OfBundle)
        except msgspec.ValidationError as error:
            raise Refused(f"the settings of model '{model}' version '{version}' are not valid: {error}") from error
        for key, lanes in (("minWorkers", found.min_workers), ("maxWorkers", found.max_workers)):
            check_lanes(model, lanes or 0, what=f" ({key} of its configuration)")
        return replace(
            self,
            way=replace(
                self.way,
                max_values=found.max_values or self.way.max_values,
                max_size=found.max_size or self.way.max_size,
            ),
            max_batch=found.batch_size or self.max_batch,
            max_delay_s=self.max_delay_s if found.max_batch_delay is None else found.max_batch_delay / 1e3,
            workers=self.workers if found.min_workers is None else found.min_workers,
        )


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _OfBundle(msgspec.Struct, frozen=True, rename="camel"):
    batch_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_batch_delay: _Count | None = None
    min_workers: _Count | None = None
    max_workers: _Count | None = None
    max_values: _Count = 0
    max_size: _Count = 0


_OF_BUNDLES = ("batchSize", "maxBatchDelay", "minWorkers", "maxWorkers", "maxValues", "maxSize")


class Loader(Protocol[V]):
    """Makes versions of one kind of source ready."""

    def accepts(self, path: Path) -> bool:
        """Whether the file or folder at `path` is of this kind."""

    def create(self, found: ResolvedSource, model: str, version: str, source: str) -> V:
        """A version that is not loaded yet. Raises CodeNotAllowed."""

    async def load(
        self, made: V, found: ResolvedSource, how: VersionOptions | None, digest: str | None
    ) -> DesiredVersion:
        """Makes `made` ready and returns its record for the state file. Raises TruelineError and cleans up, also when
        the bytes do not have `digest`.
        """


def load(bundle: Bundle, way: RuntimeOptions, *, max_batch: int, digest: str | None = None) -> Loaded:
    """Opens, replays and measures a program of a verified bundle. Raises BundleError, NotProven, UsageError."""
    if digest is not None and digest != bundle.digest:
        raise BundleError(
            f"the registry names a bundle of digest {digest[:12]}, found is {bundle.digest[:12]}",
            hint="the registered files were replaced; register the bundle again",
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
    host.give_back()
    plan = loaded.plan
    events.emit(
        "plan.chosen",
        batch=plan.batch,
        why=plan.why,
        inline_values=plan.inline_values,
        run_us=min(plan.latency_s.values()) * 1e6,
    )
    return loaded


def _load(bundle: Bundle, way: RuntimeOptions, max_batch: int) -> Loaded:
    if way.memory_bytes and way.program in ("onnx", "offload"):
        from trueline.runtime.onnx import limit_memory  # it imports ONNX Runtime

        limit_memory(way.memory_bytes)
    with host.opening():
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
    columns = replay_records(bundle)
    plan = draw_up(session, bundle.golden(), max_batch=max_batch, by_record=bundle.program(way.program).by_record)
    return Loaded(
        session=session,
        digest=bundle.digest,
        platform=PLATFORMS[way.program],
        golden_cases=len(replayed),
        plan=plan,
        columns=columns,
        records=bundle.golden_records()[:EXAMPLE_RECORDS] if columns is not None and not way.hide_examples else (),
        bounds=bounds.of_program(
            session.signature,
            _shapes_of_probes(bundle, way.program),
            row_symbol=_row_symbol(session.signature),
            cuts=plan.cuts,
            max_batch=max_batch,
            max_values=way.max_values,
            max_size=way.max_size,
        ),
        example={} if way.hide_examples else _choose_example(bundle, session.signature),
    )


def _choose_example(bundle: Bundle, signature: Signature) -> dict[str, Any]:
    """The inputs of the golden record with the fewest numbers, as JSON can write them."""
    smallest = min(
        bundle.golden(), key=lambda golden: sum(array.size for array in golden.inputs.values()), default=None
    )
    if smallest is None or sum(array.size for array in smallest.inputs.values()) > MAX_EXAMPLE_VALUES:
        return {}
    if any(spec.datatype == "BF16" or not np.isfinite(smallest.inputs[spec.name]).all() for spec in signature.inputs):
        return {}
    return {spec.name: as_lists(smallest.inputs[spec.name]) for spec in signature.inputs}


def _shapes_of_probes(bundle: Bundle, program: str) -> Iterator[bounds.Shapes]:
    """Shapes on which `program` was compared with the model."""
    for golden in bundle.golden():
        yield {name: array.shape for name, array in {**golden.inputs, **golden.outputs}.items()}
    for evidence in bundle.evidence():
        if evidence.format == program and evidence.verdict == "agrees":
            yield evidence.shapes


def _row_symbol(signature: Signature) -> str | None:
    """The symbol that counts records; that of the inputs alone if the capture called it so."""
    symbol, _ = batch_symbol(signature)
    if symbol is not None or any(spec.shape[:1] != (RECORDS,) for spec in signature.inputs):
        return symbol
    return RECORDS


def check_lanes(model: str, lanes: int, *, what: str = "") -> None:
    """Raises TooManyWorkers."""
    if lanes > MAX_LANES:
        raise TooManyWorkers(
            f"{lanes} workers of model '{model}'{what} are more than the {MAX_LANES} that a bundle may have on this "
            "machine",
            hint="name fewer: a worker is one run at a time, and more of them than cores are not faster",
        )


def public_reason(error: TruelineError) -> str:
    """Why a version failed, in words that name no path."""
    if error.code in ("not_proven", "archive"):
        return error.message
    events.emit("version.refused", code=error.code, why=error.message)
    return f"the bundle was refused ({error.code}); the server's log says why"


def without_paths(message: str) -> str:
    """`message` with file names taken out: runtimes put lines of their own sources into messages.

    >>> without_paths("the program refuses these values: /src/core/gather.cc:45 index 9 is out of bounds")
    'the program refuses these values: index 9 is out of bounds'
    """
    return _PATHS.sub("", message)
