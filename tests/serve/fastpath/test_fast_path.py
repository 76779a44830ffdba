"""The fast path against the uncached path, which decides what every answer is."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from conformance.fast_path import *  # noqa: F403 - the shared tests
from conformance.fast_path import Case
from trueline.bundle import Bundle, Dim, Golden, Signature
from trueline.serve.batching.policy import Policy
from trueline.serve.fastpath.fast_path import DECIDING, MAX_HEADS, InferFastPath
from trueline.serve.fastpath.templates import MAX_TEMPLATES
from trueline.serve.models.catalog import Models, Shadow
from trueline.serve.models.split import Split
from trueline.serve.models.version import ProgramVersion
from trueline.serve.protocols.router import Routes
from trueline.torchserve.extension import TorchServe
from trueline.web.access_log import AccessLogMiddleware
from trueline.web.connection import Connection
from trueline.web.messages import Answer, App, InlineFuture, Request, Response
from trueline.web.parser import HttpLimits
from trueline.web.server import HttpServer
from worlds import bundles, connections
from worlds.connections import Wire
from worlds.servers import load_as_if
from worlds.waiting import until_async


def looked_up(out: Path) -> Bundle:
    """Rows of a table of four by index: the program refuses an index that it has not."""
    signature = Signature(
        inputs=(bundles.spec("x", "batch", datatype="INT64"),),
        outputs=(bundles.spec("y", "batch", 2),),
        dims={"batch": Dim()},
    )
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    model = bundles.graph(
        [helper.make_node("Gather", ["table", "x"], ["y"])], signature.inputs, signature.outputs, {"table": table}
    )
    x = np.array([0, 3, 1, 2])
    return bundles.bundle(out, model, signature, [Golden(case="4", inputs={"x": x}, outputs={"y": table[x]})])


def two_ways(out: Path) -> Bundle:
    """The sum and the difference of two inputs."""
    inputs, outputs = [bundles.spec(one, "batch", 2) for one in "ab"], [bundles.spec(one, "batch", 2) for one in "st"]
    nodes = [helper.make_node("Add", ["a", "b"], ["s"]), helper.make_node("Sub", ["a", "b"], ["t"])]
    signature = Signature(inputs=tuple(inputs), outputs=tuple(outputs), dims={"batch": Dim()})
    a, b = np.arange(8, dtype=np.float32).reshape(4, 2), np.ones((4, 2), np.float32)
    golden = Golden(case="4", inputs={"a": a, "b": b}, outputs={"s": a + b, "t": a - b})
    return bundles.bundle(out, bundles.graph(nodes, inputs, outputs), signature, [golden])


def as_many_as_it_says(out: Path) -> Bundle:
    """The first columns of `x`, as many as its largest value says."""
    signature = Signature(
        inputs=(bundles.spec("x", "batch", 3),),
        outputs=(bundles.spec("y", "batch", "k"),),
        dims={"batch": Dim(), "k": Dim()},
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["count"], to=7),
        helper.make_node("Reshape", ["count", "one"], ["end"]),
        helper.make_node("Slice", ["x", "zero", "end", "one"], ["y"]),
    ]
    weights = {"zero": np.array([0]), "one": np.array([1])}
    x = np.ones((4, 3), np.float32)
    model = bundles.graph(nodes, signature.inputs, signature.outputs, weights)
    return bundles.bundle(out, model, signature, [Golden(case="4", inputs={"x": x}, outputs={"y": x[:, :1]})])


@dataclass(slots=True)
class Log:
    entries: list[Any] = field(default_factory=list)

    def enter(self, entry: Any) -> None:
        self.entries.append(entry)


class World:
    """A server without a socket, over one ready model `tiny`, and the loop that it lives on."""

    def __init__(self, bundle: Bundle, *, policy: Policy | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.bundle = bundle
        self.models = Models()
        self.policy = policy or Policy()
        self.versions: list[ProgramVersion] = []
        self.tiny = self.add("1")
        self.retiring: set[asyncio.Task[None]] = set()
        self.routes = Routes(self.models, self.loop, extension=TorchServe())
        self.server = self.behind(self.routes)

    def add(self, version: str) -> ProgramVersion:
        made = self.models.add("tiny", version)
        self.versions.append(made)
        loaded = load_as_if(self.bundle, 20e-6)
        made.make_ready(loaded, self.policy, ThreadPoolExecutor(1), self.loop)
        return made

    def behind(self, app: App) -> HttpServer:
        return HttpServer(app, HttpLimits(), self.loop)

    def connect(self) -> tuple[Connection, Wire]:
        connection, wire = self.server(), Wire()
        connection.connection_made(wire)  # type: ignore[arg-type]
        return connection, wire

    def request(self, whole: bytes) -> Request:
        """As it is once its head is known."""
        return connections.known(whole)

    def teach(self, whole: bytes) -> None:
        """Asks until requests like it are known."""
        connection, wire = self.connect()
        for asked in range(1, 4):
            connection.data_received(whole)
            self.until(lambda: wire.answers() == asked)  # noqa: B023
        assert wire.written.count(b"HTTP/1.1 200") == 3, wire.written
        assert self.learned(whole), "no reply was cached"
        connection.connection_lost(None)

    def learned(self, whole: bytes) -> bool:
        request, fast_path = self.request(whole), self.routes._fast_path
        assert isinstance(fast_path, InferFastPath)
        known = fast_path.find_head(request)
        if known is None or known.templates is None:
            return False
        found = known.templates.find(request.body, known.json_bytes, [], None)
        return found is not None and found[0].reply is not None

    def crowd(self) -> None:
        """Turns of the loop bring several requests each from now on."""
        assert self.tiny._batcher is not None
        self.tiny._batcher.hold()
        self.tiny._batcher.release(2)

    def until(self, holds: Callable[[], bool]) -> None:
        self.loop.run_until_complete(until_async(holds, "every request is answered"))

    def together(self, wholes: list[bytes]) -> list[bytes]:
        """What requests of as many connections are answered that come in one turn of the loop."""
        opened = [self.connect() for _ in wholes]

        async def come() -> None:
            for (connection, _), whole in zip(opened, wholes, strict=True):
                connection.data_received(whole)
            await until_async(lambda: all(wire.answers() for _, wire in opened), "every request is answered")

        self.loop.run_until_complete(come())
        for connection, _ in opened:
            connection.connection_lost(None)
        return [wire.written for _, wire in opened]

    def ask(self, whole: bytes) -> Response:
        return self._there(self.routes.answer(self.request(whole)))

    def uncached(self, whole: bytes) -> Response:
        return self.answer_uncached(self.request(whole))

    def answer_uncached(self, request: Request) -> Response:
        anew = Request(request.method, request.target, request.headers, request.body)
        return self._there(self.routes.handle_uncached(anew))

    def _there(self, found: Answer) -> Response:
        if not isinstance(found, Response):
            self.until(found.done)
            return found.result()
        return found

    def close(self) -> None:
        for version in self.versions:
            if version.state == "ready":
                self.loop.run_until_complete(version.retire())
        self.loop.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(bundles.double_plus(tmp_path / "b", max_rows=8))
    yield made
    made.close()


@pytest.fixture
def case(world: World) -> Case:
    """For the shared tests."""
    world.add("2")
    binary, binary_in_json_out = in_bytes([[1, 2, 3]]), in_bytes([[1, 2, 3]], answer=False)
    v1 = post(b"{}", path="/v1/models/tiny:predict")
    for whole in (USUAL, binary, binary_in_json_out):
        world.teach(whole)
    world.connect()[0].data_received(v1)

    def repeated() -> list[Request]:
        others = [same_length(USUAL, b"1.25", value) for value in (b"1.25", b"7.50", b"-0.0", b"1e30")]
        others += [binary, in_bytes([[4, 5, 6]]), in_bytes([[np.nan, 5, 6]]), binary_in_json_out]
        return [world.request(whole) for whole in others]

    def foreign() -> list[Request]:
        found = [same_length(USUAL, *change) for change in OTHERS if change[1] not in (b"7.50", b"-0.0")]
        head_unknown = Request("POST", b"/v2/models/tiny/infer?x", {}, USUAL.partition(b"\r\n\r\n")[2])
        return [*map(world.request, found), world.request(v1), head_unknown]

    return Case(
        fast_path=world.routes._fast_path,
        answer_uncached=world.answer_uncached,
        repeated=repeated,
        foreign=foreign,
        change_models=lambda: world.models.set_default("tiny", "2"),
    )


@pytest.fixture
def table(tmp_path: Path) -> Iterator[World]:
    made = World(looked_up(tmp_path / "b"))
    yield made
    made.close()


def post(body: bytes, *headers: str, path: str = "/v2/models/tiny/infer") -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: t", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def in_json(*rows: list[Any], datatype: str = "FP32", shape: list[int] | None = None, **more: Any) -> bytes:
    data = [value for row in rows for value in row]
    shape = shape or [len(rows), len(rows[0])]
    tensor = {"name": "x", "shape": shape, "datatype": datatype, "data": data}
    return post(json.dumps({"inputs": [tensor], **more}, separators=(",", ":")).encode())


def in_bytes(values: Any, *headers: str, answer: bool = True, **more: Any) -> bytes:
    array = np.asarray(values, np.float32)
    size = {"binary_data_size": array.nbytes}
    tensor = {"name": "x", "shape": list(array.shape), "datatype": "FP32", "parameters": size}
    parameters = {"binary_data_output": answer} | more
    head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    return post(head + array.tobytes(), f"inference-header-content-length: {len(head)}", *headers)


def parts(response: Response) -> tuple[int, bytes, bytes, bytes]:
    return response.status, response.body, response.content_type, response.headers


def values_of(answer: bytes) -> list[float]:
    assert answer.startswith(b"HTTP/1.1 200"), answer
    found: list[float] = json.loads(answer.partition(b"\r\n\r\n")[2])["outputs"][0]["data"]
    return found


def same_length(whole: bytes, old: bytes, new: bytes) -> bytes:
    assert old in whole
    assert len(old) == len(new)
    return whole.replace(old, new)


USUAL = in_json([1.25, 2.25, 3.25])
"""All that follow have its head, and so does what they are asked by."""
OTHERS = [
    (b"1.25", b"7.50"),
    (b"1.25", b"1e39"),
    (b"1.25", b"-0.0"),
    (b"1.25", b"true"),
    (b"1.25", b"null"),
    (b"1.25", b"[17]"),
    (b"1.25", b"1,25"),
    (b"1.25", b"    "),
    (b"1.25,2.25", b"1.2534567"),
    (b'"x"', b'"z"'),
    (b'"FP32"', b'"FP64"'),
    (b"[1,3]", b"[3,1]"),
    (b"[1,3]", b"[1,4]"),
    (b"3.25]", b"3.2]]"),
    (b"]}]}", b"]}}]"),
    (b'"name"', b'"nome"'),
]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.sampled_from([(b"1.25", b"1.25"), *OTHERS]), min_size=1, max_size=12))
def test_whatever_comes_under_a_known_head_is_answered_as_the_uncached_path_answers(
    world: World, changes: list[tuple[bytes, bytes]]
) -> None:
    world.teach(USUAL)
    for old, new in changes:
        whole = same_length(USUAL, old, new)
        assert parts(world.ask(whole)) == parts(world.uncached(whole))


def test_an_answer_whose_shape_the_values_decide_has_the_shape_that_they_decide(tmp_path: Path) -> None:
    world = World(as_many_as_it_says(tmp_path / "b"))
    world.teach(in_json([1.0, 1.0, 2.0]))
    for largest in (3, 2, 1, 2):
        for whole in (in_json([1.0, 1.0, float(largest)]), in_bytes([[1, 1, largest]])):
            for _ in range(3):
                (answer,) = world.together([whole])
            assert answer.endswith(world.uncached(whole).body)
    world.close()


@pytest.mark.parametrize("answer", [True, False])
def test_raw_bytes_are_answered_as_the_uncached_path_answers_whatever_lies_in_them(world: World, answer: bool) -> None:
    world.teach(in_bytes([[1, 2, 3]], answer=answer))
    for values in ([4, 5, 6], [np.nan, np.inf, -np.inf], [3e38, -3e38, 1e-45]):
        whole = in_bytes([values], answer=answer)
        assert world.learned(whole)
        assert parts(world.ask(whole)) == parts(world.uncached(whole))


def test_several_inputs_and_outputs_are_each_laid_and_read_in_their_place(tmp_path: Path) -> None:
    world = World(two_ways(tmp_path / "b"))

    def whole(a: Any, b: Any, *, turned: bool = False, wanted: str = "st") -> bytes:
        given = [("a", np.asarray(a, np.float32)), ("b", np.asarray(b, np.float32))]
        given = given[::-1] if turned else given
        size = [{"binary_data_size": one.nbytes} for _, one in given]
        inputs = [
            {"name": name, "shape": list(one.shape), "datatype": "FP32", "parameters": bytes_}
            for (name, one), bytes_ in zip(given, size, strict=True)
        ]
        outputs = [{"name": one, "parameters": {"binary_data": True}} for one in wanted]
        head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
        body = head + b"".join([one.tobytes() for _, one in given])
        return post(body, f"inference-header-content-length: {len(head)}")

    for wanted in ("st", "ts", "t"):
        world.teach(whole([[1, 2]], [[3, 4]], wanted=wanted))
        asked = [whole([[value, 2]], [[3, value]], wanted=wanted) for value in range(5)]
        world.crowd()
        for answer, one in zip(world.together(asked), asked, strict=True):
            assert answer.endswith(world.uncached(one).body)
    turned = whole([[5, 6]], [[7, 8]], turned=True)
    for _ in range(4):
        (answer,) = world.together([turned])
    assert answer.endswith(world.uncached(turned).body)
    world.close()


def test_what_comes_in_one_turn_is_run_together_and_each_is_given_its_own(world: World) -> None:
    world.teach(USUAL)
    two_rows = in_json([1.25, 2.25, 3.25], [4.25, 5.25, 6.25])
    world.teach(two_rows)
    wholes = [same_length(USUAL, b"1.25", f"{value}.25".encode()) for value in range(4)]
    wholes.insert(2, two_rows)
    world.crowd()
    before = {rows: list(seen) for rows, seen in world.tiny.stats.runs_by_rows.items()}
    answers = world.together(wholes)
    assert [values_of(one)[0] for one in answers] == [1.5, 3.5, 3.5, 5.5, 7.5]
    assert values_of(answers[2]) == [3.5, 5.5, 7.5, 9.5, 11.5, 13.5]
    assert world.tiny.stats.runs_by_rows[6][0] == 1
    assert {rows: seen[0] for rows, seen in world.tiny.stats.runs_by_rows.items() if rows != 6} == {
        rows: seen[0] for rows, seen in before.items() if rows != 6
    }


def test_a_turn_of_more_rows_than_a_full_batch_is_run_in_several(world: World) -> None:
    world.teach(USUAL)
    world.crowd()
    wholes = [same_length(USUAL, b"1.25", f"{value % 10}.25".encode()) for value in range(21)]
    assert [values_of(one)[0] for one in world.together(wholes)] == [2 * (value % 10) + 1.5 for value in range(21)]
    assert max(world.tiny.stats.runs_by_rows) == 8  # which is all that was proven


def test_one_that_the_program_refuses_fails_alone(table: World) -> None:
    def index(number: int) -> bytes:
        return in_json([number], datatype="INT64", shape=[1])

    table.teach(index(1))
    refused = table.ask(index(7))
    assert parts(refused) == parts(table.uncached(index(7)))
    assert refused.status == 400
    table.crowd()
    answers = table.together([index(number) for number in (0, 7, 3, 1)])
    assert [values_of(answers[at]) for at in (0, 2, 3)] == [[0, 1], [6, 7], [2, 3]]
    assert answers[1].startswith(b"HTTP/1.1 400")
    assert answers[1].endswith(refused.body)


def test_who_goes_away_before_the_turn_ends_takes_nobody_along(world: World) -> None:
    log = Log()
    world.server = world.behind(AccessLogMiddleware(world.routes, "data", log))  # type: ignore[arg-type]
    world.teach(USUAL)
    world.crowd()
    log.entries.clear()
    opened = [world.connect() for _ in range(3)]

    async def come() -> None:
        for connection, _ in opened:
            connection.data_received(USUAL)
        opened[1][0].connection_lost(None)
        await until_async(lambda: len(log.entries) == 3, "every request is logged")

    world.loop.run_until_complete(come())
    assert [len(wire.written) > 0 for _, wire in opened] == [True, False, True]
    assert sorted(entry.status for entry in log.entries) == [200, 200, 499]
    assert max(world.tiny.stats.runs_by_rows) == 2, "what nobody waits for was run"
    assert {entry.bytes_out for entry in log.entries if entry.status == 200} == {
        len(opened[0][1].written.partition(b"\r\n\r\n")[2])
    }


def to_version_two(world: World) -> None:
    world.models.set_default("tiny", "2")


def to_a_split(world: World) -> None:
    world.models.set_split("tiny", Split({"2": 1}))


def to_a_shadow(world: World) -> None:
    world.models.shadows["tiny"] = Shadow(world.models.find("tiny", "2"))


def to_nobody(world: World) -> None:
    world.tiny.scale(0)


@pytest.mark.parametrize("change", [to_version_two, to_a_split, to_a_shadow, to_nobody])
def test_what_changes_where_requests_go_changes_it_for_known_ones_too(
    world: World, change: Callable[[World], None]
) -> None:
    world.add("2")
    world.teach(USUAL)
    change(world)
    for _ in range(4):
        found = world.ask(USUAL)
        if change is to_nobody:
            assert found.status == 503
        else:
            expected = "1" if change is to_a_shadow else "2"
            assert json.loads(found.body)["model_version"] == expected
    if change is to_a_shadow:
        world.until(lambda: world.models.find("tiny", "2").stats.rows == 4)


def test_a_version_that_retires_answers_what_it_holds_and_is_then_let_go_of(world: World) -> None:
    world.add("2")
    world.teach(USUAL)
    world.crowd()
    program = weakref.ref(world.tiny.loaded.session)
    opened = [world.connect() for _ in range(3)]

    async def come() -> None:
        for connection, _ in opened:
            connection.data_received(USUAL)
        world.models.set_default("tiny", "2")
        await world.models.remove("tiny", "1").retire()

    world.loop.run_until_complete(come())
    assert [values_of(wire.written) for _, wire in opened] == [[3.5, 5.5, 7.5]] * 3
    gc.collect()
    assert program() is None, "a head that is known keeps the program of a version that has gone"
    assert json.loads(world.ask(USUAL).body)["model_version"] == "2"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_goes_and_takes_over_each_is_answered_once_by_the_version_that_it_came_to(
    world: World, seed: int
) -> None:
    rng = random.Random(seed)
    world.teach(USUAL)
    newest, answered, gone = 1, 0, 0

    def body_of(value: int) -> bytes:
        if value % 3 == 0:
            return in_bytes([[value + 0.25, 2, 3]], answer=value % 2 == 0)
        return same_length(USUAL, b"1.25", f"{value}.25".encode())

    def first_of(answer: bytes) -> tuple[str, float]:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), answer
        length = re.search(rb"inference-header-content-length: (\d+)", head)
        told = json.loads(body[: int(length[1])] if length else body)
        if length:
            return told["model_version"], float(np.frombuffer(body[int(length[1]) :], np.float32)[0])
        return told["model_version"], told["outputs"][0]["data"][0]

    async def play() -> None:
        nonlocal newest, answered, gone
        for _ in range(300):
            come: list[tuple[str, int, Connection, Wire]] = []
            for _ in range(rng.choice([0, 1, 1, 2, 5, 12])):
                value, (connection, wire) = rng.randrange(10), world.connect()
                come.append((str(newest), value, connection, wire))
                connection.data_received(body_of(value))
                if rng.random() < 0.1:
                    connection.connection_lost(None)
                    gone += 1
                    come.pop()
                if rng.random() < 0.015:
                    newest += 1
                    world.add(str(newest))
                    world.models.set_default("tiny", str(newest))
                    retiring = world.models.remove("tiny", str(newest - 1)).retire()
                    world.retiring.add(asyncio.get_running_loop().create_task(retiring))
            await asyncio.sleep(0)
            for _ in range(20 if rng.random() < 0.1 else 1):
                await asyncio.sleep(0)
            while not all(wire.written for *_, wire in come):
                await asyncio.sleep(0)
            for version, value, connection, wire in come:
                assert wire.written.count(b"HTTP/1.1") == 1
                assert first_of(wire.written) == (version, 2 * (value + 0.25) + 1)
                connection.connection_lost(None)
                answered += 1
        await asyncio.wait_for(asyncio.gather(*world.retiring), 100)

    world.loop.run_until_complete(play())
    assert newest > 3
    assert answered > 200
    assert gone > 10
    together = [rows for one in world.versions for rows in one.stats.runs_by_rows if rows > 1]
    assert len(together) > 5


@pytest.mark.parametrize(
    "whole",
    [
        in_bytes([[1, 2, 3]], "x-trueline-priority: 1"),
        in_bytes([[1, 2, 3]], priority=1),
        in_bytes([[1, 2, 3]], timeout=10**7),
        in_bytes([[1, 2, 3]], timeout=0),
        in_json([1, 2, 3], id="7"),
        in_json([[1, 2, 3]], id="7", shape=[1, 3]),
        in_json([1, 2, 3], parameters={"sent_at": 1767225600.25, "priority": 3}),
    ],
)
def test_what_is_urgent_has_a_deadline_or_a_name_is_answered_as_fast(world: World, whole: bytes) -> None:
    world.teach(whole)
    assert parts(world.ask(whole)) == parts(world.uncached(whole))


@pytest.mark.parametrize(
    "whole",
    [
        in_bytes([[1, 2, 3]], timeout=49_999),
        in_json([1, 2, 3], id="caf\u00e9"),
        in_json([1, 2, 3], id="a" * 257),
        in_json([1, 2, 3], parameters={"note": "\\"}),
    ],
)
def test_what_has_a_near_deadline_or_an_unusual_name_takes_the_uncached_path(world: World, whole: bytes) -> None:
    connection, wire = world.connect()
    for asked in range(1, 13):
        connection.data_received(whole)
        world.until(lambda: wire.answers() == asked)  # noqa: B023
    assert wire.written.count(b"HTTP/1.1 200") == 12
    assert world.routes._fast_path.try_answer(world.request(whole)) is None


IDS = st.one_of(
    st.uuids().map(str), st.text(max_size=40), st.sampled_from(["", "7", '"', "\\", "\x1f", "a" * 256, None])
)
FORMS: list[Callable[..., bytes]] = [
    lambda id, value, more: in_json([value, 2.0, 3.0], id=id, parameters=more),
    lambda id, value, more: post(json.dumps({"id": id, "parameters": more, "inputs": [x_of(value)]}).encode()),
    lambda id, value, more: in_json([[value, 2.0, 3.0]], shape=[1, 3], id=id),
    lambda id, value, more: in_bytes([[value, 2, 3]], **more),
    lambda id, value, more: in_bytes_of(value, id, more),
]


def x_of(value: float) -> dict[str, Any]:
    return {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [value, 2.0, 3.0]}


def in_bytes_of(value: float, request_id: str | None, more: dict[str, Any]) -> bytes:
    array = np.array([value, 2, 3], np.float32)
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}
    said = {"id": request_id, "inputs": [tensor], "parameters": {"binary_data_output": True} | more}
    head = json.dumps(said).encode()
    return post(head + array.tobytes(), f"inference-header-content-length: {len(head)}")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(FORMS),
            IDS,
            st.floats(-1e3, 1e3, width=32),
            st.fixed_dictionaries(
                {},
                optional={
                    "priority": st.sampled_from([0, 1, 3, 5, -1, True, 77, 10**30, "1", 1.5]),
                    "timeout": st.sampled_from([0, 10**7, 10**9, 10**20, -1, True, "1", 1e7, None]),
                    "note": IDS,
                    "sent_at": st.one_of(st.floats(), st.integers()),
                    "sequence_id": st.sampled_from([0, 7]),
                },
            ),
        ),
        min_size=1,
        max_size=12,
    )
)
@pytest.mark.long
def test_requests_with_ids_and_parameters_of_their_own_are_answered_as_the_uncached_path_answers(
    world: World, requests: list[tuple[Callable[..., bytes], str | None, float, dict[str, Any]]]
) -> None:
    for form, request_id, value, more in requests:
        whole = form(request_id, value, more)
        for _ in range(3):
            assert parts(world.ask(whole)) == parts(world.uncached(whole))


def id_of(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"inference-header-content-length: (\d+)", head)
    found: str = json.loads(body[: int(length[1])] if length else body)["id"]
    return found


@pytest.mark.parametrize("form", [0, 1, 4])
def test_each_answer_of_a_turn_has_the_id_and_the_values_of_its_request(world: World, form: int) -> None:
    world.teach(FORMS[form]("taught", 1.0, {}))
    world.crowd()
    ids = [f"{number:x}" * (number + 1) for number in range(8)]
    answers = world.together([FORMS[form](one, float(number), {}) for number, one in enumerate(ids)])
    assert [id_of(one) for one in answers] == ids
    assert max(world.tiny.stats.runs_by_rows) == 8, "they were not run together"
    for number, answer in enumerate(answers):
        assert answer.endswith(world.uncached(FORMS[form](ids[number], float(number), {})).body)


def test_the_log_has_the_id_in_the_headers_of_each_request_whose_head_is_known(world: World) -> None:
    log = Log()
    world.server = world.behind(AccessLogMiddleware(world.routes, "data", log))  # type: ignore[arg-type]
    connection, wire = world.connect()
    for number in range(12):
        connection.data_received(post(USUAL.partition(b"\r\n\r\n")[2], f"x-request-id: r{number}", f"x: {number}"))
        world.until(lambda: wire.answers() == number + 1)  # noqa: B023
    assert [one.id for one in log.entries] == [f"r{number}" for number in range(12)]


def test_a_json_length_that_is_longer_than_this_body_is_refused_under_a_known_head(world: World) -> None:
    whole = in_bytes([[1, 2, 3]])
    world.teach(whole)
    head, _, body = whole.partition(b"\r\n\r\n")
    short = re.sub(rb"\ncontent-length: \d+", b"\ncontent-length: 9", head) + b"\r\n\r\n" + body[:9]
    assert world.ask(short).status == 400
    assert parts(world.ask(short)) == parts(world.uncached(short))


def test_keys_of_a_model_that_is_not_split_change_nothing_and_one_that_is_goes_by_them(world: World) -> None:
    body = USUAL.partition(b"\r\n\r\n")[2]
    world.add("2")
    world.teach(post(body, "x-trueline-key: a"))
    assert world.routes._fast_path.try_answer(world.request(post(body, "x-trueline-key: b"))) is not None
    world.models.set_split("tiny", Split({"1": 1, "2": 1}))
    versions = {
        key: {json.loads(world.ask(post(body, f"x-trueline-key: {key}")).body)["model_version"] for _ in range(5)}
        for key in "abcdefgh"
    }
    assert all(len(seen) == 1 for seen in versions.values())
    assert set().union(*versions.values()) == {"1", "2"}


def test_no_header_but_the_deciding_ones_is_read_of_an_infer_request(world: World) -> None:
    class Watched(dict[bytes, bytes]):
        def __getitem__(self, name: bytes) -> bytes:
            read.add(name)
            return super().__getitem__(name)

        def get(self, name: bytes, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

        def __contains__(self, name: object) -> bool:
            read.add(name)
            return super().__contains__(name)

    read: set[object] = set()
    given = world.request(in_bytes([[1, 2, 3]], "x-trueline-priority: 1", "content-type: a/b"))
    for _ in range(4):
        world.answer_uncached(Request(given.method, given.target, Watched(given.headers), given.body))
    keys = {b"x-trueline-key", b"ts_request_sequence_id"}  # read again for each request that goes by a split
    assert read - keys == set(DECIDING)


def test_forms_of_one_client_displace_no_form_that_others_use_and_fill_no_memory(world: World) -> None:
    world.teach(USUAL)
    fast_path = world.routes._fast_path
    for number in range(4 * MAX_TEMPLATES):
        note = "n" * (number + 1)
        own = post(json.dumps({note: None, "inputs": [x_of(1.0)]}).encode(), path=f"/v2/models/tiny/infer?{note}")
        for _ in range(2):
            assert world.ask(own).status == 200
        assert fast_path.try_answer(world.request(USUAL)) is not None
    assert world.tiny.templates._size <= MAX_TEMPLATES
    assert isinstance(fast_path, InferFastPath)
    assert len(fast_path._heads) <= MAX_HEADS


def test_what_comes_while_others_wait_waits_behind_them(world: World) -> None:
    world.teach(USUAL)
    batcher = world.tiny._batcher
    assert batcher is not None

    async def come() -> None:
        waiting = batcher.submit({"x": np.ones((1, 3), np.float32)}, 1, "another kind", None, 5)
        found = world.routes.answer(world.request(USUAL))
        assert isinstance(found, asyncio.Future)
        assert batcher.num_waiting == 2
        await waiting
        await found

    world.loop.run_until_complete(come())


def test_both_ways_count_alike(tmp_path: Path) -> None:
    counted = []
    for fast in (True, False):
        world = World(bundles.double_plus(tmp_path / str(fast)))
        world.teach(USUAL)
        stats, request = world.tiny.stats, world.request(USUAL)
        before, by_status = stats.request_s.count, world.routes.stats.by_status[200]
        for _ in range(10):
            answer = world.routes.answer(request) if fast else world.routes.handle_uncached(request)
            assert isinstance(answer, Response)
        counted.append(
            (stats.request_s.count - before, world.routes.stats.by_status[200] - by_status, stats.batch_s.count)
        )
        assert min(stats.decode_s, stats.encode_s, stats.infer_s, stats.request_s.total) > 0
        assert stats.decode_s + stats.encode_s + stats.infer_s <= 1.001 * stats.request_s.total
        if fast:
            world.crowd()
            runs, answered = stats.batch_s.count, world.routes.stats.by_status[200]
            world.together([USUAL] * 5)
            assert stats.batch_s.count == runs + 1
            assert world.routes.stats.by_status[200] == answered + 5
            assert stats.request_s.count == before + 15
            assert stats.queue_s > 0
        world.close()
    assert counted[0] == counted[1]


def test_an_answer_that_is_to_come_tells_everyone_once_and_goes_on_when_one_of_them_fails() -> None:
    async def main() -> None:
        told: list[str] = []
        failed: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))

        def fails(_: InlineFuture) -> None:
            raise ValueError("on purpose")

        later = InlineFuture()
        with pytest.raises(asyncio.InvalidStateError):
            later.result()
        later.add_done_callback(fails)
        later.add_done_callback(lambda one: told.append(one.result().body.decode()))
        later.set_result(Response(200, b"a"))
        later.add_done_callback(lambda one: told.append("late"))
        assert told == ["a", "late"]
        assert (later.done(), later.cancelled(), later.cancel()) == (True, False, False)
        assert [str(one["exception"]) for one in failed] == ["on purpose"]
        gone = InlineFuture()
        gone.add_done_callback(lambda one: told.append(f"gone {one.cancelled()}"))
        assert gone.cancel()
        gone.set_result(Response(200, b"b"))
        assert told[2:] == ["gone True"]
        with pytest.raises(asyncio.CancelledError):
            gone.result()

    asyncio.run(main())
