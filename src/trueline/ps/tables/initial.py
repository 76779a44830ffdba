"""The initial value of a row, from a counter hash of (seed, table, id, column).

It depends on no order and on no partition, so every server, and every incarnation of one, computes the same row,
and a pull creates nothing. The hash is splitmix64's finalizer (Steele, Lea and Flood, 2014); normal values are by Box
and Muller (1958).
"""

import numpy as np
import numpy.typing as npt

from trueline.ps.messages import TableSpec
from trueline.ps.partition import Ids, mix, table_key

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_UNIT = np.float32(2.0**-24)


def initial_rows(spec: TableSpec, seed: int, ids: Ids) -> npt.NDArray[np.float32]:
    """float32 (len(ids), dim): uniform in [-scale, scale), normal with the standard deviation `scale`, or zeros."""
    shape = (len(ids), spec.dim)
    if spec.init == "zeros" or not len(ids):
        return np.zeros(shape, np.float32)
    start = np.uint64((table_key(spec.name) ^ (seed * 0x9E3779B97F4A7C15)) & ((1 << 64) - 1))
    keys = mix(mix(ids.view(np.uint64) ^ start) + _GAMMA)
    columns = np.arange(1, spec.dim + 1, dtype=np.uint64) * _GAMMA
    hashed = mix(keys[:, None] + columns)
    first = (hashed >> np.uint64(40)).astype(np.float32) * _UNIT  # [0, 1) in steps of 2**-24
    if spec.init == "uniform":
        return (first * np.float32(2.0) - np.float32(1.0)) * np.float32(spec.scale)
    second = ((hashed & np.uint64(0xFFFFFF)).astype(np.float32) + np.float32(0.5)) * _UNIT
    radius = np.sqrt(np.float32(-2.0) * np.log(np.float32(1.0) - first))
    normal: npt.NDArray[np.float32] = radius * np.cos(np.float32(2.0 * np.pi) * second) * np.float32(spec.scale)
    return normal
