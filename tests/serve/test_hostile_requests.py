"""Malformed, contradictory and oversized requests are the client's fault: a 4xx of a few lines, and the server goes on.

Triton CVE-2025-23310, CVE-2025-23311, CVE-2025-23317, CVE-2025-23321, CVE-2025-23323, CVE-2025-23324, CVE-2025-23325,
CVE-2025-23326, CVE-2025-23327, CVE-2025-23328, CVE-2025-23331, CVE-2025-33201, CVE-2025-33202, CVE-2025-33211,
CVE-2026-24146, CVE-2026-24173, CVE-2026-24174, CVE-2026-24175, CVE-2026-24210, CVE-2026-47477, CVE-2026-47479,
CVE-2026-47480, CVE-2026-47628, CVE-2026-47629; BentoML CVE-2024-9056; MLflow CVE-2024-6838, CVE-2025-0453.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trueline.errors import RequestError
from trueline.serve.handlers import messages
from trueline.torchserve.responses import parse_int
from trueline.web.messages import Request
from trueline.web.parser import HttpLimits
from worlds import connections
from worlds.servers import StoreApp, TinyApp

TENSOR = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
INFER = "/v2/models/tiny/infer"
LONG = "n" * 1_000_000
DEEP = 100_000


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyApp]:
    with TinyApp(tmp_path_factory.mktemp("tiny")) as made:
        yield made


def refused(app: TinyApp, path: str, body: bytes, **headers: str) -> None:
    found = app.ask("POST", path, body, **headers)
    assert 400 <= found.status < 500, found.body[:300]
    assert len(found.body) < 2000, found.body[:300]
    answered = app.ask("POST", INFER, json.dumps({"inputs": [TENSOR]}).encode())
    assert answered.status == 200


NESTED = {
    "lists": "[" * DEEP + "]" * DEEP,
    "objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "inputs": '{"inputs":' + "[" * DEEP + "]" * DEEP + "}",
    "instances": '{"instances":' + "[" * DEEP + "]" * DEEP + "}",
    "data": '{"inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","data":' + "[" * DEEP + "]" * DEEP + "}]}",
    "open": "[" * DEEP,
    "records": '{"dataframe_records":[' + '{"a":' * DEEP + "1" + "}" * DEEP + "]}",
    "split": '{"dataframe_split":{"data":' + "[" * DEEP + "]" * DEEP + "}}",
}


@pytest.mark.parametrize("path", [INFER, "/v1/models/tiny:predict", "/predictions/tiny", "/invocations"])
@pytest.mark.parametrize("nested", NESTED)
def test_json_that_nests_without_end_is_refused_at_each_protocol(app: TinyApp, path: str, nested: str) -> None:
    refused(app, path, NESTED[nested].encode())


@pytest.mark.parametrize("nested", NESTED)
def test_parameters_that_nest_without_end_recurse_nowhere(app: TinyApp, nested: str) -> None:
    """In a request's parameters, where any value may stand, and in those of the repository and of management."""
    body = json.dumps({"inputs": [TENSOR], "parameters": {"a": 0}}).replace('"a": 0', f'"a": {NESTED[nested]}')
    assert app.ask("POST", INFER, body.encode()).status in (200, 400)
    for path in ("/v2/repository/index", "/v2/repository/models/tiny/load"):
        assert app.ask("POST", path, NESTED[nested].encode()).status in (400, 404, 413)


def test_parameters_of_management_nest_nowhere_either(tmp_path: Path) -> None:
    with StoreApp(tmp_path) as app:
        for text in (*NESTED.values(), f'{{"url": {NESTED["lists"]}}}'):
            for path in ("/models", "/v1/models"):
                status, told = app.manage("POST", path, text.encode(), content_type="application/json")
                assert status in (400, 404, 405)
                assert len(json.dumps(told)) < 1000


@pytest.mark.parametrize(
    "change",
    [
        {"name": LONG}, {"name": ""}, {"datatype": LONG}, {"shape": [1] * 100_000}, {"shape": [2**63, 3]},
        {"shape": [-1, 3]}, {"shape": [2**32, 2**32]}, {"shape": [0, 0]}, {"shape": []}, {"shape": [1.5, 2]},
        {"shape": ["1", "3"]}, {"shape": [True, 3]}, {"data": [LONG, 1, 2]}, {"data": LONG}, {"data": {}},
        {"data": [None, None, None]}, {"data": [[[[[[1, 2, 3]]]]]]}, {"parameters": {"binary_data_size": -1}},
        {"parameters": {"binary_data_size": 2**64}}, {"parameters": {"binary_data_size": 12}, "data": []},
        {"parameters": {"binary_data_size": True}}, {"parameters": {"binary_data_size": LONG}}, {"parameters": []},
    ],
)  # fmt: skip
def test_a_tensor_that_contradicts_itself_is_refused(app: TinyApp, change: dict[str, object]) -> None:
    body = json.dumps({"inputs": [TENSOR | change]}).encode()
    refused(app, INFER, body)
    refused(app, INFER, body, inference_header_content_length=str(len(body)))


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": [TENSOR], "outputs": [{"name": "y"}] * 100_000}, {"inputs": [TENSOR], "outputs": [{"name": LONG}]},
        {"inputs": [TENSOR] * 50_000}, {"inputs": [TENSOR | {"name": f"x{n}"} for n in range(50_000)]},
        {"inputs": [TENSOR], "parameters": {"timeout": -1}}, {"inputs": [TENSOR], "parameters": {"timeout": 1e308}},
        {"inputs": [TENSOR], "parameters": {"priority": LONG}}, {"inputs": [TENSOR], "id": 1}, {"inputs": {}},
        [], 1, None,
    ],
)  # fmt: skip
def test_a_request_of_too_many_or_impossible_parts_is_refused(app: TinyApp, body: object) -> None:
    refused(app, INFER, json.dumps(body).encode())


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 5000, "NaN", "Infinity", "0x10", "1e", "--1", "٣"])
def test_a_number_that_json_or_the_type_does_not_have_is_refused(app: TinyApp, number: str) -> None:
    for path, body in (
        (INFER, '{"inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","data":[1,2,%s]}]}'),
        (INFER, '{"inputs":[{"name":"x","shape":[1,%s],"datatype":"FP32","data":[1,2,3]}]}'),
        ("/v1/models/tiny:predict", '{"instances":[[1,2,%s]]}'),
        ("/predictions/tiny", "[[1,2,%s]]"),
        ("/invocations", '{"dataframe_split":{"data":[[1,2,%s]]}}'),
    ):
        refused(app, path, (body % number).encode())
    refused(app, "/invocations", f"a,b,c\n1,2,{number}".encode(), content_type="text/csv")
    refused(app, INFER, b"{}", inference_header_content_length=number)
    refused(app, INFER, json.dumps({"inputs": [TENSOR]}).encode(), x_trueline_priority=number)


@pytest.mark.parametrize("digits", [10, 20, 400, 4000, 5000])
@pytest.mark.parametrize(
    "name", ["max_batch_delay", "batch_size", "initial_workers", "response_timeout", "startup_timeout", "min_worker"]
)
def test_a_number_beyond_32_bits_in_a_query_is_torchserves_default(tmp_path: Path, name: str, digits: int) -> None:
    """CVE-2026-24174's class: `max_batch_delay` of 400 digits was an internal error."""
    assert parse_int("9" * digits, 7) == 7
    with StoreApp(tmp_path) as app:
        for method, path in (("POST", "/models?url=gone.bundle"), ("PUT", "/models/gone"), ("GET", "/models")):
            mark = "&" if "?" in path else "?"
            status, _ = app.manage(method, f"{path}{mark}{name}={'9' * digits}")
            assert status in (200, 404)


FORMS = {
    "dashes": (b"--" + b"-" * 1_000_000 + b"\r\n", "multipart/form-data; boundary=" + "-" * 100),
    "dashes after the boundary": (b"--x" + b"-" * 1_000_000, "multipart/form-data; boundary=x"),
    "one line of dashes": (b"--x\r\n" + b"-" * 3_000_000, "multipart/form-data; boundary=x"),
    "line ends": (b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n' + b"\r" * 3_000_000,
    "multipart/form-data; boundary=x"),
    "nearly boundaries": (b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n' + b"\r\n--" * 700_000,
    "multipart/form-data; boundary=x"),
    "headers": (b"--x\r\n" + b"a: b\r\n" * 300_000, "multipart/form-data; boundary=x"),
    "a long header": (b"--x\r\na: " + b"b" * 3_000_000, "multipart/form-data; boundary=x"),
    "escapes": (b'--x\r\ncontent-disposition: form-data; name="' + b"\\" * 100_000 + b"\r\n\r\nz\r\n--x--\r\n",
    "multipart/form-data; boundary=x"),
    "parameters": (b"--x\r\ncontent-disposition: form-data" + b"; a=b" * 20_000 + b"\r\n\r\nz\r\n--x--\r\n",
    "multipart/form-data; boundary=x"),
    "a long boundary": (b"x", "multipart/form-data; boundary=" + "x" * 30_000),
    "an escaped boundary": (b"x", 'multipart/form-data; boundary="' + "\\" * 30_000),
    "parameters of the type": (b"x", "multipart/form-data" + "; a" * 10_000),
    "no boundary": (b"x", "multipart/form-data"),
    "too many parts": (b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' * 300 + b"--x--\r\n",
    "multipart/form-data; boundary=x"),
    "no end": (b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\nz', "multipart/form-data; boundary=x"),
    "no end of the head": (b'--x\r\ncontent-disposition: form-data; name="a"\r\n', "multipart/form-data; boundary=x"),
    "a form in a form": (b'--x\r\ncontent-disposition: form-data; name="a"\r\ncontent-type: multipart/mixed; boundary=y'
    b"\r\n\r\n" + b"--y\r\ncontent-type: multipart/mixed; boundary=y\r\n\r\n" * 50_000 + b"\r\n--x--\r\n",
    "multipart/form-data; boundary=x"),
    "no name": (b"--x\r\ncontent-disposition: form-data\r\n\r\nz\r\n--x--\r\n", "multipart/form-data; boundary=x"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_that_is_made_to_cost_is_refused_or_one_part(form: str) -> None:
    body, kind = FORMS[form]
    request = Request("POST", b"/predictions/m", {b"content-type": kind.encode()}, body)
    refusal, parts = RequestError(""), []
    try:
        parts = messages.decode_request(request, explain=False).parts
    except RequestError as error:
        refusal = error
    assert len(parts) <= 1
    assert refusal.status in (400, 413)
    assert len(refusal.message) < 300


@pytest.mark.parametrize(
    "body", [b"a=b&" * 500_000, b"%" * 1_000_000, b"&" * 1_000_000, b"=" * 1_000_000, b"a=%" * 300_000]
)
def test_a_form_of_fields_that_is_made_to_cost_is_one_part(body: bytes) -> None:
    request = Request("POST", b"/p", {b"content-type": b"application/x-www-form-urlencoded"}, body)
    assert len(messages.decode_request(request, explain=False).parts) == 1


CHUNKED = "POST /a HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
HEADS = [
    "GET /a HTTP/1.1\r\nhost: t\r\ncontent-length: -1\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\ncontent-length: +1\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\ncontent-length: 1_0\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\ncontent-length: 0x1\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\n: nothing\r\n\r\n", "GET /a HTTP/1.1\r\nhost: t\r\na\0b: c\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\na: b\0c\r\n\r\n", "GET /a HTTP/1.1\r\nhost: t\r\n folded: x\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\na b: c\r\n\r\n", "GET /a HTTP/9.9\r\nhost: t\r\n\r\n", "\0\0\0\0\r\n\r\n",
    "G\x80T /a HTTP/1.1\r\nhost: t\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "GET /" + "a" * 5000 + " HTTP/1.1\r\nhost: t\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\na: " + "b" * 5000 + "\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\n" + "a: b\r\n" * 500 + "\r\n", "GET /a HTTP/1.1\r\n\r\n",
    "GET /a HTTP/1.1\r\nhost: t\r\nexpect: the moon\r\n\r\n",
    "POST /a HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip\r\n\r\n",
    CHUNKED + "-1\r\n", CHUNKED + "g\r\n", CHUNKED + "ffffffffffffffffff\r\n", CHUNKED + "0x1\r\na\r\n",
    CHUNKED + "1\r\nab\r\n",
    CHUNKED + "1;" + "x" * 5000, CHUNKED + "1\r\n \r\n" * 100, CHUNKED + "0\r\n" + "a: b\r\n" * 500, CHUNKED + "\r\n",
    CHUNKED + "3e9\r\n",
]  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_a_head_or_chunk_that_is_malformed_ends_its_connection_alone(head: str) -> None:
    world = connections.world()
    for step in (len(head), 1):  # at once, and byte by byte
        world = connections.world()
        data = head.encode("latin-1")
        for start in range(0, len(data), step):
            if not world.wire.closed:
                world.connection.data_received(data[start : start + step])
        assert world.wire.written[9:10] in (b"4", b""), world.wire.written[:200]
        assert not world.app.seen
        assert len(world.wire.written) < 600
        assert world.wire.written or step == 1 or head.endswith(("9\r\n", "x", ": b\r\n"))


@pytest.mark.parametrize("seed", range(20))
def test_requests_with_random_bytes_in_them_raise_nothing_and_answer_nothing_twice(seed: int) -> None:
    chance = random.Random(seed)
    whole = (
        connections.post(b'{"inputs":[]}', "content-type: application/json", "x-a: b") * 2
        + CHUNKED.encode()
        + b"3\r\nabc\r\n0\r\n\r\n"
    )
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data))
            act = chance.randrange(3)
            if act == 0:
                data[at] = chance.randrange(256)
            elif act == 1:
                del data[at : at + chance.randint(1, 8)]
            else:
                data[at:at] = bytes(chance.choices(b"\r\n\0 :;,\t\xff0a", k=chance.randint(1, 4)))
        world = connections.world(HttpLimits(chunks=50, body_bytes=1000, head_bytes=400))
        while data and not world.wire.closed:
            size = chance.randint(1, len(data))
            world.connection.data_received(bytes(data[:size]))
            del data[:size]
        statuses = re.findall(rb"HTTP/1\.1 (\d\d\d) [\w -]+\r\n", world.wire.written)
        assert len(statuses) <= len(world.app.seen) + 1
        assert all(status == b"200" or status.startswith(b"4") for status in statuses)
