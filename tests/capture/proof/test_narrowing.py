"""A program keeps the widest claim on values that leaves out what it answers otherwise, and no example of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trueline.bundle.values import Values
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import narrowing
from trueline.capture.proof.observe import observe
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.value_probes import make_value_probes
from worlds.cases import few

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
N = torch.tensor([[1, 3], [0, 7], [2, 5], [4, 4], [6, 1]])


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Both(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Program:
    """A Session that answers as `model` but where `change` makes another answer of it, or an error."""

    format = "fake"

    def __init__(self, eager: EagerSession, signature: Any, change: Callable[[Any, Any], Any]) -> None:
        self.signature, self._eager, self._change = signature, eager, change

    def run(self, inputs: Any) -> Any:
        self.signature.check(inputs)
        return {name: self._change(inputs, value) for name, value in self._eager.run(inputs).items()}


def claimed(example: Any, change: Any, module: nn.Module | None = None, others: Any = ()) -> tuple[bool, Any]:
    """Whether the program is proven in the end, and the conditions of its claim."""
    eager = EagerSession(module or Same(), example, others=others)
    claim = eager.signature
    seen = observe(eager, [*make_probes(eager.example), *make_value_probes(eager.example, claim)])
    _, proof, _ = narrowing.judge_and_narrow(
        lambda one: Program(eager, one, change), claim, eager, seen, examples=eager.examples
    )
    return proof.proven, proof.signature.values


def lose_nan(at: Any) -> Any:
    """NaN at one place of a record is lost, as in a reduction that compares from there."""

    def change(inputs: Any, value: Any) -> Any:
        changed = value.copy()
        changed[..., at] = np.nan_to_num(changed[..., at], nan=0.0, posinf=np.inf, neginf=-np.inf)
        return changed

    return change


@pytest.mark.parametrize("at", [0, 3, -1])
def test_a_nan_that_is_lost_at_any_place_narrows_the_claim_to_finite_numbers(at: int) -> None:
    assert claimed(X, lose_nan(at)) == (True, {"x": Values(finite=True)})


def test_a_program_that_keeps_every_nan_claims_all_values() -> None:
    assert claimed(X, lambda inputs, value: value) == (True, {})


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x: np.isposinf(x).any(), id="an infinity"),
        pytest.param(lambda x: np.isneginf(x[..., -1]).any(), id="a negative one in the last place"),
        pytest.param(lambda x: np.isnan(x).all(axis=-1).any(), id="a record of NaN"),
        pytest.param(lambda x: np.isnan(x).any() and len(x) > 5, id="a NaN among many records"),
    ],
)
def test_each_kind_of_what_is_no_number_is_asked(wrong: Any) -> None:
    assert claimed(X, lambda inputs, value: value * 0 if wrong(inputs["x"]) else value) == (
        True,
        {"x": Values(finite=True)},
    )


def test_a_record_that_is_changed_by_the_nan_of_another_shows() -> None:
    def change(inputs: Any, value: Any) -> Any:
        torn = np.isnan(inputs["x"]).any(axis=-1)
        return value + np.float32(torn.any()) * ~torn[:, None]

    assert claimed(X, change) == (True, {"x": Values(finite=True)})


def test_only_the_input_that_is_to_blame_is_narrowed() -> None:
    def change(inputs: Any, value: Any) -> Any:
        return np.nan_to_num(value) if np.isnan(inputs["y"]).any() else value

    assert claimed((X, X * 2), change, Both()) == (True, {"y": Values(finite=True)})


def test_a_nan_in_an_example_of_the_user_is_never_left_out() -> None:
    missing = X.clone()
    missing[1, 2] = float("nan")
    assert claimed(X, lose_nan(2), others=[missing])[0] is False
    assert claimed(X, lose_nan(2))[0] is True


def test_huge_numbers_end_the_claim_at_the_largest_magnitude_that_agrees() -> None:
    def change(inputs: Any, value: Any) -> Any:
        return value * 2 if np.abs(np.nan_to_num(inputs["x"])).max() > 1e20 else value

    proven, values = claimed(X, change)
    assert (proven, values) == (True, {"x": Values(low=-1e19, high=1e19)})


@pytest.mark.parametrize("overflows", [lambda x: x.max(), lambda x: np.abs(x.sum())])
def test_a_program_that_overflows_near_the_end_of_the_dtype_claims_no_number_there(overflows: Any) -> None:
    def change(inputs: Any, value: Any) -> Any:
        return value * np.nan if overflows(np.nan_to_num(inputs["x"], posinf=0)) > 2e38 else value

    assert claimed(X, change) == (True, {"x": Values(low=-1e30, high=1e30)})


def test_the_smallest_number_of_a_dtype_alone_is_left_out_where_the_model_cannot_divide_it() -> None:
    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.div(x, x.new_tensor([3, -1]), rounding_mode="trunc")

    assert claimed(N, lambda inputs, value: value, Parts()) == (True, {"x": Values(low=-(2**53) - 1)})


def test_whole_numbers_that_a_cast_loses_end_the_claim_before_them() -> None:
    def change(inputs: Any, value: Any) -> Any:
        return inputs["x"].astype(np.int32).astype(np.int64) + 1

    assert claimed(N, change) == (True, {"x": Values(low=-(2**31), high=2**31 - 1)})


def test_where_the_model_refuses_and_the_program_answers_only_what_examples_show_is_claimed() -> None:
    class Kinds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x < -5).any():
                raise ValueError("no such kind")
            return x + 1

    eager = EagerSession(Kinds(), N)
    seen = observe(eager, [*make_probes(eager.example), *make_value_probes(eager.example, eager.signature)])

    class Answers(Program):
        def run(self, inputs: Any) -> Any:
            self.signature.check(inputs)
            return {"output": inputs["x"] + 1}

    _, proof, _ = narrowing.judge_and_narrow(
        lambda one: Answers(eager, one, lambda inputs, value: value),
        eager.signature,
        eager,
        seen,
        examples=eager.examples,
    )
    assert (proof.proven, proof.signature.values) == (True, {"x": Values(low=0)})


def test_a_disagreement_that_no_condition_leaves_out_refuses_the_program() -> None:
    proven, values = claimed(X, lambda inputs, value: value * 0 if inputs["x"].sum() == 0 else value)
    assert (proven, values) == (False, {})


@pytest.mark.jobs
def test_a_branch_on_a_norm_is_not_taken_for_a_range_of_values() -> None:
    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.pow(2).mean().sqrt().clamp(min=1.0)

    def frozen(inputs: Any, answer: Any) -> Any:
        return inputs["x"]  # the way of small numbers, for all: a single larger one is left out by a range

    small = X / X.abs().max() * 1.3
    assert not claimed(small, frozen, Norm())[0]


@pytest.mark.parametrize("most", few([1e3, 1e5, 1e7, 1e9], 1, pytest.mark.jobs))
def test_a_program_that_overflows_by_a_sum_claims_only_a_range_of_which_all_values_are_answered(most: float) -> None:
    def lose_large(inputs: Any, answer: Any) -> Any:
        return answer * 0 if np.abs(inputs["x"]).sum() > most else answer

    proven, values = claimed(X, lose_large)
    assert proven
    assert float(X.abs().max()) <= values["x"].high <= most / X.numel()
