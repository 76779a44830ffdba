"""Every Session answers as the eager model inside the proven range, and refuses in words outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trueline.bundle.signature import Signature
from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.errors import BundleError, CaptureError, RequestError, UsageError
from trueline.runtime.compare import compare
from trueline.runtime.open import open_session
from trueline.runtime.session import Session
from worlds.models import Identity, InPlace, Mlp, Nested, Pair, Recurrent, Running, ShapeBranch, Text

pytestmark = pytest.mark.slow  # exports programs

EMITTERS = {"onnx": onnx_emit.emit, "torch_export": torch_export.emit}
FORMATS = ("eager", "onnx", "torch_export")


def opened(format: str, module: nn.Module, example: Any, folder: Path) -> Session:
    eager = EagerSession(module.eval(), example)
    if format == "eager":
        return eager
    exported = torch_export.export(eager.module, eager.calling)
    return open_session(format, EMITTERS[format](exported, folder), exported.signature)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_positional_inputs_and_a_dict_of_outputs_keep_their_names(tmp_path: Path, format: str) -> None:
    example = (torch.randn(3, 8), torch.randint(0, 10, (3, 4)))
    module = Pair()
    session = opened(format, module, example, tmp_path)
    assert [spec.name for spec in session.signature.inputs] == ["x", "ids"]
    assert [(spec.name, spec.shape) for spec in session.signature.outputs] == [
        ("hidden", ("batch", 8)),
        ("score", ("batch",)),
    ]
    found = session.run({"x": np.ones((1, 8), np.float32), "ids": np.array([[1, 2, 3, 4]])})
    wanted = module(torch.ones(1, 8), torch.tensor([[1, 2, 3, 4]]))
    np.testing.assert_allclose(found["hidden"], wanted["hidden"].detach().numpy(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_nested_inputs_and_outputs_are_named_by_the_way_to_them(tmp_path: Path, format: str) -> None:
    def make(n: int) -> dict[str, Any]:
        return {"features": {"a": torch.ones(n, 2), "b": torch.ones(n, 2)}, "pair": (torch.ones(n, 2),) * 2}

    session = opened(format, Nested(), make(3), tmp_path)
    assert [spec.name for spec in session.signature.inputs] == ["features.a", "features.b", "pair.0", "pair.1"]
    assert [spec.name for spec in session.signature.outputs] == ["output_0", "output_1.0", "output_1.1"]
    ones = {spec.name: np.ones((4, 2), np.float32) for spec in session.signature.inputs}
    assert session.run(ones)["output_1.1"].shape == (8, 2)
    with pytest.raises(RequestError, match=r"input 'pair.1' has size 3 .* must be equal"):
        session.run(ones | {"pair.1": np.ones((3, 2), np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_model_that_writes_into_its_input_leaves_the_callers_array_alone(tmp_path: Path, format: str) -> None:
    session = opened(format, InPlace(), torch.zeros(3, 2), tmp_path)
    mine = np.zeros((4, 2), np.float32)
    assert (session.run({"x": mine})["output"] == 2).all()
    assert (mine == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch_export"])
def test_a_recurrent_model_is_captured_with_the_batch_where_it_is(tmp_path: Path, format: str) -> None:
    torch.manual_seed(0)
    session = opened(format, Recurrent(), torch.randn(3, 5, 4), tmp_path)
    assert [spec.shape for spec in session.signature.outputs] == [("batch", 6), (1, "batch", 6)]
    torch.manual_seed(0)
    eager = EagerSession(Recurrent().eval(), torch.randn(3, 5, 4))
    one = {"x": np.ones((1, 5, 4), np.float32)}
    assert compare(eager.run(one), session.run(one)).agrees


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_an_output_named_like_an_input_gets_a_name_of_its_own(tmp_path: Path, format: str) -> None:
    session = opened(format, Identity(), torch.zeros(3, 2), tmp_path)
    assert list(session.run({"x": np.ones((2, 2), np.float32)})) == ["x_2"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch_export"])
def test_the_range_that_a_branch_on_the_shape_leaves_is_enforced(tmp_path: Path, format: str) -> None:
    session = opened(format, ShapeBranch(), torch.zeros(4, 2), tmp_path)
    assert session.signature.dims["batch"].max == 6
    assert (session.run({"x": np.zeros((6, 2), np.float32)})["output"] == 1).all()
    with pytest.raises(RequestError, match="proven only for sizes of at least 1 and at most 6"):
        session.run({"x": np.zeros((7, 2), np.float32)})


@pytest.mark.slow
def test_an_id_beyond_the_table_is_the_requests_fault(tmp_path: Path) -> None:
    example = (torch.randn(3, 8), torch.randint(0, 10, (3, 4)))
    request = {"x": np.ones((1, 8), np.float32), "ids": np.full((1, 4), 99)}
    for format in ("onnx", "torch_export"):
        session = opened(format, Pair(), example, tmp_path / format)
        with pytest.raises(RequestError, match="refuses these values"):
            session.run(request)


@pytest.mark.parametrize(
    ("module", "example", "words"),
    [
        (Text(), torch.zeros(2, 2), "output 'output_1' of the model is a str"),
        (Mlp(), torch.zeros(2, 3), "cannot be called with its own example"),
        (Mlp(), torch.zeros(2, 8, dtype=torch.bfloat16), "input 'x' has dtype torch.bfloat16"),
        (Pair(), (torch.zeros(2, 8), torch.zeros(3, 4, dtype=torch.int64)), "The size of tensor a (2) must match"),
        (Mlp(), {}, "holds no tensor"),
    ],
)
def test_what_no_bundle_can_hold_is_refused_in_words(module: nn.Module, example: Any, words: str) -> None:
    with pytest.raises(CaptureError) as refused:
        EagerSession(module.eval(), example)
    assert words in refused.value.message


def test_a_model_that_writes_into_a_buffer_is_refused_by_the_name_of_the_buffer() -> None:
    eager = EagerSession(Running(), torch.zeros(3, 8))
    with pytest.raises(CaptureError, match="total"):
        torch_export.export(eager.module, eager.calling)


def test_a_format_that_nobody_runs_is_answered_with_those_there_are(tmp_path: Path) -> None:
    signature = Signature(inputs=(), outputs=(), dims={})
    (tmp_path / "model.xyz").touch()
    with pytest.raises(UsageError, match="onnx, openvino, offload, torch_export"):
        open_session("tflite", tmp_path / "model.xyz", signature)
    for format in ("onnx", "torch_export"):
        with pytest.raises(BundleError, match=r"model\.xyz"):
            open_session(format, tmp_path / "model.xyz", signature)


def test_a_program_that_is_not_its_signatures_is_refused(tmp_path: Path) -> None:
    eager = EagerSession(Mlp().eval(), torch.zeros(3, 8))
    other = EagerSession(Pair(), (torch.zeros(3, 8), torch.zeros(3, 4, dtype=torch.int64))).signature
    exported = torch_export.export(eager.module, eager.calling)
    for format, emit in EMITTERS.items():
        with pytest.raises(BundleError, match="signature"):
            open_session(format, emit(exported, tmp_path), other)


@pytest.mark.jobs
@pytest.mark.parametrize("format", ["onnx", "torch_export"])
def test_opening_and_running_a_program_imports_nothing_that_exports(tmp_path: Path, format: str) -> None:
    """And of an ONNX program not torch either: this is all that a server of it loads."""
    eager = EagerSession(Mlp().eval(), torch.zeros(3, 8))
    exported = torch_export.export(eager.module, eager.calling)
    path = (onnx_emit if format == "onnx" else torch_export).emit(exported, tmp_path)
    (tmp_path / "signature.json").write_bytes(__import__("msgspec").json.encode(exported.signature))
    code = f"""
import sys, msgspec, numpy as np
import trueline.bundle
from pathlib import Path
from trueline.runtime.open import open_session
from trueline.runtime.session import SessionSettings
signature = msgspec.json.decode(Path({str(tmp_path / "signature.json")!r}).read_bytes(), type=trueline.bundle.Signature)
session = open_session({format!r}, Path({str(path)!r}), signature, settings=SessionSettings(threads=1))
assert session.run({{"x": np.zeros((1, 8), np.float32)}})["output"].shape == (1, 4)
heavy = ("trueline.capture.", "trueline.train.", "onnxscript", *(("torch",) if {format!r} == "onnx" else ()))
print(", ".join(name for name in sys.modules if name.startswith(heavy)), end="")
"""
    found = subprocess.run([sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True)
    assert (found.returncode, found.stderr, found.stdout) == (0, "", "")


class Aliases(nn.Module):
    """Returns a weight, an input, a part of a sum, and the sum itself twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = x + self.weight[0]
        return self.weight, x, both[:, :1], both, both


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_written_into_an_answer_changes_nothing_else(tmp_path: Path, format: str) -> None:
    session = opened(format, Aliases(), torch.zeros(2, 3), tmp_path)
    given = {"x": np.zeros((2, 3), np.float32)}
    first = session.run(given)
    expected = {name: array.copy() for name, array in first.items()}
    for name, array in first.items():
        array[...] = 7
        assert all((other == expected[key]).all() for key, other in first.items() if key > name)
    assert not given["x"].any()
    for name, array in session.run(given).items():
        np.testing.assert_array_equal(array, expected[name])
