"""Shifts and roundings of whole numbers of every dtype, as torch answers them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.runtime.open import open_session
from worlds.cases import few

pytestmark = pytest.mark.slow

KINDS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one to the left, as a float": lambda x: (x << 1).float(),
    "by more than the narrow dtypes have": lambda x: (x << 9) + (x >> 9),
    "by more than 32": lambda x: (x << 33) ^ (x >> 33),
    "there and back": lambda x: (x << 4) >> 4,
    "by the values": lambda x: x << x.flip(1),
    "by the values to the right": lambda x: torch.bitwise_right_shift(x, x.flip(1)),
    "of a number of the code": lambda x: (1 << x) + (-8 >> x),
    "beside a number of the code": lambda x: (x << 3) & 85,
    "by a wider dtype": lambda x: x >> x.long(),
    "by one number of a tensor": lambda x: x << torch.tensor(3),
    "bits of a byte": lambda x: (x.unsqueeze(-1) >> torch.arange(8).to(x.dtype)) & 1,
    "a sum of bits": lambda x: ((x > 0).to(x.dtype) << torch.arange(x.shape[1]).to(x.dtype)).sum(-1),
    "rounded": lambda x: x.floor() + x.ceil() + x.round() + x.trunc(),
    "no NaN": lambda x: x.isnan() | x.isinf() | ~x.isfinite(),
}


class Each(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [operator(x) for operator in OPERATORS.values()]


@pytest.mark.parametrize("kind", few(KINDS, 1, pytest.mark.jobs), ids=str)
def test_whole_numbers_are_shifted_as_torch_shifts_them(kind: torch.dtype, tmp_path: Path) -> None:
    ends = torch.iinfo(kind)
    special = torch.tensor([ends.min, ends.max, 0, 1, 2, 7, 8, 9, 31, 32, 63, 64, 100, 127, -1 % (ends.max + 1)])
    chosen = np.random.default_rng(0).integers(0, len(special), (200, 6))
    eager = EagerSession(Each().eval(), torch.arange(18).reshape(3, 6).to(kind))
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    inputs = {"x": special.to(kind).numpy()[chosen]}
    expected = eager.run(inputs)
    found = session.run(inputs)
    for name, what in zip(expected, OPERATORS, strict=True):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=what, strict=True)
