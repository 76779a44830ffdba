"""Lists of numbers that are made of a size stay functions of it while a model is traced."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.ladder import climb
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches.stand_ins import size_lengths
from trueline.capture.patches.stand_ins.size_lists import SizeList
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove
from trueline.capture.subject import Subject
from trueline.doctor.api import calls_of
from trueline.doctor.examine import ask_original, examine
from trueline.errors import CaptureError
from trueline.runtime.open import open_session
from trueline.runtime.session import USUAL

ENDS = st.none() | st.integers(-12, 12)
STEPS = st.none() | st.integers(-4, 4).filter(bool)
RANGES = st.builds(range, st.integers(-5, 5), st.integers(-5, 12), st.integers(-3, 3).filter(bool))


@given(RANGES, st.lists(st.tuples(ENDS, ENDS, STEPS, st.lists(st.integers(-9, 9), max_size=3)), max_size=4))
def test_a_list_of_a_size_is_cut_joined_and_indexed_as_a_list_is(
    numbers: range, edits: list[tuple[int | None, int | None, int | None, list[int]]]
) -> None:
    plain, ours = list(numbers), SizeList.of(numbers)
    for start, stop, step, more in edits:
        plain, ours = plain[start:stop:step] + more, ours[start:stop:step] + more
        plain, ours = more[:1] + plain, more[:1] + ours
    assert list(ours) == plain
    assert ours == plain
    assert len(ours) == len(plain) == ours.length
    assert [ours[at] for at in range(-len(plain), len(plain))] == plain + plain
    assert list(reversed(ours)) == plain[::-1]
    assert ours.tensor().tolist() == plain
    for outside in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError):
            ours[outside]


def test_what_is_put_behind_a_list_of_a_size_stays_in_it_and_in_no_copy() -> None:
    ours = SizeList.of(range(3))
    before = ours.copy()
    ours.append(7)
    ours += [8]
    ours.extend(range(2))
    assert list(ours) == [0, 1, 2, 7, 8, 0, 1]
    assert list(before) == [0, 1, 2]
    with pytest.raises(TypeError, match="whole numbers"):
        ours.extend(["word"])


class Pooled(nn.Module):
    """Positions as Python's lists of numbers, pooled two by two with the first one kept, as tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = list(range(x.shape[1]))
        kept = [0] + positions[1:-1][::2]  # noqa: RUF005 - joined, as users do
        assert isinstance(positions, list)
        apart = torch.arange(positions[0], kept[-1] + 1, 2)
        steps = torch.tensor(kept, dtype=torch.int64)
        return x.index_select(1, steps) / len(kept) + self.table(steps), x[:, :1] + self.table(apart)


class Long(Pooled):
    """Answers no short ones."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[1] < 5:
            raise ValueError("too short")
        return super().forward(x)


class Walked(nn.Module):
    """A loop over the positions, which no list of a size takes away."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[:, 0])
        for at in list(range(x.shape[1])):
            total = total * 0.5 + x[:, at].tanh()
        return total


@pytest.mark.slow
@pytest.mark.long
def test_a_model_whose_positions_are_lists_is_proven_for_every_length_in_both_formats(tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = EagerSession(Pooled().eval(), torch.randn(3, 9, 4), dynamic_shapes={"x": {1: "length"}})
    for rung in climb(Subject(module=eager.module, eager=eager, data={}), USUAL, tmp_path):
        assert rung.attempt.verdict == "proven", rung.attempt.why
        assert rung.signature is not None
        length = rung.signature.dims["length"]
        assert length.min <= 5
        assert (length.max, length.multiple_of) == (130, 1)  # the table has no position after that
        probes = make_probes(eager.example, signature=rung.signature, sizes={"length": [5, 6, 8, 21, 100]})
        session = open_session(rung.attempt.format, rung.folder / rung.file, rung.signature)
        found = prove(session, eager, probes)
        assert found.proven, found.reason
        lengths = {one.shapes["x"][1] for one in found.evidence if one.verdict == "agrees"}
        assert lengths >= {5, 6, 8, 9, 21, 100}


@pytest.mark.slow
def test_the_doctor_finds_a_part_ready_whose_positions_are_lists() -> None:
    torch.manual_seed(0)
    eager = EagerSession(Long().eval(), torch.randn(3, 9, 4), dynamic_shapes={"x": {1: "length"}})
    oracle = ask_original(eager.module, calls_of(eager))
    found = examine(eager.module, oracle)
    assert found.reason == ""
    assert found.compared > 10


@pytest.mark.slow
def test_a_list_that_is_walked_through_fixes_its_size_as_ever_and_the_line_is_named() -> None:
    eager = EagerSession(Walked().eval(), torch.randn(3, 9, 4), dynamic_shapes={"x": {1: "length"}})
    with pytest.raises(CaptureError, match="a 'length' of 9 only") as refused:
        torch_export.export(eager.module, eager.calling)
    assert "list(range(x.shape[1]))" in refused.value.hint


def test_the_users_module_has_the_builtin_names_again_after_the_block_and_after_an_error() -> None:
    scope = Pooled.forward.__globals__
    assert size_lengths.may_help(Pooled())
    with size_lengths.keep_lengths_free(Pooled()):
        assert scope["list"] is not builtins.list
        assert isinstance([], scope["list"])
        assert scope["list"] == builtins.list
        assert scope["list"]("ab") == ["a", "b"]
    assert not {"list", "range", "len", "tuple"} & set(scope)
    with pytest.raises(RuntimeError, match="in the block"), size_lengths.keep_lengths_free(Pooled()):
        raise RuntimeError("in the block")
    assert not {"list", "range", "len", "tuple"} & set(scope)
