"""`python -m trueline.registry resolve URI [--tracking-uri U]`: one line of JSON, for processes that hold no
mlflow.

Stdout is `{"path", "name", "version", "digest"}`, or `{"error", "message", "hint"}` with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from trueline.errors import TruelineError
from trueline.registry.find import resolve


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trueline.registry", description=__doc__)
    command = parser.add_subparsers(required=True).add_parser("resolve")
    command.add_argument("uri")
    command.add_argument("--tracking-uri")
    given = parser.parse_args(arguments)
    try:
        found = resolve(given.uri, tracking_uri=given.tracking_uri)
    except TruelineError as error:
        _say({"error": error.code, "message": error.message, "hint": error.hint})
        return 1
    _say({"path": str(found.path), "name": found.name, "version": found.version, "digest": found.digest})
    return 0


def _say(line: dict[str, str | int]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
