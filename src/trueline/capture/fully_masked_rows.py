"""Masks that hide a whole row: what a program may claim when it disagrees with the model there and nowhere else.

Attention over nothing is 0 / 0. What a model answers for a row whose mask is all 0 is an accident of its runtime:
PyTorch's fused attention gives numbers, a translation of it others, and neither means anything. A program that
disagrees only there is right wherever somebody asks, so it is sealed with that as a condition which every Session and
the server enforce, as they do the proven sizes. A causal model hides more: position 0 sees nothing when its mask
begins with 0, so the stricter claim wants every row to begin with a value other than 0 (padding after the values).

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Rows, Signature
from trueline.capture.proof.probes import is_mask
from trueline.capture.proof.prove import Observation
from trueline.errors import RequestError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

WIDEST_FIRST: tuple[Rows, ...] = ("some", "first")


def narrowed(
    signature: Signature,
    example: Mapping[str, Array],
    observations: Sequence[Observation],
    evidence: Sequence[Evidence],
) -> Signature | None:
    """The widest claim on the masks that leaves out each probe on which a program disagrees.

    `evidence` is of the `observations`, one for each. None when nothing disagrees, or something does that no claim
    here leaves out.
    """
    wrong = [seen.probe.inputs for seen, one in zip(observations, evidence, strict=True) if one.verdict == "disagrees"]
    claims = narrowings(signature, example) if wrong else ()
    return next((claim for claim in claims if not any(takes(claim, inputs) for inputs in wrong)), None)


def narrowings(signature: Signature, example: Mapping[str, Array]) -> tuple[Signature, ...]:
    """`signature` with what its masks have to show, from the widest claim to the strictest.

    A mask of the user's example that does not keep to a claim is left out of it: that is how the model is used.
    """
    masks = [name for name, array in example.items() if array.ndim > 1 and array.size and is_mask(array)]
    found: list[Signature] = []
    for rows in WIDEST_FIRST:
        alone = {name: signature.with_rows({name: rows}) for name in masks}
        kept = {name: rows for name, claim in alone.items() if takes(claim, example)}
        if kept:
            found.append(signature.with_rows(kept))
    return tuple(found)


def takes(claim: Signature, inputs: Mapping[str, Array]) -> bool:
    """Whether `inputs` lie inside `claim`."""
    try:
        claim.check(inputs)
    except RequestError:
        return False
    return True
