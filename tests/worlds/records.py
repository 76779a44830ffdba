"""Small worlds of records, one for each way to store them. A world writes rows to a folder and names their URI."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from trueline.data.formats import recordio
from trueline.data.open import open_records
from trueline.data.records import Records
from trueline.data.sources.databases import MaxComputeRecords

Row = dict[str, Any]
Rows = list[Row]

WORDS = ("", "plain", "Grüße 💡 漢字", 'a "quote", a comma', "two\nlines\r\n", "\ttab")


def flat(count: int) -> Rows:
    """Numbers with nulls, unicode, empty strings, separators and line breaks."""
    return [
        {"id": i, "x": None if i % 7 == 3 else i / 4, "word": None if i % 11 == 5 else WORDS[i % len(WORDS)]}
        for i in range(count)
    ]


def nested(count: int) -> Rows:
    return [
        {
            **row,
            "tags": [{"k": str(n), "v": [n, n + 1]} for n in range(row["id"] % 3)],
            "at": {"lat": 0.5, "name": None},
        }
        for row in flat(count)
    ]


def rich(count: int) -> Rows:
    return [{**row, "blob": None if i % 5 == 4 else blob(i)} for i, row in enumerate(nested(count))]


def blob(number: int) -> bytes:
    """Binary with zeros, line breaks and MXNet's magic at multiples of four; some are empty."""
    return b"" if number % 9 == 0 else (b"\x00\n\xff" + b"\x0a\x23\xd7\xce" * (number % 4) + bytes([number % 256])) * 3


def raw(count: int) -> Rows:
    return [{"record": blob(i)} for i in range(count)]


def samples(count: int) -> Rows:
    return [
        {"__key__": f"part/{i:06d}", "cls": str(i % 10).encode(), "jpg": None if i % 6 == 5 else blob(i)}
        for i in range(count)
    ]


def rows_of(records: Records) -> Rows:
    return [row for number, unit in enumerate(records.units) for row in records.load(number, 0, unit.count).to_pylist()]


def no_feed(records: Any, mode: str) -> Any:
    raise AssertionError("these tests read tables")


@dataclass(frozen=True)
class World:
    name: str
    rows: Callable[[int], Rows]
    write: Callable[[Path, Rows], Path]
    """Writes rows to the path without ending and returns the file."""
    open: Callable[[Path], Records] = lambda path: open_records(path)
    checked: bool = False
    """Whether the format has checksums of its contents."""


SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "x": pa.float64(),
        "word": pa.string(),
        "tags": pa.list_(pa.struct({"k": pa.string(), "v": pa.list_(pa.int64())})),
        "at": pa.struct({"lat": pa.float64(), "name": pa.string()}),
        "blob": pa.binary(),
    }
)


def as_table(rows: Rows) -> pa.Table:
    names = list(rows[0]) if rows else SCHEMA.names
    return pa.Table.from_pylist(rows, schema=pa.schema([SCHEMA.field(name) for name in names]))


def write_parquet(path: Path, rows: Rows) -> Path:
    out = path.with_suffix(".parquet")
    pq.write_table(as_table(rows), out, row_group_size=97, write_page_checksum=True)
    return out


def write_arrow(path: Path, rows: Rows) -> Path:
    out = path.with_suffix(".arrow")
    table = as_table(rows)
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=97)
    return out


def write_stream(path: Path, rows: Rows) -> Path:
    out = path.with_suffix(".arrows")
    table = as_table(rows)
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=97)
    return out


def write_hugging_face(path: Path, rows: Rows) -> Path:
    """As `Dataset.save_to_disk` of datasets 3 leaves it."""
    path.mkdir(parents=True)
    middle = len(rows) // 2
    names = []
    for number, part in enumerate([rows[:middle], rows[middle:]]):
        name = f"data-{number:05d}-of-00002"
        (path / f"{name}.arrow").write_bytes(write_stream(path / name, part).read_bytes())
        (path / f"{name}.arrows").unlink()
        names.append({"filename": f"{name}.arrow"})
    (path / "state.json").write_text(json.dumps({"_data_files": names, "_fingerprint": "f", "_format_type": None}))
    (path / "dataset_info.json").write_text("{}")
    return path


def write_csv(path: Path, rows: Rows) -> Path:
    out = path.with_suffix(".csv")
    if not rows:
        out.write_text("id,x,word\n")
        return out
    pyarrow.csv.write_csv(as_table(rows), out)
    return out


def write_json(path: Path, rows: Rows) -> Path:
    out = path.with_suffix(".jsonl")
    out.write_text("".join(json.dumps(row, ensure_ascii=row["id"] % 2 == 0) + "\n" for row in rows), encoding="utf-8")
    return out


def write_chunks(compressor: str) -> Callable[[Path, Rows], Path]:
    def write(path: Path, rows: Rows) -> Path:
        out = path.with_suffix(".recordio")
        records = [row["record"] for row in rows]
        chunks = [
            recordio.encode_chunk(records[at : at + 13], compressor=compressor) for at in range(0, len(records), 13)
        ]
        out.write_bytes(b"".join(chunks))
        return out

    return write


def write_dmlc(path: Path, rows: Rows) -> Path:
    out = path.with_suffix(".rec")
    out.write_bytes(b"".join(recordio.encode_dmlc_record(row["record"]) for row in rows))
    return out


def write_tar(path: Path, rows: Rows) -> Path:
    out = path.with_suffix(".tar")
    with tarfile.open(out, "w") as tar:
        for row in rows:
            for kind in ("jpg", "cls"):
                if row[kind] is not None:
                    member = tarfile.TarInfo(f"{row['__key__']}.{kind}")
                    member.size = len(row[kind])
                    tar.addfile(member, io.BytesIO(row[kind]))
    return out


def images(count: int) -> Rows:
    paths = sorted((f"{'cat' if i % 2 else 'dog'}/{i:05d}.png", i) for i in range(count))
    return [{"image": blob(i), "label": int(path.startswith("dog")), "path": path} for path, i in paths]


def write_images(path: Path, rows: Rows) -> Path:
    path.mkdir(parents=True)
    for row in rows:
        (path / row["path"]).parent.mkdir(exist_ok=True)
        (path / row["path"]).write_bytes(row["image"])
    return path


def columns(count: int) -> Rows:
    return [
        {"id": 3 * row["id"] - 5, "x": row["x"], "word": row["word"], "blob": blob(row["id"])} for row in flat(count)
    ]


def write_sql(path: Path, rows: Rows) -> Path:
    out = path.with_suffix(".db")
    connection = sqlite3.connect(out)
    with connection:
        connection.execute("create table clicks (id integer primary key, x real, word text, blob blob)")
        backwards = [tuple(row.values()) for row in reversed(rows)]
        connection.executemany("insert into clicks values (?, ?, ?, ?)", backwards)
    connection.close()
    return out


def open_sql(path: Path) -> Records:
    from trueline.data.sources.databases import SqlRecords

    return SqlRecords(f"sqlite:///{path}?table=clicks", unit_records=97)


class FakeOdps:
    """What `MaxComputeRecords` uses of a pyodps table; rows lie in a JSON Lines file."""

    name = "clicks"
    table_schema = SimpleNamespace(
        simple_columns=[
            SimpleNamespace(name="id", type="BIGINT"),
            SimpleNamespace(name="x", type="double"),
            SimpleNamespace(name="word", type="varchar(100)"),
        ]
    )

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def open_reader(self, partition: str | None = None) -> Any:
        with self.path.open(encoding="utf-8") as lines:
            rows = [SimpleNamespace(values=list(json.loads(line).values())) for line in lines]
        yield FakeReader(rows)


class FakeReader:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    @property
    def count(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> Any:
        return iter(self.rows[rows])


def open_odps(path: Path) -> Records:
    return MaxComputeRecords(FakeOdps(path), partition="day=1", unit_records=97)


def write_array_record(path: Path, rows: Rows) -> Path:
    from trueline.data.formats.recordio import GROUP_RECORDS, array_record_package

    out = path.with_suffix(".array_record")
    writer = array_record_package().ArrayRecordWriter(str(out), f"group_size:{GROUP_RECORDS}")
    for row in rows:
        writer.write(row["record"])
    writer.close()
    return out


WORLDS = {
    world.name: world
    for world in (
        World("parquet", rich, write_parquet, checked=True),
        World("arrow file", rich, write_arrow),
        World("arrow stream", rich, write_stream),
        World("hugging face", rich, write_hugging_face),
        World("csv", flat, write_csv),
        World("json lines", nested, write_json),
        World("recordio none", raw, write_chunks("none"), checked=True),
        World("recordio snappy", raw, write_chunks("snappy"), checked=True),
        World("recordio gzip", raw, write_chunks("gzip"), checked=True),
        World("mxnet recordio", raw, write_dmlc),
        World("array record", raw, write_array_record, checked=True),
        World("tar", samples, write_tar),
        World("images", images, write_images),
        World("sql", columns, write_sql, open_sql),
        World("maxcompute", flat, write_json, open_odps),
    )
}
FILES = [name for name in WORLDS if name not in ("hugging face", "images", "sql", "maxcompute")]
"""Worlds of single files, of which there may be many."""
