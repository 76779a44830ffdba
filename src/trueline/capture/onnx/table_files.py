"""Files of embedding tables beside an ONNX program: safetensors, which any tool reads and a runtime maps into memory.

    model.onnx.users-1.safetensors    ascending ids, and their rows
    model.onnx.users-2.safetensors    the ids after those, where a table has more bytes than a file takes
    model.onnx.tables.json            which file has which arrays

The program names file, offset and length of each array, so nothing is there twice, and processes of a server share
one copy. A table is never cut here: `TableModule.split_rows` makes large ones several before the export.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir
import torch

from trueline import files

_PART = re.compile(r"(?:(?P<table>.*)\.)?(?P<array>ids|scales|rows)(?:_(?P<number>\d+))?")
_KINDS = {torch.int64: "I64", torch.float32: "F32", torch.float16: "F16", torch.int8: "I8"}
_ALIGNMENT = 4096
"""Of the first array in a file: a page."""


class TableArray(NamedTuple):
    name: str
    """In the file: ids, rows, scales."""
    value: onnx_ir.Value


Buffers = Mapping[str, Mapping[tuple[int, str], torch.Tensor]]
"""By table, the buffers with its arrays, by the number of their file and their name in it."""


def find_buffers(program: torch.export.ExportedProgram) -> Buffers:
    """The tables of an exported program: ids, and as many rows, whichever module they are of."""
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in program.graph_signature.inputs_to_buffers.values():
        match = _PART.fullmatch(name.removeprefix("module.").removeprefix("_users."))
        tensor = program.state_dict.get(name, program.constants.get(name))
        if match is not None and isinstance(tensor, torch.Tensor) and tensor.numel():
            found.setdefault(match["table"] or "table", {})[int(match["number"] or 1), match["array"]] = tensor
    return {table: arrays for table, arrays in found.items() if _is_table(arrays)}


def _is_table(arrays: Mapping[tuple[int, str], torch.Tensor]) -> bool:
    if {name for _, name in arrays} not in ({"ids", "rows"}, {"ids", "rows", "scales"}):
        return False
    lengths = {number: len(one) for (number, name), one in arrays.items() if name == "ids" and one.dtype == torch.int64}
    return all(one.dtype in _KINDS and len(one) == lengths.get(number) for (number, _), one in arrays.items())


def write_tables(model: onnx_ir.Model, path: Path, tables: Buffers) -> int:
    """Writes the `tables` in `model`, which will be saved as `path`, to their files, and has the model name these;
    returns the number of bytes. A table that the exporter has changed stays inside. Raises StorageError."""
    values = [one for one in model.graph.initializers.values() if one.const_value is not None]
    index: dict[str, list[dict[str, Any]]] = {}
    total = 0
    for table, buffers in tables.items():
        found = {key: _match(tensor, values) for key, tensor in buffers.items()}
        if any(one is None for one in found.values()):
            continue
        index[table] = []
        for number in sorted({number for number, _ in found}):
            arrays = [TableArray(name, value) for (at, name), value in sorted(found.items(), key=_place)
                      if at == number and value is not None]  # fmt: skip
            name = f"{path.name}.{table}-{number}.safetensors"
            total += _write_shard(path.with_name(name), arrays)
            index[table].append({"file": name, "arrays": {one.name: list(_shape(one.value)) for one in arrays}})
    if index:
        content = json.dumps({"tables": index}, indent=1).encode() + b"\n"
        files.write_atomic(path.with_name(f"{path.name}.tables.json"), content)
    return total


def _place(item: tuple[tuple[int, str], Any]) -> tuple[int, int]:
    """Of an array: those of eight bytes come first, so that all are aligned."""
    (number, name), _ = item
    return number, ("ids", "scales", "rows").index(name)


def _match(tensor: torch.Tensor, values: Sequence[onnx_ir.Value]) -> onnx_ir.Value | None:
    """The exporter gives a buffer another name where it has folded a step that changes nothing."""
    wanted = tensor.detach().cpu().numpy()
    for value in values:
        same = not isinstance(value.const_value, onnx_ir.ExternalTensor) and _shape(value) == wanted.shape
        if same and _kind(value) == _KINDS[tensor.dtype] and np.array_equal(_read(value), wanted):
            return value
    return None


def _shape(value: onnx_ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())


def _kind(value: onnx_ir.Value) -> str:
    assert value.const_value is not None
    return {"INT64": "I64", "FLOAT": "F32", "FLOAT16": "F16", "INT8": "I8"}.get(value.const_value.dtype.name, "")


def _read(value: onnx_ir.Value) -> npt.NDArray[Any]:
    assert value.const_value is not None
    return value.const_value.numpy()


def _write_shard(path: Path, arrays: Sequence[TableArray]) -> int:
    header: dict[str, Any] = {}
    at = 0
    for one in arrays:
        assert one.value.const_value is not None
        size = one.value.const_value.nbytes
        header[one.name] = {"dtype": _kind(one.value), "shape": _shape(one.value), "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    try:
        with files.atomic_file(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for one in arrays:
                file.write(np.ascontiguousarray(_read(one.value)).reshape(-1).view(np.uint8).data)
    except OSError as error:
        raise files.storage_error(error, path) from error
    for one in arrays:
        start, stop = header[one.name]["data_offsets"]
        tensor = one.value.const_value
        assert tensor is not None
        one.value.const_value = onnx_ir.ExternalTensor(
            path.name, 8 + len(text) + start, stop - start, tensor.dtype, shape=onnx_ir.Shape(_shape(one.value)),
            name=one.value.name or one.name, base_dir=path.parent,
        )  # fmt: skip
    return at


def move_others(model: onnx_ir.Model, path: Path) -> None:
    """Has the model name `model.onnx.data` for what is not in a file yet."""
    values = [
        one
        for one in model.graph.initializers.values()
        if one.const_value is not None and not isinstance(one.const_value, onnx_ir.ExternalTensor)
    ]
    tensors = [one.const_value for one in values if one.const_value is not None]
    moved = onnx_ir.external_data.convert_tensors_to_external(tensors, path.parent, f"{path.name}.data")
    for value, tensor in zip(values, moved, strict=True):
        value.const_value = tensor
