"""Seals a small bundle (`seal PATH`), or prints the seconds from a start of a server of it to ready (`start PATH`)."""

import shutil
import sys
import tempfile
import time
from pathlib import Path


def seal(path: Path) -> None:
    """A multilayer perceptron, as bench/serve_overhead.py serves it."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import serve_overhead

    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(serve_overhead.sealed(Path(folder)).path, path)


def start(path: Path) -> None:
    """Runs where torch may be absent."""
    from trueline.serve import start as start_server

    began = time.monotonic()
    with start_server(path):
        print(round(time.monotonic() - began, 3))


if __name__ == "__main__":
    {"seal": seal, "start": start}[sys.argv[1]](Path(sys.argv[2]))
