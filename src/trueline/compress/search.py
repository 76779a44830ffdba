"""The search: each method is applied, checked, measured and judged, and its row is on disk before the next begins.

    FOLDER/search.json     what is searched: another parent, recipe or budget starts again
    FOLDER/rows.jsonl      one row for each candidate that was tried
    FOLDER/programs/       their programs
    FOLDER/best.bundle     the best so far, sealed

A search that was killed continues behind the last row. Ranges are collected once; they are in FOLDER/work.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from trueline import events, files
from trueline.bundle import Bundle
from trueline.compress import gate, sealing
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.quantizers import QUANTIZERS
from trueline.compress.candidate import CompressedCandidate
from trueline.compress.derive.plan import STRUCTURAL
from trueline.compress.fixed_sizes import reopen, try_fixed
from trueline.compress.measure import accuracy
from trueline.compress.measure.kernels import count_kernels, size_of
from trueline.compress.measure.latency import Rounds
from trueline.compress.measure.memory import measure_memory
from trueline.compress.measure.reference import EAGER, PARENT, Reference
from trueline.compress.method import UNCHANGED, CompressMethod, Target, file_of
from trueline.compress.refine import Refiner
from trueline.compress.search_folder import clear_folder
from trueline.errors import MissingPackage, NotProven, StorageError, TruelineError
from trueline.runtime.openvino import shape_inputs
from trueline.runtime.session import HAS_FIXED, Session

QUICK_S, FULL_S = 1.0, 6.0
"""Seconds that programs are timed: a candidate beside its parent, and all together at the end."""
GAIN = 1.02
"""Times the parent's speed that a candidate has to have for sure, if latency is the target."""

FIXED_SHARE = 1 / 8
"""Of the time that is left, for answers of a form for fixed sizes to records one by one."""
RESERVED = 1 / 3
"""Of the time, for leaving out operators where all that was tried loses too much."""


@dataclass(slots=True)
class Search:
    reference: Reference
    folder: Path
    target: Target
    ends: float
    """On `clock`, after which no further method is tried."""
    clock: Callable[[], float]
    by_hand: bool = False
    """Whether the user named the methods, and no budget."""
    rows: dict[str, CompressedCandidate] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    """What the user named, for the report."""
    bases: dict[str, Bundle] = field(default_factory=dict)
    """Bundles of derived models, by their names in the rows."""
    finals: list[str] = field(default_factory=list)
    """Of the bases: those with which a chain ends."""

    def program(self, base: str = "") -> ParentProgram:
        """The program that methods of `base` begin with."""
        bundle = self.bundle_of(base)
        work = self.folder / "work" / bundle.digest[:16]  # the next call may have trained other models beside it
        work.mkdir(parents=True, exist_ok=True)
        exported = [one.format for one in bundle.manifest.programs if one.format == "torch_export"]
        return ParentProgram(
            bundle.program_path("onnx"), work, self.reference.calibration, signature=bundle.signature_of("onnx"),
            exported=bundle.program_path("torch_export") if exported else None,
        )  # fmt: skip

    def bundle_of(self, base: str) -> Bundle:
        return self.bases[base] if base else self.reference.bundle

    def restore(self, facts: dict[str, Any]) -> None:
        """Takes over the rows of a search for the same; removes those of another one. Raises StorageError."""
        spec = self.folder / "search.json"
        text = msgspec.json.format(msgspec.json.encode(facts, order="sorted"), indent=1)
        self.folder.mkdir(parents=True, exist_ok=True)
        files.sweep(self.folder)
        if spec.is_file() and spec.read_bytes() == text:
            rows = read_rows(self.folder / "rows.jsonl")
            self.rows = {row.name: row for row in rows if self._is_kept(row)}
            if self.rows:
                events.emit("search.restored", rows=len(self.rows), folder=str(self.folder))
            return
        if not spec.is_file() and any(self.folder.iterdir()):
            raise StorageError(f"{self.folder} exists and is no search; it is not replaced", hint="move it away")
        clear_folder(self.folder)
        files.write_atomic(spec, text)

    def _is_kept(self, row: CompressedCandidate) -> bool:
        """Whether a row of an earlier call stands: its program is there; a package that it lacked may be there now.
        Of a search that has sealed its bundle none does, as there are no programs."""
        there = self.folder / "programs" if row.loss is None else self.path_of(row)
        return there.exists() and not row.lacks_package

    def run_until(self, ends: float, methods: Sequence[CompressMethod]) -> None:
        """Tries `methods`, and better ones for those that lose too much, until the time is over; the last part of it is
        for these. Last of all what is made of a derived model that itself loses too much."""
        self.ends = ends
        refiner, reserved = self._refiner(), self.ends - RESERVED * (self.ends - self.clock())
        usual = (
            one for one in methods
            if not self._is_lost(one.base) and (self.clock() < reserved or not refiner.is_needed(methods))
        )  # fmt: skip
        for method in chain(usual, refiner.propose(methods), methods):  # each begins when the one before is done
            if method.name in self.rows:
                continue
            if self.clock() >= self.ends:
                events.emit("search.ended", why="the time is over", tried=len(self.rows))
                return
            self._try(method)

    def try_each(self, methods: Sequence[CompressMethod], ends: float) -> None:
        """Tries `methods` that were not tried, until `ends`, and those of a model that itself loses too much not."""
        for method in methods:
            if self.clock() >= ends:
                return
            if method.name not in self.rows and not self._is_lost(method.base):
                self._try(method)

    def leave_out(self, name: str, why: str) -> None:
        """A row for a derived model that was not trained in time; not on disk, as the next call continues it."""
        self.rows[name] = CompressedCandidate(name=name, kind=UNCHANGED, base=name, verdict="left out", why=why)
        events.emit("candidate.judged", name=name, verdict="left out", why=why)

    def _is_lost(self, base: str) -> bool:
        return base in self.rows and self.rows[base].verdict == "over budget"

    def _refiner(self) -> Refiner:
        parent = size_of(self.reference.bundle.program_path("onnx"))
        return Refiner(
            reference=self.reference, rows=self.rows, ends=self.ends, clock=self.clock, open_program=self.program,
            cost=lambda row: self.cost(row) / (1 if self.target == "latency" else parent),
        )  # fmt: skip

    def _try(self, method: CompressMethod) -> None:
        began = self.clock()
        events.emit("candidate.started", name=method.name)
        try:
            row = self._measure(method)
        except StorageError:
            raise
        except TruelineError as error:
            self._check_room(error)
            why = "; ".join(filter(None, (error.message, error.hint)))
            row = _row_of(method, verdict="failed", why=why, lacks_package=isinstance(error, MissingPackage))
        except OSError as error:
            raise files.storage_error(error, self.folder) from error
        row = msgspec.structs.replace(row, seconds=round(self.clock() - began, 2))
        if self._is_better(row):
            try:
                self.seal(row, self.folder / "best.bundle", {"so_far": True})
            except NotProven as error:
                row = refuse(row, error)
        self.rows[row.name] = row
        _append(self.folder / "rows.jsonl", row)
        events.emit("candidate.judged", name=row.name, verdict=row.verdict, why=row.why)

    def _check_room(self, error: TruelineError) -> None:
        """Raises DiskFull where a method has failed since the disk is full: those after it would fail, too."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise files.storage_error(cause, self.folder) from error
            cause = cause.__cause__
        needed = size_of(self.reference.bundle.program_path("onnx"))
        if shutil.disk_usage(self.folder).free < needed:  # runtimes write in C++, and say so in their own words
            raise files.storage_error(OSError(errno.ENOSPC, "No space left on device"), self.folder) from error

    def _is_better(self, row: CompressedCandidate) -> bool:
        best = self.best()
        return row.verdict == "offered" and (best is None or self.cost(row) < self.cost(best))

    def seal(self, row: CompressedCandidate, out: Path, facts: dict[str, Any]) -> Bundle:
        """Seals the candidate at `out`. Raises NotProven, StorageError."""
        try:
            return sealing.seal(self.reference, self.bundle_of(row.base), row, self.path_of(row), out, facts)
        except OSError as error:
            raise files.storage_error(error, out) from error

    def path_of(self, row: CompressedCandidate) -> Path:
        return self.folder / row.folder / file_of(row.format)

    def _measure(self, method: CompressMethod) -> CompressedCandidate:
        reference, quantizer = self.reference, QUANTIZERS[method.kind]
        place = f"programs/{self._next_number()}-{method.kind}"
        out = self.folder / place / file_of(method.format)
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir(parents=True)
        program = self.program(method.base)
        quantizer.apply(method, program, out)
        kernels = count_kernels(out, method.format)
        facts: dict[str, Any] = {
            "folder": place, "size_bytes": size_of(out), "quantized": kernels.quantized, "floating": kernels.floating,
            "left": kernels.left, "note": program.notes.get(method.kind, ""),
        }  # fmt: skip
        fault = quantizer.find_fault(kernels)
        if fault:
            return _row_of(method, verdict="not compressed", why=fault, **facts)
        session = reference.open(out, method.format)
        answers = reference.answer(session)
        verdict = gate.judge(reference.budget, reference.answers.values, answers.values)
        facts |= {
            "metric": float(answers.values.mean()), "loss": verdict.loss, "loss_low": verdict.low,
            "loss_high": verdict.high, "records_needed": verdict.records_needed,
            "changed": accuracy.count_changed(reference.answers, answers),
        }  # fmt: skip
        if not verdict.keeps:
            return _row_of(method, verdict="over budget", why=explain(reference, verdict), **facts)
        if method.format in HAS_FIXED and self.target == "latency":
            trial = try_fixed(
                reference, out, session, answers, seconds=QUICK_S, most_s=(self.ends - self.clock()) * FIXED_SHARE
            )
            session, facts["fixed"] = trial.session, dict(trial.sizes)
            facts["note"] = "; ".join(filter(None, (facts["note"], trial.note)))
        for batch in reference.timed:
            rounds = reference.time({method.name: session}, batch=batch, seconds=QUICK_S, eager=False)
            _add_times(facts, rounds, method.name, batch)
        row = _row_of(method, verdict="offered", **facts)
        return self._weigh(row, self._lacks(row))

    def _next_number(self) -> int:
        """Of a folder that no row has; rows are fewer than folders where some were not kept."""
        known = [row.folder.partition("/")[2] for row in self.rows.values() if row.folder]
        return max((int(folder.partition("-")[0]) for folder in known), default=-1) + 1

    def _weigh(self, row: CompressedCandidate, why: str) -> CompressedCandidate:
        """The row with its verdict if it keeps the budget. A choice by hand is offered; its row says what it lacks."""
        return msgspec.structs.replace(row, verdict="no gain" if why and not self.by_hand else "offered", why=why)

    def _lacks(self, row: CompressedCandidate) -> str:
        """Why the row is no gain for the target; empty: it is one."""
        first = min(row.vs_fp32)
        if self.target == "latency" and row.vs_fp32_low[first] <= GAIN:
            speed = f"{row.vs_fp32[first]:.2f} times the speed of the parent, {row.vs_fp32_low[first]:.2f} at least"
            return f"not faster here: {speed}{_MASKED if _is_masked(row) else ''}"
        parent = size_of(self.reference.bundle.program_path("onnx"))
        if self.target == "size" and row.size_bytes >= parent:
            return f"not smaller: {row.size_bytes} bytes, the parent has {parent}"
        return ""

    def measure_all(self) -> None:
        """Times every candidate that was judged, the parent and the eager model alternately in one run, and measures
        their memory; rows of candidates that are no gain then are not offered."""
        judged = [row for row in self.rows.values() if row.loss is not None and self.path_of(row).is_file()]
        sessions = {row.name: self._reopen(row) for row in judged}
        timings: dict[str, dict[str, Any]] = {}
        for batch in self.reference.timed:
            rounds = self.reference.time(sessions, batch=batch, seconds=FULL_S, eager=True)
            for name in (PARENT, EAGER, *sessions):
                one = timings.setdefault(name, {})
                _add_times(one, rounds, name, batch)
                one.setdefault("vs_eager", {})[batch] = rounds.speedup(name, EAGER)[0]
        del sessions
        bundle = self.reference.bundle
        paths = {PARENT: bundle.program_path("onnx")}
        paths |= {row.name: self.path_of(row) for row in judged if row.format != "aotinductor"}
        signature = bundle.signature_of("onnx")
        in_openvino = {
            row.name: shape_inputs(signature, row.fixed) if row.fixed else {}
            for row in judged if row.format == "openvino"
        }  # fmt: skip
        memory = measure_memory(
            paths, self.reference.write_inputs(self.program().work / "inputs.safetensors"), in_openvino
        )
        value = self.reference.value
        for name in (EAGER, PARENT):
            size = size_of(paths[PARENT]) if name == PARENT else 0
            self.rows[name] = CompressedCandidate(
                name=name, kind="parent", verdict="no gain", metric=value if name == PARENT else None,
                size_bytes=size, memory_bytes=memory.get(name), **timings[name],
            )  # fmt: skip
        for row in judged:
            changed = msgspec.structs.replace(row, memory_bytes=memory.get(row.name), **timings[row.name])
            if row.verdict in ("offered", "no gain"):
                why = self._lacks(changed) or self._lacks_memory(changed)
                changed = self._weigh(changed, why)
            self.rows[row.name] = changed

    def _reopen(self, row: CompressedCandidate) -> Session:
        path = self.path_of(row)
        return reopen(self.reference.open(path, row.format), path, row.fixed)

    def _lacks_memory(self, row: CompressedCandidate) -> str:
        parent = self.rows[PARENT].memory_bytes
        if self.target != "memory" or (parent and row.memory_bytes and row.memory_bytes < parent):
            return ""
        return "takes no less memory than the parent"

    def cost(self, row: CompressedCandidate) -> float:
        """What the target wants little of."""
        if self.target == "latency":
            return 1 / row.vs_fp32[min(row.vs_fp32)]
        if self.target == "memory" and row.memory_bytes is not None:
            return row.memory_bytes
        return row.size_bytes

    def announce_best(self) -> None:
        """Says where the best so far lies, for a search that is stopped."""
        best, sealed = self.best(), self.folder / "best.bundle"
        if best is not None and (sealed / "bundle.json").is_file():
            events.emit("search.stopped", best=best.name, path=str(sealed))

    def best(self) -> CompressedCandidate | None:
        offered = [row for row in self.rows.values() if row.verdict == "offered"]
        return min(offered, key=self.cost, default=None)


_MASKED = "; masks alone are not faster: the runtime has no kernels for sparse weights"


def _is_masked(row: CompressedCandidate) -> bool:
    last = row.base.rpartition("> ")[2]
    return last.startswith("prune:") and not any(f"{part}=" in last for part in STRUCTURAL) and row.kind == UNCHANGED


def refuse(row: CompressedCandidate, error: NotProven) -> CompressedCandidate:
    """The row of a candidate that keeps the budget on the records, but is farther off elsewhere than was accepted."""
    return msgspec.structs.replace(row, verdict="failed", why=f"not proven: {error.message}")


def explain(reference: Reference, verdict: gate.GateVerdict) -> str:
    """Why the budget is not kept, and how many records would tell more."""
    budget = reference.budget
    text = (
        f"loses {verdict.loss:.4g} of {budget.metric}, up to {verdict.high:.4g} (95 %), the budget is {budget.amount:g}"
    )
    if verdict.records_needed is not None:
        text += f"; {verdict.records_needed} records could show that it is kept, there are {reference.count}"
    return text


def _add_times(facts: dict[str, Any], rounds: Rounds, name: str, batch: int) -> None:
    speed, low = rounds.speedup(name, PARENT)
    for field_name, value in (("timings", rounds.timing(name)), ("vs_fp32", speed), ("vs_fp32_low", low)):
        facts.setdefault(field_name, {})[batch] = value


def _row_of(method: CompressMethod, **facts: Any) -> CompressedCandidate:
    return CompressedCandidate(
        name=method.name, kind=method.kind, words=method.words, exclude=method.exclude, base=method.base,
        trial=method.trial, **facts,
    )  # fmt: skip


def read_rows(path: Path) -> Iterator[CompressedCandidate]:
    """The rows that were written whole, by this release: a candidate without one is tried again."""
    if path.is_file():
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                with suppress(msgspec.DecodeError):
                    yield msgspec.json.decode(line, type=CompressedCandidate)


def _append(path: Path, row: CompressedCandidate) -> None:
    try:
        kept = b"".join(msgspec.json.encode(one) + b"\n" for one in read_rows(path))
        files.write_atomic(path, kept + msgspec.json.encode(row) + b"\n")
    except OSError as error:
        raise files.storage_error(error, path) from error
