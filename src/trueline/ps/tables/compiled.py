"""Search and inserts of an `IdIndex`, buckets of ids, copies and sums of rows, steps of SGD and Adagrad, and unique
ids, compiled by numba; imported where that is installed (`pip install 'trueline[numba]'`).

Most of a lookup in a large table is a wait for memory. What an id needs is prefetched while those before it are
computed, so that many waits overlap at any moment. A step reads and writes each row once, where NumPy copies the rows,
changes the copy in several passes and copies it back; both compute the same bits.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from trueline.ps.partition import BUCKET_SHIFT, Ids

_AHEAD = 32
"""Ids between the one that is prefetched and the one that is computed."""
_SLOT = 16  # bytes: id and place
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _make_prefetch(typing: Any, address: Any) -> Any:
    """Source: `llvm.prefetch` in the LLVM language reference; arguments: to read, to keep, data."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        tools: Any = cgutils
        function = tools.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(arguments[0], pointer), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


_prefetch: Any = intrinsic(_make_prefetch)


def _search(slots: Any, mask: Any, ids: Ids, places: Any) -> None:
    """Writes the place of each id, -1 where it has none. `slots`: (n, 2) id and place; empty: -1, removed: -2."""
    homes = np.empty(_AHEAD, np.int64)
    start = slots.ctypes.data
    for i in range(len(ids) + _AHEAD):
        if i >= _AHEAD:
            which, at = i - _AHEAD, homes[i % _AHEAD]
            while slots[at, 1] != -1 and (slots[at, 0] != ids[which] or slots[at, 1] < 0):
                at = (at + 1) & mask
            places[which] = slots[at, 1]
        if i < len(ids):
            mixed = np.uint64(ids[i])  # as `partition.mix`
            mixed ^= mixed >> _SHIFTS[0]
            mixed *= _FACTORS[0]
            mixed ^= mixed >> _SHIFTS[1]
            mixed *= _FACTORS[1]
            mixed ^= mixed >> _SHIFTS[2]
            homes[i % _AHEAD] = np.int64(mixed & np.uint64(mask))
            _prefetch(start + homes[i % _AHEAD] * _SLOT)


def _insert(slots: Any, mask: Any, ids: Ids, places: Any) -> None:
    """Enters ids, which are unique and not there, each in the first empty slot from its own."""
    homes = np.empty(_AHEAD, np.int64)
    start = slots.ctypes.data
    for i in range(len(ids) + _AHEAD):
        if i >= _AHEAD:
            which, at = i - _AHEAD, homes[i % _AHEAD]
            while slots[at, 1] != -1:
                at = (at + 1) & mask
            slots[at, 0], slots[at, 1] = ids[which], places[which]
        if i < len(ids):
            mixed = np.uint64(ids[i])
            mixed ^= mixed >> _SHIFTS[0]
            mixed *= _FACTORS[0]
            mixed ^= mixed >> _SHIFTS[1]
            mixed *= _FACTORS[1]
            mixed ^= mixed >> _SHIFTS[2]
            homes[i % _AHEAD] = np.int64(mixed & np.uint64(mask))
            _prefetch(start + homes[i % _AHEAD] * _SLOT)


def _lie_in(ids: Ids, key: Any, wanted: Any, lying: Any) -> None:
    """Writes whether the bucket of each id is `wanted`; `key`: of the table, as `partition.buckets_of`."""
    for i in range(len(ids)):
        mixed = np.uint64(ids[i]) ^ key
        mixed ^= mixed >> _SHIFTS[0]
        mixed *= _FACTORS[0]
        mixed ^= mixed >> _SHIFTS[1]
        mixed *= _FACTORS[1]
        mixed ^= mixed >> _SHIFTS[2]
        lying[i] = wanted[mixed >> BUCKET_SHIFT]


def _take(rows: Any, places: Any, taken: Any) -> None:
    """Writes the row at each place into `taken`; of a place below 0 the first row."""
    start, width = rows.ctypes.data, rows.shape[1] * 4
    for i in range(len(places) + _AHEAD):
        if i < len(places):
            _prefetch(start + places[i] * width)
        if i >= _AHEAD:
            at = max(places[i - _AHEAD], 0)
            for j in range(rows.shape[1]):
                taken[i - _AHEAD, j] = rows[at, j]


def _sum(rows: Any, places: Any, total: Any) -> None:
    """Adds each row to the row at its place in `total`, in order."""
    for i in range(len(places)):
        at = places[i]
        for j in range(rows.shape[1]):
            total[at, j] += rows[i, j]


def _step_sgd(rows: Any, places: Any, gradients: Any, rate: Any) -> None:
    """`optimizers.update` of plain SGD for the rows at `places`, which differ."""
    start, width = rows.ctypes.data, rows.shape[1] * 4
    for i in range(len(places) + _AHEAD):
        if i < len(places):
            _prefetch(start + places[i] * width)
        if i >= _AHEAD:
            which, at = i - _AHEAD, places[i - _AHEAD]
            for j in range(rows.shape[1]):
                rows[at, j] -= gradients[which, j] * rate


def _step_adagrad(rows: Any, sums: Any, places: Any, gradients: Any, rate: Any, eps: Any) -> None:
    """The same of Adagrad without decays."""
    row, total, width = rows.ctypes.data, sums.ctypes.data, rows.shape[1] * 4
    for i in range(len(places) + _AHEAD):
        if i < len(places):
            _prefetch(row + places[i] * width)
            _prefetch(total + places[i] * width)
        if i >= _AHEAD:
            which, at = i - _AHEAD, places[i - _AHEAD]
            for j in range(rows.shape[1]):
                gradient = gradients[which, j]
                sums[at, j] += gradient * gradient
                rows[at, j] -= gradient * rate / (np.sqrt(sums[at, j]) + eps)


def _find_unique(values: Any, slots: Any, found: Any, order: Any, positions: Any) -> Any:
    """The unique `values` in order; `positions`: of each value among them. `slots`: a power of two of them, twice as
    many as values or more; `found`, `order`: (2, n), for what is in between."""
    slots[:] = -1
    count, least = 0, values[0]
    for i in range(len(values)):
        mixed = np.uint64(values[i])
        mixed ^= mixed >> _SHIFTS[0]
        mixed *= _FACTORS[0]
        mixed ^= mixed >> _SHIFTS[2]
        at = np.int64(mixed & np.uint64(len(slots) - 1))
        while slots[at] >= 0 and found[0, slots[at]] != values[i]:
            at = (at + 1) & (len(slots) - 1)
        if slots[at] < 0:
            slots[at] = order[0, count] = count
            found[0, count] = values[i]
            least = min(least, values[i])
            count += 1
        positions[i] = slots[at]
    last = _sort(found[:, :count], order[:, :count], least)
    for i in range(count):
        order[1 - last, order[last, i]] = i
    for i in range(len(values)):
        positions[i] = order[1 - last, positions[i]]
    return found[last, :count].copy()


def _sort_by_digits(found: Any, order: Any, least: Any) -> Any:
    """Sorts the values in `found[0]`, the smallest of which is `least`, and `order[0]` with them; where they then are.

    By digits of the distance to `least`, or to 0 if that is less. Where more than three digits differ, the first two
    are used, and what is left is sorted by insertion; by all digits after all where that takes many moves.
    """
    count, base, differ, digits = found.shape[1], np.uint64(min(least, 0)), np.uint64(0), 0
    starts, every = np.empty(1 << _DIGIT, np.int64), np.uint64((1 << _DIGIT) - 1)
    for i in range(count):
        differ |= (np.uint64(found[0, i]) - base) ^ (np.uint64(found[0, 0]) - base)
    bits = 0
    while bits < 64 and differ >> np.uint64(bits):
        digits += bits % _DIGIT == 0 and (differ >> np.uint64(bits)) & every != 0
        bits += 1
    low, last = (max(0, bits - 2 * _DIGIT) if digits > 3 else 0), 0
    while True:
        for shift in range(low, bits, _DIGIT):
            if (differ >> np.uint64(shift)) & every == 0:
                continue
            starts[:] = 0
            for i in range(count):
                starts[((np.uint64(found[last, i]) - base) >> np.uint64(shift)) & every] += 1
            total = 0
            for which in range(len(starts)):
                starts[which], total = total, total + starts[which]
            for i in range(count):
                bucket = ((np.uint64(found[last, i]) - base) >> np.uint64(shift)) & every
                at = starts[bucket]
                starts[bucket] = at + 1
                found[1 - last, at], order[1 - last, at] = found[last, i], order[last, i]
            last = 1 - last
        moves = i = 0
        while i < count and moves <= 2 * count:
            value, which, at = found[last, i], order[last, i], i
            while at and found[last, at - 1] > value:
                found[last, at], order[last, at] = found[last, at - 1], order[last, at - 1]
                at -= 1
            found[last, at], order[last, at] = value, which
            moves += i - at
            i += 1
        if i == count:
            return last
        low = 0


_DIGIT = 11  # bits; counts of 2,048 stay in the first cache
_sort: Any = numba.njit(_sort_by_digits)


_ROWS, _PLACES, _NUMBER = "float32[:, ::1]", "int64[::1]", "float32"
FUNCTIONS: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "insert": (_insert, ("int64[:, ::1]", "int64", _PLACES, _PLACES), "void"),
    "lie_in": (_lie_in, (_PLACES, "uint64", "boolean[::1]", "boolean[::1]"), "void"),
    "search": (_search, ("int64[:, ::1]", "int64", _PLACES, _PLACES), "void"),
    "take": (_take, (_ROWS, _PLACES, _ROWS), "void"),
    "sum": (_sum, (_ROWS, _PLACES, _ROWS), "void"),
    "sgd": (_step_sgd, (_ROWS, _PLACES, _ROWS, _NUMBER), "void"),
    "adagrad": (_step_adagrad, (_ROWS, _ROWS, _PLACES, _ROWS, _NUMBER, _NUMBER), "void"),
    "unique": (_find_unique, (_PLACES, "int32[::1]", "int64[:, ::1]", "int32[:, ::1]", _PLACES), _PLACES),
}
"""By name: what is compiled, the types of its arguments, and that of its result."""


def compile_function(what: str) -> Any:
    """Takes a second or two at the first time, and milliseconds with the cache on the disk."""
    function, kinds, returns = FUNCTIONS[what]
    signature = f"{returns}({', '.join(kinds)})"
    try:
        return numba.njit(signature, cache=True)(function)
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(signature)(function)
