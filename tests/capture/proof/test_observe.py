"""Values that are no numbers never reach LAPACK, which would end the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import prove
from trueline.capture.proof.observe import Careful, observe
from trueline.capture.proof.probes import Probe, make_probes
from worlds.models import Eigen
from worlds.recipes import untrained


class Guarded(Eigen):
    """Answers numbers to what is none, and so is asked with a NaN."""

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            return torch.zeros(len(x))
        return super().forward(x)


def wild(probes: Any) -> list[Probe]:
    return [probe for probe in probes if probe.wild]


def test_a_model_that_would_hand_a_nan_to_lapack_is_stopped_before_and_nothing_is_asked_of_a_program() -> None:
    eager = EagerSession(Eigen(), torch.randn(4, 3))
    probes = make_probes(eager.example)
    assert {probe.name for probe in wild(probes)} == {"batch 4, one NaN", "batch 4, one infinity"}
    seen = observe(eager, probes)
    assert len(seen) == len(probes) - 2
    assert not wild(one.probe for one in seen)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "operator",
    [
        torch.linalg.eigvals,
        torch.linalg.svdvals,
        torch.linalg.qr,
        torch.linalg.inv,
        torch.linalg.cholesky_ex,
        torch.linalg.lu_factor,
        torch.linalg.det,
        torch.linalg.eigvalsh,
        lambda a: torch.linalg.solve(torch.eye(2, dtype=a.dtype), a),
        lambda a: torch.linalg.lstsq(a, a),
        torch.pinverse,
        lambda a: torch.linalg.eigvals(a.to(torch.complex64)),
    ],
)
def test_no_operator_of_linear_algebra_gets_a_value_that_is_no_number(operator: Any, value: float) -> None:
    matrix = torch.tensor([[1.0, 2.0], [3.0, value]])
    with Careful(), pytest.raises(ValueError, match="no number"):
        operator(matrix)


def test_other_operators_and_numbers_pass() -> None:
    with Careful():
        assert torch.isnan(torch.tensor([1.0, float("nan")]) @ torch.ones(2))
        assert torch.linalg.eigvals(torch.eye(2)).real.sum() == 2


class Traced:
    """What a tracer makes of Guarded: always the one way. It would end the process on a NaN."""

    format = "traced"

    def __init__(self, eager: EagerSession) -> None:
        self.signature, self._eigen = eager.signature, EagerSession(Eigen(), torch.randn(4, 3))

    def run(self, inputs: Any) -> Any:
        return self._eigen.run(inputs)


def test_a_program_that_goes_another_way_than_the_model_into_lapack_disagrees_and_the_process_lives() -> None:
    eager = EagerSession(Guarded(), torch.randn(4, 3))
    seen = observe(eager, make_probes(eager.example))
    assert wild(one.probe for one in seen)
    found = prove.judge(Traced(eager), seen)
    assert not found.proven
    assert "would get a value that is no number" in found.reason


def test_capturing_a_model_of_linear_algebra_goes_through(tmp_path: Path) -> None:
    examples = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    recipe = untrained(Eigen, name="eigen", examples=lambda: examples)
    captured = capture(recipe, None, tmp_path / "b", formats=["torch_export"])
    assert [one.verdict for one in captured.programs] == ["proven"]
    bundle = open_bundle(tmp_path / "b")
    assert not any("NaN" in one.probe or "infinity" in one.probe for one in bundle.evidence())
    assert np.isfinite(bundle.golden()[0].outputs["output"]).all()
