"""Processes that run one program have its weights in memory once, and answer as if each had its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from trueline import events
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.errors import StorageError
from trueline.runtime import shared_weights
from trueline.runtime.onnx import OnnxSession
from trueline.runtime.session import SessionSettings
from trueline.runtime.shared_weights import SharedDir, hold
from trueline.runtime.torch_weights import share

ROWS = np.linspace(-1, 1, 3 * 256, dtype=np.float32).reshape(3, 256)


def writes(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "made").write_text(text)

    return make


def forked(work: Callable[[], None]) -> BaseProcess:
    """A process that does `work` and destroys nothing of this one's garbage, which may wait for threads it has not."""

    def life() -> None:
        gc.disable()
        work()

    process = multiprocessing.get_context("fork").Process(target=life)
    process.start()
    return process


def never(folder: Path) -> None:
    raise AssertionError("it lies there already")


@pytest.fixture
def place(tmp_path: Path) -> SharedDir:
    (tmp_path / "shared").mkdir()
    return SharedDir(folder=tmp_path / "shared", key="k")


def test_what_is_made_once_is_what_the_next_one_holds(place: SharedDir) -> None:
    first = hold(place, writes("weights"), program_bytes=1)
    second = hold(place, never, program_bytes=1)
    assert (second.path / "made").read_text() == "weights"
    assert second.path == first.path


def test_it_stays_until_the_last_one_lets_go(place: SharedDir) -> None:
    first, second = hold(place, writes("a"), program_bytes=1), hold(place, never, program_bytes=1)
    first.release()
    first.release()
    assert (second.path / "made").exists()
    second.release()
    assert not second.path.exists()


def test_another_program_has_a_place_of_its_own(place: SharedDir) -> None:
    first = hold(place, writes("a"), program_bytes=1)
    other = hold(place.part("packed"), writes("b"), program_bytes=1)
    assert [(one.path / "made").read_text() for one in (first, other)] == ["a", "b"]


def test_what_a_process_left_that_died_is_cleared_away_by_who_looks_next(place: SharedDir) -> None:
    def die() -> None:
        hold(place, writes("a"), program_bytes=1)
        (place.folder / ".partial-x").mkdir()
        os._exit(9)

    process = forked(die)
    process.join()
    assert process.exitcode == 9
    assert sorted(path.name for path in place.folder.iterdir()) == [".partial-x", "k", "lock"]
    other = hold(place.part("other"), writes("b"), program_bytes=1)
    assert sorted(path.name for path in place.folder.iterdir()) == ["k.other", "lock"]
    other.release()


def test_of_processes_that_come_together_one_makes_it(place: SharedDir) -> None:
    def come() -> None:
        lease = hold(place, writes(str(os.getpid())), program_bytes=1)
        answers.put((lease.path / "made").read_text())
        done.wait()

    context = multiprocessing.get_context("fork")
    answers, done = context.Queue(), context.Event()
    processes = [forked(come) for _ in range(4)]
    makers = {answers.get(timeout=60) for _ in processes}
    done.set()
    for process in processes:
        process.join()
    assert len(makers) == 1


def test_what_could_not_be_made_leaves_nothing(place: SharedDir) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("no such program")

    with pytest.raises(ValueError, match="no such program"):
        hold(place, fails, program_bytes=1)
    assert [path.name for path in place.folder.iterdir()] == ["lock"]


def test_without_room_nothing_is_written_and_it_is_said(place: SharedDir) -> None:
    with pytest.raises(StorageError, match=r"MiB free, and weights that processes share may need"):
        hold(place, never, program_bytes=shutil.disk_usage(place.folder).total)


def test_a_folder_that_is_gone_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"writing .* failed"):
        hold(SharedDir(folder=tmp_path / "gone", key="k"), never, program_bytes=1)


def program(path: Path, *, width: int = 1024) -> Signature:
    """Gemm, MatMul and Conv: what ONNX Runtime packs, or lays otherwise, for the processor."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((rng.standard_normal(shape) / 16).astype(np.float32), name)

    nodes = [
        helper.make_node("Gemm", ["x", "a"], ["h"], transB=1),
        helper.make_node("MatMul", ["h", "b"], ["m"]),
        helper.make_node("Reshape", ["m", "shape"], ["r"]),
        helper.make_node("Conv", ["r", "c"], ["v"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["v"], ["w"]),
        helper.make_node("GlobalAveragePool", ["w"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    initial = [weight("a", 512, 256), weight("b", 512, width), weight("c", 64, width // 64, 3, 3)]
    initial.append(numpy_helper.from_array(np.array([-1, width // 64, 8, 8], np.int64), "shape"))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 64])
    graph = helper.make_graph(nodes, "g", [x], [y], initial)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return Signature(
        inputs=(TensorSpec(name="x", datatype="FP32", shape=("batch", 256)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=("batch", 64)),),
        dims={"batch": Dim()},
    )


def test_an_onnx_program_that_is_shared_answers_bit_for_bit_as_one_that_is_not(
    tmp_path: Path, place: SharedDir
) -> None:
    signature = program(tmp_path / "model.onnx")
    alone = OnnxSession(tmp_path / "model.onnx", signature)
    for _ in range(2):  # by who makes it, and by who finds it
        sharing = OnnxSession(tmp_path / "model.onnx", signature, settings=SessionSettings(place=place))
        for rows in (ROWS, ROWS[:1]):
            assert sharing.run({"x": rows})["y"].tobytes() == alone.run({"x": rows})["y"].tobytes()


def test_the_weights_of_an_onnx_program_are_mapped_from_the_shared_file(tmp_path: Path, place: SharedDir) -> None:
    signature = program(tmp_path / "model.onnx")
    session = OnnxSession(tmp_path / "model.onnx", signature, settings=SessionSettings(place=place))
    session.run({"x": ROWS})
    assert mapped_bytes(place.folder) > 0.9 * (tmp_path / "model.onnx").stat().st_size
    del session
    assert mapped_bytes(place.folder) == 0
    assert [path.name for path in place.folder.iterdir()] == ["lock"]


def program_of_a_table(path: Path, rows: int) -> Signature:
    """One lookup in a table that lies in a file of its own."""
    table = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    tensor = TensorProto(name="rows", dims=table.shape, data_type=TensorProto.FLOAT, raw_data=table.tobytes())
    onnx.external_data_helper.set_external_data(tensor, f"{path.name}.users-1.safetensors", 4096, table.nbytes)
    tensor.ClearField("raw_data")
    path.with_name(f"{path.name}.users-1.safetensors").write_bytes(bytes(4096) + table.tobytes())
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 16])
    node = helper.make_node("Gather", ["rows", "ids"], ["out"])
    graph = helper.make_graph([node], "g", [ids], [out], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    inputs = (TensorSpec(name="ids", datatype="INT64", shape=("n",)),)
    outputs = (TensorSpec(name="out", datatype="FP32", shape=("n", 16)),)
    return Signature(inputs=inputs, outputs=outputs, dims={"n": Dim()})


def test_processes_map_a_table_from_the_bundle_and_make_no_copy_of_it(tmp_path: Path, place: SharedDir) -> None:
    signature = program_of_a_table(tmp_path / "model.onnx", rows=65_536)
    size = (tmp_path / "model.onnx.users-1.safetensors").stat().st_size
    session = OnnxSession(tmp_path / "model.onnx", signature, settings=SessionSettings(place=place))
    found = session.run({"ids": np.arange(0, 65_536, 7)})["out"]
    assert found[:, 0].tolist() == [16.0 * one for one in range(0, 65_536, 7)]
    assert not list(place.folder.iterdir())
    assert mapped_bytes(tmp_path / "model.onnx.users-1.safetensors") > 0.9 * size


def mapped_bytes(folder: Path) -> int:
    """Bytes of files under `folder` that this process has mapped, and touched."""
    found, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            counted = str(folder) in line
        elif counted and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_a_small_program_is_each_process_own(tmp_path: Path, place: SharedDir) -> None:
    signature = program(tmp_path / "model.onnx", width=64)
    assert (tmp_path / "model.onnx").stat().st_size < shared_weights.WORTH_BYTES
    OnnxSession(tmp_path / "model.onnx", signature, settings=SessionSettings(place=place))
    assert not list(place.folder.iterdir())


def test_without_room_each_process_has_its_own_copy_and_says_so(tmp_path: Path) -> None:
    signature = program(tmp_path / "model.onnx")
    alone = OnnxSession(tmp_path / "model.onnx", signature)
    lines: list[str] = []
    with events.listening(lambda name, fields: lines.append(name)):
        settings = SessionSettings(place=SharedDir(folder=tmp_path / "gone", key="k"))
        session = OnnxSession(tmp_path / "model.onnx", signature, settings=settings)
    assert lines == ["weights.private"]
    assert session.run({"x": ROWS})["y"].tobytes() == alone.run({"x": ROWS})["y"].tobytes()


def test_a_shared_program_that_does_not_open_is_opened_from_the_bundle(tmp_path: Path, place: SharedDir) -> None:
    signature = program(tmp_path / "model.onnx")
    torn = place.folder / f"k.onnxruntime-{onnxruntime.__version__}"
    torn.mkdir()
    (torn / "users").touch()
    (torn / "model.onnx").write_bytes(b"torn")
    lines: list[str] = []
    with events.listening(lambda name, fields: lines.append(name)):
        session = OnnxSession(tmp_path / "model.onnx", signature, settings=SessionSettings(place=place))
    assert lines == ["weights.private"]
    assert session.run({"x": ROWS})["y"].shape == (3, 64)
    assert not torn.exists(), "nobody holds it"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512)
        self.second = nn.Linear(512, 512, bias=False)
        self.second.weight = self.first.weight
        self.conv = nn.Conv2d(16, 128, 3).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.zeros(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.conv(self.second(self.first(x)).reshape(-1, 16, 8, 4)) + self.seen[0, 0]


def test_torch_computes_with_mapped_weights_and_a_buffer_that_is_written_is_a_copy_of_ones_own(
    place: SharedDir,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 512)
    torch.manual_seed(1)
    wanted = Tied().eval()
    torch.manual_seed(1)
    models = [Tied().eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    wanted.load_state_dict(models[0].state_dict())
    lines: list[dict[str, events.Field]] = []
    with torch.no_grad(), events.listening(lambda name, fields: lines.append({"name": name, **fields})):
        for model in models:
            share(model, SessionSettings(place=place))
        answers = [wanted(x), wanted(x)]
        for model in models:  # each counts for itself
            for answer in answers:
                assert torch.equal(model(x), answer)
    assert models[0].second.weight is models[0].first.weight
    assert models[0].conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert [(one["name"], one["own_bytes"]) for one in lines] == [("weights.shared", 0)] * 2


def test_a_tensor_with_other_bytes_than_the_file_has_stays_as_it_was_loaded(place: SharedDir) -> None:
    share(Tied(), SessionSettings(place=place))  # gone at once, and what it laid there with it
    one, other = Tied(), Tied()
    share(one, SessionSettings(place=place))
    before = other.first.weight.detach().clone()
    lines: list[dict[str, events.Field]] = []
    with events.listening(lambda name, fields: lines.append(dict(fields))):
        share(other, SessionSettings(place=place))
    assert torch.equal(other.first.weight, before)
    assert lines[0]["own_bytes"] == 512 * 512 * 4 + 128 * 16 * 9 * 4
