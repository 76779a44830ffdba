"""`trueline data inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from trueline.cli.options import Output, format_option, uris_argument, verb

if TYPE_CHECKING:
    from trueline.data.tools.inspect import InspectedRecords

_EXAMPLES = """
trueline data inspect train.parquet
    counts, columns and five records

trueline data inspect photos/ --samples 0 --json
    a folder of images, one folder for each class; only facts, for a script

trueline data inspect photos/ --samples 24 --pictures photos.png
    two dozen of them on one sheet, each with its label

trueline data inspect "sqlite:///clicks.db?table=clicks&key=id"
    a table, numbered by its key
"""


@verb("inspect", examples=_EXAMPLES)
@uris_argument
@format_option
@click.option("--samples", type=click.IntRange(min=0), default=5, show_default=True, help="Records to show.")
@click.option("--pictures", metavar="FILE.png", help="Draw those of them that are pictures on a sheet.")
def command(uris: tuple[str, ...], format: str, samples: int, pictures: str | None) -> Output:
    """Show records: counts, units, columns, and a few samples spread over all of them.

    URI is a path, a pattern, a folder, an object of any store that fsspec knows, or a table of a database:
    sqlite:///clicks.db?table=clicks&key=id.
    """
    from trueline.data.tools import contact_sheet
    from trueline.data.tools import inspect as records

    found = records.inspect(list(uris), format=format, samples=samples)
    rows = [{name: _format_value(value) for name, value in row.items()} for row in found.samples.to_pylist()]
    facts = {
        "records": found.records, "units": found.units, "largest_unit": found.largest_unit,
        "columns": {field.name: str(field.type) for field in found.schema}, "fingerprint": found.fingerprint,
        "samples": rows,
    }  # fmt: skip
    text = _format_text(found, rows)
    if pictures is not None:
        drawn = contact_sheet.draw(found.samples, pictures)
        facts |= {"pictures": drawn, "sheet": pictures}
        text += f"\n\n{drawn} pictures on {pictures}"
    return Output(text, facts)


def _format_text(found: InspectedRecords, rows: list[dict[str, Any]]) -> str:
    lines = [f"{found.records} records in {found.units} units of at most {found.largest_unit}", "", "columns"]
    width = max((len(field.name) for field in found.schema), default=0)
    lines += [f"  {field.name:<{width}}  {field.type}" for field in found.schema]
    for number, row in enumerate(rows, 1):
        lines += ["", f"sample {number}", *(f"  {name:<{width}}  {value}" for name, value in row.items())]
    return "\n".join(lines)


def _format_value(value: object) -> str:
    """One line; bytes as their length and first few."""
    if isinstance(value, bytes):
        from trueline.data.tools import contact_sheet

        picture = contact_sheet.image_of(value)
        if picture is not None:
            return f"{picture.format} image {contact_sheet.size(picture)}, {len(value)} bytes"
        return f"{len(value)} bytes {value[:16]!r}" + ("..." if len(value) > 16 else "")
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 100 else text[:97] + "..."
