"""Weights have 8 bits where the processor's int8 kernels add them exactly, and 7 where they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from trueline.compress.apply import dynamic, saturation, static
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.method import parse_method
from worlds import compressible


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    return compressible.make(tmp_path_factory.mktemp("trained"))


def largest_weight(path: Path) -> int:
    """Of the layers in int8, in steps."""
    arrays = [onnx.numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer]
    return max(int(np.abs(array.astype(int)).max()) for array in arrays if array.dtype == np.int8 and array.size > 64)


@pytest.mark.parametrize("name", ["static:u8s8,minmax", "static:s8s8,minmax", "dynamic:s8"])
@pytest.mark.parametrize(("saturates", "most"), [(True, 64), (False, 127)])
def test_weights_are_narrow_where_int8_saturates(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, saturates: bool,
    most: int,
) -> None:  # fmt: skip
    for module in (static, dynamic):
        monkeypatch.setattr(module, "saturates", lambda *, signed: saturates)
    program = ParentProgram(
        trained.bundle.program_path("onnx"), tmp_path, lambda: [{"input": compressible.images(32, seed=1)}]
    )
    method, out = parse_method(name), tmp_path / "out.onnx"
    quantizer = static.StaticQuantizer() if method.kind == "static" else dynamic.DynamicQuantizer()
    quantizer.apply(method, program, out)
    assert 0.9 * most <= largest_weight(out) <= most
    assert program.notes[method.kind] == (saturation.NARROW if saturates else "")
