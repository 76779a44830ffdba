"""Splits records into parts, e.g. for training and evaluation: reproducible by seed, in one stream, each part a file.

Sizes are exact, and so are those of each class with `stratify`: records are counted first, then each is drawn for a
part with the probability that the part's places left and the records left give (selection sampling: Knuth, TAOCP volume
2, 3.4.2, algorithm S). With `by` a record's part follows from the hash of its value in that column alone: records of
one value stay together, also when the data grow, and sizes are near the fractions.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from trueline import files
from trueline.columns.cells import category_key
from trueline.data.missing import stream_tables
from trueline.data.open import as_list, open_records
from trueline.data.records import Records
from trueline.errors import DataError, UsageError, closest, join_names
from trueline.storage.location import Uris

FORMATS = ("parquet", "csv")
Numbers = npt.NDArray[np.int64]


def parse_parts(text: str) -> dict[str, float]:
    """The fractions of parts. Raises UsageError.

    >>> parse_parts("train=0.8,test=0.2")
    {'train': 0.8, 'test': 0.2}
    """
    parts: dict[str, float] = {}
    for entry in text.split(","):
        name, _, value = entry.strip().partition("=")
        try:
            parts[name] = float(value)
        except ValueError:
            parts[name] = math.nan
        if not name or not name.replace("-", "_").isidentifier() or not 0 < parts[name] < 1:
            raise UsageError(f"'{entry}' is no part", hint="write --parts train=0.8,test=0.2")
    if not math.isclose(sum(parts.values()), 1, abs_tol=1e-6):
        raise UsageError(f"the parts sum up to {sum(parts.values()):g}, expected 1")
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Which records go where. `parts`: fractions that sum up to 1."""

    parts: Mapping[str, float]
    by: str = ""
    stratify: str = ""
    seed: int = 0


def split(
    uris: Uris,
    out: str | Path,
    rule: SplitRule,
    *,
    to: str = "",
    overwrite: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Writes `out/NAME.parquet` (or .csv, as the source is) for each part, all or none; returns their records.

    Raises UsageError, DataError, StorageError.
    """
    parts, by, stratify = rule.parts, rule.by, rule.stratify
    if by and stratify:
        raise UsageError("by and stratify cannot both hold: records of one value stay together, or are shared out")
    records = open_records(uris)
    for column in filter(None, (by, stratify)):
        if column not in records.schema.names:
            near = closest(column, records.schema.names)
            raise DataError(
                f"there is no column '{column}'; the records have {join_names(records.schema.names)}",
                hint=f"did you mean '{near}'?" if near else "",
            )
    to = to or ("csv" if all(os.fspath(one).endswith(".csv") for one in as_list(uris)) else "parquet")
    targets = {name: Path(out) / f"{name}.{to}" for name in parts}
    for target in targets.values():
        if target.exists() and not overwrite:
            raise UsageError(f"{target} exists already", hint="choose another folder, or --overwrite")
    total = sum(unit.count for unit in records.units)
    choose = _by_value(rule) if by else _Draws(records, rule)
    counts, done = dict.fromkeys(parts, 0), 0
    with ExitStack() as stack:
        writers = {name: _open_writer(stack, target, records.schema, to) for name, target in targets.items()}
        for table in _tables(records):
            numbers = choose(table, done)
            for number, name in enumerate(parts):
                chosen = table.filter(pa.array(numbers == number))
                counts[name] += len(chosen)
                if len(chosen):
                    writers[name].write_table(chosen)
            done += len(table)
            report(done, total)
        empty = [name for name, count in counts.items() if not count]
        if empty:
            raise DataError(f"part '{empty[0]}' would have none of the {total} records", hint="give it a larger part")
    return counts


def _open_writer(stack: ExitStack, target: Path, schema: pa.Schema, to: str) -> Any:
    target.parent.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context(files.atomic_file(target))
    writer = pq.ParquetWriter(file, schema) if to == "parquet" else pa.csv.CSVWriter(file, schema)
    return stack.enter_context(writer)


def _tables(records: Records) -> Iterator[pa.Table]:
    for number, unit in enumerate(records.units):
        for table in stream_tables(records, number, unit.count):
            yield table.cast(records.schema)


def _uniform(seed: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """[count] in [0, 1), by the number of the record alone (splitmix64; Steele, Lea, Flood 2014)."""
    start = int.from_bytes(hashlib.sha256(f"split:{seed}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        state = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return np.asarray((state >> np.uint64(11)).astype(np.float64) / 2**53)


def _by_value(rule: SplitRule) -> Callable[[pa.Table, int], Numbers]:
    column, seed, ends = rule.by, rule.seed, np.cumsum(list(rule.parts.values()))[:-1]

    def choose(table: pa.Table, first: int) -> Numbers:
        coded = table.column(column).combine_chunks()
        coded = coded if isinstance(coded, pa.DictionaryArray) else coded.dictionary_encode()
        values = [category_key(value) for value in coded.dictionary.to_pylist()]
        likely = np.array([_hash(seed, value) if value is not None else math.nan for value in values] + [math.nan])
        drawn = likely[coded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)]
        drawn = np.where(np.isnan(drawn), _uniform(seed, first, len(table)), drawn)  # no value: each by itself
        return np.searchsorted(ends, drawn, side="right").astype(np.int64)

    return choose


def _hash(seed: int, value: str) -> float:
    digest = hashlib.sha256(f"split:{seed}:{value}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / 2**53


class _Draws:
    """Draws a part for each record, without replacement, in every class by itself."""

    def __init__(self, records: Records, rule: SplitRule) -> None:
        self._column, self._seed, column = rule.stratify, rule.seed, rule.stratify
        sizes = Counter[str | None]()
        for table in _tables(records) if column else ():
            sizes.update(map(category_key, table.column(column).to_pylist()))
        if not column:
            sizes[None] = sum(unit.count for unit in records.units)
        self._left = {key: _quotas(size, list(rule.parts.values())) for key, size in sizes.items()}

    def __call__(self, table: pa.Table, first: int) -> Numbers:
        count = len(table)
        keys = map(category_key, table.column(self._column).to_pylist()) if self._column else [None] * count
        chosen = np.empty(count, np.int64)
        for row, (key, drawn) in enumerate(zip(keys, _uniform(self._seed, first, count).tolist(), strict=True)):
            left = self._left[key]
            chosen[row] = number = bisect_right([*accumulate(left)], drawn * sum(left))
            left[number] -= 1
        return chosen


def _quotas(size: int, fractions: Sequence[float]) -> list[int]:
    """Whole numbers that sum up to `size`, by largest remainder.

    >>> _quotas(7, [0.8, 0.2])
    [6, 1]
    """
    exact = [size * fraction for fraction in fractions]
    found = [math.floor(one) for one in exact]
    order = sorted(range(len(exact)), key=lambda at: found[at] - exact[at])
    for at in order[: size - sum(found)]:
        found[at] += 1
    return found
