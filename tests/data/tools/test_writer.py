"""Results by range, each once, whoever dies; and any source in any other format."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from trueline import events, files
from trueline.data.open import open_records
from trueline.data.tools import inspect
from trueline.data.tools.writer import RangeWriter, WritePlan, read_commit
from trueline.errors import DataError
from trueline.storage.folder import StoreFolder
from trueline.storage.listing import COMMIT, PLAN
from worlds.records import WORLDS, as_table, flat, nested, raw, rich, rows_of


@pytest.fixture(params=["disk", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "disk":
        yield str(tmp_path / "out")
        return
    fs = fsspec.filesystem("memory")
    yield f"memory://{tmp_path.name}/out"
    if fs.exists(f"/{tmp_path.name}"):
        fs.rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize(
    ("to", "rows"),
    [("parquet", rich), ("arrow", rich), ("jsonl", nested), ("csv", flat), ("recordio", raw), ("mxnet", raw),
     ("arrayrecord", raw)],
)  # fmt: skip
def test_what_is_written_in_ranges_is_read_back_whole(to: str, rows: Any, where: str) -> None:
    if to == "arrayrecord" and (where.startswith("memory") or importlib.util.find_spec("array_record") is None):
        pytest.skip("the package array_record is not installed, or reads no stores")
    table = pa.Table.from_pylist(rows(100)) if to in ("recordio", "mxnet", "arrayrecord") else as_table(rows(100))
    writer = RangeWriter(where, WritePlan(num_records=100, range_records=30, format=to))
    for start, stop in reversed(writer.missing()):
        writer.write(start, stop, table.slice(start, stop - start))
    facts = writer.commit()
    assert [part["records"] for part in facts["parts"]] == [30, 30, 30, 10]
    assert read_commit(where) == facts
    assert rows_of(open_records(where)) == rows(100)


def test_a_writer_that_died_is_continued_and_commits_only_when_all_is_there(where: str) -> None:
    table = as_table(flat(100))
    plan = WritePlan(num_records=100, range_records=40, of="digest")
    first = RangeWriter(where, plan)
    first.write(40, 80, table.slice(40, 40))
    assert read_commit(where) is None
    with pytest.raises(DataError, match="is not whole: its writer has not finished it"):
        open_records(where)
    (fault,) = inspect.verify(where).faults
    assert (fault.unit, fault.why) == ("folder", f"its writer has not finished it: it has {PLAN} and no {COMMIT}")
    second = RangeWriter(where, plan)
    assert second.missing() == [(0, 40), (80, 100)]
    with pytest.raises(DataError, match=r"lacks 2 of 3 ranges, first \(0, 40\)"):
        second.commit()
    for start, stop in second.missing():
        second.write(start, stop, table.slice(start, stop - start))
    second.write(40, 80, table.slice(40, 40))  # again, by another: the same bytes
    second.commit()
    assert rows_of(open_records(where)) == flat(100)


def test_a_folder_from_which_a_part_went_is_not_read_as_if_it_were_whole(where: str) -> None:
    table = as_table(flat(100))
    writer = RangeWriter(where, WritePlan(num_records=100, range_records=40))
    for start, stop in writer.missing():
        writer.write(start, stop, table.slice(start, stop - start))
    writer.commit()
    assert rows_of(open_records(where)) == flat(100)
    lost = "part-000000000040-000000000080.parquet"
    fs, root = fsspec.core.url_to_fs(where)
    fs.rm(f"{root}/{lost}")
    with pytest.raises(DataError, match=f"1 of the 3 parts that {COMMIT} lists are missing, first {lost}"):
        open_records(where)
    assert rows_of(open_records(f"{where}/part-*.parquet")) == [*flat(100)[:40], *flat(100)[80:]]
    fs.pipe_file(f"{root}/{COMMIT}", b'{"parts": [{}]}')
    with pytest.raises(DataError, match=f"{COMMIT} is torn"):
        open_records(where)


def test_a_part_that_is_there_stays_when_a_late_writer_comes_with_other_content_and_that_is_said(where: str) -> None:
    plan = WritePlan(num_records=4, range_records=4)
    late, first = RangeWriter(where, plan), RangeWriter(where, plan)
    first.write(0, 4, pa.table({"record": [1, 2, 3, 4]}))
    said: list[dict[str, Any]] = []
    with events.listening(lambda name, fields: said.append({"event": name, **fields})):
        late.write(0, 4, pa.table({"record": [1, 2, 3, 4]}))
        assert said == []
        late.write(0, 4, pa.table({"record": [1, 2, 3, 5]}))
    assert [(one["event"], one["name"]) for one in said] == [("part.kept", plan.name(0, 4))]
    first.commit()
    assert rows_of(open_records(where)) == [{"record": n} for n in (1, 2, 3, 4)]


def test_a_store_whose_package_only_looks_before_it_writes_is_not_taken_for_one_that_refuses(tmp_path: Path) -> None:
    class Looking(fsspec.AbstractFileSystem):  # as those are that define `open` and nothing else
        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            return Path(path).open(mode)

        def info(self, path: str, **options: Any) -> dict[str, Any]:
            return {"name": path, "size": Path(path).stat().st_size, "type": "file"}

    folder = StoreFolder(Looking(), str(tmp_path / "out"))
    said: list[str] = []
    with events.listening(lambda name, _: said.append(name)):
        assert folder.write("part", b"one")
        assert not folder.write("part", b"two")
    assert (folder.refuses, said, folder.get("part")) == (False, ["store.overwrites"], b"one")


def test_a_package_that_refuses_the_condition_itself_is_written_to_without_it(tmp_path: Path) -> None:
    class Strict(MemoryFileSystem):
        def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
            if options:
                raise TypeError(f"unexpected {options}")
            super().pipe_file(path, value)

    folder = StoreFolder(Strict(), f"/{tmp_path.name}")
    said: list[Any] = []
    with events.listening(lambda name, fields: said.append((name, fields["why"]))):
        assert folder.write("part", b"one")
        assert not folder.write("part", b"two")
    assert said == [("store.overwrites", "TypeError: unexpected {'mode': 'create'}")]
    assert folder.get("part") == b"one"


def test_another_plan_a_foreign_folder_and_wrong_ranges_are_refused(tmp_path: Path) -> None:
    RangeWriter(tmp_path / "out", WritePlan(num_records=100, of="one"))
    with pytest.raises(DataError, match="was written with another plan"):
        RangeWriter(tmp_path / "out", WritePlan(num_records=100, of="two"))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").touch()
    with pytest.raises(DataError, match=r"is not empty \(it has chapter\.txt\)"):
        RangeWriter(tmp_path / "thesis", WritePlan(num_records=100))
    writer = RangeWriter(tmp_path / "out", WritePlan(num_records=100, of="one"))
    with pytest.raises(DataError, match="no range of the plan"):
        writer.write(0, 50, as_table(flat(50)))
    with pytest.raises(DataError, match="was given 99 records"):
        writer.write(0, 100, as_table(flat(99)))
    with pytest.raises(DataError, match="cannot be written"):
        RangeWriter(tmp_path / "x", WritePlan(num_records=1, format="xml"))


@pytest.mark.parametrize(
    ("to", "rows", "words"),
    [
        ("csv", rich(3), "CSV cannot hold tags"),
        ("jsonl", rich(3), "JSON cannot hold 'blob' of record"),
        ("recordio", [{"x": float("nan"), "blob": b"."}], "JSON cannot hold 'x' of record"),
        ("mxnet", [{"blob": None}], "record 0 has no 'blob'"),
    ],
)
def test_a_column_that_a_format_cannot_hold_is_named(tmp_path: Path, to: str, rows: Any, words: str) -> None:
    writer = RangeWriter(tmp_path / "out", WritePlan(num_records=len(rows), format=to))
    with pytest.raises(DataError, match=words):
        writer.write(0, len(rows), as_table(rows))
    assert len(writer.missing()) == 1


@pytest.mark.parametrize(
    "name", ["csv", "json lines", "recordio snappy", "mxnet recordio", "tar", "hugging face", "sql"]
)
def test_any_source_becomes_parquet_with_the_same_records(name: str, tmp_path: Path) -> None:
    rows = WORLDS[name].rows(150)
    path = WORLDS[name].write(tmp_path / "world", rows)
    uri = f"sqlite:///{path}?table=clicks" if name == "sql" else str(path)
    facts = inspect.convert(uri, tmp_path / "out", range_records=64)
    assert facts["num_records"] == 150
    assert rows_of(open_records(tmp_path / "out")) == rows
    assert inspect.convert(uri, tmp_path / "out", range_records=64) == facts


@pytest.mark.parametrize("name", ["csv", "json lines", "tar", "hugging face"])
@pytest.mark.parametrize("to", ["arrow", "recordio", "arrayrecord"])
def test_any_source_becomes_records_of_bytes_that_say_the_same(name: str, to: str, tmp_path: Path) -> None:
    if to == "arrayrecord" and importlib.util.find_spec("array_record") is None:
        pytest.skip("the package array_record is not installed")
    rows = WORLDS[name].rows(20)
    inspect.convert(str(WORLDS[name].write(tmp_path / "world", rows)), tmp_path / "out", to=to)
    found = rows_of(open_records(tmp_path / "out"))
    if to == "arrow":
        assert found == rows
        return
    texts = [{k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in row.items()} for row in rows]
    assert [json.loads(row["record"]) for row in found] == texts


def test_a_conversion_that_was_killed_goes_on_and_one_of_changed_records_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = WORLDS["csv"].write(tmp_path / "world", flat(150))
    writes: list[str] = []
    original = files.write_atomic

    def dying(target: Path, data: bytes, **options: Any) -> bool:
        writes.append(target.name)
        if len(writes) == 4:
            raise KeyboardInterrupt
        return original(target, data, **options)

    monkeypatch.setattr(files, "write_atomic", dying)
    with pytest.raises(KeyboardInterrupt):
        inspect.convert(path, tmp_path / "out", range_records=32)
    assert read_commit(tmp_path / "out") is None
    inspect.convert(path, tmp_path / "out", range_records=32)
    assert len(writes) == len(set(writes)) + 1  # only the part that was being written was written again
    assert rows_of(open_records(tmp_path / "out")) == flat(150)
    (tmp_path / "out" / COMMIT).unlink()
    WORLDS["csv"].write(tmp_path / "world", flat(151))
    with pytest.raises(DataError, match="was written with another plan"):
        inspect.convert(path, tmp_path / "out", range_records=32)


def test_recordio_chunks_hold_at_most_a_mebibyte(tmp_path: Path) -> None:
    rows = [{"record": bytes([n]) * 300_000} for n in range(10)]
    writer = RangeWriter(tmp_path / "out", WritePlan(num_records=10, format="recordio"))
    writer.write(0, 10, pa.Table.from_pylist(rows))
    writer.commit()
    records = open_records(tmp_path / "out")
    assert [unit.count for unit in records.units] == [3, 3, 3, 1]
    assert rows_of(records) == rows


def test_looking_says_counts_columns_and_records(tmp_path: Path) -> None:
    path = WORLDS["parquet"].write(tmp_path / "world", rich(200))
    found = inspect.inspect(path, samples=4)
    assert (found.records, found.units, found.largest_unit) == (200, 3, 97)
    assert [row["id"] for row in found.samples.to_pylist()] == [0, 50, 100, 150]
    assert inspect.verify(path).faults == ()


def test_verifying_goes_on_behind_what_is_damaged(tmp_path: Path) -> None:
    path = WORLDS["recordio gzip"].write(tmp_path / "world", raw(100))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    (tmp_path / "alien.recordio").write_bytes(b"alien")
    found = inspect.verify(tmp_path)
    assert found.records == 100 - 13
    assert [(Path(one.file).name, one.records) for one in found.faults] == [
        ("alien.recordio", 0),
        ("world.recordio", 13),
    ]


def test_the_commit_list_names_every_part_with_its_digest(tmp_path: Path) -> None:
    path = WORLDS["csv"].write(tmp_path / "world", flat(10))
    inspect.convert(path, tmp_path / "out")
    facts = json.loads((tmp_path / "out" / COMMIT).read_text())
    (part,) = facts["parts"]
    assert part["sha256"] == files.sha256_file(tmp_path / "out" / part["name"])
    assert (part["records"], facts["of"]) == (10, open_records(path).fingerprint())


def test_a_folder_is_verified_against_its_commit_list(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": list(range(100))}), tmp_path / "all.parquet")
    out = tmp_path / "out"
    inspect.convert(tmp_path / "all.parquet", out, range_records=30)
    assert inspect.verify(out).faults == ()
    parts = sorted(out.glob("part-*"))
    parts[0].write_bytes(parts[1].read_bytes())
    parts[3].unlink()
    found = inspect.verify(out).faults
    assert [(Path(one.file).name, one.records) for one in found] == [(parts[0].name, 30), (parts[3].name, 10)]
    assert "bytes of another content" in found[0].why
    assert "it is missing" in found[1].why
    (out / "part-9.parquet").write_bytes(parts[1].read_bytes())
    assert "_commit.json does not list it" in inspect.verify(out).faults[-1].why


@pytest.mark.parametrize(
    ("to", "words"), [("mxnet", "MXNet's RecordIO has no"), ("recordio", ""), ("csv", "CSV has no")]
)
def test_verify_says_what_a_format_cannot_show(tmp_path: Path, to: str, words: str) -> None:
    pq.write_table(pa.table({"x": list(range(10))}), tmp_path / "all.parquet")
    inspect.convert(tmp_path / "all.parquet", tmp_path / "out", to=to)
    note = inspect.verify(tmp_path / "out").note
    assert note.startswith(words)
    assert bool(note) == bool(words)
