"""Whole numbers that code makes of a logarithm of a size, and its rounded fractions, are Python's own at every size."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches.stand_ins import numpy_arrays, size_functions, size_numbers
from trueline.errors import CaptureError
from trueline.runtime.open import open_program
from worlds.cases import few
from worlds.recipes import untrained
from worlds.scaled import Scaled, exported

SIZES = (1, 2, 3, 4, 6, 7, 8, 9, 16, 20, 21, 54, 55, 148, 149, 1096, 1097)


WHOLE: dict[str, Callable[[int], float]] = {
    "int": lambda n: int(2 * math.log(n)) + 100 * int(math.log(n, 3) / 2 - 1),
    "round": lambda n: round(math.log10(n)) + 10 * round(math.log(n) * 1.5 + 0.2),
    "ceil and floor": lambda n: math.ceil(math.log(n)) + 100 * math.floor(-1.5 * math.log(n) + 2),
    "falling": lambda n: int(10 - math.log(n)),
    "of numpy": lambda n: np.ceil(np.log(n)).astype("int").item() + 100 * int(np.log2(n) / np.log2(10)),
    "of a sum": lambda n: int(math.log(n + 1)),
    "as a float": lambda n: float(math.log(n) * 2) + (math.log(n) + 1) / 3,
    "to digits": lambda n: (
        round(1 / n, 2) + 10 * round(n / 8, 2) + 100 * round(n / 3, 1) + 1000 * round(math.log(n), 3)
    ),
}


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_number_of_a_size_is_rounded_as_by_python_and_leaves_the_size_free(name: str) -> None:
    found = exported(WHOLE[name])
    assert not found.signature.guards
    assert found.signature.dims["length"].max is None
    program = torch_export.LoadedProgram(found)
    for size in SIZES:
        answer = program.run({"x": torch.ones(2, size).numpy()})["output"]
        assert answer[0, 0] == pytest.approx(WHOLE[name](size), rel=1e-6), size


@pytest.mark.slow
def test_what_rises_and_falls_is_no_sum_of_steps() -> None:
    with pytest.raises(CaptureError):
        exported(lambda n: int((math.log(n) - 3) * (math.log(n) - 3)))


def test_steps_are_found_where_the_function_takes_them() -> None:
    first, sign, sizes = size_numbers.find_steps(lambda size: int(math.log(size) * 3)) or (0, 0, ())
    for size in (*range(1, 3000), 10**6, 2**31 - 1):
        assert first + sign * sum(size >= step for step in sizes) == int(math.log(size) * 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda size: int((math.log(size) - 10) ** 2),
        lambda size: int(1000 * math.log(size)),
        lambda size: int(math.log(size - 1)),
        lambda size: int(math.exp(size)),
    ],
    ids=["falls and rises", "too many steps", "no value at 1", "too large"],
)
def test_a_function_without_a_few_steps_has_none(function: Callable[[int], int]) -> None:
    assert size_numbers.find_steps(function) is None


def test_a_decimal_is_the_one_that_python_rounds_to() -> None:
    ties = [2.675, 1.005, 0.285, 0.125, 0.375, -2.675, -0.125, 1e6 + 0.005, 0.0, 12.0]
    numbers = [*ties, *(1 / n for n in range(1, 400)), *(n / 8 for n in range(99)), *(n / 1000 for n in range(2000))]
    for digits in (1, 2, 3):
        found = size_numbers.round_to_digits(torch.tensor(numbers, dtype=torch.float64), digits)
        assert found.tolist() == [round(one, digits) for one in numbers]


def test_sizes_and_tensors_have_no_method_more_after_the_block() -> None:
    kinds = (torch.SymInt, torch.SymFloat, torch.Tensor)
    before = [dict(vars(kind)) for kind in kinds]
    with size_functions.add_methods(), size_functions.add_operators():
        assert hasattr(torch.SymFloat, "astype")
    assert [dict(vars(kind)) for kind in kinds] == before


POSITIONS: dict[str, Callable[[int, int], object]] = {
    "tiled": lambda b, n: torch.LongTensor(np.tile(np.array(range(n)), [b, 1])),
    "of a list": lambda b, n: torch.LongTensor(list(range(n))),
    "of an array": lambda b, n: torch.LongTensor(np.arange(n) // 2),
}


class Places(nn.Module):
    def __init__(self, places: Callable[[int, int], object]) -> None:
        super().__init__()
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places(*x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_that_numpy_or_an_old_constructor_makes_of_a_size_leave_it_free(name: str) -> None:
    module = Places(POSITIONS[name]).eval()
    eager = EagerSession(module, torch.ones(3, 9), dynamic_shapes={"x": {1: "length"}})
    program = torch_export.LoadedProgram(torch_export.export(eager.module, eager.calling))
    for batch, length in ((1, 1), (2, 9), (5, 14)):
        x = torch.randn(batch, length)
        assert np.array_equal(program.run({"x": x.numpy()})["output"], module(x).numpy())


def test_an_old_constructor_is_a_class_of_tensors_still() -> None:
    with numpy_arrays.keep_tensors():
        assert isinstance(torch.zeros(2, dtype=torch.int64), torch.LongTensor)
        assert torch.LongTensor([1, 2]).tolist() == [1, 2]
    assert type(torch.LongTensor) is not numpy_arrays._Constructor


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["decimals of a product", *WHOLE], 1, pytest.mark.jobs))
def test_the_onnx_program_rounds_as_python_does_at_every_size(name: str, tmp_path: Path) -> None:
    """Each tenth size is a tie of `round(0.137 * n, 2)`, which the last bit of a double decides."""
    function = {**WHOLE, "decimals of a product": lambda n: round(0.137 * n, 2)}[name]
    examples = [torch.ones(3, 9), torch.ones(2, 5)]
    recipe = untrained(lambda: Scaled(function).eval(), examples=lambda: iter(examples))
    capture(recipe, None, tmp_path / "b")
    program = open_program(open_bundle(tmp_path / "b"), "onnx")
    for size in range(1, 400):
        answer = program.run({"x": np.ones((1, size), np.float32)})["output"]
        assert answer[0, 0] == pytest.approx(function(size), rel=1e-6), size
