"""Versions come, take over and leave without a request lost, and a restart brings back what was served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline import files
from trueline.errors import NotFound, StorageError, UsageError
from trueline.serve.models import desired_state
from trueline.serve.models.sources import Store
from trueline.serve.models.split import Split, place
from worlds import bundles
from worlds.servers import StoreApp


@pytest.fixture(scope="module")
def bundle_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store: tiny.bundle, and two versions of `pair`; `wrong.bundle` does not answer its golden record."""
    folder = bundles.store(tmp_path_factory.mktemp("store"), "tiny", "pair/1", "pair/2")
    bundles.double_plus(folder / "wrong.bundle", wrong=True)
    return folder


@pytest.fixture
def store_app(bundle_store: Path) -> Iterator[StoreApp]:
    with StoreApp(bundle_store) as made:
        yield made


def test_a_model_is_registered_scaled_made_default_and_unregistered_in_torchserves_words(store_app: StoreApp) -> None:
    assert store_app.manage("POST", "/models?url=tiny.bundle") == (
        200,
        {
            "status": 'Model "tiny" Version: 1 registered with 0 initial workers. Use scale workers API to add workers '
            "for the model."
        },
    )
    status, said = store_app.ask("POST", "/predictions/tiny", b"[1, 2, 3]")
    assert status == 503
    assert said["message"].startswith('Model "tiny" has no worker to serve inference request.')
    assert store_app.manage("PUT", "/models/tiny?min_worker=2&synchronous=true") == (
        200,
        {"status": "Workers scaled to 2 for model: tiny"},
    )
    assert store_app.ask("POST", "/predictions/tiny", b"[1, 2, 3]") == (200, [3.0, 5.0, 7.0])
    url = "/models?url=pair/2.bundle&model_name=tiny&model_version=2.0&initial_workers=1"
    assert store_app.manage("POST", url) == (
        200,
        {"status": 'Model "tiny" Version: 2.0 registered with 1 initial workers'},
    )
    assert store_app.models.default("tiny") == "1"
    assert store_app.manage("DELETE", "/models/tiny/1")[0] == 403
    assert store_app.manage("PUT", "/models/tiny/2.0/set-default") == (
        200,
        {"status": 'Default version successfully updated for model "tiny" to "2.0"'},
    )
    assert store_app.manage("DELETE", "/models/tiny/1") == (200, {"status": 'Model "tiny" unregistered'})
    status, told = store_app.manage("GET", "/models/tiny/all")
    assert [one["modelVersion"] for one in told] == ["2.0"]
    assert told[0]["modelUrl"] == "pair/2.bundle"
    assert told[0]["workers"][0]["status"] == "READY"
    assert store_app.manage("GET", "/models") == (200, {"models": [{"modelName": "tiny", "modelUrl": "pair/2.bundle"}]})
    assert store_app.manage("DELETE", "/models/tiny")[0] == 200
    assert store_app.manage("GET", "/models") == (200, {"models": []})


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/models", 400, "Parameter url is required."),
        ("POST", "/models?url=", 404, "empty url"),
        ("POST", "/models?url=../tiny.bundle", 404, "Relative path is not allowed in url: ../tiny.bundle"),
        ("POST", "/models?url=%2Fetc%2Fpasswd", 404, "Relative path is not allowed in url: /etc/passwd"),
        ("POST", "/models?url=..%2f..%2fetc", 404, "Relative path is not allowed in url: ../../etc"),
        ("POST", "/models?url=a/b/c", 404, "Relative path is not allowed in url: a/b/c"),
        ("POST", "/models?url=nope.bundle", 404, "Model not found at: nope.bundle"),
        ("POST", "/models?url=tiny.bundle&model_name=a%2Fb", 400, "model 'a/b' is no name here"),
        ("POST", "/models?url=wrong.bundle", 400, "fails golden record"),
        ("PUT", "/models/zzz?min_worker=1", 404, "Model not found: zzz"),
        ("PUT", "/models/zzz/9/set-default", 404, "Model not found: zzz"),
        ("DELETE", "/models/zzz", 404, "Model not found: zzz"),
        ("GET", "/models/zzz", 404, "Model not found: zzz"),
        ("PATCH", "/models/zzz", 405, "Requested method is not allowed"),
        ("GET", "/nope", 404, "Requested resource is not found"),
    ],
)
def test_a_managers_mistake_is_a_4xx_that_changes_nothing(
    store_app: StoreApp, method: str, path: str, status: int, message: str
) -> None:
    found, said = store_app.manage(method, path)
    assert found == status
    assert said["code"] == status
    assert message in said["message"]
    assert str(store_app.store.folder) not in said["message"]
    assert store_app.models.names() == []


def test_a_link_out_of_the_store_leads_nowhere(tmp_path: Path, bundle_store: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "out.bundle").symlink_to(bundle_store / "tiny.bundle")
    with pytest.raises(NotFound, match="not allowed"):
        Store(folder).find("out.bundle")
    assert Store(folder).entries() == []


def test_the_same_version_twice_is_a_conflict_and_bad_numbers_are_said(store_app: StoreApp) -> None:
    assert store_app.manage("POST", "/models?url=tiny.bundle&initial_workers=1")[0] == 200
    assert store_app.manage("POST", "/models?url=tiny.bundle") == (
        409,
        {
            "code": 409,
            "type": "ConflictStatusException",
            "message": "Model version 1 is already registered for model tiny",
        },
    )
    assert store_app.manage("PUT", "/models/tiny?min_worker=3&max_worker=1")[1]["message"] == (
        "max_worker cannot be less than min_worker."
    )
    assert store_app.manage("PUT", "/models/tiny?min_worker=-1")[0] == 400
    assert store_app.manage("PUT", "/models/tiny/9/set-default")[1]["message"] == (
        "Model version 9 does not exist for model tiny"
    )
    assert store_app.ask("POST", "/predictions/tiny", b"[1, 2, 3]")[0] == 200


def test_a_version_that_fails_its_golden_example_leaves_the_old_one_serving(
    store_app: StoreApp, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(store_app.store.folder / "tiny.bundle", folder / "tiny.bundle")
    mine = StoreApp(folder)
    assert mine.ask("POST", "/v2/repository/models/tiny/load")[0] == 200
    shutil.rmtree(folder / "tiny.bundle")
    shutil.copytree(store_app.store.folder / "wrong.bundle", folder / "tiny.bundle")
    status, said = mine.ask("POST", "/v2/repository/models/tiny/load")
    assert status == 400
    assert "fails golden record" in said["error"]
    assert mine.ask("POST", "/predictions/tiny", b"[1, 2, 3]") == (200, [3.0, 5.0, 7.0])
    mine.close()


def test_a_reload_answers_what_the_old_version_was_asked(store_app: StoreApp) -> None:
    assert store_app.manage("POST", "/models?url=pair/1.bundle&model_name=pair&initial_workers=1")[0] == 200
    old = store_app.models.find("pair")
    assert old._batcher is not None
    waiting = old._batcher.submit({"x": np.zeros((1, 3), np.float32)}, 1, "k")
    assert store_app.ask("POST", "/v2/repository/models/pair/load") == (200, None)
    assert store_app.run(waiting)["y"].tolist() == [[1.0, 1.0, 1.0]]
    assert store_app.models.versions("pair") == ["2"]
    assert store_app.models.default("pair") == "2"
    assert old.state == "retiring"
    assert store_app.ask("POST", "/v2/repository/index") == (
        200,
        [{"name": "pair", "version": "2", "state": "READY", "reason": ""}],
    )
    assert store_app.ask("POST", "/v2/repository/models/pair/unload") == (200, None)
    assert store_app.ask("POST", "/v2/repository/models/pair/unload")[0] == 404
    assert store_app.ask("POST", "/v2/repository/models/zzz/load")[0] == 404
    refused = store_app.ask("POST", "/v2/repository/models/pair/load", b'{"parameters": {"config": "{}"}}')
    assert refused[0] == 400


def test_a_retiring_version_holds_on_until_its_last_request_is_answered(store_app: StoreApp) -> None:
    store_app.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
    version = store_app.models.find("tiny")
    assert version._batcher is not None
    waiting = [version._batcher.submit({"x": np.full((1, 3), i, np.float32)}, 1, "k") for i in range(5)]
    assert store_app.manage("DELETE", "/models/tiny")[0] == 200
    assert all(one.done() for one in waiting)
    assert [one.result()["y"][0, 0] for one in waiting] == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert store_app.ask("POST", "/predictions/tiny", b"[1, 2, 3]")[0] == 404


def test_traffic_goes_by_weight_and_one_key_goes_one_way(store_app: StoreApp) -> None:
    for version in ("1", "2"):
        store_app.manage("POST", f"/models?url=pair/{version}.bundle&model_name=pair&initial_workers=1")
    assert store_app.manage("PUT", "/models/pair/split?1=3&2=1") == (
        200,
        {"status": 'Traffic of model "pair" is split: 1: 3, 2: 1'},
    )
    split = store_app.models.split("pair")
    assert split is not None
    keys = [f"user-{i}" for i in range(400)]
    second = {key for key in keys if split.choose(key) == "2"}
    assert 60 <= len(second) <= 140
    wider = Split({"1": 1, "2": 1})
    assert second <= {key for key in keys if wider.choose(key) == "2"}
    key = min(second)
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}).encode()
    for _ in range(3):
        assert store_app.ask("POST", "/v2/models/pair/infer", body, x_trueline_key=key)[1]["model_version"] == "2"
    assert store_app.manage("PUT", "/models/pair/split?1=x")[0] == 400
    assert store_app.manage("PUT", "/models/pair/split?1=0&2=0")[0] == 400
    assert store_app.manage("PUT", "/models/pair/split?9=1")[0] == 404
    store_app.manage("PUT", "/models/pair/1/set-default")
    assert store_app.models.split("pair") is None


@given(
    weights=st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any),
    grown=st.integers(0, 3),
    key=st.text(min_size=1, max_size=5),
)
def test_when_one_weight_grows_keys_move_to_that_version_only(weights: list[int], grown: int, key: str) -> None:
    before = Split({str(i): weight for i, weight in enumerate(weights)})
    more = str(grown % len(weights))
    after = Split({**before.weights, more: before.weights[more] + 5})
    assert after.choose(key) in (before.choose(key), more)
    assert 0 < place(key) < 1


def test_a_restart_brings_back_versions_default_split_and_workers(bundle_store: Path, tmp_path: Path) -> None:
    state = tmp_path / "served.json"
    first = StoreApp(bundle_store, state=state)
    for version in ("1", "2"):
        first.manage("POST", f"/models?url=pair/{version}.bundle&model_name=pair&initial_workers=1")
    first.manage("PUT", "/models/pair/1?min_worker=3")
    first.manage("PUT", "/models/pair/2/set-default")
    first.manage("PUT", "/models/pair/split?1=1&2=9")
    first.close()
    second = StoreApp(bundle_store, state=state)
    assert second.run(second.fleet.restore(desired_state.read(state), second.find)) == []
    assert second.models.default("pair") == "2"
    assert second.models.find("pair", "1").policy.lanes == 3
    split = second.models.split("pair")
    assert split is not None
    assert dict(split.weights) == {"1": 1.0, "2": 9.0}
    assert second.fleet.desired_state() == desired_state.read(state)
    second.close()


def test_a_bundle_that_was_exchanged_since_is_not_restored_and_not_forgotten(
    bundle_store: Path, tmp_path: Path
) -> None:
    folder, state = tmp_path / "store", tmp_path / "served.json"
    shutil.copytree(bundle_store / "tiny.bundle", folder / "tiny.bundle")
    first = StoreApp(folder, state=state)
    first.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
    first.close()
    shutil.rmtree(folder / "tiny.bundle")
    bundles.double_plus(folder / "tiny.bundle", max_rows=4)
    second = StoreApp(folder, state=state)
    missing = second.run(second.fleet.restore(desired_state.read(state), second.find))
    assert len(missing) == 1
    assert missing[0].startswith("tiny version 1:")
    assert not second.models.ready
    assert second.ask("POST", "/predictions/tiny", b"[1, 2, 3]")[0] == 503
    assert second.fleet.desired_state() == desired_state.read(state)
    second.close()


def test_a_bundle_that_vanishes_from_the_store_is_served_on_and_missed_where_it_is_asked_for(
    bundle_store: Path, tmp_path: Path
) -> None:
    folder, state = tmp_path / "store", tmp_path / "served.json"
    shutil.copytree(bundle_store / "tiny.bundle", folder / "tiny.bundle")
    app = StoreApp(folder, state=state)
    assert app.manage("POST", "/models?url=tiny.bundle&initial_workers=1")[0] == 200
    shutil.rmtree(folder / "tiny.bundle")
    assert app.ask("POST", "/predictions/tiny", b"[1, 2, 3]") == (200, [3.0, 5.0, 7.0])
    status, said = app.manage("POST", "/models?url=tiny.bundle&model_version=2&initial_workers=1")
    assert (status, said["message"]) == (404, "Model not found at: tiny.bundle")
    assert app.ask("POST", "/v2/repository/models/tiny/load")[0] == 404
    assert app.ask("POST", "/predictions/tiny", b"[1, 2, 3]") == (200, [3.0, 5.0, 7.0])
    app.close()
    later = StoreApp(folder, state=state)
    missing = later.run(later.fleet.restore(desired_state.read(state), later.find))
    assert missing == ["tiny version 1: Model not found at: tiny.bundle"]
    assert later.ask("GET", "/v2/health/ready")[0] == 503
    assert later.ask("POST", "/predictions/tiny", b"[1, 2, 3]")[0] == 503
    assert later.fleet.desired_state() == desired_state.read(state), "it is wanted on"
    later.close()


def test_the_default_version_stays_while_there_are_others(store_app: StoreApp) -> None:
    for version in ("1", "2"):
        assert (
            store_app.manage("POST", f"/models?url=pair/{version}.bundle&model_name=pair&initial_workers=1")[0] == 200
        )
    status, said = store_app.manage("DELETE", "/models/pair/1")
    assert (status, said["type"]) == (403, "InvalidModelVersionException")
    assert said["message"].startswith("Cannot remove default version for model pair; set another")
    assert store_app.manage("DELETE", "/models/pair") == (status, said), "the default, when none is named"
    assert store_app.models.versions("pair") == ["1", "2"]
    assert store_app.manage("DELETE", "/models/pair/2")[0] == 200
    assert store_app.manage("DELETE", "/models/pair/1")[0] == 200


def test_models_are_listed_by_name_in_pages(store_app: StoreApp) -> None:
    for name in ("c", "a", "b"):
        assert store_app.manage("POST", f"/models?url=tiny.bundle&model_name={name}")[0] == 200
    first = store_app.manage("GET", "/models?limit=2")[1]
    assert [one["modelName"] for one in first["models"]] == ["a", "b"]
    second = store_app.manage("GET", f"/models?limit=2&next_page_token={first['nextPageToken']}")[1]
    assert [one["modelName"] for one in second["models"]] == ["c"]
    assert "nextPageToken" not in second
    for odd in ("limit=0", "limit=500", "limit=x&next_page_token=y", "next_page_token=-3"):
        assert len(store_app.manage("GET", f"/models?{odd}")[1]["models"]) == 3


def test_an_act_that_cannot_be_written_down_is_undone(
    bundle_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = StoreApp(bundle_store, state=tmp_path / "served.json")
    for version in ("1", "2"):
        app.manage("POST", f"/models?url=pair/{version}.bundle&model_name=pair&initial_workers=1")

    def full(*args: object, **more: object) -> None:
        raise StorageError("no space left on the device")

    monkeypatch.setattr(files, "write_atomic", full)
    before = app.fleet.desired_state()
    assert app.manage("POST", "/models?url=tiny.bundle")[0] >= 400
    assert app.manage("PUT", "/models/pair/2/set-default")[0] >= 400
    assert app.manage("PUT", "/models/pair/split?1=1&2=1")[0] >= 400
    assert app.manage("PUT", "/models/pair/1?min_worker=5")[0] >= 400
    assert app.manage("DELETE", "/models/pair")[0] >= 400
    assert app.fleet.desired_state() == before
    assert app.models.find("pair", "1").policy.lanes == 1
    assert app.ask("POST", "/predictions/pair", b"[1, 2, 3]")[0] == 200
    app.close()


def test_a_model_that_is_loaded_beside_others_does_not_take_the_server_out_of_service(store_app: StoreApp) -> None:
    assert not store_app.models.ready
    store_app.models.started = True
    assert store_app.models.ready
    store_app.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
    loading = store_app.models.add("other", "1")
    assert store_app.models.ready
    loading.fail("it is torn")
    assert not store_app.models.ready


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no state file"),
        ('{"schema": 9, "models": {}}', "schema 9"),
        ('{"schema": 1, "models": {"a": {"versions": {}, "default": "1"}}}', "version '1' of 'a'"),
    ],
)
def test_a_state_file_that_is_none_is_one_clear_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        desired_state.read(tmp_path / "s.json")
    assert desired_state.read(tmp_path / "absent.json") == desired_state.DesiredState()


def test_statistics_and_configuration_are_what_tritons_tools_read(store_app: StoreApp) -> None:
    store_app.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
    for _ in range(3):
        store_app.ask("POST", "/predictions/tiny", b"[[1, 2, 3], [4, 5, 6]]")
    status, told = store_app.ask("GET", "/v2/models/tiny/stats")
    assert status == 200
    (stats,) = told["model_stats"]
    assert (stats["inference_count"], stats["execution_count"]) == (6, 3)
    assert stats["inference_stats"]["success"]["count"] == 3
    assert stats["inference_stats"]["success"]["ns"] >= stats["inference_stats"]["compute_infer"]["ns"] > 0
    assert stats["batch_stats"][0]["batch_size"] == 2
    assert stats["last_inference"] > 1.7e12
    assert store_app.ask("GET", "/v2/models/stats")[1] == store_app.ask("GET", "/v2/models/tiny/versions/1/stats")[1]
    assert store_app.ask("GET", "/v2/models/tiny/versions//stats")[0] == 404
    config = store_app.ask("GET", "/v2/models/tiny/config")[1]
    assert config["max_batch_size"] == 64
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}]
    assert store_app.ask("GET", "/v2/models/zzz/config")[0] == 404


def test_every_path_of_the_openapi_documents_is_answered_as_they_say(store_app: StoreApp) -> None:
    store_app.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
    x = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
    bodies = {"infer": {"inputs": [x]}, "predict": {"instances": [[1, 2, 3]]}, "index": {}}
    status, told = store_app.ask("GET", "/openapi.json")
    assert status == 200
    assert told == store_app.ask("OPTIONS", "/")[1]
    assert len(told["paths"]) > 12
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            kind = path.rpartition("/")[2].rpartition(":")[2]
            body = json.dumps(bodies.get(kind, [1, 2, 3])).encode() if method == "post" else b""
            assert store_app.ask(method.upper(), path, body)[0] == 200, (method, path)
            assert ("requestBody" in operation) == (method == "post")
    status, told = store_app.manage("GET", "/openapi.json")
    assert status == 200
    for path, methods in told["paths"].items():
        for method in methods:
            said = store_app.manage(method.upper(), path.replace("{", "no-").replace("}", ""))
            assert said[0] not in (405, 500), (method, path)
            assert (
                said[1] is None
                or said[1].get("message") != "Requested resource is not found, please refer to API document."
            )


def test_kserves_first_protocol_answers_rows_and_columns(store_app: StoreApp) -> None:
    store_app.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
    assert store_app.ask("GET", "/v1/models") == (200, {"models": ["tiny"]})
    assert store_app.ask("GET", "/v1/models/tiny") == (200, {"name": "tiny", "ready": True})
    row = b'{"instances": [[1, 2, 3]]}'
    assert store_app.ask("POST", "/v1/models/tiny:predict", row) == (200, {"predictions": [[3.0, 5.0, 7.0]]})
    columns = b'{"inputs": {"x": [[1, 2, 3]]}}'
    assert store_app.ask("POST", "/v1/models/tiny:predict", columns) == (200, {"predictions": [[3.0, 5.0, 7.0]]})
    for body in (b"", b"[]", b"{", b'{"rows": []}', b'{"inputs": {"x": [1, 2, 3]}}', b'{"instances": [1]}'):
        status, said = store_app.ask("POST", "/v1/models/tiny:predict", body)
        assert status == 400
        assert list(said) == ["error"]
    assert store_app.ask("GET", "/v1/models/zzz")[0] == 404
    assert store_app.ask("POST", "/v1/models/tiny:explain", row)[0] == 404
    assert store_app.ask("GET", "/v1/models/tiny:predict")[0] == 405


def test_the_description_says_what_was_loaded_at_start_and_options_what_a_model_is_asked(store_app: StoreApp) -> None:
    store_app.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
    store_app.models.started = True
    store_app.manage("POST", "/models?url=tiny.bundle&model_name=late&initial_workers=1")
    said = {name: store_app.manage("GET", f"/models/{name}")[1][0]["loadedAtStartup"] for name in ("tiny", "late")}
    assert said == {"tiny": True, "late": False}
    status, told = store_app.manage("OPTIONS", "/models/tiny")
    assert (status, told["info"]["title"]) == (200, "tiny")
    assert store_app.manage("OPTIONS", "/models/zzz")[0] == 404
