"""Eager control flow is asked anything, in any order, and goes on answering: the prover leaves no trace in Dynamo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from trueline.runtime import steady, wild
from trueline.runtime.eager import EagerSession
from trueline.runtime.probes import make_probes
from trueline.runtime.prove import hidden_state, observe

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
    assert steady.searched(eager, "as it is told").random is False
    assert set(eager.run(eager.example)) == {"output"}


class Solves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() != 0, lambda x: torch.linalg.eigvalsh(x), lambda x: x[:, 0].clone(), (x,))


def test_no_branch_hands_what_is_no_number_to_lapack() -> None:
    eager = EagerSession(Solves().eval(), torch.eye(3))
    with wild.Careful(), pytest.raises(ValueError, match="a value that is no number"):
        eager.run({"x": np.full((3, 3), np.nan, np.float32)})
    assert eager.run({"x": np.eye(3, dtype=np.float32)})["output"].tolist() == [1.0, 1.0, 1.0]
