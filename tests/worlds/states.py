"""States of jobs, as their readers get them."""

import torch

from trueline.checkpoint import tree
from trueline.checkpoint.snapshot import as_bytes


def read_all(snapshot):
    """The state, read by one reader."""
    tensors = [torch.empty(like.shape, dtype=like.dtype) for like in snapshot.layout]
    for index, tensor in enumerate(tensors):
        at, room = 0, as_bytes(tensor)
        for piece in snapshot.pieces(index):
            room[at : at + len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            at += len(piece)
    return tree.decode(snapshot.skeleton, tensors)
