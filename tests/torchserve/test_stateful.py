"""A stateful archive behind a real server, over HTTP and gRPC: sequences are remembered, bounded and end in words."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import httpx
import pytest

from trueline import serve
from trueline.errors import TruelineError
from trueline.serve import RunningServer
from trueline.torchserve.grpc import INFERENCE
from trueline.wire import torchserve_pb2 as pb
from worlds import archives, servers
from worlds.waiting import until

pytestmark = pytest.mark.slow

SUM = """
    import fcntl, os

    class Sum:
        def initialize(self, context):
            context.cache = {}

        def handle(self, data, context):
            names = [context.get_sequence_id(index) for index in range(len(data))]
            answers = []
            for index, row in enumerate(data):
                said = bytes(row.get("data") or row.get("body") or b"0").decode()
                if said.startswith("wait "):
                    open(f"{said[5:]}.{names[index]}", "w").close()
                    with open(said[5:]) as gate:
                        fcntl.flock(gate, fcntl.LOCK_SH)
                    said = "1"
                if said == "die":
                    os._exit(3)
                name = names[index]
                if context.get_request_header(index, "ts_request_sequence_start") == "true":
                    context.cache[name] = 0
                context.cache[name] = context.cache.get(name, 0) + int(said)
                if said == "0":
                    context.set_response_header(index, context.header_key_sequence_end, name or "")
                answers.append({"sum": context.cache[name], "pid": os.getpid(), "batch": names})
            return answers
"""
CONFIG = """
minWorkers: 2
batchSize: 2
maxBatchDelay: 20
maxNumSequence: 16
sequenceMaxIdleMSec: 120000
maxSequenceJobQueueSize: 3
sequenceBatching: true
"""
WORDS = (
    'Model "sum" has no worker to serve inference request. Please use scale workers API to add workers. If this is a '
    "sequence inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)
ID = "ts_request_sequence_id"


class Gate:
    """A file that handlers wait for a lock on, and that is locked until the gate is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        self._file.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.open()


class Client:
    """A client over HTTP; its sequences end with it, so that each test begins with an empty server."""

    def __init__(self, server: RunningServer, model: str = "sum") -> None:
        assert server.management_url is not None
        self._path = f"/predictions/{model}"
        self._model = model
        self._http = httpx.Client(base_url=server.url, timeout=120)
        self._management = httpx.Client(base_url=server.management_url, timeout=120)
        self._threads = ThreadPoolExecutor(16)
        self._names: set[str] = set()

    def close(self) -> None:
        for name in sorted(self._names):
            self.post("0", name)
        self._threads.shutdown()
        self._http.close()
        self._management.close()

    def post(self, said: str, name: str = "", **headers: str) -> httpx.Response:
        told = headers | ({ID: name} if name else {})
        answer = self._http.post(self._path, content=said, headers=told)
        if answer.status_code == 200:
            self._names.add(answer.headers[ID])
        return answer

    def ask(self, said: str, name: str = "", **headers: str) -> dict[str, Any]:
        answer = self.post(said, name, **headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def refused(self, said: str, name: str = "", **headers: str) -> str:
        """Why a request is refused, behind TorchServe's words."""
        answer = self.post(said, name, **headers)
        assert (answer.status_code, answer.json()["type"]) == (503, "ServiceUnavailableException"), answer.text
        words: str = answer.json()["message"]
        assert words.startswith(WORDS.replace("sum", self._model) + ": ")
        return words.removeprefix(WORDS.replace("sum", self._model) + ": ")

    def later(self, said: str, name: str) -> Future[dict[str, Any]]:
        return self._threads.submit(self.ask, said, name)

    def hold(self, gate: Gate, name: str) -> Future[dict[str, Any]]:
        """A request whose worker is busy with it until the gate is open."""
        asked = self.later(f"wait {gate.path}", name)
        until(gate.path.with_name(f"{gate.path.name}.{name}").exists, "the worker is at the gate")
        return asked

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = self._management.get(f"/models/{self._model}").json()[0]
        return found

    def scale(self, workers: int) -> None:
        query = {"min_worker": str(workers), "synchronous": "true"}
        assert self._management.put(f"/models/{self._model}", params=query).status_code == 200

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Returns when the model's description is so."""
        until(lambda: holds(self.facts()), lambda: f"the model is as it should be, not {self.facts()}")

    def until_waiting(self, requests: int) -> None:
        self.until(lambda facts: facts["jobQueueStatus"]["pendingRequests"] == requests)


@pytest.fixture(scope="module")
def sequence_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("store")
    archives.mar(store / "sum.mar", SUM, modelName="sum", config=CONFIG)
    brief = "minWorkers: 1\nmaxNumSequence: 1\nsequenceMaxIdleMSec: 500\nsequenceTimeoutMSec: 1500"
    archives.mar(store / "brief.mar", SUM, modelName="brief", config=brief)
    with servers.running(store=store, load="sum,brief", management_port=0, grpc_port=0, allow_code=True) as server:
        yield server


@pytest.fixture
def client(sequence_server: RunningServer) -> Iterator[Client]:
    made = Client(sequence_server)
    yield made
    made.close()


def test_requests_of_a_sequence_meet_the_worker_that_remembers_them(client: Client) -> None:
    names = [f"seq {number}" for number in range(6)]

    def whole(name: str) -> list[dict[str, Any]]:
        return [client.ask(str(value), name) for value in (1, 2, 3, 4)]

    with ThreadPoolExecutor(len(names)) as threads:
        told = dict(zip(names, threads.map(whole, names), strict=True))
    for name, answers in told.items():
        assert [one["sum"] for one in answers] == [1, 3, 6, 10]
        assert len({one["pid"] for one in answers}) == 1
        assert all(name in one["batch"] and len(set(one["batch"])) == len(one["batch"]) for one in answers)
    assert len({answers[0]["pid"] for answers in told.values()}) == 2, "both workers have some"


def test_a_batch_takes_one_request_of_each_of_several_sequences(client: Client, gate: Gate) -> None:
    held = [client.hold(gate, name) for name in ("g1", "g2")]
    first = [client.later("1", name) for name in ("a", "b", "c", "d")]
    client.until_waiting(4)
    second = client.later("10", "a")
    client.until_waiting(5)
    gate.open()
    assert [one.result()["sum"] for one in held] == [1, 1]
    batches = {tuple(sorted(one.result()["batch"])) for one in first}
    assert sorted(map(len, batches)) == [2, 2], "each worker took its two sequences together"
    assert second.result()["sum"] == 11
    assert "a" in second.result()["batch"]


def test_a_sequence_without_an_id_is_given_one_and_begins_and_closes_in_words(client: Client) -> None:
    begun = client.post("5")
    name = begun.headers[ID]
    assert name.startswith("ts-seq-")
    assert begun.json()["sum"] == 5
    assert client.ask("6", name)["sum"] == 11
    assert client.ask("1", name, ts_request_sequence_end="true")["sum"] == 12
    assert client.refused("1", name).startswith(f"sequence '{name}' is closed; begin it again with ts_request_")
    assert client.ask("7", name, ts_request_sequence_start="true")["sum"] == 7
    by_handler = client.post("0", name)
    assert by_handler.headers["ts_request_sequence_end"] == name
    assert "is closed" in client.refused("1", name)
    unknown = client.refused("1", f"ts-seq-{uuid4()}")
    assert "is not known here, or not any more" in unknown
    odd = client.post("1", "x" * 200)
    assert (odd.status_code, "up to 128 printable" in odd.json()["message"]) == (400, True)


def test_a_full_sequence_refuses_and_those_who_wait_are_answered_in_order(client: Client, gate: Gate) -> None:
    asked = [client.hold(gate, "q")]
    for waiting, said in enumerate(("10", "100", "1000"), 1):
        asked.append(client.later(said, "q"))
        client.until_waiting(waiting)
    assert client.refused("10000", "q").startswith("3 requests of sequence 'q' wait already; ")
    assert client.ask("1", "other")["sum"] == 1, "another sequence does not wait behind it"
    gate.open()
    assert [one.result()["sum"] for one in asked] == [1, 11, 111, 1111]


def test_a_worker_that_dies_takes_its_sequences_along_and_says_so(client: Client) -> None:
    where = {name: client.ask("1", name)["pid"] for name in ("l1", "l2", "l3", "l4")}
    lost = [name for name, pid in where.items() if pid == where["l1"]]
    kept = [name for name in where if name not in lost]
    assert len(lost) == len(kept) == 2
    dead = client.post("die", "l1")
    assert (dead.status_code, dead.json()["message"]) == (503, "Worker died.")
    assert client.refused("1", lost[1]).startswith(f"sequence '{lost[1]}' was lost with its worker; begin it again")
    assert "was lost with its worker" in client.refused("1", "l1")
    assert [client.ask("1", name)["sum"] for name in kept] == [2, 2], "the other worker's go on"
    assert client.ask("3", "l1", ts_request_sequence_start="true")["sum"] == 3
    assert client.ask("3", "l1")["sum"] == 6


@pytest.mark.jobs
def test_idle_and_old_sequences_expire_and_free_their_place(sequence_server: RunningServer, gate: Gate) -> None:
    brief = Client(sequence_server, "brief")
    held = brief.hold(gate, "a")  # which is not idle meanwhile
    assert brief.refused("1", "b").startswith("as many sequences are open as may be (1); ")
    gate.open()
    assert held.result()["sum"] == 1
    until(lambda: brief.post("1", "b").status_code == 200, "'a' gives up its place")
    assert brief.refused("1", "a").startswith("sequence 'a' has expired: it was idle for 0.5 s; ")
    sums = []

    def refused() -> bool:
        answer = brief.post("1", "b")
        if answer.status_code == 200:
            sums.append(answer.json()["sum"])
        return answer.status_code != 200

    until(refused, "'b' is too old")
    assert sums == list(range(2, len(sums) + 2))
    assert brief.refused("1", "b").startswith("sequence 'b' has expired: it ")
    brief.close()


def test_scaling_down_waits_for_sequences_and_scaling_to_nothing_closes_them(client: Client) -> None:
    assert client.facts()["minWorkers"] == 2
    client.until(lambda facts: [one["status"] for one in facts["workers"]] == ["READY", "READY"])
    where = {name: client.ask("1", name)["pid"] for name in ("s1", "s2", "s3")}
    client.scale(1)
    leaving = [one["pid"] for one in client.facts()["workers"] if one["status"] == "UNLOADING"]
    small = [name for name, pid in where.items() if [pid] == leaving]
    assert len(small) == 1, "the worker with fewer sequences is to go"
    assert client.ask("1", small[0]) == {"sum": 2, "pid": leaving[0], "batch": small}
    assert client.ask("1", "new")["pid"] not in leaving, "what begins, begins with one that stays"
    client.ask("0", small[0])
    client.until(lambda facts: [one["pid"] for one in facts["workers"]] != leaving and len(facts["workers"]) == 1)
    client.scale(0)
    assert client.facts()["workers"] == []
    assert client.post("1", "new").status_code == 503
    client.scale(2)
    assert client.refused("1", "new").startswith("sequence 'new' was closed with its worker; begin it again")
    assert client.ask("4", "new", ts_request_sequence_start="true")["sum"] == 4


def test_the_description_tells_a_stateful_model_truly_and_asks_its_handler_outside_of_sequences(
    client: Client, sequence_server: RunningServer
) -> None:
    facts = client.facts()
    told = ("stateful", "sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize")
    assert [facts[key] for key in told] == [True, 120000, 0, 16, 3]
    own = servers.get(f"{sequence_server.management_url}/models/sum", params={"customized": "true"}).json()[0]
    assert own["customizedMetadata"]["batch"] == [None]
    assert client.facts()["jobQueueStatus"] == {"remainingCapacity": 48, "pendingRequests": 0}


# gRPC


def predict(name: str, **values: bytes) -> pb.PredictionsRequest:
    return pb.PredictionsRequest(model_name="sum", input=values, sequence_id=name)


@pytest.fixture
def channel(sequence_server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{sequence_server.grpc_port}") as made:
        yield made


def talk(channel: grpc.Channel, *requests: pb.PredictionsRequest) -> list[pb.PredictionResponse]:
    call = channel.stream_stream(
        f"/{INFERENCE}/StreamPredictions2", pb.PredictionsRequest.SerializeToString, pb.PredictionResponse.FromString
    )
    return list(call(iter(requests), timeout=120))


def test_a_stream_of_requests_is_one_sequence_that_other_calls_go_on_with(
    channel: grpc.Channel, client: Client
) -> None:
    told = talk(channel, *(predict("seq_0", data=value) for value in (b"1", b"2", b"3")))
    assert [(json.loads(one.prediction)["sum"], one.sequence_id) for one in told] == [
        (1, "seq_0"),
        (3, "seq_0"),
        (6, "seq_0"),
    ]
    unary = channel.unary_unary(
        f"/{INFERENCE}/Predictions", pb.PredictionsRequest.SerializeToString, pb.PredictionResponse.FromString
    )
    answer = unary(predict("seq_0", data=b"4"), timeout=60)
    assert (json.loads(answer.prediction)["sum"], answer.sequence_id) == (10, "seq_0")
    assert client.ask("5", "seq_0")["sum"] == 15, "over HTTP too"
    ended = talk(channel, predict("seq_0", data=b"1", ts_request_sequence_end=b"true"), predict("seq_0", data=b"1"))
    assert [one.status.code for one in ended] == [0, grpc.StatusCode.UNAVAILABLE.value[0]]
    assert ended[1].status.message.startswith(f"{WORDS}: sequence 'seq_0' is closed; begin it again")
    with pytest.raises(grpc.RpcError) as refused:
        unary(predict("seq_0", data=b"1"), timeout=60)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_stream_names_its_sequence_or_begins_one(channel: grpc.Channel) -> None:
    nameless, begun = talk(channel, predict("", data=b"1"), predict("", data=b"2", ts_request_sequence_start=b"true"))
    assert nameless.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert nameless.status.message.startswith("Parameter sequenceId is required.")
    assert begun.sequence_id.startswith("ts-seq-")
    (last,) = talk(channel, predict(begun.sequence_id, data=b"0"))
    assert json.loads(last.prediction)["sum"] == 2
    (odd,) = talk(channel, predict("a\nb", data=b"1"))
    assert odd.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


# several processes


def test_a_stateful_model_is_not_served_by_several_processes_and_that_is_said(tmp_path: Path) -> None:
    archives.mar(tmp_path / "sum.mar", SUM, modelName="sum", config=CONFIG)
    with (
        pytest.raises(TruelineError, match="serve it with --processes 1"),
        serve.start(tmp_path / "sum.mar", allow_code=True, processes=2),
    ):
        pass
