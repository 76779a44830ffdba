"""`trueline data convert`."""

from __future__ import annotations

import click

from trueline.cli._progress import advance_bar
from trueline.cli.options import format_option, json_option, quiet_option, say, uris_argument, verb

_EXAMPLES = """
trueline data convert clicks.csv clicks/ --to parquet
    clicks/part-*.parquet, each whole or absent, and clicks/_commit.json when all are there

trueline data convert old/*.rec s3://bucket/new --to recordio
    MXNet's RecordIO to ElasticDL's, in an object store
"""


@verb("convert", examples=_EXAMPLES)
@uris_argument
@click.argument("where")
@click.option("--to", "to", metavar="NAME", default="parquet", show_default=True,
              help="parquet, arrow, csv, jsonl, recordio, mxnet or arrayrecord.")  # fmt: skip
@format_option
@click.option("--range-records", type=click.IntRange(min=1), default=65536, show_default=True,
              help="Records of a part.")  # fmt: skip
@quiet_option
@json_option
def command(
    uris: tuple[str, ...], where: str, to: str, format_: str, range_records: int, quiet: bool, as_json: bool
) -> None:
    """Write the records of URI... to the folder WHERE, in their order.

    A part is whole or absent, and what an earlier run has written stays: after a crash, give the same command again.
    The commit list, written last, names every part with its records and digest.
    """
    from trueline.data.tools import inspect as look

    with advance_bar("convert", quiet=quiet or as_json) as advanced:
        done = look.convert(list(uris), where, to=to, format=format_, range_records=range_records, progress=advanced)
    say(f"{where}: {done['num_records']} records in {len(done['parts'])} parts of {to}", done, as_json=as_json)
