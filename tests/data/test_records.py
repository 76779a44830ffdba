"""One suite for every way to keep records: the same promises for all of them, and bad input is named."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trueline.data.open import open_records, open_source
from trueline.data.records import Records
from trueline.data.sources.table_source import TableSource
from trueline.errors import DataError
from worlds import TESTS
from worlds.records import FILES, WORLDS, Rows, World, no_feed
from worlds.steps import step_records

pytestmark = pytest.mark.slow  # hundreds of files in each format

COUNT = 230


def world_of(name: str) -> World:
    if name == "array record" and importlib.util.find_spec("array_record") is None:
        pytest.skip("the package array_record is not installed")
    return WORLDS[name]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    return world_of(request.param)


@pytest.fixture(params=FILES)
def file_world(request: pytest.FixtureRequest) -> World:
    return world_of(request.param)


def source_of(records: Records) -> TableSource:
    return TableSource(records, no_feed, mode="training", where="world")


def written(world: World, folder: Path, count: int = COUNT) -> tuple[Path, Rows]:
    rows = world.rows(count)
    return world.write(folder / "world", rows), rows


def test_units_lie_one_after_the_other_and_hold_every_record_in_order(world: World, tmp_path: Path) -> None:
    path, rows = written(world, tmp_path)
    records = world.open(path)
    offset = 0
    for number, unit in enumerate(records.units):
        assert (unit.offset, unit.count > 0, unit.uri != "") == (offset, True, True)
        table = records.load(number, 0, unit.count)
        assert table.schema.equals(records.schema)
        assert table.to_pylist() == rows[offset : offset + unit.count]
        offset += unit.count
    assert offset == COUNT


def test_a_range_at_every_border_of_a_unit_holds_exactly_its_records(world: World, tmp_path: Path) -> None:
    path, rows = written(world, tmp_path)
    records = world.open(path)
    for number, unit in enumerate(records.units):
        ends = sorted({0, 1, unit.count // 2, unit.count - 1, unit.count})
        for start, stop in ((start, stop) for start in ends for stop in ends if start <= stop):
            found = records.load(number, start, stop)
            assert found.to_pylist() == rows[unit.offset + start : unit.offset + stop]


def test_any_records_come_in_the_order_asked_for_and_an_epoch_is_each_of_them_once(
    world: World, tmp_path: Path
) -> None:
    path, rows = written(world, tmp_path)
    source = source_of(world.open(path))
    wanted = np.array([COUNT - 1, 0, 57, 57, 12, 96, 97, 98])
    assert source.table(wanted).to_pylist() == [rows[i] for i in wanted]
    for step in range(-(-COUNT // 32)):
        chosen = step_records(step, seed=3, num_records=COUNT, global_batch=32)
        assert source.table(chosen).to_pylist() == [rows[i] for i in chosen]


def test_the_fingerprint_stays_while_the_records_do(world: World, tmp_path: Path) -> None:
    path, _ = written(world, tmp_path)
    first = world.open(path).fingerprint()
    assert first == world.open(path).fingerprint()
    assert len(first) == 64


def test_a_file_without_records_is_legal_among_others_and_refused_alone(file_world: World, tmp_path: Path) -> None:
    empty = file_world.write(tmp_path / "a", file_world.rows(0))
    with pytest.raises(DataError, match="holds no records"):
        source_of(open_records(empty))
    full = file_world.write(tmp_path / "b", file_world.rows(5))
    found = open_records([empty, full, file_world.write(tmp_path / "c", file_world.rows(0))])
    assert [unit.count for unit in found.units] == [5]
    assert found.load(0, 0, 5).to_pylist() == file_world.rows(5)


def test_many_small_files_are_one_source_in_the_order_of_their_names(file_world: World, tmp_path: Path) -> None:
    rows = file_world.rows(60)
    for number in range(20):
        part = rows[3 * number : 3 * number + 3]
        file_world.write(tmp_path / f"{number:02d}", part)
    source = source_of(open_records(tmp_path))
    assert source.num_records == 60
    assert source.table(np.arange(60)).to_pylist() == rows


def test_a_larger_file_has_several_units_and_all_records(file_world: World, tmp_path: Path) -> None:
    path, rows = written(file_world, tmp_path, 9000)
    records = open_records(path)
    assert len(records.units) > 1
    assert sum(unit.count for unit in records.units) == 9000
    last = records.units[-1]
    assert records.load(len(records.units) - 1, last.count - 1, last.count).to_pylist() == rows[-1:]
    chosen = np.array([0, 4095, 4096, 8191, 8192, 8999])
    assert source_of(records).table(chosen).to_pylist() == [rows[i] for i in chosen]


def read_all(records: Records) -> list[Any]:
    return [records.load(number, 0, unit.count).to_pylist() for number, unit in enumerate(records.units)]


# Text that ends early is text: what is left is whole records and perhaps a shorter last one.
TRUNCATED = [
    (name, lost) for name in FILES for lost in (1, 7, 300) if (name, lost) != ("json lines", 1) and name != "csv"
]


@pytest.mark.parametrize(("file_world", "lost"), TRUNCATED, indirect=["file_world"])
def test_a_truncated_file_is_an_error_that_names_it(file_world: World, tmp_path: Path, lost: int) -> None:
    path, rows = written(file_world, tmp_path)
    data = path.read_bytes()
    if file_world.name == "tar":
        lost = 10240  # a tar ends in blocks of zeros; a few of them are no loss
    path.write_bytes(data[:-lost])
    with pytest.raises(DataError, match=path.name):
        assert read_all(open_records(path)) == rows


@pytest.mark.parametrize("file_world", [name for name in FILES if WORLDS[name].checked], indirect=True)
@pytest.mark.parametrize("place", [0.02, 0.5, 0.9])
def test_a_flipped_bit_is_an_error_that_names_the_file_where_the_format_has_checksums(
    file_world: World, tmp_path: Path, place: float
) -> None:
    path, rows = written(file_world, tmp_path)
    data = bytearray(path.read_bytes())
    at = int(place * len(data)) if file_world.name != "parquet" else 60 + int(place * 100)
    data[at] ^= 0x10
    path.write_bytes(data)
    if file_world.name == "array record":  # its blocks are padded, and the padding means nothing
        with contextlib.suppress(DataError):
            assert list(chain(*read_all(open_records(path)))) == rows
        return
    with pytest.raises(DataError, match=path.name):
        read_all(open_records(path))


def damaged_copies(data: bytes, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Bits flipped, ends cut off, runs of zeros and lengths that lie, at any place and more often at both ends."""
    chance = random.Random(seed)
    for _ in range(count):
        copy = bytearray(data)
        places = (
            chance.randrange(len(data)),
            chance.randrange(min(200, len(data))),
            -1 - chance.randrange(min(600, len(data))),
        )
        at = chance.choice(places) % len(data)
        kind = chance.choice(("flip", "flip", "cut", "zeros", "length"))
        if kind == "flip":
            copy[at] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del copy[at:]
        elif kind == "zeros":
            copy[at : at + 8] = bytes(8)
        else:
            copy[at : at + 4] = b"\xff\xff\xff\x7f"
        yield f"{kind} at {at}", bytes(copy)


_READ_DAMAGED = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_records import damaged_copies, read_all
from trueline.data.open import open_records
from trueline.errors import DataError
for path in map(Path, map(str.strip, sys.stdin)):
    for what, copy in damaged_copies(path.read_bytes(), 7, 120):
        print(what, flush=True)
        path.write_bytes(copy)
        try:
            read_all(open_records(path))
        except DataError as error:
            assert path.stem in error.message, error.message
    print("all read", flush=True)
"""


class Reading:
    """A process of its own that reads damaged copies of one file after the other, and another one if it has ended."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def read(self, path: Path) -> str:
        """The last thing that it said: `all read`, or which copy it did not survive."""
        if self._process is None:
            command = [sys.executable, "-c", _READ_DAMAGED.format(paths=[str(Path(__file__).parent), str(TESTS)])]
            pipe = subprocess.PIPE
            with self._log.open("w") as log:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        said = "nothing"
        print(path, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            said = line.strip()
            if said == "all read":
                return said
        self.end()
        return f"{said}: {self._log.read_text()[-2000:]}"

    def end(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    made = Reading(tmp_path_factory.mktemp("reading") / "log")
    yield made
    made.end()


def test_damage_anywhere_is_an_error_that_names_the_file_and_never_the_end_of_the_process(
    file_world: World, tmp_path: Path, reading: Reading
) -> None:
    """Where a format has no checksums, other values may come; what comes can be used."""
    path, _ = written(file_world, tmp_path)
    assert reading.read(path) == "all read"


def test_foreign_bytes_are_an_error_that_names_the_file(file_world: World, tmp_path: Path) -> None:
    path, _ = written(file_world, tmp_path, 5)
    path.write_bytes(b'\x7fELF"' + bytes(range(256)) * 8)
    with pytest.raises(DataError, match=path.name):
        read_all(open_records(path))


def test_a_file_that_changes_or_vanishes_while_it_is_read_is_an_error(file_world: World, tmp_path: Path) -> None:
    path, _ = written(file_world, tmp_path)
    records = open_records(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=rf"{path.name} was changed while it was in use"):
        records.load(0, 0, 1)
    path.unlink()
    with pytest.raises(DataError, match=rf"cannot read .*{path.name}"):
        records.load(0, 0, 1)


def test_what_is_damaged_is_left_out_and_reported_where_that_was_asked_for(tmp_path: Path) -> None:
    path, rows = written(WORLDS["recordio none"], tmp_path)
    data = bytearray(path.read_bytes())
    second = open_records(path).units[1]
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (tmp_path / "foreign.recordio").write_text("no records at all")
    with pytest.raises(DataError):
        open_records(tmp_path)
    found: Any = open_records(tmp_path, on_bad="quarantine")
    assert second.count == 13
    assert len(found.quarantined) == 2
    assert {Path(one.file).name for one in found.quarantined} == {"foreign.recordio", "world.recordio"}
    lost = next(one for one in found.quarantined if one.records)
    assert (lost.records, "CRC-32" in lost.why, lost.unit.startswith("chunk")) == (13, True, True)
    kept = list(chain(*read_all(found)))
    assert len(kept) == COUNT - 13
    assert all(row in rows for row in kept)


@pytest.mark.parametrize("name", ["parquet", "arrow file", "arrow stream", "json lines"])
def test_a_file_of_other_columns_is_an_error_that_names_both_or_is_left_out(name: str, tmp_path: Path) -> None:
    world, rows = WORLDS[name], WORLDS[name].rows(6)
    first = world.write(tmp_path / "first", rows)
    world.write(tmp_path / "second", [{"id": row["id"], "x": row["x"]} for row in rows])
    with pytest.raises(DataError, match=rf"second{first.suffix} has other columns than .*first{first.suffix}"):
        open_records(tmp_path)
    kept: Any = open_records(tmp_path, on_bad="files")
    assert list(chain(*read_all(kept))) == rows
    assert [Path(one.file).stem for one in kept.quarantined] == ["second"]


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    path, _ = written(WORLDS["parquet"], tmp_path, 5)
    (tmp_path / "link.parquet").symlink_to(path)
    for twice in ([path, path], [path, tmp_path / "link.parquet"], [tmp_path, str(path)]):
        with pytest.raises(DataError, match="is given twice"):
            open_records(twice)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.csv.gz", "compressed as a whole"),
        ("a.paquet", r"did you mean \.parquet"),
        ("nowhere", "does not exist"),
        ("*.csv", "does not exist"),
    ],
)
def test_a_place_that_cannot_be_opened_says_why(tmp_path: Path, name: str, words: str) -> None:
    if "*" not in name and name != "nowhere":
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=words):
        open_records(tmp_path / name)


def test_a_folder_of_two_formats_is_refused_with_their_names(tmp_path: Path) -> None:
    written(WORLDS["csv"], tmp_path, 5)
    written(WORLDS["parquet"], tmp_path, 5)
    with pytest.raises(DataError, match="several formats: csv, parquet"):
        open_source(tmp_path, no_feed, mode="training")


def test_reading_records_of_any_format_imports_no_torch(tmp_path: Path) -> None:
    for name in ("parquet", "csv", "json lines", "tar", "recordio snappy", "arrow file"):
        WORLDS[name].write(tmp_path / name, WORLDS[name].rows(4))
    code = (
        "import sys, pathlib; from trueline.data.open import open_records\n"
        f"for path in pathlib.Path({str(tmp_path)!r}).iterdir():\n"
        "    records = open_records(path); assert records.load(0, 0, 4).num_rows == 4\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_without_records_still_says_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    records = open_records(tmp_path / "none.parquet")
    assert not records.units
    assert records.schema == pa.schema({"id": pa.int64()})
