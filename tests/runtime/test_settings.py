"""A Session runs with the threads, device and precision that it is told, or refuses; it ignores none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from trueline.capture.export import torch_export, torchscript
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.errors import UsageError
from trueline.runtime import openvino
from trueline.runtime.open import open_session
from trueline.runtime.session import Session, SessionSettings
from worlds.models import Mlp

pytestmark = pytest.mark.slow  # exports programs

X = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}

Programs = tuple[EagerSession, dict[str, Path]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("programs")
    eager = EagerSession(Mlp().eval(), torch.randn(5, 8))
    exported = torch_export.export(eager.module, eager.calling)
    onnx = emit.emit(exported, folder)
    script, _ = torchscript.emit(eager.module, eager.calling, folder, "script")
    return eager, {
        "onnx": onnx,
        "openvino": onnx,
        "torch_export": torch_export.emit(exported, folder),
        "torchscript": script,
    }


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def opened(programs: Programs, format: str, **settings: Any) -> Session:
    if format == "openvino" and importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed: pip install 'trueline[openvino]'")
    eager, paths = programs
    return open_session(format, paths[format], eager.signature, settings=SessionSettings(**settings))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch_export", "torchscript"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_here_is_refused_by_name_and_never_replaced(programs: Programs, format: str) -> None:
    with pytest.raises(UsageError, match="'cuda:1'"):
        opened(programs, format, device="cuda:1")
    with pytest.raises(UsageError, match="not on 'tpu'"):
        opened(programs, format, device="tpu")
    assert opened(programs, format, device="cpu").run(X)["output"].shape == (4, 4)


@pytest.mark.slow
def test_onnx_runtime_that_would_fall_back_to_the_cpu_in_silence_is_refused(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(UsageError, match="would run on the CPU"),
    ):
        opened(programs, "onnx", device="cuda")


@pytest.mark.slow
def test_openvinos_own_devices_are_listed_when_another_is_asked_for(programs: Programs) -> None:
    with pytest.raises(UsageError, match=r"no device 'NPU.7' here \(has: .*CPU"):
        opened(programs, "openvino", device="NPU.7")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torchscript"])
def test_a_precision_that_a_runtime_does_not_have_is_refused(programs: Programs, format: str) -> None:
    with pytest.raises(UsageError, match=r"no precision 'bf16' .*knows none"):
        opened(programs, format, precision="bf16")


@pytest.mark.slow
def test_autocast_computes_in_bf16_and_answers_in_the_signatures_dtype(programs: Programs) -> None:
    eager, _ = programs
    plain = eager.run(X)["output"]
    for session in (
        opened(programs, "torch_export", precision="bf16"),
        EagerSession(eager.module, torch.randn(5, 8), settings=SessionSettings(precision="bf16")),
    ):
        found = session.run(X)["output"]
        assert found.dtype == np.float32
        assert 1e-5 < np.abs(found - plain).max() < 0.1
    with pytest.raises(UsageError, match=r"no precision 'int8' .*fp32, bf16, fp16"):
        opened(programs, "torch_export", precision="int8")
    assert (opened(programs, "torch_export", precision="fp32").run(X)["output"] == plain).all()


@pytest.mark.parametrize(("can", "wanted", "given"), [(["FP32", "BF16"], "bf16", "bf16"), (["FP32"], "", "f32")])
def test_openvino_is_told_the_precision_that_its_device_has(can: list[str], wanted: str, given: str) -> None:
    class Core:
        def get_property(self, device: str, name: str) -> list[str]:
            assert (device, name) == ("CPU", "OPTIMIZATION_CAPABILITIES")
            return can

    assert openvino._precision(Core(), "CPU", SessionSettings(precision=wanted)) == given
    with pytest.raises(UsageError, match="OpenVINO on CPU has no precision 'fp16'"):
        openvino._precision(Core(), "CPU", SessionSettings(precision="fp16"))


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_before")
def test_threads_are_set_where_the_program_runs(programs: Programs) -> None:
    opened(programs, "torch_export", threads=1)
    assert torch.get_num_threads() == 1
    session = opened(programs, "onnx", threads=1)
    assert session._session.get_session_options().intra_op_num_threads == 1  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="threads is -1"):
        opened(programs, "onnx", threads=-1)
