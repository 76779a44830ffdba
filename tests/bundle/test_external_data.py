"""An ONNX program of a stranger reads files of its bundle alone, however deep and however encoded it names others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trueline.bundle import external_data
from trueline.errors import BundleError

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402 - after it was found

OUTSIDE = [
    "/etc/passwd", "../secret", "../../x", "a/../../x", "sub/weights", "..", ".", "", "*/_ORT_MEM_ADDR_/*", "C:\\x",
    "\\\\host\\x", "gone.data", "a\0b", "folder", "link.data", "\n", "/proc/self/environ",
]  # fmt: skip


def tensor(location: str) -> TensorProto:
    made = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    made.external_data.add(key="offset", value="0")
    made.external_data.add(key="location", value=location)
    made.external_data.add(key="length", value="12")
    return made


def graph(*initializers: TensorProto, nodes: tuple[onnx.NodeProto, ...] = ()) -> onnx.GraphProto:
    return helper.make_graph([*nodes, helper.make_node("Relu", ["x"], ["y"])], "g", [], [], list(initializers))


def in_an_attribute(location: str) -> onnx.GraphProto:
    return graph(nodes=(helper.make_node("Constant", [], ["c"], value=tensor(location)),))


def in_a_branch(location: str) -> onnx.GraphProto:
    inner = helper.make_node("If", ["b"], ["c"], then_branch=in_an_attribute(location), else_branch=graph())
    return graph(nodes=(helper.make_node("Loop", ["n"], ["d"], body=graph(nodes=(inner,))),))


def in_a_sparse_tensor(location: str) -> onnx.GraphProto:
    made = graph()
    made.sparse_initializer.add().values.CopyFrom(tensor(location))
    return made


def in_a_list(location: str) -> onnx.GraphProto:
    node = helper.make_node("X", [], ["c"])
    node.attribute.add(name="many", type=onnx.AttributeProto.TENSORS).tensors.extend([TensorProto(), tensor(location)])
    return graph(nodes=(node,))


PLACES: dict[str, Callable[[str], onnx.GraphProto]] = {
    "an initializer": lambda location: graph(tensor(location)),
    "an attribute": in_an_attribute,
    "a branch in a loop": in_a_branch,
    "a sparse tensor": in_a_sparse_tensor,
    "a list of tensors": in_a_list,
}


def saved(folder: Path, model: onnx.ModelProto | bytes) -> Path:
    """The program, with one file of weights beside it, a folder, and a link that leads out."""
    (folder / "programs").mkdir()
    (folder / "programs" / "folder").mkdir()
    (folder / "programs" / "model.onnx.data").write_bytes(bytes(12))
    (folder / "secret").write_bytes(bytes(12))
    (folder / "programs" / "link.data").symlink_to(folder / "secret")
    path = folder / "programs" / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", OUTSIDE)
def test_a_file_that_is_not_beside_the_program_is_refused_by_its_name(
    tmp_path: Path, place: str, location: str
) -> None:
    path = saved(tmp_path, helper.make_model(PLACES[place](location)))
    with pytest.raises(BundleError, match=re.escape(repr(location))):
        external_data.check(path)


@pytest.mark.parametrize("place", PLACES)
def test_a_file_beside_the_program_is_read(tmp_path: Path, place: str) -> None:
    external_data.check(saved(tmp_path, helper.make_model(PLACES[place]("model.onnx.data"))))


def test_functions_and_what_trains_are_looked_into(tmp_path: Path) -> None:
    model = helper.make_model(graph())
    model.functions.add(name="f").node.extend(in_an_attribute("../secret").node)
    with pytest.raises(BundleError, match="secret"):
        external_data.check(saved(tmp_path, model))
    model = helper.make_model(graph())
    model.training_info.add().algorithm.CopyFrom(graph(tensor("../other")))
    (tmp_path / "second").mkdir()
    with pytest.raises(BundleError, match="other"):
        external_data.check(saved(tmp_path / "second", model))


def length(data: bytes, pad: int = 0) -> bytes:
    """A length as protobuf writes it; `pad` further bytes say nothing."""
    size, made = len(data), bytearray()
    while size > 0x7F:
        made.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(made) + bytes([size | 0x80] + [0x80] * (pad - 1) + [0]) if pad else bytes([*made, size])


@pytest.mark.parametrize("pad", [0, 1, 3])
@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_an_unusual_encoding_hides_no_name(tmp_path: Path, pad: int, swapped: bool, twice: bool) -> None:
    """Lengths with bytes to spare, the value before its key, and a harmless field that a later one replaces."""
    name = b"../../secret"
    parts = [b"\x0a" + length(b"location", pad) + b"location", b"\x12" + length(name, pad) + name]
    if twice:
        parts = [b"\x0a\x06offset", b"\x12\x0fmodel.onnx.data", *parts]
    entry = b"".join(parts[::-1] if swapped and not twice else parts)
    body = b"\x6a" + length(entry, pad) + entry
    inner = b"\x2a" + length(body, pad) + body
    model = b"\x08\x08\x3a" + length(inner, pad) + inner
    assert onnx.ModelProto.FromString(model).graph.initializer[0].external_data[0].value == name.decode()
    with pytest.raises(BundleError, match="secret"):
        external_data.check(saved(tmp_path, model))


def test_a_torn_or_endless_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = helper.make_model(in_a_branch("model.onnx.data")).SerializeToString()
    path = saved(tmp_path, whole)
    deep = b""
    for _ in range(200):
        deep = b"\x32" + length(deep) + deep  # a graph in an attribute in a node ...
        deep = b"\x2a" + length(deep) + deep
        deep = b"\x0a" + length(deep) + deep
    for content in (b"", b"\xff" * 20, whole[:-1], b"\x3a\xff\xff\xff\xff\x0f", b"\x0b", b"\x3a" + length(deep) + deep):
        path.write_bytes(content)
        with pytest.raises(BundleError, match=r"model\.onnx is no ONNX program"):
            external_data.check(path)


def test_each_byte_that_is_changed_raises_nothing_but_a_bundle_error(tmp_path: Path) -> None:
    whole = helper.make_model(in_a_branch("model.onnx.data")).SerializeToString()
    path = saved(tmp_path, whole)
    for at in range(len(whole)):
        for value in (0, 0x7F, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                external_data.check(path)
            except BundleError:
                continue
