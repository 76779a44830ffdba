"""Promises of gradients that are summed over a plane: NCCL's protocol, without its hardware."""

import gc
import os
import signal
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trueline.checkpoint import checkpoint
from trueline.errors import TrainError, UsageError
from trueline.parallel import backend as plane
from trueline.parallel.gloo import PLANE_TRIES, GlooGroup
from trueline.parallel.store import StoreServer
from trueline.recipe.load import load_recipe
from trueline.train.api import train
from trueline.train.settings import Fault
from worlds import TESTS
from worlds.jobs import STEPS, TINY, plain_loop, seen_counts

CPU = torch.device("cpu")
DEADLINE_S = 60


class Begun:
    def __init__(self, aborted):
        self.aborted, self.done, self.error = aborted, threading.Event(), None

    def over(self):
        if self.error is not None:
            raise self.error
        return self.done.is_set() or self.aborted.is_set()


class Watched:
    """A plane whose sums are over when a test says so, or when it is aborted."""

    def __init__(self):
        self.aborted = threading.Event()
        self.aborts = 0

    def sum(self, value):
        return Begun(self.aborted)

    def abort(self):
        self.aborts += 1
        self.aborted.set()


class Planes:
    """Those that a group was given, one after the other."""

    def __init__(self):
        self.made = []

    def __call__(self, store, rank, size, patience):
        self.made.append(Watched())
        return self.made[-1]


@pytest.fixture
def planes():
    return Planes()


@pytest.fixture
def formed(planes, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = StoreServer()
    group = GlooGroup(planes)
    group.form(1, rank=0, size=1, store=store.address)
    group.address = store.address
    yield group
    group.close()
    for made in planes.made:
        made.aborted.set()  # sums of it are over: no thread keeps waiting for them
    store.close()


def test_a_sum_that_an_abort_has_ended_is_thrown_away_though_it_is_over(formed):
    pending = formed.sum_bucket(torch.ones(3))
    formed.cut()
    assert pending.over()
    with pytest.raises(RuntimeError, match="cut"):
        formed.wait_bucket(pending)


def test_a_cut_reaches_who_waits_for_a_sum_and_is_noted_before_the_plane_is_aborted(formed, planes):
    noted, waited = [], threading.Event()
    planes.made[0].abort = lambda: noted.append(formed._broken)
    pending = formed.sum_bucket(torch.ones(3))
    pending.over = lambda: waited.set() or planes.made[0].aborted.is_set()

    def cut():
        waited.wait(DEADLINE_S)
        formed.cut()

    cutting = threading.Thread(target=cut)
    cutting.start()
    with pytest.raises(RuntimeError, match="cut"):
        formed.wait_bucket(pending)
    cutting.join()
    assert noted[:1] == [True]


def test_a_sum_that_was_over_before_the_cut_is_whole(formed):
    pending = formed.sum_bucket(torch.ones(3))
    pending.done.set()
    formed.wait_bucket(pending)
    formed.cut()


def test_a_sum_that_fails_by_itself_counts_as_a_collective_that_failed(formed):
    from trueline.parallel.exchange import is_collective

    pending = formed.sum_bucket(torch.ones(3))
    pending.error = RuntimeError("remote process exited")
    with pytest.raises(RuntimeError, match="remote process exited") as raised:
        formed.wait_bucket(pending)
    assert is_collective(raised.value)
    pending.error = None


def test_memory_that_an_aborted_plane_may_still_write_into_is_kept_until_it_does_not(formed, planes):
    pending = formed.sum_bucket(torch.ones(3))
    planes.made[0].abort = lambda: None  # its kernels take their time
    formed.cut()
    with pytest.raises(RuntimeError, match="cut"):
        formed.wait_bucket(pending)
    earlier = set(threading.enumerate())  # planes of other tests may never finish, and their threads wait for them
    formed.close()
    kept = weakref.ref(pending)
    done = pending.done
    del pending
    gc.collect()
    assert kept() is not None
    outlasting = [one for one in threading.enumerate() if one.name == "outlast" and one not in earlier]
    done.set()
    for thread in outlasting:
        thread.join(DEADLINE_S)
    gc.collect()
    assert kept() is None


def test_a_plane_that_is_left_between_two_steps_is_aborted_once_everybody_is_in_the_next_group(formed, planes):
    formed.close()
    assert planes.made[0].aborts == 0  # a slower peer may still be reading from it
    formed.form(2, rank=0, size=1, store=formed.address)
    assert [one.aborts for one in planes.made] == [1, 0]


def test_a_plane_of_a_group_that_was_cut_is_aborted_at_once(formed, planes):
    formed.cut()
    formed.close()
    assert planes.made[0].aborts >= 1


def test_a_plane_that_comes_after_the_cut_is_aborted_and_never_used(formed, planes):
    formed.close()
    go, entered, late = threading.Event(), threading.Event(), Watched()

    def slow(store, rank, size, patience):
        entered.set()
        go.wait(DEADLINE_S)
        return late

    formed._connect = slow

    def cut():
        entered.wait(DEADLINE_S)
        formed.cut()

    cutting = threading.Thread(target=cut)
    cutting.start()
    with pytest.raises(RuntimeError, match="cut"):
        formed.form(2, rank=0, size=1, store=formed.address)
    cutting.join()
    go.set()
    assert late.aborted.wait(DEADLINE_S)


def test_a_plane_that_cannot_be_made_ends_the_job_after_some_tries_and_says_what_to_do(formed):
    formed.close()

    def never(store, rank, size, patience):
        raise RuntimeError("no cable")

    formed._connect = never
    for generation in range(2, 1 + PLANE_TRIES):
        with pytest.raises(RuntimeError, match="no cable"):
            formed.form(generation, rank=0, size=1, store=formed.address)
        formed.close()
    with pytest.raises(TrainError, match="no cable") as raised:
        formed.form(1 + PLANE_TRIES, rank=0, size=1, store=formed.address)
    assert "--backend" in raised.value.hint


@pytest.mark.parametrize(
    ("wanted", "said"),
    [("nccl", "built without it"), ("nowhere.at_all:connect", "nowhere"), ("worlds.planes:disconnect", "disconnect")],
)
def test_a_backend_that_is_not_there_is_named(wanted, said, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UsageError, match=said) as raised:
        plane.connector(wanted, CPU)
    assert "gloo" in raised.value.hint


def test_nccl_is_refused_for_a_worker_that_computes_on_the_cpu(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(UsageError, match="computes on the cpu"):
        plane.connector("nccl", CPU)


class Work:
    def __init__(self):
        self.completed, self.error, self.waited = True, None, 0

    def is_completed(self):
        return self.completed

    def exception(self):
        return self.error

    def wait(self):
        self.waited += 1


class Nccl:
    """torch's ProcessGroupNCCL, as far as it is used."""

    class Options:
        def __init__(self):
            self.config = SimpleNamespace(blocking=-42)

    def __init__(self, store, rank, size, options):
        self.options, self.aborts, self.given, self.work = options, 0, [], Work()
        Nccl.newest = self

    def allreduce(self, values):
        self.given.append(values)
        return self.work

    def abort(self):
        self.aborts += 1


@pytest.fixture
def hardware(monkeypatch):
    """NCCL and devices that are not there: two, which lie in the host's memory."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    for name in plane._QUIET_NCCL:
        monkeypatch.setenv(name, "")


def nccl_plane(rank=0, size=1, store=None, patience_s=DEADLINE_S):
    return plane.NcclPlane(store or HashStore(), rank, size, timedelta(seconds=patience_s), device=CPU)


def test_an_nccl_plane_is_there_when_a_first_sum_is_over_and_is_aborted_once(hardware):
    made = nccl_plane()
    inside = Nccl.newest
    assert inside.options.config.blocking == 0
    assert len(inside.given) == 1
    value = torch.ones(4)
    pending = made.sum(value)
    assert inside.given[-1][0] is value
    inside.work.completed = False
    assert not pending.over()
    inside.work.completed = True
    assert pending.over()
    made.abort()
    made.abort()
    assert inside.aborts == 1


def test_an_error_that_nccl_found_is_a_collective_that_failed(hardware):
    pending = nccl_plane().sum(torch.ones(4))
    Nccl.newest.work.error = RuntimeError("ncclRemoteError")
    with pytest.raises(dist.DistBackendError, match="ncclRemoteError"):
        pending.over()


def test_members_that_do_not_come_together_in_time_are_given_up(hardware, monkeypatch):
    monkeypatch.setattr(Work, "is_completed", lambda self: False)
    with pytest.raises(RuntimeError, match="come together"):
        nccl_plane(patience_s=0.01)
    assert Nccl.newest.aborts == 1


def test_two_workers_of_one_device_are_told_so_before_nccl_is_asked(hardware):
    store = HashStore()
    store.set("device-1", f"{plane.socket.gethostname()} {CPU}")
    with pytest.raises(TrainError, match="workers 0 and 1 share cpu") as raised:
        nccl_plane(size=2, store=store)
    assert "devices" in raised.value.hint


@pytest.mark.jobs
def test_a_job_whose_gradients_go_over_a_plane_counts_each_record_once_through_kills(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("TRUELINE_PLANES", str(tmp_path))
    faults = (  # the last worker lives, so that there is always somebody who has the state
        Fault(step=5, slot=0, phase="backward"),
        Fault(step=12, slot=1, phase="allreduced"),
        Fault(step=28, slot=1, incarnation=1, phase="backward", signal=signal.SIGSTOP),
    )
    result = train(TINY, job_dir=tmp_path / "job", workers=3, backend="worlds.planes:connect", faults=faults)
    assert result.summary.exactly_once
    assert seen_counts(result.checkpoint) == [6.0]
    found = checkpoint.read(result.checkpoint).state["model"]
    for name, parameter in plain_loop(load_recipe(TINY), STEPS).items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-9, atol=1e-12)
    notes = (tmp_path / "notes").read_text().split("\n")
    assert sum(note.startswith("made") for note in notes) >= 3 + 2 + 1  # the first group's, and those after two deaths
    assert any(note.startswith("lost") for note in notes)  # a peer died in the middle of a sum


@pytest.mark.jobs
def test_a_job_whose_members_cannot_connect_over_their_backend_ends_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    with pytest.raises(TrainError, match="no cable"):
        train(TINY, job_dir=tmp_path / "job", workers=2, backend="worlds.planes:alone")
