"""`trueline data verify`."""

from dataclasses import asdict

from trueline.cli._progress import advance_bar
from trueline.cli.options import Output, format_option, uris_argument, verb

_EXAMPLES = """
trueline data verify part-*.recordio
    exit code 1 and a line for each chunk that does not match its checksum

trueline data verify records.bin --format recordio --json
    files whose names do not end in their format; the faults as JSON
"""


@verb("verify", examples=_EXAMPLES, shows_progress=True)
@uris_argument
@format_option
def command(uris: tuple[str, ...], format: str) -> Output:
    """Read every record once. Names each unit that cannot be read; the exit code is 1 if there is one.

    A folder with a commit list (`_commit.json`) has to hold exactly the parts that it names, byte for byte.
    """
    from trueline.data.tools import inspect as records

    with advance_bar("verify") as advance:
        verified = records.verify(list(uris), format=format, progress=advance)
    lines = [f"bad: {fault.unit} of {fault.file}: {fault.why}" for fault in verified.faults]
    lines.append(f"{verified.records} records in {verified.units} units can be read")
    lines += [f"note: {verified.note}"] if verified.note else []
    return Output("\n".join(lines), asdict(verified), 1 if verified.faults else 0)
