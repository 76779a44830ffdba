"""The server as a process: `python -m trueline.serve BUNDLE`.

It writes one JSON line to stdout, {"event": "server.ready", "url", "port", "model", "version", "digest"} or
{"event": "server.failed", "code", "message", "hint"}; everything else goes to stderr.
"""

import gc

gc.disable()  # until the server is ready: imports and loads make many objects, and next to none of them is garbage
import json  # noqa: E402
import logging  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

import uvloop  # noqa: E402

from trueline.errors import TruelineError  # noqa: E402
from trueline.serve import server  # noqa: E402
from trueline.serve.settings import from_arguments  # noqa: E402


def _write(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        uvloop.run(server.run(from_arguments(sys.argv[1:]), _write))
    except TruelineError as error:
        _write({"event": "server.failed", "code": error.code, "message": error.message, "hint": error.hint})
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
