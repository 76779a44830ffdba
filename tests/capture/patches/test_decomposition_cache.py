"""What torch looks up for an export is the same when it is looked up once, and anew when there is something new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._export.utils import _collect_all_valid_cia_ops
from torch.export import exported_program
from torch.export.exported_program import default_decompositions

from trueline.capture.export.tracing import quiet
from trueline.capture.patches import decomposition_cache
from trueline.capture.patches.decomposition_cache import cache_operators

pytestmark = pytest.mark.slow  # exports programs

_OPS: Any = torch._ops


def test_the_operators_that_are_kept_whole_are_the_same_and_a_new_one_is_among_them() -> None:
    plain = _collect_all_valid_cia_ops()
    with cache_operators():
        assert _collect_all_valid_cia_ops() == plain
        with torch.library._scoped_library("looked_up", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
            assert _collect_all_valid_cia_ops() - plain == {torch.ops.looked_up.twice.default}
    assert _OPS.Callable is Callable


def test_whatever_is_called_is_taken_for_callable_and_nothing_else() -> None:
    with cache_operators():
        assert isinstance(len, _OPS.Callable)
        assert isinstance(lambda: None, _OPS.Callable[[int], str])
        assert not isinstance(7, _OPS.Callable)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(y, y, y).softmax(-1)


def exported(table: dict[Any, Any]) -> str:
    torch.manual_seed(0)
    with quiet():
        program = torch.export.export(Model().eval(), (torch.ones(2, 4, 5),), strict=False)
        return str(program.run_decompositions(table).graph)


@pytest.mark.jobs
@pytest.mark.parametrize("table", [dict, default_decompositions], ids=["nothing", "everything"])
def test_a_program_is_taken_apart_as_without_and_the_operators_are_left_as_they_were(
    table: Callable[[], dict[Any, Any]],
) -> None:
    plain = exported(table())
    kernels = {op: dict(op.py_kernels) for op in _collect_all_valid_cia_ops()}
    with cache_operators():
        assert exported(table()) == plain
    assert {op: dict(op.py_kernels) for op in _collect_all_valid_cia_ops()} == kernels


def test_an_operator_is_prepared_once_and_again_when_it_gets_another_decomposition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    override, prepared = exported_program._override_composite_implicit_decomp, list[int]()

    def count(wanted: dict[Any, Any]) -> Any:
        prepared.append(len(wanted))
        return override(wanted)

    monkeypatch.setattr(decomposition_cache, "_overrides", {})
    monkeypatch.setattr(exported_program, "_override_composite_implicit_decomp", count)
    with cache_operators():
        for _ in range(3):
            exported(default_decompositions())
            exported({})
        few = prepared[-2:]
        exported({torch.ops.aten.adaptive_avg_pool1d.default: lambda x, size: x})
    assert max(few) < 10 < 400 < prepared[0]
    assert prepared[-1] == few[-1] + 1
    assert exported_program._override_composite_implicit_decomp is count
