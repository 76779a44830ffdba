"""`python -m trueline.registry resolve|watch URI [--tracking-uri U]`: lines of JSON, for processes without mlflow.

A line is `{"path", "name", "version", "digest"}`, with a `"signature"` if there is one, or `{"error", "message",
"hint"}`. `resolve` prints one, with exit code 1 for an error. `watch` resolves every `--every` seconds and prints a
line when it has changed; it ends with its standard input.
"""

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
        watch(lambda: _resolve(given.uri, given.tracking_uri), lambda: _has_ended(given.every))
        return 0
    line = _resolve(given.uri, given.tracking_uri)
    _print(line)
    return 1 if "error" in line else 0


def watch(look: Callable[[], Line], has_ended: Callable[[], bool]) -> None:
    """Prints the line of `look` whenever it is new, until `has_ended`, which waits, returns True."""
    last: Line = {}
    while True:
        line = look()
        if line != last:
            last = line
            _print(line)
        if has_ended():
            return


def _resolve(uri: str, tracking_uri: str | None) -> Line:
    try:
        found = resolve(uri, tracking_uri=tracking_uri)
    except TruelineError as error:
        return {"error": error.code, "message": error.message, "hint": error.hint}
    line: Line = {"path": str(found.path), "name": found.name, "version": found.version, "digest": found.digest}
    return line | ({"signature": found.signature} if found.signature else {})


def _has_ended(every_s: float) -> bool:
    """Whether standard input ends within `every_s`."""
    readable, _, _ = select.select([sys.stdin], [], [], every_s)
    return bool(readable) and not sys.stdin.read(1)


def _print(line: Line) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    atexit.register(gc.freeze)  # the exit does not look through what MLflow has imported, for half a second
    sys.exit(main())
