"""Values that are no numbers never reach LAPACK, which would end the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.bundle.values import Values
from trueline.capture.api import capture
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import limits, narrowing, prove
from trueline.capture.proof.careful import Careful, Unsafe
from trueline.capture.proof.observe import find_parting, observe, watch_again
from trueline.capture.proof.probes import Probe, make_probes
from trueline.capture.proof.value_probes import make_value_probes
from trueline.errors import NotProven, RequestError
from trueline.runtime.open import open_program
from worlds.models import Eigen
from worlds.recipes import untrained


class Guarded(Eigen):
    """Answers numbers to what is none, and so is asked with a NaN."""

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            return torch.zeros(len(x))
        return super().forward(x)


def no_numbers(eager: EagerSession) -> tuple[Probe, ...]:
    probes = make_value_probes(eager.example, eager.signature)
    return tuple(probe for probe in probes if not np.isfinite(probe.inputs["x"]).all())


def test_a_model_that_would_hand_a_nan_to_lapack_is_stopped_before_and_no_program_may_claim_such_values() -> None:
    eager = EagerSession(Eigen(), torch.randn(4, 3))
    seen = observe(eager, [*make_probes(eager.example), *no_numbers(eager)])
    assert {one.probe.name for one in seen if one.unsafe} == {probe.name for probe in no_numbers(eager)}
    itself = prove.judge(eager, seen)
    assert not itself.proven
    claim = narrowing.narrow(eager.signature, eager.examples, seen, itself.evidence)
    assert claim is not None
    assert claim.values == {"x": Values(finite=True)}


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


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.arange(7).repeat_interleave(torch.tensor([2**61] * 7)),
        lambda: torch.repeat_interleave(torch.tensor([2**62, 2**62])),
        lambda: torch.nn.functional.ctc_loss(
            torch.zeros(5, 2, 4), torch.tensor([[1, 2], [1, 2**31]]), torch.tensor([5, 5]), torch.tensor([2, 2])
        ),
        lambda: torch.segment_reduce(torch.zeros(5), "sum", offsets=torch.tensor([0, 2, 2**31])),
        lambda: torch.lcm(torch.tensor([6, -(2**63)]), torch.tensor(7)),
    ],
)
def test_no_operator_gets_a_number_that_leads_it_out_of_its_memory_or_ends_the_process(call: Any) -> None:
    with Careful(), pytest.raises(Unsafe, match="would"):
        call()


def test_other_operators_and_numbers_pass() -> None:
    with Careful():
        assert len(torch.arange(7).repeat_interleave(torch.tensor([2, 0, 1, 1, 1, 1, 1]))) == 7
        assert torch.lcm(torch.tensor([6, -(2**63) + 1]), torch.tensor(7)).tolist()[0] == 42
        assert torch.segment_reduce(torch.ones(5), "sum", offsets=torch.tensor([0, 2, 5])).tolist() == [2.0, 3.0]
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
    seen = observe(eager, [*make_probes(eager.example), *no_numbers(eager)])
    assert not any(one.unsafe for one in seen)
    found = prove.judge(Traced(eager), seen)
    assert not found.proven
    assert "would get a value that is no number" in found.reason


class Normalized(nn.Module):
    """Of zeros it makes NaN, of which `eigvals` ends the process."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x / x.sum((1, 2), keepdim=True)).abs()


@pytest.mark.jobs
def test_finite_numbers_of_which_a_model_makes_nan_for_lapack_are_refused_by_model_and_program(tmp_path: Path) -> None:
    examples = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0))
    recipe = untrained(Normalized, name="normalized", examples=lambda: examples)
    captured = capture(recipe, None, tmp_path / "b", formats=["torch_export"])
    assert [one.verdict for one in captured.programs] == ["proven"]
    program = open_program(open_bundle(tmp_path / "b"))
    assert program.run({"x": examples.numpy()})["output"].shape == (4, 3)
    with pytest.raises(RequestError, match="the input has no finite number"):
        program.run({"x": np.zeros((2, 3, 3), np.float32)})
    with pytest.raises(NotProven, match="the program would end its process"):
        capture(recipe, None, tmp_path / "script", formats=["torchscript"])


class RowCounts(nn.Module):
    """Counts that are stacked: refused unless all rows have the same largest value, which is no range of values."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.bincount(row, minlength=30) for row in x])


def test_a_planted_count_takes_bounded_memory_and_no_program_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMORY_BYTES", (2**26,))
    eager = EagerSession(RowCounts(), torch.tensor([[1, 29], [3, 4]]))
    probes = [one for one in make_value_probes(eager.example, eager.signature) if one.value == 2**31]
    seen = observe(eager, probes)
    assert [(one.outputs, one.unsafe, "allocate" in one.error) for one in seen] == [(None, True, True)]


def test_capturing_a_model_of_linear_algebra_goes_through(tmp_path: Path) -> None:
    examples = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    recipe = untrained(Eigen, name="eigen", examples=lambda: examples)
    captured = capture(recipe, None, tmp_path / "b", formats=["torch_export"])
    assert [one.verdict for one in captured.programs] == ["proven"]
    bundle = open_bundle(tmp_path / "b")
    claim = bundle.program().values["x"]
    assert -claim.low == claim.high == pytest.approx(1.8446743e19)  # type: ignore[operator]
    assert claim.text == "from -1.84467e+19 to 1.84467e+19"  # the products of larger ones would be infinite
    assert all(one.verdict == "outside" for one in bundle.evidence() if "NaN" in one.probe or "infinit" in one.probe)
    with pytest.raises(RequestError, match=r"input 'x' has nan at \[0, 1\], proven only for values that are from -1.8"):
        open_program(bundle).run({"x": np.array([[1, np.nan, 2]], np.float32)})
    assert np.isfinite(bundle.golden()[0].outputs["output"]).all()


class Tables(nn.Module):
    """A table for each number of records, made when it first comes."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        rows = int(x.shape[0])
        if rows not in self.tables:
            self.tables[rows] = torch.arange(rows, dtype=x.dtype)[:, None]
        return x + self.tables[rows]


def test_the_line_that_fills_a_cache_is_not_named_as_one_at_which_ways_part() -> None:
    eager = EagerSession(Tables().eval(), torch.randn(3, 4))
    seen = observe(eager, make_probes(eager.example, signature=eager.calling.presumed))
    assert find_parting(seen) is not None
    assert find_parting(watch_again(eager, seen)) is None
