"""`trueline data verify`."""

from __future__ import annotations

from dataclasses import asdict

from trueline.cli._progress import advance_bar
from trueline.cli.options import format_option, json_option, quiet_option, say, uris_argument, verb

_EXAMPLES = """
trueline data verify part-*.recordio
    exit code 1 and a line for each chunk that does not match its checksum

trueline data verify records.bin --format recordio --json
    files whose ending does not say what they are; the faults as JSON
"""


@verb("verify", examples=_EXAMPLES)
@uris_argument
@format_option
@quiet_option
@json_option
def command(uris: tuple[str, ...], format_: str, quiet: bool, as_json: bool) -> int:
    """Read every record once. Each unit that cannot be read is named, and the exit code is 1 when there is one.

    A folder with a commit list (`_commit.json`) has to hold just the parts that it names, byte for byte.
    """
    from trueline.data.tools import inspect as look

    with advance_bar("verify", quiet=quiet or as_json) as advanced:
        found = look.verify(list(uris), format=format_, progress=advanced)
    lines = [f"bad: {one.unit} of {one.file}: {one.why}" for one in found.faults]
    lines.append(f"{found.records} records in {found.units} units can be read")
    lines += [f"note: {found.note}"] if found.note else []
    say("\n".join(lines), asdict(found), as_json=as_json)
    return 1 if found.faults else 0
