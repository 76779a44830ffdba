"""Every program answers NaN, infinities and indices as the model does, or refuses them as its claim says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.errors import RequestError, TruelineError
from trueline.recipe.eager_mode import as_trained
from trueline.runtime.open import open_program
from worlds import value_models
from worlds.cases import few
from worlds.recipes import untrained

pytestmark = pytest.mark.slow

NUMBERS = (-1, -2, -5, -19, -20, -21, 5, 8, 14, 15, 19, 20, 21, 1000, 2**24 + 1, 2**31 - 1, 2**31, 2**53 + 1, -(2**31))


def variants(example: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The example with other values of one input."""
    random = np.random.default_rng(7)
    for name, array in example.items():
        if array.dtype.kind == "f":
            for value in (np.nan, np.inf, -np.inf):
                for where in ((0,) * array.ndim, (-1,) * array.ndim, (1,), (..., 1), (...,)):
                    changed = array.copy()
                    changed[where] = value
                    yield f"{name} {value} at {where}", {**example, name: changed}
                for draw in range(3):
                    changed = np.where(random.random(array.shape) < 0.2, array.dtype.type(value), array)
                    yield f"{name} {value}, {draw}", {**example, name: changed}
            for scale in (-1, 0, 1e3, 1e7, 1e30):
                yield f"{name} times {scale}", {**example, name: array * array.dtype.type(scale)}
        for value in NUMBERS if array.dtype.kind == "i" else ():
            if np.iinfo(array.dtype).min <= value <= np.iinfo(array.dtype).max:
                changed = array.copy()
                changed.reshape(-1)[0] = value
                yield f"{name} {value} first", {**example, name: changed}
                yield f"{name} all {value}", {**example, name: np.full_like(array, value)}


def eager_answer(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    """None where the model raises."""
    try:
        with torch.no_grad(), as_trained():
            return model(*[torch.from_numpy(one.copy()) for one in inputs.values()]).numpy()
    except Exception:  # noqa: BLE001 - whatever the model raises
        return None


def difference(want: Any, got: Any) -> str:
    if want.shape != got.shape:
        return "shape"
    if want.dtype.kind != "f":
        return "" if (want == got).all() else "values"
    if (np.isnan(want) != np.isnan(got)).any() or (np.isinf(want) != np.isinf(got)).any():
        return "places of NaN or infinities"
    finite = np.isfinite(want)
    scale = np.abs(want[finite]).max(initial=0.0)
    with np.errstate(over="ignore"):
        return "" if (np.abs(want[finite] - got[finite]) <= 1e-3 * scale + 1e-30).all() else "numbers"


@pytest.mark.jobs
@pytest.mark.parametrize("attack", few(value_models.ATTACKS, 5))
def test_what_the_claim_lets_through_is_answered_as_the_model_answers(attack: str, tmp_path: Path) -> None:
    make, example = value_models.ATTACKS[attack]
    bundle = open_bundle(capture(untrained(make, name="attack", examples=lambda: example), None, tmp_path / "b").path)
    arrays = [one.numpy() for one in (example if isinstance(example, tuple) else (example,))]
    named = {spec.name: array for spec, array in zip(bundle.signature.inputs, arrays, strict=True)}
    formats = [program.format for program in bundle.manifest.programs]
    assert "onnx" in formats or attack == "a check on values"
    model, wrong = make().eval(), []
    for format in formats:
        session = open_program(bundle, format)
        session.run(named)  # the user's example is never refused
        for what, inputs in variants(named):
            want = eager_answer(model, inputs)
            try:
                (got,) = session.run(inputs).values()
            except RequestError:
                continue
            except TruelineError as error:
                got = None if want is None else f"{error.message}"
            if want is None and got is not None:
                wrong.append(f"{format}: {what}: the model raises")
            elif want is not None and (got is None or isinstance(got, str) or difference(want, got)):
                wrong.append(f"{format}: {what}: {got if isinstance(got, str) else difference(want, got)}")
    assert wrong == []


WEIGHTS = torch.rand(64, 8, generator=torch.Generator().manual_seed(0)) / 8
TAILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a product of sigmoids": lambda x: torch.log1p(1e-5 * (torch.sigmoid(x) @ WEIGHTS)),
    "a layer without bias after SiLU": lambda x: F.linear(F.silu(x), WEIGHTS.t()),
    "a norm over sigmoids": lambda x: F.layer_norm(torch.sigmoid(x), (64,)),
    "a convolution of gates": lambda x: F.conv1d(F.glu(x, -1)[:, None], WEIGHTS[:3, :1].t()[None]),
}


class Tails(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return TAILS[self.name](x)


@pytest.mark.jobs
@pytest.mark.parametrize("name", few(TAILS, 1))
def test_sums_over_the_tails_of_sigmoids_are_as_exact_as_the_model(name: str, tmp_path: Path) -> None:
    """Random values of both signs never bring 64 features into their tails at once, so the proof saw none of them."""
    examples = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    capture(untrained(lambda: Tails(name), examples=lambda: examples), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    assert "onnx" in [program.format for program in bundle.manifest.programs]
    for middle in (-5.0, -11.68, -16.5, -19.0, -40.0):
        x = middle + examples / 100
        (found,) = open_program(bundle, "onnx").run({"x": x.numpy()}).values()
        exact = TAILS[name](x).numpy()
        assert np.abs(found - exact).max() < 1e-4 * np.abs(exact).max(), middle


class Rectified(torch.nn.RNN):
    """ONNX Runtime's RNN makes 0 of a NaN that a sum of infinities is."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(2, 2, num_layers=2, bias=False, nonlinearity="relu")


@pytest.mark.long
def test_finite_numbers_that_a_model_answers_with_nan_are_outside_of_the_claim_of_a_program_that_loses_it(
    tmp_path: Path,
) -> None:
    examples = [torch.randn(size, 2) for size in (3, 6)]
    capture(untrained(Rectified, examples=lambda: iter(examples)), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    lowest = {"input": np.full((3, 2), -3.4e38, np.float32)}
    with pytest.raises(RequestError, match="input"):
        open_program(bundle, "onnx").run(lowest)
    assert np.isnan(open_program(bundle, "torch_export").run(lowest)["output_0"]).any()
