"""AOTInductor keeps the laws of a Session, and refuses what its own guards were dropped for. Compiles for minutes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.session import *  # noqa: F403 - the shared tests
from trueline.capture.export import aotinductor, torch_export
from trueline.capture.model.eager import EagerSession
from trueline.errors import BundleError, CaptureError, RequestError
from trueline.runtime.aotinductor import CHECK_INPUTS
from trueline.runtime.open import open_session
from trueline.runtime.session import Session
from worlds.models import Mlp, ShapeBranch

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here, and AOTInductor compiles C++")
pytestmark = [pytest.mark.jobs, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Session, Session]:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here, and AOTInductor compiles C++")
    eager = EagerSession(Mlp().eval(), torch.randn(5, 8))
    exported = torch_export.export(eager.module, eager.calling)
    path = aotinductor.emit(exported, tmp_path_factory.mktemp("aoti"))
    return open_session("aotinductor", path, exported.signature, native=True), eager


@compiles
def test_a_batch_beyond_the_guard_is_refused_and_not_answered_wrongly(tmp_path) -> None:
    eager = EagerSession(ShapeBranch().eval(), torch.ones(4, 2))
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("aotinductor", aotinductor.emit(exported, tmp_path), exported.signature, native=True)
    with pytest.raises(RequestError, match="at most 6"):
        session.run({"x": np.ones((9, 2), np.float32)})


def test_without_a_compiler_it_is_refused_with_the_line_that_installs_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    eager = EagerSession(ShapeBranch().eval(), torch.ones(4, 2))
    with pytest.raises(CaptureError, match="no compiler 'no-such-compiler'") as refused:
        aotinductor.emit(torch_export.export(eager.module, eager.calling), tmp_path)
    assert "apt install g++" in refused.value.hint


def test_it_is_compiled_with_freezing_and_opened_with_its_own_input_check(tmp_path, monkeypatch) -> None:
    asked: list[dict[str, object]] = []

    def compiled(program: object, *, package_path: str, inductor_configs: dict[str, object]) -> None:
        asked.append(inductor_configs)
        Path(package_path).write_bytes(b"no package")

    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    monkeypatch.setenv(CHECK_INPUTS, "0")  # so that it is put back
    monkeypatch.delenv(CHECK_INPUTS)
    eager = EagerSession(Mlp().eval(), torch.ones(4, 8))
    exported = torch_export.export(eager.module, eager.calling)
    path = aotinductor.emit(exported, tmp_path)
    assert asked[0]["freezing"] is True
    monkeypatch.delenv(CHECK_INPUTS)
    with pytest.raises(BundleError, match="is no AOTInductor package"):
        open_session("aotinductor", path, exported.signature, native=True)
    assert os.environ[CHECK_INPUTS] == "1"
