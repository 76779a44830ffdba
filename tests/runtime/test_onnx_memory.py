"""ONNX Runtime's arena of a server: bounded, and given back. In a process of its own: the bound is the process's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from trueline.bundle import open_bundle
from trueline.errors import TooLarge
from trueline.runtime.onnx import limit_memory, shrink_memory
from trueline.runtime.open import open_program
from trueline.serve import host
from worlds import bundles

limit_memory(2**29)
session = open_program(bundles.double_plus(Path(sys.argv[1])))
session.run({"x": np.zeros((1, 3), np.float32)})
before = host.resident_bytes()
big = np.zeros((8_000_000, 3), np.float32)
outputs = session.run({"x": big})
del outputs, big
host.give_back()
kept = host.resident_bytes() - before
shrink_memory()
left = host.resident_bytes() - before
assert kept > 64 * 2**20 and left < 32 * 2**20, (kept, left)
try:
    session.run({"x": np.zeros((60_000_000, 3), np.float32)})
except TooLarge as error:
    assert "[60000000, 3]" in error.message, error.message
else:
    raise AssertionError("the bound did not hold")
assert session.run({"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[3, 3, 3]]
"""


@pytest.mark.slow
def test_a_run_over_the_bound_is_refused_and_what_a_large_run_left_is_given_back(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "b")]
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": tests})
    assert done.returncode == 0, done.stderr


UNKEPT = """
import sys
from pathlib import Path
import numpy as np
from trueline.runtime.open import open_session
from trueline.runtime.session import SessionSettings
from trueline.serve import host
from worlds import bundles

bundle = bundles.double_plus(Path(sys.argv[1]))
unkept = SessionSettings(keeps_memory=False)
session = open_session("onnx", bundle.program_path("onnx"), bundle.signature_of("onnx"), settings=unkept)
session.run({"x": np.zeros((1, 3), np.float32)})
before = host.resident_bytes()
del (session.run({"x": np.zeros((8_000_000, 3), np.float32)}))["y"]
host.give_back()
left = host.resident_bytes() - before
assert left < 32 * 2**20, left
"""


def test_a_session_that_keeps_no_memory_gives_back_what_a_large_run_needed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNKEPT, str(tmp_path / "b")]
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": tests})
    assert done.returncode == 0, done.stderr
