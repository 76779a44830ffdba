"""AOTInductor keeps the laws of a Session, and refuses what its own guards were dropped for. Compiles for minutes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from session_conformance import *  # noqa: F403 - the shared tests
from small_models import Mlp, ShapeBranch

from trueline.errors import CaptureError, RequestError
from trueline.runtime import aoti_emit, export
from trueline.runtime.eager import EagerSession
from trueline.runtime.session import Session, open_session

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here, and AOTInductor compiles C++")
pytestmark = [pytest.mark.line, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Session, Session]:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here, and AOTInductor compiles C++")
    eager = EagerSession(Mlp().eval(), torch.randn(5, 8))
    exported = export.export(eager.module, eager.calling)
    path = aoti_emit.emit(exported, tmp_path_factory.mktemp("aoti"))
    return open_session("aotinductor", path, exported.signature, native=True), eager


@compiles
def test_a_batch_beyond_the_guard_is_refused_and_not_answered_wrongly(tmp_path) -> None:
    eager = EagerSession(ShapeBranch().eval(), torch.ones(4, 2))
    exported = export.export(eager.module, eager.calling)
    session = open_session("aotinductor", aoti_emit.emit(exported, tmp_path), exported.signature, native=True)
    with pytest.raises(RequestError, match="at most 6"):
        session.run({"x": np.ones((9, 2), np.float32)})


def test_without_a_compiler_it_is_refused_with_the_line_that_installs_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    eager = EagerSession(ShapeBranch().eval(), torch.ones(4, 2))
    with pytest.raises(CaptureError, match="no compiler 'no-such-compiler'") as refused:
        aoti_emit.emit(export.export(eager.module, eager.calling), tmp_path)
    assert "apt install g++" in refused.value.hint
