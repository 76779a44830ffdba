"""What master, servers and workers of a parameter-server job tell each other, as plain values. No torch.

A **minibatch** is numbered in its epoch; (epoch, minibatch) is the identity under which every server applies its
gradient once, whichever worker computed it and however often it is sent. A **step** of the optimizer has one
minibatch, or `parts` of them in synchronous training.
"""

from typing import Literal

from msgspec import Struct

BUCKETS = 1024
"""Parts of each table's ids; a bucket is what moves from server to server."""
SPLIT_BYTES = 4 << 20
"""A dense parameter that is larger is spread over the servers."""

Kind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw"]
Runs = tuple[tuple[int, int], ...]
"""Sorted ranges [start, stop) that neither overlap nor touch."""


class OptimizerSpec(Struct, frozen=True, kw_only=True):
    """One of torch.optim's optimizers with the settings of a parameter group; learning rates come with each push."""

    kind: Kind
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    lr_decay: float = 0.0
    initial_accumulator: float = 0.0
    maximize: bool = False


class TableSpec(Struct, frozen=True, kw_only=True):
    """An embedding table: rows of `dim` float32 numbers, by int64 id."""

    name: str
    dim: int
    group: int  # index in ModelSpec.groups
    init: Literal["normal", "uniform", "zeros"] = "normal"
    scale: float = 1.0
    """Standard deviation of a normal initial value; bound of a uniform one."""
    admit_after: int = 0  # a row is created when its id is pushed for the next time after this number of pushes
    max_rows: int = 0  # in the whole job; 0: no bound
    evict: Literal["", "lru", "lfu"] = ""
    """Which row makes room when there are `max_rows`; empty: none, and new ids get no row."""


class DenseSpec(Struct, frozen=True, kw_only=True):
    """A dense float32 parameter, or a buffer of the model (`group` is -1), of which the last pushed value counts."""

    name: str
    shape: tuple[int, ...]
    group: int


class ModelSpec(Struct, frozen=True, kw_only=True):
    seed: int
    groups: tuple[OptimizerSpec, ...]
    tables: tuple[TableSpec, ...] = ()
    dense: tuple[DenseSpec, ...] = ()
    ema: float = 0.0  # decay of the moving averages of all rows; 0: there are none


class DensePart(Struct, frozen=True):
    """Elements [start, stop) of the flattened parameter or buffer `name`, at the server with index `server`."""

    name: str
    start: int
    stop: int
    server: int


class Routing(Struct, frozen=True, kw_only=True):
    """Which server has what. It changes only in a cut, in which all servers have applied the same minibatches."""

    version: int
    servers: tuple[str, ...]
    """Refs, such as `server-0`; the index is the server's number. A server keeps its ref over its incarnations."""
    owners: bytes
    """BUCKETS uint16 in little-endian order: the index of the server that has the bucket."""
    dense: tuple[DensePart, ...] = ()


class TableStats(Struct, frozen=True, kw_only=True):
    name: str
    rows: int
    bytes: int
    lookups: int = 0
    evicted: int = 0
    refused: int = 0  # gradients of ids that got no row: not yet admitted, or the table was full
    busy_s: float = 0.0  # processor time of its pulls and pushes


class ServerReport(Struct, frozen=True, kw_only=True):
    """What a server says of itself. `applied`: by epoch, the minibatches that it has applied."""

    ref: str
    pid: int
    routing: int  # -1: not configured
    initialized: bool
    steps: int
    applied: dict[int, Runs] = {}
    tables: tuple[TableStats, ...] = ()
    pulls: int = 0
    pushes: int = 0
    duplicates: int = 0
    staleness: tuple[int, ...] = ()
    """Pushes by staleness: steps applied between their pull and their push; the last entry has all larger ones."""
    memory: int = 0  # bytes that the process has in memory
    queued: int = 0  # pushes that wait for the end of a cut
    parts: int = 0  # pushes that wait for the other parts of their step
    lacking: str = ""  # what it waits for, such as room on a disk


def describe_change(old: ModelSpec | None, new: ModelSpec) -> str:
    """The first difference, for a message.

    >>> was, became = (TableSpec(name="words", dim=dim, group=0) for dim in (4, 8))
    >>> describe_change(ModelSpec(seed=0, groups=(), tables=(was,)), ModelSpec(seed=0, groups=(), tables=(became,)))
    'table words: dim 4 became 8'
    """
    if old is None:
        return "nothing"
    for kind, what in (("tables", "table"), ("dense", "parameter")):
        before, after = ({one.name: one for one in getattr(spec, kind)} for spec in (old, new))
        for name in (*before, *after):
            if (name in before) != (name in after):
                return f"{what} {name} is {'gone' if name in before else 'new'}"
            if found := _find_changed(before[name], after[name]):
                return f"{what} {name}: {found}"
    for number, (one, other) in enumerate(zip(old.groups, new.groups, strict=False)):
        if found := _find_changed(one, other):
            return f"parameter group {number}: {found}"
    if len(old.groups) != len(new.groups):
        return f"{len(old.groups)} parameter groups became {len(new.groups)}"
    changed = (f"{name} {getattr(old, name)} became {getattr(new, name)}" for name in ("seed", "ema")
               if getattr(old, name) != getattr(new, name))  # fmt: skip
    return next(changed, "the order of its parts")


def _find_changed(old: Struct, new: Struct) -> str:
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in old.__struct_fields__)
    return next((f"{name} {before} became {after}" for name, before, after in pairs if before != after), "")
