"""Handlers without a process: frames, parameters of a request, plans, batches, measures, entry points. Fast."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest

from trueline.errors import RequestError, TooLarge
from trueline.serve.handlers import archive, child, framing, messages
from trueline.serve.handlers import config as plan
from trueline.serve.handlers.archive import ArchiveError
from trueline.serve.handlers.failures import HandlerFailed
from trueline.serve.handlers.loader import ArchiveLoader, CodeNotAllowed, name_in_store
from trueline.serve.handlers.messages import encode_answer
from trueline.serve.handlers.metrics import MAX_SERIES, Measures
from trueline.serve.handlers.worker import _answer
from trueline.serve.models.catalog import Models
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import ResolvedSource, VersionOptions
from trueline.serve.models.servable import HandlerAnswer
from trueline.serve.models.sources import Store
from trueline.torchserve.compat.ts.context import Context, RequestProcessor
from trueline.torchserve.compat.ts.metrics.dimension import Dimension
from trueline.torchserve.compat.ts.metrics.metric_type_enum import MetricTypes
from trueline.torchserve.compat.ts.metrics.metrics_store import MetricsStore
from trueline.torchserve.compat.ts.utils import util
from trueline.torchserve.responses import error
from trueline.web.messages import Request, render
from worlds import archives

MANIFEST = archive.Manifest(model="noop", version="1.0", handler="noop.py")


# frames


@pytest.mark.parametrize("size", [0, 10, framing.INLINE_BYTES, framing.INLINE_BYTES + 1, 3_000_000])
def test_a_frame_arrives_as_it_was_sent_whatever_its_size(size: int) -> None:
    one, other = framing.pair()
    parts = [os.urandom(size), b"", b"last"]
    with one, other:
        framing.send(one, {"kind": "batch", "n": 1}, parts)
        assert framing.receive(other, 2**23) == ({"kind": "batch", "n": 1}, parts)
        one.close()
        with pytest.raises(framing.Closed):
            framing.receive(other, 2**23)


def test_no_descriptor_stays_open_after_large_frames() -> None:
    one, other = framing.pair()
    with one, other:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            framing.send(one, {}, [bytes(200_000)])
            framing.receive(other, 2**20)
        assert len(os.listdir("/proc/self/fd")) == before


def _lie(write: Callable[[socket.socket], object]) -> None:
    one, other = framing.pair()
    with one, other:
        write(one)
        framing.receive(other, 100_000)


def test_what_is_no_frame_is_refused() -> None:
    def short(sock: socket.socket) -> None:
        sock.send(b"abc")

    def long(sock: socket.socket) -> None:
        sock.send(framing._PREFIX.pack(0, 2, 99) + b"{}")

    def unsized(sock: socket.socket) -> None:
        sock.send(framing._PREFIX.pack(0, 2, 2) + b"{}")

    def missized(sock: socket.socket) -> None:
        text = b'{"sizes":[5,-3]}'
        sock.send(framing._PREFIX.pack(0, len(text), len(text) + 1) + text + b"x")

    def huge(sock: socket.socket) -> None:
        framing.send(sock, {}, [bytes(200_000)])

    def shrunken(sock: socket.socket) -> None:
        memory = os.memfd_create("short")
        socket.send_fds(sock, [framing._PREFIX.pack(1, 50, 90_000)], [memory])
        os.close(memory)

    for lie in (short, long, unsized, missized, huge, shrunken):
        with pytest.raises(framing.Malformed):
            _lie(lie)


# parameters


def request(content: bytes, kind: str = "", **headers: str) -> Request:
    told = {name.encode(): value.encode() for name, value in headers.items()}
    return Request("POST", b"/predictions/noop?a=1", told | ({b"content-type": kind.encode()} if kind else {}), content)


def test_a_plain_body_is_the_parameter_body_and_the_servers_token_stays_with_the_server() -> None:
    ask = messages.decode_request(
        request(b"[1]", "application/json", authorization="Bearer x", **{"x-mine": "1"}), explain=True, url_path="a/b"
    )
    assert list(ask.parts) == [("body", "application/json", b"[1]")]
    assert ask.headers == {"content-type": "application/json", "x-mine": "1", "explain": "True", "url_path": "a/b"}


def test_each_part_of_a_form_is_a_parameter_by_its_name() -> None:
    text = (
        b'--b\r\nContent-Disposition: form-data; name="data"; filename="k.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
        b"\xff\xd8\r\n\xff\r\n"
        b'--b\r\nContent-Disposition: form-data; name="target"\r\n\r\n7\r\n--b--\r\n'
    )
    ask = messages.decode_request(request(text, "multipart/form-data; boundary=b"), explain=False)
    assert list(ask.parts) == [("data", "image/jpeg", b"\xff\xd8\r\n\xff"), ("target", "", b"7")]
    coded = messages.decode_request(request(b"data=a%20b&target=", "application/x-www-form-urlencoded"), explain=False)
    assert list(coded.parts) == [("data", "", b"a b"), ("target", "", b"")]
    curled = messages.decode_request(request(b'{"x": [1, 2]}', "application/x-www-form-urlencoded"), explain=False)
    assert [part[0] for part in curled.parts] == ["body"]


def test_torchserves_older_routes_pass_the_query_on_as_parameters() -> None:
    assert [part[0] for part in messages.decode_request(request(b"[1]"), explain=False).parts] == ["body"]
    both = messages.decode_request(request(b"[1]", "application/json"), explain=False, query=True)
    assert list(both.parts) == [("body", "application/json", b"[1]"), ("a", "", b"1")]
    assert list(messages.decode_request(request(b""), explain=False, query=True).parts) == [("a", "", b"1")]
    form = messages.decode_request(request(b"data=x", "application/x-www-form-urlencoded"), explain=False, query=True)
    assert [part[0] for part in form.parts] == ["data", "a"]


def test_forms_that_are_torn_or_endless_are_a_clients_fault() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    with pytest.raises(RequestError, match="needs the boundary"):
        messages.decode_request(request(part, "multipart/form-data"), explain=False)
    for text in (
        b"",
        part,
        b"--b\r\n\r\nno header\r\n--b--\r\n",
        b"--b\r\nContent-Disposition: form-data\r\n\r\n1\r\n--b--",
    ):
        with pytest.raises(RequestError, match="form"):
            messages.decode_request(request(text, "multipart/form-data; boundary=b"), explain=False)
    with pytest.raises(TooLarge, match="more than 256 parts"):
        messages.decode_request(request(part * 300 + b"--b--\r\n", "multipart/form-data; boundary=b"), explain=False)


# plans and batches


def test_the_call_goes_before_the_configuration_and_that_before_the_defaults() -> None:
    config = {"minWorkers": 2, "batchSize": 8, "maxBatchDelay": 50, "responseTimeout": 7, "mine": [1]}
    made = plan.draw_up(MANIFEST, config, {"batch_size": "4", "initial_workers": "x"})
    assert (made.workers, made.batch_size, made.max_batch_delay_s, made.response_timeout_s) == (2, 4, 0.05, 7.0)
    assert (made.startup_timeout_s, made.queue_size, made.handler, made.gpus) == (120.0, 100, "noop.py", ())
    assert plan.draw_up(MANIFEST, {}, {"handler": "image_classifier"}, [0, 1]).gpus == (0, 1)
    assert plan.draw_up(MANIFEST, {"deviceType": "cpu"}, {}, [0, 1]).gpus == ()


@pytest.mark.parametrize(
    "config",
    [{"batchSize": "many"}, {"minWorkers": -1}, {"maxBatchDelay": True}, {"parallelType": "tp"}, {"deviceIds": [7]}],
)
def test_a_configuration_that_cannot_be_followed_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ArchiveError, match="archive's"):
        plan.draw_up(MANIFEST, config, {}, [0])


def test_the_envelope_is_the_manifests_else_the_servers() -> None:
    of_manifest = msgspec.structs.replace(MANIFEST, envelope="kserve")
    assert plan.draw_up(of_manifest, {"serviceEnvelope": "body"}, {}).envelope == "kserve"
    assert plan.draw_up(MANIFEST, {"serviceEnvelope": "body"}, {}).envelope == "body"
    assert plan.draw_up(MANIFEST, {}, {}).envelope == ""
    with pytest.raises(ArchiveError, match="'soap', expected one of body, json, kserve, kservev2"):
        plan.draw_up(msgspec.structs.replace(MANIFEST, envelope="soap"), {}, {})


@dataclass
class Waiting:
    since: float
    alone: bool = False


def test_a_full_batch_goes_at_once_and_one_that_is_not_waits_for_its_oldest() -> None:
    made = plan.HandlerPlan(handler="h", batch_size=3, max_batch_delay_s=1.0)
    queue = [Waiting(10.0), Waiting(10.5)]
    assert plan.gather([], now=0.0, plan=made) == (0, None)
    assert plan.gather(queue, now=10.9, plan=made) == (0, 11.0)
    assert plan.gather(queue, now=11.0, plan=made) == (2, None)
    assert plan.gather([*queue, Waiting(10.6), Waiting(10.7)], now=10.7, plan=made) == (3, None)
    assert plan.gather([*queue, Waiting(10.6, alone=True)], now=10.7, plan=made) == (2, None)
    assert plan.gather([Waiting(10.6, alone=True), *queue], now=10.7, plan=made) == (1, None)


# answers


def test_an_answer_has_a_content_type_only_if_the_handler_names_one() -> None:
    plain = render(encode_answer(HandlerAnswer(body=b"x")), None, date=b"", close=False)
    assert b"content-type" not in plain
    assert plain.startswith(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n")
    told = encode_answer(HandlerAnswer(body=b"x", status=299, headers={"content-type": "image/png", "x-a": "1"}))
    assert b"HTTP/1.1 299 \r\ncontent-type: image/png\r\n" in render(told, None, date=b"", close=False)
    assert b"x-a: 1\r\n" in told.headers


def test_headers_that_would_split_the_answer_are_not_sent() -> None:
    told = {"status": 200, "phrase": "", "headers": {"X-A": "1\r\nset-cookie: a=b"}}
    with pytest.raises(ValueError, match="cannot be sent"):
        _answer(told, bytearray())
    kept = _answer(told | {"headers": {"Content-Length": "9", "X-B": "2"}}, bytearray())
    assert kept.headers == {"x-b": "2"}


def test_a_handlers_failure_is_said_in_torchserves_words() -> None:
    answer = error(HandlerFailed("Prediction failed"))
    assert answer.status == 503
    assert b'"type": "InternalServerException"' in answer.body
    assert error(HandlerFailed("Worker died.")).status == 503
    assert error(HandlerFailed("Worker died."), strict=True).status == 500
    assert HandlerFailed("odd", 99).status == 500


# measures


def test_what_handlers_count_is_summed_and_what_is_no_measure_is_left_out() -> None:
    measures = Measures("noop", "1.0")
    measures.add([["hits", "counter", 1, {"a": "x"}], ["hits", "counter", 2, {"a": "x"}], ["t-ms", "gauge", 3.5, {}]])
    measures.add([["h", "histogram", 3.0, {}], ["nan", "gauge", float("nan"), {}], "odd", ["hits", "gauge", 9, {}]])
    measures.add({"not": "a list"})
    samples = {one.name: one for family in measures.collect("here") for one in family.samples}
    assert samples["hits"].value == 3.0
    assert samples["hits"].labels == {"a": "x", "model_name": "noop", "model_version": "1.0", "Hostname": "here"}
    assert samples["t_ms"].value == 3.5
    assert samples["h_count"].value == 1
    assert "nan" not in samples


def test_a_handler_that_invents_labels_does_not_fill_the_memory() -> None:
    measures = Measures("noop", "1.0")
    measures.add([["hits", "counter", 1, {"id": str(i)}] for i in range(MAX_SERIES + 50)])
    assert sum(len(family.samples) for family in measures.collect("here")) == MAX_SERIES


# the `ts` package


def test_the_context_tells_and_takes_what_torchserves_does() -> None:
    context = Context(
        "noop", "/m", {"model": {}}, 4, None, "1", metrics=MetricsStore("noop"), model_yaml_config={"a": 1}
    )
    context.request_processor = [RequestProcessor({"content-type": "x", "explain": "False"})]
    context.request_ids = {0: "id"}
    assert context.get_request_header(0, "Content-Type") == "x"
    assert context.get_request_header(0, "missing") is None
    assert (context.get_request_id(0), context.model_yaml_config) == ("id", {"a": 1})
    context.set_response_content_type(0, "image/png")
    context.set_response_status(code=418, phrase="teapot", idx=0)
    assert context.get_response_headers(0) == {"content-type": "image/png"}
    assert context.get_response_status(0) == (418, "teapot")
    assert context.system_properties["batch_size"] == 4
    assert context._system_properties is context.system_properties


def test_what_is_counted_is_drained_once_with_its_labels() -> None:
    store = MetricsStore("noop")
    store.add_counter("hits", 2, dimensions=[Dimension("lang", "en")])
    store.add_time("took", 1.5)
    store.add_error("oops", "text")  # type: ignore[arg-type]  # handlers do
    kept = store.add_metric_to_cache("kept", "count", ["lang"], MetricTypes.GAUGE)
    kept.add_or_update(7, ["de"])
    assert store.get_metric("kept", MetricTypes.GAUGE) is kept
    with pytest.raises(ValueError, match=r"has the dimensions \['lang'\]"):
        kept.add_or_update(7)
    labels = {"ModelName": "noop", "Level": "Model"}
    assert store.drain() == [
        ["hits", "counter", 2.0, labels | {"lang": "en"}],
        ["took", "gauge", 1.5, labels],
        ["oops", "counter", 1.0, labels | {"Level": "Error"}],
        ["kept", "gauge", 7.0, {"lang": "de"}],
    ]
    assert store.drain() == []


def test_classes_are_named_by_every_form_of_label_file(tmp_path: Path) -> None:
    path = tmp_path / "index_to_name.json"
    assert util.load_label_mapping(str(path)) is None
    for text, label in [
        ('{"0": "cat"}', "cat"),
        ('{"0": ["n01", "cat"]}', "cat"),
        ('{"object_type_names": ["cat"]}', "cat"),
    ]:
        path.write_text(text)
        assert util.load_label_mapping(str(path)) == {"0": label}
    path.write_text('{"0": 7}')
    with pytest.raises(ValueError, match="label of class '0'"):
        util.load_label_mapping(str(path))
    assert util.map_class_to_label([[0.9, 0.1]], {"0": "cat", "1": "dog"}, [[1, 0]]) == [{"dog": 0.9, "cat": 0.1}]
    assert util.map_class_to_label([[0.9, 0.1], [0.2, 0.8]]) == [{"0": 0.9, "1": 0.1}, {"0": 0.2, "1": 0.8}]


# entry points


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    def made(code: str, handler: str) -> Any:
        (tmp_path / "own_handler.py").write_text(dedent(code))
        monkeypatch.delitem(sys.modules, "own_handler", raising=False)
        answer, initialize = child.load_handler(handler, tmp_path)
        initialize("context")
        monkeypatch.delitem(sys.modules, "own_handler")
        return answer(["data"], "context")

    return made


def test_functions_and_classes_are_found_as_torchserve_finds_them(load: Callable[[str, str], Any]) -> None:
    function = "def handle(data, context): return [data]\ndef other(data, context): return ['other', data]"
    family = """
        class Base:
            def initialize(self, context): self.seen = context
            def handle(self, data, context): return [self.seen]
        class Mine(Base): pass
    """
    assert load(function, "own_handler.py") == [["data"]]
    assert load(function, "sub/own_handler.py") == [["data"]]
    assert load(function, "own_handler:other") == ["other", ["data"]]
    assert load(family, "own_handler") == ["context"]


def test_a_handler_that_is_not_there_is_named(load: Callable[[str, str], Any], tmp_path: Path) -> None:
    with pytest.raises(child.NoHandler, match="has no function 'nope'"):
        load("x = 1", "own_handler.py:nope")
    with pytest.raises(child.NoHandler, match=r"it has the classes A, B"):
        load(
            "class A:\n def handle(s): 0\n initialize = handle\nclass B(object):\n handle = initialize = A.handle",
            "own_handler",
        )
    with pytest.raises(child.NoHandler, match=r"neither nope\.py in the archive nor a default \(base_handler"):
        child.load_handler("nope.py", tmp_path)
    (tmp_path / "json.py").write_text("")
    with pytest.raises(child.NoHandler, match="'json' that is in use already"):
        child.load_handler("json.py", tmp_path)


# the store


def test_archives_stand_in_the_store_under_their_manifests_names(tmp_path: Path) -> None:
    archives.mar(tmp_path / "file.mar", modelName="resnet", modelVersion="2.0")
    (tmp_path / "torn.mar").write_bytes(b"x")
    found = [(one.model, one.version, one.source) for one in Store(tmp_path, name_in_store).entries()]
    assert found == [("resnet", "2.0", "file.mar"), ("torn", "1.0", "torn.mar")]


def test_without_allow_code_an_archive_is_refused_and_nothing_of_it_runs(tmp_path: Path) -> None:
    path = archives.mar(tmp_path / "a.mar", f"open({str(tmp_path / 'ran')!r}, 'w')")

    async def act() -> None:
        async def in_thread(work: Callable[[], Any]) -> Any:
            return work()

        loop = asyncio.get_running_loop()
        fleet = Fleet(Models(), loop, in_thread, loaders=[ArchiveLoader(VersionOptions(), None, loop, in_thread)])
        with pytest.raises(CodeNotAllowed, match=r"'a\.mar' is a model archive whose handler is code") as refused:
            await fleet.load(ResolvedSource(path=path), "noop", "1.0", source="a.mar")
        assert (refused.value.status, "--allow-code" in refused.value.hint) == (403, True)
        assert fleet.models.names() == []

    asyncio.run(act())
    assert not (tmp_path / "ran").exists()
