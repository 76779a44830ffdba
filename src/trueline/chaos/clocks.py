"""A wall clock that jumps, for chosen processes and what they start."""

import os
from pathlib import Path

_CLOCK = """
import os, sys, time
_file, _real, _real_ns = os.environ["TRUELINE_CHAOS_CLOCK"], time.time, time.time_ns
def _jump():
    if sys._getframe(2).f_globals.get("__name__", "").startswith("grpc"):
        return 0  # gRPC compares with a clock of its own in C, which does not jump
    try:
        return int(open(_file).read() or 0)
    except (OSError, ValueError):
        return 0
time.time = lambda: _real() + _jump()
time.time_ns = lambda: _real_ns() + _jump() * 10**9
"""


class JumpingClock:
    """Processes with `env` in their environment have the wall clock of this machine, and what `jump` said last.

    Python's `time` alone: what extension modules ask the system for does not jump. Its files are in `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._offset = folder / "clock"
        path = folder / "path"
        path.mkdir()
        (path / "sitecustomize.py").write_text(_CLOCK)
        paths = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env = {"PYTHONPATH": paths, "TRUELINE_CHAOS_CLOCK": str(self._offset)}

    def jump(self, seconds: int) -> None:
        """From now on the clock differs by this from that of this machine."""
        self._offset.write_text(str(seconds))
