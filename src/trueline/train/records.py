"""Whether all workers of a job read the same records, those too that start later: after a death, or in another launch.

A file may be replaced, and a data set may read another one, while a job runs or is halted. Workers that began earlier
have records in memory, so the job would continue with a part of either.

    files      of the workers of one launch on one host: by their stamps, in JOB/records.json
    records    of all workers of the job: by sums over some of them, beside what the loss reads (JOB/loss.json)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trueline.data.order.permutation import Indices
from trueline.data.source import Batch, Readable
from trueline.errors import DataError
from trueline.full_disk import write_when_room
from trueline.train.job_dir import JobDir, current_job

MOST, TOGETHER, MOST_BYTES = 256, 8, 64 << 20
"""Records that are compared, and of one read, unless they are larger; then it is one."""
LOOK_S, JOIN_S = 0.25, 0.05
"""For how long the first worker of a job reads records for that, and those that compare."""
APART = 1e-5
"""Difference of a sum, relative to that of the absolute values, which decoders of two hosts may have."""
Sums = dict[str, list[float]]
"""By the number of a record: of each of its tensors a weighted sum and the sum of the absolute values."""
_HINT = (
    "make the records alike in all workers (seed what they are made of), restore them as they were, or start a new job "
    "with those that are there now; it can begin with the trained weights (--weights CHECKPOINT)"
)


def expect_same_files(mine: str) -> None:
    """Raises DataError if `mine`, the fingerprint of the records, is not that of the first worker of this launch here,
    on this host."""
    job = current_job()
    if job is None:
        return
    path = JobDir(job).records
    write_when_room(path, mine.encode(), replace=False)
    first = path.read_text()
    if mine != first:
        raise DataError(
            "the training records were changed while the job trains with them: their files, length or first and last "
            f"records have the fingerprint {mine[:12]} now, expected {first[:12]}, as when this launch began",
            hint=_HINT,
        )


def choose_records(read: Iterable[int]) -> Indices:
    """Of the records that the trials have read, some at even distances, in an order of chance. Another one may kill the
    process that reads it."""
    known = np.array(sorted(read), np.int64)
    spread = known[np.linspace(0, len(known) - 1, min(MOST, len(known))).astype(np.int64)]
    return np.random.default_rng(5).permutation(spread)


def measure_records(reader: Readable, ids: Indices, most_s: float = LOOK_S) -> Sums:
    """Sums over the records `ids`, as many as the time lets. Records that cannot be read, or are others the second
    time, are left to the trials and to their step."""
    found: Sums = {}
    until, together = time.monotonic() + most_s, 1
    while len(ids):
        some, ids = ids[:together], ids[together:]
        try:
            batch = reader.read(some, epoch=0)
            together = TOGETHER if count_bytes(batch) // len(some) * TOGETHER <= MOST_BYTES else 1
            once, again = _sum_rows(batch, len(some)), _sum_rows(reader.read(some, epoch=0), len(some))
        except Exception:  # noqa: BLE001  a damaged record may raise anything; its step finds it
            once = again = []
        found |= {str(index): row for index, row, other in zip(some, once, again, strict=False) if row == other}
        if time.monotonic() > until:
            break
    return found


def count_bytes(batch: Batch) -> int:
    leaves = torch.utils._pytree.tree_leaves((batch.inputs, batch.labels))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_sparse)


def _sum_rows(batch: Batch, count: int) -> list[list[float]]:
    leaves = torch.utils._pytree.tree_leaves((batch.inputs, batch.labels))
    rows: list[list[float]] = [[] for _ in range(count)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == count and not leaf.is_complex():
            flat = leaf.detach().to("cpu", torch.float64).reshape(count, -1).nan_to_num(posinf=0.0, neginf=0.0)
            wave = torch.arange(1, flat.shape[1] + 1, dtype=torch.float64).mul_(1.7).sin_()
            for row, pair in zip(rows, torch.stack([flat @ wave, flat.abs().sum(dim=1)], dim=1).tolist(), strict=True):
                row += pair
    return rows


def expect_same_records(first: Mapping[str, Sequence[float]], mine: Mapping[str, Sequence[float]]) -> None:
    """Raises DataError if a record that both have measured is another one."""
    for index in mine.keys() & first.keys():
        pairs = list(zip(first[index], mine[index], strict=False))
        off = [abs(was - now) / max(size, 1e-30) for (was, now), (size, _) in zip(pairs[::2], pairs[1::2], strict=True)]
        if len(first[index]) == len(mine[index]) and max(off, default=0.0) <= APART:
            continue
        shown = [f"{values[0]:.9g}" if values else "nothing" for values in (mine[index], first[index])]
        raise DataError(
            f"record {index} of the training records is another one than when the job began: a weighted sum of its "
            f"numbers is {shown[0]} now, expected {shown[1]}",
            hint=_HINT,
        )


def compare_with_first(first: Any, reader: Readable, *, most_s: float = JOIN_S) -> None:
    """As `expect_same_records`, for what the first worker has left, which may be nothing; it has read these records."""
    if first:
        expect_same_records(first, measure_records(reader, np.array([*map(int, first)], np.int64), most_s))
