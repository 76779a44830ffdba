"""What every Quantizer promises: import the tests and provide the fixture `quantizer`.

The fixture yields the quantizer and a program with two convolutions and a Gemm, with its calibration records.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest

from trueline.bundle import Bundle
from trueline.compress.apply.contract import ParentProgram, Quantizer
from trueline.compress.measure.kernels import Kernels, count_kernels, size_of
from trueline.compress.method import CompressMethod, parse_method
from trueline.errors import TruelineError
from trueline.files import sha256_file
from trueline.runtime.open import open_session
from worlds import compressible


class Quantizing(NamedTuple):
    quantizer: Quantizer
    program: ParentProgram
    bundle: Bundle

    def apply(self, method: CompressMethod) -> Path:
        out = self.program.work / method.name.replace(":", "-").replace(" ", "-") / "model.onnx"
        out.parent.mkdir(parents=True, exist_ok=True)
        self.quantizer.apply(method, self.program, out)
        return out

    def answer(self, path: Path, method: CompressMethod | None = None) -> np.ndarray:
        session = open_session(method.format if method else "onnx", path, self.bundle.signature)
        return session.run({"input": compressible.images()})["output"]


def test_every_variant_answers_almost_as_the_parent_and_is_smaller(quantizer: Quantizing) -> None:
    expected = quantizer.answer(quantizer.program.path)
    for method in quantizer.quantizer.list_variants():
        path = quantizer.apply(method)
        found = quantizer.answer(path, method)
        gap = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert gap < 0.15, method.name
        if method.kind != "openvino-fp32":
            assert size_of(path) < size_of(quantizer.program.path), method.name


def test_every_variant_is_what_its_name_says(quantizer: Quantizing) -> None:
    for method in quantizer.quantizer.list_variants():
        assert quantizer.quantizer.find_fault(count_kernels(quantizer.apply(method), method.format)) == ""
        assert parse_method(method.name) == method


def test_a_program_that_stayed_as_it_was_is_found_out(quantizer: Quantizing) -> None:
    if quantizer.quantizer.list_variants()[0].kind == "openvino-fp32":
        pytest.skip("what is not to be compressed has no such fault")
    assert quantizer.quantizer.find_fault(Kernels(quantized=0, floating=3))


def test_the_parent_is_not_touched_and_stdout_stays_clean(
    quantizer: Quantizing, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sha256_file(quantizer.program.path)
    quantizer.apply(quantizer.quantizer.list_variants()[0])
    assert sha256_file(quantizer.program.path) == before
    assert capsys.readouterr() == ("", "")


def test_a_program_that_is_none_is_an_error_in_words(quantizer: Quantizing, tmp_path: Path) -> None:
    torn = tmp_path / "torn.onnx"
    torn.write_bytes(b"no program")
    program = ParentProgram(torn, tmp_path, quantizer.program.calibration)
    with pytest.raises(TruelineError, match="does not open"):
        quantizer.quantizer.apply(quantizer.quantizer.list_variants()[0], program, tmp_path / "out.onnx")


def test_an_operator_that_is_left_out_stays_in_float32(quantizer: Quantizing) -> None:
    method = quantizer.quantizer.list_variants()[0]
    if not method.words:
        pytest.skip("16-bit weights leave no operator out")
    every = count_kernels(quantizer.apply(method), method.format)
    fewer = count_kernels(quantizer.apply(CompressMethod(method.kind, method.words, ("last",))), method.format)
    assert fewer.quantized == every.quantized - 1
    assert len(fewer.left) == fewer.floating
    assert onnx.load(quantizer.program.path).graph.node[-1].name == "last"
