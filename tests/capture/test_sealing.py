"""What was proven is what is sealed: no rung that was refused, no guard less, no case and no evidence left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from trueline.bundle import Bundle, Evidence
from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim, Signature
from trueline.bundle.values import Values
from trueline.capture import sealing
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.attempt import Attempt
from trueline.capture.rung import Rung
from trueline.capture.subject import Subject
from trueline.errors import CaptureError
from trueline.recipe.contract import Recipe

FILES = {"onnx": "model.onnx", "torch_export": "model.pt2", "torchscript": "model.ts"}


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask


def never(*_: Any) -> Any:
    raise AssertionError("sealing has no use for this blank")


RECIPE = Recipe(name="small", digest="d" * 64, path=None, model=never, loss=never, optimizer=never, dataset=never)


@pytest.fixture
def subject() -> Subject:
    return _subject(Masked())


def _subject(module: nn.Module) -> Subject:
    module = module.eval()
    x = {"x": torch.randn(3, 4), "mask": torch.ones(3, 4, dtype=torch.int64)}
    eager = EagerSession(module, x, dynamic_shapes={"x": {1: "length"}, "mask": {1: "length"}})
    return Subject(module=module, eager=eager, data={})


@pytest.fixture
def claim(subject: Subject) -> Signature:
    """What the rungs were proven for."""
    dims = {"batch": Dim(max=64), "length": Dim(min=2, max=8, multiple_of=2)}
    guard = Guard(text="batch != 7", rule="d0 != 7", symbols=("batch",))
    shape = ("batch", "length")
    inputs, outputs = (
        tuple(msgspec.structs.replace(spec, shape=shape) for spec in specs)
        for specs in (subject.eager.signature.inputs, subject.eager.signature.outputs)
    )
    return Signature(inputs=inputs, outputs=outputs, dims=dims, guards=(guard,))


def evidence(format: str, probe: str, verdict: Any = "agrees") -> Evidence:
    return Evidence(format=format, against="eager", probe=probe, origin="made", inputs_sha256="0", shapes={},
                    verdict=verdict)  # fmt: skip


def rung(folder: Path, format: Any, signature: Signature | None, *, proven: bool = True) -> Rung:
    """One attempt; a program lies there also where it was refused."""
    (folder / format / "programs").mkdir(parents=True)
    (folder / format / "programs" / FILES[format]).write_bytes(format.encode())
    attempt = Attempt(
        format=format,
        verdict="proven" if proven else "refused",
        emitted=True,
        why="" if proven else "on probe 'p': it differs",
        line="",
        seconds=1.0,
        size_bytes=1,
        probes=2,
        max_abs_error=0.25,
    )
    return Rung(
        attempt=attempt,
        folder=folder / format,
        file=f"programs/{FILES[format]}",
        signature=signature,
        evidence=(evidence(format, "a"), evidence(format, "b", "agrees" if proven else "disagrees")),
    )


def sealed(tmp_path: Path, subject: Subject, *rungs: Rung) -> Bundle:
    return sealing.seal(RECIPE, None, subject, rungs, tmp_path / "b", overwrite=False)


def test_a_program_that_was_refused_is_not_in_the_bundle_and_its_evidence_is(
    tmp_path: Path, subject: Subject, claim: Signature
) -> None:
    rungs = [rung(tmp_path, "onnx", claim, proven=False), rung(tmp_path, "torch_export", claim)]
    found = sealed(tmp_path, subject, *rungs)
    assert [entry.format for entry in found.manifest.programs] == ["torch_export"]
    assert found.manifest.serve == "torch_export"
    assert "programs/model.onnx" not in found.manifest.files
    assert [(one.format, one.probe, one.verdict) for one in found.evidence()] == [
        ("onnx", "a", "agrees"),
        ("onnx", "b", "disagrees"),
        ("torch_export", "a", "agrees"),
        ("torch_export", "b", "agrees"),
    ]
    assert [one["verdict"] for one in found.lineage()["attempts"]] == ["refused", "proven"]


def test_the_range_and_the_guards_that_were_proven_are_those_that_are_sealed(
    tmp_path: Path, subject: Subject, claim: Signature
) -> None:
    found = sealed(tmp_path, subject, rung(tmp_path, "onnx", claim))
    assert (found.signature.dims, found.signature.guards) == (claim.dims, claim.guards)
    assert (found.signature.inputs[0].shape, found.signature.random) == (("batch", "length"), False)


def test_the_program_to_serve_is_the_first_of_the_formats_that_was_proven(
    tmp_path: Path, subject: Subject, claim: Signature
) -> None:
    rungs = [rung(tmp_path, format, claim) for format in ("torchscript", "torch_export", "onnx")]
    assert sealed(tmp_path, subject, *rungs).manifest.serve == "onnx"


@pytest.mark.parametrize(("most", "served"), [(1.5, "torch_export"), (2.5, "onnx")])
def test_a_program_that_claims_little_more_than_the_numbers_of_the_example_is_served_where_no_other_is(
    tmp_path: Path, subject: Subject, claim: Signature, most: float, served: str
) -> None:
    end = most * float(np.abs(subject.eager.example["x"]).max())
    confined = rung(tmp_path, "onnx", claim.with_values({"x": Values(low=-end, high=end)}))
    assert sealed(tmp_path, subject, confined, rung(tmp_path, "torch_export", claim)).manifest.serve == served
    assert sealing.seal(RECIPE, None, subject, [confined], tmp_path / "alone", overwrite=False).manifest.serve == "onnx"


def test_golden_examples_are_the_models_answers_at_several_batches_and_at_the_smallest_length(
    tmp_path: Path, subject: Subject, claim: Signature
) -> None:
    found = sealed(tmp_path, subject, rung(tmp_path, "onnx", claim))
    assert [golden.case for golden in found.golden()] == ["batch-1", "batch-2", "batch-5", "length-2"]
    assert [golden.inputs["x"].shape for golden in found.golden()] == [(1, 4), (2, 4), (5, 4), (3, 2)]
    for golden in found.golden():
        np.testing.assert_array_equal(golden.outputs["output"], golden.inputs["x"] * golden.inputs["mask"])


class Together(nn.Module):
    """Refuses a short length of several records."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if x.shape[1] < 3 and x.shape[0] > 1:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return x * mask


def test_a_golden_example_that_the_model_cannot_answer_is_left_out(tmp_path: Path, claim: Signature) -> None:
    found = sealed(tmp_path, _subject(Together()), rung(tmp_path, "onnx", claim))
    assert [golden.case for golden in found.golden()] == ["batch-1", "batch-2", "batch-5"]


def test_without_a_golden_example_nothing_is_sealed(tmp_path: Path, claim: Signature) -> None:
    narrow = msgspec.structs.replace(claim, dims={**claim.dims, "batch": Dim(min=60, max=64)})
    with pytest.raises(CaptureError, match="no example can be kept in the bundle"):
        sealed(tmp_path, _subject(Masked()), rung(tmp_path, "onnx", narrow))
    assert not (tmp_path / "b").exists()


def test_no_golden_example_lies_outside_of_what_was_proven(tmp_path: Path, subject: Subject, claim: Signature) -> None:
    narrow = msgspec.structs.replace(claim, dims={**claim.dims, "batch": Dim(max=4)})
    found = sealed(tmp_path, subject, rung(tmp_path, "onnx", narrow))
    assert [golden.case for golden in found.golden()] == ["batch-1", "batch-2", "length-2"]


def test_what_a_programs_masks_have_to_show_is_its_own_and_every_case_is_inside_of_it(
    tmp_path: Path, subject: Subject, claim: Signature
) -> None:
    shown = subject.eager.example["mask"].copy()
    shown[2] = 0  # the third record hides all
    hiding = {"x": torch.from_numpy(subject.eager.example["x"]), "mask": torch.from_numpy(shown)}
    eager = EagerSession(subject.module, hiding, dynamic_shapes={"x": {1: "length"}, "mask": {1: "length"}})
    strict = rung(tmp_path, "onnx", claim.with_rows({"mask": "some"}))
    found = sealed(tmp_path, replace(subject, eager=eager), strict, rung(tmp_path, "torch_export", claim))
    assert [dict(entry.rows) for entry in found.manifest.programs] == [{"mask": "some"}, {}]
    assert (found.signature.rows, found.signature_of("onnx").rows) == ({}, {"mask": "some"})
    assert [golden.case for golden in found.golden()] == ["batch-1", "batch-2"]
