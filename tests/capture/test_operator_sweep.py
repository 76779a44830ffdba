"""The sweep over torch's operators asks each one, at the edges of what numbers are, and names the one that is wrong."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.attack.judge import judge
from bench.attack.operator_case import OperatorCase, read_case, source
from bench.attack.operator_sweep import Sweep, cases_of_torch, groups, sweep
from bench.attack.subject import Answer, Array, Subject
from bench.attack.torch_samples import Writer, call, literal, with_batch

SAMPLE = "torch.tensor([0.5, -1.0, 2.0, 3.0]).reshape(2, 2)"


def case_of(name: str, expression: str, *constants: str, module: str = "") -> OperatorCase:
    return OperatorCase(name, expression, SAMPLE, "real batch 2", (2, 5), constants, module)


class Answers:
    """A program that answers as the model does, but for numbers of the planted size."""

    def __init__(self, subject: Subject, wrong_from: float) -> None:
        self.subject, self.wrong_from = subject, wrong_from
        self.dims: dict[str, tuple[int | str, ...]] = {"x": ("batch", 2)}

    def claims(self, arrays: Mapping[str, Array]) -> bool:
        return bool(np.isfinite(arrays["x"]).all())

    def answer(self, arrays: Mapping[str, Array]) -> Answer:
        right = self.subject.fresh(arrays)
        large = np.abs(arrays["x"]).max(initial=0) >= self.wrong_from
        return [one * 2 for one in right] if large and not isinstance(right, str) else right


def test_a_fault_that_only_very_large_numbers_show_is_found_at_the_edges() -> None:
    subject = Subject(source([case_of("tanh", "torch.tanh(x)")]))
    program = Answers(subject, 1e18)
    assert judge(subject, program, calls=5).wrong == []
    assert "values" in judge(subject, program, calls=5, extremes=True).kinds


def test_the_edges_of_a_right_program_are_silent() -> None:
    subject = Subject(source([case_of("add", "torch.add(x, C0)", "torch.tensor([1.0, 2.0])")]))
    verdict = judge(subject, Answers(subject, np.inf), calls=5, extremes=True)
    assert not verdict.wrong
    assert not verdict.wrong_nonfinite
    assert verdict.asked > 100


def test_records_of_one_number_are_judged_too() -> None:
    case = OperatorCase("sin", "torch.sin(x)", "torch.ones(3, 1)", "real batch 1", (3, 6))
    subject = Subject(source([case]))
    program = Answers(subject, np.inf)
    program.dims = {"x": ("batch", 1)}
    assert not judge(subject, program, calls=5, extremes=True).wrong


def test_operators_in_one_model_answer_as_each_alone() -> None:
    cases = [
        case_of("linear", "M(x)", module="nn.Linear(2, 3)"),
        case_of("topk", "torch.topk(x, 1)"),
        case_of("fft", "torch.fft.fft(x)"),
    ]
    x = np.asarray([[1.0, 4.0], [3.0, 2.0], [0.0, -1.0]], dtype=np.float32)
    found = Subject(source(cases)).fresh({"x": x})
    assert not isinstance(found, str), found
    alone = [Subject(source([case])).fresh({"x": x}) for case in cases]
    assert [one.shape for one in found] == [(3, 3), (3, 1), (3, 1), (3, 2, 2)]
    assert [one.tolist() for one in found] == [one.tolist() for answer in alone for one in answer]


def test_a_batch_is_the_first_axis_or_one_before_it_or_each_record_alone() -> None:
    def fields(expression: str, x: torch.Tensor) -> tuple[str, bool]:
        case = with_batch("one", {"expression": expression, "constants": (), "module": ""}, x)
        return case.field, case.one_by_one

    assert fields("torch.sum(x, 1)", torch.ones(3, 4)) == ("real batch 4", False)
    assert fields("torch.linalg.inv(x)", torch.eye(3)) == ("real batch 3 3", False)
    assert fields("torch.trace(x)", torch.ones(3, 4)) == ("real batch 4", False)
    assert fields("torch.diagflat(x.reshape(4))", torch.ones(4)) == ("real batch 4", True)


def test_a_call_is_written_with_its_constants_and_read_again() -> None:
    writer = Writer(torch.float32)
    x, other = torch.ones(2, 2), torch.tensor([1.0, float("inf"), float("nan"), 1 / 3])
    text = call("torch.addcmul", writer, (x, other, x), {"value": 2, "dtype": None, "at": (slice(0, 2), ...)})
    assert text == "torch.addcmul(x, C0, C1, value=2, dtype=None, at=(slice(0, 2, None), ..., ))"
    scope: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan")}
    assert torch.equal(eval(writer.constants[0], scope).nan_to_num(7), other.nan_to_num(7))
    assert torch.equal(eval(literal(torch.tensor([2**53 + 1])), scope), torch.tensor([2**53 + 1]))


class Refusing:
    """Refuses every model that holds `bad`."""

    def __init__(self, bad: str) -> None:
        self.bad, self.asked = bad, list[str]()

    def attempt(self, text: str, **_: object) -> dict[str, Any]:
        self.asked.append(text)
        if self.bad in text:
            return {"formats": [], "wrong": [], "wrong_nonfinite": [], "refusal": "NotProven: no"}
        return {"formats": ["onnx", "torch_export"], "wrong": [], "wrong_nonfinite": [], "refusal": ""}


def test_a_refused_operator_among_others_is_named_alone(tmp_path: Path) -> None:
    cases = [case_of(name, f"torch.{name}(x)") for name in ("sin", "cos", "tan", "erf")]
    worker = Refusing("torch.tan")
    with (tmp_path / "log").open("w") as log:
        tried = Sweep(worker, log, seed=1)  # type: ignore[arg-type]
        for group in groups(cases, 4):
            tried.try_group(group)
    assert [row[:2] for row in tried.rows] == [["tan", "refused"]]
    assert (tried.counts["tried"], tried.counts["graph"], len(worker.asked)) == (4, 3, 5)
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [entry["verdict"] for entry in entries] == ["right", "right", "refused", "right"]
    assert read_case(entries[2]["case"]) == cases[2]


def test_a_resumed_sweep_tries_what_the_log_does_not_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [case_of(name, f"torch.{name}(x)") for name in ("sin", "cos", "tan", "erf")]
    listed, log = tmp_path / "cases", tmp_path / "log"
    listed.write_text("".join(json.dumps(case.as_record()) + "\n" for case in cases))
    args = Namespace(log=log, cases=listed, samples=1, seed=1, only=["sin", "tan"], minutes=1, together=1, resume=True)
    sweep(args, Refusing("torch.tan"))  # type: ignore[arg-type]
    args.only, again = None, Refusing("torch.tan")
    sweep(args, again)  # type: ignore[arg-type]
    assert sorted("torch.erf" in text for text in again.asked) == [False, True]
    assert {json.loads(line)["name"] for line in log.read_text().splitlines()} == {"sin", "cos", "tan", "erf"}
    counted = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (counted["operators"], counted["before"], counted["tried"]) == (2, 2, 2)


def names_of(members: Sequence[OperatorCase]) -> list[str]:
    return [case.name for case in members]


def test_what_models_call_most_comes_first_and_no_group_mixes_examples() -> None:
    other = OperatorCase("sum", "torch.sum(x, 1)", "torch.ones(3, 2)", "real batch 2", (3, 6))
    cases = [case_of("nn.functional.relu", "F.relu(x)"), case_of("nn.functional.elu", "F.elu(x)"), other]
    assert [names_of(group) for group in groups(cases, 8)] == [["nn.functional.relu", "nn.functional.elu"], ["sum"]]


@pytest.mark.long
def test_torchs_own_list_becomes_more_than_four_hundred_models_that_answer_their_examples() -> None:
    from collections import Counter

    skipped: Counter[str] = Counter()
    cases = cases_of_torch(1, skipped)
    assert len(cases) > 400, skipped
    assert {"nn.functional.conv2d", "gather", "topk"} <= {case.name.partition("#")[0] for case in cases}
    unanswered = []
    for case in cases[::7]:
        subject = Subject(source([case]))
        if isinstance(subject.fresh(subject.examples()[0]), str):
            unanswered.append(case.name)
    assert unanswered == []
