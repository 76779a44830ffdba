"""What the data layer costs, each figure compared with its baseline in the same run.

    python -m bench.data [--records 60000] [--only parquet]

CPU seconds of the whole process (user and system, all threads), the best of many turns. The last line is JSON, null for
what was not measured: `s3_ratio` needs TRUELINE_BENCH_S3 (a folder of a store that may be written).
`straggler_ratio` is that of bench/leases.py.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench._table import report
from bench.leases import straggler
from fsspec.implementations.memory import MemoryFileSystem

from trueline.data.formats import recordio
from trueline.data.formats.parquet import ParquetFormat
from trueline.data.loading.decoded_cache import TableCache
from trueline.data.loading.tensors import tensor
from trueline.data.open import open_records
from trueline.data.order.permutation import record_at, split
from trueline.data.order.record_orders import WindowOrder
from trueline.data.records import FileRecords, Records
from trueline.data.source import Unit
from trueline.data.sources.table_source import TableSource
from trueline.data.tools import inspect
from trueline.storage.cache import BlockCache
from trueline.storage.listing import list_store
from trueline.storage.object_store import ObjectStore, RetryPolicy, open_store
from trueline.train.step.plan import JobPlan

_BYTES = 784
_GROUP = 4096
_CACHE = 256 << 20


def rate(count: int, work: Callable[[], Any], turns: int = 30, enough_s: float = 8.0) -> float:
    """Records per CPU second, best of `turns`; of three at least when they take more than `enough_s` together.

    The best and not the mean: what other load adds (late pages, cold caches) is not a cost of the work.
    """
    took: list[float] = []
    while len(took) < turns and (len(took) < 3 or sum(took) < enough_s):
        before = time.process_time()
        work()
        took.append(time.process_time() - before)
    return count / min(took)


def rates(count: int, turns: int = 25, **works: Callable[[], Any]) -> dict[str, float]:
    """`rate` of several works that take turns, so that other load on the machine affects all of them."""
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            before = time.process_time()
            work()
            took[name].append(time.process_time() - before)
    return {name: count / min(times) for name, times in took.items()}


def pictures(count: int) -> pa.Table:
    """Half of each record's bytes are noise, half are zeros, and a label."""
    noise = np.random.default_rng(0).integers(0, 256, (count, _BYTES), dtype=np.uint8)
    noise[:, ::2] = 0
    offsets = np.arange(count + 1, dtype=np.int32) * _BYTES
    image = pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(noise)])
    return pa.table({"image": image, "label": pa.array(np.arange(count))})


def feed(table: pa.Table, mode: str) -> Any:
    """Both columns as tensors: what a recipe's `feed` returns."""
    return tensor(table["image"]), tensor(table["label"])


def epoch(records: Records, batch: int) -> None:
    """One epoch of tables in the order of windows."""
    order = WindowOrder(records.units, seed=0, window_records=8 * _GROUP)
    tables = TableCache(records, _CACHE)
    for start in range(0, order.num_records, batch * 64):
        found = order.at(np.arange(start, min(start + batch * 64, order.num_records)), epoch=0)
        for at in range(0, len(found), batch):
            tables.take(found[at : at + batch])


def in_order(records: Records, batch: int) -> None:
    """One epoch of tensors in the order in which the records are stored, as evaluation and prediction read."""
    source = TableSource(records, feed, mode="training", where="the bench", cache_bytes=_CACHE)
    for start in range(0, source.num_records, batch):
        source.read(np.arange(start, min(start + batch, source.num_records)))


def shuffled(records: Records, batch: int) -> None:
    """One epoch of tensors in the order of windows, as a single worker of a job reads with `--shuffle windows`."""
    source = TableSource(records, feed, mode="training", where="the bench", cache_bytes=_CACHE)
    blocks = tuple(unit.count for unit in records.units)
    plan = JobPlan(num_records=source.num_records, global_batch=batch, epochs=1, seed=0, blocks=blocks)
    for step in range(plan.total_steps):
        source.read(plan.records(step))


def plain(path: Path, *, checked: bool = False) -> None:
    """pyarrow's own read, by row groups into Arrow. `checked`: page checksums are compared."""
    with pq.ParquetFile(path, memory_map=True, page_checksum_verification=checked) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group)


def in_batches(path: Path, batch: int) -> None:
    """The same with its batch reader, which needs less memory and so less time."""
    with pq.ParquetFile(path, memory_map=True) as file:
        for _ in file.iter_batches(batch, use_threads=False):
            pass


def group_for_each(path: Path, reads: int) -> None:
    """A reader without windows: the row group is decoded for each range of 64 records."""
    chosen = np.random.default_rng(1)
    with pq.ParquetFile(path, memory_map=True) as file:
        for _ in range(reads):
            table = file.read_row_group(int(chosen.integers(file.num_row_groups)))
            table.slice(int(chosen.integers(len(table) - 64)), 64)


def parquet(folder: Path, count: int) -> dict[str, float]:
    """Both sides take turns, in batches of 256 records; `larger` in such of 1,024 more records share what a batch
    costs by itself. `first` is the first epoch over a file with checksums, which Trueline compares once."""
    path, summed = folder / "pictures.parquet", folder / "summed.parquet"
    pq.write_table(pictures(count), path, row_group_size=_GROUP)
    pq.write_table(pictures(count), summed, row_group_size=_GROUP, write_page_checksum=True)
    numbers = folder / "numbers.parquet"
    columns = {f"c{n}": np.random.default_rng(n).random(count, np.float32) for n in range(8)}
    pq.write_table(pa.table(columns), numbers, row_group_size=_GROUP)
    found = rates(
        count,
        plain=lambda: plain(path),
        batches=lambda: in_batches(path, 256),
        checked=lambda: plain(summed, checked=True),
        ours=lambda: in_order(open_records(path), 256),
        larger=lambda: in_order(open_records(path), 1024),
        first=lambda: in_order(open_records(summed), 256),
        shuffled=lambda: shuffled(open_records(path), 256),
        ranges=lambda: epoch(open_records(path), 64),
        narrow=lambda: epoch(open_records(numbers), 64),
    )
    naive = rate(64 * 100, lambda: group_for_each(path, 100), turns=1)
    return {
        "parquet_ratio": found["ours"] / found["plain"],
        "parquet_1024_ratio": found["larger"] / found["plain"],
        "parquet_batches_ratio": found["ours"] / found["batches"],
        "parquet_first_ratio": found["first"] / found["plain"],
        "parquet_checked_ratio": found["first"] / found["checked"],
        "parquet_shuffled_ratio": found["shuffled"] / found["plain"],
        "parquet_records_per_cpu_s": found["ours"],
        "parquet_shuffled_records_per_cpu_s": found["shuffled"],
        "pyarrow_records_per_cpu_s": found["plain"],
        "range_records_per_cpu_s": found["ranges"],
        "range_narrow_records_per_cpu_s": found["narrow"],
        "range_naive_records_per_cpu_s": naive,
        "range_ratio": found["ranges"] / naive,
    }


def bare(data: bytes) -> Iterator[bytes]:
    """The shortest loop that reads a RecordIO file, without any check."""
    at = 0
    while at < len(data):
        _, _, compressor, length, count = recordio.HEADER.unpack_from(data, at)
        stored = memoryview(data)[at + 20 : at + 20 + length]
        payload = recordio.decompress_snappy(stored) if compressor == 1 else bytes(stored)
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
                file.write(
                    recordio.encode_chunk(values[at : at + 1300], compressor="none" if kind == "mixed" else kind)
                )
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

    What a worker had prefetched when the members changed is discarded, as in a job; no record is applied twice.
    """
    lost = repeated = 0
    table = pa.table({"record": pa.array([str(n) for n in range(count)])})
    pq.write_table(table, folder / "ids.parquet", row_group_size=999)
    for to in ("parquet", "arrow", "csv", "jsonl", "recordio", "mxnet", "arrayrecord"):
        where = folder / f"ids-{to}"
        inspect.convert(folder / "ids.parquet", where, to=to, range_records=7000)
        seen = read_by_turns(open_records(where), np.random.default_rng(len(to)))
        lost += count - len(seen)
        repeated += sum(times - 1 for times in seen.values())
    return {"lost": lost, "repeated": repeated}


def read_by_turns(records: Records, chance: np.random.Generator, batch: int = 64) -> Counter[int]:
    total = inspect.count_records(records)
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
            tables = [TableCache(records, 1 << 20) for _ in range(workers)]
            weights = (chance.random(workers) + 0.1).tolist()
            for step in range(begin, end):
                for worker, (start, stop) in enumerate(split(len(steps[step]), weights)):
                    if stop > start:
                        mine = tables[worker].take(steps[step][start:stop])["record"].to_pylist()
                        here.update(int(value) for value in mine)
        seen += here
    return Counter({record: times - len(orders) + 1 for record, times in seen.items()})


def stores(folder: Path, count: int) -> dict[str, float | None]:
    """Epochs over the same Parquet, opened before: from a store whose blocks are in the cache, and from the disk."""
    path = folder / "stored.parquet"
    pq.write_table(pictures(count), path, row_group_size=_GROUP)

    def warmed(where: str) -> Callable[[], None]:
        fs, root = open_store(where)
        fs.pipe_file(f"{root}/stored.parquet", path.read_bytes())
        store = ObjectStore(fs, RetryPolicy(), BlockCache(folder / "cache", 1 << 30))
        records = FileRecords(ParquetFormat(), list_store(f"{where}/stored.parquet", (), store=store))
        epoch(records, 256)
        return lambda: epoch(records, 256)

    real = os.environ.get("TRUELINE_BENCH_S3")
    local = open_records(path)
    works = {"local": lambda: epoch(local, 256), "memory": warmed("memory://bench")}
    if real:
        works["s3"] = warmed(real.rstrip("/"))
    found = rates(count, **works)
    ratios = {name: found[name] / found["local"] for name in works}
    return {"memory_store_ratio": ratios["memory"], "s3_ratio": ratios.get("s3")}


class Bucket(MemoryFileSystem):
    """A simulated store of 1 TB: a thousand Parquet files of 1 GB, with a hole between two row groups and the footer. A
    request takes 20 ms; the time for its bytes is left out."""

    protocol = "bucket"
    cachable = False
    COUNT, SIZE, LATENCY_S = 1000, 10**9, 0.02
    begin = end = b""

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any) -> Any:
        time.sleep(self.LATENCY_S)
        return {name: self._described(name) for name in (f"/tb/{number:04d}.parquet" for number in range(self.COUNT))}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        time.sleep(self.LATENCY_S)
        return self._described(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        time.sleep(self.LATENCY_S)
        first, last = start or 0, self.SIZE if end is None else end
        found = bytearray(last - first)
        for at, content in ((0, self.begin), (self.SIZE - len(self.end), self.end)):
            low, high = max(at, first), min(at + len(content), last)
            if low < high:
                found[low - first : high - first] = content[low - at : high - at]
        return bytes(found)

    def _described(self, path: str) -> dict[str, Any]:
        return {"name": path, "size": self.SIZE, "type": "file", "ETag": path}

    @classmethod
    def fill(cls) -> None:
        """Two row groups of 4,096 records in each file."""
        sink = io.BytesIO()
        pq.write_table(pictures(2 * _GROUP), sink, row_group_size=_GROUP)
        content = sink.getvalue()
        footer = 8 + int.from_bytes(content[-8:-4], "little")
        cls.begin, cls.end = content[:-footer], content[-footer:]


def first_batch(folder: Path) -> dict[str, float]:
    """From nothing to the first 256 records as tensors, shuffled in windows, of the simulated store."""
    Bucket.fill()
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    began = time.monotonic()
    store = ObjectStore(Bucket(), RetryPolicy(), BlockCache(folder / "first", 1 << 34))
    records = FileRecords(ParquetFormat(), list_store("bucket:///tb", (".parquet",), store=store))
    source = TableSource(records, feed, mode="training", where="the bench", cache_bytes=_CACHE)
    blocks = tuple(unit.count for unit in records.units)
    plan = JobPlan(num_records=source.num_records, global_batch=256, epochs=1, seed=0, blocks=blocks)
    source.read(plan.records(0))
    return {"first_batch_1tb_s": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=60_000)
    parts = ["parquet", "recordio", "plan", "first", "membership", "stores", "straggler"]
    parser.add_argument("--only", choices=parts, help="one part of it")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # a second one that waits for its share of so little to copy costs more than it spares
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "parquet": lambda: parquet(folder, given.records),
            "recordio": lambda: record_files(folder, given.records),
            "plan": plan,
            "first": lambda: first_batch(folder),
            "membership": lambda: membership(folder),
            "stores": lambda: stores(folder, given.records),
            "straggler": straggler,
        }
        result: dict[str, Any] = {}
        for part, measured in measures.items():
            if given.only in (None, part):
                result |= measured()
    report(["figure", "value"], [[name, "-" if value is None else value] for name, value in result.items()], result)


if __name__ == "__main__":
    main()
