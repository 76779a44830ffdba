"""An operator of a library's own becomes operators that every runtime knows, or is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import operators, torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove
from trueline.errors import CaptureError
from trueline.runtime.open import open_session
from worlds import marks

pytestmark = pytest.mark.slow  # exports programs


@torch.library.custom_op("trueline_tests::grouped", mutates_args=())
def grouped(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    output, start = input.new_zeros(input.shape[0], weight.shape[2]), 0
    for group, end in enumerate(offs.tolist()):
        output[start:end] = input[start:end] @ weight[group]
        start = end
    return output


@grouped.register_fake
def _(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


class Experts(nn.Module):
    """Records are sorted by expert, each is multiplied by its own expert's weight, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.weight = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        order = (chosen * 1000 + torch.arange(x.shape[0])).argsort()
        ends = (chosen[:, None] <= torch.arange(3)).sum(0)
        found = torch.ops.trueline_tests.grouped(x[order], self.weight, ends)  # called here
        return found[order.argsort()]


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.sum(-1) > 0, x.topk(2).values.sum(-1), x.mean(-1))


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x.amax(-1, keepdim=True)).softmax(-1) * x.shape[0]


@pytest.mark.parametrize(("model", "may"), [(Chooses, True), (Experts, True), (Scores, False)])
def test_only_a_program_with_an_operator_that_makes_whole_numbers_may_choose_among_equal_ones(
    model: type[nn.Module], may: bool
) -> None:
    program = torch.export.export(model(), (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert operators.may_choose(program) is may


@pytest.fixture
def eager() -> EagerSession:
    torch.manual_seed(0)
    return EagerSession(Experts().eval(), torch.randn(6, 4))


def test_an_operator_with_an_equivalent_is_proven_as_every_graph_program(
    eager: EagerSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"trueline_tests::grouped": operators.EQUIVALENTS["transformers::grouped_mm_fallback"]}
    monkeypatch.setattr(operators, "EQUIVALENTS", known)
    exported = torch_export.export(eager.module, eager.calling)
    for format, emit in (("onnx", onnx_emit.emit), ("torch_export", torch_export.emit)):
        session = open_session(format, emit(exported, tmp_path / format), exported.signature)
        proof = prove(session, eager, make_probes(eager.example, signature=exported.signature))
        assert proof.proven, proof.reason


@pytest.mark.parametrize("emit", [onnx_emit.emit, torch_export.emit])
def test_an_operator_without_one_is_refused_with_the_line_that_calls_it(
    eager: EagerSession, tmp_path: Path, emit: object
) -> None:
    exported = torch_export.export(eager.module, eager.calling)
    assert callable(emit)
    with pytest.raises(CaptureError, match="grouped") as refused:
        emit(exported, tmp_path)
    assert refused.value.hint.startswith(f"{__file__}:{marks.line_of(__file__, 'called here')}: ")


def test_rows_beyond_the_last_group_are_zero_and_an_empty_group_takes_none() -> None:
    x, weight = torch.randn(5, 4), torch.randn(3, 4, 2)
    offs = torch.tensor([2, 2, 4])
    found = operators.EQUIVALENTS["transformers::grouped_mm_fallback"](x, weight, offs)
    torch.testing.assert_close(found, grouped(x, weight, offs))
    assert (found[4] == 0).all()


class Mixed(nn.Module):
    """An autocast of its own, and a vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(3, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(x).relu()
        return torch.vmap(lambda weight: h.float() @ weight)(self.weight).transpose(0, 1)


def test_an_autocast_and_a_vmap_inside_a_model_are_carried_out_in_its_program(tmp_path: Path) -> None:
    eager = EagerSession(Mixed().eval(), torch.randn(5, 4))
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("torch_export", torch_export.emit(exported, tmp_path), exported.signature)
    proof = prove(session, eager, make_probes(eager.example, signature=exported.signature))
    assert proof.reason == ""


class Turns(nn.Module):
    """A vmap that converts its rows, whose dtype torch.export checks within it."""

    def forward(self, x: Tensor) -> Tensor:
        def turn(row: Tensor, here: Tensor) -> Tensor:
            return torch.where(here > 0, row, 0.0).expand_as(row).to(row.dtype)

        return torch.vmap(turn)(x, x.flip(1))


def test_a_vmap_over_a_free_size_that_checks_a_dtype_is_saved(tmp_path: Path) -> None:
    eager = EagerSession(Turns().eval(), torch.randn(3, 5), dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    torch_export.save(exported.program, tmp_path / "model.pt2")
    assert not [node for node in exported.program.graph.nodes if "predispatch" in str(node.target)]
