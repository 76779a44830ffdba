"""Functions of whole numbers, of a size that is free, answer what Python's own do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from trueline.capture.export import torch_export
from trueline.capture.patches.stand_ins import size_functions
from trueline.errors import CaptureError
from worlds.scaled import exported

SIZES = (1, 2, 3, 4, 5, 9, 11, 12, 14, 16, 31, 99, 100, 255, 256)


FUNCTIONS: dict[str, Callable[[int], float]] = {
    "gcd": lambda n: math.gcd(n, 12) + math.gcd(6, n, 4),
    "lcm": lambda n: math.lcm(n, 6),
    "isqrt": lambda n: math.isqrt(n),
    "comb": lambda n: math.comb(n, 3) + math.comb(n, 0),
    "perm": lambda n: math.perm(n, 2),
    "round": lambda n: round(n) + round(n, 1) + 3 * round(n, -1) + 7 * round(n, -2),
    "trunc": lambda n: math.trunc(n / 3) + math.dist((n, 2), (n, 5)) + math.fsum([n, 0.5, 2]),
    "remainder": lambda n: math.remainder(n, 4),
    "levels": lambda n: math.ceil(math.log2(n)) + 3 * math.floor(math.log2(n)) + 7 * math.trunc(math.log2(n)),
    "shifts": lambda n: (1 << n.bit_length()) + (1000 >> (n % 7)),
    "bits": lambda n: n.bit_length() + n.bit_count(),
    "bin": lambda n: bin(n).count("1") - bin(n).count("0"),
    "operators on bits": lambda n: (n & 3) + (12 | n) + (n ^ 5) + (n << 2) + (n >> 1) + (~n),
    "quotients": lambda n: sum(divmod(n, 5)) + sum(divmod(100, n)) + pow(n, 2, 7) + pow(n, 2),
    "quotients of fractions": lambda n: n // 0.9 + 3 * (n // 1.1) + 7 * (n // -0.7) + n // 2.5,
    "of a number": lambda n: (
        n * (math.gcd(8, 12) + math.lcm(2, 3) + math.comb(4, 2) + len(bin(5)) + math.floor(math.e))
    ),
}

ENDS = {"comb": 2_642_246}
"""The largest length at which n (n - 1) / 2 (n - 2) is below 2**63, which programs count up to."""


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_size_stays_free_and_is_pythons_own(name: str) -> None:
    found = exported(FUNCTIONS[name])
    assert not found.signature.guards
    assert found.signature.dims["length"].max == ENDS.get(name)
    program = torch_export.LoadedProgram(found)
    for size in SIZES:
        answer = program.run({"x": torch.ones(2, size).numpy()})["output"]
        assert answer[0, 0] == FUNCTIONS[name](size), size


TRANSCENDENTAL: dict[str, Callable[[int], float]] = {
    "logarithms": lambda n: math.log(n) / math.log(512) + math.log2(n) + math.log10(n) + math.log(n, 3) + math.log1p(n),
    "exponentials": lambda n: math.exp(-n) + math.expm1(-n) + math.tanh(n),
    "roots": lambda n: math.cbrt(n) + math.exp2(-n) + math.pow(n, 0.3) + math.copysign(2, n - 10),
    "hyperbolic": lambda n: math.asinh(n) + math.acosh(n) + math.degrees(n) / 99 + math.radians(n),
    "as a float": lambda n: float(math.log2(n)) + float(math.sqrt(n)),
    "angles": lambda n: math.sin(n / 7) + math.cos(n) + math.atan2(n, 3) + math.hypot(n, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSCENDENTAL)
def test_a_logarithm_of_a_size_and_its_like_stay_free(name: str) -> None:
    function = TRANSCENDENTAL[name]
    found = exported(function)
    assert not found.signature.guards
    program = torch_export.LoadedProgram(found)
    for size in SIZES:
        answer = program.run({"x": torch.ones(2, size).numpy()})["output"]
        assert answer.dtype == "float32"
        assert answer[0, 0] == pytest.approx(function(size), rel=1e-6), size


@pytest.mark.slow
def test_what_cannot_stay_free_is_refused_with_its_line() -> None:
    for function in (lambda n: math.gcd(n, n - 1), lambda n: int(bin(n)[2:]), lambda n: n.to_bytes(2, "big")[0]):
        with pytest.raises(CaptureError) as refused:
            exported(function)
        assert "test_size_functions.py" in refused.value.hint


def test_a_size_has_no_method_more_after_the_block() -> None:
    before = dict(vars(torch.SymInt))
    with size_functions.add_methods(), size_functions.add_operators():
        assert hasattr(torch.SymInt, "bit_length")
        assert vars(torch.SymInt) != before
    assert vars(torch.SymInt) == before
