"""Manifests of Fabric for Deep Learning (`manifest.yml`), read strictly. Pure.

FfDL took what it could not read in silence: bad memory became 512 MB, a manifest without `framework` or `data_stores`
crashed its service, metrics were not checked. Here each of these is one error with file, line, column and field, or a
default with a note. Source: FfDL's restapi/api_v1/server/manifest.go and docs/user-guide.md.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from trueline.errors import UsageError
from trueline.train.learners.manifest.yaml_nodes import YamlNode, parse_yaml
from trueline.train.learners.metrics.extract import MetricGroup, compile_regex

MOST_BYTES = 1 << 20
"""A manifest is larger only by mistake."""
UNITS: Mapping[str, int] = {
    "mb": 10**6, "mib": 1 << 20, "gb": 10**9, "gib": 1 << 30, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip
"""FfDL's units, in any case."""
_SIZE = re.compile(r"(\d+)\s*([a-zA-Z]+)")
FIELDS = (
    "name", "description", "version", "cpus", "gpus", "gpu_type", "learners", "memory", "storage", "data_stores",
    "framework", "evaluation_metrics",
)  # fmt: skip
SCALARS = FIELDS[:9]
"""Those that one value is enough for: `--set` takes them."""
BUCKETS = ("mount_cos", "s3_datastore")
DATA_STORES = (*BUCKETS, "mount_volume", "swift_datastore")
METRICS = ("tensorboard", "regex_extractor", "emetrics_file")
CONNECTION = ("type", "name", "path", "auth_url", "user_name", "password", "region")
SWIFT = ("domain_name", "project_id")
_REFERENCE = re.compile(r"\$(\w+)")


class DataStore(msgspec.Struct, frozen=True, kw_only=True):
    """`path`: of a folder that all learners see; else a bucket's endpoint and credentials."""

    id: str = ""
    type: str
    data: str = ""
    """The container of the training data; empty: there is none."""
    results: str = ""
    path: str = ""
    endpoint: str = ""
    user: str = ""
    password: str = ""
    region: str = ""


class MetricsSpec(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["tensorboard", "regex_extractor", "emetrics_file"]
    where: str = ""
    """`in`: a folder or file, with variables of the learner's environment."""
    lookahead: int = 4
    groups: tuple[MetricGroup, ...] = ()


class FfdlManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest asks for, for each learner. 0: it asks for nothing in particular."""

    name: str
    command: str
    framework: str
    framework_version: str = ""
    cpus: float = 0.0
    gpus: float = 0.0
    gpu_type: str = ""
    learners: int = 1
    memory: int = 0
    """Bytes."""
    store: DataStore | None = None
    metrics: MetricsSpec | None = None
    notes: tuple[str, ...] = ()
    """What the user should know: fields without an effect here."""


def read_manifest(text: str, file: str, given: Mapping[str, str] | None = None) -> FfdlManifest:
    """The manifest in `text`; `given`: values that replace those of its fields. Raises UsageError."""
    if len(text) > MOST_BYTES:
        raise UsageError(f"{file} has {len(text)} characters, expected a manifest of at most {MOST_BYTES}")
    root = parse_yaml(text, file)
    fields = root.fields(FIELDS) | _parse_given(given or {})
    if "framework" not in fields:
        root.fail("there is no field 'framework'", hint="it has name, version and command: what each learner runs")
    name, version, command, notes = _read_framework(fields["framework"])
    store = None
    if "data_stores" in fields:
        stores = fields["data_stores"].items()
        if not stores:
            fields["data_stores"].fail("the list is empty", hint="leave the field out: results are then in the store")
        store = _read_store(stores[0])
        if len(stores) > 1:
            notes.append(f"data_stores: only the first of {len(stores)} is used, '{store.id}', as FfDL did")
    if "storage" in fields:
        _read_size(fields["storage"])
        notes.append("storage: has no effect; results have what room their disk has")
    if store is None:
        notes.append("data_stores: there are none; DATA_DIR is an empty folder, and results are kept in the store")
    elif not store.results:
        notes.append("data_stores: there are no training_results; results are kept in the store")
    return FfdlManifest(
        name=fields["name"].text() if "name" in fields else "",
        framework=name, framework_version=version, command=command,
        cpus=fields["cpus"].number() if "cpus" in fields else 0.0,
        gpus=fields["gpus"].number() if "gpus" in fields else 0.0,
        gpu_type=fields["gpu_type"].text() if "gpu_type" in fields else "",
        learners=fields["learners"].whole(1) if "learners" in fields else 1,
        memory=_read_size(fields["memory"]) if "memory" in fields else 0,
        store=store, metrics=_read_metrics(fields["evaluation_metrics"]) if "evaluation_metrics" in fields else None,
        notes=tuple(notes),
    )  # fmt: skip


def _parse_given(given: Mapping[str, str]) -> dict[str, YamlNode]:
    """The nodes of values from the command line, which errors name as their file."""
    nodes = {}
    for name, value in given.items():
        file = f"--set {name}={value}"
        if name not in SCALARS:
            parse_yaml("0", file).fail(f"only {', '.join(SCALARS)} can be set", hint="change the manifest")
        nodes[name] = YamlNode(file, name, parse_yaml(value or "''", file).node)
    return nodes


def _read_framework(node: YamlNode) -> tuple[str, str, str, list[str]]:
    """Name, version and command; notes for the user."""
    fields = node.fields(("name", "version", "image_tag", "command"))
    if "command" not in fields:
        node.fail("there is no field 'command'", hint="for example command: python train.py")
    command = fields["command"].text().strip()
    if not command:
        fields["command"].fail("it is empty, expected what each learner runs")
    if "name" not in fields:
        node.fail("there is no field 'name'", hint="for example name: pytorch; for your own image: custom")
    version = fields["version"].text() if "version" in fields else ""
    if fields["name"].text() == "custom" and not version:
        node.fail("a custom framework needs 'version': the image", hint="for example version: repository/image:1")
    notes = ["framework.image_tag: has no effect"] if "image_tag" in fields else []
    return fields["name"].text(), version, re.sub(r"\r?\n", " ", command), notes


def _read_store(node: YamlNode) -> DataStore:
    fields = node.fields(("id", "type", "training_data", "training_results", "connection"))
    if "type" not in fields:
        node.fail(f"there is no field 'type', expected one of {', '.join(DATA_STORES)}")
    kind = fields["type"].text(choices=DATA_STORES)
    if kind == "swift_datastore":
        fields["type"].fail(
            "OpenStack Swift's own interface is not supported",
            hint="Swift's S3 interface is: type: s3_datastore, and auth_url of that",
        )
    if "connection" not in fields:
        node.fail("there is no field 'connection'")
    place = fields["connection"]
    connection = {name: one.text() for name, one in place.fields(CONNECTION, also=SWIFT).items()}
    containers = {
        name: _read_container(fields[name]) for name in ("training_data", "training_results") if name in fields
    }
    known: dict[str, str] = {}
    if kind in BUCKETS:
        for name in ("auth_url", "user_name", "password"):
            if not connection.get(name):
                place.fail(f"there is no field '{name}', which {kind} needs")
        known = {
            "endpoint": connection["auth_url"], "user": connection["user_name"], "password": connection["password"],
            "region": connection.get("region", ""),
        }  # fmt: skip
    else:
        if (given := connection.get("type", "host_mount")) != "host_mount":
            place.fail(f"type is '{given}', expected host_mount: the one that FfDL had for mount_volume")
        if not connection.get("path"):
            place.fail("there is no field 'path', the folder of the containers")
        known = {"path": connection["path"]}
    return DataStore(
        id=fields["id"].text() if "id" in fields else "", type=kind, data=containers.get("training_data", ""),
        results=containers.get("training_results", ""), **known,
    )  # fmt: skip


def _read_container(node: YamlNode) -> str:
    fields = node.fields(("container",))
    if "container" not in fields:
        node.fail("there is no field 'container'")
    name = fields["container"].text()
    if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        fields["container"].fail(f"'{name}' is no name of a bucket or folder")
    return name


def _read_size(node: YamlNode) -> int:
    """Bytes: 1 GB is 1000 MB, 1 GiB is 1024 MiB."""
    value = node.text().strip()
    match = _SIZE.fullmatch(value)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not int(match[1]):
        node.fail(f"'{value}' is no size", hint=f"a whole number and one of {', '.join(UNITS)}: 512MiB or 8Gb")
    return int(match[1]) * unit


def _read_metrics(node: YamlNode) -> MetricsSpec:
    fields = node.fields(
        ("type", "image_tag", "in", "line_lookahead", "eventTypes", "groups"), also=("event_types", "linelookahead")
    )
    if "type" not in fields:
        node.fail(f"there is no field 'type', expected one of {', '.join(METRICS)}")
    kind = fields["type"].text(choices=METRICS)
    for name in {"eventTypes", "event_types"} & fields.keys():
        for one in fields[name].items():
            one.text()
    ahead = fields.get("line_lookahead") or fields.get("linelookahead")
    groups = fields["groups"].entries() if "groups" in fields else {}
    if kind == "regex_extractor" and not groups:
        node.fail("there are no 'groups', which say what regex_extractor looks for")
    return MetricsSpec(
        type=kind, where=fields["in"].text() if "in" in fields else "",  # type: ignore[arg-type]  # one of the choices
        lookahead=ahead.whole(1) if ahead is not None else 4,
        groups=tuple(_read_group(name, one) for name, one in groups.items()),
    )  # fmt: skip


def _read_group(name: str, node: YamlNode) -> MetricGroup:
    fields = node.fields(("regex", "meta", "scalars", "etimes"), also=("values",))
    if "regex" not in fields:
        node.fail("there is no field 'regex'")
    regex = fields["regex"].text()
    try:
        names = compile_regex(regex).groupindex
    except (re.error, KeyError) as error:
        fields["regex"].fail(f"it cannot be compiled: {error}")
    if "meta" in fields:
        fields["meta"].fields(("time", "subid"))
    read = {
        key: _read_values(fields[where], names)
        for key, where in (("scalars", "scalars" if "scalars" in fields else "values"), ("etimes", "etimes"))
        if where in fields
    }
    if not read.get("scalars"):
        node.fail("there are no 'scalars', so that it extracts nothing")
    return MetricGroup(name=name, regex=regex, **read)


def _read_values(node: YamlNode, names: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Type and value of each; `$NAME` is a group of the regex."""
    found = {}
    for key, one in node.entries().items():
        fields = one.fields(("type", "value"))
        if "value" not in fields:
            one.fail("there is no field 'value'", hint="for example value: $loss, a group of the regex")
        kind = fields["type"].text(choices=("INT", "FLOAT", "STRING", "JSONSTRING")) if "type" in fields else "FLOAT"
        value = fields["value"].text()
        reference = _REFERENCE.fullmatch(value)
        if reference and reference[1] not in names:
            fields["value"].fail(f"the regex has no group '{reference[1]}' (has: {', '.join(names) or 'none'})")
        found[key] = (kind, value)
    return found
