"""Runs TorchServe's Postman collections, which are not part of this project, with newman against a server here.

    make bench-torchserve COLLECTIONS=serve/test/postman          of a checkout of github.com/pytorch/serve
    make bench-torchserve COLLECTIONS=... NEWMAN='node_modules/.bin/newman'

The archives that the collections register are made here: each has the name of the original and a handler that returns
the answer that the collection expects, so that the protocol is compared, not the models. The addresses of the originals
are replaced by a local HTTP server, which `--allowed-urls` lets the server under test read. Each collection gets a
server with a fresh store, under --torchserve-strict. The last line is JSON: passed and all checks by collection.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import http.server
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench._table import report

from trueline import serve
from trueline.torchserve import config

_REMOTE = re.compile(r"https://torchserve\.[a-z0-9.]+/(?:mar|war)_files/")
_ANSWER = """
import json, os

def handle(data, context):
    if data is None:
        return None
    folder = context.system_properties["model_dir"]
    name = "explain.json" if context.get_request_header(0, "explain") == "True" else "answer.json"
    with open(os.path.join(folder, name)) as file:
        answer = json.load(file)
    return [answer for _ in data]
"""
_FAILS = {
    "custom_python_dep": "import a_package_that_is_not_installed\n",
    "loading-memory-error": "def handle(data, context):\n    raise MemoryError\n",
    "timeout-retry-test": _ANSWER.replace("    folder", "    raise RuntimeError('never answers')\n    folder", 1),
}
"""Archives of workflows whose model is meant to fail, by name, with their handlers."""
_WORKFLOWS = {"densenet_wf": "densenet", "timeout-retry-test": "densenet"}
"""Names of workflows that differ from their archive's."""


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    collection: str
    data: str = ""
    properties: str = ""  # lines of config.properties
    tls: bool = False


SUITES = (
    Suite("management", "management_api_test_collection", "management_data"),
    Suite("inference", "inference_api_test_collection", "inference_data"),
    Suite("increased timeout", "inference_api_test_collection", "increased_timeout_inference",
          "default_response_timeout=300"),
    Suite("explanation", "explanation_api_test_collection", "explanation_data"),
    Suite("workflow", "workflow_api_test_collection", "workflow_data"),
    Suite("workflow inference", "workflow_inference_collection", "workflow_inference_data"),
    Suite("https", "https_test_collection", tls=True),
    Suite("management, KServe", "management_api_test_collection", "management_data", "service_envelope=kserve"),
    Suite("KServe v1", "kf_api_test_collection", "kf_inference_data", "service_envelope=kserve"),
    Suite("KServe v2", "kfv2_api_test_collection", "kfv2_inference_data", "service_envelope=kservev2"),
    Suite("https, KServe v1", "kf_https_test_collection", properties="service_envelope=kserve", tls=True),
    Suite("https, KServe v2", "kfv2_https_test_collection", properties="service_envelope=kservev2", tls=True),
)  # fmt: skip


@dataclass(slots=True)
class Site:
    """The stand-ins of one run."""

    folder: Path
    store: Path = field(init=False)
    remote: Path = field(init=False)  # what the local HTTP server has
    work: Path = field(init=False)  # where newman looks for files to send

    def __post_init__(self) -> None:
        self.store, self.remote = self.folder / "store", self.folder / "remote"
        self.work = self.folder / "checkout" / "test"
        for folder in (self.store, self.remote, self.work):
            folder.mkdir(parents=True)


def write_archive(path: Path, code: str, answers: dict[str, Any]) -> None:
    """A `.mar` whose handler answers with `answers["answer"]`, and with `answers["explain"]` to explanations."""
    model = {"modelName": path.name.partition(".")[0], "handler": "stand_in.py", "modelVersion": "1.0"}
    manifest = {"createdOn": "01/01/2026 00:00:00", "runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("stand_in.py", code)
        for name, answer in answers.items():
            archive.writestr(f"{name}.json", json.dumps(answer))


def write_workflow(site: Site, path: Path, answer: Any) -> None:
    """A `.war` of one model and a function after it, and the model's archive in the store."""
    stem = path.name.partition(".")[0]
    write_archive(site.store / f"{stem}_model.mar", _FAILS.get(stem, _ANSWER), {"answer": answer, "explain": answer})
    told = {"workflowName": _WORKFLOWS.get(stem, stem), "specFile": "spec.yaml", "handler": "functions.py"}
    spec = {
        "models": {"min-workers": 1, "max-workers": 1, "retry-attempts": 1, "model": {"url": f"{stem}_model.mar"}},
        "dag": {"before": ["model"]},
    }
    code = "def before(data, context):\n    return data and [b''.join(row.values()) for row in data]\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        manifest = {"createdOn": "01/01/2026 00:00:00", "archiverVersion": "1", "workflow": told}
        archive.writestr("WAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("spec.yaml", json.dumps(spec))  # JSON is YAML
        archive.writestr("functions.py", code)


def stand_in(site: Site, rows: list[dict[str, Any]], names: dict[str, str], suite: Suite) -> None:
    """Writes the archives and files that `rows` name; `names`: the archives that the environment names."""
    kserve = "service_envelope" in suite.properties
    for name in names.values():
        write_archive(site.store / name, _ANSWER, {"answer": 0, "explain": 0})
    for row in rows:
        expected, explain = row.get("expected", "none"), row.get("expected_explain", {})
        if kserve and "expected" in row:
            expected, explain = first_of(expected), first_of(explain)
        address = row.get("url") or row.get("workflow_url") or row.get("path", "")
        for file in re.findall(r"([\w.-]+\.(?:mar|war))", address):
            if "exist" in file or "invalid" in file:
                continue
            if file.endswith(".war"):
                write_workflow(site, site.remote / file, expected)
            elif _REMOTE.search(address):
                write_archive(site.remote / file, _ANSWER, {"answer": expected, "explain": explain})
        named = re.search(r"\{\{(mar_path_[\w-]+)\}\}", address)
        if named and "expected" in row:
            write_archive(site.store / names[named[1]], _ANSWER, {"answer": expected, "explain": explain})


def first_of(answer: dict[str, Any]) -> Any:
    """What the handler returned for the first instance, without KServe's envelope."""
    if "outputs" in answer:
        return answer["outputs"][0]["data"]
    return next(iter(answer.values()), [0])[0]


def copy_file(site: Site, checkout: Path, name: str) -> None:
    """A file to send: that of the checkout, else one made here in its place."""
    target, source = site.work / name, checkout / "test" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copy(source, target)
    elif "v2" in name:
        tensor = {"name": "input-0", "shape": [1], "datatype": "INT64", "data": [1]}
        target.write_text(json.dumps({"id": "1", "inputs": [tensor]}))
    else:
        target.write_text(json.dumps({"instances": [{"data": 1}]}) if name.endswith("json") else "made here")


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """The address of an HTTP server of `folder`."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_certificate(folder: Path) -> Path:
    """A self-signed certificate of localhost with its key, valid for a day."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "server.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return path


def run_suite(suite: Suite, checkout: Path, newman: list[str], *, verbose: bool) -> dict[str, Any]:
    """Checks that passed, all checks, and the failures' texts."""
    postman = checkout / "test" / "postman"
    with tempfile.TemporaryDirectory(prefix="trueline-postman-") as folder:
        site = Site(Path(folder))
        environment = json.loads((postman / "environment.json").read_text())["values"]
        names = {one["key"]: one["value"] for one in environment if one["key"].startswith("mar_path_")}
        rows = json.loads((postman / f"{suite.data}.json").read_text()) if suite.data else []
        stand_in(site, rows, names, suite)
        collection = (postman / f"{suite.collection}.json").read_text()
        sent = {row["file"] for row in rows if "file" in row}
        for name in sent | set(re.findall(r'"src": "(\.\./[^"]+)"', collection)):
            copy_file(site, checkout, name)
        ports = [free_port() for _ in range(3)]
        with file_server(site.remote) as address:
            variables = dict(zip(("pred-port", "mgmt-port", "metric-port"), ports, strict=True))
            variables |= {f"sec-{name}": port for name, port in variables.items()}
            (site.folder / "collection.json").write_text(
                re.sub(r'(localhost:|"port": ")8082', rf"\g<1>{ports[2]}", collection)
            )
            (site.folder / "data.json").write_text(_REMOTE.sub(address, json.dumps(rows)))
            (site.folder / "config.properties").write_text(f"{suite.properties}\nallowed_urls={address}.*\n")
            options = config.read(site.folder / "config.properties", {}).options
            if suite.tls:
                options["certificate"] = make_certificate(site.folder)
            with serve.start(
                port=ports[0], management_port=ports[1], metrics_port=ports[2], model_store=site.store,
                workflow_store=site.store, allow_code=True, torchserve_strict=True, log=site.folder / "log", **options,
            ):  # fmt: skip
                return call_newman(site, suite, newman, {**variables}, postman / "environment.json", verbose=verbose)


def call_newman(
    site: Site, suite: Suite, newman: list[str], variables: dict[str, int], environment: Path, *, verbose: bool
) -> dict[str, Any]:
    command = [*newman, "run", str(site.folder / "collection.json"), "-e", str(environment), "--insecure"]
    command += [f"--env-var={name}={value}" for name, value in variables.items()]
    command += ["--working-dir", str(site.work), "-r", "cli,json" if verbose else "json"]
    command += ["--reporter-json-export", str(site.folder / "report.json")]
    command += ["-d", str(site.folder / "data.json")] if suite.data else []
    subprocess.run(command, check=False, stdout=sys.stderr)
    found = json.loads((site.folder / "report.json").read_text())["run"]
    checks = found["stats"]["assertions"]
    failures = [
        f"{one['cursor'].get('iteration', 0)} {one['source'].get('name', '')}: {one['error']['message']}"
        for one in found["failures"]
    ]
    return {"passed": checks["total"] - checks["failed"], "checks": checks["total"], "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", type=Path, help="the folder test/postman of a checkout of pytorch/serve")
    parser.add_argument("--newman", default="newman", help="the command of newman")
    parser.add_argument("--only", default="", help="names of collections, with commas")
    parser.add_argument("--verbose", action="store_true", help="newman's own report too")
    given = parser.parse_args()
    chosen = [suite for suite in SUITES if not given.only or suite.name in given.only.split(",")]
    checkout, newman = given.collections.resolve().parents[1], shlex.split(given.newman)
    results = {suite.name: run_suite(suite, checkout, newman, verbose=given.verbose) for suite in chosen}
    for name, result in results.items():
        for failure in result["failures"]:
            print(f"{name}: {failure}", file=sys.stderr)
    report(
        ["collection", "passed", "checks"],
        [[name, one["passed"], one["checks"]] for name, one in results.items()],
        {name: f"{one['passed']} of {one['checks']}" for name, one in results.items()},
    )


if __name__ == "__main__":
    main()
