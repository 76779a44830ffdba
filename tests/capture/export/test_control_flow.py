"""Eager control flow is asked anything, in any order, and goes on answering: the prover leaves no trace in Dynamo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from trueline.capture.export import torch_export
from trueline.capture.model import code_paths
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.capture.proof import determinism
from trueline.capture.proof.careful import Careful
from trueline.capture.proof.disagreement import shrink
from trueline.capture.proof.observe import hidden_state, observe
from trueline.capture.proof.probes import Probe, make_probes
from trueline.capture.proof.prove import judge
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow  # each new shape is compiled


class Cond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 1, lambda x: x * 2, lambda x: x - 1, (x,))


class While(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def going(y: Tensor, steps: Tensor) -> Tensor:
            return (y.abs().max() > 1) & (steps < 30)

        return while_loop(going, lambda y, steps: (y / 2, steps + 1), (x.clone(), torch.zeros((), dtype=torch.int64)))[
            0
        ]


class Scan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scan(lambda h, row: (h * 0.5 + row, h.clone()), x.new_zeros(x.shape[0]), x.movedim(1, 0))[0]


@pytest.mark.parametrize("kind", [Cond, While, Scan])
def test_a_model_of_control_flow_answers_as_before_after_values_that_are_no_numbers(kind: type[nn.Module]) -> None:
    eager = EagerSession(kind().eval(), torch.arange(12.0).reshape(3, 4) / 7)
    probes = make_probes(eager.example)
    seen = observe(eager, [*[one for one in probes if one.wild], *probes[:3], probes[-1]])
    assert probes[-1].name.endswith("as given, again")
    asked = [one for one in seen if not one.probe.wild]
    assert [one.error for one in asked] == [""] * 4
    assert hidden_state(asked) == ""
    assert determinism.find_cause(eager, "as it is told").random is False
    assert set(eager.run(eager.example)) == {"output"}


class Solves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() != 0, lambda x: torch.linalg.eigvalsh(x), lambda x: x[:, 0].clone(), (x,))


def test_no_branch_hands_what_is_no_number_to_lapack() -> None:
    eager = EagerSession(Solves().eval(), torch.eye(3))
    with Careful(), pytest.raises(ValueError, match="a value that is no number"):
        eager.run({"x": np.full((3, 3), np.nan, np.float32)})
    assert eager.run({"x": np.eye(3, dtype=np.float32)})["output"].tolist() == [1.0, 1.0, 1.0]


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x * 2, (x,))


def test_a_draw_of_random_numbers_inside_a_branch_is_seen_with_its_line() -> None:
    unsteady = determinism.check_twice(EagerSession(Drops().eval(), torch.ones(2, 3)))
    assert unsteady is not None
    assert unsteady.random
    assert "rand_like" in str(unsteady.place)


class Shrinks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return while_loop(lambda y: y.abs().max() > 1, lambda y: (y / 2,), (x.clone(),))[0]


class NeverAsked:
    """A program that nothing could stop."""

    format = "onnx"

    def __init__(self, eager: EagerSession) -> None:
        self.signature = eager.signature

    def run(self, inputs: Any) -> Any:
        raise AssertionError("it was run")


def test_a_program_is_not_run_on_values_for_which_the_loop_of_the_model_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_paths, "ENDLESS_S", 0.1)
    eager = EagerSession(Shrinks().eval(), torch.arange(6.0).reshape(2, 3))
    endless = {"x": np.full((2, 3), np.inf, np.float32)}
    probe = Probe(name="infinite", origin="made", num_records=2, inputs=endless, wild=True)
    (seen,) = observe(eager, [probe])
    assert seen.outputs is None
    assert "a loop of the model does not end" in seen.error
    (evidence,) = judge(NeverAsked(eager), [seen]).evidence
    assert evidence.verdict == "disagrees"
    assert shrink(NeverAsked(eager), eager, probe) is None


class Recurrence(nn.Module):
    """A state space: what is carried is multiplied with what each step brings, in a scan behind layers."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.reads = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        decay, reads = self.decay(x).sigmoid().movedim(1, 0), self.reads(x).movedim(1, 0)

        def step(carry: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            kept, read = inputs
            state = kept[:, :, None] * carry + read[:, None, :]
            return state, torch.matmul(state, read.unsqueeze(-1))[:, :, 0].clone()

        start = torch.zeros(x.shape[0], 4, 4)
        _, found = scan(step, start, (decay, reads))
        return found.movedim(0, 1)


def test_a_scan_behind_layers_with_parameters_is_right_as_onnx_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = EagerSession(Recurrence().eval(), torch.randn(3, 5, 4), dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    for batch, length in ((1, 5), (3, 2), (4, 11)):
        x = torch.randn(batch, length, 4).numpy()
        np.testing.assert_allclose(session.run({"x": x})["output"], eager.run({"x": x})["output"], atol=1e-5)
