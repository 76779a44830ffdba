"""A config.properties of TorchServe's means here what it meant there, and what it cannot mean is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from trueline.cli.line import serve as verb
from trueline.errors import UsageError
from trueline.serve.models.loader import Refused, VersionOptions
from trueline.torchserve import config

USUAL = r"""
# as the container of TorchServe has it
inference_address=http://127.0.0.1:8085
management_address: http://127.0.0.1:8086
metrics_address http://127.0.0.1:8087
grpc_inference_port=7070
grpc_management_port=7071
model_store=/models
workflow_store=/workflows
load_models=all
number_of_netty_threads=32
job_queue_size=50
default_workers_per_model=2
service_envelope=kservev2
disable_token_authorization=true
install_py_dep_per_model=true
models={\
  "noop": {\
    "1.0": {"defaultVersion": true, "marName": "noop.mar", "batchSize": 4, "maxBatchDelay": 20}\
  }\
}
"""


def test_addresses_stores_and_models_are_taken_and_the_rest_is_named_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "config.properties"
    path.write_text(USUAL)
    told = config.read(path, {"TS_LOAD_MODELS": "none"})
    models = json.loads(told.options.pop("models"))
    assert told.options == {
        "host": "127.0.0.1",
        "port": 8085,
        "management_port": 8086,
        "metrics_port": 8087,
        "grpc_port": 7070,
        "grpc_management_port": 7071,
        "model_store": "/models",
        "workflow_store": "/workflows",
        "load": "all",
        "key_file": None,
    }
    assert models[""] == {"jobQueueSize": 50, "minWorkers": 2, "serviceEnvelope": "kservev2"}
    assert models["noop/1.0"]["batchSize"] == 4
    assert dict(told.ignored) == {
        "number_of_netty_threads": "there are no threads of Netty",
        "install_py_dep_per_model": "nothing is installed for an archive; put it into the server's environment",
    }
    assert told.forced == {}, "the file did not ask for the environment"


def test_the_environment_goes_before_the_file_where_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "config.properties"
    path.write_text("enable_envvars_config=true\nload_models=all\njob_queue_size=5\n")
    environ = {"TS_LOAD_MODELS": "none", "TS_JOB_QUEUE_SIZE": "7", "TS_HOME_OF_THE_SHIP": "x", "PATH": "/bin"}
    told = config.read(path, environ)
    assert told.options["load"] == ""
    assert json.loads(told.options["models"]) == {"": {"jobQueueSize": 7}}
    assert told.forced["load"] == ""
    assert told.ignored == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("inference_address=8080", "inference_address is '8080'; expected an address as http://127.0.0.1:8080"),
        ("inference_address=http://127.0.0.1:99999", "inference_address .* expected an address"),
        ("grpc_inference_port=70700", "grpc_inference_port is '70700'; expected a port of at most 65535"),
        ("job_queue_size=-1", "job_queue_size is '-1'; expected a whole number of 0 or more"),
        ("disable_token_authorization=yes", "expected true or false"),
        ("models={", "models is '{'; expected JSON by model and version"),
        ('model_snapshot={"models": 1}', "model_snapshot .* expected JSON"),
        ("service_envelope=soap", "service_envelope is 'soap'; expected one of body, json, kserve, kservev2"),
        ("keystore=store.p12", "a Java keystore is not read"),
        ("inference_address=https://127.0.0.1:8443", "there is no certificate for it"),
        ("inference_address=http://127.0.0.1:1\nmetrics_address=http://0.0.0.0:2", "all ports are of one address"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "config.properties"
    path.write_text(line)
    with pytest.raises(UsageError, match=words):
        config.read(path, {})


def test_a_key_that_nobody_knows_is_named_with_the_nearest() -> None:
    told = config.translate({"load_model": "all"}, where="here")
    assert told.ignored == [("load_model", "no key that is known here; did you mean load_models?")]


def test_a_snapshot_of_torchserves_is_what_is_served() -> None:
    snapshot = {"name": "startup.cfg", "modelCount": 1, "models": {"noop": {"1.0": {"marName": "noop.mar"}}}}
    told = config.translate({"model_snapshot": json.dumps(snapshot)}, where="here")
    assert told.options["load"] == "noop.mar"
    assert json.loads(told.options["models"]) == {"noop/1.0": {"marName": "noop.mar"}}


def test_a_backslash_alone_on_its_line_continues_nothing() -> None:
    assert config.parse("\\\n# note\nport=1\n\\") == {"port": "1"}


@given(st.dictionaries(st.text("abc_.", min_size=1), st.text('abc =:\\#!{}"', max_size=20).map(str.strip), max_size=4))
def test_what_is_written_as_properties_is_read_back(found: dict[str, str]) -> None:
    def escaped(text: str) -> str:
        return "".join(f"\\{one}" if one in "\\ =:#!" else one for one in text)

    text = "\n".join(f"{escaped(key)} = {escaped(value)}" for key, value in found.items())
    assert config.parse(text) == found


def test_a_bundle_takes_of_these_what_it_can_use_and_refuses_what_cannot_be() -> None:
    how = VersionOptions(
        usual={"": {"jobQueueSize": 9}, "noop/1": {"batchSize": 4, "maxBatchDelay": 20, "marName": "x"}}
    )
    found = how.of_bundle("noop", "1")
    assert (found.max_batch, found.max_delay_s, found.workers) == (4, 0.02, None)
    assert how.of_bundle("noop", "2") == how
    assert how.usual_of("noop", "1") == {"jobQueueSize": 9, "batchSize": 4, "maxBatchDelay": 20, "marName": "x"}
    with pytest.raises(Refused, match=r"model 'noop' version '1' are not valid: .*batchSize"):
        VersionOptions(usual={"noop/1": {"batchSize": 0}}).of_bundle("noop", "1")


def test_the_command_line_goes_before_the_file_and_the_environment_before_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, Any] = {}
    monkeypatch.setattr("trueline.serve.api.serve", lambda source, **options: called.update(options, source=source))
    path = tmp_path / "config.properties"
    path.write_text(
        "enable_envvars_config=true\nmodel_store=/models\ninference_address=http://127.0.0.1:8085\nload_models=all\n"
        "vmargs=-Xmx1g\n"
    )
    monkeypatch.setenv("TS_LOAD_MODELS", "a.mar")
    done = CliRunner().invoke(verb.command, ["--ts-config", str(path), "--port", "9000", "--load", "b"])
    assert done.exit_code == 0, done.output
    assert called["port"] == 9000
    assert called["load"] == "a.mar"
    assert called["model_store"] == "/models"
    assert called["management_port"] == 8081
    assert called["max_queue"] == 256
    assert "vmargs is not read: there is no JVM" in done.stderr
