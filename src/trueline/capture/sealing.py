"""From proven rungs to a bundle: golden records, lineage, and the choice of the program to serve."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trueline import events
from trueline.bundle import Bundle, Contents, Golden, ProgramEntry, Signature, Summary
from trueline.bundle import seal as seal_bundle
from trueline.bundle.schema import RECORDS_CASE
from trueline.bundle.signature import Array
from trueline.capture.claims import prove_padding
from trueline.capture.model.signature import BATCH
from trueline.capture.proof import fast_path
from trueline.capture.proof.narrowing import takes
from trueline.capture.proof.observe import observation, with_bounds
from trueline.capture.proof.probes import fit, resize
from trueline.capture.proof.prove import versions
from trueline.capture.rung import Rung
from trueline.capture.subject import Subject, count_table_lookups
from trueline.checkpoint.checkpoint import read_manifest
from trueline.errors import CaptureError
from trueline.recipe.contract import Recipe
from trueline.runtime import distribution
from trueline.runtime.session import FORMATS, Format, Session
from trueline.storage.location import Location

GOLDEN_SIZES = (1, 2, 5)
CONFINED = 2.0
"""A range of floats that ends below this many times the largest of the examples is one that requests leave."""


def seal(
    recipe: Recipe, checkpoint: Location | None, subject: Subject, rungs: Sequence[Rung], out: Path, *, overwrite: bool
) -> Bundle:
    """Seals the proven rungs at `out`."""
    proven = [rung for rung in rungs if rung.attempt.verdict == "proven"]
    signature = next(rung.signature for rung in proven if rung.signature is not None)
    random = any(rung.random for rung in proven)
    signature = msgspec.structs.replace(signature.with_rows({}).with_values({}), random=random)
    signature = prove_padding(subject.eager, signature, subject.eager.example)
    if not all(_accepts_padding(rung.signature or signature, signature, subject) for rung in proven):
        signature = msgspec.structs.replace(signature, padded=())
    manifest = read_manifest(checkpoint) if checkpoint is not None else {}
    mode = fast_path.describe(subject.eager)
    if mode:
        events.emit("model.as_trained", why=mode)
    kept = ("digest", "file", "step", "created", "recipe", "progress", "weights", "data", "job", "loss")
    lineage: dict[str, Any] = {
        "recipe": {"name": recipe.name, "digest": recipe.digest},
        "data": subject.data,
        "checkpoint": {key: manifest[key] for key in kept if key in manifest} or None,
        "certificates": manifest.get("certificates") or [],
        "attempts": [rung.attempt.as_record() for rung in rungs],
        "versions": versions(),
        "parent": None,
        **({"eager_mode": mode} if mode else {}),
        **({"columns": subject.columns.digest} if subject.columns else {}),
        **({"tables": tables} if (tables := _describe_tables(recipe, subject)) else {}),
    }
    digest, step = manifest.get("digest"), manifest.get("step")
    contents = Contents(
        name=recipe.name,
        signature=signature,
        programs=[(make_entry(rung), rung.folder) for rung in proven],
        serve=_choose_served(proven, subject.eager.examples),
        golden=_golden(subject, signature, [rung.signature for rung in proven if rung.signature is not None]),
        evidence=[one for rung in rungs for one in rung.evidence],
        lineage=lineage,
        summary=Summary(recipe=recipe.name, recipe_digest=recipe.digest, checkpoint_digest=digest, step=step),
        columns=subject.columns if subject.rows else None,
        records=subject.rows,
    )
    return seal_bundle(out, contents, overwrite=overwrite)


def _choose_served(proven: Sequence[Rung], examples: Sequence[Mapping[str, Array]]) -> Format:
    """The first of FORMATS, those last that claim little more than the numbers of the examples."""
    first = min(proven, key=lambda rung: (_is_confined(rung, examples), FORMATS.index(rung.attempt.format)))
    return first.attempt.format


def _is_confined(rung: Rung, examples: Sequence[Mapping[str, Array]]) -> bool:
    """A state is no number of a request, and indices end where their tables do."""
    for name, values in (rung.signature.values if rung.signature is not None else {}).items():
        if name not in examples[0] or examples[0][name].dtype.kind != "f":
            continue
        if values.low is not None and values.high is not None:
            shown = max(float(np.max(np.abs(one[name]), initial=0.0)) for one in examples)
            if max(abs(values.low), abs(values.high)) < CONFINED * shown:
                return True
    return False


def _describe_tables(recipe: Recipe, subject: Subject) -> list[dict[str, Any]]:
    """What embedding tables without a vocabulary (`ps/embedding.py`) tell of themselves."""
    count_table_lookups(recipe, subject.module)
    modules = subject.module.named_modules()
    return [{"name": name, **part.describe_table()} for name, part in modules if hasattr(part, "describe_table")]


def _accepts_padding(claim: Signature, padded: Signature, subject: Subject) -> bool:
    """Whether the values that fill a sequence up are inside the claim of a program."""
    sizes = claim.sizes(subject.eager.example)
    return all(
        spec.values.refusal(spec.name, np.array([padded_spec.fill], spec.dtype), sizes) is None
        for spec, padded_spec in zip(claim.inputs, padded.inputs, strict=True)
        if spec.values and set(spec.shape) & set(padded.padded)
    )


def make_entry(rung: Rung) -> ProgramEntry:
    """The manifest's entry of a proven program."""
    return ProgramEntry(
        format=rung.attempt.format,
        file=rung.file,
        proven=True,
        seconds=round(rung.attempt.seconds, 3),
        probes=rung.attempt.probes,
        max_abs_error=rung.attempt.max_abs_error,
        versions=versions(),
        notes=rung.attempt.how,
        rows=rung.signature.rows if rung.signature is not None else {},
        values=rung.signature.values if rung.signature is not None else {},
    )


def _golden(subject: Subject, signature: Signature, claims: Sequence[Signature]) -> list[Golden]:
    """The example at several batch sizes, and one case for the smallest of every other free dimension. Each program has
    to answer each case, so cases outside one of the `claims` are left out, and those that the model itself cannot
    answer: the smallest height may need a width that is smaller too. Raises CaptureError where none is left."""
    example = {**subject.eager.example, **subject.eager.initial_state}
    base = signature.sizes(example)
    cases = {f"batch-{size}": {**base, BATCH: size} for size in GOLDEN_SIZES}
    if subject.rows:
        cases[RECORDS_CASE] = base
    for symbol in (symbol for symbol in base if symbol != BATCH):
        sizes = fit(signature, base, {symbol: signature.dims[symbol].min})
        if sizes is not None and sizes != base:
            cases[f"{symbol}-{sizes[symbol]}"] = sizes
    records = []
    for case, sizes in cases.items():
        inputs = resize(example, signature, sizes) if case != RECORDS_CASE else example
        if signature.allows(sizes) and all(takes(claim, inputs) for claim in claims):
            answer = _answer(subject, inputs)
            if answer is None:
                continue
            if signature.random:  # many answers, stacked
                answer = distribution.sample(subject.eager, inputs, distribution.golden_draws(answer))
            records.append(Golden(case=case, inputs=inputs, outputs=answer))
    if not records:
        raise CaptureError(
            "no example can be kept in the bundle: the model answers none of its sizes inside of what was proven",
            hint="give examples of sizes that go together",
        )
    if signature.state:
        first = records[0]
        inputs = {**first.inputs, **{given: first.outputs[left] for given, left in signature.state.items()}}
        records.append(Golden(case="second-call", inputs=inputs, outputs=subject.eager.run(inputs)))
    return records if signature.random else add_bounds(subject.eager, records)


def _answer(subject: Subject, inputs: Mapping[str, Array]) -> dict[str, Array] | None:
    try:
        return subject.eager.run(inputs)
    except Exception:  # noqa: BLE001 - the user's forward at sizes that it may not accept together
        return None


def add_bounds(eager: Session, records: Sequence[Golden]) -> list[Golden]:
    """`records`, answers of `eager`, with how far a program may be from them, here and on another machine."""
    seen = [observation(one.case, one.inputs, one.outputs) for one in records]
    bounds = [one.bounds or {} for one in with_bounds(eager, seen)]
    return [
        replace(one, bounds={name: tuple(bound) for name, bound in found.items()})
        for one, found in zip(records, bounds, strict=True)
    ]
