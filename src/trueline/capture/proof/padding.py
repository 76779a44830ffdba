"""Finds the dimensions that may be padded to one length: the model has to obey a mask that hides the padding.

For each free dimension that a mask has too, examples of several lengths are padded at their end; the answers for the
original part have to stay the same. A model that pools without its mask, normalises over the length or counts positions
from the end fails, and its requests of different lengths are never batched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from trueline.bundle.padding import cut, fill_up
from trueline.bundle.signature import Signature
from trueline.capture.model.signature import BATCH
from trueline.capture.proof.probes import is_mask, resize
from trueline.runtime.compare import compare
from trueline.runtime.session import Session

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

TRIED = 3
"""Fewer comparisons than this show nothing."""


def prove_padding(eager: Session, signature: Signature, example: Mapping[str, Array]) -> Signature:
    """`signature` with the symbols that may be padded, and with the value that pads each mask."""
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
        asked = {symbol: size for symbol, size in claim.sizes(given).items() if symbol in symbols}
        try:
            expected = eager.run(given)
            answer = cut(claim, eager.run(fill_up(claim, given, more)), asked)
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
