"""What a call over gRPC says has to add up, and who may say it: the face alone, without a port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline.bundle import Dim, Signature, TensorSpec
from trueline.errors import RequestError
from trueline.serve.models.catalog import Models
from trueline.serve.models.version import ProgramVersion
from trueline.serve.protocols.oip.grpc import OipService, read_inputs
from trueline.serve.protocols.router import Routes
from trueline.web import auth
from trueline.web.auth import Forbidden, Unauthorized
from trueline.wire import inference_pb2 as pb

X = TensorSpec(name="x", datatype="FP32", shape=("batch",))
SIGNATURE = Signature(inputs=(X,), outputs=(X,), dims={"batch": Dim()})
TOKENS = {kind: f"{kind}-0123456789abcdef" for kind in ("inference", "management", "API")}
OPEN = ("ServerLive", "ServerReady")
MANAGED = ("RepositoryModelLoad", "RepositoryModelUnload")
ASKED = ("ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer", "ModelStreamInfer", "ModelConfig",
         "ModelStatistics", "RepositoryIndex")  # fmt: skip


class Call:
    """What a method sees of its call."""

    def __init__(self, left_s: float | None = None, **metadata: str) -> None:
        self._metadata = tuple(metadata.items())
        self._left_s = left_s

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> float | None:
        return self._left_s


class Echo(ProgramVersion):
    """A version that answers what it was asked, and remembers how long it had for it."""

    @property
    def signature(self) -> Signature:
        return SIGNATURE

    def ask(self, inputs: Mapping[str, Any], timeout_s: float | None = None, priority: int = 3) -> Any:
        self.reason = f"{timeout_s}, {priority}"
        return dict(inputs)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def asked(*raw: bytes, rows: int = 2, datatype: str = "FP32") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="x", datatype=datatype, shape=[rows])
    request.raw_input_contents.extend(raw)
    return request


TWO = np.array([1, 2], np.float32).tobytes()


def test_every_input_has_its_bytes_and_no_bytes_are_without_an_input() -> None:
    assert read_inputs(asked(TWO))["x"].tolist() == [1.0, 2.0]
    with pytest.raises(RequestError, match="expected 1 raw_input_contents, one for each input, got 2"):
        read_inputs(asked(TWO, TWO))
    more = asked(TWO)
    more.inputs.add(name="y", datatype="FP32", shape=[2])
    with pytest.raises(RequestError, match="expected 2 raw_input_contents, one for each input, got 1"):
        read_inputs(more)


@pytest.mark.parametrize("size", [0, 7, 9, 12])
def test_the_bytes_of_an_input_are_as_many_as_its_shape_says(size: int) -> None:
    with pytest.raises(RequestError):
        read_inputs(asked(bytes(size)))


def test_an_input_is_given_once_and_in_one_way() -> None:
    both = asked(TWO)
    both.inputs[0].contents.fp32_contents.extend([1, 2])
    with pytest.raises(RequestError, match="has contents beside raw_input_contents"):
        read_inputs(both)
    twice = asked(TWO, TWO)
    twice.inputs.add(name="x", datatype="FP32", shape=[2])
    with pytest.raises(RequestError, match="is given twice"):
        read_inputs(twice)


@pytest.mark.parametrize(
    ("datatype", "field", "value", "fits"),
    [("INT8", "int_contents", 127, True), ("INT8", "int_contents", 128, False), ("INT8", "int_contents", -129, False),
     ("UINT8", "uint_contents", 255, True), ("UINT8", "uint_contents", 256, False),
     ("INT16", "int_contents", 40_000, False), ("INT64", "int64_contents", -(2**63), True)],
)  # fmt: skip
def test_a_value_that_its_datatype_cannot_hold_is_refused_and_not_bent(
    datatype: str, field: str, value: int, fits: bool
) -> None:
    request = asked(rows=1, datatype=datatype)
    getattr(request.inputs[0].contents, field).append(value)
    if fits:
        assert read_inputs(request)["x"].tolist() == [value]
    else:
        with pytest.raises(RequestError, match=f"out of the range of {datatype}"):
            read_inputs(request)


@pytest.mark.parametrize("rows", [1, 3, -2, 2**31])
def test_typed_contents_are_as_many_as_the_shape_says(rows: int) -> None:
    request = asked(rows=rows)
    request.inputs[0].contents.fp32_contents.extend([1, 2])
    with pytest.raises(RequestError):
        read_inputs(request)


@pytest.mark.parametrize(
    ("timeout_us", "left_s", "given"),
    [(None, None, "None"), (2_000_000, None, "2.0"), (None, 3.0, "3.0"), (2_000_000, 3.0, "2.0"),
     (4_000_000, 3.0, "3.0")],
)  # fmt: skip
def test_the_nearer_of_the_two_deadlines_counts(
    loop: asyncio.AbstractEventLoop, timeout_us: int | None, left_s: float | None, given: str
) -> None:
    models = Models()
    version = Echo(model="tiny", version="1", state="ready")
    models.show(version)
    request = asked(TWO)
    if timeout_us is not None:
        request.parameters["timeout"].int64_param = timeout_us
    answer = loop.run_until_complete(OipService(Routes(models, loop), None)._infer(request, Call(left_s)))
    assert answer.raw_output_contents[0] == TWO
    assert version.reason == f"{given}, 3"


def test_each_method_asks_for_its_own_token_and_health_for_none(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({kind: {"key": key} for kind, key in TOKENS.items()}))
    path.chmod(0o600)
    guarded = OipService(Routes(Models(), loop), auth.load_keys(path))
    for name in OPEN:
        guarded._check(name, Call())
    for names, kind in ((ASKED, "inference"), (MANAGED, "management")):
        for name in names:
            guarded._check(name, Call(authorization=f"Bearer {TOKENS[kind]}"))
            with pytest.raises(Unauthorized):
                guarded._check(name, Call())
            for other in TOKENS.keys() - {kind}:
                with pytest.raises(Forbidden):
                    guarded._check(name, Call(authorization=f"Bearer {TOKENS[other]}"))


def test_a_server_that_drains_is_not_ready_and_none_of_its_models_is(loop: asyncio.AbstractEventLoop) -> None:
    models = Models()
    models.show(Echo(model="tiny", version="1", state="ready"))
    told = OipService(Routes(models, loop), None)

    def ready() -> tuple[bool, bool]:
        server = loop.run_until_complete(told._ready(pb.ServerReadyRequest(), Call()))
        model = loop.run_until_complete(told._model_ready(pb.ModelReadyRequest(name="tiny"), Call()))
        return server.ready, model.ready

    assert ready() == (True, True)
    told._routes.dispatch.draining = True
    assert ready() == (False, False)
