"""A program is as near to the eager model as rounding takes that model itself, in each column of each output."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.arbiter import Arbiter
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.stored import StoredArrays
from trueline.capture.proof import bounds
from trueline.capture.proof import observe as observe_module
from trueline.capture.proof.observe import observe
from trueline.capture.proof.probes import Probe, make_probes
from trueline.capture.proof.prove import Proof, judge
from trueline.runtime import compare
from worlds.cases import few

Array = npt.NDArray[Any]
Formula = Callable[[Any], Any]


class Model(nn.Module):
    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.formula(x)


class Program:
    """A formula of numpy in place of a program."""

    format = "numpy"

    def __init__(self, eager: EagerSession, formula: Formula) -> None:
        self.signature = eager.signature
        self._formula = formula

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with np.errstate(all="ignore"):
            found = self._formula(inputs["x"])
        return {self.signature.outputs[0].name: np.asarray(found, np.float32)}


class Program2D(Program):
    """The same, of a model whose input has another name."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return super().run({"x": next(iter(inputs.values()))})


def proof(model: nn.Module, x: Tensor, formula: Formula) -> Proof:
    eager = EagerSession(model.eval(), x)
    seen = observe(eager, [probe for probe in make_probes(eager.example) if not probe.wild])
    assert all(one.arbitrate().judged for one in seen if one.arbitrate is not None)
    return judge(Program(eager, formula), seen)


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    found: Array = powers / powers.sum(-1, keepdims=True)
    return found


TAILS = np.array([0, -20, -40, -10], np.float32)
STAMP = np.float32(1.7e9)


def beside(probabilities: Formula, large: Formula) -> Formula:
    return lambda x: np.concatenate([large(x), probabilities(x)], -1)


ATTACKS: dict[str, tuple[Formula, Formula, Formula]] = {
    "probabilities beside timestamps": (
        lambda x: torch.cat([x[:, :1] * 0 + 1.7e9, torch.softmax(x, -1)], -1),
        beside(softmax, lambda x: x[:, :1] * 0 + STAMP),
        beside(lambda x: softmax(x) * np.float32(1.0001), lambda x: x[:, :1] * 0 + STAMP),
    ),
    "probabilities beside areas": (
        lambda x: torch.cat([(x[:, :1] * 400) * (x[:, 1:2] * 500), torch.sigmoid(x[:, 2:])], -1),
        beside(lambda x: 1 / (1 + np.exp(-x[:, 2:])), lambda x: (x[:, :1] * 400) * (x[:, 1:2] * 500)),
        beside(lambda x: 1.0001 / (1 + np.exp(-x[:, 2:])), lambda x: (x[:, :1] * 400) * (x[:, 1:2] * 500)),
    ),
    "expm1": (lambda x: torch.expm1(1e-3 * x), lambda x: np.expm1(np.float32(1e-3) * x),
              lambda x: np.exp(np.float32(1e-3) * x) - np.float32(1)),
    "log1p": (lambda x: torch.log1p(1e-3 * x.abs()), lambda x: np.log1p(np.float32(1e-3) * np.abs(x)),
              lambda x: np.log(np.float32(1) + np.float32(1e-3) * np.abs(x))),
    "a sine that is taken for its angle": (
        lambda x: torch.sin(0.05 * x), lambda x: np.sin(np.float32(0.05) * x), lambda x: np.float32(0.05) * x),
    "the tails of a softmax": (
        lambda x: torch.softmax(x + torch.tensor([0.0, -20, -40, -10]), -1),
        lambda x: softmax(x + TAILS),
        lambda x: softmax(x + TAILS) * np.array([1, 1, 1.001, 1], np.float32),
    ),
    "all of it times 1.001": (torch.tanh, np.tanh, lambda x: np.tanh(x) * np.float32(1.001)),
    "a small answer that is folded to a constant": (
        lambda x: 1e-6 + 1e-8 * x,
        lambda x: np.float32(1e-6) + np.float32(1e-8) * x,
        lambda x: x * 0 + np.float32(1e-6),
    ),
    "one small column, by a ten thousandth": (
        lambda x: torch.sigmoid(x) * torch.tensor([1.0, 1e6, 1e-6, 1e3]),
        lambda x: 1 / (1 + np.exp(-x)) * np.array([1, 1e6, 1e-6, 1e3], np.float32),
        lambda x: 1 / (1 + np.exp(-x)) * np.array([1, 1e6, 1.0001e-6, 1e3], np.float32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", few(ATTACKS, 2, pytest.mark.jobs))
def test_a_wrong_column_or_a_small_answer_is_refused_and_the_right_one_is_proven(what: str) -> None:
    eager, right, wrong = ATTACKS[what]
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert proof(Model(eager), x, right).reason == ""
    assert "is allowed" in proof(Model(eager), x, wrong).reason


RIGHT: dict[str, tuple[Formula, Formula]] = {
    "a mean that is taken away": (
        lambda x: x + 100 - (x + 100).mean(-1, keepdim=True),
        lambda x: (y := x[:, ::-1] + np.float32(100), (y - y.mean(-1, keepdims=True))[:, ::-1])[1],
    ),
    "a difference of large numbers": (lambda x: torch.exp(1e-3 * x) - 1, lambda x: np.exp(x * np.float32(1e-3)) - 1),
    "a sum in another order": (lambda x: x.sum(-1), lambda x: x[:, 3] + x[:, 2] + x[:, 1] + x[:, 0]),
    "an overflow": (lambda x: torch.exp(x * 40), lambda x: np.exp(x * np.float32(40))),
    "chaos": (lambda x: torch.sin(x * 2**20), lambda x: np.sin((x * np.float32(2**20)).astype(np.float64))),
    "logits near zero": (lambda x: x - x.flip(-1), lambda x: x - x[:, ::-1]),
    "a cast to float32": (lambda x: torch.exp(x.float()).to(torch.float32), np.exp),
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_only_rounds_otherwise_is_proven(what: str) -> None:
    eager, right = RIGHT[what]
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert proof(Model(eager), x, right).reason == ""


@pytest.mark.jobs
def test_a_chaotic_column_hides_no_wrong_one_beside_it_and_has_to_be_what_eager_answers() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cat([torch.sin(x[:, :2] * 2**20), torch.sigmoid(x[:, 2:])], -1)

    def right(x: Array) -> Array:
        return np.concatenate([np.sin(x[:, :2].astype(np.float64) * 2**20), 1 / (1 + np.exp(-x[:, 2:]))], -1)

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert proof(Model(model), x, right).reason == ""
    for wrong in ([1, 1, 1, 1.0001], [1, 1.1, 1, 1]):
        assert not proof(Model(model), x, lambda x, by=wrong: right(x) * np.array(by)).proven


# The arbiter. -----------------------------------------------------------------------------------------------------


def ask(module: nn.Module, x: Tensor) -> tuple[Array, Array]:
    eager = EagerSession(module.eval(), x)
    (name,) = eager.run(eager.example)
    return Arbiter(eager).run(eager.example)[name], Arbiter(eager).run(eager.example, rounded=1)[name]


def test_the_arbiter_computes_in_float64_whatever_the_model_casts_to() -> None:
    x = torch.randn(5, 4)
    for formula in (torch.exp, lambda x: torch.exp(x.float()), lambda x: torch.exp(x.half()).to(torch.float32)):
        found, _ = ask(Model(formula), x)
        np.testing.assert_allclose(found, np.exp(x.double().numpy()), rtol=1e-14)


def test_the_rounded_run_is_off_by_the_rounding_of_float32_and_exact_results_are_not_moved() -> None:
    x = torch.randn(500, 4)
    exact, rounded = ask(Model(torch.exp), x)
    off = np.abs(rounded / exact - 1).max()
    assert 2**-26 < off <= 2**-24
    exact, rounded = ask(Model(lambda x: (x * 4).floor() / 4 + 2), x)
    np.testing.assert_array_equal(exact, rounded)


def test_an_operator_inside_of_which_numbers_cancel_is_rounded_part_by_part() -> None:
    x = torch.rand(500, 4) * 3  # further out all digits cancel
    for part in (lambda x: nn.functional.gelu(x, approximate="tanh"), nn.functional.gelu, nn.functional.mish):
        exact, rounded = ask(Model(lambda x, part=part: part(-3 - x.abs())), x)
        assert np.abs(rounded / exact - 1).max() > 2**-22


def test_the_model_and_the_tables_that_it_keeps_stay_as_they_are() -> None:
    class Tables(Model):
        def __init__(self) -> None:
            super().__init__(self.answer)
            self.tables: dict[int, Tensor] = {}

        def answer(self, x: Tensor) -> Tensor:
            key = len(x) if x.dtype == torch.float32 else -len(x)
            if key not in self.tables:
                self.tables[key] = torch.arange(4, dtype=x.dtype)
            return self.linear(x) + self.tables[key][:3]

    module = Tables()
    eager = EagerSession(module.eval(), torch.randn(5, 4))
    eager.run(eager.example)
    Arbiter(eager).run(eager.example)
    assert {key: one.dtype for key, one in module.tables.items()} == {5: torch.float32}
    assert {one.dtype for one in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("held", [True, False])
def test_parameters_are_widened_whether_the_model_is_held_in_float64_or_not(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trueline.capture.model.arbiter.HELD", 1 << 20 if held else 0)
    module, x = Model(lambda x: x), torch.randn(5, 4)
    module.formula = lambda x: module.linear(x)
    found, _ = ask(module, x)
    want = x.double() @ module.linear.weight.double().T + module.linear.bias.double()
    np.testing.assert_allclose(found, want.detach().numpy(), rtol=1e-13)


def test_a_model_that_has_no_copy_is_compared_by_the_scale_of_its_columns_and_the_evidence_says_so() -> None:
    module = Model(torch.exp)
    module.lock = threading.Lock()  # type: ignore[assignment]
    eager = EagerSession(module.eval(), torch.randn(5, 4))
    seen = observe(eager, make_probes(eager.example)[:3])
    assert not any(one.arbitrate().judged for one in seen if one.arbitrate is not None)
    found = judge(Program(eager, lambda x: np.exp(x) * np.float32(1.00001)), seen)
    assert found.proven
    assert all("of its scale, without float64" in one.tolerance for one in found.evidence)
    assert not judge(Program(eager, lambda x: np.exp(x) * np.float32(1.001)), seen).proven


def test_float64_is_asked_only_where_a_program_is_not_as_near_as_every_program_has_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    run = Arbiter.run
    monkeypatch.setattr(
        Arbiter, "run", lambda self, inputs, rounded=0: (calls.append(rounded), run(self, inputs, rounded=rounded))[1]
    )
    eager = EagerSession(Model(torch.exp).eval(), torch.randn(5, 4))
    seen = observe(eager, make_probes(eager.example)[:3])
    assert judge(Program(eager, np.exp), seen).proven
    assert calls == []
    assert not judge(Program(eager, lambda x: np.exp(x) * np.float32(1.001)), seen).proven
    assert calls != []


def test_a_large_matrix_is_widened_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Model(lambda x: x), torch.randn(5, 4)
    module.formula = lambda x: module.linear(x)
    monkeypatch.setattr("trueline.capture.model.arbiter.HELD", 0)
    whole, _ = ask(module, x)
    monkeypatch.setattr("trueline.capture.model.arbiter.PIECE", 4)
    pieces, rounded = ask(module, x)
    np.testing.assert_allclose(pieces, whole, rtol=1e-14)
    assert (rounded != pieces).all()


def wide() -> tuple[nn.Module, Tensor]:
    """Of three hundred numbers some are all but zero, since their terms cancel."""
    torch.manual_seed(1)
    layers = [part for _ in range(6) for part in (nn.Linear(300, 300), nn.ReLU())]
    return nn.Sequential(*layers).eval(), torch.randn(2, 300)


def add_otherwise(model: nn.Module) -> Formula:
    """The same formula in float32, with every sum in another order."""

    def answer(x: Array) -> Array:
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                weight, bias = (one.detach().numpy() for one in (layer.weight, layer.bias))
                x = x[:, ::-1].copy() @ weight[:, ::-1].copy().T + bias
            else:
                x = np.maximum(x, np.float32(0))
        return x

    return answer


@pytest.mark.parametrize("time_s", [8.0, pytest.param(0.0, marks=pytest.mark.long)])
def test_one_of_many_numbers_that_is_small_by_cancelling_is_no_reason_to_refuse(
    time_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With time by more draws of the probe, without by what other probes tell of the column."""
    monkeypatch.setattr("trueline.capture.proof.observe.BUDGET_S", time_s)
    monkeypatch.setattr("trueline.capture.proof.observe.CHEAP_CALLS", 0)
    monkeypatch.setattr("trueline.capture.model.arbiter.HELD", 0)
    model, x = wide()
    eager = EagerSession(model, x)
    seen = observe(eager, [probe for probe in make_probes(eager.example) if not probe.wild])
    assert (found := judge(Program2D(eager, add_otherwise(model)), seen)).proven, found.reason
    wrong = add_otherwise(model)
    off = Program2D(eager, lambda x: wrong(x) + np.float32(3e-4) * (np.arange(300) == 7))
    assert not judge(off, seen).proven


def saturated(monkeypatch: pytest.MonkeyPatch, off: float) -> Proof:
    """The proof of a sigmoid whose input is off by that many last digits, on a batch in which one record is far in the
    tail, without time for a float64 run of the whole batch."""
    monkeypatch.setattr(observe_module, "BUDGET_S", 1e-9)
    monkeypatch.setattr(observe_module, "CHEAP_CALLS", 0)
    monkeypatch.setattr(observe_module._Known, "redraw", lambda *of: None)
    weight = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) + 2.5
    eager = EagerSession(Model(lambda x: torch.sigmoid(x @ weight)).eval(), torch.randn(3, 4))
    records = torch.randn(64, 4)
    records[40] = torch.tensor([-7.1, -6.3, -5.9, -4.7])
    probes = [one for one in make_probes(eager.example) if not one.wild]
    far = Probe(name="far", origin="made", num_records=64, inputs={"x": records.numpy()})

    def formula(x: Array) -> Array:
        total = (x.astype(np.float64) @ weight.double().numpy()).astype(np.float32)
        total = total + np.float32(off) * np.spacing(np.abs(total))
        return 1 / (1 + np.exp(-total.astype(np.float64)))

    return judge(Program(eager, formula), observe(eager, [*probes, far]))


def test_a_record_far_in_the_tail_is_rounded_alone_where_there_is_no_time_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    assert saturated(monkeypatch, 3.0).proven
    assert not saturated(monkeypatch, 20.0).proven
    monkeypatch.setattr(observe_module._Known, "measure_records", lambda *of: None)
    assert not saturated(monkeypatch, 3.0).proven


def test_bounds_of_some_records_widen_theirs_and_no_other() -> None:
    whole = (np.array([9.0]), np.array([1.0, 2.0, 3.0]), np.array([5.0, 6.0]))
    part = (np.array([4.0]), np.array([7.0, 1.0]), np.array([5.5, 1.0]))
    found = bounds.widen(whole, part, [0, 2])
    assert [one.tolist() for one in found] == [[9.0], [7.0, 2.0, 3.0], [5.5, 6.0]]
    pairs = (np.array([9.0]), np.ones(3), np.ones(3))
    assert bounds.widen(pairs, (np.array([9.0]), np.ones(2), np.ones(2)), [0, 2]) is pairs


@pytest.mark.parametrize("parted", [0, 1, 40])
def test_the_noise_of_a_large_answer_is_measured_by_parts_as_at_once(
    parted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = np.random.default_rng(0)
    answer = drawn.standard_normal((4, 5, 6)).astype(np.float32)
    exact = [answer + 1e-6 * drawn.standard_normal(answer.shape) for _ in range(3)]
    exact[1].reshape(-1)[:parted] += 9.0  # another way; a small part of the elements says nothing about the others
    answer[3, 4, 5] = np.nan
    at_once = bounds.measure({"y": answer}, [{"y": one} for one in exact])["y"].noise
    monkeypatch.setattr("trueline.runtime.compare.PIECE", 12)
    by_parts = bounds.measure({"y": answer}, [{"y": one} for one in exact])["y"].noise
    assert at_once is not None
    assert by_parts is not None
    assert (at_once[0] > 1) == (parted == 40)
    for one, other in zip(at_once, by_parts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_answer_is_measured_the_same_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    answer = np.where(random.random((6, 5, 4)) < 0.3, 0, random.standard_normal((6, 5, 4))).astype(np.float32)
    answer[1, 2, 3], answer[4], answer[..., 2], answer[0, 0, 0] = np.nan, 1.0, 7.0, -np.inf
    answer[..., 3], answer[0, 1, 3] = 3.0, 4.0
    wholes = [bounds.measure({"y": one}, [{"y": one.astype(np.float64) + 1e-6}])["y"] for one in (answer, answer[:0])]
    stored = StoredArrays({"y": answer}), StoredArrays({"y": answer[:0]})
    monkeypatch.setattr(compare, "PIECE", 8)
    for whole, one in zip(wholes, stored, strict=True):
        parts = bounds.measure(one.by_parts(), [{"y": one["y"].astype(np.float64) + 1e-6}])["y"]
        for name in ("scale", "flat", "dead", "noise"):
            for a, b in zip(getattr(whole, name), getattr(parts, name), strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)
    assert wholes[0].flat[2].tolist() == [False, False, True, False]


def test_as_many_runs_of_records_alone_are_made_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = EagerSession(nn.Linear(4, 3), torch.randn(3, 4))
    (seen,) = observe(eager, make_probes(eager.example)[:1])
    runs: list[int] = []
    run = observe_module._Known._run
    monkeypatch.setattr(
        observe_module._Known,
        "_run",
        lambda known, one, draw, few=None: runs.append(draw) or run(known, one, draw, few),
    )
    seconds = observe_module.ALONE_S / 8  # of a run of two records
    for run_s, draws in ((0.001, observe_module.MORE_DRAWS), (seconds, 7), (4 * seconds, None)):
        known = observe_module._Known(arbiter=Arbiter(eager), per_run=run_s / 8)
        runs.clear()
        assert (known.measure_records(seen, [0, 2]) is None) == (draws is None)
        assert runs == ([] if draws is None else list(range(draws + 1)))
