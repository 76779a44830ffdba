"""Which server has which row and which part of a dense parameter. Pure, and the same in every process."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trueline.ps.messages import BUCKETS, SPLIT_BYTES, DensePart, DenseSpec, Routing

Ids = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
BUCKET_SHIFT = np.uint64(64 - (BUCKETS - 1).bit_length())


def mix(values: UInt64s) -> UInt64s:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014), in place: a bijection in which every bit counts."""
    values ^= values >> _SHIFTS[0]
    values *= _FACTORS[0]
    values ^= values >> _SHIFTS[1]
    values *= _FACTORS[1]
    values ^= values >> _SHIFTS[2]
    return values


def table_key(name: str) -> int:
    """64 bits that stand for the name of a table."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def buckets_of(ids: Ids, table: str) -> npt.NDArray[np.uint64]:
    """The bucket of each id, below BUCKETS; negative ids are ids like others."""
    mixed = mix(ids.view(np.uint64) ^ np.uint64(table_key(table)))
    return mixed >> BUCKET_SHIFT


def make_routing(servers: Sequence[str], dense: Sequence[DenseSpec], *, version: int = 1) -> Routing:
    """The routing of a new job. Every server gets an equal share of the buckets, and dense parameters by name; a
    parameter of more than SPLIT_BYTES is spread over all servers."""
    owners = (np.arange(BUCKETS) * len(servers) // BUCKETS).astype("<u2").tobytes()
    return Routing(version=version, servers=tuple(servers), owners=owners, dense=_place_dense(dense, len(servers)))


def _place_dense(dense: Sequence[DenseSpec], servers: int) -> tuple[DensePart, ...]:
    parts = []
    for one in dense:
        size = int(np.prod(one.shape, dtype=np.int64))
        first = table_key(one.name) % servers
        pieces = servers if size * 4 > SPLIT_BYTES else 1
        cuts = [size * piece // pieces for piece in range(pieces + 1)]
        parts += [DensePart(one.name, cuts[i], cuts[i + 1], (first + i) % servers) for i in range(pieces)]
    return tuple(parts)


def owners_of(routing: Routing) -> npt.NDArray[np.uint16]:
    return np.frombuffer(routing.owners, dtype="<u2")


def move_buckets(routing: Routing, servers: Sequence[str], dense: Sequence[DenseSpec]) -> Routing:
    """The routing after `servers` have taken the place of those before; as few buckets move as balance allows.

    A server that stays keeps its number only if its place in `servers` is the same.
    """
    count = len(servers)
    names = {ref: index for index, ref in enumerate(servers)}
    places = np.array([names.get(ref, count) for ref in routing.servers], dtype=np.int64)
    owners = places[owners_of(routing)]
    homeless = list(np.flatnonzero(owners == count))
    shares = [BUCKETS * (index + 1) // count - BUCKETS * index // count for index in range(count)]
    for index in range(count):
        homeless += list(np.flatnonzero(owners == index)[shares[index] :])
    for index in range(count):
        lacking = shares[index] - min(shares[index], int((owners == index).sum()))
        taken, homeless = homeless[:lacking], homeless[lacking:]
        owners[taken] = index
    return Routing(
        version=routing.version + 1, servers=tuple(servers), owners=owners.astype("<u2").tobytes(),
        dense=_place_dense(dense, count),
    )  # fmt: skip
