"""The claim of a bundle: the sizes that the model answers, and the widest of the exporter's claims that values bear
out.

    exporter's claims ─settle─▶ probes ─choose─▶ the first that agrees ─extend─▶ far sizes

`size_limits` cuts the claims to what the eager model answers (settle), and to what was compared (extend). Guards are
neither necessary nor sufficient: a claim that leaves an assumption of the exporter out is taken when the exported
program agrees with the eager model on the probes between it and the strictest.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from trueline.bundle.padding import cut, fill_up
from trueline.bundle.signature import Array, Signature
from trueline.capture.export.exported import Exported
from trueline.capture.export.torch_export import LoadedProgram
from trueline.capture.model.signature import BATCH
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import Probe, is_mask, resize
from trueline.capture.proof.prove import judge
from trueline.runtime.compare import compare
from trueline.runtime.session import Session


def choose(exported: Exported, observations: Sequence[Observation]) -> Exported:
    """`exported` with the first claim on which it agrees with the eager model's answers."""
    strict = exported.claims[-1]
    for claim in exported.claims[:-1]:
        candidate = replace(exported, signature=claim)
        between = [seen for seen in observations if allows(claim, seen.probe) and not allows(strict, seen.probe)]
        if _tests_difference(claim, strict, between) and judge(LoadedProgram(candidate), between).proven:
            return candidate
    return replace(exported, signature=strict)


def narrower(exported: Exported, disagreeing: Sequence[Probe] = ()) -> Exported | None:
    """The same with the next claim that leaves out what the strictest does of `disagreeing`; None at the last."""
    at, strict = exported.claims.index(exported.signature), exported.claims[-1]
    outside = [probe for probe in disagreeing if not allows(strict, probe)]
    further = (claim for claim in exported.claims[at + 1 :] if not any(allows(claim, probe) for probe in outside))
    return next((replace(exported, signature=claim) for claim in further), None)


def _tests_difference(claim: Signature, strict: Signature, between: Sequence[Observation]) -> bool:
    """Whether a probe breaks each condition of `strict` that `claim` leaves out: else nothing was tested."""
    tested = [strict.sizes(seen.probe.inputs) for seen in between]
    return all(
        any(not guard.holds(sizes) for sizes in tested) for guard in strict.guards if guard not in claim.guards
    ) and all(
        any(not strict.dims[symbol].allows(sizes[symbol]) for sizes in tested)
        for symbol in claim.symbols
        if claim.dims[symbol] != strict.dims[symbol]
    )


def allows(claim: Signature, probe: Probe) -> bool:
    return claim.allows(claim.sizes(probe.inputs))


TRIED = 3
"""Comparisons that a dimension needs at least before it may be padded."""


def prove_padding(eager: Session, signature: Signature, example: Mapping[str, Array]) -> Signature:
    """`signature` with the symbols that may be padded to one length, and with the value that pads each mask.

    For each free dimension that a mask has too, examples of several lengths are padded at their end; the answers for
    the original part have to stay the same. A model that pools without its mask, normalises over the length or counts
    positions from the end fails, and its requests of different lengths are never batched.
    """
    if signature.random or signature.state:
        return signature
    masks = [spec.name for spec in signature.inputs if example[spec.name].ndim > 1 and is_mask(example[spec.name])]
    symbols = [
        symbol
        for symbol in signature.symbols
        if symbol != BATCH and any(symbol in spec.shape for spec in signature.inputs if spec.name in masks)
    ]
    for fill in (0, 1) if symbols else ():  # most masks mark what is visible, some what is hidden
        inputs = tuple(
            msgspec.structs.replace(spec, fill=fill if spec.name in masks else 0) for spec in signature.inputs
        )
        claim = msgspec.structs.replace(signature, inputs=inputs)
        held = [symbol for symbol in symbols if _holds(eager, claim, example, masks, [symbol])]
        if len(held) > 1 and not _holds(eager, claim, example, masks, held):
            held = held[:1]
        if held:
            return msgspec.structs.replace(claim, padded=tuple(held))
    return signature


def _holds(
    eager: Session, claim: Signature, example: Mapping[str, Array], masks: Sequence[str], symbols: Sequence[str]
) -> bool:
    """Whether padding `symbols` together keeps all answers the same."""
    tried = 0
    for given, more in _cases(claim, example, masks, symbols):
        sizes = {symbol: size for symbol, size in claim.sizes(given).items() if symbol in symbols}
        try:
            expected = eager.run(given)
            answer = cut(claim, eager.run(fill_up(claim, given, more)), sizes)
        except Exception:  # noqa: BLE001 - the user's forward on values it may not know: then nothing is padded
            return False
        if not compare(expected, answer).agrees:
            return False
        tried += 1
    return tried >= TRIED


def _cases(
    claim: Signature, example: Mapping[str, Array], masks: Sequence[str], symbols: Sequence[str]
) -> Iterator[tuple[dict[str, Array], dict[str, int]]]:
    """Inputs, and the sizes to pad them to: as given, with masks that show all, and with other numbers; also one record
    alone."""
    base = claim.sizes(example)
    fill = {spec.name: spec.fill for spec in claim.inputs}
    random = np.random.default_rng(0)
    shown = {n: np.full_like(array, 1 - fill[n]) if n in masks else array for n, array in example.items()}
    drawn = {
        name: np.asarray(random.standard_normal(array.shape)).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in shown.items()
    }
    smallest = {symbol: claim.dims[symbol].min for symbol in symbols}
    starts = [base, {**base, BATCH: 1}, {**base, **smallest}]
    for start, given in itertools.product(starts, (dict(example), shown, drawn)):
        for times in (1, 2):
            more = {one: times * start[one] + (2 - times) * claim.dims[one].multiple_of for one in symbols}
            if claim.allows(start) and claim.allows({**start, **more}):
                yield resize(given, claim, start), more
