"""Outputs are read by name: an answer of another form than the example's has none of the example's names."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.errors import CaptureError
from trueline.runtime.open import open_program
from worlds import marks
from worlds.cases import few
from worlds.recipes import untrained


class Verdict(nn.Module):
    """The key is the answer, and the tensors are the same."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if x.shape[0] > 6:  # verdict
            return {"large": x * 2}
        return {"small": x * 2}


class Either(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return (None, x * 2) if x.shape[0] > 6 else (x * 2, None)  # either


class Reordered(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a, b = x * 2, x + 1
        return {"b": b, "a": a} if x.shape[0] == 1 else {"a": a, "b": b}


class Scores(OrderedDict[str, Tensor]):
    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Own(nn.Module):
    """Returns a class of its own, as transformers' models do."""

    def forward(self, x: Tensor) -> Scores:
        return Scores(best=x.argmax(1), scores=x * 2)


@pytest.mark.parametrize(
    ("model", "words", "mark"),
    [
        (Verdict, "the model returned large, and on its example small", "verdict"),
        (Either, "the model returned output_1, and on its example output_0", "either"),
    ],
)
def test_a_model_that_answers_under_other_names_on_a_probe_is_refused_with_both(
    tmp_path: Path, model: type[nn.Module], words: str, mark: str
) -> None:
    with pytest.raises(CaptureError, match=words) as refused:
        capture(untrained(model, examples=lambda: torch.randn(3, 4)), None, tmp_path / "b", formats=["torch_export"])
    assert marks.place_of(__file__, mark) in refused.value.message


@pytest.mark.parametrize("model", few([Reordered, Own], 1, pytest.mark.jobs))
def test_outputs_are_found_by_their_keys_in_any_order_and_in_a_class_that_extends_dict(
    tmp_path: Path, model: type[nn.Module]
) -> None:
    capture(untrained(model, examples=lambda: torch.randn(3, 4)), None, tmp_path / "b", formats=["torch_export"])
    session = open_program(open_bundle(tmp_path / "b"), "torch_export")
    for batch in (1, 5):
        x = torch.randn(batch, 4)
        expected: Any = model()(x)
        answer = session.run({"x": x.numpy()})
        assert answer.keys() == expected.keys()
        assert all((answer[name] == value.numpy()).all() for name, value in expected.items())


class Conjugated(nn.Module):
    """Its output is a view of other numbers, whose signs are changed when it is read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x + 1).conj().imag


@pytest.mark.jobs
def test_an_output_whose_signs_are_changed_when_it_is_read_has_the_numbers_of_the_model(tmp_path: Path) -> None:
    capture(untrained(Conjugated, examples=lambda: torch.randn(3, 4)), None, tmp_path / "b", formats=["torch_export"])
    x = torch.randn(5, 4)
    answer = open_program(open_bundle(tmp_path / "b"), "torch_export").run({"x": x.numpy()})["output"]
    assert (answer == -(x + 1).numpy()).all()
