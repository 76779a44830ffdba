"""A keyed permutation of record numbers: which records form step k, computed alike by every process.

A Feistel network over the smallest power of two that holds the records, cycle-walked until it lands inside (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002), with splitmix64 (Steele, Lea and Flood, 2014) as the round
function. Any position of any epoch is addressed in constant time and memory. Golden values are pinned in
`tests/data/order/test_permutation.py`: changing the order changes every user's training run.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trueline.errors import DataError

Indices = npt.NDArray[np.int64]
Ints = npt.NDArray[np.signedinteger[Any]]
UInt64s = npt.NDArray[np.uint64]

_ROUNDS = 8
_MIN_BITS = 6
"""A narrower network mixes too little to reach all orders evenly."""
_TABLED_BITS = 24
"""Up to 2**24 records the round functions are looked up in tables, if enough positions are requested."""
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MAX_RECORDS = 1 << 62


def record_at(positions: npt.ArrayLike, *, seed: int, epoch: int, num_records: int) -> Indices:
    """The records at `positions` of `epoch`, int64, same shape: a bijection of [0, num_records). Raises DataError."""
    flat = check_positions(positions, num_records).astype(np.uint64).ravel()
    bits = max(_MIN_BITS, (num_records - 1).bit_length())
    state = 0
    for part in (seed, epoch, num_records):
        state = _splitmix(state ^ (part & _MASK))
    keys = tuple(_splitmix(state + index) for index in range(_ROUNDS))
    tables = _tables(keys, bits) if bits <= _TABLED_BITS and len(flat) >= 1 << bits // 2 else None
    records = _feistel(flat, keys, bits, tables)
    outside = np.flatnonzero(records >= num_records)
    while outside.size:
        records[outside] = again = _feistel(records[outside], keys, bits, tables)
        outside = outside[again >= num_records]
    return records.astype(np.int64).reshape(np.shape(positions))


def steps_per_epoch(num_records: int, global_batch: int) -> int:
    """Optimizer steps in one epoch; the last is short when `global_batch` does not divide `num_records`."""
    _check_sizes(num_records, global_batch)
    return -(-num_records // global_batch)


def locate(step: int, *, num_records: int, global_batch: int) -> tuple[int, int, int]:
    """The epoch of the job's step `step` (from 0, over all epochs), and the step's positions [start, stop) in it.

    >>> locate(3, num_records=10, global_batch=4)  # an epoch is 4 + 4 + 2
    (1, 0, 4)
    """
    if step < 0:
        raise DataError(f"step {step} does not exist; steps count from 0")
    epoch, index = divmod(step, steps_per_epoch(num_records, global_batch))
    start = index * global_batch
    return epoch, start, min(start + global_batch, num_records)


def split(count: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Cuts [0, count) into one slice for each weight such that the greatest of slice / weight is the least (D'Hondt):
    with speeds as weights, the last worker ends as early as possible.

    Every positive weight gets at least one when there are enough; a weight of 0 gets an empty slice. Exact fractions
    give the same slices on every machine. Raises DataError for weights that are negative, not finite, or all 0.

    >>> split(10, [1.0, 1.0, 2.0])
    [(0, 3), (3, 5), (5, 10)]
    >>> split(106, [10.0, 0.58])  # in proportion 5.8: a sixth would end later than one more for the other
    [(0, 101), (101, 106)]
    """
    return list(pairwise(accumulate(_shares(count, weights), initial=0)))


def _shares(count: int, weights: Sequence[float]) -> list[int]:
    if count < 0:
        raise DataError(f"cannot split {count} records")
    try:
        exact = [Fraction(weight) for weight in weights]
    except (ValueError, OverflowError) as error:
        raise DataError(f"weights {list(weights)} cannot share records: {error}") from error
    if min(exact, default=Fraction(0)) < 0 or not any(exact):
        raise DataError(f"weights {list(weights)} cannot share records: none may be negative, nor all 0")
    total = sum(exact, Fraction(0))
    shares = [int(count * weight / total) for weight in exact]
    positive = [index for index, weight in enumerate(exact) if weight]
    done = [((shares[index] + 1) / exact[index], index) for index in positive]
    heapify(done)
    for _ in range(count - sum(shares)):
        index = done[0][1]
        shares[index] += 1
        heapreplace(done, ((shares[index] + 1) / exact[index], index))
    if count >= len(positive):
        for index in positive:
            if shares[index] == 0:
                shares[max(positive, key=lambda other: shares[other])] -= 1
                shares[index] = 1
    return shares


def check_positions(positions: npt.ArrayLike, num_records: int) -> Indices:
    """Raises DataError for positions outside and for an empty source."""
    _check_sizes(num_records, 1)
    array = np.asarray(positions)
    if array.size == 0:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"positions are {array.dtype}, expected integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= num_records:
        raise DataError(f"position {low if low < 0 else high} lies outside [0, {num_records})")
    return array.astype(np.int64, copy=False)


def _check_sizes(num_records: int, global_batch: int) -> None:
    if not 1 <= num_records <= _MAX_RECORDS:
        raise DataError(f"a source of {num_records} records cannot be ordered; it needs at least one")
    if global_batch < 1:
        raise DataError(f"global_batch is {global_batch}, expected at least 1")


def _splitmix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def _splitmix_many(values: UInt64s) -> UInt64s:
    values = values + np.uint64(_GAMMA)
    for shift, factor in _MIX:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


def _feistel(values: UInt64s, keys: tuple[int, ...], bits: int, tables: list[Indices] | None) -> UInt64s:
    """A keyed bijection of [0, 2**bits): each round mixes one half into the other. `tables`: see `_tables`."""
    low_bits = bits // 2
    high, low = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
    if tables is not None:
        above, below = high.view(np.int64), low.view(np.int64)
        for index, table in enumerate(tables):
            if index % 2:
                below = below ^ table.take(above)
            else:
                above = above ^ table.take(below)
        return ((above << low_bits) | below).view(np.uint64)
    for index, key in enumerate(keys):
        if index % 2:
            low = low ^ _round(high, key, low_bits)
        else:
            high = high ^ _round(low, key, bits - low_bits)
    return (high << np.uint64(low_bits)) | low


def _round(half: UInt64s, key: int, bits: int) -> UInt64s:
    """The round function: `bits` bits for the other half."""
    return _splitmix_many(half ^ np.uint64(key)) & np.uint64((1 << bits) - 1)


@lru_cache(maxsize=8)
def _tables(keys: tuple[int, ...], bits: int) -> list[Indices]:
    """Each round function's values for every half: at most 256 KB, and a fifth of the work."""
    widths = (bits // 2, bits - bits // 2)
    tables = []
    for index, key in enumerate(keys):
        halves = np.arange(1 << widths[index % 2], dtype=np.uint64)
        tables.append(_round(halves, key, widths[(index + 1) % 2]).astype(np.int64))
    return tables


def key_of(*parts: int) -> int:
    """An independent seed for each sequence of integers."""
    state = len(parts)
    for part in parts:
        state = _splitmix(state ^ _splitmix(part & _MASK))
    return state
