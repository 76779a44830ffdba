"""ONNX Runtime's memory: the arena of a server is bounded and given back, and weights are there once. In a process of
its own: the bound is the process's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trueline


def run(script: str, path: Path) -> None:
    places = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(trueline.__file__).parents[1])])
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": places})
    assert done.returncode == 0, done.stderr


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
    run(SCRIPT, tmp_path / "b")


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
    run(UNKEPT, tmp_path / "b")


OPENED = """
import ctypes, sys
from pathlib import Path
import numpy as np, onnx
from onnx import helper, numpy_helper
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.runtime.open import open_session
from trueline.serve import host

weights = [np.full((512, 512, 3, 3), 0.01, np.float32) for _ in range(8)]
nodes = [helper.make_node("Conv", [f"x{i}", f"w{i}"], [f"x{i + 1}"], pads=[1] * 4) for i in range(8)]
specs = [helper.make_tensor_value_info(f"x{i}", 1, ["batch", 512, 8, 8]) for i in (0, 8)]
held = [numpy_helper.from_array(one, f"w{i}") for i, one in enumerate(weights)]
model = helper.make_model(helper.make_graph(nodes, "g", specs[:1], specs[1:], held),
                          opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
path = Path(sys.argv[1]) / "model.onnx"
onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
size = sum(one.nbytes for one in weights)
shapes = [TensorSpec(name=f"x{i}", datatype="FP32", shape=("batch", 512, 8, 8)) for i in (0, 8)]
signature = Signature(inputs=(shapes[0],), outputs=(shapes[1],), dims={"batch": Dim()})
del model, weights, held
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(ctypes.c_size_t(31 << 20)))  # as in a process that has worked: glibc keeps blocks of this size
host.give_back()
before = host.resident_bytes()
session = open_session("onnx", path, signature)
taken = (host.resident_bytes() - before) / size
assert taken < 1.5, taken
"""


@pytest.mark.slow
def test_an_opened_program_of_convolutions_has_its_weights_in_memory_once(tmp_path: Path) -> None:
    run(OPENED, tmp_path)
