"""Moving averages of rows: those that a step which averages the whole table would give, whenever a row was changed."""

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trueline.ps.messages import ModelSpec, OptimizerSpec, TableSpec
from trueline.ps.partition import make_routing
from trueline.ps.tables.averages import decay_between
from trueline.ps.tables.held import Held, Push
from trueline.ps.tables.initial import initial_rows
from trueline.ps.tables.table import read_averages

DIM, ROWS = 3, 12


def make_held(ema):
    tables = (TableSpec(name="t", dim=DIM, group=0, init="normal", evict="lru"),)
    spec = ModelSpec(seed=5, groups=(OptimizerSpec(kind="adagrad", eps=1e-10),), tables=tables, ema=ema)
    return Held(spec, make_routing(["server-0"], ()), 0)


@pytest.mark.parametrize("ema", [0.05, 0.3, 0.9, 0.999])
def test_the_products_of_the_decay_are_those_of_its_steps(ema):
    decay = [min(ema, (1 + step) / (10 + step)) for step in range(400)]
    starts = np.array([0, 1, 30, 399, 400])
    np.testing.assert_allclose(
        decay_between(ema, starts, 400), [np.prod(decay[start:]) for start in starts], rtol=1e-10
    )


@pytest.mark.parametrize("ema", [0.3, 0.99])
def test_the_average_of_each_row_is_that_of_a_whole_table_in_one_process(ema):
    held, ids = make_held(ema), np.arange(ROWS, dtype=np.int64)
    weight = torch.nn.Parameter(torch.from_numpy(initial_rows(held.spec.tables[0], 5, ids)))
    optimizer, average = torch.optim.Adagrad([weight], lr=0.1), weight.detach().clone()
    generator = np.random.default_rng(0)
    for step in range(120):
        touched = np.sort(generator.choice(ROWS - 1, 3, replace=False)).astype(np.int64)  # the last one never
        gradient = generator.normal(size=(3, DIM)).astype(np.float32)
        weight.grad = torch.zeros(ROWS, DIM)
        weight.grad[touched] = torch.from_numpy(gradient)
        optimizer.step()
        get_ema_multi_avg_fn(min(ema, (1 + step) / (10 + step)))([average], [weight.detach()], 1)
        held.push(Push(epoch=0, minibatch=step, part=0, parts=1, weight=1.0, lrs=(0.1,),
                       tables=[("t", touched, gradient.copy())], dense=[]))  # fmt: skip
        if step % 40 == 17:
            held = Held.load(*held.dump())
    averaged = held.pull([("t", ids)], dense=False, averaged=True)[0][0]
    np.testing.assert_allclose(averaged, average.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(held.pull([("t", ids)], dense=False)[0][0], weight.detach(), rtol=1e-4, atol=1e-6)
    header, arrays = held.dump()
    order = np.argsort(arrays[0])
    saved = read_averages(held.spec, "t", arrays[: header["columns"]["t"]], header["steps"])[order]
    np.testing.assert_allclose(saved, averaged[np.sort(arrays[0])], rtol=1e-6)
