"""Long bodies are read beside the event loop, with the same answers, the same errors and a bound of everything."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import pickle
import signal
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline.errors import NotReady, Overloaded, RequestError
from trueline.serve import host
from trueline.serve.offload import child, frames
from trueline.serve.offload.frames import ALIGNMENT
from trueline.serve.offload.process import LONG_BYTES, LONG_VALUES, MAX_WAITING, MEDIUM_BYTES, Offload
from trueline.serve.protocols.oip import grpc_tensors
from trueline.serve.protocols.oip.rest import SHORT_BYTES
from trueline.serve.tensors import arrays
from trueline.web.body import BodyBuffer, SharedBody
from trueline.web.messages import Request, Response
from trueline.wire import inference_pb2 as pb
from worlds.servers import TinyApp
from worlds.waiting import until


@pytest.fixture
def app(tmp_path: Path) -> Iterator[TinyApp]:
    with TinyApp(tmp_path) as opened:
        yield opened


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.run_until_complete(made.shutdown_default_executor())
    made.close()


@pytest.fixture
def offload(loop: asyncio.AbstractEventLoop) -> Iterator[Offload]:
    made = Offload(loop)
    yield made
    made.close()


def padded(value: object, size: int = LONG_BYTES + 1) -> bytes:
    return json.dumps(value).encode() + b" " * size


def test_reading_beside_yields_the_processor_to_the_server_in_its_own_session_too(
    loop: asyncio.AbstractEventLoop, offload: Offload
) -> None:
    def ask(work: Any, *args: object) -> Any:
        return loop.run_until_complete(offload.run(work, *args, num_bytes=1))

    assert ask(os.nice, 0) == max(host.BESIDE_NICE, os.nice(0))
    group = Path("/proc/self/autogroup")  # "/autogroup-7 nice 15", where the kernel weighs sessions
    if group.exists():
        assert ask(group.read_text).split()[1:] in ([], ["nice", str(host.BESIDE_NICE)])


def test_the_garbage_collector_does_not_look_through_the_values_of_a_body_while_it_is_read(
    loop: asyncio.AbstractEventLoop, offload: Offload
) -> None:
    assert not loop.run_until_complete(offload.run(gc.isenabled, num_bytes=1))


INFER = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [0, 1, 2]}]}
FORMS: list[tuple[str, Any]] = [
    ("/v2/models/tiny/infer", INFER),
    ("/v1/models/tiny:predict", {"instances": [[0, 1, 2]]}),
    ("/predictions/tiny", [[0, 1, 2]]),
    ("/invocations", {"dataframe_split": {"columns": ["a", "b", "c"], "data": [[0, 1, 2]]}}),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_long_body_is_answered_as_a_short_one_and_not_at_once(app: TinyApp, path: str, body: Any, pack: Any) -> None:
    short = app.ask("POST", path, json.dumps(body).encode())
    headers = {"content-encoding": "gzip"} if pack is gzip.compress else {}
    long = app.ask("POST", path, pack(padded(body)), **headers)
    assert (long.status, long.body) == (200, short.body)
    request = Request("POST", path.encode(), {name.encode(): b"gzip" for name in headers}, pack(padded(body)))
    answer = app.routes.answer(request)
    assert not isinstance(answer, Response)
    assert app.run(answer).body == short.body


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_a_long_body_is_refused_in_the_words_of_a_short_one(app: TinyApp, path: str, body: Any) -> None:
    torn = json.dumps(body).encode()[:-1]
    short, long = (app.ask("POST", path, (b" " * size) + torn) for size in (0, LONG_BYTES + 1))
    assert short.status == long.status == 400
    at = len(torn) - 1
    assert long.body.replace(str(LONG_BYTES + 1 + at).encode(), str(at).encode()) == short.body or path != FORMS[0][0]


def test_a_request_without_tensors_has_no_long_body(app: TinyApp) -> None:
    for path in ("/v2/repository/index", "/v2/repository/models/tiny/load"):
        refused = app.ask("POST", path, padded({}, SHORT_BYTES))
        assert refused.status == 413
        assert str(SHORT_BYTES).encode() in refused.body


def test_many_numbers_are_written_as_json_beside_the_loop(app: TinyApp) -> None:
    outputs = {"y": np.arange(LONG_VALUES + 1, dtype=np.float32)}
    values = outputs["y"].tolist()
    made = app.routes.dispatch.encode("/", outputs, lambda body: Response(200, body.encode()), json.dumps, values)
    assert not isinstance(made, Response)
    assert json.loads(app.run(made).body) == values


def test_arrays_come_back_as_they_were_and_where_runtimes_can_read_them(
    offload: Offload, loop: asyncio.AbstractEventLoop
) -> None:
    text = json.dumps(list(range(100_000)))
    found = loop.run_until_complete(offload.run(arrays.parse, text.encode(), "FP32", 1, "x", num_bytes=len(text)))
    assert np.array_equal(found, np.arange(100_000, dtype=np.float32))
    assert found.ctypes.data % ALIGNMENT == 0


def test_errors_of_the_work_arrive_as_themselves(offload: Offload, loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(RequestError, match="'x' is no 1-fold list") as refused:
        loop.run_until_complete(offload.run(arrays.parse, b"[1, true]", "FP32", 1, "x", num_bytes=9))
    assert refused.value.status == 400
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        loop.run_until_complete(offload.run(divmod, 1, 0, num_bytes=9))


def test_a_process_that_dies_fails_its_body_with_503_and_the_next_is_read(
    offload: Offload, loop: asyncio.AbstractEventLoop
) -> None:
    first = loop.run_until_complete(offload.run(os.getpid, num_bytes=1))
    with pytest.raises(NotReady, match="has ended"):
        loop.run_until_complete(offload.run(os.kill, first, signal.SIGKILL, num_bytes=1))
    assert loop.run_until_complete(offload.run(os.getpid, num_bytes=1)) != first


def test_a_process_that_has_grown_ends_and_medium_bodies_do_not_wait_for_long_ones(
    offload: Offload, loop: asyncio.AbstractEventLoop
) -> None:
    long = MEDIUM_BYTES + 1
    first = loop.run_until_complete(offload.run(os.getpid, num_bytes=long))
    assert loop.run_until_complete(offload.run(os.getpid, num_bytes=1)) != first
    assert loop.run_until_complete(offload.run(len, "", num_bytes=long)) == 0
    assert loop.run_until_complete(offload.run(os.getpid, num_bytes=long)) == first
    grown = loop.run_until_complete(offload.run(np.ones, child.MAX_GROWN_KIB * 256, num_bytes=long))
    assert grown.sum() == child.MAX_GROWN_KIB * 256
    assert loop.run_until_complete(offload.run(os.getpid, num_bytes=long)) != first


def test_no_more_bodies_wait_than_there_is_room_for(offload: Offload, loop: asyncio.AbstractEventLoop) -> None:
    waiting = [offload.run(os.getpid, num_bytes=1) for _ in range(MAX_WAITING)]
    with pytest.raises(Overloaded, match=str(MAX_WAITING)):
        offload.run(os.getpid, num_bytes=1)
    loop.run_until_complete(asyncio.gather(*waiting))
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(offload.run(os.getpid, num_bytes=1))


def test_typed_and_raw_messages_of_grpc_lose_nothing_on_the_way() -> None:
    request = pb.ModelInferRequest(model_name="m", id="7")
    request.inputs.add(name="x", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1.5, 2.5])
    text, inputs = grpc_tensors.decode_long(request.SerializeToString())
    left = pb.ModelInferRequest.FromString(text)
    assert (left.model_name, left.id, left.inputs[0].name) == ("m", "7", "x")
    assert not left.inputs[0].HasField("contents")
    assert inputs["x"].tolist() == [1.5, 2.5]
    with pytest.raises(RequestError, match="no ModelInferRequest"):
        grpc_tensors.decode_long(b"\xff\xff")


@pytest.mark.parametrize("text", ["1" * 500, "[" * 500 + "]" * 500, '"' + "x" * 500 + '"', " " * 500, "-" * 500])
def test_a_single_long_value_is_refused_as_any_other(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(arrays, "PIECE_BYTES", 64)
    for data in (f"[{text}]", f"[1, {text}]", f"[{text}, 1]"):
        with pytest.raises(RequestError, match="input 'x'"):
            arrays.parse(data.encode(), "FP32", 1, "x")


@pytest.mark.parametrize("datatype", ["FP32", "INT32"])
def test_a_flat_list_that_is_read_in_pieces_is_the_same_list(monkeypatch: pytest.MonkeyPatch, datatype: str) -> None:
    text = json.dumps(list(range(1000)), indent=1).encode()
    whole = arrays.parse(text, datatype, 1, "x")
    monkeypatch.setattr(arrays, "PIECE_BYTES", 64)
    assert np.array_equal(arrays.parse(text, datatype, 1, "x"), whole)
    for wrong in (text[:-1] + b",]", text.replace(b"500", b"true"), text.replace(b"500", b"5.5.5")):
        with pytest.raises(RequestError):
            arrays.parse(wrong, datatype, 1, "x")


def _inode_of(body: memoryview) -> int:
    """Of the file that is mapped where `body` lies."""
    address = np.frombuffer(body, np.uint8).__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        start, end = (int(one, 16) for one in span.split("-"))
        if start <= address < end:
            return int(inode)
    raise AssertionError("the body is not mapped")


def test_a_body_in_a_file_travels_without_being_written_again() -> None:
    buffer = BodyBuffer()
    for _ in range(40):
        buffer.add(b"0.5" * 20_000)
    body = buffer.take()
    assert isinstance(body, memoryview)
    assert isinstance(body.obj, SharedBody)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        frames.send(ours, ("work", [pickle.PickleBuffer(body), pickle.PickleBuffer(b"short")]))
        name, (long, short) = frames.receive(theirs)
    assert (name, bytes(long), bytes(short)) == ("work", bytes(body), b"short")
    assert _inode_of(memoryview(long)) == os.fstat(body.obj.descriptor).st_ino
    assert _inode_of(memoryview(short)) != os.fstat(body.obj.descriptor).st_ino


def test_a_part_of_a_body_in_a_file_travels_as_the_part_that_it_is() -> None:
    buffer = BodyBuffer()
    buffer.add(b"a" * 2**20 + b"tail")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        frames.send(ours, pickle.PickleBuffer(buffer.take()[-4:]))
        assert bytes(frames.receive(theirs)) == b"tail"


def _long_body() -> memoryview:
    buffer = BodyBuffer()
    for _ in range(40):
        buffer.add(b"no JSON " * 20_000)
    body = buffer.take()
    assert isinstance(body, memoryview)
    return body


def test_a_body_that_could_not_be_read_is_gone_with_its_error(
    offload: Offload, loop: asyncio.AbstractEventLoop
) -> None:
    """In a cycle it would keep its memory, and its view ended the interpreter when the collector cleared it."""
    body = _long_body()
    owner = weakref.ref(body.obj)
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="invalid literal"):
            loop.run_until_complete(offload.run(int, body, num_bytes=len(body)))
        del body
        until(lambda: owner() is None, "the body is gone")
    finally:
        gc.enable()


def test_a_view_of_a_part_of_a_body_is_sent_as_a_copy(offload: Offload, loop: asyncio.AbstractEventLoop) -> None:
    body = _long_body()
    assert loop.run_until_complete(offload.run(len, body[8:-8], num_bytes=len(body))) == len(body) - 16
