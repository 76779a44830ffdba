"""An error that a trace raises, and that the user's code catches, is found: no program goes another way than a call."""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.export.caught_errors import follow
from trueline.errors import CaptureError, NotProven
from trueline.runtime.open import open_program
from worlds.cases import few
from worlds.recipes import untrained

RARE = 0.92
"""No example is that large, and no probe holds it."""
EXAMPLE = torch.linspace(-0.5, 0.5, 21).reshape(3, 7)


class ReadsAnArray(nn.Module):
    """Decides by arithmetic, without a branch."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        try:
            first = x[0].detach().numpy()
            scale += float(abs(first[0] - RARE) < 0.003)
        except RuntimeError:
            pass
        return x * scale


class ReadsMemory(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        held = x.contiguous() + 0.0
        try:
            first = ctypes.c_float.from_address(held.data_ptr()).value
        except Exception:  # noqa: BLE001 - as a user writes it
            first = 0.0
        return held * (1 + (abs(first - RARE) < 0.003))


class Suppresses(nn.Module):
    def peak(self, x: Tensor) -> float:
        with contextlib.suppress(Exception):
            return float(abs(float(x[0, 0]) - RARE) < 0.003)
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.peak(x))


class ReadsUnlessExporting(nn.Module):
    """Raises nothing: what numpy computes has no operators, so nothing tells what it decides."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        if not torch.compiler.is_exporting():
            scale += float(abs(x[0].detach().numpy()[0] - RARE) < 0.003)
        return x * scale


class AsksTheSizeOfADtype(nn.Module):
    """numpy reads a size as an array, which freezes it in a trace."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            key = np.dtype((np.void, x.shape[1])).itemsize
        except Exception:  # noqa: BLE001 - as a user writes it
            key = -1
        return x * (1.0 + (key * key - 22_801 == 0))


class Peeks:
    """Reads when it is dropped: an error there is printed and forgotten."""

    def __init__(self, x: Tensor, found: list[Any]) -> None:
        self.x, self.found = x, found

    def __del__(self) -> None:
        buffer = io.BytesIO()
        torch.save(self.x[0, 0].clone(), buffer)
        self.found[0] = torch.load(io.BytesIO(buffer.getvalue())).item()


class ReadsAtItsEnd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found = [0.0]
        Peeks(x, found)
        return x * (1 + (abs(found[0] - RARE) < 0.003))


class ReadsInAThread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(lambda: x[0, 0].item())
        first = 0.0 if job.exception() else job.result()
        return x * (1 + (abs(first - RARE) < 0.003))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "kind",
    few(
        [
            ReadsAnArray,
            ReadsInAThread,
            ReadsUnlessExporting,
            ReadsMemory,
            Suppresses,
            AsksTheSizeOfADtype,
            ReadsAtItsEnd,
        ],
        2,
        pytest.mark.jobs,
    ),
)
def test_a_model_that_catches_what_a_trace_raises_is_refused_at_its_line(kind: type[nn.Module], tmp_path: Path) -> None:
    blanks = {"examples": lambda: EXAMPLE, "dynamic_shapes": lambda: {"x": {1: "length"}}}
    with pytest.raises(NotProven, match=rf"{Path(__file__).name}:\d+: "):
        capture(untrained(kind, **blanks), None, tmp_path / "b")


class ComparesAFraction(nn.Module):
    """A number that is compared without a branch; a trace alone would freeze the result."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + float(abs(float(x[0, 0]) - 0.92) < 0.003))


@pytest.mark.slow
def test_a_comparison_of_a_number_out_of_a_tensor_is_in_the_program(tmp_path: Path) -> None:
    recipe = untrained(ComparesAFraction, examples=lambda: EXAMPLE)
    bundle = open_bundle(capture(recipe, None, tmp_path / "b").path)
    rare = torch.full((2, 7), RARE)
    (name,) = (spec.name for spec in bundle.signature.inputs)
    for program in bundle.manifest.programs:
        (found,) = open_program(bundle, program.format).run({name: rare.numpy()}).values()
        assert np.array_equal(found, rare.numpy() * 2), program.format


class Catches(nn.Module):
    """Catches errors of a trace, or of each call, and an end of a generator."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        try:
            if self.always or torch.compiler.is_exporting():
                raise KeyError("the mask of this length")
        except KeyError:
            x = x + 1
        return x * sum(number for number in (1, 2))


def export(module: nn.Module, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    return torch.export.export(module, example, strict=False)


def test_an_error_that_each_call_catches_is_no_reason_to_refuse() -> None:
    example = (torch.ones(2),)
    module = Catches(always=True)
    program = follow(module, example, lambda: export(module, example))
    assert torch.equal(program.module()(*example), module(*example))


def test_an_error_that_the_trace_alone_catches_is_named_with_its_line() -> None:
    example = (torch.ones(2),)
    module = Catches(always=False)
    with pytest.raises(CaptureError, match="KeyError: 'the mask of this length'") as caught:
        follow(module, example, lambda: export(module, example))
    assert 'raise KeyError("the mask of this length")' in caught.value.hint


class Hands(nn.Module):
    """An error that the model hands on is no error that it catches, whatever it closes on the way."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            raise ValueError("no such length")
        finally:
            self.closed = True


def test_an_error_that_passes_a_finally_is_handed_on_as_it_is() -> None:
    module = Hands()
    with pytest.raises(ValueError, match="no such length"):
        follow(module, (torch.ones(2),), lambda: module(torch.ones(2)))


class WithoutGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2


class Table:
    def find(self, key: int) -> int:
        try:
            return {0: 1}[key]
        except KeyError:
            return 0


class LeavesByFinally(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            x = x * 2
        finally:
            return x  # noqa: B012 - as a user writes it


class Asks(nn.Module):
    """An object of the user's catches, not the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.find(7)


@pytest.mark.parametrize(
    ("model", "watched"), [(WithoutGradients(), False), (Asks(), True), (Suppresses(), True), (LeavesByFinally(), True)]
)
def test_only_a_model_that_may_catch_something_is_watched(model: nn.Module, watched: bool) -> None:
    before, seen = sys.gettrace(), list[object]()
    follow(model, (torch.ones(2, 2),), lambda: seen.append(sys.gettrace()))
    assert (seen[0] is not before) == watched
    assert sys.gettrace() is before
