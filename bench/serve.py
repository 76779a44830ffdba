"""What serving costs and sustains, each figure compared with its baseline in one run.

    python bench/serve.py [--only PART,PART] [--quick] [--venvs bench/.venvs]

    overhead   processor time of the server for each request above ONNX Runtime's own, binary and JSON, and that of a
               bare Python server that reads and writes as many bytes
    clients    32 connections that send what clients send (see _clients.py: every request has floats with all their
               digits, an id, a trace and a length of its own): processor time of the server for each request over that
               of a naive asyncio server with ONNX Runtime (_sketch.py), in turns, medians; the same with uvloop in the
               sketch; and the best case, a constant body
    peers      requests/s of a small model on such requests over those of LitServe, MLServer, BentoML and Ray Serve at
               their better settings, where bench/peers/serving.sh has installed them under --venvs, in turns, medians;
               processor time of the whole server for each request. Then the same with the constant body of the best
               case. Also the processor time of ONNX Runtime alone (`raw`) and of a bare Python server that reads and
               writes as many bytes (`floor`), to compare with other machines
    image      requests/s of a 602 kB tensor
    compute    ResNet-18 at 224: throughput over ONNX Runtime in a loop with its best batch size
    rollouts   register, make default, retire, repeatedly under load: failed and hung requests
    overload   ten times the capacity: responses a second over the peak before and after, and the share of the peak
               that a bare server keeps while it refuses as many (`overload_floor`); time to a 429; the server
               has one core, the client the other
    load       register to ready of a small bundle, its golden records replayed
    hostile    p99 of 200 requests a second beside one hostile client (64 MiB of JSON, a gzip bomb, 1,000 pipelined
               requests, 2,000 idle connections) over their p99 without it, in turns; the same beside a process that
               is as busy and has nothing to do with the server (`hostile_control_ratio`); their failures; the
               server's memory after the largest request, in its forms, above what it was before
    adaptive   throughput without settings over the best of a grid of static ones at the same p99

Models are made here and run in ONNX Runtime in every server. Processor time is the kernel's, so other load hardly
affects it; read requests per second as ratios. Killing handler processes is not measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from _clients import STREAMS, clients, constant, ids_of
from _floor import floor
from _load import HUNG, Answer, Requests, closed_loop, paced, quantile_ms, rate
from _load import http as request_of
from _served import binary_body, json_body, mean_of_image, mlp, resnet18, sealed, session
from _sketch import sketch
from _table import report
from hostile import MAX_VALUES, largest_body, measure
from peers import serving
from serve_overhead import connect, cpu_s, first_answer, loop_s, pss_mb, runs_of, tree_cpu_s, tree_pss_mb
from trueline.bundle import Bundle
from trueline.serve import RunningServer, start

Figures = dict[str, Any]
T = TypeVar("T")
ROUNDS = 3
"""Turns of all the settings that `adaptive` compares."""
ROW = np.random.default_rng(2).uniform(0, 1, (1, 256)).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where, and for how long."""

    folder: Path
    quick: bool
    venvs: Path

    @property
    def seconds(self) -> float:
        return 1.0 if self.quick else 4.0

    def bundle(self, name: str, make: Callable[[], Any]) -> Bundle:
        from trueline.bundle import open_bundle

        path = self.folder / f"{name}.bundle"
        return open_bundle(path) if path.exists() else sealed(self.folder, name, make())


def asking(name: str, x: np.ndarray[Any, np.dtype[np.float32]], *, binary: bool) -> bytes:
    """A whole infer request."""
    path = f"/v2/models/{name}/infer"
    if not binary:
        return request_of(path, json_body(x), "content-type: application/json")
    body, header = binary_body(x)
    return request_of(path, body, "content-type: application/octet-stream", header)


def settled(port: int, request: bytes, clients: int, seconds: float) -> list[Answer]:
    """Responses of a closed loop after a warm-up; each must have status 200."""
    closed_loop(port, request, clients=clients, seconds=min(1.0, seconds / 2))
    answers = closed_loop(port, request, clients=clients, seconds=seconds)
    bad = [one.status for one in answers if one.status != 200]
    if bad or not answers:
        raise SystemExit(f"{len(bad)} of {len(answers)} answers were not 200, the first: {bad[:1]}")
    return answers


def raw_cpu_us(bundle: Bundle, x: np.ndarray[Any, Any], seconds: float) -> float:
    """Processor time of one run of the program, alone in a loop of this process."""
    runtime = session(bundle.program_path())
    for _ in range(100):
        runtime.run(["y"], {"x": x})
    runs, cpu, until = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(100):
            runtime.run(["y"], {"x": x})
        runs += 100
    return (time.process_time() - cpu) / runs * 1e6


def cpu_us(pid: int, port: int, request: bytes, seconds: float, clients: int = 8) -> float:
    """Processor time of a process for each request of `clients` connections."""
    settled(port, request, clients, seconds / 2)
    before = cpu_s(pid)
    answers = closed_loop(port, request, clients=clients, seconds=seconds)
    return (cpu_s(pid) - before) / len(answers) * 1e6


def overhead(bench: Bench) -> Figures:
    bundle = bench.bundle("mlp", mlp)
    raw_us = raw_cpu_us(bundle, ROW, min(1.0, bench.seconds))
    found: Figures = {"raw_us": round(raw_us, 1)}
    with start(bundle.path) as server:
        for name, binary in (("binary", True), ("json", False)):
            request = asking("mlp", ROW, binary=binary)
            spent_us = {
                clients: cpu_us(server.pid, server.port, request, bench.seconds, clients) for clients in (1, 8, 32)
            }
            with connect(server.port) as client:
                answer_bytes = first_answer(client, request)
            with floor(len(request), answer_bytes) as (pid, port):
                floor_us = cpu_us(pid, port, request, bench.seconds / 2)
            with floor(len(request), answer_bytes, bundle.program_path()) as (pid, port):
                bare_us = cpu_us(pid, port, request, bench.seconds, 1)
            found |= {f"overhead_us_{name}": round(spent_us[8] - raw_us, 1), f"floor_us_{name}": round(floor_us, 1)}
            found |= {f"bare_us_{name}_c1": round(bare_us - raw_us, 1)}
            found |= {f"overhead_us_{name}_c{clients}": round(spent_us[clients] - raw_us, 1) for clients in (1, 32)}
    return found


def asked_by_32(pid: int, port: int, request: Requests, seconds: float) -> tuple[float, float]:
    """Requests a second at 32 connections, and microseconds of processor time for each of them, of the whole server."""
    closed_loop(port, request, clients=STREAMS, seconds=min(1.0, seconds / 2))
    spent = tree_cpu_s(pid)
    answers = closed_loop(port, request, clients=STREAMS, seconds=seconds)
    spent = tree_cpu_s(pid) - spent
    bad = [one.status for one in answers if one.status != 200]
    if bad or not answers:
        raise SystemExit(f"{len(bad)} of {len(answers)} answers were not 200, the first: {bad[:1]}")
    return rate(answers), spent / len(answers) * 1e6


OIP_PATH = "/v2/models/mlp/infer"
SENT = "256 floats with all digits, id, traceparent, x-request-id and length of its own in each request; 32 connections"


def check_ids(port: int, requests: list[list[bytes]]) -> None:
    """Raises SystemExit unless each answer has the id of its request."""
    for one in requests[0]:
        with connect(port) as client:
            client.sendall(one)
            answer = b""
            while not answer.endswith(b"}"):
                answer += client.recv(65536)
        if json.loads(answer.partition(b"\r\n\r\n")[2])["id"] != ids_of([one])[0]:
            raise SystemExit("an answer has not the id of its request")


def clients_beside_sketch(bench: Bench) -> Figures:
    bundle = bench.bundle("mlp", mlp)
    sent, best_case = clients(OIP_PATH), constant(OIP_PATH)
    program, turns = bundle.program_path(), 2 if bench.quick else 7
    spent_us: dict[str, list[float]] = {}
    with start(bundle.path) as server, sketch(program) as plain, sketch(program, uvloop=True) as with_uvloop:
        ours = (server.pid, server.port)
        for _, port in (ours, plain, with_uvloop):
            check_ids(port, sent)
        servers: list[tuple[str, tuple[int, int], Requests]] = [
            ("trueline", ours, sent),
            ("sketch", plain, sent),
            ("sketch_uvloop", with_uvloop, sent),
            ("best_case", ours, best_case),
            ("sketch_best_case", plain, best_case),
        ]
        for _ in range(turns):
            for name, (pid, port), requests in servers:
                spent_us.setdefault(name, []).append(asked_by_32(pid, port, requests, bench.seconds / 3)[1])
    ratios = [ours / naive for ours, naive in zip(spent_us["trueline"], spent_us["sketch"], strict=True)]
    return {
        "clients_vs_sketch": round(statistics.median(ratios), 2),
        "clients_us": {name: round(statistics.median(each), 1) for name, each in spent_us.items()},
        "clients_sent": SENT,
    }


def peers(bench: Bench) -> Figures:
    """Every server gets the same model, the same number of connections, and its own protocol's JSON."""
    bundle = bench.bundle("mlp", mlp)
    sent, best_case = clients(OIP_PATH), constant(OIP_PATH)
    rps: dict[str, list[float]] = {}
    spent_us: dict[str, list[float]] = {"raw": [raw_cpu_us(bundle, ROW, min(1.0, bench.seconds))]}
    ratios: dict[str, dict[str, float]] = {"clients": {}, "best_case": {}}
    missing: dict[str, str] = {}

    def ask(name: str, pid: int, port: int, requests: Requests) -> float:
        found, spent = asked_by_32(pid, port, requests, bench.seconds / 2)
        rps.setdefault(name, []).append(found)
        spent_us.setdefault(name, []).append(spent)
        return found

    with start(bundle.path) as server:
        ask("trueline_binary", server.pid, server.port, asking("mlp", ROW, binary=True))
        with connect(server.port) as client:
            answer_bytes = first_answer(client, best_case)
        with floor(len(best_case), answer_bytes) as (pid, port):
            spent_us["floor"] = [asked_by_32(pid, port, best_case, bench.seconds / 2)[1]]
        for name in serving.PEERS:
            python = bench.venvs / serving.venv_of(name) / "bin" / "python"
            if not python.exists():
                missing[name] = "not installed; run make peers-serving"
                continue
            try:
                with serving.running(name, python, bundle.program_path(), bench.folder / name) as (pid, port, how):
                    for kind, own, theirs in (
                        ("clients", sent, clients(how.path, how.body)),
                        ("best_case", best_case, constant(how.path, how.body)),
                    ):
                        suffix = "" if kind == "clients" else "_best_case"
                        turns = [
                            ask("trueline" + suffix, server.pid, server.port, own)
                            / ask(name + suffix, pid, port, theirs)
                            for _ in range(1 if bench.quick else 3)
                        ]
                        ratios[kind][name] = statistics.median(turns)
            except serving.NotServed as error:
                missing[name] = str(error)
    return {
        "clients_vs_best_peer": round(min(ratios["clients"].values()), 2) if ratios["clients"] else None,
        "best_case_vs_best_peer": round(min(ratios["best_case"].values()), 2) if ratios["best_case"] else None,
        "clients_vs_peers": {name: round(ratio, 2) for name, ratio in ratios["clients"].items()},
        "peers": {name: round(statistics.median(each)) for name, each in rps.items()},
        "cpu_us": {name: round(statistics.median(each), 1) for name, each in spent_us.items()},
        "peers_missing": missing,
        "clients_sent": SENT,
    }


def image(bench: Bench) -> Figures:
    x = np.zeros((1, 3, 224, 224), np.float32)
    with start(bench.bundle("image", mean_of_image).path) as server:
        answers = settled(server.port, asking("image", x, binary=True), 2, bench.seconds)
    return {"image_rps": round(rate(answers)), "image_p50_ms": round(quantile_ms(answers, 0.5), 3)}


def compute(bench: Bench) -> Figures:
    bundle = bench.bundle("resnet18", resnet18)
    runtime = session(bundle.program_path(), threads=0)
    raw: dict[int, float] = {}
    for rows in (1, 2, 4) if bench.quick else (1, 2, 4, 8):
        x = np.zeros((rows, 3, 224, 224), np.float32)
        runtime.run(None, {"x": x})
        runs, began = 0, time.perf_counter()
        while time.perf_counter() - began < bench.seconds:
            runtime.run(None, {"x": x})
            runs += 1
        raw[rows] = rows * runs / (time.perf_counter() - began)
    best = max(raw, key=lambda rows: raw[rows])
    x = np.zeros((1, 3, 224, 224), np.float32)
    with start(bundle.path) as server:
        answers = settled(server.port, asking("resnet18", x, binary=True), max(4, 2 * best), 4 * bench.seconds)
    return {
        "compute_ratio": round(rate(answers) / raw[best], 3),
        "compute_rps": round(rate(answers), 1),
        "compute_raw": {str(rows): round(value, 1) for rows, value in raw.items()},
    }


def managed(server: RunningServer, method: str, path: str) -> None:
    """One management request. Raises SystemExit when it is refused."""
    assert server.management_url is not None
    connection = http.client.HTTPConnection(server.management_url.removeprefix("http://"), timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{method} {path}: {answer.status} {said[:200]!r}")


def stored(bench: Bench) -> RunningServer:
    """A server with the small model as `mlp`, and its bundle in a store."""
    store = bench.folder / "store"
    if not store.exists():
        store.mkdir()
        sealed(store, "mlp", mlp())
    return start(None, model_store=str(store), load="mlp", management_port=0)


def rollouts(bench: Bench) -> Figures:
    """Registers a version, makes it default, retires the old one, under 200 requests a second without a version."""
    count, per_second = (20, 50) if bench.quick else (1000, 200)
    answers: list[Answer] = []
    over = threading.Event()
    with stored(bench) as server:
        request = asking("mlp", ROW, binary=True)

        def ask() -> None:
            while not over.is_set():
                answers.extend(paced(server.port, request, per_second=per_second, seconds=1.0, clients=32))

        asker = threading.Thread(target=ask)
        asker.start()
        began = time.perf_counter()
        for turn in range(count):
            version = str(turn + 2)
            managed(server, "POST", f"/models?url=mlp.bundle&model_version={version}&initial_workers=1")
            managed(server, "PUT", f"/models/mlp/{version}/set-default")
            managed(server, "DELETE", f"/models/mlp/{turn + 1}")
        took_s = time.perf_counter() - began
        over.set()
        asker.join()
    return {
        "rollouts": count,
        "rollout_s": round(took_s / count, 3),
        "rollout_requests": len(answers),
        "rollout_failed": sum(one.status not in (200, HUNG) for one in answers),
        "rollout_hung": sum(one.status == HUNG for one in answers),
    }


@contextlib.contextmanager
def apart(begin: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """A server that has one core, while this client has the others; where there is only one they share it.

    Otherwise the client slows the model down: sending ten times the capacity takes a good part of a core.
    """
    cores = os.sched_getaffinity(0)
    first = {min(cores)}
    os.sched_setaffinity(0, first)  # the server inherits it, and plans its threads by it
    try:
        with begin() as server:
            os.sched_setaffinity(0, cores - first or cores)
            yield server
    finally:
        os.sched_setaffinity(0, cores)


def overload(bench: Bench) -> Figures:
    """Models of some twenty and fifty milliseconds, with ten times the requests that they can answer.

    The peak and ten times the capacity take turns of some seconds, each flood is compared with the peaks on either
    side of it, and the figure is the median: a machine's speed drifts by more than refusals cost. A refusal wakes two
    processes in any server: the share of runs that this leaves is measured on a bare server (`overload_floor`).
    """
    found: Figures = {}
    turns = 2 if bench.quick else 10
    for width, suffix in ((4096, ""), (2560, "_20ms")):
        bundle = bench.bundle(f"deep{width}", lambda width=width: mlp(width=width, layers=12))
        one = _overloaded(bundle, turns)
        floors, floor_us = _refusing(bundle, one, (turns + 1) // 2)
        found |= {
            f"overload_goodput{suffix}": round(statistics.median(one.goodputs), 3),
            f"overload_goodputs{suffix}": [round(ratio, 2) for ratio in one.goodputs],
            f"overload_floor{suffix}": round(statistics.median(floors), 3),
            f"overload_floors{suffix}": [round(ratio, 2) for ratio in floors],
            f"overload_ms{suffix}": round(1e3 / one.peak, 1),
            f"overload_us_per_429{suffix}": round(one.us_per_429),
            f"overload_floor_us_per_429{suffix}": round(floor_us),
            f"time_to_429_ms{suffix}": round(quantile_ms(one.answers, 0.5, status=429), 2),
            f"overload_asked_x{suffix}": round(len(one.answers) / (turns * FLOOD_S) / one.peak, 1),
            f"overload_429{suffix}": one.num_refused,
            f"overload_other{suffix}": len(one.answers) - one.num_refused - one.num_good,
            f"overload_p99_ms{suffix}": round(quantile_ms(one.answers, 0.99)),
        }
    return found


PEAK_S, FLOOD_S = 4.0, 7.0
CONNECT_S = 1.0
"""At the beginning of a flood, not counted: its clients connect."""


@dataclass(frozen=True, slots=True)
class Overloaded:
    """The outcome of floods of ten times a model's capacity, in turns with its peak."""

    goodputs: list[float]
    """Of each flood, over the peaks before and after it."""
    peak: float
    """Responses a second without refusals; the median."""
    answers: list[Answer]
    """Of all floods."""
    spent_s: float
    """CPU time of the thread that answers within them."""
    usual_s: float
    """Its CPU time for a response without refusals."""

    @property
    def us_per_429(self) -> float:
        return (self.spent_s - self.num_good * self.usual_s) * 1e6 / max(1, self.num_refused)

    @property
    def num_refused(self) -> int:
        return sum(one.status == 429 for one in self.answers)

    @property
    def num_good(self) -> int:
        return sum(one.status == 200 for one in self.answers)


def _between(turns: list[float], around: list[float]) -> list[float]:
    """Each of `turns` over the mean of what was measured before and after it."""
    return [2 * one / (before + after) for one, (before, after) in zip(turns, itertools.pairwise(around), strict=True)]


def _within(answers: list[Answer], since: float, until: float) -> list[Answer]:
    """Responses during the load: a queue that drains afterwards refuses nothing."""
    return [one for one in answers if since <= one.at < until]


def _overloaded(bundle: Bundle, turns: int) -> Overloaded:
    request = asking(bundle.path.stem, ROW, binary=True)
    peaks: list[float] = []
    floods: list[float] = []
    answers: list[Answer] = []
    usual_s = spent_s = 0.0
    num_usual = 0
    with apart(lambda: start(bundle.path, max_batch=1, max_queue=32)) as server:
        settled(server.port, request, 16, PEAK_S)
        for turn in range(turns + 1):
            usual_s -= loop_s(server.pid)
            began = time.perf_counter()
            calm = closed_loop(server.port, request, clients=16, seconds=PEAK_S)
            usual_s += loop_s(server.pid)
            num_usual += len(calm)
            peaks.append(rate(_within(calm, began, began + PEAK_S)))
            if turn == turns:
                break
            spent_s -= loop_s(server.pid)
            began = time.perf_counter()
            flood = paced(server.port, request, per_second=10 * peaks[-1], seconds=FLOOD_S, clients=256)
            spent_s += loop_s(server.pid)
            floods.append(rate(_within(flood, began + CONNECT_S, began + FLOOD_S)))
            answers += flood
    return Overloaded(
        goodputs=_between(floods, peaks),
        peak=statistics.median(peaks),
        answers=answers,
        usual_s=usual_s / num_usual,
        spent_s=spent_s,
    )


def _refusing(bundle: Bundle, like: Overloaded, turns: int) -> tuple[list[float], float]:
    """Runs of the model while a bare server refuses as many requests, over its runs without requests; and microseconds
    of processor time for each refusal.
    """
    request = asking(bundle.path.stem, ROW, binary=True)
    calm: list[float] = []
    floods: list[float] = []
    spent_s, num_refused = 0.0, 0
    with apart(lambda: floor(len(request), 200, bundle.program_path(), refusing=True)) as (pid, port):
        while runs_of(port, request) < 3:
            time.sleep(0.1)
        for turn in range(2 * turns + 1):
            began, runs = time.perf_counter(), -runs_of(port, request)
            if turn % 2:
                spent_s -= loop_s(pid)
                num_refused += len(paced(port, request, per_second=9 * like.peak, seconds=FLOOD_S, clients=256))
                spent_s += loop_s(pid)
            else:
                time.sleep(PEAK_S)
            runs += runs_of(port, request)
            (floods if turn % 2 else calm).append(runs / (time.perf_counter() - began))
    return _between(floods, calm), spent_s * 1e6 / num_refused


def load(bench: Bench) -> Figures:
    took: list[float] = []
    times = 3 if bench.quick else 20
    with stored(bench) as server:
        before = pss_mb(server.pid)
        for turn in range(times):
            began = time.perf_counter()
            managed(server, "POST", f"/models?url=mlp.bundle&model_version={turn + 2}&initial_workers=1")
            took.append(time.perf_counter() - began)
        more = (pss_mb(server.pid) - before) / times
    return {"load_ms": round(statistics.median(took) * 1e3, 1), "load_version_mb": round(more, 2)}


def adaptive(bench: Bench) -> Figures:
    """Static settings of a grid, each in a server of its own, and none; the same clients in turn, medians of rounds."""
    bundle = bench.bundle("wide", lambda: mlp(width=1024, layers=4))
    request = asking("wide", ROW, binary=True)
    grid = [(1, 0.0), (8, 0.0), (16, 0.002), (32, 0.0)]
    if not bench.quick:
        grid += [(4, 0.0), (8, 0.002), (16, 0.0), (32, 0.002), (64, 0.0), (64, 0.005)]
    rounds = 1 if bench.quick else ROUNDS
    took: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):  # in turn: the machine is another from minute to minute
        for max_batch, delay_s in [(64, None), *grid]:
            with start(bundle.path, max_batch=max_batch, max_delay_s=delay_s) as server:
                answers = settled(server.port, request, 16, bench.seconds / rounds)
            name = "learned" if delay_s is None else f"{max_batch} rows, {delay_s * 1e3:g} ms"
            took.setdefault(name, []).append((rate(answers), quantile_ms(answers, 0.99)))
    seen = {name: tuple(map(statistics.median, zip(*found, strict=True))) for name, found in took.items()}
    learned, p99_ms = seen.pop("learned")
    fair = {name: rps for name, (rps, p99) in seen.items() if p99 <= 1.05 * p99_ms}
    best = max(fair, key=lambda name: fair[name], default=None)
    return {
        "adaptive_ratio": round(learned / fair[best], 3) if best else 1.0,
        "adaptive_rps": round(learned),
        "adaptive_p99_ms": round(p99_ms, 2),
        "adaptive_best": best,
        "adaptive_grid": {name: [round(rps), round(p99, 2)] for name, (rps, p99) in seen.items()},
    }


def hostile(bench: Bench) -> Figures:
    bundle = bench.bundle("mlp", mlp)
    with start(bundle.path) as server:
        settled(server.port, asking("mlp", ROW, binary=True), 8, 1.0)
        rounds, seconds = (3, 4.0) if bench.quick else (8, 6.0)
        request = asking("mlp", ROW, binary=True)
        figures = measure(server.pid, server.port, request, "mlp", rounds=rounds, seconds=seconds)
    return figures | {"after_largest_mb": round(max((sizes := _after_largest(bundle)).values())), "after_mb": sizes}


def _after_largest(bundle: Bundle) -> dict[str, float]:
    """Memory of a new server after one request of the largest size, less what it had before, for each form of it."""
    text = largest_body()
    tensor, header = binary_body(np.zeros((MAX_VALUES // 256 - 1, 256), np.float32))
    forms = {
        "json": (text, "content-type: application/json"),
        "gzip": (gzip.compress(text), "content-type: application/json", "content-encoding: gzip"),
        "binary": (tensor, header),
    }
    after: dict[str, float] = {}
    for name, (body, *headers) in forms.items():
        with start(bundle.path) as server:
            settled(server.port, asking("mlp", ROW, binary=True), 8, 1.0)
            before = tree_pss_mb(server.pid)
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
            connection.request("POST", "/v2/models/mlp/infer", body, dict(one.split(": ") for one in headers))
            answer = connection.getresponse()
            answer.read()
            connection.close()
            time.sleep(1.0)
            after[f"{name} {answer.status}"] = round(tree_pss_mb(server.pid) - before, 1)
    return after


PARTS: dict[str, Callable[[Bench], Figures]] = {
    "overhead": overhead,
    "clients": clients_beside_sketch,
    "peers": peers,
    "image": image,
    "compute": compute,
    "rollouts": rollouts,
    "overload": overload,
    "load": load,
    "hostile": hostile,
    "adaptive": adaptive,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts with commas between; all if left out")
    parser.add_argument("--quick", action="store_true", help="short, to see that it works")
    parser.add_argument(
        "--venvs", type=Path, default=Path(__file__).parent / ".venvs", help="where peers are installed"
    )
    given = parser.parse_args()
    chosen = [part for part in given.only.split(",") if part] or list(PARTS)
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        parser.error(f"no part '{unknown[0]}' (there are: {', '.join(PARTS)})")
    result: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder=Path(folder), quick=given.quick, venvs=given.venvs)
        for part in chosen:
            print(f"{part} ...", file=sys.stderr)
            result |= PARTS[part](bench)
    rows = [[key, value if isinstance(value, (int, float)) else json.dumps(value)] for key, value in result.items()]
    report(["what", "found"], rows, result)


if __name__ == "__main__":
    main()
