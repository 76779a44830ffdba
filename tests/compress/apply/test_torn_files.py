"""What is made once for all methods is whole on disk, or not there: a kill while it is written leaves no torn file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from trueline.compress.apply import calibrate, graph
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.equalize import equalize
from worlds import compressible


@pytest.fixture
def program(tmp_path: Path) -> ParentProgram:
    made = compressible.make(tmp_path, steps=0)
    batches = [{"input": compressible.images(8)}]
    work = tmp_path / "work"
    work.mkdir()
    return ParentProgram(made.bundle.program_path("onnx"), work, lambda: batches)


def tear(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, write: Callable[..., Path]) -> None:
    """`name` writes a part of its file, and then the process is killed."""

    def die(*given: object, **more: object) -> None:
        write(*given).write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, die)


@pytest.mark.parametrize("make", [graph.fold, graph.multiply, equalize])
def test_a_program_that_a_kill_has_torn_is_made_again(
    program: ParentProgram, monkeypatch: pytest.MonkeyPatch, make: Callable[[ParentProgram], Path]
) -> None:
    with monkeypatch.context() as killed:
        tear(killed, onnx, "save_model", lambda model, path, **_: Path(path))
        with pytest.raises(KeyboardInterrupt):
            make(program)
    onnx.checker.check_model(onnx.load(make(program)))


def test_ranges_that_a_kill_has_torn_are_made_again(program: ParentProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as killed:
        tear(killed, calibrate, "save_tensors_data", lambda data, path: Path(path))
        with pytest.raises(KeyboardInterrupt):
            calibrate.ranges(program, "minmax")
    assert b"input" in calibrate.ranges(program, "minmax").read_bytes()


def test_weights_that_lie_beside_the_graph_are_there_before_it(
    tmp_path: Path, program: ParentProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "_LARGE", 1)
    out, order = tmp_path / "out" / "model.onnx", []
    replace = Path.replace

    def note(path: Path, target: Path) -> Path:
        order.append(Path(target).name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", note)
    model = onnx.load(program.path)
    graph.save(model, out)
    assert order == ["model.onnx.data", "model.onnx"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    read = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(out).graph.initializer}
    for weight in onnx.load(program.path).graph.initializer:
        assert np.array_equal(read[weight.name], onnx.numpy_helper.to_array(weight))
