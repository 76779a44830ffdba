"""TorchServe's metrics, by its names and labels: of programs of bundles, and of handlers of archives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trueline import events, serve
from trueline.serve import host
from trueline.serve.metrics.prometheus import Gpus, parse_gpus
from trueline.serve.models.loader import ResolvedSource
from trueline.web.messages import Request, Response
from worlds import archives, bundles, servers
from worlds.servers import StoreApp

HOST = {"Level", "Hostname"}
MODEL = {"model_name", "model_version", "hostname"}
NAMES = {
    "Requests2XX": HOST,
    "Requests4XX": HOST,
    "Requests5XX": HOST,
    "ts_inference_requests_total": MODEL,
    "ts_inference_latency_microseconds": MODEL,
    "ts_queue_latency_microseconds": MODEL,
    "QueueTime": HOST,
    "WorkerThreadTime": HOST,
    "WorkerLoadTime": HOST | {"WorkerName"},
    "CPUUtilization": HOST,
    "MemoryUsed": HOST,
    "MemoryAvailable": HOST,
    "MemoryUtilization": HOST,
    "DiskUsage": HOST,
    "DiskUtilization": HOST,
    "DiskAvailable": HOST,
    "PredictionTime": HOST | {"ModelName"},
}
"""What `ts/configs/metrics.yaml` names, with its labels; GPUs apart, which this machine may not have."""


def labels_by_name(page: str) -> dict[str, set[str]]:
    """The labels of each sample; a page that is not Prometheus' text raises ValueError."""
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families), "each metric is told once"
    samples = [sample for family in families for sample in family.samples]
    # the parser adds `_total` to the names of counters that have none
    return {one.name if one.name in page else one.name.removesuffix("_total"): set(one.labels) for one in samples}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bundle", "archive"])
def test_every_name_of_torchserves_list_is_on_its_port_with_its_labels(tmp_path: Path, what: str) -> None:
    if what == "bundle":
        source = bundles.double_plus(tmp_path / "noop.bundle").path
    else:
        source = archives.mar(tmp_path / "noop.mar", archives.DOUBLE)
    body = {"x": [1, 2, 3]} if what == "archive" else [1, 2, 3]
    with serve.start(source, name="noop", metrics_port=0, allow_code=what == "archive") as running:
        for _ in range(3):
            servers.post(f"{running.url}/predictions/noop", json=body).raise_for_status()
        page = servers.get(f"{running.metrics_url}/metrics").text
    found = labels_by_name(page)
    missing = {name: labels for name, labels in NAMES.items() if not labels <= found.get(name, set())}
    assert not missing
    assert re.search(r'^QueueTime\{Level="Host",Hostname="[^"]+",\} \d+\.\d+', page, re.MULTILINE)


@pytest.fixture
def two_names(tmp_path: Path) -> Iterator[StoreApp]:
    """One bundle, loaded under two names."""
    with StoreApp(bundles.store(tmp_path, "pair")) as made:
        for name in ("pair", "other"):
            made.run(made.fleet.load(ResolvedSource(path=tmp_path / "pair.bundle"), name, "1", source="pair.bundle"))
        yield made


def told(app: StoreApp, name: str) -> dict[str, float]:
    """The samples of one metric, by what tells them apart."""
    answer = app.routes.answer(Request("GET", f"/metrics?name[]={name}".encode(), {}, b""))
    found: Response = answer if isinstance(answer, Response) else app.run(answer)
    return {
        sample.labels.get("model_name") or sample.labels.get("WorkerName", ""): sample.value
        for family in text_string_to_metric_families(found.body.decode())
        for sample in family.samples
    }


def test_times_are_of_what_came_since_the_last_look_and_stand_until_more_comes(two_names: StoreApp) -> None:
    assert told(two_names, "QueueTime") == {"": 0.0}
    assert told(two_names, "PredictionTime") == {}
    assert two_names.ask("POST", "/predictions/pair", json.dumps([1, 2, 3]).encode())[0] == 200
    version = two_names.models.find("pair")
    version.stats.queue_s += 0.25
    assert told(two_names, "QueueTime") == {"": pytest.approx(250.0)}
    first = told(two_names, "PredictionTime")
    assert first == {"pair": pytest.approx(1e3 * version.stats.infer_s)}
    assert told(two_names, "HandlerTime")["pair"] > first["pair"]
    version.stats.infer_s += 1.0
    version.stats.request_s.add(3.0)
    assert told(two_names, "PredictionTime")["pair"] == pytest.approx(1000.0)
    assert told(two_names, "WorkerThreadTime") == {"": pytest.approx(2000.0)}


def test_the_time_that_a_version_took_to_load_is_told_of_its_worker(two_names: StoreApp) -> None:
    loads = told(two_names, "WorkerLoadTime")
    assert set(loads) == {"W-9000-pair_1", "W-9000-other_1"}
    assert all(0 < ms < 60_000 for ms in loads.values())
    two_names.run(two_names.fleet.retire("other"))
    assert set(told(two_names, "WorkerLoadTime")) == {"W-9000-pair_1"}


def a_driver(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_devices_are_asked_beside_the_loop_and_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "gpus", lambda: (0, 1))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    a_driver(tmp_path, f"echo x >> {tmp_path}/asked; echo '0, 30, 1024, 4096'; echo '1, [N/A], 0, 4096'")
    seen = Gpus()
    assert seen.read(now=0.0) == {}
    seen.wait()
    for now in (1.0, 59.0):
        assert seen.read(now)["GPUMemoryUtilization"] == {"0": 25.0, "1": 0.0}
    assert seen.read(59.0)["GPUUtilization"] == {"0": 30.0}
    assert (tmp_path / "asked").read_text() == "x\n"
    seen.read(60.0)
    seen.wait()
    assert (tmp_path / "asked").read_text() == "x\nx\n"


def test_a_driver_that_fails_is_an_event_and_no_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "gpus", lambda: (0,))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    a_driver(tmp_path, "exit 9")
    lines: list[str] = []
    seen = Gpus()
    with events.listening(lambda name, fields: lines.append(name)):
        seen.read(now=0.0)
        seen.wait()
    assert (lines, seen.read(now=1.0)) == (["gpus.unread"], {})


def test_what_is_no_reading_is_an_error() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        parse_gpus("Failed to initialize NVML")


def types_in(page: str) -> dict[str, str]:
    """The declared type of each name, as a scraper of the text format reads it."""
    heads = [line.split(" ") for line in page.splitlines() if line.startswith("# TYPE ")]
    return {name: kind for _, _, name, kind in heads}


def test_metrics_have_the_types_of_torchserves_list_and_names_of_their_samples(tmp_path: Path) -> None:
    with servers.TinyApp(tmp_path) as app:
        app.ask("POST", "/predictions/tiny", b"[[1, 2, 3]]")
        page = app.ask("GET", "/metrics").body.decode()
    types = types_in(page)
    counters = {name for name in NAMES if name.startswith(("Requests", "ts_"))}
    assert {name for name in NAMES if types[name] == "counter"} == counters
    assert {types[name] for name in NAMES.keys() - counters} == {"gauge"}
    samples = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    assert types.keys() >= {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples}
    assert "unknown" not in types.values()
    assert "untyped" not in types.values()


def test_the_process_reports_its_own_time_memory_files_and_start(tmp_path: Path) -> None:
    with servers.TinyApp(tmp_path) as app:
        types = types_in(app.ask("GET", "/metrics").body.decode())
    assert types["process_cpu_seconds_total"] == "counter"
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"):
        assert types[name] == "gauge"
