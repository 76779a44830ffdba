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


ELSEWHERE = {UNCHANGED, "inductor"}
"""What changes nothing; and what makes machine code of torch.export programs: test_inductor_candidates.py."""


@pytest.fixture(params=[kind for kind in QUANTIZERS if kind not in ELSEWHERE])
def quantizer(request: pytest.FixtureRequest, trained: compressible.Compressible, tmp_path: Path) -> Quantizing:
    if request.param.startswith("openvino"):
        pytest.importorskip("nncf", reason="NNCF is not installed: pip install 'trueline[openvino]'")
    program = ParentProgram(
        trained.bundle.program_path("onnx"),
        tmp_path,
        lambda: [{"input": compressible.images(32, seed)} for seed in (1, 2)],
    )
    return Quantizing(QUANTIZERS[request.param], program, trained.bundle)


def test_weights_beside_the_program_are_quantized_too(trained: compressible.Compressible, tmp_path: Path) -> None:
    import onnx

    (tmp_path / "large").mkdir()
    large = tmp_path / "large" / "model.onnx"
    model = onnx.load(trained.bundle.program_path("onnx"))
    onnx.save_model(model, large, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    program = ParentProgram(large, tmp_path / "work", lambda: [{"input": compressible.images(32)}])
    program.work.mkdir()
    for kind in ("static", "dynamic", "weights", "float16"):
        found = Quantizing(QUANTIZERS[kind], program, trained.bundle)
        path = found.apply(QUANTIZERS[kind].list_variants()[0])
        assert found.answer(path).shape == (64, 10)
    assert (large.parent / "model.onnx.data").is_file()
