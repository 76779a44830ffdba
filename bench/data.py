"""What the data layer costs, each figure beside its baseline in the same run.

    python -m bench.data [--records 60000] [--no-tensors]

CPU seconds of the whole process (user and system, all threads), the best of many turns. Last, one line of JSON;
null is what was not measured: `s3_ratio` needs TRUELINE_BENCH_S3 (a folder of a store that may be written).
`straggler_ratio` is that of bench/leases.py.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench._table import report
from bench.leases import straggler

from trueline.data import look, recordio, snappy
from trueline.data.cache import BlockCache
from trueline.data.open import open_records
from trueline.data.order import record_at, split
from trueline.data.parquet import ParquetFormat
from trueline.data.records import FileRecords, Records
from trueline.data.remote import Patience, Store, list_store, opened
from trueline.data.resident import Tables
from trueline.data.source import Unit
from trueline.data.windows import WindowOrder

_BYTES = 784
_GROUP = 4096
_CACHE = 256 << 20


def rate(count: int, work: Callable[[], Any], turns: int = 30, enough_s: float = 8.0) -> float:
    """Records per CPU second, best of `turns`; of three at least when they take more than `enough_s` together.

    The best and not the mean: what a busy machine adds (pages that come late, cold caches) is no cost of the work.
    """
    took: list[float] = []
    while len(took) < turns and (len(took) < 3 or sum(took) < enough_s):
        before = time.process_time()
        work()
        took.append(time.process_time() - before)
    return count / min(took)


def pictures(count: int) -> pa.Table:
    """Half of each record's bytes are noise, half are zeros, and a label."""
    noise = np.random.default_rng(0).integers(0, 256, (count, _BYTES), dtype=np.uint8)
    noise[:, ::2] = 0
    offsets = np.arange(count + 1, dtype=np.int32) * _BYTES
    image = pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(noise)])
    return pa.table({"image": image, "label": pa.array(np.arange(count))})


def pixels(table: pa.Table) -> np.ndarray[Any, Any]:
    column = table["image"].combine_chunks()
    start = column.offset * _BYTES
    flat = np.frombuffer(column.buffers()[2], np.uint8)[start : start + len(column) * _BYTES]
    return flat.reshape(-1, _BYTES)


def feeding(tensors: bool) -> Callable[[pa.Table], Any]:
    if not tensors:
        return lambda table: (pixels(table).copy(), table["label"].to_numpy())
    import torch

    torch.set_num_threads(1)  # a second one that waits for its share of so little to copy costs more than it spares

    def feed(table: pa.Table) -> Any:
        return torch.tensor(pixels(table)), torch.from_numpy(table["label"].to_numpy().copy())

    return feed


def epoch(records: Records, feed: Callable[[pa.Table], Any], batch: int) -> None:
    """One epoch in the order of windows."""
    order = WindowOrder(records.units, seed=0, window_records=8 * _GROUP)
    tables = Tables(records, _CACHE)
    for start in range(0, order.num_records, batch * 64):
        found = order.at(np.arange(start, min(start + batch * 64, order.num_records)), epoch=0)
        for at in range(0, len(found), batch):
            feed(tables.take(found[at : at + batch]))


def in_order(records: Records, feed: Callable[[pa.Table], Any], batch: int) -> None:
    """One epoch in the order in which the records lie, as evaluation and prediction read."""
    tables, count = Tables(records, _CACHE), look.count_of(records)
    for start in range(0, count, batch):
        feed(tables.take(np.arange(start, min(start + batch, count))))


def plain(path: Path, *, checked: bool = False) -> None:
    """`checked`: the sums of its pages are compared, as Trueline always does."""
    with pq.ParquetFile(path, memory_map=True, page_checksum_verification=checked) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group)


def group_for_each(path: Path, reads: int) -> None:
    """What a reader does that knows no windows: the row group is decoded for each range of 64 records."""
    chosen = np.random.default_rng(1)
    with pq.ParquetFile(path, memory_map=True) as file:
        for _ in range(reads):
            table = file.read_row_group(int(chosen.integers(file.num_row_groups)))
            table.slice(int(chosen.integers(len(table) - 64)), 64)


def parquet(folder: Path, count: int, tensors: bool) -> dict[str, float]:
    path = folder / "pictures.parquet"
    pq.write_table(pictures(count), path, row_group_size=_GROUP, write_page_checksum=True)
    records, feed = open_records(path), feeding(tensors)
    baseline = rate(count, lambda: plain(path))
    checked = rate(count, lambda: plain(path, checked=True))
    ours = rate(count, lambda: in_order(records, feed, 256))
    shuffled = rate(count, lambda: epoch(records, feed, 256))
    ranges = rate(count, lambda: epoch(records, lambda table: None, 64))
    numbers = folder / "numbers.parquet"
    columns = {f"c{n}": np.random.default_rng(n).random(count, np.float32) for n in range(8)}
    pq.write_table(pa.table(columns), numbers, row_group_size=_GROUP)
    narrow = rate(count, lambda: epoch(open_records(numbers), lambda table: None, 64))
    naive = rate(64 * 100, lambda: group_for_each(path, 100), turns=1)
    return {
        "parquet_ratio": ours / baseline,
        "parquet_checked_ratio": ours / checked,
        "parquet_shuffled_ratio": shuffled / baseline,
        "parquet_records_per_cpu_s": ours,
        "parquet_shuffled_records_per_cpu_s": shuffled,
        "pyarrow_checked_records_per_cpu_s": checked,
        "pyarrow_records_per_cpu_s": baseline,
        "range_records_per_cpu_s": ranges,
        "range_narrow_records_per_cpu_s": narrow,
        "range_naive_records_per_cpu_s": naive,
        "range_ratio": ranges / naive,
    }


def bare(data: bytes) -> Iterator[bytes]:
    """The shortest honest loop over a RecordIO file, without any check."""
    at = 0
    while at < len(data):
        _, _, compressor, length, count = recordio.HEADER.unpack_from(data, at)
        stored = memoryview(data)[at + 20 : at + 20 + length]
        payload = snappy.decompress(stored) if compressor == 1 else bytes(stored)
        place = 0
        for _ in range(count):
            size = int.from_bytes(payload[place : place + 4], "little")
            yield payload[place + 4 : place + 4 + size]
            place += 4 + size
        at += 20 + length


def record_files(folder: Path, count: int) -> dict[str, float]:
    """Records of one length, and of lengths that differ (0 to 783 bytes shorter)."""
    images = [row["image"] for row in pictures(count).to_pylist()]
    cuts = np.random.default_rng(3).integers(0, _BYTES, count).tolist()
    kinds = {"none": images, "snappy": images, "mixed": [one[cut:] for one, cut in zip(images, cuts, strict=True)]}
    found = {}
    for kind, values in kinds.items():
        path = folder / f"{kind}.recordio"
        with path.open("wb") as file:
            for at in range(0, count, 1300):
                file.write(recordio.chunk(values[at : at + 1300], compressor="none" if kind == "mixed" else kind))
        records = open_records(path)
        loop = rate(count, lambda path=path: sum(map(len, bare(path.read_bytes()))))
        ours = rate(count, lambda records=records: [records.load(n, 0, u.count) for n, u in enumerate(records.units)])
        found[f"recordio_{kind}_ratio"] = ours / loop
        found[f"recordio_{kind}_records_per_cpu_s"] = ours
    return {**found, "recordio_ratio": min(found["recordio_none_ratio"], found["recordio_snappy_ratio"])}


def plan() -> dict[str, float]:
    """The order of 10^9 records in row groups of 131,072, and the first step of an epoch somewhere in it."""
    size = 131_072
    units = [Unit(uri="u", offset=at, count=min(size, 10**9 - at)) for at in range(0, 10**9, size)]

    def planned() -> None:
        WindowOrder(units, seed=0).at(np.arange(123_456_789, 123_456_789 + 256), epoch=7)

    best = 1 / rate(1, planned, turns=5)
    tracemalloc.start()
    planned()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"plan_ms_1e9": best * 1000, "plan_mb_1e9": peak / 2**20}


def membership(folder: Path, count: int = 20_011) -> dict[str, int]:
    """Workers 4, 3, 5, 8 at random steps of an epoch, over every format: each record counts how often it was read.

    What a worker had prefetched when the others changed is thrown away, as in a job; nothing is applied twice.
    """
    lost = repeated = 0
    table = pa.table({"record": pa.array([str(n).encode() for n in range(count)], pa.binary())})
    pq.write_table(table, folder / "ids.parquet", row_group_size=999)
    for to in ("parquet", "arrow", "recordio", "mxnet"):
        where = folder / f"ids-{to}"
        look.convert(folder / "ids.parquet", where, to=to, range_records=7000)
        seen = read_by_turns(open_records(where), np.random.default_rng(len(to)))
        lost += count - len(seen)
        repeated += sum(times - 1 for times in seen.values())
    return {"lost": lost, "repeated": repeated}


def read_by_turns(records: Records, chance: np.random.Generator, batch: int = 64) -> Counter[int]:
    total = look.count_of(records)
    orders = (
        WindowOrder(records.units, seed=5, window_records=3000).at(np.arange(total), epoch=2),
        record_at(np.arange(total), seed=5, epoch=2, num_records=total),
    )
    seen: Counter[int] = Counter()
    for order in orders:
        here: Counter[int] = Counter()
        steps = [order[at : at + batch] for at in range(0, total, batch)]
        changes = [0, *sorted(chance.choice(len(steps), 3, replace=False).tolist()), len(steps)]
        for workers, (begin, end) in zip((4, 3, 5, 8), pairwise(changes), strict=True):
            tables = [Tables(records, 1 << 20) for _ in range(workers)]
            weights = (chance.random(workers) + 0.1).tolist()
            for step in range(begin, end):
                for worker, (start, stop) in enumerate(split(len(steps[step]), weights)):
                    if stop > start:
                        mine = tables[worker].take(steps[step][start:stop])["record"].to_pylist()
                        here.update(int(value) for value in mine)
        seen += here
    return Counter({record: times - len(orders) + 1 for record, times in seen.items()})


def stores(folder: Path) -> dict[str, float | None]:
    """Epochs over the same Parquet: from a store whose blocks are in the cache, and from the disk."""
    path = folder / "pictures.parquet"
    count = look.count_of(open_records(path))
    local = rate(count, lambda: epoch(open_records(path), lambda table: None, 256))

    def warm(where: str) -> float:
        fs, root = opened(where)
        fs.pipe_file(f"{root}/pictures.parquet", path.read_bytes())
        store = Store(fs, Patience(), BlockCache(folder / "cache", 1 << 30))
        uri = f"{where}/pictures.parquet"

        def read() -> None:
            epoch(FileRecords(ParquetFormat(), list_store(uri, (), store=store)), lambda table: None, 256)

        read()
        return rate(count, read) / local

    real = os.environ.get("TRUELINE_BENCH_S3")
    return {"memory_store_ratio": warm("memory://bench"), "s3_ratio": warm(real.rstrip("/")) if real else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--no-tensors", action="store_true", help="numpy instead of torch, which takes long to import")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {
            **parquet(folder, given.records, not given.no_tensors),
            **record_files(folder, given.records),
            **plan(),
            **membership(folder),
            **stores(folder),
            **straggler(),
        }
    report(["figure", "value"], [[name, "-" if value is None else value] for name, value in result.items()], result)


if __name__ == "__main__":
    main()
