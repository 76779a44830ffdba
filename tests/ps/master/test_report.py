"""A certificate counts what the servers have applied, not what the master believes."""

import asyncio
from types import SimpleNamespace

import pytest

from trueline.ps.master.ledger import MinibatchGrid, MinibatchLedger
from trueline.ps.master.master import PsMaster
from trueline.ps.master.report import certify
from trueline.ps.messages import ServerReport
from trueline.train.api import JobSummary

GRID = MinibatchGrid(num_records=103, batch=10)
WHOLE = ((0, 11),)


def certificates(*applied, grid=GRID):
    return certify(
        grid,
        [
            ServerReport(ref=f"server-{slot}.0", pid=1, routing=1, initialized=True, steps=0, applied=one)
            for slot, one in enumerate(applied)
        ],
    )


def is_once(*applied):
    return JobSummary({"epochs": 2, "records": 103, "certificates": certificates(*applied)}).exactly_once


def test_whole_epochs_at_every_server_are_certified():
    assert is_once({0: WHOLE, 1: WHOLE}, {0: WHOLE, 1: WHOLE})
    assert [(one["steps"], one["records"]) for one in certificates({0: WHOLE}, {0: WHOLE})] == [(11, 103)]


@pytest.mark.parametrize("lacking", [((0, 10),), ((1, 11),), ((0, 4), (5, 11)), ()])
def test_a_minibatch_that_one_server_lacks_is_not_certified(lacking):
    assert not is_once({0: WHOLE, 1: WHOLE}, {0: lacking, 1: WHOLE})
    assert not is_once({0: WHOLE, 1: WHOLE}, {0: WHOLE, 1: lacking})


@pytest.mark.parametrize(
    ("runs", "steps", "records"), [(((0, 3),), 1, 10), (((1, 7),), 1, 20), (((30, 31),), 1, 3), (((0, 31),), 11, 103)]
)
def test_a_step_of_several_minibatches_counts_when_it_is_whole_and_records_count_at_once(runs, steps, records):
    [one] = certificates({0: runs}, grid=MinibatchGrid(num_records=103, batch=10, parts=3))
    assert (one["steps"], one["records"]) == (steps, records)


def test_a_job_does_not_end_on_the_word_of_a_server_that_has_begun_again_and_holds_nothing_yet():
    async def stats(_: float) -> ServerReport:
        return ServerReport(ref="server-0.1", pid=1, routing=-1, initialized=False, steps=0)

    rows = []
    master = SimpleNamespace(
        ledger=MinibatchLedger(grid=GRID, epochs=1), routing=SimpleNamespace(servers=("server-0",), version=1),
        link=lambda ref: SimpleNamespace(stats=stats), phase="running", log=lambda kind, **body: rows.append(kind),
    )  # fmt: skip
    asyncio.run(PsMaster.conclude(master))
    assert (master.phase, rows) == ("running", [])
