"""A bundle that is registered is found again by version and alias, whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest

from trueline.bundle import open_bundle, signing
from trueline.capture.api import capture
from trueline.columns import answers
from trueline.errors import BundleError, RegistryError, RequestError, StorageError, UsageError
from trueline.registry import RunFacts, add, describe, find, register, resolve, store, versions
from trueline.registry import __main__ as child
from trueline.registry.flavor import BundleModel
from trueline.runtime.open import open_program
from worlds import bundles
from worlds.columns import recipe_in, table_of, write_tables
from worlds.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory, new_registry: Callable[[Path], str]) -> Path:
    """A store with model `double`, versions 1 (alias first) and 2 (alias champion)."""
    folder = tmp_path_factory.mktemp("registry")
    new_registry(folder)
    bundles.scaled(folder / "two.bundle")
    bundles.scaled(folder / "three.bundle", scale=3.0)
    facts = RunFacts(params={"epochs": 3, "optimizer": "Adam"}, metrics={"accuracy": 0.98}, tags={"team": "vision"})
    register(folder / "two.bundle", alias="first", tracking_uri=uri(folder), run=facts)
    register(folder / "three.bundle", name="double", tracking_uri=uri(folder))
    return folder


def uri(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def test_versions_and_aliases_lead_to_the_bundle_that_was_registered(registered: Path) -> None:
    for name, scale in (("double@first", 2.0), ("double/1", 2.0), ("double@champion", 3.0), ("double/latest", 3.0)):
        found = resolve(f"models:/{name}", tracking_uri=uri(registered))
        x = np.ones((1, 4), np.float32)
        bundle = open_bundle(found.path)
        assert bundle.digest == found.digest
        assert open_program(bundle).run({"x": x})["y"].tolist() == [[scale] * 4]
        assert found.name == "double"


def test_versions_are_listed_newest_first_with_digest_and_aliases(registered: Path) -> None:
    newest, oldest = versions("double", tracking_uri=uri(registered))
    assert (newest.version, newest.aliases, newest.uri) == (2, ("champion",), "models:/double/2")
    assert (oldest.version, oldest.aliases) == (1, ("first",))
    assert len(oldest.digest) == 64
    assert oldest.digest != newest.digest


@pytest.mark.parametrize(
    ("asked", "message", "hint"),
    [
        (
            "models:/dubble@champion",
            r"no model 'dubble' is registered in .*mlflow\.db \(has: double",
            "did you mean 'double'?",
        ),
        ("models:/double@chanpion", r"no alias 'chanpion' \(has: champion, first\)", "did you mean 'champion'?"),
        ("models:/double@zzz", r"no alias 'zzz'", "--alias zzz"),
        ("models:/double/7", r"no version 7 \(has: 1, 2\)", "one of these"),
    ],
)
def test_what_is_not_there_is_an_error_that_lists_what_is(
    registered: Path, asked: str, message: str, hint: str
) -> None:
    with pytest.raises(RegistryError, match=message) as caught:
        resolve(asked, tracking_uri=uri(registered))
    assert hint in caught.value.hint


@pytest.mark.parametrize("asked", ["double", "models:/double", "models:/a/b/c", "runs:/1/model", "models:/@x"])
def test_what_names_no_registered_model_is_a_usage_error(registered: Path, asked: str) -> None:
    with pytest.raises(UsageError, match="names no registered model"):
        resolve(asked, tracking_uri=uri(registered))


def test_the_run_holds_parameters_metrics_and_digests_and_the_model(registered: Path) -> None:
    with store.open_store(uri(registered)) as client:
        version = client.get_model_version("double", "1")
        run = client.get_run(version.run_id)
        model = client.get_logged_model(run.outputs.model_outputs[0].model_id)
    assert run.data.params == {"epochs": "3", "optimizer": "Adam"}
    assert run.data.metrics == {"accuracy": 0.98}
    assert run.data.tags["team"] == "vision"
    assert run.data.tags["trueline.bundle_digest"] == version.tags["trueline.bundle_digest"]
    assert version.tags["trueline.recipe_digest"] == "a" * 64
    assert (run.info.status, str(model.status)) == ("FINISHED", "READY")
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "double", "version": "1"}]


def test_the_run_has_the_data_set_and_the_evidence_and_the_version_its_lineage_in_words(registered: Path) -> None:
    with store.open_store(uri(registered)) as client:
        version = client.get_model_version("double", "1")
        run = client.get_run(version.run_id)
        files = {entry.path for entry in client.list_artifacts(run.info.run_id, "evidence")}
    (used,) = run.inputs.dataset_inputs
    assert {tag.key for tag in used.tags} == {"mlflow.data.context"}
    assert {"evidence/evidence.jsonl", "evidence/lineage.json"} <= files
    assert "proven on" in version.description
    assert version.tags["trueline.bundle_digest"] in version.description


def test_a_bundle_without_a_signature_is_not_registered(tmp_path: Path) -> None:
    bundle = SimpleNamespace(name="b", signature=SimpleNamespace(inputs=(), outputs=()))
    with pytest.raises(RegistryError, match="has no signature"):
        describe.signature_of(bundle)  # type: ignore[arg-type]


def test_the_requirements_of_a_model_name_what_runs_it_and_where_trueline_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundles.scaled(tmp_path / "b.bundle")
    origin = {"url": "https://host/t.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}
    monkeypatch.setattr(describe, "distribution", lambda _: SimpleNamespace(read_text=lambda _: json.dumps(origin)))
    first, *rest = describe.requirements_of(bundle)
    assert first == "trueline @ git+https://host/t.git@c0ffee"
    assert all("+" not in line for line in rest)
    assert any(line.startswith("mlflow==") for line in rest)
    monkeypatch.setattr(describe, "distribution", lambda _: SimpleNamespace(read_text=lambda _: None))
    assert describe.requirements_of(bundle)[0].startswith("trueline==")


def test_mlflow_loads_the_model_and_answers_through_the_proven_program(
    registered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri(registered))
    with store.open_store(uri(registered)), warnings.catch_warnings(action="ignore"):
        import mlflow

        model = mlflow.pyfunc.load_model("models:/double@champion")
        assert model.predict(np.ones((1, 4), np.float32)).tolist() == [[3.0] * 4]
        assert model.predict({"x": np.ones((2, 4), np.float32)}).tolist() == [[3.0] * 4] * 2
        table = pandas.DataFrame({"x": [np.ones(4), np.full(4, 2.0)]})  # 64-bit numbers, as pandas has them
        assert model.predict(table).tolist() == [[3.0] * 4, [6.0] * 4]
        assert model.predict(model.input_example) is not None
        assert model.metadata.get_input_schema().input_names() == ["x"]
        assert model.metadata.get_output_schema().inputs[0].shape == (-1, 4)
        with pytest.raises(RequestError, match=r"input 'x' has size 9 in dimension 0 \(batch\), proven only for"):
            model.predict(np.ones((9, 4), np.float32))


def test_a_model_with_columns_takes_a_table_of_records_and_answers_as_the_server_does(
    tmp_path: Path, new_registry: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_registry(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri(tmp_path))
    recipe = recipe_in(write_tables(tmp_path))
    capture(recipe, None, tmp_path / "income.bundle", formats=["onnx"])
    with warnings.catch_warnings(action="ignore"):  # MLflow compares names of columns with a range
        register(tmp_path / "income.bundle", tracking_uri=uri(tmp_path))
    table = table_of(seed=1, count=40).to_pandas()  # with empty cells; whole numbers are fractions in pandas then
    fitted = recipe.with_columns().fitted
    assert fitted is not None
    session = open_program(open_bundle(tmp_path / "income.bundle"))
    expected = answers.records_of(fitted, session.run(fitted.encode_table(table_of(seed=1, count=40))[0]))
    with store.open_store(uri(tmp_path)) as client, warnings.catch_warnings(action="ignore"):
        import mlflow

        model = mlflow.pyfunc.load_model("models:/income@champion")
        assert model.predict(table).to_dict("records") == expected
        assert model.predict(table[["age", "review"]].iloc[:1]).to_dict("records")  # what is optional may be left out
        assert list(model.predict(model.input_example).columns) == ["class", "probabilities"]
        described = {one.name: (str(one.type), one.required) for one in model.metadata.get_input_schema().inputs}
        assert described["age"] == ("DataType.double", False)
        assert described["visits"] == ("Any", False)  # with empty cells, whole numbers or fractions
        assert described["spent"] == ("Any", False)
        assert described["city"] == described["review"] == ("DataType.string", False)
        assert model.metadata.get_output_schema().input_names() == ["class", "probabilities"]
        with pytest.raises(RequestError, match="column 'visits' of record 0: expected a number, got the text 'many'"):
            model.predict(table.assign(visits="many"))
        version = client.get_model_version("income", "1")
        run = client.get_run(version.run_id)
    assert "| columns | age, visits, city, review, spent → income |" in version.description
    (used,) = run.inputs.dataset_inputs
    names = [one["name"] for one in json.loads(used.dataset.schema)["mlflow_colspec"]]
    assert names == ["age", "visits", "city", "review", "spent", "income"]


def test_the_pyfunc_takes_arrays_and_dicts_and_never_floats_for_integers(tmp_path: Path) -> None:
    model = BundleModel(open_program(bundles.scaled(tmp_path / "b.bundle")))
    assert model.predict([[1.0, 2.0, 3.0, 4.0]]).tolist() == [[2.0, 4.0, 6.0, 8.0]]
    with pytest.raises(RequestError, match="unexpected input 'z'"):
        model.predict({"z": np.ones((1, 4))})
    with pytest.raises(RequestError, match="takes no parameters"):
        model.predict(np.ones((1, 4)), params={"temperature": 1})
    with pytest.raises(RequestError, match="datatype"):
        model.predict(np.array([["a", "b", "c", "d"]]))


def test_a_store_that_was_tampered_with_is_an_error_and_never_an_answer(
    tmp_path: Path, new_registry: Callable[[Path], str]
) -> None:
    new_registry(tmp_path)
    bundles.scaled(tmp_path / "b.bundle")
    register(tmp_path / "b.bundle", tracking_uri=uri(tmp_path))
    stored = resolve("models:/double@champion", tracking_uri=uri(tmp_path)).path
    program = stored / "programs" / "model.onnx"
    whole = program.read_bytes()
    program.write_bytes(whole[:-1] + b"?")
    with pytest.raises(BundleError, match=r"model\.onnx was changed after it was sealed"):
        resolve("models:/double@champion", tracking_uri=uri(tmp_path))
    for file in sorted(stored.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    stored.rmdir()
    bundles.scaled(stored, scale=5.0)
    with pytest.raises(BundleError, match="is not the one that was registered"):
        resolve("models:/double@champion", tracking_uri=uri(tmp_path))


def test_a_torn_bundle_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    bundles.scaled(tmp_path / "b.bundle")
    (tmp_path / "b.bundle" / "lineage.json").write_text("{}")
    with pytest.raises(BundleError):
        register(tmp_path / "b.bundle", tracking_uri=uri(tmp_path))
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize("name", ["a/b", "a@b", "a:b", ""])
def test_a_name_that_no_uri_could_say_is_refused(tmp_path: Path, name: str) -> None:
    bundles.scaled(tmp_path / "b.bundle")
    with pytest.raises(UsageError, match="cannot name a registered model"):
        register(tmp_path / "b.bundle", name=name, tracking_uri=uri(tmp_path))


def test_the_child_process_says_one_line_of_json(registered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert child.main(["resolve", "models:/double@first", "--tracking-uri", uri(registered)]) == 0
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    found = json.loads(line)
    assert set(found) == {"path", "name", "version", "digest"}
    assert (found["name"], found["version"]) == ("double", 1)
    assert said.err == ""


def test_the_child_process_says_its_errors_as_one_line_of_json(
    registered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert child.main(["resolve", "models:/double/9", "--tracking-uri", uri(registered)]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["error"], said["message"]) == ("registry", "model 'double' has no version 9 (has: 1, 2)")
    assert said["hint"]


@pytest.mark.long
def test_registering_is_quiet_needs_no_torch_and_defaults_to_the_current_folder(
    registered: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from trueline.registry import register, resolve;"
        f"print(register({str(registered / 'two.bundle')!r}).uri, resolve('models:/double@champion').version);"
        "assert 'torch' not in sys.modules"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert (found.stdout, found.stderr) == ("models:/double/1 1\n", "")
    assert {entry.name for entry in tmp_path.iterdir()} == {"mlflow.db", "mlruns"}


@pytest.mark.long
def test_processes_that_register_at_once_all_get_a_version_of_their_own(tmp_path: Path) -> None:
    bundles.scaled(tmp_path / "b.bundle")
    code = f"from trueline.registry import register; print(register({str(tmp_path / 'b.bundle')!r}).version)"
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri(tmp_path)}
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(4)
    ]
    answers = [one.communicate(timeout=280)[0] for one in children]
    said = sorted(int(answer or 0) for answer in answers)
    assert said == [1, 2, 3, 4]
    found = versions("double", tracking_uri=uri(tmp_path))
    assert [one.version for one in found] == [4, 3, 2, 1]
    assert sum("champion" in one.aliases for one in found) == 1
    for one in found:
        assert resolve(one.uri, tracking_uri=uri(tmp_path)).digest == found[0].digest


@pytest.mark.jobs
@pytest.mark.line
def test_a_server_stores_the_bundle_and_hands_it_out_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundles.scaled(tmp_path / "b.bundle")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", uri(tmp_path), "--artifacts-destination", str(tmp_path / "artifacts")]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *store],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # half a dozen processes more
    )
    try:
        where = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            assert server.poll() is None
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{where}/health", timeout=60):
                return True
            return False

        until(healthy, "MLflow's server answers")
        version = register(tmp_path / "b.bundle", tracking_uri=where)
        for _ in range(2):
            found = resolve("models:/double@champion", tracking_uri=where)
            assert found.digest == version.digest
            assert tmp_path / "cache" in found.path.parents
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=100)


def test_an_alias_stays_where_it_was_when_a_version_cannot_be_added(
    tmp_path: Path, new_registry: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_registry(tmp_path)
    bundles.scaled(tmp_path / "one.bundle")
    bundles.scaled(tmp_path / "two.bundle", scale=3.0)
    register(tmp_path / "one.bundle", tracking_uri=uri(tmp_path))
    register(tmp_path / "two.bundle", tracking_uri=uri(tmp_path))
    before = versions("double", tracking_uri=uri(tmp_path))

    def full(*_: object, **__: object) -> None:
        raise StorageError("no space left on the device")

    monkeypatch.setattr(add, "_add_version", full)
    with pytest.raises(StorageError):
        register(tmp_path / "one.bundle", tracking_uri=uri(tmp_path))
    assert versions("double", tracking_uri=uri(tmp_path)) == before
    assert [one.aliases for one in before] == [("champion",), ()]
    with store.open_store(uri(tmp_path)) as client:
        experiment = client.get_experiment_by_name("double")
        assert experiment is not None
        states = [run.info.status for run in client.search_runs([experiment.experiment_id])]
    assert sorted(states) == ["FAILED", "FINISHED", "FINISHED"]


def listing(*numbers: int) -> list[find.ModelVersion]:
    """Versions of `double` as the registry lists them; the lowest is the champion, and the third was not made here."""
    return [
        find.ModelVersion(
            name="double",
            version=number,
            digest="" if number == 3 else f"d{number}",
            aliases=("champion",) if number == min(numbers) else (),
            created="",
            run_id="",
        )
        for number in numbers
    ]


def test_the_latest_version_is_the_highest_number_and_not_the_last_by_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {str(one.version): one for one in listing(2, 10, 9, 1)}

    class Client:
        tracking_uri = "here"

        def get_registered_model(self, name: str) -> None:
            assert name == "double"

        def search_model_versions(self, query: str) -> list[find.ModelVersion]:
            return list(made.values())

        def get_model_version(self, name: str, version: object) -> find.ModelVersion:
            return made[str(version)]

    monkeypatch.setattr(find, "to_version", lambda found: found)
    found = find._versions(Client(), "double")  # type: ignore[arg-type]
    assert [one.version for one in found] == [10, 9, 2, 1]
    picked = [find._pick(found, None, "latest"), find._pick(found, None, "1"), find._pick(found, "champion", None)]
    assert [one.version for one in picked] == [10, 1, 1]


def test_a_version_that_trueline_did_not_register_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "open_store", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(find, "_versions", lambda client, name: listing(3))
    with pytest.raises(RegistryError, match="was not registered by Trueline"):
        resolve("models:/double/3")


def test_a_version_brings_the_signature_that_lay_beside_its_bundle(
    tmp_path: Path, new_registry: Callable[[Path], str]
) -> None:
    new_registry(tmp_path)
    bundle = bundles.scaled(tmp_path / "b.bundle")
    assert register(tmp_path / "b.bundle", tracking_uri=uri(tmp_path)).signature == ""
    signing.place_of(bundle.path).write_text("trueline-signature-1 ab cd\n")
    assert register(tmp_path / "b.bundle", tracking_uri=uri(tmp_path)).signature == "trueline-signature-1 ab cd"
    assert resolve("models:/double/2", tracking_uri=uri(tmp_path)).signature == "trueline-signature-1 ab cd"


def test_a_download_that_breaks_off_leaves_nothing_that_a_later_one_takes_for_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (version,) = listing(2)

    def broken(where: str, *, dst_path: str, tracking_uri: str) -> None:
        (Path(dst_path) / "bundle").mkdir()
        (Path(dst_path) / "bundle" / "bundle.json").write_text("{")
        raise ConnectionError("the line is dead")

    monkeypatch.setattr("mlflow.artifacts.download_artifacts", broken)

    class Client:
        tracking_uri = "http://registry"

    with pytest.raises(StorageError, match="the line is dead"):
        find._download(Client(), version, "models")  # type: ignore[arg-type]
    assert [*(tmp_path / "trueline" / "bundles").iterdir()] == []


@pytest.mark.parametrize("digest", ["../../outside", "/etc", "0" * 63, "0" * 64 + "\n", "A" * 64, "models:/x"])
def test_a_digest_in_the_registry_that_is_none_names_no_folder(digest: str) -> None:
    """CVE-2025-11201 and CVE-2026-47487 are of this class: a word of the registry that becomes a path."""
    found = SimpleNamespace(
        name="double", version="3", creation_timestamp=0, tags={store.DIGEST_TAG: digest}, aliases=[]
    )
    with pytest.raises(RegistryError, match="which is no SHA-256"):
        find.to_version(found)


@pytest.mark.parametrize(
    "error", [OSError("no route to postgresql://ann:hunter2@db/x"), ValueError("token=hunter2 is bad")]
)
def test_an_error_of_the_registry_names_no_password(error: Exception) -> None:
    told = store._translate(error, "postgresql://ann:hunter2@db/mlflow?password=hunter2").message
    assert "hunter2" not in told
