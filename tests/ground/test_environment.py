"""`trueline env` shows what a report needs and no secret."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from trueline import environment
from trueline.cli.app import run

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "s3cret-1",
    "AWS_SESSION_TOKEN": "s3cret-2",
    "MLFLOW_TRACKING_PASSWORD": "s3cret-3",
    "TRUELINE_SERVE_KEY_FILE": "s3cret-4",
    "MLFLOW_TRACKING_URI": "http://me:s3cret-5@127.0.0.1:9/?sig=s3cret-6",
    "HTTPS_PROXY": "http://me:s3cret-7@proxy:3128",
    "MY_DATABASE": "s3cret-8",
}


def test_no_secret_of_the_environment_is_in_the_report(tmp_path: Path) -> None:
    facts = environment.collect(SECRETS, tmp_path)
    for shown in (environment.as_text(facts), json.dumps(facts)):
        assert "s3cret" not in shown
        assert "AWS_SESSION_TOKEN" in shown
        assert "MY_DATABASE" not in shown


def test_the_report_names_versions_cores_memory_disk_and_what_is_missing(tmp_path: Path) -> None:
    facts = environment.collect({}, tmp_path)
    assert facts["cores"]["usable"] >= 1
    assert 0 < facts["memory_gb"]["available"] <= facts["memory_gb"]["total"]
    assert facts["disk_gb"]["total"] > 0
    text = environment.as_text(facts)
    assert f"trueline   {facts['trueline']}".split() == text.splitlines()[0].split()
    assert f"numpy {facts['packages']['numpy']}" in text


def test_a_package_that_is_missing_is_named_with_the_extra_that_adds_it(tmp_path: Path) -> None:
    facts = environment.collect({}, tmp_path)
    facts["optional"] |= {"torch": None, "pillow": None, "openvino": None}  # the line does without the last
    assert "pip install 'trueline[images,train]' adds what is missing" in environment.as_text(facts)


def test_a_port_in_use_and_a_store_that_does_not_answer_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(environment, "PORTS", {port: "serve"})
        facts = environment.collect({"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}, tmp_path)
        assert not facts["ports"][str(port)]["free"]
        assert facts["stores"]["MLFLOW_TRACKING_URI"].endswith(": reachable")
    facts = environment.collect({"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}, tmp_path)
    assert facts["ports"][str(port)]["free"]
    assert "not reachable" in facts["stores"]["MLFLOW_TRACKING_URI"]


def test_a_store_in_a_file_is_there_or_not_yet(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert environment.collect({"MLFLOW_TRACKING_URI": uri}, tmp_path)["stores"]["MLFLOW_TRACKING_URI"].endswith(
        "not there yet"
    )
    (tmp_path / "mlflow.db").touch()
    assert environment.collect({"MLFLOW_TRACKING_URI": uri}, tmp_path)["stores"]["MLFLOW_TRACKING_URI"].endswith(
        "is there"
    )


def test_the_verb_prints_the_report_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env"]) == 0
    assert "cores" in capsys.readouterr().out
    assert run(["env", "--json"]) == 0
    assert "memory_gb" in json.loads(capsys.readouterr().out)
