"""The search of an `IdIndex`, compiled by numba (`pip install 'trueline[numba]'`); imported where that is installed.

Most of a lookup in a large table is a wait for memory. The slots of a block of ids are prefetched before the first of
them is compared, so that the waits overlap.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from trueline.ps.partition import Ids

_BLOCK = 32
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
    homes = np.empty(_BLOCK, np.int64)
    start = slots.ctypes.data
    for low in range(0, len(ids), _BLOCK):
        high = min(low + _BLOCK, len(ids))
        for i in range(low, high):
            mixed = np.uint64(ids[i])  # as `partition.mix`
            mixed ^= mixed >> _SHIFTS[0]
            mixed *= _FACTORS[0]
            mixed ^= mixed >> _SHIFTS[1]
            mixed *= _FACTORS[1]
            mixed ^= mixed >> _SHIFTS[2]
            homes[i - low] = np.int64(mixed & np.uint64(mask))
            _prefetch(start + homes[i - low] * _SLOT)
        for i in range(low, high):
            at = homes[i - low]
            while slots[at, 1] != -1 and (slots[at, 0] != ids[i] or slots[at, 1] < 0):
                at = (at + 1) & mask
            places[i] = slots[at, 1]


_SIGNATURE = "void(int64[:, ::1], int64, int64[::1], int64[::1])"


def compile_search() -> Any:
    """Takes a second or two at the first time, and milliseconds with the cache on the disk."""
    try:
        return numba.njit(_SIGNATURE, cache=True)(_search)
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(_SIGNATURE)(_search)
