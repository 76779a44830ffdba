"""`python -m trueline.registry resolve|watch URI [--tracking-uri U]`: lines of JSON, for processes that hold no
mlflow.

A line is `{"path", "name", "version", "digest"}`, with a `"signature"` where there is one, or `{"error", "message",
"hint"}`. `resolve` says one, with exit code 1 for an error. `watch` looks every so many seconds and says one whenever
it is another than before; it ends with its standard input.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import select
import sys
from collections.abc import Callable, Sequence

from trueline.errors import TruelineError
from trueline.registry.find import resolve

Line = dict[str, str | int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trueline.registry", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    for name in ("resolve", "watch"):
        command = commands.add_parser(name)
        command.add_argument("uri")
        command.add_argument("--tracking-uri")
    command.add_argument("--every", type=float, default=10.0, metavar="SECONDS")
    given = parser.parse_args(arguments)
    if given.command == "watch":
        watch(lambda: _resolved(given.uri, given.tracking_uri), lambda: _ended(given.every))
        return 0
    found = _resolved(given.uri, given.tracking_uri)
    _say(found)
    return 1 if "error" in found else 0


def watch(look: Callable[[], Line], ended: Callable[[], bool]) -> None:
    """Says what `look` finds whenever that is new, until `ended`, which waits, says so."""
    said: Line = {}
    while True:
        found = look()
        if found != said:
            said = found
            _say(found)
        if ended():
            return


def _resolved(uri: str, tracking_uri: str | None) -> Line:
    try:
        found = resolve(uri, tracking_uri=tracking_uri)
    except TruelineError as error:
        return {"error": error.code, "message": error.message, "hint": error.hint}
    told: Line = {"path": str(found.path), "name": found.name, "version": found.version, "digest": found.digest}
    return told | ({"signature": found.signature} if found.signature else {})


def _ended(every_s: float) -> bool:
    """Whether standard input ends within `every_s`."""
    readable, _, _ = select.select([sys.stdin], [], [], every_s)
    return bool(readable) and not sys.stdin.read(1)


def _say(line: Line) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    atexit.register(gc.freeze)  # the exit does not look through what MLflow has imported, for half a second
    sys.exit(main())
