"""The length of a tensor, and a size as an int or a float, stay functions of the size while a model is traced."""

from __future__ import annotations

import builtins
import functools
import math
import numbers
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches.stand_ins import size_lengths


class Flattened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1) * len(x[0])


class Numbered(nn.Module):
    """A share of a length, and a length as a number."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        assert isinstance(int(length), int)
        assert isinstance(float(length), float)
        kept = int(0.5 * length) + int("1")
        return x[:, :kept] * float(length - 1) / 7.0


class Rooted(nn.Module):
    """A root of a length: as a scale, and as a length."""

    def forward(self, x: Tensor) -> Tensor:
        root = math.sqrt(x.shape[1])
        return x[:, : math.ceil(root)] / root * math.sqrt(4.0)


class Bounded(nn.Module):
    """The smaller of a size and a number, of two sizes, and what Python's own have besides."""

    def forward(self, x: Tensor) -> Tensor:
        kept = min(x.shape[1], max(x.shape[0], 4)) + min([1, 2]) - max((), default=1)
        return x[:, :kept] * max(x.shape, key=lambda size: -1) * min(x.shape[1] / 7, 2.0)


@pytest.mark.parametrize("kind", [Flattened, Numbered, Rooted, Bounded])
def test_what_python_makes_a_number_of_a_size_stays_as_free_as_the_size(kind: type[nn.Module]) -> None:
    eager = EagerSession(kind().eval(), torch.randn(3, 9, 4), dynamic_shapes={"x": {1: "length"}})
    program = torch_export.LoadedProgram(torch_export.export(eager.module, eager.calling))
    x = torch.randn(5, 7, 4).numpy()
    assert np.isclose(program.run({"x": x})["output"], eager.run({"x": x})["output"], rtol=1e-6).all()


def test_the_users_module_has_the_builtin_names_again_after_the_block_and_after_an_error() -> None:
    scope = Numbered.forward.__globals__
    assert size_lengths.may_help(Numbered())
    with size_lengths.keep_lengths_free(Numbered()):
        assert scope["int"] is not builtins.int
        assert isinstance(7, scope["int"])
        assert scope["int"] == builtins.int
        assert scope["int"]("7") == 7
        assert not isinstance(scope["math"], ModuleType)
    assert not {"len", "int", "float", "min", "max"} & set(scope)
    assert isinstance(scope["math"], ModuleType)
    with pytest.raises(RuntimeError, match="in the block"), size_lengths.keep_lengths_free(Numbered()):
        raise RuntimeError("in the block")
    assert not {"len", "int", "float", "min", "max"} & set(scope)


class AsksForTypes(nn.Module):
    """A size is no `int` while torch follows the model, and one when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return -x if isinstance(length, int) and length * 7 + 3 == 941 else x


class AsksForIntegral(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return -x if isinstance(length, numbers.Integral) and length * 7 + 3 == 941 else x


class AsksForItsType(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return -x if type(length) is int and length * 7 + 3 == 941 else x


class LooksUpItsType(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return -x if {int: 7, str: 1}.get(type(length), 0) * length + 3 == 941 else x


class MatchesItsType(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        match x.shape[1]:
            case int() as length if length * 7 + 3 == 941:
                return -x
        return x


class AsksForAMethod(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return -x if hasattr(length, "to_bytes") and length * 7 + 3 == 941 else x


@functools.singledispatch
def is_rare(length: object) -> bool:
    return False


@is_rare.register
def _(length: int) -> bool:
    return length * 7 + 3 == 941


class DispatchesOnItsType(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x if is_rare(x.shape[1]) else x


@pytest.mark.parametrize(
    "kind",
    [
        AsksForTypes,
        AsksForIntegral,
        AsksForItsType,
        LooksUpItsType,
        MatchesItsType,
        AsksForAMethod,
        DispatchesOnItsType,
    ],
)
def test_a_size_is_a_whole_number_when_a_model_that_is_followed_asks(kind: type[nn.Module]) -> None:
    eager = EagerSession(kind().eval(), torch.ones(3, 9), dynamic_shapes={"x": {1: "length"}})
    found = torch_export.export(eager.module, eager.calling)
    assert 134 in found.boundaries["length"]  # the probes ask there
    assert int is builtins.int
    assert not {"int", "type", "hasattr"} & set(vars(sys.modules[__name__]))
    assert is_rare.dispatch(str) is not is_rare.dispatch(int)


def test_types_are_what_they_are_where_a_model_that_asks_for_them_is_followed() -> None:
    scope = AsksForItsType.forward.__globals__
    with size_lengths.keep_lengths_free(AsksForItsType()), size_lengths.keep_types(AsksForItsType()):
        made = {"number": 7, "fraction": 0.5, "text": "7", "rows": [7]}
        asked = eval(
            "[type(number) is int, type(fraction) is float, type(text) is str, type(rows) is list]", scope, made
        )
        assert asked == [True] * 4
        assert eval("isinstance(int, type) and type('Made', (), {}).__name__ == 'Made'", scope)


class LetterBox(nn.Module):
    """An image that is scaled into a square of 32, its sides in proportion, and filled up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        scale = min(32 / height, 32 / width)
        high, wide = math.ceil(height * scale - 0.5), math.ceil(width * scale - 0.5)
        found = nn.functional.interpolate(x, (high, wide), mode="bilinear", align_corners=False)
        return self.layer(nn.functional.pad(found, (0, 32 - wide, 0, 32 - high))).mean((2, 3))


def test_guards_that_no_range_says_are_those_of_pythons_own_functions() -> None:
    """`min` and `int` of two sizes make conditions of torch's that leave sizes out in two directions."""
    shapes = {"x": {2: "height", 3: "width"}}
    eager = EagerSession(LetterBox().eval(), torch.ones(2, 2, 16, 12), dynamic_shapes=shapes)
    found = torch_export.export(eager.module, eager.calling)
    for claim in found.claims:
        assert claim.allows({"batch": 2, "height": 16, "width": 12})
        assert claim.allows({"batch": 2, "height": 30, "width": 50})
