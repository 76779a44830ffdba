"""Manifests of FfDL: what is read exactly, what is refused with its place, what has a default and a note."""

import pytest

from trueline.errors import UsageError
from trueline.train.learners.manifest.read import read_manifest

HEAD = """\
name: mnist
version: 1.0
cpus: 0.5
gpus: 0
memory: 512MiB
learners: 2
"""
BUCKET = """\
data_stores:
  - id: cos
    type: mount_cos
    training_data:
      container: pictures
    training_results:
      container: models
    connection:
      auth_url: http://s3.example
      user_name: me
      password: secret
      region: eu
"""
VOLUME = """\
data_stores:
  - type: mount_volume
    training_data: {container: pictures}
    training_results: {container: models}
    connection: {type: host_mount, name: host-mount, path: /cosdata}
"""
FRAMEWORK = """\
framework:
  name: tensorflow
  version: "1.5.0-py3"
  command: >
    python3 train.py --data ${DATA_DIR}/x
      --rate 0.001
"""
METRICS = """\
evaluation_metrics:
  type: regex_extractor
  line_lookahead: 3
  groups:
    train:
      regex: '.*loss %{FLOAT:loss}'
      meta: {time: $timestamp}
      scalars: {loss: {type: FLOAT, value: $loss}}
      etimes: {iteration: {type: INT, value: "7"}}
"""
WHOLE = HEAD + BUCKET + FRAMEWORK + METRICS


def refuse(text: str, **given: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_manifest(text, "manifest.yml", given)
    return caught.value


def test_every_field_of_a_manifest_is_read():
    read = read_manifest(WHOLE, "manifest.yml")
    assert (read.name, read.cpus, read.gpus, read.learners, read.memory) == ("mnist", 0.5, 0.0, 2, 512 << 20)
    assert read.store.type == "mount_cos"
    assert (read.store.data, read.store.results, read.store.endpoint) == ("pictures", "models", "http://s3.example")
    assert (read.store.user, read.store.password, read.store.region) == ("me", "secret", "eu")
    assert read.command == "python3 train.py --data ${DATA_DIR}/x\n  --rate 0.001".replace("\n", " ")
    assert (read.framework, read.framework_version) == ("tensorflow", "1.5.0-py3")
    assert (read.metrics.type, read.metrics.lookahead) == ("regex_extractor", 3)
    assert read.metrics.groups[0].etimes == {"iteration": ("INT", "7")}
    assert read.notes == ()


def test_a_volume_of_the_host_is_a_folder_with_containers():
    store = read_manifest(HEAD + VOLUME + FRAMEWORK, "manifest.yml").store
    assert (store.path, store.data, store.results) == ("/cosdata", "pictures", "models")


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1Gb", 10**9), ("1GiB", 1 << 30), ("1000MiB", 1000 << 20), ("300mb", 300 * 10**6), ("2 TIB", 2 << 40),
        ("1tb", 10**12),
    ],
)  # fmt: skip
def test_units_of_memory_are_exact(written, size):
    assert read_manifest(WHOLE.replace("512MiB", written), "manifest.yml").memory == size


@pytest.mark.parametrize("written", ["512", "64M", "1.5Gb", "0Gb", "much", "-1Gb", "1 Gb extra"])
def test_memory_that_ffdl_took_for_512_mb_is_refused_with_its_place(written):
    error = refuse(WHOLE.replace("512MiB", written))
    assert error.message == f"manifest.yml:5:9: memory: '{written}' is no size"
    assert "512MiB or 8Gb" in error.hint


@pytest.mark.parametrize(
    ("there", "misspelt", "place", "near"),
    [
        ("learners: 2", "lerners: 2", "6:1", "learners"), ("memory:", "Memory:", "5:1", "memory"),
        ("    type: mount_cos", "    typ: mount_cos", "9:5", "type"),
        ("container: pictures", "containr: pictures", "11:7", "container"),
        ("user_name:", "username:", "16:7", "user_name"), ("  command:", "  comand:", "22:3", "command"),
        ("regex:", "regexp:", "30:7", "regex"), ("value: $loss", "val: $loss", "32:37", "value"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_one_error_with_line_column_and_the_nearest_name(there, misspelt, place, near):
    error = refuse(WHOLE.replace(there, misspelt))
    assert error.message.startswith(f"manifest.yml:{place}: ")
    assert misspelt.partition(":")[0].strip() in error.message
    assert error.hint == f"did you mean '{near}'?"


@pytest.mark.parametrize(
    ("there", "wrong", "message"),
    [
        ("learners: 2", "learners: 0", "6:11: learners: expected a whole number of at least 1, got '0'"),
        ("learners: 2", "learners: 2.5", "6:11: learners: expected a whole number of at least 1, got '2.5'"),
        ("learners: 2", "learners: [2]", "6:11: learners: expected one value, got a list"),
        ("cpus: 0.5", 'cpus: "0.5"', "3:7: cpus: expected a number of at least 0, got '0.5'"),
        ("gpus: 0", "gpus: -1", "4:7: gpus: expected a number of at least 0, got '-1'"),
        ("gpus: 0", "gpus: .nan", "4:7: gpus: expected a number of at least 0, got '.nan'"),
        ("name: mnist", "name: {a: b}", "1:7: name: expected one value, got fields"),
        ("type: mount_cos", "type: mount_coz",
         "9:11: data_stores[0].type: 'mount_coz' is not one of mount_cos, s3_datastore, mount_volume, swift_datastore"),
        ("type: mount_cos", "type: swift_datastore",
         "9:11: data_stores[0].type: OpenStack Swift's own interface is not supported"),
        ("container: pictures", "container: ../etc",
         "11:18: data_stores[0].training_data.container: '../etc' is no name of a bucket or folder"),
        ("      password: secret\n", "",
         "15:7: data_stores[0].connection: there is no field 'password', which mount_cos needs"),
        ("value: $loss", "value: $los",
         "32:44: evaluation_metrics.groups.train.scalars.loss.value: the regex has no group 'los' (has: loss)"),
        ("%{FLOAT:loss}", "%{FLOATS:loss}", "30:14: evaluation_metrics.groups.train.regex: it cannot be compiled"),
        ("'.*loss %{FLOAT:loss}'", "'('", "30:14: evaluation_metrics.groups.train.regex: it cannot be compiled"),
        ("regex_extractor", "regexextractor", "26:9: evaluation_metrics.type: 'regexextractor' is not one of"),
        ("learners: 2", "learners: 2\nlearners: 3", "7:1: field 'learners' stands here twice"),
        ("learners: 2", "learners: {", "8:3: this is no YAML: "),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_error_with_its_place(there, wrong, message):
    assert there in WHOLE
    assert refuse(WHOLE.replace(there, wrong)).message.startswith(f"manifest.yml:{message}")


def test_a_manifest_without_framework_or_command_is_refused_in_words():
    assert refuse(HEAD).message == "manifest.yml:1:1: there is no field 'framework'"
    error = refuse(HEAD + "framework:\n  name: pytorch\n")
    assert error.message == "manifest.yml:8:3: framework: there is no field 'command'"
    assert refuse("").message == "manifest.yml:1:1: the file is empty, expected a manifest"
    assert "expected fields, got a list" in refuse("- a\n").message


def test_a_manifest_without_data_stores_keeps_its_results_in_the_store_and_says_so():
    read = read_manifest(HEAD + FRAMEWORK, "manifest.yml")
    assert read.store is None
    assert "results are kept in the store" in read.notes[0]
    read = read_manifest(WHOLE.replace("    training_results:\n      container: models\n", ""), "manifest.yml")
    assert "no training_results" in read.notes[0]


def test_more_than_one_data_store_is_noted_since_only_the_first_is_used():
    second = "  - {type: mount_volume, connection: {path: /x}}\n"
    read = read_manifest(HEAD + BUCKET + second + FRAMEWORK, "manifest.yml")
    assert read.notes == ("data_stores: only the first of 2 is used, 'cos', as FfDL did",)


def test_a_field_without_a_value_counts_as_left_out():
    read = read_manifest(WHOLE.replace("learners: 2", "learners:"), "manifest.yml")
    assert read.learners == 1


def test_values_from_the_command_line_replace_fields_and_are_refused_as_these_are():
    read = read_manifest(WHOLE.replace("gpus: 0", "gpus: 4"), "manifest.yml", {"gpus": "0", "memory": "2GiB"})
    assert (read.gpus, read.memory) == (0.0, 2 << 30)
    assert refuse(WHOLE, memory="2").message == "--set memory=2:1:1: memory: '2' is no size"
    assert "only name, description" in refuse(WHOLE, framework="x").message
