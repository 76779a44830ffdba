"""`trueline data inspect | verify | convert`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from trueline.cli.options import json_option, quiet_option, say, verb

if TYPE_CHECKING:
    from trueline.data.tools.inspect import InspectedRecords, Progress

_EXAMPLES = """
trueline data inspect train.parquet
    how many records, in which units, with which columns, and a few of them

trueline data verify "s3://bucket/clicks/*.tar"
    every record read once; what cannot be read is named, and the exit code is 1

trueline data convert clicks.csv clicks/ --to parquet
    the same records as Parquet; run it again after a crash and it goes on
"""

_INSPECT = """
trueline data inspect train.parquet
    counts, columns and five records

trueline data inspect photos/ --samples 0 --json
    a folder of images, one folder for each class; only facts, for a script

trueline data inspect photos/ --samples 24 --pictures photos.png
    two dozen of them on one sheet, each with its label

trueline data inspect "sqlite:///clicks.db?table=clicks&key=id"
    a table, numbered by its key
"""

_VERIFY = """
trueline data verify part-*.recordio
    exit code 1 and a line for each chunk that does not match its checksum

trueline data verify records.bin --format recordio --json
    files whose ending does not say what they are; the faults as JSON
"""

_CONVERT = """
trueline data convert clicks.csv clicks/ --to parquet
    clicks/part-*.parquet, each whole or absent, and clicks/_commit.json when all are there

trueline data convert old/*.rec s3://bucket/new --to recordio
    MXNet's RecordIO to ElasticDL's, in an object store
"""


uris_argument = click.argument("uris", nargs=-1, required=True, metavar="URI...")
format_option = click.option("--format", "format_", metavar="NAME", default="", help="What the files are in.")


@verb("data", examples=_EXAMPLES, kind=click.Group)
def command() -> None:
    """Look at records, verify them, or convert them.

    Records are named by a path, a pattern, a folder, an object of any store that fsspec knows, or a table of a
    database: sqlite:///clicks.db?table=clicks&key=id. What format files are in, their ending says; else --format does.
    """


@verb("inspect", examples=_INSPECT)
@uris_argument
@format_option
@click.option("--samples", type=click.IntRange(min=0), default=5, show_default=True, help="Records to show.")
@click.option("--pictures", metavar="FILE.png", help="Draw those of them that are pictures on a sheet.")
@json_option
def inspect(uris: tuple[str, ...], format_: str, samples: int, pictures: str | None, as_json: bool) -> None:
    """Say what records there are: counts, units, columns, and a few of them, spread over all."""
    from trueline.data.tools import contact_sheet
    from trueline.data.tools import inspect as look

    found = look.inspect(list(uris), format=format_, samples=samples)
    drawn = contact_sheet.draw(found.samples, pictures) if pictures is not None else 0
    rows = [{name: _short(value) for name, value in row.items()} for row in found.samples.to_pylist()]
    facts = {
        "records": found.records,
        "units": found.units,
        "largest_unit": found.largest_unit,
        "columns": {field.name: str(field.type) for field in found.schema},
        "fingerprint": found.fingerprint,
        "samples": rows,
    }
    if pictures is not None:
        facts |= {"pictures": drawn, "sheet": pictures}
    text = _described(found, rows) + (f"\n\n{drawn} pictures on {pictures}" if pictures is not None else "")
    say(text, facts, as_json=as_json)


@verb("verify", examples=_VERIFY)
@uris_argument
@format_option
@quiet_option
@json_option
def verify(uris: tuple[str, ...], format_: str, quiet: bool, as_json: bool) -> int:
    """Read every record once. Each unit that cannot be read is named, and the exit code is 1 when there is one.

    A folder with a commit list (`_commit.json`) has to hold just the parts that it names, byte for byte.
    """
    from trueline.data.tools import inspect as look

    with _progress("verify", quiet or as_json) as advanced:
        found = look.verify(list(uris), format=format_, advanced=advanced)
    lines = [f"bad: {one.unit} of {one.file}: {one.why}" for one in found.faults]
    lines.append(f"{found.records} records in {found.units} units can be read")
    lines += [f"note: {found.note}"] if found.note else []
    say("\n".join(lines), asdict(found), as_json=as_json)
    return 1 if found.faults else 0


@verb("convert", examples=_CONVERT)
@uris_argument
@click.argument("where")
@click.option("--to", "to", metavar="NAME", default="parquet", show_default=True,
              help="parquet, arrow, csv, jsonl, recordio, mxnet or arrayrecord.")  # fmt: skip
@format_option
@click.option("--range-records", type=click.IntRange(min=1), default=65536, show_default=True,
              help="Records of a part.")  # fmt: skip
@quiet_option
@json_option
def convert(
    uris: tuple[str, ...], where: str, to: str, format_: str, range_records: int, quiet: bool, as_json: bool
) -> None:
    """Write the records of URI... to the folder WHERE, in their order.

    A part is whole or absent, and what an earlier run has written stays: after a crash, give the same command again.
    The commit list, written last, names every part with its records and digest.
    """
    from trueline.data.tools import inspect as look

    with _progress("convert", quiet or as_json) as advanced:
        done = look.convert(list(uris), where, to=to, format=format_, range_records=range_records, advanced=advanced)
    say(f"{where}: {done['num_records']} records in {len(done['parts'])} parts of {to}", done, as_json=as_json)


if isinstance(command, click.Group):
    for _one in (inspect, verify, convert):
        command.add_command(_one)


def _described(found: InspectedRecords, rows: list[dict[str, Any]]) -> str:
    lines = [f"{found.records} records in {found.units} units of at most {found.largest_unit}", "", "columns"]
    width = max((len(field.name) for field in found.schema), default=0)
    lines += [f"  {field.name:<{width}}  {field.type}" for field in found.schema]
    for number, row in enumerate(rows):
        lines += ["", f"sample {number + 1}", *(f"  {name:<{width}}  {value}" for name, value in row.items())]
    return "\n".join(lines)


def _short(value: object) -> str:
    """One line for a value; bytes by their length and first few."""
    if isinstance(value, bytes):
        from trueline.data.tools import contact_sheet

        picture = contact_sheet.image_of(value)
        if picture is not None:
            return f"{picture.format} image {contact_sheet.size(picture)}, {len(value)} bytes"
        return f"{len(value)} bytes {value[:16]!r}" + ("..." if len(value) > 16 else "")
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 100 else text[:97] + "..."


class _progress:
    """A bar on stderr while the block runs, unless it is to be quiet or nobody sees it."""

    def __init__(self, what: str, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bar = Progress(console=console, disable=quiet or not console.is_terminal, transient=True)
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Progress:
        self._bar.start()
        return lambda done, of: self._bar.update(self._task, completed=done, total=of)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
