"""`trueline bundle delta`."""

from pathlib import Path

import click

from trueline.cli.options import Output, verb

_EXAMPLES = """
trueline bundle delta clicks-1.bundle clicks-2.bundle --out 2.delta
    what turns the first bundle into the second

trueline bundle delta clicks-1.bundle --apply 2.delta --out clicks-2.bundle
    the second bundle, to the byte
"""


@verb("delta", examples=_EXAMPLES)
@click.argument("parent", type=click.Path(path_type=Path))
@click.argument("result", type=click.Path(path_type=Path), required=False)
@click.option("--apply", "delta", type=click.Path(path_type=Path), metavar="DELTA", help="Apply this delta to PARENT.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The delta, or the bundle that it makes.")
def command(parent: Path, result: Path | None, delta: Path | None, out: Path) -> Output:
    """Make or apply a delta between two bundles.

    A delta has the rows and weights of RESULT that PARENT lacks, and states the digest of both. With --apply it turns
    PARENT into the bundle that it was made for, or is refused: another parent, a torn file.
    """
    from trueline.bundle.delta import apply_delta
    from trueline.bundle.read import open_bundle
    from trueline.errors import UsageError

    if (result is None) == (delta is None):
        raise UsageError("name a second bundle, or --apply DELTA", hint="trueline bundle delta --help has both forms")
    opened = open_bundle(parent)
    if delta is not None:
        made = apply_delta(opened, delta, out)
        return Output(f"{out}: {made.digest}", {"path": str(out), "digest": made.digest, "parent": opened.digest})
    from trueline.capture.deltas import make_delta

    assert result is not None
    found = make_delta(opened, open_bundle(result), out)
    size = sum(found.sizes.values())
    facts = {"path": str(out), "parent": found.parent, "digest": found.result.digest, "bytes": size}
    return Output(f"{out}: {size} bytes", facts | {"tensors": found.facts})
