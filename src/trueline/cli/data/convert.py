"""`trueline data convert`."""

import click

from trueline.cli._progress import advance_bar
from trueline.cli.options import Output, format_option, uris_argument, verb

_EXAMPLES = """
trueline data convert clicks.csv clicks/ --to parquet
    clicks/part-*.parquet, each whole or absent, and clicks/_commit.json when all are written

trueline data convert old/*.rec s3://bucket/new --to recordio
    MXNet's RecordIO to ElasticDL's, in an object store
"""


@verb("convert", examples=_EXAMPLES, shows_progress=True)
@uris_argument
@click.argument("where")
@click.option("--to", "to", metavar="NAME", default="parquet", show_default=True,
              help="parquet, arrow, csv, jsonl, recordio, mxnet or arrayrecord.")  # fmt: skip
@format_option
@click.option("--range-records", type=click.IntRange(min=1), default=65536, show_default=True,
              help="Records of a part.")  # fmt: skip
def command(uris: tuple[str, ...], where: str, to: str, format: str, range_records: int) -> Output:
    """Write the records of URI... to the folder WHERE, in their order.

    A part is whole or absent, and parts of an earlier run stay: after a crash, give the same command again. The commit
    list, written last, names every part with its records and digest.
    """
    from trueline.data.tools import inspect as records

    with advance_bar("convert") as advance:
        written = records.convert(
            list(uris), where, to=to, format=format, range_records=range_records, progress=advance
        )
    text = f"{where}: {written['num_records']} records in {len(written['parts'])} parts of {to}"
    return Output(text, written)
