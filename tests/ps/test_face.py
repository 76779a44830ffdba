"""The servers as one gRPC service, for a client that has its proto and nothing else."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

import trueline.wire
from trueline.checkpoint import checkpoint
from trueline.errors import UsageError
from trueline.ps.face import ParameterFace, open_face
from trueline.train.api import train
from trueline.train.job_dir import JobDir
from worlds.gates import StepGate
from worlds.parameter_servers import SECRET, SPEC, values, world

CLIENT = Path(__file__).parent / "face_client.py"
COUNTING = Path(__file__).parent / "recipes" / "counting.py"
PROTO = Path(trueline.wire.__path__[0]) / "parameter_server.proto"


@pytest.fixture
def stubs(tmp_path):
    folder = tmp_path / "stubs"
    folder.mkdir()
    arguments = ["protoc", f"-I{PROTO.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}", str(PROTO)]
    assert protoc.main(arguments) == 0
    return folder


async def call(stubs, address, secret):
    arguments = [sys.executable, str(CLIENT), str(stubs), address, secret]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    client = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE, env=environment)
    output, _ = await client.communicate()
    assert client.returncode == 0
    return json.loads(output)


def test_a_client_made_from_the_proto_pulls_and_pushes_once_and_needs_the_secret(tmp_path, stubs):
    async def run(face):
        server, port = await open_face(face, 0, SECRET.decode(), lambda error: None)
        with pytest.raises(UsageError, match="cannot be opened"):
            await open_face(face, port, SECRET.decode(), lambda error: None)
        found = await call(stubs, f"127.0.0.1:{port}", SECRET.decode())
        await server.stop(None)
        return found

    with world(tmp_path) as servers:
        routing = servers.begin(2)
        client = servers.client(routing)
        found = asyncio.run(run(ParameterFace(SPEC, client)))
        assert found["table"] == ["items", 4]
        assert found["before"] == [0.0] * 12
        assert (found["dims"], found["after"], found["variable"]) == ([3, 4], [-0.5] * 12, [-0.5] * 3)
        assert found["stranger"][0] == found["wrong secret"][0] == "UNAUTHENTICATED"
        for what, why in {
            "no source": "would be applied once", "no table": "there is no table 'none'", "torn": "3 bytes",
            "no lr": "0 learning rates, expected 1",
        }.items():  # fmt: skip
            assert found[what][0] == "INVALID_ARGUMENT"
            assert why in found[what][1]
        assert {servers.stats(ref).steps for ref in routing.servers} == {0}
        assert values(client) == {0.0, -0.5}
        client.close()


@pytest.mark.jobs
def test_other_clients_push_beside_a_job_whose_records_are_counted_as_before(tmp_path, stubs):
    """The face and a server are killed in the middle, and the face is called before they are back."""
    job, answers = tmp_path / "job", []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def call_face():
        answers.append(asyncio.run(call(stubs, f"127.0.0.1:{port}", JobDir(job).read_secret())))

    with StepGate(job, (30, "face-0"), (31, "server-1"), (31, call_face)):
        found = train(COUNTING, job_dir=job, strategy="ps", workers=2, servers=2, grpc_port=port)
    assert answers[0]["table"] == ["items", 4]
    assert answers[0]["after"] != answers[0]["before"]
    assert found.summary.exactly_once
    assert -5 in checkpoint.read(found.checkpoint).state["model"]["items.ids"].tolist()
    assert found.summary.facts["steps"] == 80
