"""A loop over the places that values choose is traced with a step for each, where a step that chooses nothing adds
nothing; a part is not converted while it is traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export.torch_export import export
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches import nonzero_loops
from trueline.errors import CaptureError
from worlds.cases import few


class Experts(nn.ModuleDict):
    """Each word is computed by the expert that it chooses; those that nobody chose are not asked."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self[f"expert_{number}"] = nn.Linear(4, 4)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        hit = torch.greater(chosen.sum(0), 0).nonzero()
        for expert in hit:
            (rows,) = torch.where(chosen[:, expert].squeeze(1))
            found.index_add_(0, rows, self[f"expert_{expert[0]}"](x[rows]))
        return found


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), Experts()

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(x.dtype)  # as it is already
        rows = x.flatten(0, 1)
        chosen = nn.functional.one_hot(self.router(rows).argmax(-1), 3)
        return self.experts(rows, chosen).view_as(x)


class Listed(Mixture):
    """Goes over a list of numbers in place of tensors."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(self.router(x).argmax(-1), 3)
        found = torch.zeros_like(x)
        for expert in (chosen.flatten(0, 1).sum(0) > 0).nonzero().squeeze(1).tolist():
            found = found + self.experts[f"expert_{expert}"](x) * chosen[..., expert : expert + 1]
        return found


class Counted(Listed):
    """Each expert that is asked adds one: what the others are not asked for matters."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(self.router(x).argmax(-1), 3)
        for _ in (chosen.flatten(0, 1).sum(0) > 0).nonzero():
            x = x + 1
        return x


class Widened(nn.Module):
    """Computes in double precision, and converts its weights there and back at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.inner.double()(x.double())  # there
        self.inner.float()
        return wide.float()


def made(model: nn.Module) -> tuple[nn.Module, EagerSession]:
    torch.manual_seed(0)
    model = model.eval()
    return model, EagerSession(model, torch.randn(3, 5, 4), dynamic_shapes={"x": {1: "length"}})


@pytest.mark.parametrize("kind", few([Mixture, Listed], 1, pytest.mark.jobs))
def test_a_loop_over_the_experts_that_were_chosen_has_a_step_for_each_expert(kind: type[nn.Module]) -> None:
    model, eager = made(kind())
    program = export(eager.module, eager.calling).program.module(check_guards=False)
    with torch.no_grad():
        for size in ((3, 5, 4), (1, 1, 4), (2, 9, 4)):
            x = torch.randn(size)
            torch.testing.assert_close(program(x)[0], model(x))


def test_a_loop_that_leaves_no_place_out_on_any_call_is_not_taken_for_one_over_all() -> None:
    model, _ = made(Mixture())
    full = torch.eye(4)[:3].repeat(4, 5, 1)
    with torch.no_grad():
        model.router.weight.copy_(torch.eye(3, 4))  # type: ignore[union-attr, operator]
        model.router.bias.zero_()  # type: ignore[union-attr, operator]
    assert not nonzero_loops.leave_places_out(model, [(full,)])
    assert nonzero_loops.leave_places_out(model, [(full,), (full[:1, :1],)])


def test_a_step_that_adds_something_by_itself_gives_another_answer_which_the_proof_sees() -> None:
    model, eager = made(Counted())
    program = export(eager.module, eager.calling).program.module(check_guards=False)
    x = torch.randn(1, 1, 4)
    torch.testing.assert_close(program(x)[0], x + 3)
    torch.testing.assert_close(model(x), x + 1)


def test_a_part_that_is_converted_while_it_is_called_is_refused_with_the_line() -> None:
    _, eager = made(Widened())
    with pytest.raises(CaptureError, match=r"changes 'weight' from torch.float32 to torch.float64") as refused:
        export(eager.module, eager.calling)
    assert "# there" in refused.value.hint
