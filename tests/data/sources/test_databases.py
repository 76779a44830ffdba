"""Records in a real PostgreSQL, started here, where one and psycopg are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trueline.data.open import open_records, open_source
from trueline.data.sources.databases import SqlRecords
from trueline.errors import DataError
from worlds.records import columns, rows_of

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'trueline[postgres]'")


def programs() -> Path | None:
    """The folder of PostgreSQL's programs: on the path, or where Debian has them."""
    found = shutil.which("initdb")
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return Path(found).resolve().parent if found else versions[-1].parent if versions else None


BIN = programs()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BIN is None, reason="no PostgreSQL is installed: apt-get install postgresql"),
]


def somebody() -> dict[str, Any]:
    """The server refuses to run as root."""
    if os.geteuid():
        return {}
    name = next(one.pw_name for one in pwd.getpwall() if one.pw_name in ("postgres", "nobody"))
    return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of a database, with its password; the server listens on a socket in a folder of its own."""
    assert BIN is not None
    folder, who = Path(tempfile.mkdtemp(prefix="trueline-pg-")), somebody()
    data = folder / "data"
    (folder / "password").write_text("hunter2\n")
    for path in (folder, folder / "password") if who else ():
        shutil.chown(path, who["user"])
    initdb = [BIN / "initdb", "-D", data, "-U", "me", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}",
              "--no-sync", "--encoding=UTF8", "--locale=C"]  # fmt: skip
    control = [BIN / "pg_ctl", "-D", data, "-l", folder / "log", "-w", "-t", "240"]
    try:
        subprocess.run(initdb, check=True, capture_output=True, cwd=folder, **who)
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        subprocess.run([*control, "-o", options, "start"], check=True, capture_output=True, cwd=folder, **who)
        yield f"postgresql://me:hunter2@/postgres?host={folder}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=False, capture_output=True, cwd=folder, **who)
        shutil.rmtree(folder, ignore_errors=True)


def execute(url: str, *statements: str, rows: Any = None) -> None:
    with psycopg.connect(url) as connection:
        for statement in statements:
            connection.execute(statement)
        if rows is not None:
            connection.cursor().executemany("insert into clicks values (%s, %s, %s, %s)", rows)


@pytest.fixture
def url(postgres: str) -> str:
    rows = [tuple(row.values()) for row in reversed(columns(200))]
    create = "create table clicks (id bigint primary key, x double precision, word text, blob bytea)"
    execute(postgres, "drop schema public cascade", "create schema public", create, rows=rows)
    return f"{postgres}&table=clicks"


def test_rows_come_in_the_order_of_the_key_by_ranges_of_it(url: str) -> None:
    records = SqlRecords(url, unit_records=97)
    assert [unit.count for unit in records.units] == [97, 97, 6]
    assert rows_of(records) == columns(200)
    for start, stop in ((0, 1), (96, 97), (10, 50)):
        assert records.load(1, start, stop).to_pylist() == columns(200)[97 + start : 97 + stop]
    assert records.fingerprint() == SqlRecords(url, unit_records=97).fingerprint()
    assert rows_of(open_records(url)) == columns(200)


def test_a_training_source_reads_any_records_of_it(url: str) -> None:
    def feed(records: Any, mode: str) -> Any:
        numbers = torch.tensor(records["id"].to_pylist())
        return numbers.float(), numbers

    source = open_source(url, feed, mode="training")
    wanted = [199, 0, 97, 96, 3]
    assert source.read(np.array(wanted)).labels.tolist() == [3 * i - 5 for i in wanted]


def test_postgresqls_own_types_arrive(postgres: str) -> None:
    execute(
        postgres,
        "drop schema public cascade",
        "create schema public",
        "create table kinds (id int primary key, n numeric(8,2), free numeric, at timestamptz, u uuid, j jsonb, "
        "tags text[], ok boolean, gone text)",
        "insert into kinds values (1, 12.50, 0.1, '2026-01-02 03:04:05+02', "
        "'12345678-1234-5678-1234-567812345678', '{\"a\": [1, 2]}', '{x,y}', true, null)",
        "insert into kinds (id) values (2)",
    )
    first, second = rows_of(SqlRecords(f"{postgres}&table=kinds"))
    assert first == {
        "id": 1,
        "n": Decimal("12.50"),
        "free": 0.1,
        "at": datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC),
        "u": str(uuid.UUID("12345678-1234-5678-1234-567812345678")),
        "j": '{"a": [1, 2]}',
        "tags": ["x", "y"],
        "ok": True,
        "gone": None,
    }
    assert second == {"id": 2, **dict.fromkeys(["n", "free", "at", "u", "j", "tags", "ok", "gone"])}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("delete from clicks where id = 4", "has 96 rows where 97 were listed"),
        ("insert into clicks (id) values (5)", "has 98 rows where 97 were listed"),
        ("drop table clicks", "cannot read postgresql"),
    ],
)
def test_a_table_that_changes_under_a_job_is_an_error_that_names_the_range(url: str, change: str, said: str) -> None:
    records = SqlRecords(url, unit_records=97)
    execute(url.partition("&table")[0], change)
    with pytest.raises(DataError, match=said):
        records.load(0, 0, 97)


def test_a_wrong_password_and_a_server_that_is_gone_are_told_without_it(postgres: str) -> None:
    for wrong in (postgres.replace("hunter2", "hunter3"), postgres.replace("host=", "host=/nowhere")):
        with pytest.raises(DataError, match="cannot read postgresql") as caught:
            open_records(f"{wrong}&table=clicks")
        assert "hunter" not in caught.value.message
