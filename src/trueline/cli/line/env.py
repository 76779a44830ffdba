"""`trueline env`."""

import os
from pathlib import Path

from trueline.cli.options import Output, verb

_EXAMPLES = """
trueline env
    text to paste into a report of a fault

trueline env --json
    the same for a script
"""


@verb("env", examples=_EXAMPLES)
def command() -> Output:
    """Show versions, cores, memory, disk, packages and stores, without secrets.

    For reports of faults. Variables whose names look like secrets are masked, and so are users and tokens in URLs.
    Stores that variables name are tried for one second each.
    """
    from trueline import environment

    facts = environment.collect(os.environ, Path.cwd())
    return Output(environment.as_text(facts), facts)
