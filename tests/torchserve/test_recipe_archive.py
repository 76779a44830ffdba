"""A recipe's own code around the proven program of its bundle: one archive, served in processes of its own."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import numpy as np
import pytest

from trueline import files, serve
from trueline.bundle import Bundle, Contents, Signature, Summary, open_bundle, seal
from trueline.errors import StorageError, UsageError
from trueline.serve.handlers.archive import unpack
from trueline.serve.handlers.recipe_handler import RecipeHandler, inputs_by_name
from trueline.torchserve.compat.ts.context import Context, RequestProcessor
from trueline.torchserve.compat.ts.metrics.metrics_store import MetricsStore
from trueline.torchserve.recipe_archive import archive
from worlds import bundles, servers

RECIPE = """
    import numpy as np
    from scale import FACTOR

    def model(): ...
    def loss(outputs, labels): ...
    def optimizer(params): ...
    def dataset(mode): ...

    def preprocess(request):
        if request == "crash":
            raise RuntimeError("a bug of ours in /home/us/secret.py")
        if "row" not in request:
            raise ValueError("the request needs a row")
        return np.asarray([request["row"]], np.float32) * FACTOR

    def postprocess(outputs):
        return {"sum": float(outputs.sum()), "rows": len(outputs), "each": outputs}
"""


def recipe(folder: Path, text: str = RECIPE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scale.py").write_text("FACTOR = 10\n")
    (folder / "recipe.py").write_text(dedent(text))
    return folder / "recipe.py"


def bundle_of(path: Path, out: Path) -> Bundle:
    """y = 2x + 1, captured from the recipe at `path`."""
    plain = bundles.double_plus(out.with_name("plain"))
    entry, folder = plain.program(), out.with_name("programs-only")
    (folder / "programs").mkdir(parents=True)
    (folder / entry.file).write_bytes(plain.program_path().read_bytes())
    contents = Contents(
        name="tiny",
        signature=plain.signature,
        programs=[(entry, folder)],
        serve="onnx",
        golden=plain.golden(),
        evidence=[],
        lineage={},
        summary=Summary(recipe="tiny", recipe_digest=files.sha256_file(path)),
    )
    return seal(out, contents)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = recipe(tmp_path / "project")
    bundle_of(path, tmp_path / "tiny.bundle")
    return archive(tmp_path / "tiny.bundle", path, tmp_path / "store" / "tiny.mar", batch_size=4)


def handler(made: Path, folder: Path) -> tuple[RecipeHandler, Context]:
    found = unpack(made, folder)
    context = Context("tiny", str(found.folder), {}, 4, None, "0", True, MetricsStore("tiny"), {})
    answering = RecipeHandler()
    answering.initialize(context)
    return answering, context


def asked(answering: RecipeHandler, context: Context, *rows: Any, **headers: str) -> list[tuple[int, Any]]:
    context.request_processor = [RequestProcessor({"explain": "False", **headers}) for _ in rows]
    answers = answering.handle([{"body": row} for row in rows], context)
    return [
        (one.get_response_status_code(), answer) for one, answer in zip(context.request_processor, answers, strict=True)
    ]


def test_an_archive_holds_the_bundle_the_recipe_and_the_modules_it_imports(made: Path, tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(made).namelist())
    assert {"MAR-INF/MANIFEST.json", "recipe.py", "scale.py", "model.bundle/bundle.json"} <= names
    found = unpack(made, tmp_path / "laid")
    assert (found.manifest.model, found.config["batchSize"]) == ("tiny", 4)
    assert (
        open_bundle(found.folder / "model.bundle").digest
        == json.loads((found.folder / "MAR-INF/MANIFEST.json").read_text())["bundle"]
    )
    again = archive(tmp_path / "tiny.bundle", tmp_path / "project" / "recipe.py", tmp_path / "b.mar", batch_size=4)
    assert again.read_bytes() == made.read_bytes(), "equal parts make equal archives"


def test_an_archive_of_another_recipe_or_over_a_file_is_refused(made: Path, tmp_path: Path) -> None:
    other = recipe(tmp_path / "other", RECIPE.replace("* FACTOR", ""))
    with pytest.raises(UsageError, match="captured from another recipe"):
        archive(tmp_path / "tiny.bundle", other, tmp_path / "other.mar")
    assert archive(tmp_path / "tiny.bundle", other, tmp_path / "other.mar", any_recipe=True).exists()
    with pytest.raises(StorageError, match="exists already"):
        archive(tmp_path / "tiny.bundle", tmp_path / "project", made)
    with pytest.raises(UsageError, match=r"end in \.mar"):
        archive(tmp_path / "tiny.bundle", tmp_path / "project", tmp_path / "x.zip")


def test_an_archive_is_on_the_disk_before_its_name_and_one_that_cannot_be_written_leaves_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, asked = tmp_path / "project", list[str]()

    def recording(call: str, name: Callable[..., Any]) -> None:
        real = getattr(os, call)

        def recorded(*args: Any, **more: Any) -> Any:
            asked.append(f"{call} {Path(name(*args)).name}")
            return real(*args, **more)

        monkeypatch.setattr(os, call, recorded)

    recording("fsync", lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
    recording("replace", lambda _, target: target)
    archive(tmp_path / "tiny.bundle", project, tmp_path / "out" / "a.mar")
    assert [one.partition(files.PARTIAL)[0] for one in asked] == ["fsync ", "replace a.mar", "fsync out"]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="no room left"):
        archive(tmp_path / "tiny.bundle", project, tmp_path / "out" / "b.mar")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.mar"]


def test_requests_share_a_run_and_each_gets_its_own_answer(made: Path, tmp_path: Path) -> None:
    answering, context = handler(made, tmp_path / "laid")
    runs: list[int] = []
    session = answering._session

    class Counting:
        signature = session.signature

        def run(self, inputs: Any) -> Any:
            runs.append(len(inputs["x"]))
            return session.run(inputs)

    answering._session = Counting()  # type: ignore[assignment]
    found = asked(answering, context, {"row": [1, 2, 3]}, {"row": [0, 0, 0]}, {"row": [1, 0, 0]})
    assert runs == [3]
    assert found == [
        (200, {"sum": 123.0, "rows": 1, "each": [[21.0, 41.0, 61.0]]}),
        (200, {"sum": 3.0, "rows": 1, "each": [[1.0, 1.0, 1.0]]}),
        (200, {"sum": 23.0, "rows": 1, "each": [[21.0, 1.0, 1.0]]}),
    ]


def test_what_fails_fails_alone_and_says_whose_fault_it_is(made: Path, tmp_path: Path) -> None:
    answering, context = handler(made, tmp_path / "laid")
    found = asked(answering, context, {"row": [1, 2, 3]}, {"nothing": 1}, {"row": [1, 2]}, "crash")
    assert [status for status, _ in found] == [200, 400, 400, 500]
    assert found[1][1] == {"code": 400, "type": "BadRequestException", "message": "the request needs a row"}
    assert "input 'x' has size 2 in dimension 1, expected 3" in found[2][1]["message"]
    assert found[3][1] == {"code": 500, "type": "InternalServerException", "message": "preprocess failed"}


def test_without_functions_of_its_own_requests_are_records_as_json(tmp_path: Path) -> None:
    path = recipe(tmp_path / "project", RECIPE.partition("    def preprocess")[0])
    bundle_of(path, tmp_path / "tiny.bundle")
    answering, context = handler(archive(tmp_path / "tiny.bundle", path, tmp_path / "a.mar"), tmp_path / "laid")
    found = asked(answering, context, [1, 2, 3], {"x": [[0, 0, 0], [1, 1, 1]]}, b"[[4, 5, 6]]", {"y": 1})
    assert [json.loads(answer) if status == 200 else status for status, answer in found] == [
        [3.0, 5.0, 7.0],
        [[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]],
        [[9.0, 11.0, 13.0]],
        400,
    ]


def test_an_explanation_without_a_program_of_torch_is_refused_in_words(made: Path, tmp_path: Path) -> None:
    answering, context = handler(made, tmp_path / "laid")
    ((status, body),) = asked(answering, context, {"row": [1, 2, 3]}, explain="True")
    assert status == 500
    assert "has no program in format 'torch_export'" in body["message"]


def test_inputs_go_by_name_by_order_or_alone() -> None:
    signature = Signature(inputs=(bundles.spec("a", "batch", 2), bundles.spec("b", "batch")), outputs=(), dims={})
    by_name = inputs_by_name({"b": [1], "a": [[1, 2]]}, signature)
    assert list(by_name) == ["a", "b"]
    assert by_name["a"].dtype == np.float32
    assert inputs_by_name(([[1, 2]], np.ones(1)), signature)["b"].dtype == np.float64, "an array keeps its own dtype"
    with pytest.raises(ValueError, match="the model takes"):
        inputs_by_name({"a": [[1, 2]]}, signature)
    with pytest.raises(ValueError, match="returned 1 inputs"):
        inputs_by_name([[1, 2]], signature)


@pytest.fixture
def recipe_server(made: Path, tmp_path: Path) -> Iterator[serve.RunningServer]:
    with servers.running(store=made.parent, load="tiny", allow_code=True, state=tmp_path / "s") as server:
        yield server


@pytest.mark.slow
def test_a_server_answers_with_the_recipes_own_code(recipe_server: serve.RunningServer) -> None:
    with httpx.Client(base_url=recipe_server.url, timeout=120) as client:
        good = client.post("/predictions/tiny", json={"row": [1, 2, 3]})
        assert (good.status_code, good.json()["sum"]) == (200, 123.0)
        bad = client.post("/predictions/tiny", json={"nothing": 1})
        assert (bad.status_code, bad.json()["message"]) == (400, "the request needs a row")
        assert client.post("/predictions/tiny", json={"row": [0, 0, 0]}).json()["rows"] == 1
