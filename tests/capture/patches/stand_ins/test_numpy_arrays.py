"""What numpy computes of a size or of an input is part of a captured program, with numpy's own dtypes and rules."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches.stand_ins import numpy_arrays, size_lengths
from trueline.errors import CaptureError


def sinusoids(length: int, width: int) -> np.ndarray:
    angles = np.arange(length)[:, np.newaxis] / np.power(10000, 2 * (np.arange(width)[np.newaxis, :] // 2) / width)
    angles[:, 0::2] = np.sin(angles[:, 0::2])
    angles[:, 1::2] = np.cos(angles[:, 1::2])
    return angles


class Positions(nn.Module):
    """A table that a function of the file makes with numpy."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(sinusoids(x.shape[1], 4)).float()


class Joined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        steps = np.linspace(0, 1, x.shape[1], dtype=np.float32)
        both = np.concatenate([steps, 2 * steps]).astype(np.float64)
        return x * torch.tensor(both, dtype=torch.float32)[: x.shape[1], None]


class Powers(nn.Module):
    """An array of a list of arrays, as N-BEATS makes its trend."""

    def forward(self, x: Tensor) -> Tensor:
        steps = np.arange(x.shape[1]) / x.shape[1]
        basis = np.array([steps**degree for degree in range(3)])
        return x.transpose(1, 2) @ torch.tensor(basis.T, dtype=torch.float32)


class Normalised(nn.Module):
    """numpy has the biased standard deviation."""

    def forward(self, x: Tensor) -> Tensor:
        a = x.detach().cpu().numpy()
        assert isinstance(a, np.ndarray)
        return torch.from_numpy((a - a.mean(axis=1, keepdims=True)) / (a.std(axis=1, keepdims=True) + 1e-6))


class Numbers(nn.Module):
    """Numbers that numpy makes of sizes count as numbers, and sizes stay sizes."""

    def forward(self, x: Tensor) -> Tensor:
        half = int(np.ceil(x.shape[1] / 2))
        flat = x.reshape(x.shape[0], np.prod(x.shape[1:]))
        return x[:, :half] / np.sqrt(x.shape[1]) * np.log(x.shape[1] + 1) + flat.mean()


class Scaled(nn.Module):
    """An array of numpy's own beside one that a size makes, on either side."""

    def forward(self, x: Tensor) -> Tensor:
        width = np.array([1.0, 2.0, 3.0, 4.0])
        grid = np.arange(x.shape[1])[:, None]
        return x * torch.as_tensor(width * grid - grid / width).float()


@pytest.mark.jobs
@pytest.mark.parametrize("kind", [Positions, Joined, Powers, Normalised, Numbers, Scaled])
def test_what_numpy_computes_of_a_size_or_an_input_is_in_the_program(kind: type[nn.Module]) -> None:
    eager = EagerSession(kind().eval(), torch.randn(3, 9, 4), dynamic_shapes={"x": {1: "length"}})
    program = torch_export.LoadedProgram(torch_export.export(eager.module, eager.calling))
    for length in (7, 9, 12):
        x = torch.randn(5, length, 4).numpy()
        assert np.allclose(program.run({"x": x})["output"], eager.run({"x": x})["output"], rtol=1e-5, atol=1e-6)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.numpy().sum() > 0 else x


def test_a_branch_on_what_numpy_computes_is_refused_as_any_branch_on_values() -> None:
    eager = EagerSession(Branches().eval(), torch.randn(3, 4))
    with pytest.raises(CaptureError, match="numpy"):
        torch_export.export(eager.module, eager.calling)


def test_numpy_is_numpy_again_after_the_block() -> None:
    with size_lengths.keep_lengths_free(Normalised()):
        assert not isinstance(sinusoids.__globals__["np"], ModuleType)
        assert isinstance(torch.ones(3).numpy(), np.ndarray)  # no tensor of a trace
        with FakeTensorMode():
            assert isinstance(torch.ones(3).numpy(), numpy_arrays.ARRAY)
        assert np.asarray(sinusoids.__globals__["np"].arange(3)).tolist() == [0, 1, 2]
    assert sinusoids.__globals__["np"] is np
    assert isinstance(torch.ones(3).numpy(), np.ndarray)
    assert torch.from_numpy(np.ones(3)).dtype is torch.float64
    assert "__array_ufunc__" not in vars(numpy_arrays.ARRAY)
