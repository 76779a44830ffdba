"""A size that goes through a tensor and back stays a size while a model is traced; what was written over does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export.torch_export import LoadedProgram, export
from trueline.capture.model.eager import EagerSession
from trueline.errors import CaptureError

WINDOW = 4


def in_windows(x: Tensor) -> Tensor:
    return x.view(x.size(0), torch.div(x.size(1), WINDOW, rounding_mode="trunc"), WINDOW, x.size(2))


class Windows(nn.Module):
    """Means over windows of four steps, each beside the next window's."""

    def forward(self, x: Tensor) -> Tensor:
        short = (WINDOW - x.shape[1] % WINDOW) % WINDOW
        if short > 0:
            x = nn.functional.pad(x, (0, 0, 0, short))
        count = torch.div(x.shape[1], WINDOW, rounding_mode="trunc") - 1
        means = in_windows(x).mean(2)
        beside = x.new_zeros((x.shape[0], count + 1, x.shape[2]))
        beside[:, :count] = means[:, 1:]
        return torch.cat([means, beside], 2)


class Counts(nn.Module):
    """What a number of a size may be asked for once it is in a tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        half = torch.tensor(x.shape[1]) // 2
        if half > 100:
            return (x,)
        whole = x[:, : half * 2].reshape(x.shape[0], half, 2).sum(2)
        return (
            whole,
            x[:, half],
            x[:, -half:],
            torch.arange(half) + torch.stack([half, half + 1]).sum(),
            x * half.item(),
        )


class Written(nn.Module):
    """The number is another when it is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        count = torch.tensor(x.shape[1])
        count.view(1).sub_(1)
        return x[:, : int(count)]


def answers(module: nn.Module, lengths: range, *more: int) -> None:
    eager = EagerSession(module.eval(), torch.randn(3, 9, *more), dynamic_shapes={"x": {1: "length"}})
    exported = export(module, eager.calling)
    program = LoadedProgram(exported)  # the widest claim
    for length in lengths:
        x = np.random.default_rng(length).standard_normal((2, length, *more), dtype=np.float32)
        expected, found = eager.run({"x": x}), program.run({"x": x})
        assert all(np.array_equal(expected[name], found[name]) for name in expected), length


def test_windows_that_are_counted_with_torch_div_are_free() -> None:
    answers(Windows(), range(5, 30), 3)


def test_a_size_in_a_tensor_is_a_size_where_a_shape_an_index_or_python_asks_for_it() -> None:
    answers(Counts(), range(4, 13))


def test_a_number_that_was_written_over_is_not_taken_for_the_size() -> None:
    eager = EagerSession(Written().eval(), torch.randn(3, 9), dynamic_shapes={"x": {1: "length"}})
    with pytest.raises(CaptureError, match="data-dependent"):
        export(Written().eval(), eager.calling)


@pytest.mark.parametrize("below", [1, 12])
def test_rounding_towards_zero_is_followed_where_nothing_is_below_zero(below: int) -> None:
    class Short(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shift = torch.div(x.shape[1] - below, 2, rounding_mode="trunc").item()
            return x + shift

    answers_short = EagerSession(Short().eval(), torch.randn(3, 9), dynamic_shapes={"x": {1: "length"}})
    program = LoadedProgram(export(Short().eval(), answers_short.calling))
    for length in (2, 3, 9, 14):
        x = torch.randn(2, length).numpy()
        assert np.array_equal(program.run({"x": x})["output"], answers_short.run({"x": x})["output"])
