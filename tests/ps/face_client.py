"""A client of the parameter servers' gRPC service, written from the proto alone: `face_client.py STUBS ADDRESS SECRET`.

Prints what it got, as JSON. It imports nothing of Trueline.
"""

import json
import struct
import sys

import grpc

sys.path.insert(0, sys.argv[1])
import parameter_server_pb2 as pb
import parameter_server_pb2_grpc as pb_grpc

IDS = (-5, 2**62, -5)


def pack(code, values):
    return struct.pack(f"<{len(values)}{code}", *values)


def unpack(code, data):
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def refuse(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


def main():
    stub = pb_grpc.ParameterServerStub(grpc.insecure_channel(sys.argv[2]))
    own = {"metadata": (("authorization", f"Bearer {sys.argv[3]}"),), "wait_for_ready": True, "timeout": 60}
    model = stub.describe_model(pb.DescribeModelRequest(), **own)
    table, variable = model.tables[0], model.variables[0]
    size = 1
    for one in variable.dims:
        size *= one
    ids = pb.PullEmbeddingVectorRequest(table=table.name, ids=pack("q", IDS))
    rows = pb.Tensor(name=table.name, content=pack("f", [1.0] * 2 * table.dim), ids=pack("q", IDS[:2]))
    dense = pb.Tensor(name=variable.name, content=pack("f", [1.0] * size))

    def push(source="other", gradients=(rows, dense), lrs=(0.5,)):
        return pb.PushGradientRequest(source=source, minibatch=3, gradients=gradients, learning_rates=lrs)

    before = stub.pull_embedding_vector(ids, **own).vectors
    for _ in range(2):  # the second one as after a lost answer
        stub.push_gradient(push(), **own)
    after = stub.pull_embedding_vector(ids, **own).vectors
    values = stub.pull_variable(pb.PullVariableRequest(names=[variable.name]), **own).variables[0]
    torn = pb.Tensor(name=table.name, content=b"abc", ids=pack("q", IDS[:2]))
    print(json.dumps({
        "table": [table.name, table.dim], "dims": list(after.dims), "variable": unpack("f", values.content),
        "before": unpack("f", before.content), "after": unpack("f", after.content),
        "stranger": refuse(stub.describe_model, pb.DescribeModelRequest(), timeout=60),
        "wrong secret": refuse(stub.push_gradient, push(), metadata=(("authorization", "Bearer another"),), timeout=60),
        "no source": refuse(stub.push_gradient, push(source=""), **own),
        "no table": refuse(stub.pull_embedding_vector, pb.PullEmbeddingVectorRequest(table="none"), **own),
        "torn": refuse(stub.push_gradient, push("a", [torn]), **own),
        "no lr": refuse(stub.push_gradient, push("b", lrs=()), **own),
    }))  # fmt: skip


main()
