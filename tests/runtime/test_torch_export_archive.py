"""Opening a program runs no code, whoever wrote the archive."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from trueline.capture.export import torch_export
from trueline.capture.export.exported import Exported
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.errors import BundleError, CaptureError
from trueline.runtime import torch_export_archive, torchscript_archive
from trueline.runtime.compare import compare
from trueline.runtime.open import open_session
from worlds import TESTS
from worlds.models import Mlp


@pytest.fixture(scope="module")
def exported() -> Exported:
    eager = EagerSession(Mlp().eval(), torch.zeros(3, 8))
    return torch_export.export(eager.module, eager.calling)


def rewritten(path: Path, member: str, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(found)).split("/")[0]
    found[f"{root}/{member}"] = change(found.get(f"{root}/{member}", b""))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in found.items():
            archive.writestr(name, content)


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        program = json.loads(content)
        change(program)
        return json.dumps(program).encode()

    return apply


def first_node(program: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = program["graph_module"]["graph"]["nodes"][0]
    return found


def test_weights_are_copied_by_parts_into_an_archive(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[str] = []
    read = zipfile.ZipFile.read

    def note(archive: zipfile.ZipFile, member: Any, *how: Any) -> bytes:
        whole.append(getattr(member, "filename", member))
        return read(archive, member, *how)

    plain = torch_export.emit(exported, tmp_path / "plain")
    monkeypatch.setattr(zipfile.ZipFile, "read", note)
    monkeypatch.setattr(torch_export_archive, "_PART", 8)
    with monkeypatch.context() as checked:
        checked.setattr(torch_export_archive, "check", lambda path: None)
        parts = torch_export.emit(exported, tmp_path / "parts")
    assert [name.rpartition("/")[2] for name in whole] == ["model.json"]
    assert parts.read_bytes() == plain.read_bytes()


def symbol(program: dict[str, Any], text: str) -> None:
    for value in program["graph_module"]["graph"]["tensor_values"].values():
        for size in value["sizes"]:
            if "as_expr" in size:
                size["as_expr"]["expr_str"] = text


def spec(program: dict[str, Any], text: str) -> None:
    program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = text


class Tagged(torch.Tensor):
    """A subclass, which torch stores as a pickle."""


EVIL = "__import__('os').system('touch pwned')"


@pytest.mark.parametrize(
    "change",
    [
        lambda program: program.update(guards_code=[EVIL]),
        lambda program: symbol(program, EVIL),
        lambda program: symbol(program, "Symbol('x').__class__"),
        lambda program: symbol(program, "lambdify(1, 2)"),
        lambda program: symbol(program, "(lambda: 1)()"),
        lambda program: first_node(program).update(target="torch.hub.load"),
        lambda program: first_node(program).update(target="torch.ops.aten.from_file.default"),
        lambda program: first_node(program).update(target="_operator.call"),
        lambda program: first_node(program).update(target="#mine.op"),
        lambda program: first_node(program).update(metadata={"torch_fn": "a;b"}),
        lambda program: spec(
            program,
            '[1, {"type": "collections.defaultdict", "context": '
            '"{\\"default_factory_module\\": \\"antigravity\\"}", "children_spec": []}]',
        ),
        lambda program: spec(program, "[1"),
    ],
)
def test_a_graph_that_torch_would_turn_into_code_is_refused_before_torch_reads_it(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]
) -> None:
    path = torch_export.emit(exported, tmp_path)
    rewritten(path, "models/model.json", edited(change))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("torch was given the archive"))
    with pytest.raises(BundleError, match=r"model\.json"):
        open_session("torch_export", path, exported.signature)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("data/sample_inputs/model.pt", b"cos\nsystem\n(S'touch pwned'\ntR."),
        ("data/constants/custom_obj_0", b"\x80\x02."),
        ("data/constants/opaque_obj_0", b"\x80\x02."),
        ("data/weights/weight_0.pkl", b"\x80\x02."),
        ("data/aotinductor/model/a.so", b"\x7fELF"),
        ("extra/setup.py", b"print()"),
        ("data/weights/model_weights_config.json", b'{"config": {"w": {"path_name": "weight_0", "use_pickle": true}}}'),
    ],
)
def test_a_member_that_may_be_a_pickle_or_code_is_refused_by_its_name(
    exported: Exported, tmp_path: Path, member: str, content: bytes
) -> None:
    path = torch_export.emit(exported, tmp_path)
    rewritten(path, member, lambda _: content)
    with pytest.raises(BundleError) as refused:
        open_session("torch_export", path, exported.signature)
    assert member in refused.value.message


def test_a_torn_archive_is_an_error_that_names_it(exported: Exported, tmp_path: Path) -> None:
    path = torch_export.emit(exported, tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BundleError, match=r"model\.pt2"):
        open_session("torch_export", path, exported.signature)


def test_equal_models_give_equal_bytes_in_both_formats(tmp_path: Path) -> None:
    found = []
    for turn in ("one", "two"):
        torch.manual_seed(0)
        eager = EagerSession(Mlp().eval(), torch.zeros(3, 8))
        made = torch_export.export(eager.module, eager.calling)
        found.append([emit(made, tmp_path / turn).read_bytes() for emit in (onnx_emit.emit, torch_export.emit)])
    assert found[0] == found[1]


def test_programs_name_no_path_of_the_machine_that_made_them(exported: Exported, tmp_path: Path) -> None:
    for emit in (onnx_emit.emit, torch_export.emit):
        content = emit(exported, tmp_path).read_bytes()
        assert b"/models.py" not in content  # the name of the file and the line stay
        assert str(TESTS).encode() not in content
        assert b"site-packages" not in content


def test_an_onnx_program_carries_the_proven_range_and_the_signatures_names(exported: Exported, tmp_path: Path) -> None:
    model = onnx.load(onnx_emit.emit(exported, tmp_path))
    assert '"batch"' in {prop.key: prop.value for prop in model.metadata_props}["trueline.signature"]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    onnx.checker.check_model(model)


def test_an_onnx_program_is_written_in_the_opset_that_is_asked_for_and_still_says_its_range(
    exported: Exported, tmp_path: Path
) -> None:
    path = onnx_emit.emit(dataclasses.replace(exported, opset=18), tmp_path)
    model = onnx.load(path)
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 18)]
    assert model.ir_version == 8  # what a runtime of that opset can read
    assert '"batch"' in {prop.key: prop.value for prop in model.metadata_props}["trueline.signature"]
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    usual = open_session("onnx", onnx_emit.emit(exported, tmp_path / "usual"), exported.signature)
    assert compare(usual.run({"x": x}), open_session("onnx", path, exported.signature).run({"x": x})).agrees


def test_large_weights_lie_in_a_file_of_their_own_beside_the_program(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_emit, "EXTERNAL_BYTES", 10)
    path = onnx_emit.emit(exported, tmp_path)
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    session = open_session("onnx", path, exported.signature)
    assert session.run({"x": np.zeros((2, 8), np.float32)})["output"].shape == (2, 4)


def test_weights_that_only_a_pickle_can_hold_are_refused_when_they_are_emitted(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    eager = EagerSession(Holder(), torch.zeros(3, 8))
    made = torch_export.export(eager.module, eager.calling)
    made.program.state_dict["module.weight"] = nn.Parameter(torch.ones(8).as_subclass(Tagged))
    with pytest.raises(CaptureError, match="pickle"):
        torch_export.emit(made, tmp_path)
    assert not list(tmp_path.rglob("*.pt2"))


def test_a_size_by_a_factor_is_a_shape_expression(tmp_path: Path) -> None:
    class Longer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(x, scale_factor=1.5, mode="linear")

    eager = EagerSession(Longer().eval(), torch.randn(2, 3, 4), dynamic_shapes={"x": {2: "length"}})
    made = torch_export.export(eager.module, eager.calling)
    session = open_session("torch_export", torch_export.emit(made, tmp_path), made.signature)
    (answer,) = session.run({"x": np.ones((1, 3, 6), np.float32)}).values()
    assert answer.shape == (1, 3, 9)


def test_tied_weights_are_right_in_every_format_and_stored_once_where_both_read_them_alike(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.embedding(ids))
            return found

    eager = EagerSession(Tied().eval(), torch.arange(12).reshape(3, 4))
    exported = torch_export.export(eager.module, eager.calling)
    one = 50 * 64 * 4  # bytes; ONNX has them once as they are, and once turned round for its MatMul
    for format, emit, times in (("onnx", onnx_emit.emit, 2), ("torch_export", torch_export.emit, 1)):
        path = emit(exported, tmp_path / format)
        assert times * one < path.stat().st_size < (times + 1) * one, format
        session = open_session(format, path, exported.signature)
        assert compare(eager.run(eager.example), session.run(eager.example)).agrees


@pytest.mark.parametrize("checks", [torch_export_archive.check, torchscript_archive.check])
def test_a_compressed_member_is_refused_before_it_is_read(tmp_path: Path, checks: Callable[[Path], None]) -> None:
    """CWE-409: a megabyte of it could become a gigabyte."""
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/models/model.json", b"0" * 1_000_000)
    with pytest.raises(BundleError, match="is compressed"):
        checks(path)
