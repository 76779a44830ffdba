"""Functions of whole numbers, of a size that is free, answer what Python's own do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.export.exported import Exported
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches import size_functions
from trueline.errors import CaptureError

SIZES = (1, 2, 3, 4, 5, 12, 16, 31, 100, 255, 256)


class Scaled(nn.Module):
    def __init__(self, function: Callable[[int], float]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * self.function(x.shape[1])


def exported(function: Callable[[int], float]) -> Exported:
    eager = EagerSession(Scaled(function).eval(), torch.ones(3, 9), dynamic_shapes={"x": {1: "length"}})
    return torch_export.export(eager.module, eager.calling)


FUNCTIONS: dict[str, Callable[[int], float]] = {
    "gcd": lambda n: math.gcd(n, 12) + math.gcd(6, n, 4),
    "lcm": lambda n: math.lcm(n, 6),
    "isqrt": lambda n: math.isqrt(n),
    "comb": lambda n: math.comb(n, 3) + math.comb(n, 0),
    "bits": lambda n: n.bit_length() + n.bit_count(),
    "bin": lambda n: bin(n).count("1") - bin(n).count("0"),
    "of a number": lambda n: (
        n * (math.gcd(8, 12) + math.lcm(2, 3) + math.comb(4, 2) + len(bin(5)) + math.floor(math.e))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_size_stays_free_and_is_pythons_own(name: str) -> None:
    found = exported(FUNCTIONS[name])
    assert not found.signature.guards
    assert found.signature.dims["length"].max is None
    program = torch_export.LoadedProgram(found)
    for size in SIZES:
        answer = program.run({"x": torch.ones(2, size).numpy()})["output"]
        assert answer[0, 0] == FUNCTIONS[name](size), size


@pytest.mark.slow
def test_what_cannot_stay_free_is_refused_with_its_line() -> None:
    for function in (lambda n: math.gcd(n, n - 1), lambda n: int(bin(n)[2:]), lambda n: n.to_bytes(2, "big")[0]):
        with pytest.raises(CaptureError) as refused:
            exported(function)
        assert "test_size_functions.py" in refused.value.hint


def test_a_size_has_no_method_more_after_the_block() -> None:
    with size_functions.add_methods():
        assert hasattr(torch.SymInt, "bit_length")
    assert not hasattr(torch.SymInt, "bit_length")
