"""Seals a candidate as a bundle like any other, whose proof is the tolerance that was accepted.

Golden records keep the parent's inputs with the candidate's own answers, and as bounds the largest difference from the
parent over all evaluation records. So a server proves the program against what was accepted, and another processor,
whose int8 kernels round or saturate otherwise, has to answer inside of it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from trueline import files
from trueline.bundle import Bundle, Contents, Evidence, Golden, ProgramEntry, Summary
from trueline.bundle import seal as seal_bundle
from trueline.bundle.describe import sizes_text
from trueline.bundle.signature import Signature
from trueline.bundle.values import Values
from trueline.capture.proof.narrowing import takes
from trueline.capture.proof.observe import digest
from trueline.capture.proof.probes import fit, resize
from trueline.capture.proof.prove import versions
from trueline.compress.candidate import CompressedCandidate
from trueline.compress.measure import accuracy
from trueline.compress.measure.accuracy import Answers
from trueline.compress.measure.reference import Reference
from trueline.compress.measure.single_records import find_record, run_alone, sizes_of_record
from trueline.errors import NotProven
from trueline.runtime.open import open_program, open_session, replay
from trueline.runtime.openvino import compile_fixed
from trueline.runtime.session import Session

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

Errors = Mapping[str, tuple[float, Any]]
LEAST_SHARE = 1e-4
"""Of the largest answer: no accepted tolerance is below what float32 itself is compared with."""
SLACK = 4.0
"""At sizes that no evaluation record has, a candidate may be this many times as far off."""


def seal(
    reference: Reference, base: Bundle, row: CompressedCandidate, program: Path, out: Path, facts: Mapping[str, Any]
) -> Bundle:
    """Proves `program`, made of the one of `base`, by the tolerance and seals it at `out`, which it replaces.

    Raises NotProven, StorageError.
    """
    began = time.monotonic()
    parent = reference.bundle
    session = open_session(row.format, program, base.signature_of("onnx"), native=True)
    answers = reference.answer(session)
    errors = accuracy.largest_errors(reference.answers, answers, session.signature)
    golden = [_golden(session, one, errors) for one in parent.golden() if takes(session.signature, one.inputs)]
    evidence = [*_evidence(reference, answers, row.format), *_evidence_of_sizes(reference, session, errors)]
    if row.fixed:
        golden += _golden_of_fixed(reference, session, row.fixed, errors)
        evidence += _evidence_of_fixed(reference, compile_fixed(program, session.signature, row.fixed), row.fixed)
    old = base.program("onnx")
    with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=out.parent) as work:
        folder = Path(work)
        (folder / "programs").mkdir()
        for file in program.parent.glob(f"{program.name}*"):
            shutil.copyfile(file, folder / "programs" / file.name)
        entry = ProgramEntry(
            format=row.format, file=f"programs/{program.name}", proven=True, seconds=round(time.monotonic() - began, 3),
            probes=len(evidence), max_abs_error=max((worst for worst, _ in errors.values()), default=0.0),
            versions=versions(), notes=f"{row.name}; compared with its parent, by the tolerance that was accepted",
            rows=old.rows, values=_finite_values(parent, old.values) if row.quantized else old.values,
            fixed=row.fixed,
        )  # fmt: skip
        summary = msgspec.structs.replace(parent.manifest.lineage, parent=parent.digest)
        columns = parent.columns()
        contents = Contents(
            name=parent.name, signature=base.signature, programs=[(entry, folder)], serve=row.format, golden=golden,
            evidence=evidence, lineage=_lineage(parent, row, facts), summary=Summary(**msgspec.to_builtins(summary)),
            columns=columns, records=parent.golden_records() if columns is not None else (),
        )  # fmt: skip
        sealed = seal_bundle(out, contents, overwrite=True)
    replay(sealed, open_program(sealed, native=True))
    return sealed


def _golden(session: Session, parent: Golden, errors: Errors) -> Golden:
    outputs = {name: session.run(parent.inputs)[name] for name in parent.outputs}
    bounds = {name: make_bound(array, errors[name]) for name, array in outputs.items() if name in errors}
    return Golden(case=parent.case, inputs=parent.inputs, outputs=outputs, bounds=bounds)


def _golden_of_fixed(reference: Reference, session: Session, sizes: Mapping[str, int], errors: Errors) -> list[Golden]:
    """A record of the fixed sizes, so that both forms of the program are compared where they are served."""
    record = find_record(session.signature, reference.batches, sizes)
    parent = Golden(case="fixed sizes", inputs=record, outputs=reference.session.run(record))
    return [_golden(session, parent, errors)]


def _evidence_of_fixed(reference: Reference, fixed: Session, sizes: Mapping[str, int]) -> list[Evidence]:
    """Of the form for fixed sizes, beside the parent: the first records of these sizes, one by one."""
    batch = next(one for one in reference.batches if sizes_of_record(fixed.signature, one) == sizes)
    want = reference.session.run(batch.inputs)
    probe = f"{batch.count} evaluation records one by one, compiled for {sizes_text(sizes)}"
    return [_compare(probe, batch.inputs, want, run_alone(fixed, batch.inputs), "given", fixed.format)]


def make_bound(array: Array, error: tuple[float, Any]) -> tuple[Any, ...]:
    """The accepted tolerance in the form of `runtime.compare`: of the whole, then along each axis."""
    floor = LEAST_SHARE * float(np.abs(array).max(initial=0.0))
    worst, columns = max(error[0], floor), error[1]
    bounds = [np.full(1, worst), *(np.full(size, worst) for size in array.shape)]
    if columns is not None and array.ndim and len(columns) == array.shape[-1]:
        bounds[-1] = np.maximum(columns, floor)
    return tuple(bounds)


def _finite_values(parent: Bundle, values: Mapping[str, Values]) -> dict[str, Values]:
    """Conditions on the values: an int8 kernel makes a number of a NaN, so none is let in."""
    found = dict(values)
    for spec in parent.signature.inputs:
        if spec.dtype.kind == "f":
            found[spec.name] = found.get(spec.name, Values()).both(Values(finite=True))
    return found


def _evidence(reference: Reference, answers: Answers, format: str) -> list[Evidence]:
    pairs = zip(reference.batches, reference.answers.outputs, answers.outputs, strict=True)
    return [
        _compare(f"evaluation records, part {number}", batch.inputs, one, other, "given", format)
        for number, (batch, one, other) in enumerate(pairs, 1)
    ]


def _evidence_of_sizes(reference: Reference, session: Session, errors: Errors) -> list[Evidence]:
    """At the golden records and at other sizes, which the evaluation records do not have. Raises NotProven."""
    found = []
    for probe, inputs in _sized_inputs(reference.bundle, session.signature):
        want, have = reference.session.run(inputs), session.run(inputs)
        for name, (worst, _) in errors.items():
            gap = float(np.abs(want[name].astype(np.float64) - have[name].astype(np.float64)).max(initial=0.0))
            allowed = SLACK * max(worst, LEAST_SHARE * float(np.abs(want[name]).max(initial=0.0)))
            if not gap <= allowed:
                raise NotProven(
                    f"at {probe} the candidate's '{name}' is off by {gap:.3g}, and by {worst:.3g} at most on the "
                    "evaluation records",
                    hint="evaluation records of more sizes would show what it does there",
                )
        found.append(_compare(probe, inputs, want, have, "made", session.format))
    return found


def _sized_inputs(parent: Bundle, signature: Signature) -> Iterator[tuple[str, dict[str, Array]]]:
    golden = [one for one in parent.golden() if takes(signature, one.inputs)]
    yield from ((f"golden {one.case}", one.inputs) for one in golden)
    base = golden[0].inputs
    now = signature.sizes(base)
    seen = [now]
    for symbol, size in now.items():
        for wanted in (signature.dims[symbol].min, size + 1, 2 * size, 17):
            sizes = fit(signature, now, {symbol: wanted})
            if sizes is None or sizes in seen:
                continue
            seen.append(sizes)
            inputs = resize(base, signature, sizes)
            if takes(signature, inputs):
                yield ", ".join(f"{name} {count}" for name, count in sizes.items()), inputs


def _compare(
    probe: str, inputs: Mapping[str, Array], want: Mapping[str, Array], have: Mapping[str, Array],
    origin: Literal["given", "made"], format: str,
) -> Evidence:  # fmt: skip
    gaps = {
        name: float(np.abs(array.astype(np.float64) - have[name].astype(np.float64)).max(initial=0.0))
        for name, array in want.items()
    }
    return Evidence(
        format=format, against="parent", probe=probe, origin=origin, inputs_sha256=digest(inputs),
        shapes={name: array.shape for name, array in inputs.items()}, verdict="agrees",
        max_abs_error=max(gaps.values(), default=0.0), tolerance="accepted by the budget",
    )  # fmt: skip


def _lineage(parent: Bundle, row: CompressedCandidate, facts: Mapping[str, Any]) -> dict[str, Any]:
    lineage = parent.lineage()
    lineage.pop("attempts", None)
    kept = ("name", "metric", "loss", "loss_high", "changed", "size_bytes", "memory_bytes", "vs_fp32", "vs_eager")
    done = {name: value for name, value in msgspec.to_builtins(row, str_keys=True).items() if name in kept}
    done["exclude"] = list(row.exclude)
    return {**lineage, "versions": versions(), "parent": parent.digest, "compression": {**facts, **done}}
