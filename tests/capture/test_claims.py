"""A bundle claims the sizes that values bear out: not fewer because the exporter assumes, not more than the model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import Bundle, Contents, open_bundle, seal
from trueline.bundle.signature import Dim
from trueline.capture import subject
from trueline.capture.api import capture
from trueline.capture.verify import verify
from trueline.errors import DataError, NotProven, RequestError, UsageError
from trueline.recipe.contract import Recipe
from trueline.runtime.open import open_program
from worlds import marks, models, recipes

pytestmark = pytest.mark.slow


class Hole(nn.Module):
    """A branch at one length that computes the same either way."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 7:
            return x + x
        return x * 2


class RealHole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 7:
            return x * 3
        return x * 2


class SquaresEnd(nn.Module):
    """A square loses what is beyond 200 rows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == x.shape[2]:
            x = x.clone()
            x[:, 200:] = 0
        return x * 2


class FillsUpToASquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:]
        if height != width:
            side = max(height, width)
            x = nn.functional.pad(x, (0, side - width, 0, side - height))
        return x * 2


class Positions(nn.Module):
    """A table of 10 positions, looked up by number: no guard says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.table(torch.arange(x.shape[1]))
        return found


class Remembering(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # memory
        return x * self.calls


class Growing(nn.Module):
    """Asked the same twice, it answers the same: the mean of two equal rows is the row."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.mean((0, 1)))  # growth
        return x + torch.stack(self.seen).mean(0)


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def recipe(model: Any, **blanks: Any) -> Recipe:
    return recipes.untrained(model, **{"examples": lambda: torch.randn(3, 5, 4)} | blanks)


def lengths() -> dict[str, Any]:
    return {"x": {1: "length"}}


def captured(model: Any, out: Path, **blanks: Any) -> Bundle:
    torch.manual_seed(0)
    given = {"dynamic_shapes": lengths} | blanks
    capture(recipe(model, **given), None, out, formats=["torch_export"])
    return open_bundle(out)


@pytest.mark.jobs
def test_a_length_that_a_guard_leaves_out_is_claimed_when_the_values_agree(tmp_path: Path) -> None:
    bundle = captured(Hole, tmp_path / "b")
    assert bundle.signature.guards == ()
    seven = {"x": np.ones((1, 7, 4), np.float32)}
    assert (open_program(bundle).run(seven)["output"] == 2).all()
    assert any(one.shapes["x"][1] == 7 and one.verdict == "agrees" for one in bundle.evidence())


def test_a_length_at_which_the_values_differ_is_refused_in_the_words_of_the_guard(tmp_path: Path) -> None:
    bundle = captured(RealHole, tmp_path / "b")
    assert [guard.text for guard in bundle.signature.guards] == ["length != 7"]
    with pytest.raises(RequestError, match="length = 7 are outside the proven range, in which length is not 7"):
        open_program(bundle).run({"x": np.ones((1, 7, 4), np.float32)})


@pytest.mark.parametrize(("kind", "squares"), [(SquaresEnd, False), (FillsUpToASquare, True)])
def test_two_sizes_of_which_code_asks_are_claimed_when_the_values_agree_at_large_ones_too(
    kind: type[nn.Module], squares: bool, tmp_path: Path
) -> None:
    free = {"examples": lambda: torch.randn(2, 30, 41), "dynamic_shapes": lambda: {"x": {1: "height", 2: "width"}}}
    signature = open_bundle(capture(recipes.untrained(kind, **free), None, tmp_path / "b").path).signature
    assert signature.allows({"batch": 2, "height": 300, "width": 301})
    assert signature.allows({"batch": 2, "height": 300, "width": 300}) is squares


@pytest.mark.jobs
def test_the_range_ends_where_the_model_itself_does(tmp_path: Path) -> None:
    bundle = captured(Positions, tmp_path / "b")
    assert bundle.signature.dims["length"] == Dim(min=1, max=10)
    assert [golden.case for golden in bundle.golden()] == ["batch-1", "batch-2", "batch-5", "length-1"]


@pytest.mark.jobs
def test_lengths_are_free_when_the_examples_that_are_yielded_differ_in_them(tmp_path: Path) -> None:
    def examples() -> Iterator[Tensor]:
        yield torch.randn(3, 5, 4)
        yield torch.randn(2, 8, 4)

    bundle = captured(Hole, tmp_path / "b", examples=examples, dynamic_shapes=None)
    assert bundle.signature.inputs[0].shape == ("batch", "length", 4)
    probed = {one.shapes["x"][1] for one in bundle.evidence()}
    assert {1, 2, 6, 10} <= probed
    usual = [one for one in bundle.evidence() if max(one.shapes["x"]) < 64 and "x: " not in one.probe]
    usual = [one for one in usual if "sweep" not in one.probe]
    assert len(usual) <= 30


class Sentences(torch.utils.data.Dataset[Any]):
    """Each record has a length of its own."""

    def __init__(self, *lengths: int, width: int = 4) -> None:
        self.lengths, self.width = lengths, width

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.lengths[index], self.width), float(index)), torch.tensor(0)


def test_lengths_are_free_when_only_the_records_of_the_data_differ_in_them() -> None:
    def prepared(*lengths: int) -> subject.Subject:
        return subject.prepare(recipe(Plus, examples=None, dataset=lambda mode: Sentences(*lengths)), None)

    alike_at_first = prepared(5, 5, 5, 5, 5, 8, 3)
    assert alike_at_first.data["examples"] == "first 5 records"
    never_alike = prepared(3, 4, 5, 6, 7, 9, 2)
    assert never_alike.data["examples"] == "record 4, 5 times"
    for found, length in ((alike_at_first, 5), (never_alike, 7)):
        (seen,) = found.eager.calling.presumed.inputs
        assert seen.shape[0] == "batch"
        assert isinstance(seen.shape[1], str)
        assert seen.shape[2] == 4
        assert found.eager.example["x"].shape == (5, length, 4)
    fixed = prepared(5, 5, 5, 5, 5, 5)
    assert fixed.eager.calling.presumed.inputs[0].shape == ("batch", 5, 4)


def test_records_that_make_no_batch_for_another_reason_are_refused_as_they_are() -> None:
    class Texts(Sentences):
        def __getitem__(self, index: int) -> Any:
            return object(), torch.tensor(0)

    with pytest.raises(DataError, match="do not make a batch"):
        subject.prepare(recipe(Plus, examples=None, dataset=lambda mode: Texts(1, 2, 3)), None)


def test_a_model_that_draws_random_numbers_is_called_so_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="not deterministic in evaluation mode") as refused:
        captured(models.Noisy, tmp_path / "b")
    assert models.place_of("noise") in refused.value.message


def test_a_model_with_a_memory_is_called_so_with_the_line_that_stores(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="keeps a state") as refused:
        captured(Remembering, tmp_path / "b")
    assert marks.place_of(__file__, "memory") in refused.value.message


def test_a_memory_that_shows_only_after_other_questions_is_called_so_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match=r"keeps a state in the Python attribute seen") as refused:
        captured(Growing, tmp_path / "b")
    assert marks.place_of(__file__, "growth") in refused.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.jobs
def test_verify_proves_a_bundle_again_and_a_recipe_of_another_model_fails_it(tmp_path: Path) -> None:
    bundle = captured(Hole, tmp_path / "b")
    alone = verify(bundle)
    assert alone.holds
    assert [one.golden for one in alone.programs] == [4]
    against = verify(bundle, against=recipe(Hole, dynamic_shapes=lengths), seed=5)
    assert against.holds
    assert against.programs[0].probes > 15
    assert against.notes == ()
    other = verify(bundle, against=recipe(RealHole, dynamic_shapes=lengths))
    assert not other.holds
    assert "length 7" in other.programs[0].why
    with pytest.raises(UsageError, match="without a recipe there is no model"):
        verify(bundle, checkpoint=tmp_path)


@pytest.mark.jobs
def test_verify_opens_machine_code_only_for_who_trusts_its_maker(tmp_path: Path) -> None:
    made = captured(Hole, tmp_path / "made")
    (own,) = made.manifest.programs
    graph, code = (tmp_path / name / "programs" for name in ("graph", "code"))
    graph.mkdir(parents=True)
    code.mkdir(parents=True)
    shutil.copy(made.program_path(), graph)
    (code / "model.so.pt2").write_bytes(b"what would be run if it were opened")
    native = msgspec.structs.replace(own, format="aotinductor", file="programs/model.so.pt2")
    contents = Contents(
        name="hole",
        signature=made.signature,
        programs=[(own, graph.parent), (native, code.parent)],
        serve=own.format,
        golden=made.golden(),
        evidence=list(made.evidence()),
        lineage=made.lineage(),
        summary=made.manifest.lineage,
    )
    bundle = seal(tmp_path / "b", contents)
    found = verify(bundle)
    assert found.holds
    assert [one.format for one in found.programs] == ["torch_export"]
    assert any("aotinductor program was not checked: it is machine code" in note for note in found.notes)
    with pytest.raises(UsageError, match="proving it runs it") as refused:
        verify(bundle, format="aotinductor")
    assert "--native" in refused.value.hint
    opened = verify(bundle, format="aotinductor", native=True)
    assert not opened.holds
    assert "is no AOTInductor package" in opened.programs[0].why


@pytest.mark.jobs
def test_seed_0_asks_the_values_of_the_capture_again(tmp_path: Path) -> None:
    blanks: dict[str, Any] = {"examples": lambda: torch.arange(60.0).reshape(3, 5, 4), "dynamic_shapes": lengths}
    bundle = captured(Hole, tmp_path / "b", **blanks)
    first = {one.inputs_sha256 for one in bundle.evidence()}
    again, fresh = (verify(bundle, against=recipe(Hole, **blanks), seed=seed) for seed in (0, 1))
    asked = [{one.inputs_sha256 for one in found.programs[0].evidence} for found in (again, fresh)]
    assert len(first & asked[0]) > len(first & asked[1]) > 5
