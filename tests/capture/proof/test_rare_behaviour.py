"""What a model does on its first call, seldom, or after many calls is found, though it answers twice the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import Bundle, open_bundle
from trueline.capture.api import capture
from trueline.capture.model import code_paths
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.python_state import Recall
from trueline.capture.proof.determinism import check_rare
from trueline.capture.proof.observe import observe
from trueline.capture.proof.probes import make_probes
from trueline.errors import CaptureError, NotProven
from trueline.runtime.open import open_program
from worlds import marks, recipes
from worlds.cases import few

pytestmark = pytest.mark.slow


class DropsALayer(nn.Module):
    """Forgot `if self.training`."""

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.05:  # seldom
            return x
        return x * 2


class NoisyNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.randn())  # numpy


class WarmsUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # warming
        return x * 2 if self.calls < 500 else x


class TakesItsScale(nn.Module):
    """From the first batch that it is asked."""

    ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.scale.data.copy_(x.std(0))  # first batch
            self.ready.fill_(1)
        return x / self.scale


class WorksInABuffer(nn.Module):
    """Each call writes what it reads."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.rows[: x.shape[1]] = x.mean(0)  # working room
        return x * self.rows[: x.shape[1]].flip(0)


class Keeps(nn.Module):
    """Counts, and keeps what it saw; its answers do not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        return x * 2


class KeepsAMean(nn.Module):
    """Of the first batch of each size."""

    def __init__(self) -> None:
        super().__init__()
        self.means: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        rows = int(x.shape[0])
        if rows not in self.means:  # mean of a size
            self.means[rows] = x.mean()
        return x - self.means[rows]


class TakesAPlainScale(nn.Module):
    """From the first batch, whatever its size."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = float(x.abs().max())  # plain scale
        return x / self.scale


class Notes:
    def __init__(self) -> None:
        self.first: Tensor | None = None


MODE = 1


class Toggles(nn.Module):
    """For good, at the first large input."""

    def forward(self, x: Tensor) -> Tensor:
        global MODE
        if float(x.abs().max()) > 1e4:
            MODE = 2
        return x * MODE  # toggled


class TakesNotes(nn.Module):
    """In an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()

    def forward(self, x: Tensor) -> Tensor:
        if self.notes.first is None:
            self.notes.first = x.mean(0)  # notes
        return x + self.notes.first


class TableOfASize(nn.Module):
    """Made when a size first comes, of nothing but the size."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        width = int(x.shape[1])
        if width not in self.tables:
            self.tables[width] = torch.arange(width, dtype=x.dtype)
        return x + self.tables[width]


def captured(model: Any, out: Path, **options: Any) -> Bundle:
    recipe = recipes.untrained(model, examples=lambda: torch.randn(3, 4))
    torch.manual_seed(0)
    capture(recipe, None, out, formats=["torch_export"], **options)
    return open_bundle(out)


@pytest.mark.parametrize(
    ("model", "words", "mark"),
    few(
        [
            (
                DropsALayer,
                r"draws random numbers outside of torch \(random\), and it answers differently when",
                "seldom",
            ),
            (NoisyNumpy, "draws random numbers outside of torch, and it answers equal inputs differently", "numpy"),
            (
                WarmsUp,
                "keeps a state in the Python attribute calls: it answers differently when that is 999",
                "warming",
            ),
            (TakesItsScale, r"changes itself when it is first called \(scale, ready\)", "first batch"),
            (WorksInABuffer, r"works in its own buffers when it is called \(rows\)", "working room"),
            (KeepsAMean, r"\(means\): it answers differently after another input", "mean of a size"),
            (TakesAPlainScale, r"\(scale\): it answers differently after another input", "plain scale"),
            (Toggles, r"MODE\): it answers differently after another input", "toggled"),
            (TakesNotes, r"\(notes.first\): it answers differently after another input", "notes"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_what_a_model_does_once_or_seldom_is_called_so_with_its_line(
    tmp_path: Path, model: type[nn.Module], words: str, mark: str
) -> None:
    random.seed(0)
    with pytest.raises(NotProven, match=words) as refused:
        captured(model, tmp_path / "b")
    assert marks.place_of(__file__, mark) in refused.value.message
    assert list(tmp_path.iterdir()) == []


def test_parameters_that_a_call_writes_are_no_state_that_could_be_handed_on(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"writes its own parameters when it is called \(scale\)") as refused:
        captured(TakesItsScale, tmp_path / "b", state="explicit")
    assert marks.place_of(__file__, "first batch") in refused.value.message


def test_a_table_that_a_model_makes_for_a_size_is_nobodys_business(tmp_path: Path) -> None:
    x = np.ones((2, 4), np.float32)
    answer = open_program(captured(TableOfASize, tmp_path / "b")).run({"x": x})["output"]
    assert answer.tolist() == [[1, 2, 3, 4]] * 2


def test_what_a_model_held_before_it_was_asked_is_put_back_after_a_look() -> None:
    model = TakesNotes()
    recall = Recall(model)
    x = torch.ones(2, 4)
    kept = model(x), model.notes.first
    assert recall.find_changed() == ("notes.first",)
    with recall.as_before():
        assert model.notes.first is None
        model(2 * x)
    assert model.notes.first is kept[1]
    assert recall.find_changed() == ("notes.first",)


@pytest.mark.jobs
def test_a_model_that_counts_and_answers_the_same_is_captured(tmp_path: Path) -> None:
    x = np.ones((1, 4), np.float32)
    assert (open_program(captured(Keeps, tmp_path / "b")).run({"x": x})["output"] == 2).all()


CALLS = 0
SEEN = {"calls": 0}


class CountsInItsClass(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x if self.calls < 500 else x * 2


class CountsInItsFile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return x if CALLS < 500 else x * 2


class CountsInADict(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SEEN["calls"] += 1
        return x if SEEN["calls"] < 500 else x * 2


def counted(calls: list[int] = [0]) -> int:  # noqa: B006 - that it is one for all calls is what is asked here
    calls[0] += 1
    return calls[0]


class CountsInADefault(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if counted() < 500 else x * 2


@pytest.mark.parametrize("kind", [CountsInItsClass, CountsInItsFile, CountsInADict, CountsInADefault])
def test_a_counter_is_found_wherever_it_is_kept(kind: type[nn.Module]) -> None:
    eager = EagerSession(kind().eval(), torch.ones(3, 4))
    found = check_rare(eager)
    assert found is not None
    assert "answers differently when that is 999" in found.why
    assert found.place is not None
    assert "calls" in found.place.source.lower() or "counted" in found.place.source


class ScaledByItsClass(nn.Module):
    scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if ScaledByItsClass.scale is None:
            ScaledByItsClass.scale = float(x.abs().mean()) + 1
        return x / ScaledByItsClass.scale


def test_what_a_class_keeps_is_put_back_and_is_there_again_afterwards() -> None:
    model = ScaledByItsClass()
    recall = Recall(model)
    model(torch.ones(2, 2))
    assert recall.find_changed() == ("ScaledByItsClass.scale",)
    with recall.as_before():
        assert ScaledByItsClass.scale is None
    assert ScaledByItsClass.scale == 2


class Endless(nn.Module):
    """Ends for what is positive."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.abs().max() if x.min() >= 0 else x.min()
        while y < 1:
            y = y * 2
        return x * y


def test_a_loop_that_never_ends_is_ended_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_paths, "MAX_EVENTS", 1000)
    monkeypatch.setattr(code_paths, "ENDLESS_S", 0.05)
    monkeypatch.setattr(code_paths, "REPEAT_ENDLESS_S", 0.02)
    eager = EagerSession(Endless().eval(), torch.ones(3, 4))
    found = observe(eager, make_probes(eager.example, signature=eager.calling.presumed, seed=0))
    ended = [one for one in found if "does not end" in one.error]
    assert ended
    assert all((one.probe.inputs["x"] <= 0).any() for one in ended)
    assert any(one.outputs is not None for one in found)
