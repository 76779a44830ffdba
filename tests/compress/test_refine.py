"""Operators are chosen one by one where a method for the whole program loses too much."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from trueline.compress import refine
from trueline.compress.candidate import CompressedCandidate
from trueline.compress.method import Budget, CompressMethod
from trueline.compress.search import Search
from trueline.compress.sensitivity import Blame

OPERATORS = [f"layer{number}" for number in range(10)]
BAD = frozenset({"layer3", "layer6"})
"""The program keeps the budget only when both stay in float32, and each alone looks harmless."""


@dataclass
class Rig:
    """A search whose candidates cost what they leave out, without programs."""

    folder: Path
    rows: dict[str, CompressedCandidate] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    dies_after: float = math.inf

    def refiner(self) -> refine.Refiner:
        reference: Any = SimpleNamespace(budget=Budget("accuracy", 0.01))
        return refine.Refiner(
            reference=reference, rows=self.rows, cost=lambda row: (2 + len(row.exclude)) / 20, ends=1.0,
            open_program=lambda base: None, clock=lambda: 0.0,  # type: ignore[arg-type,return-value]
        )  # fmt: skip

    def measure(self, method: CompressMethod) -> None:
        self.tried.append(method.name)
        missing = len(BAD - set(method.exclude))
        self.rows[method.name] = CompressedCandidate(
            name=method.name, kind=method.kind, words=method.words, exclude=method.exclude, base=method.base,
            trial=method.trial, verdict="over budget" if missing else "offered", loss=0.2 * missing,
            loss_high=0.21 * missing, why="loses",
        )  # fmt: skip

    def run(self, first: CompressMethod) -> None:
        if first.name not in self.rows:
            self.measure(first)
        for method in self.refiner().propose([first]):
            if method.name in self.rows:
                continue
            if len(self.tried) >= self.dies_after:
                raise KeyboardInterrupt
            self.measure(method)


@pytest.fixture(autouse=True)
def harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sensitivity alone points at other operators than those to blame."""
    errors = {name: 0.1 - 0.01 * at for at, name in enumerate(OPERATORS)}
    monkeypatch.setattr(refine, "rank_operators", lambda *_: Blame(dict(errors)))


FIRST = CompressMethod("static", ("u8s8", "minmax"))


def best_of(rig: Rig) -> CompressedCandidate:
    return min((row for row in rig.rows.values() if row.verdict == "offered"), key=lambda row: len(row.exclude))


def test_the_bayesian_search_leaves_out_fewer_operators_than_sensitivity_alone(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    rig = Rig(tmp_path)
    rig.run(FIRST)
    by_sensitivity = [row for row in rig.rows.values() if row.exclude and not row.trial]
    assert [len(row.exclude) for row in by_sensitivity] == [1, 2, 4, 8]
    best = best_of(rig)
    assert best.trial
    assert set(best.exclude) >= BAD
    assert len(best.exclude) < 8
    assert sum(row.trial > 0 for row in rig.rows.values()) == refine.TRIALS
    assert len({frozenset(row.exclude) for row in rig.rows.values()}) == len(rig.rows)  # none is tried twice


def test_a_search_that_was_killed_continues_with_what_its_rows_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna = pytest.importorskip("optuna")
    rig = Rig(tmp_path, dies_after=9)
    with pytest.raises(KeyboardInterrupt):
        rig.run(FIRST)
    kept = dict(rig.rows)
    again, told = Rig(tmp_path, rows=dict(kept)), []
    add = optuna.study.Study.add_trial
    monkeypatch.setattr(
        optuna.study.Study, "add_trial", lambda study, trial: told.append(trial.value) or add(study, trial)
    )
    again.run(FIRST)
    assert sum(row.trial > 0 for row in kept.values()) == 4
    assert sorted(told) == sorted(again.refiner()._cost_of(row) for row in kept.values())
    assert not set(again.tried) & set(kept)
    assert sum(row.trial > 0 for row in again.rows.values()) == refine.TRIALS
    assert len({frozenset(row.exclude) for row in again.rows.values()}) == len(again.rows)


def test_what_keeps_the_budget_as_a_whole_is_not_refined(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    row = CompressedCandidate(
        name=FIRST.name, kind="static", words=FIRST.words, verdict="no gain", loss=0.0, loss_high=0.001
    )
    rig.rows[FIRST.name] = row
    assert list(rig.refiner().propose([FIRST])) == []


def test_programs_of_derived_models_and_of_openvino_are_refined_too(tmp_path: Path) -> None:
    for method in (CompressMethod("openvino", ("mixed",)), CompressMethod("static", FIRST.words, base="qat")):
        rig = Rig(tmp_path)
        rig.run(method)
        assert {(row.kind, row.base) for row in rig.rows.values()} == {(method.kind, method.base)}
        assert len(rig.rows) > 4


def test_without_optuna_sensitivity_alone_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "optuna", None)
    rig = Rig(tmp_path)
    rig.run(FIRST)
    assert not any(row.trial for row in rig.rows.values())
    assert best_of(rig).exclude == tuple(OPERATORS[:8])


@pytest.mark.parametrize("loses", [True, False])
def test_a_part_of_the_time_is_kept_for_leaving_operators_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: bool
) -> None:
    from trueline.compress import search as searching

    now, rig = [0.0], Rig(tmp_path)
    bundle = SimpleNamespace(program_path=lambda format: tmp_path)
    reference: Any = SimpleNamespace(budget=Budget("accuracy", 0.01), bundle=bundle)
    search = Search(reference, tmp_path, "size", math.inf, lambda: now[0], rows=rig.rows)

    def measure(_: Search, method: CompressMethod) -> None:
        now[0] += 10
        rig.measure(method)
        if not loses:
            rig.rows[method.name] = msgspec.structs.replace(rig.rows[method.name], verdict="offered")

    monkeypatch.setattr(Search, "_try", measure)
    monkeypatch.setattr(Search, "program", lambda self, base="": None)
    monkeypatch.setattr(searching, "size_of", lambda path: 1)
    usual = [FIRST, *(CompressMethod("weights", (str(number),)) for number in range(20))]
    search.run_until(90.0, usual)
    names = [method.name for method in usual]
    assert len(rig.tried) == 9
    if loses:  # two thirds of the time, and then the best guesses
        assert rig.tried[:6] == names[:6]
        assert rig.tried[6:] == [f"static:u8s8,minmax without {count}" for count in (1, 2, 4)]
    else:
        assert rig.tried == names[:9]


def test_each_model_is_quantized_in_one_way_before_the_next_and_a_model_that_lost_too_much_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trueline.compress import ordering
    from trueline.compress import search as searching

    ways = [FIRST, CompressMethod("dynamic", ("u8",))]
    monkeypatch.setattr(ordering, "list_usual", lambda program, target: ways)
    monkeypatch.setattr(searching, "size_of", lambda path: 1)
    monkeypatch.setattr(Search, "program", lambda self, base="": None)
    bundle: Any = SimpleNamespace(program_path=lambda format: tmp_path)
    reference: Any = SimpleNamespace(budget=Budget("accuracy", 0.01), bundle=bundle)
    tried: list[str] = []

    def note(search: Search, method: CompressMethod) -> None:
        tried.append(method.name)
        lost = method.base == "prune:heads=0.9"
        search.rows[method.name] = CompressedCandidate(
            name=method.name, kind=method.kind, base=method.base, verdict="over budget" if lost else "offered"
        )

    monkeypatch.setattr(Search, "_try", note)
    bases = {"prune:heads=0.5": bundle, "prune:heads=0.9": bundle}
    search = Search(reference, tmp_path, "latency", math.inf, lambda: 0.0, bases=bases)
    search.run_until(90.0, ordering.CandidateOrder(search, [], True, True).list_all())
    assert tried == [
        "prune:heads=0.5", "prune:heads=0.9", "static:u8s8,minmax", "prune:heads=0.5 + static:u8s8,minmax",
        "dynamic:u8", "prune:heads=0.5 + dynamic:u8", "prune:heads=0.9 + static:u8s8,minmax",
        "prune:heads=0.9 + dynamic:u8",
    ]  # fmt: skip
