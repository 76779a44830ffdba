"""From a bundle on disk to a program that may answer: opened, replayed and measured.

Nothing that is not proven here is handed out: the golden examples are asked of the very session that will serve, with
the device, the precision and the threads that it will have.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from trueline import events
from trueline.bundle.read import Bundle
from trueline.errors import BundleError
from trueline.runtime.open import open_program, replay
from trueline.serve import host
from trueline.serve.batching.execution_plan import draw_up
from trueline.serve.models.version import Loaded

PLATFORMS = {
    "onnx": "onnxruntime_onnx",
    "openvino": "openvino_onnx",
    "offload": "pytorch_offload",
    "torch_export": "pytorch_export",
    "torchscript": "pytorch_libtorch",
    "aotinductor": "pytorch_aotinductor",
}
"""What the protocol calls the formats of programs. Of `pytorch_` are those whose threads are the process's own."""


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


def _load(bundle: Bundle, way: Way, max_batch: int) -> Loaded:
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
    return Loaded(
        session=session,
        digest=bundle.digest,
        platform=PLATFORMS[way.program],
        golden_cases=len(replayed),
        plan=draw_up(session, bundle.golden(), max_batch=max_batch, by_record=bundle.program(way.program).by_record),
    )
