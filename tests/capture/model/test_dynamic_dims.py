"""The batch is counted where the inputs count it: in their first dimension, in another, or in none at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.probes import make_probes
from trueline.errors import CaptureError, RequestError
from trueline.runtime.open import open_program, replay
from worlds.recipes import untrained


class Recurrent(nn.Module):
    """A state of [layers, batch, width] comes in and goes out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(4, 5, 2, batch_first=True)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.rnn(x, h)
        return found


class Edges(nn.Module):
    """Nodes are the records; the edges, pairs of their numbers, are as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        told: Tensor = self.fc(x)[edges[0]]
        return torch.zeros(x.shape[0], 3).index_add(0, edges[1], told)


class Cooled(nn.Module):
    """A number, and a switch, for all records alike."""

    def forward(self, x: Tensor, t: Tensor, sharp: Tensor) -> Tensor:
        return (torch.where(sharp, x * 2, x) / t).softmax(-1)


class Steps(nn.Module):
    """The steps come first, and the batch after them, as torch's own transformer takes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(4, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, h = self.rnn(source)
        found: Tensor = self.rnn(target, h)[0]
        return found


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def shapes(module: nn.Module, *example: Any, free: dict[str, Any] | None = None) -> dict[str, tuple[int | str, ...]]:
    found = EagerSession(module.eval(), example, dynamic_shapes=free)
    return {spec.name: spec.shape for spec in found.calling.presumed.inputs}


def test_a_state_whose_second_dimension_is_the_batch_is_found_by_its_size() -> None:
    found = shapes(Recurrent(), torch.randn(3, 6, 4), torch.randn(2, 3, 5))
    assert found == {"x": ("batch", 6, 4), "h": (2, "batch", 5)}


def test_a_size_that_is_the_batch_by_chance_is_not_taken_for_it_when_the_model_says_otherwise() -> None:
    found = shapes(Pair(), torch.randn(3, 2, 3), torch.randn(2, 3))  # one record more, and y is [2, 4]: it cannot be
    assert found == {"x": ("batch", 2, 3), "y": (2, 3)}


def test_what_counts_no_records_is_the_same_for_all_of_them() -> None:
    assert shapes(Edges(), torch.randn(5, 4), torch.randint(0, 5, (2, 8)), free={"edges": {1: "edges"}}) == {
        "x": ("batch", 4),
        "edges": (2, "edges"),
    }
    assert shapes(Cooled(), torch.randn(5, 4), torch.tensor(0.7), torch.tensor(True))["t"] == ()


def test_a_declared_batch_is_taken_before_the_first_dimension() -> None:
    free = {"source": {0: "steps", 1: "batch"}, "target": {0: "more", 1: "batch"}}
    found = shapes(Steps(), torch.randn(6, 3, 4), torch.randn(5, 3, 4), free=free)
    assert found == {"source": ("steps", "batch", 4), "target": ("more", "batch", 4)}


def test_inputs_that_agree_on_no_number_of_records_are_refused_with_their_shapes() -> None:
    with pytest.raises(CaptureError, match=r"agree on no number of records \(x: \[5, 2\], y: \[4, 2\]\)") as refused:
        shapes(Stacked(), torch.randn(5, 2), torch.randn(4, 2))
    assert "dynamic_shapes() declares it" in refused.value.hint


class Stacked(nn.Module):
    """Takes inputs of 5 and 4 records, and no others."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[:4] + y + torch.zeros(x.shape[0] - 1, 2)


def test_a_batch_that_may_be_in_two_dimensions_is_asked_for() -> None:
    with pytest.raises(CaptureError, match=r"'y' has the size of the batch \(3\) in dimensions \[1, 2\]") as refused:
        shapes(Pair(), torch.randn(3, 3, 3), torch.randn(1, 3, 3))
    assert "{'y': {1: 'batch'}}" in refused.value.hint


def test_numbers_of_records_stay_below_their_number_when_there_are_fewer() -> None:
    edges = torch.tensor([[0, 4, 2], [1, 3, 4]])
    eager = EagerSession(Edges().eval(), (torch.randn(5, 4), edges), dynamic_shapes={"edges": {1: "edges"}})
    probes = make_probes(eager.example, signature=eager.calling.presumed)
    fewer = [probe for probe in probes if probe.num_records < 5 and probe.origin == "given"]
    assert fewer
    assert all(probe.inputs["edges"].max() < probe.num_records for probe in fewer)


def test_an_index_stays_inside_a_sequence_that_is_cut_and_a_length_may_reach_its_end() -> None:
    x = torch.randn(3, 6, 4)

    class Picks(nn.Module):
        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            return x[torch.arange(len(x)), at]

    for at, most in (([0, 5, 3], 0), ([1, 6, 3], 1), ([0, 6, 3], 1)):
        given = {"x": x.numpy(), "at": np.array(at)}
        eager = EagerSession(Picks().eval(), (x, torch.tensor([0, 5, 3])), dynamic_shapes={"x": {1: "length"}})
        probes = make_probes(given, signature=eager.calling.presumed)
        cut = [one for one in probes if one.inputs["x"].shape[1] == 1 and one.origin == "given"]
        shortest = [one.inputs["at"].max() for one in cut]
        assert shortest
        assert max(shortest) == most


def test_a_number_for_all_records_is_asked_in_other_values_too() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, t: Tensor, on: Tensor) -> Tensor:
            return x * t * on

    eager = EagerSession(Scaled().eval(), (torch.randn(3, 4), torch.tensor(2), torch.tensor(True)))
    probes = make_probes(eager.example, signature=eager.calling.presumed)
    assert len({int(probe.inputs["t"]) for probe in probes}) > 1
    assert {bool(probe.inputs["on"]) for probe in probes} == {True, False}
    assert all(isinstance(array, np.ndarray) for probe in probes for array in probe.inputs.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "example", "free", "other"),
    [
        pytest.param(Recurrent, lambda: (torch.randn(3, 6, 4), torch.randn(2, 3, 5)), {"x": {1: "length"}},
         lambda: (torch.randn(7, 2, 4), torch.randn(2, 7, 5)), marks=pytest.mark.long),
        (Edges, lambda: (torch.randn(5, 4), torch.randint(0, 5, (2, 8))), {"edges": {1: "edges"}},
         lambda: (torch.randn(9, 4), torch.randint(0, 9, (2, 3)))),
        pytest.param(Cooled, lambda: (torch.randn(5, 4), torch.tensor(0.7), torch.tensor(True)), {},
         lambda: (torch.randn(1, 4), torch.tensor(3.0), torch.tensor(False)), marks=pytest.mark.jobs),
        pytest.param(Steps, lambda: (torch.randn(6, 3, 4), torch.randn(4, 3, 4)),
         {"source": {0: "steps", 1: "batch"}, "target": {0: "more", 1: "batch"}},
         lambda: (torch.randn(2, 7, 4), torch.randn(9, 7, 4)), marks=pytest.mark.jobs),
    ],
    ids=["a recurrent state", "edges", "a number for all", "steps first"],
)  # fmt: skip
def test_it_is_sealed_in_both_formats_and_answers_at_other_sizes(
    build: Any, example: Any, free: Any, other: Any, tmp_path: Path
) -> None:
    recipe = untrained(build, name="m", examples=example, dynamic_shapes=lambda: free)
    captured = capture(recipe, None, tmp_path / "b")
    assert [one.verdict for one in captured.programs] == ["proven", "proven"]
    bundle, given = open_bundle(captured.path), other()
    with torch.no_grad():
        wanted = build().eval()(*given)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    named = {spec.name: one.numpy() for spec, one in zip(bundle.signature.inputs, given, strict=True)}
    for entry in bundle.manifest.programs:
        session = open_program(bundle, entry.format)
        replay(bundle, session)
        for ours, theirs in zip(session.run(named).values(), wanted, strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.jobs
@pytest.mark.slow
def test_a_request_whose_inputs_count_other_records_is_refused(tmp_path: Path) -> None:
    recipe = untrained(Recurrent, name="m", examples=lambda: (torch.randn(3, 6, 4), torch.randn(2, 3, 5)))
    session = open_program(open_bundle(capture(recipe, None, tmp_path / "b", formats=["torch_export"]).path))
    with pytest.raises(RequestError, match=r"'h' has size 2 in dimension 1 \(batch\), but input 'x' has 3"):
        session.run({"x": np.zeros((3, 6, 4), np.float32), "h": np.zeros((2, 2, 5), np.float32)})
