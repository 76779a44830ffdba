"""The C++ project holds the proven range and the golden records, builds here, and tells a difference."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.bundle import Contents, Dim, Golden, ProgramEntry, Signature, Summary, TensorSpec, seal
from trueline.bundle.values import Values
from trueline.capture.cpp import export as cpp_export
from trueline.capture.cpp.export import export_cpp
from trueline.capture.export import aotinductor, torch_export, torchscript
from trueline.capture.model.eager import EagerSession
from trueline.cli import app
from trueline.errors import BundleError, UsageError

pytestmark = pytest.mark.slow  # exports programs


class Scaled(torch.nn.Module):
    """A branch on values: only a script keeps both ways."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        if bool(x.sum() > 0):
            return {"y": x * 2, "n": ids + 1}
        return {"y": x - 1, "n": ids}


class Straight(torch.nn.Module):
    """The same without the branch: what can be compiled to native code."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x * 2, "n": ids + 1}


def sealed(out: Path, *, format: str = "torchscript", wrong: float = 0.0) -> Path:
    """A bundle of `Scaled` (of `Straight` for AOTInductor), batch 1 to 6; `wrong` is added to what it should answer."""
    native = format == "aotinductor"
    model = Straight() if native else Scaled()
    eager = EagerSession(model.eval(), (torch.ones(3, 4), torch.ones(3, dtype=torch.int64)))
    program = out.parent / "program"
    if native:
        program.mkdir()
        aotinductor.emit(torch_export.export(eager.module, eager.calling), program)
    else:
        torchscript.emit(eager.module, eager.calling, program, "script")
    golden = []
    for size, sign in ((1, 1.0), (5, -1.0)):
        inputs = {"x": np.full((size, 4), sign, np.float32), "ids": np.arange(size)}
        answered = eager.run(inputs)
        golden.append(
            Golden(case=f"batch-{size}", inputs=inputs, outputs=answered | {"y": answered["y"] + np.float32(wrong)})
        )
    entry = ProgramEntry(
        format=format,
        file=f"programs/{cpp_export.PROGRAMS.get(format, 'model.ts')}",
        proven=True,
        seconds=0.0,
        probes=1,
        max_abs_error=0.0,
        versions={},
    )
    signature = Signature(inputs=eager.signature.inputs, outputs=eager.signature.outputs, dims={"batch": Dim(max=6)})
    contents = Contents(
        name="scaled",
        signature=signature,
        programs=[(entry, program)],
        serve=format,
        golden=golden,
        evidence=[],
        lineage={},
        summary=Summary(recipe="r", recipe_digest="d"),
    )
    return seal(out, contents).path


def test_the_tables_say_what_was_proven() -> None:
    signature = Signature(
        inputs=(TensorSpec(name="x", datatype="FP32", shape=("batch", 8, "length")),),
        outputs=(TensorSpec(name="y", datatype="INT64", shape=("batch",)),),
        dims={"batch": Dim(max=6), "length": Dim(min=4, multiple_of=4)},
    )
    text = cpp_export.signature_text(signature)
    assert '{"batch", 1, 6, 1},' in text
    assert '{"length", 4, -1, 4},' in text
    assert '{"x", at::kFloat, "FP32", {{-1, 0}, {8, -1}, {-1, 1}}, Rows::any},' in text
    assert '{"y", at::kLong, "INT64", {{-1, 0}}, Rows::any},' in text


def test_conditions_on_values_go_into_the_tables() -> None:
    inputs = (
        TensorSpec(name="x", datatype="FP32", shape=("batch",), values=Values(finite=True, high=1e18)),
        TensorSpec(name="i", datatype="INT64", shape=("batch",), values=Values(low=0, high=-1, size="batch")),
        TensorSpec(name="j", datatype="INT64", shape=("batch",), values=Values(low=-(2**63))),
    )
    text = cpp_export.signature_text(Signature(inputs=inputs, outputs=(), dims={"batch": Dim()}))
    assert '{"finite and at most 1e+18", true, std::nullopt, at::Scalar(1e+18), -1}},' in text
    assert '{"at least 0 and less than batch", false, at::Scalar(int64_t{0}), at::Scalar(int64_t{-1}), 0}},' in text
    assert "at::Scalar(int64_t{-9223372036854775807 - 1}), std::nullopt, -1}}," in text


def test_a_guard_is_written_with_pythons_division() -> None:
    node = ast.parse("2 * d0 // 3 == d1 and max(d0, 4) < 9", mode="eval").body
    assert cpp_export.expression(node) == (
        "((floor_div((int64_t{2}*d[0]),int64_t{3})==d[1]) && (std::max({d[0],int64_t{4}})<int64_t{9}))"
    )
    with pytest.raises(BundleError, match="cannot be written"):
        cpp_export.expression(ast.parse("__import__('os')", mode="eval").body)


def test_a_bundle_without_a_program_for_cpp_is_told_what_makes_one(tmp_path: Path) -> None:
    bundle = sealed(tmp_path / "b", format="torch_export")
    with pytest.raises(BundleError, match="no program that C\\+\\+ can load") as refused:
        export_cpp(bundle, tmp_path / "cpp")
    assert "--for cpp" in refused.value.hint
    with pytest.raises(UsageError, match="libtorch cannot load format 'onnx'"):
        export_cpp(bundle, tmp_path / "cpp", format="onnx")
    (tmp_path / "cpp").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        export_cpp(bundle, tmp_path / "cpp")


def test_the_command_writes_the_project_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, folder = sealed(tmp_path / "b"), tmp_path / "cpp"
    assert app.run(["bundle", "export-cpp", str(bundle), str(folder)]) == 0
    assert "./build.sh" in capsys.readouterr().out
    assert {"CMakeLists.txt", "build.sh", "golden", "main.cpp", "model.ts"} <= {path.name for path in folder.iterdir()}
    assert os.access(folder / "build.sh", os.X_OK)
    assert not [path for path in folder.rglob("*") if path.is_file() and b"@NAME@" in path.read_bytes()]


@pytest.mark.jobs
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here to build the project with")
@pytest.mark.parametrize("format", ["torchscript", pytest.param("aotinductor", marks=pytest.mark.long)])
def test_the_project_builds_and_exits_non_zero_exactly_when_an_answer_differs(tmp_path: Path, format: str) -> None:
    folder = export_cpp(sealed(tmp_path / "b", format=format), tmp_path / "cpp")
    env = {**os.environ, "PYTHON": sys.executable, "CXXFLAGS": "-O0"}
    built = subprocess.run([folder / "build.sh"], env=env, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    right = subprocess.run([folder / "replay", folder], check=False, capture_output=True, text=True)
    assert right.returncode == 0, right.stdout + right.stderr
    assert "batch-1: agrees\nbatch-5: agrees\noutside the proven range: refused" in right.stdout
    (tmp_path / "other").mkdir()
    wrong = export_cpp(sealed(tmp_path / "other" / "b", format=format, wrong=0.5), tmp_path / "cpp-wrong")
    shutil.copytree(wrong / "golden", folder / "golden", dirs_exist_ok=True)
    told = subprocess.run([folder / "replay", folder], check=False, capture_output=True, text=True)
    assert told.returncode == 1
    assert "batch-1: DIFFERS: output 'y' differs by 0.5" in told.stdout
    (folder / cpp_export.PROGRAMS[format]).unlink()
    assert subprocess.run([folder / "replay", folder], check=False, capture_output=True).returncode == 2


@pytest.mark.parametrize(
    "table",
    [
        {"shape": ['1}}; int evil = system("id"); //'], "data_offsets": [0, 4]},
        {"shape": [1], "data_offsets": ["0", "4"]},
        {"shape": [1], "data_offsets": [0]},
        {"shape": 1},
        {},
    ],
)
def test_a_table_of_golden_records_that_holds_text_for_numbers_becomes_no_source(table: dict[str, object]) -> None:
    """A bundle of a stranger is not to write code: the class of CVE-2026-35044 and CVE-2026-33744."""
    spec = TensorSpec(name="x", datatype="FP32", shape=(1,))
    with pytest.raises(BundleError, match="'1/x' cannot be read"):
        cpp_export._tensor({"1/x": table}, "1", spec)
