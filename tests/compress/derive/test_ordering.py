"""What needs no training is tried first and sealed; a search that ends early has found what matters most."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trueline
from trueline import events
from trueline.bundle import open_bundle
from trueline.capture.time_limit import OutOfTime
from trueline.compress import api, ordering, planning
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.candidate import CompressedCandidate
from trueline.compress.derive import bundles
from trueline.compress.derive.bundles import Derived
from trueline.compress.derive.plan import DerivePlan
from trueline.compress.method import CompressMethod, parse_method
from trueline.compress.ordering import CandidateOrder, TimeShares, list_usual, sort_chains
from trueline.compress.search import Search, read_rows
from trueline.errors import CaptureError, UsageError
from trueline.runtime.open import open_program, replay
from worlds import compressible


def names_of(folder: Path) -> list[str]:
    return [row.name for row in read_rows(folder / "rows.jsonl")]


def test_each_kind_has_its_first_turn_before_any_has_a_second(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    program = ParentProgram(trained.bundle.program_path("onnx"), tmp_path, list)
    fast = [method.kind for method in list_usual(program, "latency")]
    assert fast[0] == "static"
    assert fast.index("static", 1) > max(fast.index(kind) for kind in ("openvino", "dynamic", "weights"))
    assert fast[-2:] == ["float16", "bfloat16"]  # only smaller
    small = [method.kind for method in list_usual(program, "size")]
    assert sorted(small) == sorted(fast)
    assert small.index("static", 1) > small.index("bfloat16")


WAYS = [parse_method(text) for text in ("float16", "static", "static:percentile")]


def test_a_search_that_is_stopped_in_its_first_training_has_the_best_of_what_needs_none(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small.bundle.search"

    def stop(*_: Any) -> Path:
        raise KeyboardInterrupt

    def search() -> trueline.Compressed:
        return trueline.compress(
            trained.bundle.path, qat=True, budget="accuracy=3%", target="size", out=tmp_path / "small.bundle",
            checkpoint=trained.recipe.with_name("weights.safetensors"),
        )  # fmt: skip

    monkeypatch.setattr(ordering, "list_usual", lambda program, target: WAYS)
    monkeypatch.setattr(bundles, "train_in_time", stop)
    told: dict[str, events.Field] = {}

    def hear(name: str, fields: dict[str, events.Field]) -> None:
        told.update(fields if name == "search.stopped" else {})

    with events.listening(hear), pytest.raises(KeyboardInterrupt):
        search()
    assert told == {"best": "static:u8s8,minmax", "path": str(folder / "best.bundle")}
    assert names_of(folder) == ["float16", "static:u8s8,minmax"]
    best = open_bundle(folder / "best.bundle")
    assert best.lineage()["compression"]["name"] == "static:u8s8,minmax"
    replay(best, open_program(best))

    def halt(*_: Any) -> Path:
        raise OutOfTime("not trained to its end", hint="more --minutes")

    monkeypatch.setattr(bundles, "train_in_time", halt)
    found = search()  # typed again, it continues
    assert names_of(folder) == ["float16", "static:u8s8,minmax", "static:u8s8,percentile"]
    assert {row.name for row in found.rows if row.verdict == "left out"} == {"qat"}


def test_what_cannot_be_derived_is_refused_before_anything_is_tried(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    other = tmp_path / "student.py"
    other.write_text(
        compressible.BRIEF_RECIPE.replace("nn.Linear(256, CLASSES)", "nn.Linear(256, CLASSES), nn.Unflatten(1, (5, 2))")
    )
    asked: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"prune": "heads=0.5"}, CaptureError, "no heads of this model can be removed"),
        ({"prune": "lstm=0.5"}, UsageError, "lstm"),
        ({"distill": other}, UsageError, "the derived model takes and returns"),
    ]
    for number, (wanted, error, words) in enumerate(asked):
        out = tmp_path / f"{number}.bundle"
        start = {} if "distill" in wanted else {"checkpoint": trained.recipe.with_name("weights.safetensors")}
        with pytest.raises(error, match=words):
            trueline.compress(trained.bundle.path, budget="accuracy=3%", out=out, **wanted, **start)
        assert names_of(tmp_path / f"{number}.bundle.search") == []


def test_a_model_is_quantized_by_the_best_ways_as_soon_as_it_is_trained_and_smaller_models_are_trained_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    speeds = {"static:u8s8,minmax": 2.0, "openvino:mixed": 3.0, "dynamic:u8": 1.0, "weights:int8": 0.9}
    usual = [*(parse_method(name) for name in speeds), parse_method("static:percentile")]
    bundle: Any = SimpleNamespace(digest="d", program_path=lambda format: tmp_path)
    search = Search(SimpleNamespace(bundle=bundle), tmp_path, "latency", math.inf, lambda: 0.0)  # type: ignore[arg-type]

    def note(_: Search, method: CompressMethod) -> None:
        log.append(method.name)
        search.rows[method.name] = CompressedCandidate(
            name=method.name, kind=method.kind, words=method.words, base=method.base,
            vs_fp32={1: speeds.get(method.name, 1.5)},
            verdict="over budget" if method.name == "prune:linear=0.5" else "offered",
        )  # fmt: skip

    def derive(_: Search, plan: DerivePlan, *rest: Any) -> Derived:
        log.append(f"train {plan.name}")
        search.bases[plan.name] = bundle
        return Derived(plan.name, bundle, tmp_path, "c")

    monkeypatch.setattr(ordering, "list_usual", lambda program, target: usual)
    monkeypatch.setattr(Search, "program", lambda self, base="": None)
    monkeypatch.setattr(Search, "_try", note)
    monkeypatch.setattr(planning, "_derive", derive)
    masks = DerivePlan(kind="masks", recipe="r", amounts={"linear": 0.5})
    channels = DerivePlan(kind="channels", recipe="r", amounts={"channels": 0.5})
    order, shares = CandidateOrder(search, [], True, True), TimeShares(0.0, None, search.clock)
    monkeypatch.setattr(api, "prepare_first", lambda *_: None)
    api._run(search, sort_chains([[masks], [channels]]), order, shares)
    first, second = "prune:channels=0.5", "prune:linear=0.5"
    assert log[:10] == [
        "static:u8s8,minmax", "openvino:mixed", "dynamic:u8", "weights:int8",
        f"train {first}", first, f"{first} + openvino:mixed", f"{first} + static:u8s8,minmax",
        f"train {second}", second,
    ]  # fmt: skip
    assert log[10:14] == [
        f"{first} + dynamic:u8", f"{first} + weights:int8", "static:u8s8,percentile",
        f"{first} + static:u8s8,percentile",
    ]  # fmt: skip
    assert all(name.startswith(f"{second} + ") for name in log[14:])  # what itself loses too much comes last
    assert len(log) == len(set(log)) == 2 + 2 + 3 * len(usual)


def test_what_is_named_by_hand_competes_alone(tmp_path: Path) -> None:
    search: Any = SimpleNamespace(rows={}, bases={"qat": None}, finals=["qat"], target="latency")
    static = parse_method("static")
    for methods, budgeted in (([static], True), ([static], False), ([], False)):
        order = CandidateOrder(search, methods, True, budgeted)
        assert order.list_early() == []
        assert all(method.base == "qat" for method in [*order.list_next("qat"), *order.list_all()])
    assert [one.name for one in CandidateOrder(search, [static], True, True).list_next("qat")] == [
        "qat", "qat + static:u8s8,minmax",
    ]  # fmt: skip


def test_early_candidates_take_no_time_from_trainings_and_half_of_the_candidates_at_most() -> None:
    now = [100.0]
    shares = TimeShares(100.0, 10.0, lambda: now[0])
    assert shares.trainings_end == 100 + 400

    def use(seconds: float) -> list[float]:
        given: list[float] = []

        def attempt(ends: float) -> None:
            given.append(ends - now[0])
            now[0] += seconds

        shares.try_early(attempt)
        return given

    assert use(60.0) == [100.0]
    assert shares.trainings_end == 100 + 400 + 60
    now[0] += 100.0  # a training
    assert use(90.0) == [40.0]  # its last candidate ends late
    assert shares.trainings_end == 100 + 500
    assert use(0.0) == [0.0]
    assert shares.end == 100 + 600
    free = TimeShares(0.0, None, lambda: now[0])
    assert free.trainings_end == math.inf
    free.try_early(lambda ends: now.__setitem__(0, now[0] + 100))
    assert free.end == now[0] + 15 * 60 - 100


def test_a_model_keeps_its_ranges_when_the_next_call_has_trained_another_one_before_it(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    reference: Any = SimpleNamespace(bundle=trained.bundle, calibration=list)
    other: Any = SimpleNamespace(
        digest="f" * 64, manifest=trained.bundle.manifest, program_path=trained.bundle.program_path,
        signature_of=trained.bundle.signature_of,
    )  # fmt: skip
    first = Search(reference, tmp_path, "latency", math.inf, lambda: 0.0, bases={"b": other})
    again = Search(reference, tmp_path, "latency", math.inf, lambda: 0.0, bases={"a": trained.bundle, "b": other})
    assert first.program("b").work == again.program("b").work != again.program("a").work


def test_a_candidate_takes_the_folder_of_no_other_though_rows_were_left_out(tmp_path: Path) -> None:
    rows = {
        str(number): CompressedCandidate(
            name=str(number), kind="static", verdict="offered", folder=f"programs/{number}-static"
        )
        for number in (2, 11)
    }
    reference: Any = None
    assert Search(reference, tmp_path, "latency", math.inf, lambda: 0.0, rows=rows)._next_number() == 12
    assert Search(reference, tmp_path, "latency", math.inf, lambda: 0.0)._next_number() == 0
