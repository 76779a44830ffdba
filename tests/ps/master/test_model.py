"""A worker with another model or other records than the job began with ends it; the message names the difference."""

from types import SimpleNamespace

import pytest

from trueline.ps.master.master import PsMaster
from trueline.ps.messages import DenseSpec, ModelSpec, OptimizerSpec, TableSpec, describe_change
from trueline.ps.tasks import Join


def spec(*, dim=4, lr_decay=0.0, shape=(3,), seed=0, tables=("items",)):
    return ModelSpec(
        seed=seed, groups=(OptimizerSpec(kind="adagrad", lr_decay=lr_decay),),
        tables=tuple(TableSpec(name=name, dim=dim, group=0) for name in tables),
        dense=(DenseSpec(name="bias", shape=shape, group=0),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dim": 8}, "table items: dim 4 became 8"),
        ({"tables": ("items", "users")}, "table users is new"),
        ({"tables": ("users",)}, "table items is gone"),
        ({"shape": (5,)}, "parameter bias: shape (3,) became (5,)"),
        ({"lr_decay": 0.5}, "parameter group 0: lr_decay 0.0 became 0.5"),
        ({"seed": 7}, "seed 0 became 7"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_changed_is_named(changed, words):
    assert describe_change(spec(), spec(**changed)) == words


def join(request):
    failures = []
    master = SimpleNamespace(
        spec=spec(), num_records=100, fail=lambda code, why, hint: failures.append((code, why)),
    )  # fmt: skip
    PsMaster._check_model(master, request)
    return failures


def test_a_resumed_worker_whose_table_has_another_dim_is_told_which():
    [(code, why)] = join(Join("worker-0.3", spec(dim=8), 100))
    assert code == "spec"
    assert why == "worker-0.3 builds another model than the job began with: table items: dim 4 became 8"


def test_a_worker_that_sees_other_records_is_told_how_many():
    assert join(Join("worker-0.3", spec(), 90)) == [("data", "worker-0.3 sees 90 records, and the job began with 100")]
    assert join(Join("worker-0.3", spec(), 100)) == []
