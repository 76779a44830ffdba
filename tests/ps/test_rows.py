"""Rows that are taken by position have the values and gradients of torch's index_select, with and without numba."""

import numpy as np
import pytest
import torch

from trueline.ps.model import rows as model_rows
from trueline.ps.model.rows import sum_positions, take_positions
from trueline.ps.tables import numba_code


@pytest.fixture(params=["numba", "torch"])
def _way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(model_rows, "find_compiled", lambda what: None)
    else:
        pytest.importorskip("numba", reason="numba is not installed: pip install 'trueline[numba]'")
        assert numba_code.find_compiled("sum", wait=True) is not None
        monkeypatch.setattr(model_rows, "COMPILED_FROM", 1)


def _draw(count, dim):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(50, dim, generator=draw).requires_grad_()
    return rows, torch.randint(0, 40, (count,), generator=draw), torch.randn(count, dim, generator=draw)


@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.usefixtures("_way")
def test_values_and_gradients_have_the_bits_of_index_select(dim):
    rows, positions, weights = _draw(400, dim)
    taken = take_positions(rows, positions)
    assert torch.equal(taken, rows.index_select(0, positions))
    (found,) = torch.autograd.grad((taken * weights).sum(), rows)
    (wanted,) = torch.autograd.grad((rows.index_select(0, positions) * weights).sum(), rows)
    assert torch.equal(found, wanted)
    assert torch.equal(sum_positions(weights, positions, 50), torch.zeros(50, dim).index_add_(0, positions, weights))


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
@pytest.mark.usefixtures("_way")
def test_gradients_that_do_not_lie_in_order_are_summed_too(layout):
    rows, positions, weights = _draw(400, 3)
    given = weights.t().contiguous().t() if layout == "transposed" else weights[:1].expand(400, 3)
    found, wanted = (
        torch.autograd.grad(way(rows, positions), rows, given)[0]
        for way in (take_positions, lambda one, where: one.index_select(0, where))
    )
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("_way")
def test_penalties_on_gradients_have_gradients():
    found = []
    for way in (take_positions, lambda one, where: one.index_select(0, where)):
        rows, positions, _ = _draw(400, 3)
        (slope,) = torch.autograd.grad(way(rows, positions).pow(3).sum(), rows, create_graph=True)
        slope.pow(2).sum().backward()
        found.append(rows.grad)
    assert torch.allclose(*found, rtol=1e-6)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # torch's own, of forward mode
@pytest.mark.usefixtures("_way")
def test_forward_mode_and_torch_func_differentiate_it():
    rows, positions, weights = _draw(400, 3)
    tangent = torch.ones(50, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rows.detach(), tangent)
        taken = torch.autograd.forward_ad.unpack_dual(take_positions(dual, positions)).tangent
    assert torch.equal(taken, tangent.index_select(0, positions))
    per_row = torch.func.grad(lambda one: (take_positions(one, positions) * weights).sum())(rows.detach())
    assert np.allclose(per_row, torch.zeros(50, 3).index_add_(0, positions, weights), rtol=1e-6)
