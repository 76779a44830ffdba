"""Every runtime keeps the laws of a Session; machine code does in test_aotinductor.py, because it takes long."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from conformance.session import *  # noqa: F403 - the shared tests
from trueline.capture.export import torch_export, torchscript
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.capture.opsets import check_opset, opset_for
from trueline.cli.line import capture as capture_verb
from trueline.errors import BundleError, UsageError
from trueline.runtime import openvino
from trueline.runtime.open import open_session
from trueline.runtime.session import FORMATS, TARGETS, Session, formats_for
from worlds.models import Mlp

pytestmark = pytest.mark.slow  # exports programs

NAMES = ("eager", "onnx", "openvino", "torch_export", "torchscript")


def opened(name: str, eager: EagerSession, folder: Path) -> Session:
    if name == "eager":
        return eager
    if name == "torchscript":
        path, _ = torchscript.emit(eager.module, eager.calling, folder, "script")
        return open_session(name, path, eager.signature)
    exported = torch_export.export(eager.module, eager.calling)
    emit = torch_export.emit if name == "torch_export" else onnx_emit.emit
    return open_session(name, emit(exported, folder), exported.signature)


@pytest.fixture(scope="module", params=NAMES)
def mlp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Session, Session]:
    if request.param == "openvino" and importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed: pip install 'trueline[openvino]'")
    torch.manual_seed(0)
    eager = EagerSession(Mlp().eval(), torch.randn(5, 8))
    return opened(request.param, eager, tmp_path_factory.mktemp(request.param)), eager


def test_machine_code_is_opened_only_by_who_allows_it(tmp_path: Path) -> None:
    (tmp_path / "model.so.pt2").write_bytes(b"\x7fELF")
    signature = EagerSession(Mlp().eval(), torch.zeros(2, 8)).signature
    with pytest.raises(UsageError, match="is machine code, and opening it runs it"):
        open_session("aotinductor", tmp_path / "model.so.pt2", signature)
    with pytest.raises(BundleError, match="no AOTInductor package"):
        open_session("aotinductor", tmp_path / "model.so.pt2", signature, native=True)


def test_a_runtime_that_is_not_installed_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    openvino.open_core.cache_clear()
    signature = EagerSession(Mlp().eval(), torch.zeros(2, 8)).signature
    with pytest.raises(UsageError, match="OpenVINO is not installed") as refused:
        openvino.OpenVinoSession(tmp_path / "model.onnx", signature)
    assert refused.value.hint == "pip install 'trueline[openvino]'"


def test_targets_are_formats_and_an_unknown_one_is_answered_with_those_there_are() -> None:
    assert formats_for(["cpp", "openvino"]) == ("onnx", "openvino", "torchscript")
    assert {format for formats in TARGETS.values() for format in formats} == set(FORMATS)
    assert tuple(TARGETS) == capture_verb._TARGETS  # what the help lists
    with pytest.raises(UsageError, match="there is no target 'onnxruntim'") as refused:
        formats_for(["onnxruntim"])
    assert refused.value.hint == "did you mean 'onnxruntime'?"


def test_a_release_of_onnx_runtime_chooses_the_opset_and_the_oldest_that_is_named_decides() -> None:
    assert formats_for(["onnxruntime@1.16.3", "cpp"]) == ("onnx", "torchscript")
    assert opset_for(["onnxruntime", "cpp"]) is None
    assert [opset_for([f"onnxruntime@1.{minor}"]) for minor in (14, 15, 16, 17, 18, 30)] == [18, 19, 19, 20, 20, 20]
    assert opset_for(["onnxruntime@1.17", "onnxruntime@1.14.1"]) == 18
    for target, words in (
        ("onnxruntime@1.13", "older than opset 18, the first that the exporter writes"),
        ("onnxruntime@new", "'new' is no release"),
        ("onnxruntime@", "'' is no release"),
        ("openvino@2023.0", "for onnxruntime alone"),
    ):
        with pytest.raises(UsageError, match=words):
            opset_for([target])
    with pytest.raises(UsageError, match=r"opset is 17, expected one of: 18, 19"):
        check_opset(17)
