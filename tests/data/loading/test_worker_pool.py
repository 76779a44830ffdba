"""Promises of the processes that read ahead: the same batches, nothing lost with them, nothing left of them."""

import gc
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import Dataset

from trueline.data.loading import worker_pool
from trueline.data.loading.random_state import generator_state
from trueline.data.loading.seeding import SeededReader, preserve_generators
from trueline.data.loading.worker_pool import ReaderClient, ReaderLost, ReaderPool, make_reader
from trueline.data.open import as_source
from trueline.data.source import Batch
from trueline.data.sources.databases import MaxComputeRecords
from trueline.data.sources.table_source import TableSource
from trueline.errors import DataError
from trueline.storage import listing
from trueline.storage.cache import BlockCache
from trueline.train.elastic import Elastic
from trueline.train.step.blame import find_failing
from trueline.train.step.options import Options
from worlds.records import FakeOdps, flat, images, write_images, write_json
from worlds.waiting import until_ended


class Records(Dataset):
    """Each record has a tensor of every kind; `draws` adds noise, as an augmentation does."""

    def __init__(self, *, draws=False):
        self.draws = draws

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 13:
            raise OSError("the image is torn")
        if index == 26:
            os._exit(3)
        pixels = torch.full((3, 2), float(index))
        if self.draws:
            pixels += torch.rand(3, 2) + np.random.rand() * 0.5
        half, nothing = torch.tensor(index, dtype=torch.bfloat16), torch.empty(0, 5)
        return {"pixels": pixels, "pair": (half, nothing), "name": f"record {index}"}, index % 3


@pytest.fixture
def readers(request):
    made = []

    def make(count, *, draws=False, place=lambda batch: batch):
        made.append(ReaderPool(source(draws=draws), 7, place, count=count))
        return made[-1]

    yield make
    for one in made:
        one.close()


def source(*, draws=False):
    return as_source(Records(draws=draws), mode="training", feed=None, recipe="r")


def assert_equal(found: Batch, wanted: Batch) -> None:
    assert found.inputs["name"] == wanted.inputs["name"]
    pairs = [(found.inputs["pixels"], wanted.inputs["pixels"]), (found.labels, wanted.labels)]
    for one, other in [*pairs, *zip(found.inputs["pair"], wanted.inputs["pair"], strict=True)]:
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("draws", [False, True])
def test_a_batch_is_the_same_whoever_reads_it_and_whether_it_was_asked_for_ahead(readers, count, draws):
    alone, several = SeededReader(source(draws=draws), 7), readers(count, draws=draws)
    asked = [(0, [3, 1, 4]), (0, [9]), (1, [3, 1, 4]), (1, [0, 2])]
    for at, (epoch, indices) in enumerate(asked):
        for later, ones in asked[at : at + 3]:
            several.prefetch(np.array(ones), epoch=later)
        with preserve_generators():
            wanted = alone.read(np.array(indices), epoch=epoch)
        assert_equal(several.read(np.array(indices), epoch=epoch), wanted)


def test_what_was_asked_for_and_is_not_wanted_is_let_go_of(readers):
    several = readers(2)
    for indices in ([1, 2], [3], [4]):
        several.prefetch(np.array(indices), epoch=0)
    assert several.ahead == 2
    assert several.read(np.array([5, 6]), epoch=0).labels.tolist() == [2, 0]
    assert several.read(np.array([1, 2]), epoch=0).labels.tolist() == [1, 2]
    assert several.read(np.array([4]), epoch=0).labels.tolist() == [1]


def test_batches_are_placed_by_whom_they_are_for(readers):
    placed = readers(1, place=lambda batch: Batch("placed", batch.labels))
    assert placed.read(np.array([1]), epoch=0).inputs == "placed"


def test_a_record_that_cannot_be_read_is_named_and_the_reader_goes_on(readers):
    several = readers(1)
    several.prefetch(np.array([12, 13]), epoch=0)
    with pytest.raises(DataError, match="record 13 of dataset Records cannot be read: OSError: the image is torn"):
        several.read(np.array([12, 13]), epoch=0)
    assert several.read(np.array([12]), epoch=0).labels.tolist() == [0]


def test_a_reader_that_dies_ends_its_workers_reading_and_blames_no_record(readers):
    several = readers(2)
    with pytest.raises(ReaderLost, match="died while it read"):
        several.read(np.array([25, 26]), epoch=0)
    several = readers(1)

    def attempt(record: int) -> None:
        several.read(np.array([record]), epoch=0)

    with pytest.raises(ReaderLost):
        find_failing([25, 26, 27], attempt)


def test_records_in_files_are_read_by_processes_where_that_is_asked_for(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"x": {n}.5, "label": {n}}}\n' for n in range(50)))
    table = as_source(str(tmp_path / "a.jsonl"), mode="training", feed=None, recipe="r")
    assert isinstance(make_reader(table, 0, readers=0), SeededReader)
    readers = make_reader(table, 0, readers=2)
    assert isinstance(readers, ReaderPool)
    try:
        for wanted in (np.array([49, 3, 3]), np.arange(10, 30)):
            assert readers.read(wanted, epoch=0).labels.tolist() == wanted.tolist()
    finally:
        readers.close()


class OfOneProcess(MemoryFileSystem):
    """A store whose connections are those of the process that made it, as s3fs's are."""

    protocol = "one"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("one://", "memory://"))

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._made_by = os.getpid()

    def find(self, path, *args, **options):
        self._check()
        return super().find(path, *args, **options)

    def info(self, path, **options):
        self._check()
        return super().info(path, **options)

    def cat_file(self, path, *args, **options):
        self._check()
        return super().cat_file(path, *args, **options)

    def _check(self):
        if self._made_by != os.getpid():
            raise RuntimeError("a fork has used the connections of its parent")


def tables(count):
    return pa.table({"x": np.arange(count, dtype=np.float32), "label": np.arange(count)})


def of_store(folder):
    fsspec.register_implementation("one", OfOneProcess, clobber=True)
    sink = pa.BufferOutputStream()
    pq.write_table(tables(400), sink, row_group_size=100)
    fsspec.filesystem("one").pipe_file("/readers/a.parquet", sink.getvalue().to_pybytes())
    return "one://readers/a.parquet"


def of_odps(folder):
    """An address that the fake package `odps` knows; its tables can be read by the process that got them only."""

    class Table(FakeOdps):
        def __init__(self, path):
            super().__init__(path)
            self._made_by = os.getpid()

        def open_reader(self, partition=None):
            if self._made_by != os.getpid():
                raise RuntimeError("a fork has used the connections of its parent")
            return super().open_reader(partition)

    path = write_json(folder / "t", flat(400))
    account = SimpleNamespace(get_table=lambda name, project: Table(path))
    sys.modules["odps"] = SimpleNamespace(ODPS=SimpleNamespace(from_environments=lambda: account))
    return "odps://shop/clicks?partition=day=1"


def of_images(folder):
    write_images(folder / "photos", images(400))
    return str(folder / "photos")


@pytest.mark.parametrize("place", [of_store, of_odps, of_images])
def test_records_far_away_are_read_by_processes_that_connect_for_themselves(place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "odps", None)
    monkeypatch.setattr(listing, "_shared_cache", lambda: BlockCache(tmp_path / "cache", 1 << 24))

    def feed(records, mode):
        return torch.full((len(records),), float(os.getpid())), torch.arange(len(records)) + hash_of(records)

    source = as_source(place(tmp_path), mode="training", feed=feed, recipe="r")
    asked = [np.array([start, 399 - start, 7]) for start in range(0, 200, 10)]
    wanted = [source.read(records).labels.tolist() for records in asked]  # this process is connected
    several = make_reader(source, 0, readers=2)
    assert isinstance(several, ReaderPool)
    try:
        by = set()
        for at, records in enumerate(asked):
            for later in asked[at : at + 3]:
                several.prefetch(later, epoch=0)
            batch = several.read(records, epoch=0)
            assert batch.labels.tolist() == wanted[at]
            by |= set(batch.inputs.tolist())
        assert os.getpid() not in by
        assert source.read(asked[0]).labels.tolist() == wanted[0], "this process reads on as well"
    finally:
        several.close()


def hash_of(records):
    return int.from_bytes(hashlib.sha256(str(records.to_pylist()).encode()).digest()[:4], "big")


def test_a_table_that_nobody_can_open_again_is_read_by_the_worker(tmp_path):
    table = MaxComputeRecords(FakeOdps(write_json(tmp_path / "t", flat(10))))
    source = TableSource(table, lambda records, mode: (torch.zeros(len(records)),) * 2, mode="training", where="t")
    assert isinstance(make_reader(source, 0, readers=2), SeededReader)


def test_a_reader_collects_no_garbage_of_its_worker():
    class Waiting:
        """Like a process group, whose destructor waits for threads that a fork does not have."""

        def __init__(self):
            self.itself, self.owner = self, os.getpid()

        def __del__(self):
            if os.getpid() != self.owner:
                os._exit(7)

    class Collecting:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            gc.collect()
            return torch.tensor([float(index)]), index

    gc.disable()
    try:
        Waiting()
        readers = make_reader(as_source(Collecting(), mode="training", feed=None, recipe="r"), 0, readers=1)
        assert readers.read(np.arange(4), epoch=0).labels.tolist() == [0, 1, 2, 3]
        readers.close()
    finally:
        gc.enable()


def test_readers_end_when_they_are_closed_or_forgotten():
    one, other = ReaderPool(source(), 0, count=2), ReaderPool(source(), 0, count=1)
    pids = [reader.pid for reader in (*one._readers, *other._readers)]
    one.close()
    one.close()
    del other
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)


STUCK = """
import os, signal, sys, time
import numpy as np
from trueline.data.loading.worker_pool import ReaderPool
from trueline.data.open import as_source
class Stuck:
    def __len__(self): return 3
    def __getitem__(self, index): time.sleep(3600)
readers = ReaderPool(as_source(Stuck(), mode="training", feed=None, recipe="r"), 0, count=2)
readers.prefetch(np.array([1]), epoch=0)
print(*(reader.pid for reader in readers._readers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_readers_end_with_a_worker_that_is_killed_also_in_the_middle_of_a_record():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    until_ended(int(pid) for pid in done.stdout.split())
    assert len(done.stdout.split()) == 2


class Points(Dataset):
    def __init__(self):
        self.inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.inputs[index] + torch.rand(4), self.inputs[index].sum()


def trained(**options) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    job = Elastic(model, optimizer, Points(), global_batch=6, epochs=2, options=Options(**options))
    for batch in job:
        job.step((model(batch.inputs)[:, 0] - batch.labels).square().mean())
    assert job.certificates[-1]["tally_min"] == 1
    return model.weight.detach()


@pytest.mark.parametrize("micro_batch", [0, pytest.param(2, marks=pytest.mark.jobs)])
def test_training_with_readers_gives_the_same_weights(micro_batch):
    assert torch.equal(trained(readers=3, micro_batch=micro_batch), trained(micro_batch=micro_batch))


class Counted(Records):
    def __init__(self):
        super().__init__()
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


def test_a_batch_that_was_read_ahead_is_handed_out_once_and_only_to_who_asks_for_just_it():
    records = Counted()
    reader = SeededReader(as_source(records, mode="training", feed=None, recipe="r"), 7)
    reader.read_ahead(np.array([3, 1]), epoch=0)
    ahead = reader.read(np.array([3, 1]), epoch=0)
    assert records.asked == [3, 1]
    assert_equal(ahead, reader.read(np.array([3, 1]), epoch=0))
    reader.read_ahead(np.array([5]), epoch=0)
    reader.read(np.array([5]), epoch=1)
    reader.read(np.array([5]), epoch=0)
    assert records.asked == [3, 1, 3, 1, 5, 5, 5]


def test_every_draw_changes_the_state_and_nothing_else_does():
    draws = [random.random, lambda: random.getrandbits(8), np.random.rand, lambda: torch.rand(1)]
    with preserve_generators():
        for draw in draws:
            for _ in range(1300):  # a generator makes its 624 words anew twice
                before = generator_state()
                assert generator_state() == before
                draw()
                assert generator_state() != before


# What a trial asks for again. -----------------------------------------------------------------------------------------


class Asked:
    """A trial that requests records, and the reader that counts them: each takes `slow_s` seconds."""

    def __init__(self, slow_s, kept, drifts=False):
        self.reads, self.slow_s, self.kept, self.drifts = 0, slow_s, kept, drifts
        self.mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client = ReaderClient(theirs)

    def read(self, indices, *, epoch):
        self.reads += 1
        self.kept._read_s += self.slow_s * len(indices)
        made = torch.from_numpy(indices.astype(np.float32)) + (self.reads if self.drifts else 0)
        return Batch({"x": made, "name": [str(index) for index in indices]}, made * 2)

    def ask(self, *indices):
        self.client.ask(1, 0, np.array(indices))
        head, memory = worker_pool.receive(self.mine)
        worker_pool.answer_request(self.mine, head, memory, self, self.kept)
        return self.client.take(1)


@pytest.fixture
def asked():
    made = []

    def make(slow_s, **how):
        made.append(Asked(slow_s, worker_pool.ReadMemory(), **how))
        return made[-1]

    yield make
    for one in made:
        one.mine.close()
        one.client.line.close()


def test_records_that_take_long_are_read_twice_and_then_answered_from_memory_as_they_were(asked):
    slow = asked(0.2)
    for _ in range(5):
        found = slow.ask(3, 1, 4)
        assert found.inputs["x"].tolist() == [3, 1, 4]
        assert found.inputs["name"] == ["3", "1", "4"]
        assert found.labels.tolist() == [6, 2, 8]
        found.labels.zero_()  # what a loop does with its batch reaches no other one
    assert slow.reads == 2
    slow.ask(1, 3, 4)
    assert slow.reads == 3, "another order is another batch: a collate_fn may see it"


def test_records_that_are_others_the_second_time_are_always_read(asked):
    slow = asked(0.5, drifts=True)
    assert [slow.ask(3, 1).labels.tolist()[0] for _ in range(4)] == [8, 10, 12, 14]


def test_records_that_are_fast_are_always_read(asked):
    fast = asked(0.01)
    for _ in range(5):
        fast.ask(3, 1, 4)
    assert fast.reads == 5


def test_a_memory_of_records_has_an_end(asked, monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_KEPT_BYTES", 1)
    slow = asked(1.0)
    for _ in range(3):
        slow.ask(1)
    assert slow.reads == 3
