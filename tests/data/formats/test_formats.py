"""What only one format can get wrong."""

from __future__ import annotations

import gzip
import json
import sqlite3
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.data.formats import recordio
from trueline.data.loading.decoded_cache import UnitCache
from trueline.data.open import open_records, open_training
from trueline.data.sources.databases import MaxComputeRecords, SqlRecords
from trueline.errors import DataError
from trueline.storage import cache
from trueline.storage.location import LocalFile
from worlds.records import WORLDS, FakeOdps, flat, images, raw, rows_of, samples, write_json, write_sql

pytestmark = pytest.mark.slow  # hundreds of files

GOLDEN = bytes.fromhex(
    "04030201b7d344cb010000005500000003000000ff060000734e6150705901080000d9c69c4305000000010900008aeeb9be48656c6c6f"
    "01080000d9c69c4305000000010900008aeeb9be48656c6c6f01080000d9c69c4305000000010900008aeeb9be48656c6c6f"
)
"""Three times "Hello", written by the original Go library with its defaults."""


def test_recordio_of_the_original_library_is_read(tmp_path: Path) -> None:
    (tmp_path / "golden.recordio").write_bytes(GOLDEN)
    assert rows_of(open_records(tmp_path / "golden.recordio")) == [{"record": b"Hello"}] * 3
    assert recordio.decompress_snappy(GOLDEN[20:]) == b"\x05\0\0\0Hello" * 3
    for at, content in ((34, b"\x05\0\0\0"), (46, b"Hello")):
        assert GOLDEN[at : at + 4] == recordio.masked_crc32c(content).to_bytes(4, "little")


@pytest.mark.parametrize("count", [0, 2, 4, 1 << 31])
def test_a_chunk_that_lies_about_its_count_is_an_error_and_no_record_is_dropped(tmp_path: Path, count: int) -> None:
    data = bytearray(recordio.encode_chunk([b"a", b"", b"ccc"], compressor="none"))
    data[16:20] = count.to_bytes(4, "little")
    (tmp_path / "liar.recordio").write_bytes(data)
    with pytest.raises(DataError, match=r"liar\.recordio is damaged at byte 0: the chunk claims"):
        rows_of(open_records(tmp_path / "liar.recordio"))


def test_early_and_current_files_of_mxnet_are_read_and_the_magic_inside_records_comes_back(tmp_path: Path) -> None:
    magic = recordio.DMLC_MAGIC.to_bytes(4, "little")
    records = [b"", magic, magic * 3 + b"x", b"abc" + magic, b"abcd" + magic + b"e"]
    data = b"".join(map(recordio.encode_dmlc_record, records))
    assert struct.unpack("<2I", recordio.encode_dmlc_record(magic)[:8]) == (recordio.DMLC_MAGIC, 1 << 29)
    (tmp_path / "now.rec").write_bytes(data)
    assert rows_of(open_records(tmp_path / "now.rec")) == [{"record": record} for record in records]
    early = b"".join(struct.pack("<2I", recordio.DMLC_EARLY, 3) + record + b"\0" for record in (b"abc", b"def"))
    (tmp_path / "early.rec").write_bytes(early)
    assert rows_of(open_records(tmp_path / "early.rec")) == [{"record": b"abc"}, {"record": b"def"}]


def test_records_of_mxnet_that_are_long_make_short_units(tmp_path: Path) -> None:
    records = [bytes([n]) * (3 << 20 if n == 2 else 1_500_000 if n < 5 else 10) for n in range(100)]
    (tmp_path / "a.rec").write_bytes(b"".join(map(recordio.encode_dmlc_record, records)))
    found = open_records(tmp_path / "a.rec")
    assert [unit.count for unit in found.units] == [2, 1, len(records) - 3]
    assert rows_of(found) == [{"record": record} for record in records]


def huge_recordio(path: Path) -> list[bytes]:
    body = (16 << 20) - 4
    zeros = bytes(body)
    crc = zlib.crc32(body.to_bytes(4, "little") + zeros)
    with path.open("wb") as file:
        for _ in range(300):
            file.write(recordio.HEADER.pack(recordio.MAGIC, crc, 0, body + 4, 1) + body.to_bytes(4, "little"))
            file.seek(body, 1)
        file.write(recordio.encode_chunk([b"last", b""]))
    return [b"last", b""]


def huge_mxnet(path: Path) -> list[bytes]:
    length = (1 << 29) - 4
    with path.open("wb") as file:
        for _ in range(9):
            file.write(struct.pack("<2I", recordio.DMLC_MAGIC, length))
            file.seek(length, 1)
        file.write(b"".join(map(recordio.encode_dmlc_record, (b"last", b""))))
    return [b"last", b""]


def huge_tar(path: Path) -> list[bytes]:
    with path.open("wb") as file:
        for name, size, content in (("a.bin", 5 << 30, b""), ("b.bin", 4, b"last"), ("c.bin", 0, b"")):
            member = tarfile.TarInfo(name)
            member.size = size
            file.write(member.tobuf() + content)
            file.seek((size - len(content)) + -size % 512, 1)
        file.write(bytes(1024))
    return [b"last", b""]


@pytest.mark.parametrize(("name", "write"), [("a.recordio", huge_recordio), ("a.rec", huge_mxnet), ("a.tar", huge_tar)])
def test_the_last_records_of_a_file_of_five_gigabytes_are_read_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Any
) -> None:
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    last = write(tmp_path / name)  # of holes, which take no room on the disk
    assert (tmp_path / name).stat().st_size > 1 << 32
    records = open_records(tmp_path / name)
    unit = records.units[-1]
    found = records.load(len(records.units) - 1, 0, unit.count)
    assert found.column(found.num_columns - 1).to_pylist()[-2:] == last


@given(st.binary(max_size=2000), st.integers(0, 70_000))
def test_snappy_streams_give_back_what_went_in(data: bytes, zeros: int) -> None:
    whole = data + bytes(zeros) + data
    stream = recordio.compress_snappy(whole)
    assert recordio.decompress_snappy(stream) == whole
    assert stream[14:18] == (recordio.masked_crc32c(whole[: 1 << 16]).to_bytes(4, "little") if whole else b"")


def test_the_crc_is_the_one_of_the_standard() -> None:
    assert recordio.crc32c(b"123456789") == 0xE3069283
    assert recordio.crc32c(b"") == 0
    assert recordio.crc32c(bytes(32)) == 0x8A9136AA
    assert recordio.crc32c(b"\xff" * 32) == 0x62A8AB43
    long = bytes(range(256)) * 37 + b"tail"
    crc = 0xFFFFFFFF
    for byte in long:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert recordio.crc32c(long) == crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("compress", [gzip.compress, recordio.compress_snappy])
@pytest.mark.parametrize("over", [0, 1])
def test_a_chunk_decompresses_to_its_bound_and_not_a_byte_more(
    monkeypatch: pytest.MonkeyPatch, compress: Callable[[bytes], bytes], over: int
) -> None:
    """CWE-409: what it claims of its records is not known before."""
    monkeypatch.setattr(recordio, "MAX_CHUNK_BYTES", 200_000)
    decompress = recordio.decompress_gzip if compress is gzip.compress else recordio.decompress_snappy
    bomb = compress(b"\0" * (200_000 + over))
    if not over:
        assert decompress(bomb) == b"\0" * 200_000
        return
    with pytest.raises(ValueError, match="more than 200000 bytes; write chunks"):
        decompress(bomb)


def test_gzip_of_several_members_is_one_and_a_torn_one_is_none() -> None:
    assert recordio.decompress_gzip(gzip.compress(b"a") + gzip.compress(b"b")) == b"ab"
    with pytest.raises(EOFError):
        recordio.decompress_gzip(gzip.compress(b"abc")[:-3])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (b"sNaPpY", "expected its identifier"),
        (b"\xff\x06\0\0sNaPpY\x00\xff\xff\xff", "ends inside the chunk at byte 10"),
        (b"\xff\x06\0\0sNaPpY\x02\x00\0\0", "unknown type 0x02"),
        (b"\xff\x06\0\0sNaPpY\x00\x09\0\0abcd\xff\xff\xff\xff\x0f", "claims"),
    ],
)
def test_a_damaged_snappy_stream_says_where(damage: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recordio.decompress_snappy(damage)


def test_line_breaks_in_quotes_belong_to_their_field_and_blank_lines_hold_no_record(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'n,w\r\n\r\n1,"a\r\n\r\nb"\r\n\n2,"say ""x\n"""\r\n\r\n3,c')
    wanted = [{"n": 1, "w": "a\r\n\r\nb"}, {"n": 2, "w": 'say "x\n"'}, {"n": 3, "w": "c"}]
    assert rows_of(open_records(path)) == wanted
    assert open_records(path).load(0, 1, 3).to_pylist() == wanted[1:]


def test_a_quote_that_is_never_closed_is_named_with_its_byte(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'n,w\n1,x\n2,"y\n3,z\n')
    with pytest.raises(DataError, match=r"a\.csv has a quote at byte 10 that is never closed"):
        open_records(tmp_path / "a.csv")


def test_records_across_the_borders_of_the_pieces_of_a_scan_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trueline.data.formats import text as lines

    path = WORLDS["csv"].write(tmp_path / "a", flat(40))
    whole = lines.find_marks(LocalFile.at(path), quoted=True).tolist()
    for piece in (1, 2, 3, 7, 64):
        monkeypatch.setattr(lines, "_PIECE", piece)
        assert lines.find_marks(LocalFile.at(path), quoted=True).tolist() == whole


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "n\n" + "1\n" * 600_000 + "many\n", r"record 600000 \(byte 1200002\)"),
        ("a.jsonl", '{"n": 1}\n' * 150_000 + '{"n": 1, "m": 2}\n', r"record 150000 \(byte 1350000\)"),
        ("a.jsonl", '{"n": 1}\n' * 150_000 + '{"n": \n', r"record 150000"),
        ("a.csv", "n,m\n1,2\n3\n", r"a\.csv"),
        ("a.csv", "n,n\n1,2\n", "two columns of one name"),
        ("a.csv", "", "is empty"),
    ],
)
def test_text_that_does_not_fit_is_named_with_its_record(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        rows_of(open_records(tmp_path / name))


def test_dates_in_json_stay_strings_and_empty_objects_are_records_of_nulls(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"at": "2026-01-31T10:00:00", "n": null}\n{}\n\n{"at": "soon", "n": "x"}\n')
    wanted = [{"at": "2026-01-31T10:00:00", "n": None}, {"at": None, "n": None}, {"at": "soon", "n": "x"}]
    assert rows_of(open_records(tmp_path / "a.jsonl")) == wanted


def test_an_index_is_kept_for_a_large_file_and_made_again_when_it_is_torn_or_the_file_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_MIN_FILE_BYTES", 10)
    path = WORLDS["csv"].write(tmp_path / "a", flat(50))
    assert rows_of(open_records(path)) == flat(50)
    (kept,) = (tmp_path / "cache" / "index").iterdir()
    kept.write_bytes(kept.read_bytes()[:50])
    assert rows_of(open_records(path)) == flat(50)
    path = WORLDS["csv"].write(tmp_path / "a", flat(60))
    assert rows_of(open_records(path)) == flat(60)
    assert len(list((tmp_path / "cache" / "index").iterdir())) == 2
    monkeypatch.setattr("trueline.data.formats.text.find_marks", None)  # from here only the index can be used
    assert rows_of(open_records(path)) == flat(60)
    monkeypatch.setenv(cache.CACHE, "/proc/none")
    with pytest.raises(TypeError):
        open_records(path)


def test_an_arrow_stream_without_its_end_mark_is_torn_and_dictionaries_in_one_are_refused(tmp_path: Path) -> None:
    path = WORLDS["arrow stream"].write(tmp_path / "a", flat(10))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"a\.arrows is torn at byte \d+: no end mark follows 1 record batches"):
        open_records(path)
    table = pa.table({"kind": pa.array(["a", "b"]).dictionary_encode()})
    with pa.ipc.new_stream(tmp_path / "d.arrows", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"dictionary columns \(kind\)"):
        open_records(tmp_path / "d.arrows")


def test_a_folder_of_hugging_face_splits_names_them(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(DataError, match="2 splits: train, test") as caught:
        open_records(tmp_path)
    assert str(tmp_path / "train") in caught.value.hint
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}')
    with pytest.raises(DataError, match="outside of its folder"):
        open_records(tmp_path)


def test_a_tar_with_a_damaged_header_is_an_error_and_not_a_shorter_tar(tmp_path: Path) -> None:
    path = WORLDS["tar"].write(tmp_path / "a", samples(10))
    data = bytearray(path.read_bytes())
    at = next(at for at in range(0, len(data), 512) if data[at : at + 11] == b"part/000005")
    data[at + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"a\.tar is torn at byte {at}: a header is damaged"):
        open_records(path)


def test_a_sample_in_two_places_of_a_tar_is_refused(tmp_path: Path) -> None:
    path = WORLDS["tar"].write(tmp_path / "a", [*samples(3), *samples(1)])
    with pytest.raises(DataError, match="sample 'part/000000' in two places"):
        open_records(path)


def test_files_with_other_columns_and_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has other columns than .*a\.parquet: a string, expected a int64"):
        open_records(tmp_path)


def test_images_are_numbered_by_class_and_strays_are_refused(tmp_path: Path) -> None:
    path = WORLDS["images"].write(tmp_path / "photos", images(10))
    assert rows_of(open_records(path)) == images(10)
    (path / "cat" / "00001.png").write_bytes(b"other")
    (path / "stray.png").touch()
    with pytest.raises(DataError, match=r"stray\.png lies in no folder of a class"):
        open_records(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [("delete from clicks where id = -5", "rows where 97 were listed"), ("drop table clicks", "cannot read sqlite")],
)
def test_a_table_that_is_written_while_it_is_read_is_an_error(tmp_path: Path, change: str, words: str) -> None:
    path = write_sql(tmp_path / "a", WORLDS["sql"].rows(200))
    records = SqlRecords(f"sqlite:///{path}?table=clicks", unit_records=97)
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    connection.close()
    with pytest.raises(DataError, match=words):
        records.load(0, 0, 97)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "names no table"),
        ("?table=click", r"no table 'click' \(has: clicks, plain\)"),
        ("?table=clicks&key=nr", r"no column 'nr'"),
        ("?table=plain", "no primary key of one column"),
        ("?table=plain&key=n", "cannot number the rows: 1 repeats in 3 rows"),
        ("?table=plain&key=m", "cannot number the rows: 1 rows without one in 3 rows"),
    ],
)
def test_a_table_that_cannot_be_numbered_says_why(tmp_path: Path, query: str, words: str) -> None:
    path = write_sql(tmp_path / "a", WORLDS["sql"].rows(3))
    with sqlite3.connect(path) as connection:
        connection.execute("create table plain (n integer, m integer)")
        connection.executemany("insert into plain values (?, ?)", [(1, 1), (1, 2), (2, None)])
    connection.close()
    with pytest.raises(DataError, match=words):
        open_records(f"sqlite:///{path}{query}")


def test_a_password_in_a_database_url_is_in_no_message() -> None:
    with pytest.raises(DataError) as caught:
        open_records("postgresql+nosuch://me:hunter2@host/shop?table=orders&key=id")
    assert "hunter2" not in caught.value.message


def test_a_maxcompute_table_that_grows_is_an_error(tmp_path: Path) -> None:
    table = FakeOdps(write_json(tmp_path / "a", flat(20)))
    records = MaxComputeRecords(table)
    write_json(tmp_path / "a", flat(21))
    with pytest.raises(DataError, match=r"odps table clicks has 21 rows, 20 when it was listed"):
        records.load(0, 0, 5)


class Counting:
    """Records of one column that count what is loaded."""

    ranged = False

    def __init__(self, counts: list[int]) -> None:
        from trueline.data.source import Unit

        self.units = [Unit(uri=str(n), offset=sum(counts[:n]), count=c) for n, c in enumerate(counts)]
        self.schema = pa.schema({"id": pa.int64()})
        self.loads: list[int] = []

    def load(self, number: int, start: int, stop: int) -> pa.Table:
        self.loads.append(number)
        offset = self.units[number].offset
        return pa.table({"id": np.arange(offset + start, offset + stop)})

    def fingerprint(self) -> str:
        return "0" * 64


@pytest.mark.jobs
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), min_size=1, max_size=25),
    st.integers(1, 2000),
)
def test_whatever_is_in_memory_records_are_the_ones_asked_for(
    counts: list[int], reads: list[list[int]], max_bytes: int
) -> None:
    records = Counting(counts)
    resident = UnitCache(records, max_bytes)
    starts = np.array([unit.offset for unit in records.units])
    for read in reads:
        wanted = np.array(read) % sum(counts)
        numbers = np.searchsorted(starts, wanted, side="right") - 1
        assert resident.take(numbers, wanted - starts[numbers])["id"].to_pylist() == wanted.tolist()


def test_units_of_a_window_are_decoded_once_and_then_joined() -> None:
    records = Counting([1000] * 50)
    resident = UnitCache(records, 1 << 20)
    generator = np.random.default_rng(0)
    for _ in range(200):
        wanted = generator.integers(0, 16_000, 64)
        assert resident.take(wanted // 1000, wanted % 1000)["id"].to_pylist() == wanted.tolist()
    assert sorted(records.loads) == list(range(16))
    assert resident._joined is not None


def test_raw_records_have_checksums_of_their_own() -> None:
    data = recordio.encode_chunk([row["record"] for row in raw(3)], compressor="none")
    assert int.from_bytes(data[4:8], "little") == zlib.crc32(data[20:])


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            {17: "abc"},
            "column 'b' is text: 'abc' in record 17 is no number, and 99 of 100 values are, and has no declaration",
        ),
        (dict.fromkeys(range(100), ""), "column 'b' is text: its first 100 values are empty, and has no declaration"),
        (dict.fromkeys(range(50), "red"), "column 'b' is text, and has no declaration"),
    ],
)
def test_a_column_that_is_text_by_a_few_values_or_by_none_says_which(
    odd: dict[int, str], words: str, tmp_path: Path
) -> None:
    rows = [f"{record},{odd.get(record, 2 * record)},{record % 2}\n" for record in range(100)]
    (tmp_path / "a.csv").write_text("a,b,label\n" + "".join(rows))
    with pytest.raises(DataError, match=words):
        open_training(str(tmp_path / "a.csv"))
