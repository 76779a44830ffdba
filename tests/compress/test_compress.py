"""A bundle goes in, and a smaller or faster one comes out that keeps the budget, or nothing and a table."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

import trueline
from trueline.bundle import open_bundle
from trueline.cli import app
from trueline.compress import refine
from trueline.compress import search as searching
from trueline.compress.candidate import CompressedCandidate
from trueline.compress.method import parse_budget
from trueline.compress.promise import check_promise
from trueline.errors import BudgetMissed, BundleError, NotProven, RecipeError, RequestError, UsageError
from trueline.files import sha256_file
from trueline.runtime.open import open_program, replay
from worlds import compressible


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "TRIALS", 2)


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.jobs
def test_the_smallest_that_keeps_the_budget_is_sealed_and_proven_and_the_parent_untouched(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    before = files_of(trained.bundle.path)
    found = trueline.compress(trained.bundle.path, budget="accuracy=3%", target="size", out=tmp_path / "small.bundle")
    sealed = open_bundle(found.path)
    replay(sealed, open_program(sealed))
    assert files_of(trained.bundle.path) == before
    assert found.row.kind in ("static", "openvino")  # where OpenVINO is installed, its programs compete
    assert found.row.loss_high is not None
    assert found.row.loss_high <= 0.03
    assert sealed.manifest.lineage.parent == trained.bundle.digest == sealed.lineage()["parent"]
    assert sealed.lineage()["compression"]["name"] == found.row.name
    smaller, larger = (one.program_path().stat().st_size for one in (sealed, trained.bundle))
    assert smaller < 0.5 * larger
    report = json.loads((found.report.parent / "report.json").read_text())
    assert {row["name"] for row in report["candidates"]} >= {"parent (fp32)", "eager", "static:u8s8,minmax", "float16"}
    page = found.report.read_text()
    assert "<script" not in page
    assert "static:s8s8,minmax" in page
    assert f"Sealed: <b>{found.row.name}</b>" in page
    assert report["chosen"] == found.row.name


def test_golden_records_prove_what_was_accepted_and_refuse_another_program(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    found = trueline.compress(trained.bundle.path, quantize=["static"], out=tmp_path / "small.bundle")
    sealed = open_bundle(found.path)
    accepted = open_program(sealed)
    golden = sealed.golden()[0]
    assert np.array_equal(accepted.run(golden.inputs)["output"], golden.outputs["output"])
    bound = golden.bounds["output"][-1]
    assert (bound > 0).all()
    parent = open_program(trained.bundle).run(golden.inputs)["output"]
    assert not np.array_equal(parent, golden.outputs["output"])

    class Saturating:
        """A processor whose int8 kernels clip."""

        format, signature = "onnx", accepted.signature

        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            clipped = golden.outputs["output"].max(axis=0) - 3 * bound
            return {name: np.minimum(array, clipped) for name, array in accepted.run(inputs).items()}

    with pytest.raises(NotProven, match="fails golden record"):
        replay(sealed, Saturating())


def test_nan_and_infinity_are_refused_since_int8_would_make_numbers_of_them(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    found = trueline.compress(trained.bundle.path, quantize=["static"], out=tmp_path / "small.bundle")
    images = compressible.images(2)
    images[1, 0, 3, 3] = np.nan
    with pytest.raises(RequestError, match="finite"):
        open_program(open_bundle(found.path)).run({"input": images})


@pytest.mark.jobs
def test_below_the_budget_nothing_is_sealed_and_the_reason_is_a_table(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trueline.compress.apply import static

    apply = static.StaticQuantizer.apply

    def spoil(self, method, program, out):  # every class is the next one
        import onnx

        apply(self, method, program, out)
        model = onnx.load(out)
        turn = onnx.helper.make_node("Gather", ["spoilt", "order"], ["output"], axis=1)
        for node in model.graph.node:
            node.output[:] = ["spoilt" if name == "output" else name for name in node.output]
        model.graph.node.append(turn)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.roll(np.arange(10), 1), "order"))
        onnx.save(model, out)

    monkeypatch.setattr(static.StaticQuantizer, "apply", spoil)
    out = tmp_path / "small.bundle"
    with pytest.raises(BudgetMissed) as missed:
        trueline.compress(trained.bundle.path, budget="accuracy=2%", quantize=["static"], out=out)
    assert not out.exists()
    assert "static:u8s8,minmax" in missed.value.message
    assert "over budget" in missed.value.message
    assert (tmp_path / "small.bundle.search" / "report.html").is_file()


@pytest.mark.jobs
def test_a_search_that_was_killed_goes_on_where_it_was_and_its_best_is_a_bundle(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    measure = searching.Search._measure

    def dying(self, method):
        if len(tried) == 3:
            raise KeyboardInterrupt
        tried.append(method.name)
        return measure(self, method)

    monkeypatch.setattr(searching.Search, "_measure", dying)
    out = tmp_path / "small.bundle"
    ways = ["static", "static:s8s8", "float16", "dynamic", "weights"]
    asked = {"budget": "accuracy=3%", "target": "size", "quantize": ways, "out": out}
    with pytest.raises(KeyboardInterrupt):
        trueline.compress(trained.bundle.path, **asked)
    best = open_bundle(tmp_path / "small.bundle.search" / "best.bundle")
    replay(best, open_program(best))
    first, tried[:] = list(tried), []
    monkeypatch.setattr(
        searching.Search, "_measure", lambda self, method: tried.append(method.name) or measure(self, method)
    )
    found = trueline.compress(trained.bundle.path, **asked)
    assert len(first) == 3
    assert not set(first) & set(tried)
    assert {row.name for row in found.rows} >= {*first, *tried}


def test_the_time_limit_ends_the_search_with_what_was_found(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    measure = searching.Search._measure

    def slow(self, method):
        now[0] += 50
        return measure(self, method)

    monkeypatch.setattr(searching.Search, "_measure", slow)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    found = trueline.compress(
        trained.bundle.path, budget="accuracy=3%", target="size", minutes=1, out=tmp_path / "s.bundle"
    )
    assert sum(row.kind != "parent" for row in found.rows) == 2


def test_a_time_that_is_over_before_the_first_candidate_is_what_the_error_says(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    with pytest.raises(BudgetMissed) as missed:
        trueline.compress(trained.bundle.path, budget="accuracy=3%", minutes=1e-9, out=tmp_path / "s.bundle")
    assert "before the first candidate" in missed.value.hint
    assert "--minutes" in missed.value.hint


def test_a_disk_that_is_full_outside_of_a_candidate_is_one_clear_error_that_names_the_best_so_far(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from trueline import events
    from trueline.errors import StorageError

    for number, words in ((errno.ENOSPC, "no room left"), (errno.EDQUOT, "no room left"), (errno.EFBIG, "ulimit -f")):

        def fail(_: searching.Search, number: int = number) -> None:
            raise OSError(number, "the kernel's words")

        monkeypatch.setattr(searching.Search, "measure_all", fail)
        told: list[dict] = []
        out = tmp_path / f"{number}.bundle"
        with (
            events.listening(lambda name, fields: told.append(fields) if name == "search.stopped" else None),  # noqa: B023 - called in this turn
            pytest.raises(StorageError) as full,
        ):
            trueline.compress(trained.bundle.path, quantize=["dynamic"], out=out)
        assert words in f"{full.value.message} {full.value.hint}"
        assert [one["best"] for one in told] == ["dynamic:u8"]
        assert open_bundle(Path(told[0]["path"])).lineage()["compression"]["name"] == "dynamic:u8"
        assert not out.exists()


def test_what_failed_says_in_its_row_what_to_do_about_it(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trueline.compress.apply import dynamic
    from trueline.errors import CaptureError

    def fail(self, method, program, out):
        raise CaptureError("it has no room for that", hint="make room")

    monkeypatch.setattr(dynamic.DynamicQuantizer, "apply", fail)
    with pytest.raises(BudgetMissed, match="dynamic:u8: it has no room for that; make room"):
        trueline.compress(trained.bundle.path, quantize=["dynamic"], out=tmp_path / "s.bundle")


def test_a_row_that_was_torn_by_the_kill_is_tried_again(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    whole = msgspec.json.encode(CompressedCandidate(name="one", kind="static", verdict="failed"))
    rows.write_bytes(whole + b"\n" + whole[:20])
    assert [row.name for row in searching.read_rows(rows)] == ["one"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"budget": "accurcy=1%"}, UsageError, "names the metric 'accurcy'"),
        ({"budget": "accuracy"}, UsageError, "expected METRIC=AMOUNT"),
        ({"budget": ""}, UsageError, "expected METRIC=AMOUNT"),
        ({"budget": "accuracy=0.2%"}, UsageError, "at least 1351 records"),
        ({"quantize": ["static:u9"]}, UsageError, "has no variant 'u9'"),
        ({"quantize": ["statik"]}, UsageError, "called 'statik'"),
        ({"target": "speed"}, UsageError, "target is 'speed'"),
        ({"minutes": 0}, UsageError, "minutes is 0"),
        ({"minutes": float("inf")}, UsageError, "minutes is inf"),
        ({"recipe": "missing.py"}, RecipeError, "missing.py"),
    ],
)
def test_a_request_that_cannot_be_kept_is_one_clear_error(
    trained: compressible.Compressible, tmp_path: Path, changes: dict, error: type, words: str
) -> None:
    out = tmp_path / "small.bundle"
    with pytest.raises(error, match=words):
        trueline.compress(trained.bundle.path, out=out, **changes)
    assert not out.exists()


@pytest.mark.parametrize("records", [400, 600, 1000, 1351])
def test_the_budget_that_a_refused_one_is_told_to_take_is_not_refused(records: int) -> None:
    with pytest.raises(UsageError, match="cannot be promised") as refused:
        check_promise(parse_budget("accuracy=0.01%"), np.ones(9), records)
    check_promise(parse_budget(refused.value.hint.partition("--budget ")[2]), np.ones(9), records)


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        ('"evaluation": 600', '"evaluation": 0', RecipeError, "no evaluation records"),
        (
            "def dataset(mode):",
            "def dataset(mode):\n    if mode == 'evaluation':\n        raise KeyError('test.csv')\n",
            RecipeError,
            r"raised KeyError: 'test\.csv'",
        ),
        ("torch.rand(CLASSES, 1, 8, 8", "torch.rand(CLASSES, 1, 9, 9", UsageError, "does not take"),
        (
            '{"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels).float()}',
            '{"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels).float() * float("nan")}',
            RecipeError,
            "not finite",
        ),
    ],
)
def test_records_that_do_not_fit_are_one_clear_error(
    trained: compressible.Compressible, tmp_path: Path, old: str, new: str, error: type, words: str
) -> None:
    text = compressible.RECIPE.replace(old, new)
    if "9, 9" in new:
        text = text.replace("torch.randn(RECORDS[mode], 1, 8, 8", "torch.randn(RECORDS[mode], 1, 9, 9")
    recipe = tmp_path / "other.py"
    recipe.write_text(text)
    with pytest.raises(error, match=words):
        trueline.compress(trained.bundle.path, recipe=recipe, out=tmp_path / "small.bundle", budget="accuracy=3%")
    assert not (tmp_path / "small.bundle").exists()


def test_weights_that_are_not_finite_are_named(trained: compressible.Compressible, tmp_path: Path) -> None:
    import copy

    broken = copy.deepcopy(trained.module)
    broken[2].weight.data[0, 0, 0, 0] = float("nan")
    sealed = compressible.seal(broken, tmp_path / "broken.bundle", trained.bundle.manifest.lineage.recipe_digest)
    with pytest.raises(BundleError, match=r"'2_weight'.* has 1 values that are not finite"):
        trueline.compress(sealed.path, recipe=trained.recipe)


def test_a_bundle_whose_recipe_is_nowhere_says_how_to_name_it(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sealed = compressible.seal(trained.module, tmp_path / "lost.bundle", "f" * 64)
    with pytest.raises(UsageError, match="is not found") as missing:
        trueline.compress(sealed.path)
    assert "--recipe" in missing.value.hint


def test_a_full_disk_in_the_search_leaves_no_bundle(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from trueline.compress.apply import static
    from trueline.errors import DiskFull

    def fail(self, method, program, out):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(static.StaticQuantizer, "apply", fail)
    with pytest.raises(DiskFull, match="no room left"):
        trueline.compress(trained.bundle.path, quantize=["static"], out=tmp_path / "small.bundle")
    assert not (tmp_path / "small.bundle").exists()


@pytest.mark.long
def test_a_disk_that_is_full_as_the_last_bundle_is_sealed_costs_no_candidate_and_keeps_what_was_there(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from trueline.compress import sealing
    from trueline.errors import DiskFull

    out, made = tmp_path / "small.bundle", sealing.seal_bundle
    compress = partial(trueline.compress, trained.bundle.path, quantize=["static"], target="size", out=out)

    def fail_at_last(path, contents, **how):
        if path == out:
            raise OSError(errno.ENOSPC, "No space left on device")
        return made(path, contents, **how)

    monkeypatch.setattr(sealing, "seal_bundle", fail_at_last)
    with pytest.raises(DiskFull, match="no room left"):
        compress()
    assert not out.exists()
    assert {one.name for one in tmp_path.iterdir()} == {"small.bundle.search"}
    folder = tmp_path / "small.bundle.search"
    best, rows = open_bundle(folder / "best.bundle"), (folder / "rows.jsonl").read_bytes()
    monkeypatch.undo()
    found = compress()
    assert (folder / "rows.jsonl").read_bytes() == rows
    assert open_bundle(out).program().file == best.program().file
    assert found.row.verdict in ("offered", "no gain")


def test_a_disk_that_is_full_ends_the_search_also_where_a_quantizer_says_it_in_its_own_words(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import shutil
    from collections import namedtuple

    from trueline.compress.apply import dynamic, static
    from trueline.errors import CaptureError, DiskFull

    def fail(self, method, program, out):
        raise CaptureError("it does not work") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(static.StaticQuantizer, "apply", fail)
    with pytest.raises(DiskFull, match="no room left"):
        trueline.compress(trained.bundle.path, quantize=["static"], out=tmp_path / "small.bundle")

    def fail_in_c(self, method, program, out):
        raise CaptureError("std::ofstream::write")

    monkeypatch.setattr(dynamic.DynamicQuantizer, "apply", fail_in_c)
    with pytest.raises(BudgetMissed, match=r"no candidate that was named could be made(.|\n)*std::ofstream"):  # a row
        trueline.compress(trained.bundle.path, quantize=["dynamic"], out=tmp_path / "small.bundle")
    usage = namedtuple("usage", "total used free")(1, 1, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskFull, match="no room left"):
        trueline.compress(trained.bundle.path, quantize=["dynamic"], out=tmp_path / "other.bundle")
    assert not list(tmp_path.glob("*.bundle"))


@pytest.mark.jobs
def test_what_is_not_proven_at_other_sizes_is_a_row_and_the_next_best_is_sealed(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trueline.compress import sealing

    seal = sealing.seal

    def refuse(reference, base, row, program, out, facts):
        if row.kind == "static":
            raise NotProven("at batch 17 it is off")
        return seal(reference, base, row, program, out, facts)

    monkeypatch.setattr(sealing, "seal", refuse)
    found = trueline.compress(
        trained.bundle.path, quantize=["static", "dynamic"], target="size", budget="accuracy=3%", out=tmp_path / "b"
    )
    assert found.row.kind == "dynamic"
    [row] = [row for row in found.rows if row.kind == "static"]
    assert (row.verdict, row.why) == ("failed", "not proven: at batch 17 it is off")


def test_training_records_of_another_shape_are_rows_and_other_methods_continue(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    recipe = tmp_path / "other.py"
    recipe.write_text(
        compressible.RECIPE.replace("TensorDataset(images, labels)", "TensorDataset(images[..., :7], labels) "
                                    'if mode == "training" else TensorDataset(images, labels)')
    )  # fmt: skip
    before = files_of(trained.bundle.path)
    found = trueline.compress(
        trained.bundle.path, recipe=recipe, quantize=["static", "dynamic"], target="size", budget="accuracy=3%",
        out=tmp_path / "small.bundle",
    )  # fmt: skip
    assert found.row.kind == "dynamic"
    [row] = [row for row in found.rows if row.kind == "static"]
    assert row.verdict == "failed"
    assert "does not take the recipe's training records" in row.why
    assert files_of(trained.bundle.path) == before


@pytest.mark.jobs
def test_the_command_prints_the_table_and_json(
    trained: compressible.Compressible, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "small.bundle")
    given = [str(trained.bundle.path), "--quantize", "static", "-o", out]
    assert app.run(["compress", *given, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["chosen"] == "static:u8s8,minmax"
    assert app.run(["compress", *given]) == 2
    assert "exists already" in capsys.readouterr().err
    assert app.run(["compress", *given, "--overwrite"]) == 0
    assert "x eager" in capsys.readouterr().out
    assert app.run(["bundle", "inspect", out]) == 0
    assert "compression.name" in capsys.readouterr().out


def test_a_compressed_bundle_is_verified_by_what_was_accepted_and_not_by_the_model(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    found = trueline.compress(trained.bundle.path, quantize=["static"], out=tmp_path / "small.bundle")
    assert trueline.verify(found.path).holds
    with pytest.raises(UsageError, match="is compressed"):
        trueline.verify(found.path, against=trained.recipe)


@pytest.mark.slow
def test_a_server_proves_and_serves_the_compressed_program(trained: compressible.Compressible, tmp_path: Path) -> None:
    import httpx

    from trueline.serve.api import start

    found = trueline.compress(trained.bundle.path, quantize=["static"], out=tmp_path / "small.bundle")
    images = compressible.images(3)
    expected = open_program(open_bundle(found.path)).run({"input": images})["output"]
    with start(str(found.path), log=tmp_path / "server.log") as server:
        answer = httpx.post(f"{server.url}/predictions/{server.model}", json={"input": images.tolist()}, timeout=60)
    assert np.allclose(np.array(answer.json(), np.float32), expected, atol=1e-5)
