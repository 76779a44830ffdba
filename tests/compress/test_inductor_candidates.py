"""int8 by torchao and AOTInductor: machine code, made when a user names it; its kernels are counted in its source."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import trueline
from trueline.bundle import open_bundle
from trueline.compress.apply import inductor
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.inductor import InductorQuantizer
from trueline.compress.measure.kernels import count_kernels
from trueline.compress.method import CompressMethod
from trueline.compress.ordering import list_usual
from trueline.errors import BudgetMissed, CaptureError, MissingPackage, UsageError
from trueline.runtime.open import open_program, replay
from trueline.runtime.torch_export import FILE
from worlds import compressible

METHOD = CompressMethod("inductor", ("static",))


def test_no_search_tries_machine_code_by_itself(trained: compressible.Compressible, tmp_path: Path) -> None:
    program = ParentProgram(trained.bundle.program_path("onnx"), tmp_path, list)
    assert "inductor" not in {method.kind for method in list_usual(program, "latency")}


def test_a_bundle_without_an_exported_program_is_a_row_that_says_so(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    with pytest.raises(BudgetMissed, match=r"torch\.export program, and this bundle has none"):
        trueline.compress(trained.bundle.path, quantize=["inductor"], budget="accuracy=5%", out=tmp_path / "b")


def test_without_torchao_the_extra_is_named(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    program = ParentProgram(tmp_path, tmp_path, list, exported=tmp_path / FILE, signature=trained.bundle.signature)
    with pytest.raises(MissingPackage, match="is not installed") as missing:
        InductorQuantizer().apply(METHOD, program, tmp_path / "out.pt2")
    assert "trueline[inductor]" in missing.value.hint


def test_kernels_are_counted_in_the_compiled_source_and_float32_is_found_out(tmp_path: Path) -> None:
    call = "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_{}(a, b));\n"
    path = tmp_path / "model.so.pt2"
    names = ["_qconv_pointwise_tensor", "_qlinear_pointwise_tensor", "mkldnn__convolution_pointwise", "bmm_out"]
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("model/data/aotinductor/model/x.wrapper.cpp", "".join(map(call.format, names)))
        package.writestr("model/data/aotinductor/model/x.kernel.cpp", call.format("addmm_out"))
    found = count_kernels(path, "aotinductor")
    assert (found.quantized, found.floating) == (2, 2)
    assert found.left == ("mkldnn__convolution_pointwise", "bmm_out")
    assert InductorQuantizer().find_fault(found) == ""
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("model/data/aotinductor/model/x.wrapper.cpp", call.format("addmm_out"))
    assert "float32" in InductorQuantizer().find_fault(count_kernels(path, "aotinductor"))


def test_a_program_that_was_compiled_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader:
        def __init__(self, *_: object) -> None: ...

        def boxed_run(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
            return [given[0] * factor]

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", Loader)
    factor = 2.02
    inductor._check_compiled(tmp_path, lambda x: (x * 2,), [torch.randn(4, 3)])
    factor = 2.5
    with pytest.raises(CaptureError, match="answers otherwise than the quantized model"):
        inductor._check_compiled(tmp_path, lambda x: (x * 2,), [torch.randn(4, 3)])


def test_a_convolution_of_one_channel_stays_in_float32_and_others_do_not() -> None:
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 1, 1)]
    exported = torch.export.export(nn.Sequential(*layers).eval(), (torch.randn(2, 1, 9, 9),))
    assert inductor._find_miscompiled(exported.module(check_guards=False)) == ["conv2d"]


@pytest.mark.slow
@pytest.mark.long
def test_int8_machine_code_is_sealed_and_opened_only_by_consent(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install 'trueline[inductor]'")
    weights = tmp_path / "weights.safetensors"
    save_file(trained.module.state_dict(), weights)
    parent = tmp_path / "drawn.bundle"
    trueline.capture(trained.recipe, weights, parent, formats=["onnx", "torch_export"])
    found = trueline.compress(
        parent, recipe=trained.recipe, quantize=["inductor:static"], out=tmp_path / "native.bundle"
    )
    assert found.row.name == "inductor:static"
    assert (found.row.quantized, found.row.floating) == (2, 1)  # the convolution of one channel stays as it is
    sealed = open_bundle(found.path)
    assert sealed.manifest.serve == "aotinductor"
    with pytest.raises(UsageError, match="machine code"):
        open_program(sealed)
    session = open_program(sealed, native=True)
    replay(sealed, session)
    images = compressible.images(7)
    with torch.no_grad():
        expected = trained.module(torch.from_numpy(images)).numpy()
    assert abs(session.run({"input": images})["output"] - expected).max() < 0.2 * abs(expected).max()
