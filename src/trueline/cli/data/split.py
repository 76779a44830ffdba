"""`trueline data split`."""

import click

from trueline.cli._progress import advance_bar
from trueline.cli.options import Output, uris_argument, verb

_EXAMPLES = """
trueline data split clicks.csv --parts train=0.8,test=0.2
    train.csv and test.csv, with exactly 80 and 20 % of the records

trueline data split clicks.csv --parts train=0.8,test=0.2 --stratify label
    every label has 80 and 20 % of its records there

trueline data split visits/ --parts train=0.7,valid=0.1,test=0.2 --by patient --out parts/
    all records of a patient are in one part; the same one when more data are split
"""


@verb("split", examples=_EXAMPLES, shows_progress=True)
@uris_argument
@click.option("--parts", required=True, metavar="NAME=FRACTION,...", help="The parts, which sum up to 1.")
@click.option("--by", default="", metavar="COLUMN", help="Records of one value stay together, by its hash.")
@click.option("--stratify", default="", metavar="COLUMN", help="Each value is shared out as all records are.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Decides which records.")
@click.option("--out", default=".", show_default=True, metavar="FOLDER", help="Where the parts go.")
@click.option("--to", type=click.Choice(["parquet", "csv"]), help="Format; that of the records if it is CSV.")
@click.option("--overwrite", is_flag=True, help="Replace parts that exist.")
def command(
    uris: tuple[str, ...], parts: str, by: str, stratify: str, seed: int, out: str, to: str | None, overwrite: bool
) -> Output:
    """Split the records of URI... into parts, one file each: the same for the same seed.

    Parts appear when all are complete. The sizes are exact, except with --by.
    """
    from trueline.data.tools import split as splitting

    with advance_bar("split") as advance:
        rule = splitting.SplitRule(parts=splitting.parse_parts(parts), by=by, stratify=stratify, seed=seed)
        counts = splitting.split(list(uris), out, rule, to=to or "", overwrite=overwrite, report=advance)
    text = "\n".join(f"{name}: {count} records" for name, count in counts.items())
    return Output(text, counts)
