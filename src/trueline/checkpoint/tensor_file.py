"""Tensors as the bytes of a safetensors file, piece by piece.

The library's own writer copies every tensor and needs a local file. Here the pieces are views of the tensors' memory,
so that they are hashed and sent to a store while they are written, without the interpreter's lock and without more
memory. The library reads the file. Source: the format section of safetensors' README.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch

from trueline.errors import CheckpointError

PIECE_BYTES = 8 << 20
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def pieces(tensors: Sequence[torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The file that holds `tensors` under the names 0, 1, 2, ... Raises CheckpointError for a dtype without a name."""
    # Large items first: each tensor then begins at a multiple of its item size.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    header, at = {}, 0
    for i in order:
        size = tensors[i].numel() * tensors[i].element_size()
        dtype, shape = _name(tensors[i], i), list(tensors[i].shape)
        header[str(i)] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for i in order:
        yield from _views(tensors[i])


def _name(tensor: torch.Tensor, i: int) -> str:
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
        raise CheckpointError(
            f"tensor {i} of the state is {tensor.dtype} {tensor.layout}, which safetensors cannot hold",
            hint=f"keep dense tensors of {', '.join(sorted(_NAMES.values()))} in state_dict()",
        )
    return _NAMES[tensor.dtype]


def _views(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]
