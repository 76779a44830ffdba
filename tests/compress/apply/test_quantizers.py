"""Each quantizer keeps the promises of the seam."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.quantizer import *  # noqa: F403
from conformance.quantizer import Quantizing
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.quantizers import QUANTIZERS
from trueline.compress.method import UNCHANGED
from worlds import compressible


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    return compressible.make(tmp_path_factory.mktemp("trained"))


@pytest.fixture(params=[kind for kind in QUANTIZERS if kind != UNCHANGED])
def quantizer(request: pytest.FixtureRequest, trained: compressible.Compressible, tmp_path: Path) -> Quantizing:
    program = ParentProgram(
        trained.bundle.program_path("onnx"),
        tmp_path,
        lambda: [{"input": compressible.images(32, seed)} for seed in (1, 2)],
    )
    return Quantizing(QUANTIZERS[request.param], program, trained.bundle)
