"""Records in stores: the same as on a disk, through a cache that is shared, bounded and never torn."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from trueline import events
from trueline.data.formats.parquet import ParquetFormat
from trueline.data.open import open_records
from trueline.data.records import FileRecords
from trueline.data.sources.table_source import TableSource
from trueline.errors import DataError
from trueline.storage import listing
from trueline.storage.cache import BlockCache
from trueline.storage.listing import list_files, list_store
from trueline.storage.object_store import ObjectStore, RetryPolicy, redact_text, redact_uri
from worlds.records import FILES, WORLDS, flat, no_feed, rich, rows_of

pytestmark = pytest.mark.slow  # hundreds of files


@pytest.fixture
def bucket() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    fs = fsspec.filesystem("memory")
    if fs.exists(f"/{name}"):
        fs.rm(f"/{name}", recursive=True)


def upload(path: Path, to: str) -> str:
    fsspec.filesystem("memory").pipe_file(to, path.read_bytes())
    return to


class Flaky:
    """A store that fails as it is told before it answers, and counts its answers."""

    def __init__(self, failures: list[BaseException | int]) -> None:
        self.fs, self.failures, self.reads = fsspec.filesystem("memory"), failures, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fs, name)

    def cat_file(self, key: str, start: int, end: int) -> bytes:
        self.reads += 1
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, BaseException):
                raise failure
            end -= failure
        return bytes(self.fs.cat_file(key, start=start, end=end))


def patient(waits: list[float] | None = None, attempts: int = 4) -> RetryPolicy:
    sink = [] if waits is None else waits
    return RetryPolicy(attempts=attempts, first_s=1.0, sleep=sink.append, chance=lambda: 0.0)


@pytest.mark.parametrize("name", [name for name in FILES if name != "array record"])
def test_every_format_is_read_from_a_store_as_from_a_disk(
    name: str, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_shared_cache", lambda: BlockCache(tmp_path / "cache", 1 << 26))
    rows = WORLDS[name].rows(120)
    path = WORLDS[name].write(tmp_path / "world", rows)
    one = upload(path, f"{bucket}/day=1/{path.name}")
    assert rows_of(open_records(one)) == rows
    upload(path, f"{bucket}/day=2/{path.name}")
    assert rows_of(open_records(bucket)) == rows * 2
    assert rows_of(open_records(f"{bucket}/*/*{path.suffix}")) == rows * 2


def stored(tmp_path: Path, bucket: str, store: ObjectStore) -> FileRecords:
    uri = upload(WORLDS["parquet"].write(tmp_path / "world", rich(300)), f"{bucket}/one.parquet")
    return FileRecords(ParquetFormat(), list_store(uri, (".parquet",), store=store))


def test_a_store_that_fails_for_a_moment_is_asked_again_with_growing_waits(tmp_path: Path, bucket: str) -> None:
    waits: list[float] = []
    fs = Flaky([ConnectionResetError("reset"), TimeoutError("slow"), 7])
    records = stored(tmp_path, bucket, ObjectStore(fs, patient(waits), None, block_bytes=1000))
    assert rows_of(records) == rich(300)
    assert waits == [1.0, 2.0, 4.0]


def test_a_store_that_never_answers_is_an_error_with_the_number_of_attempts(tmp_path: Path, bucket: str) -> None:
    fs = Flaky([OSError("no route")] * 99)
    with pytest.raises(DataError, match=r"one\.parquet at bytes 0 to 1\d+: OSError: no route \(4 attempts\)"):
        stored(tmp_path, bucket, ObjectStore(fs, patient()))


def test_a_server_that_sends_the_whole_objects_checksum_with_a_part_is_told_from_damage() -> None:
    class FlexibleChecksumError(Exception):
        """botocore's own, of rclone's answers to ranges of large objects."""

    def ask() -> bytes:
        raise FlexibleChecksumError("Expected checksum A did not match calculated checksum: B")

    with pytest.raises(DataError, match=r"did not match .*\(4 attempts\)") as caught:
        patient().call(ask, "s3://bucket/one")
    assert "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required" in caught.value.hint


def test_what_is_refused_is_not_asked_again_and_no_secret_is_told(tmp_path: Path, bucket: str) -> None:
    waits: list[float] = []
    fs = Flaky([PermissionError("403 ExpiredToken: https://id:pw@host/x?X-Amz-Signature=s3cr3t&n=1")])
    with pytest.raises(DataError, match=r"no right to read .*one\.parquet") as caught:
        stored(tmp_path, bucket, ObjectStore(fs, patient(waits)))
    assert "expired" in caught.value.hint
    assert not waits
    for secret in ("pw@", "s3cr3t"):
        assert secret not in caught.value.message
        assert caught.value.__cause__ is None
    assert redact_uri("s3://id:pw@bucket/x?token=abc") == "s3://bucket/x"
    assert redact_text("aws_secret_access_key=abc, Credential: 'x'") != "aws_secret_access_key=abc, Credential: 'x'"
    assert "pw" not in repr(list_store(upload(tmp_path / "world.parquet", f"{bucket}/p.parquet"), ())[0])


def test_an_object_that_changes_or_vanishes_while_it_is_read_is_an_error(tmp_path: Path, bucket: str) -> None:
    records = stored(tmp_path, bucket, ObjectStore(fsspec.filesystem("memory"), patient(), None, block_bytes=512))
    upload(WORLDS["parquet"].write(tmp_path / "world", rich(301)), f"{bucket}/one.parquet")
    with pytest.raises(DataError, match="was changed while it was in use"):
        rows_of(records)
    fsspec.filesystem("memory").rm(f"{bucket}/one.parquet")
    with pytest.raises(DataError, match="cannot read memory://"):
        rows_of(records)


def test_a_second_process_and_a_second_epoch_fetch_nothing(tmp_path: Path, bucket: str) -> None:
    fs = Flaky([])
    first = stored(
        tmp_path, bucket, ObjectStore(fs, patient(), BlockCache(tmp_path / "cache", 1 << 24), block_bytes=1000)
    )
    assert rows_of(first) == rows_of(first) == rich(300)
    data = (tmp_path / "world.parquet").read_bytes()
    fetched, footer = fs.reads, 8 + int.from_bytes(data[-8:-4], "little")
    assert fetched == -(-len(data) // 1000) + -(-footer // 1000), "each block once, and the footer from the end"
    store = ObjectStore(fs, patient(), BlockCache(tmp_path / "cache", 1 << 24), block_bytes=1000)
    files = list_store(f"{bucket}/one.parquet", (), store=store)
    assert rows_of(FileRecords(ParquetFormat(), files)) == rich(300)
    assert fs.reads == fetched


class Busy(MemoryFileSystem):
    """A store that counts what it is asked, and changes an object when a number of answers has been given."""

    cachable = False
    protocol = "busy"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.sizes: list[int] = []
        self.before: Callable[[str], None] = lambda what: None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("busy://", "memory://")))

    def find(self, path: str, **options: Any) -> Any:
        return self._counted("find", super().find, path, **options)

    def info(self, path: str, **options: Any) -> Any:
        return self._counted("info", super().info, path, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        found = self._counted("cat", super().cat_file, path, start=start, end=end, **options)
        self.sizes.append(len(found))
        return found

    def _counted(self, what: str, ask: Callable[..., Any], *given: Any, **options: Any) -> Any:
        self.before(what)
        self.asked[what] += 1
        return ask(*given, **options)


@pytest.fixture
def busy() -> Iterator[Busy]:
    fsspec.register_implementation("busy", Busy, clobber=True)
    fs = Busy()
    yield fs
    Busy.store.clear()


def parquet_of(rows: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(rows, sink, **options)
    return sink.getvalue()


def filled(fs: Busy, count: int, folder: Path, **options: Any) -> FileRecords:
    """`count` objects of 100 records each, listed."""
    for number in range(count):
        fs.pipe_file(f"/many/{number:03d}.parquet", parquet_of(pa.table({"x": range(100)}), row_group_size=50))
    fs.asked.clear()
    return listed_again(fs, folder, **options)


def listed_again(fs: Busy, folder: Path, **options: Any) -> FileRecords:
    store = ObjectStore(fs, patient(), BlockCache(folder, 1 << 30), **options)
    return FileRecords(ParquetFormat(), list_store("busy://many", (".parquet",), store=store))


def test_footers_of_many_objects_are_one_request_each_and_one_more_listing(tmp_path: Path, busy: Busy) -> None:
    records = filled(busy, 20, tmp_path)
    assert busy.asked == {"find": 2, "cat": 20}
    assert [unit.count for unit in records.units] == [50] * 40
    busy.asked.clear()
    assert listed_again(busy, tmp_path).fingerprint() == records.fingerprint()
    assert busy.asked == {"find": 1}, "who comes later on this machine finds the footers there"


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_an_object_that_changes_while_the_footers_are_read_is_an_error_and_nothing_of_it_is_kept(
    tmp_path: Path, busy: Busy, change: str
) -> None:
    filled(busy, 9, tmp_path / "other")

    def changing(what: str) -> None:
        if what == "find" and busy.asked["find"]:  # the second listing
            busy.before = lambda what: None
            if change == "replaced":
                busy.pipe_file("/many/004.parquet", parquet_of(pa.table({"x": range(101)})))
            else:
                busy.rm("/many/004.parquet")

    busy.asked.clear()
    busy.before = changing
    with pytest.raises(DataError, match=rf"many/004\.parquet {'was changed' if change == 'replaced' else 'has gone'}"):
        listed_again(busy, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("??/*"))
    assert listed_again(busy, tmp_path / "cache").units[-1].count == 50


@pytest.mark.parametrize("columns", [1, 700, 3000])
def test_a_footer_of_any_length_is_read_in_few_requests(tmp_path: Path, busy: Busy, columns: int) -> None:
    table = pa.table({f"a column of a long name {number}": [1.5] for number in range(columns)})
    data = parquet_of(table)
    footer = int.from_bytes(data[-8:-4], "little")
    busy.pipe_file("/wide/one.parquet", data)
    store = ObjectStore(busy, patient(), BlockCache(tmp_path, 1 << 30))
    records = FileRecords(ParquetFormat(), list_store("busy://wide/one.parquet", (), store=store))
    assert records.schema.names == table.column_names
    assert busy.asked["cat"] == 1 + (footer > 65528) + (footer > 5 * 65536), footer
    assert sum(busy.sizes) <= max(65536, 5 * footer)


def test_units_of_a_batch_are_fetched_at_the_same_time_and_a_long_one_in_pieces(tmp_path: Path, busy: Busy) -> None:
    records = filled(busy, 6, tmp_path, block_bytes=500)
    meeting, first = threading.Barrier(6, timeout=60), Lock()
    met: Counter[str] = Counter()

    def wait(what: str) -> None:
        with first:
            met[what] += 1
            mine = met[what] <= 6
        if mine:
            meeting.wait()  # which never ends where one request waits for another

    busy.before = wait
    source = TableSource(records, no_feed, mode="training", where="the test")
    chosen = np.array([0, 100, 200, 300, 400, 599])
    assert source.table(chosen)["x"].to_pylist() == [0, 0, 0, 0, 0, 99]
    assert busy.asked["cat"] > 12


def test_a_list_of_objects_is_looked_up_at_the_same_time(tmp_path: Path, busy: Busy, monkeypatch: Any) -> None:
    filled(busy, 5, tmp_path)
    monkeypatch.setattr(listing, "_shared_cache", lambda: BlockCache(tmp_path / "cache", 1 << 26))
    meeting = threading.Barrier(5, timeout=60)
    find = Busy.find

    def met(self: Busy, path: str, **options: Any) -> Any:
        meeting.wait()
        return find(self, path, **options)

    monkeypatch.setattr(Busy, "find", met)
    files = list_files([f"busy://many/{number:03d}.parquet" for number in (4, 0, 3, 1, 2)], (".parquet",))
    assert [file.name for file in files] == [f"{number:03d}.parquet" for number in (4, 0, 3, 1, 2)]


def test_a_cache_disk_that_is_full_costs_no_request_for_each_read(tmp_path: Path, busy: Busy) -> None:
    """A disk that is full is a limit on the size of files here: what is written ends the same way."""
    table = pa.table({"x": np.random.default_rng(0).random(20_000)})
    busy.pipe_file("/one/one.parquet", parquet_of(table, row_group_size=5000))
    store = ObjectStore(busy, patient(), BlockCache(tmp_path, 1 << 30), block_bytes=50_000)
    told: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with events.listening(lambda name, fields: told.append(f"{name} {fields['why']}")):
            records = FileRecords(ParquetFormat(), list_store("busy://one/one.parquet", (), store=store))
            assert [row["x"] for row in rows_of(records)] == table["x"].to_pylist()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told
    assert all("cache.not_kept" in one and "longer than this process may write" in one for one in told)
    size = busy.size("/one/one.parquet")
    assert busy.asked["cat"] <= -(-size // 50_000) + 2, "each block once"
    assert not list(tmp_path.glob("??/.*")), "no half of a block stays"


def test_credentials_that_expire_in_the_middle_of_an_epoch_are_one_error_that_names_the_place(
    tmp_path: Path, busy: Busy
) -> None:
    records = filled(busy, 6, tmp_path)
    source = TableSource(records, no_feed, mode="training", where="the test")
    assert source.table(np.array([3, 150]))["x"].to_pylist() == [3, 50]

    def expired(what: str) -> None:
        raise PermissionError("An error occurred (ExpiredToken): token=s3cr3t")

    busy.before = expired
    busy.asked.clear()
    for chosen in ([599, 400], [500], range(200, 300)):
        with pytest.raises(
            DataError, match=r"no right to read busy://many/00[2-5]\.parquet at bytes 0 to \d+"
        ) as caught:
            source.table(np.array(chosen))
        assert "renew" in caught.value.hint
        assert "s3cr3t" not in str(caught.value)
    busy.before = lambda what: None
    assert source.table(np.array([599, 400]))["x"].to_pylist() == [99, 0], "renewed, it goes on"


def test_the_cache_stays_in_its_bound_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    now = [1000.0]
    cache = BlockCache(tmp_path, 100_000, now=lambda: now[0])
    for number in range(100):
        now[0] += 1
        assert bytes(cache.get("key", number, lambda: b"x" * 5000)) == b"x" * 5000
        assert sum(size for _, size, _ in cache._entries()) <= 110_000
    fetched: list[int] = []
    fresh = BlockCache(tmp_path, 100_000, now=lambda: now[0])
    for number in (99, 0):
        fresh.get("key", number, lambda number=number: fetched.append(number) or b"new")
    assert fetched == [0]


def test_a_damaged_block_is_fetched_again(tmp_path: Path) -> None:
    BlockCache(tmp_path, 1 << 20).get("key", 0, lambda: b"right" * 100)
    (path,) = (one for one in tmp_path.glob("??/*") if one.parent.name != "locks" and "-" in one.name)
    told: list[str] = []
    with events.listening(lambda name, fields: told.append(name)):
        for damage in (b"", b"short", b"wrong" * 100 + path.read_bytes()[-12:]):
            path.write_bytes(damage)
            assert bytes(BlockCache(tmp_path, 1 << 20).get("key", 0, lambda: b"right" * 100)) == b"right" * 100
    assert told == ["cache.damaged"] * 3


def test_a_cache_that_cannot_be_written_costs_speed_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told: list[str] = []
    with events.listening(lambda name, fields: told.append(name)):
        assert bytes(BlockCache(tmp_path / "file", 1 << 20).get("key", 0, lambda: b"data")) == b"data"
    assert told == ["cache.not_kept"]


_WRITER = """
import os, signal, sys
from pathlib import Path
from trueline.storage.cache import BlockCache
from trueline.storage.listing import list_files
def dying(handle, mode):
    os.kill(os.getpid(), signal.SIGKILL)
os.fchmod = dying  # which is called when the content is written
BlockCache(Path(sys.argv[1]), 1 << 24).get("key", 0, lambda: b"half" * 1000)
"""


@pytest.mark.slow
def test_a_writer_killed_in_the_middle_of_a_block_leaves_nothing_that_is_read_and_no_lock(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _WRITER, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    left = list(tmp_path.glob("??/*"))
    assert [path.name.startswith(".partial-") for path in left] == [True]
    later = os.stat(left[0]).st_mtime + 7200
    cache = BlockCache(tmp_path, 1 << 24, now=lambda: later)
    assert bytes(cache.get("key", 0, lambda: b"whole")) == b"whole"
    assert not left[0].exists()


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("memory://nothing/here.csv", "the object does not exist"),
        ("nosuchstore://bucket/x.csv", "cannot open 'nosuchstore://bucket/x.csv'"),
    ],
)
def test_what_is_not_in_a_store_is_said(uri: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_records(uri)


def test_a_folder_of_a_store_without_records_is_said(bucket: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{bucket}/notes.txt", b"x")
    with pytest.raises(DataError, match="no records"):
        open_records(bucket)
    assert flat(0) == []


class NoCredentialsError(Exception):
    """As botocore calls it."""


def test_what_a_stores_own_library_raises_is_asked_again_and_then_said_in_words() -> None:
    class ClientPayloadError(Exception):
        pass

    waits: list[float] = []
    patience = RetryPolicy(attempts=3, sleep=waits.append, chance=lambda: 0.0)

    def fails() -> bytes:
        raise ClientPayloadError("secret=hunter2 is torn")

    with pytest.raises(DataError, match=r"cannot read s3://b/a: ClientPayloadError: .* \(3 attempts\)") as failed:
        patience.call(fails, "s3://b/a")
    assert "hunter2" not in failed.value.message
    assert len(waits) == 2

    def nobody() -> bytes:
        raise NoCredentialsError("Unable to locate credentials")

    with pytest.raises(DataError, match="no right to read s3://b/a: Unable to locate credentials"):
        patience.call(nobody, "s3://b/a")
    assert len(waits) == 2, "they do not pass with time"


def test_footers_of_many_objects_are_asked_for_at_the_same_time_and_stay_in_order(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    together, here, most = threading.Barrier(4, timeout=60), threading.Lock(), Counter[int]()

    class Meeting(ParquetFormat):
        """Waits until four footers are being read, which never comes where they are read one by one."""

        def footer(self, file: Any) -> bytes:
            with here:
                most["listed"] += 1
            together.wait()
            return super().footer(file)

    for number in range(8):
        sink = io.BytesIO()
        pq.write_table(pa.table({"x": [number]}), sink)
        fs.pipe_file(f"/many/{number}.parquet", sink.getvalue())
    store = ObjectStore(fs, RetryPolicy(), BlockCache(tmp_path, 1 << 30))
    files = list_store("memory://many", (".parquet",), store=store)
    records = FileRecords(Meeting(), files)
    assert [records.load(number, 0, 1)["x"].to_pylist() for number in range(8)] == [[number] for number in range(8)]
    assert most["listed"] == 8
    fs.pipe_file("/many/3.parquet", b"PAR1 and no more")
    with pytest.raises(DataError, match=r"many/3\.parquet is torn"):
        FileRecords(ParquetFormat(), list_store("memory://many", (".parquet",), store=store))
    fs.rm("/many", recursive=True)
