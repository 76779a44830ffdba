"""The claim of one program on values: the widest that leaves out what it answers otherwise than the model.

NaN and infinities, numbers beyond a size, and rows of a mask that are hidden are conditions that every Session and the
server enforce, so a program that disagrees only there is sealed with them. An example of the user is never left out: a
program that needs it to be is refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Array, Rows, Signature, TensorSpec
from trueline.bundle.values import Values
from trueline.capture.proof.observe import Observation, observe
from trueline.capture.proof.probes import Probe, is_mask
from trueline.capture.proof.prove import Progress, Proof, judge, judge_narrowed
from trueline.capture.proof.value_probes import HUGE, smaller
from trueline.errors import RequestError
from trueline.runtime.session import Session

Inputs = Mapping[str, Array]
Open = Callable[[Signature], Session]
"""Opens a program with a signature."""

HUGE_ENOUGH = 1e30
"""Beyond it a range ends at one of the sizes that are tried of every model."""
WIDEST_FIRST: tuple[Rows, ...] = ("some", "first")
"""Claims on masks. Attention over a row whose mask is all 0 is 0 / 0: what a model answers there is an accident of its
runtime, and a program that disagrees only there is sealed with a condition that every Session and the server enforce. A
causal model hides more: position 0 sees nothing when its mask begins with 0, so the stricter claim requires every row
to begin with a value other than 0 (padding after the values).
"""


def judge_and_narrow(
    open_with: Open,
    signature: Signature,
    oracle: Session,
    observations: Sequence[Observation],
    *,
    examples: Sequence[Inputs],
    progress: Progress = lambda done, total: None,
) -> tuple[Session, Proof, Sequence[Observation]]:
    """The program, its proof, and the observations of the proof: with `signature`, or with the widest narrower claim
    under which all that is left agrees. `examples` stay inside it."""
    session = open_with(signature)
    proof = judge(session, observations, progress=progress)
    fewer = [
        probe
        for seen, one in zip(observations, proof.evidence, strict=True)
        if one.verdict == "disagrees"
        for probe in smaller(seen.probe)
    ]
    evidence = proof.evidence
    if fewer:
        more = observe(oracle, fewer)
        observations = [*observations, *more]
        evidence = (*evidence, *judge(session, more).evidence)
    claim = narrow(session.signature, examples, observations, evidence)
    if claim is None:
        return session, judge_narrowed(session, observations, evidence) if fewer else proof, observations
    for candidate in _smaller_claims(claim, examples):
        session = open_with(candidate)
        ends = observe(oracle, _probe_ends(candidate, examples[0]))
        found = judge(session, ends).evidence
        if all(one.verdict != "disagrees" for one in found):
            break
    observations = [*observations, *ends]
    return session, judge_narrowed(session, observations, (*evidence, *found)), observations


def _smaller_claims(claim: Signature, examples: Sequence[Inputs]) -> Iterator[Signature]:
    """`claim`, then ten times smaller ranges of floats each time, down to what the examples show, of either sign."""
    shown = {
        spec.name: max(float(np.max(np.abs(one[spec.name]), initial=0.0)) for one in examples)
        for spec in claim.inputs
        if spec.dtype.kind == "f" and spec.values.high is not None
    }
    yield claim
    most = {name: float(claim.values[name].high or 0.0) for name in shown}
    while any(most[name] > shown[name] for name in shown):
        most = {name: max(one / 10, shown[name]) for name, one in most.items()}
        cut = {name: claim.values[name].both(Values(low=-one, high=one)) for name, one in most.items()}
        yield claim.with_values({**claim.values, **cut})


def _probe_ends(claim: Signature, example: Inputs) -> list[Probe]:
    """Probes with all elements of a float input at either end of its claim, and with the ends in turn: what a branch on
    a sum or a norm needs to go the other way, where one planted value does not suffice."""
    probes = []
    for spec in (spec for spec in claim.inputs if spec.dtype.kind == "f"):
        low, high = spec.values.low, spec.values.high
        if low is None or high is None:
            continue
        inside = [np.nextafter(np.asarray(end, spec.dtype), np.asarray(0, spec.dtype)) for end in (low, high)]
        turns = np.resize(np.array(inside), example[spec.name].shape)
        values = [np.full_like(turns, inside[0]), np.full_like(turns, inside[1]), turns]
        for what, array in zip((f"all at {low:g}", f"all at {high:g}", "all at an end"), values, strict=True):
            inputs = {**example, spec.name: array}
            count = array.shape[0] if array.ndim else 1
            probes.append(Probe(name=f"{spec.name} {what}", origin="made", num_records=count, inputs=inputs))
    return probes


def narrow(
    signature: Signature, examples: Sequence[Inputs], observations: Sequence[Observation], evidence: Sequence[Evidence]
) -> Signature | None:
    """The widest claim on values that leaves out each probe on which a program disagrees; None when nothing disagrees,
    or something does that no claim leaves out. `evidence` has one piece for each observation."""
    judged = list(zip(observations, evidence, strict=True))
    wrong = [seen for seen, one in judged if one.verdict == "disagrees"]
    if not wrong:
        return None
    agreed = [seen for seen, one in judged if one.verdict == "agrees"]
    values = dict(signature.values)
    for name in dict.fromkeys(seen.probe.planted for seen in wrong if seen.probe.planted):
        spec = next(spec for spec in signature.inputs if spec.name == name)
        own = [[seen for seen in some if seen.probe.planted == name] for some in (wrong, agreed)]
        values[name] = _narrow_one(spec, [one[name] for one in examples], *own)
    claim = signature.with_values(values)
    for candidate in (claim, *narrowings(claim, examples[0])):
        if all(takes_values(candidate, one) for one in examples) and not any(
            takes(candidate, seen.probe.inputs) for seen in wrong
        ):
            return candidate
    return None


def narrowings(signature: Signature, example: Mapping[str, Array]) -> tuple[Signature, ...]:
    """`signature` with conditions on its masks, from the widest claim to the strictest. A mask of the user's example
    that breaks a claim is left out of it: the model is used that way."""
    masks = [name for name, array in example.items() if array.ndim > 1 and array.size and is_mask(array)]
    claims: list[Signature] = []
    for rows in WIDEST_FIRST:
        alone = {name: signature.with_rows({name: rows}) for name in masks}
        kept = {name: rows for name, claim in alone.items() if takes(claim, example)}
        if kept:
            claims.append(signature.with_rows(kept))
    return tuple(claims)


def takes(claim: Signature, inputs: Mapping[str, Array]) -> bool:
    """Whether `inputs` are inside `claim`."""
    try:
        claim.check(inputs)
    except RequestError:
        return False
    return True


def takes_values(claim: Signature, inputs: Inputs) -> bool:
    """Whether the values of `inputs`, of any sizes, are inside `claim`."""
    try:
        claim.check_values(inputs)
    except RequestError:
        return False
    return True


def round_down(bound: float) -> float:
    """The end of a range of floats as it is claimed: where halving ends differs between runs that trained.

    >>> [round_down(bound) for bound in (2.20673e19, 1e19, 2.21139e37)]
    [2.2e+19, 1e+19, 1e+30]
    """
    if bound >= HUGE_ENOUGH:
        return max(one for one in HUGE if one <= bound)
    if bound < 10:
        return bound
    digits = math.floor(math.log10(bound)) - 1
    return float(f"{math.floor(bound / 10.0**digits + 1e-9)}e{digits}")


def _narrow_one(
    spec: TensorSpec, shown: Sequence[Array], wrong: Sequence[Observation], agreed: Sequence[Observation]
) -> Values:
    values = spec.values
    if any(np.isnan(seen.probe.value) for seen in wrong):
        values = values.both(Values(finite=True))
    sized = [seen.probe.value for seen in wrong if not np.isnan(seen.probe.value)]
    held = [seen.probe.value for seen in agreed if not np.isnan(seen.probe.value)]
    finite = [one[np.isfinite(one)] if one.dtype.kind == "f" else one for one in shown]
    least = min((one.min().item() for one in finite if one.size), default=0)
    most = max((one.max().item() for one in finite if one.size), default=0)
    if spec.dtype.kind == "f":
        if sized:
            bound = max([round_down(one) for one in held if one < min(sized)] + [abs(least), abs(most)])
            values = values.both(Values(low=-bound, high=bound))
        return values
    above, below = [one for one in sized if one > most], [one for one in sized if one < least]
    refused = [seen.probe.value for seen in wrong if seen.outputs is None]
    dtype: Any = spec.dtype
    # the smallest number of a signed dtype alone is refused for what it is: by -1 it cannot be divided
    if any(one > most or (one < least and one != np.iinfo(dtype).min) for one in refused):
        held = []  # where the model's refusal ends depends on other values: only what examples show is safe
    if above:
        high = max([one for one in held if most < one < min(above)] + [most])
        values = (
            values.both(Values(high=high)) if not values.size else msgspec.structs.replace(values, size="", high=high)
        )
    if below:
        values = values.both(Values(low=min([one for one in held if max(below) < one < least] + [least])))
    return values
