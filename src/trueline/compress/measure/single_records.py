"""Records of batches as single requests: the sizes that they have most often, and answers to one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trueline.compress.measure.records import RecordBatch

if TYPE_CHECKING:
    from trueline.bundle.signature import Array, Signature
    from trueline.runtime.session import Session


def find_usual_sizes(signature: Signature, batches: Sequence[RecordBatch]) -> dict[str, int]:
    """The sizes by symbol that most records have, each alone; empty where the program takes no record alone, equal
    requests have different answers, or records make no batch."""
    if _find_batch_symbol(signature) is None or signature.random:
        return {}
    counts: Counter[tuple[tuple[str, int], ...]] = Counter()
    for batch in batches:
        counts[tuple(sizes_of_record(signature, batch).items())] += batch.count
    sizes = dict(counts.most_common(1)[0][0])
    return sizes if signature.allows(sizes) else {}


def find_record(signature: Signature, batches: Sequence[RecordBatch], sizes: Mapping[str, int]) -> dict[str, Array]:
    """The first record of `sizes`."""
    batch = next(one for one in batches if sizes_of_record(signature, one) == sizes)
    return {name: np.ascontiguousarray(array[:1]) for name, array in batch.inputs.items()}


def sizes_of_record(signature: Signature, batch: RecordBatch) -> dict[str, int]:
    """The sizes by symbol of one record of `batch`."""
    symbol = _find_batch_symbol(signature)
    return signature.sizes(batch.inputs) | ({} if symbol is None else {symbol: 1})


def run_alone(session: Session, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The answers to the records of a batch, each asked for alone."""
    count = len(next(iter(inputs.values())))
    rows = [session.run({name: array[at : at + 1] for name, array in inputs.items()}) for at in range(count)]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _find_batch_symbol(signature: Signature) -> str | None:
    """The symbol that counts records, if it leads every input and output and stands nowhere else."""
    specs = (*signature.inputs, *signature.outputs)
    heads = {spec.shape[0] if spec.shape else None for spec in specs}
    head = heads.pop()
    if heads or not isinstance(head, str) or any(head in spec.shape[1:] for spec in specs):
        return None
    return head
