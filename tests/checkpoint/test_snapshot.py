"""Promises of a snapshot: the state of its moment, read in place as long as nothing changes, copied before a change."""

import errno
import threading

import numpy as np
import pytest
import torch

from trueline.checkpoint import snapshot as snapshots
from trueline.checkpoint.change_watch import ChangeWatch, changes_by_operators
from trueline.checkpoint.snapshot import Snapshot
from trueline.errors import CheckpointError
from worlds.states import read_all


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 8)
    monkeypatch.setattr(snapshots, "LEAST_LIVE", 12)


def lively(**tensors):
    return Snapshot(tensors, live=lambda _: True), tensors


def test_a_snapshot_is_the_state_of_its_moment():
    live = {"w": torch.ones(3), "half": torch.ones(2, dtype=torch.bfloat16), "tally": np.arange(3), "lr": [0.1]}
    taken = Snapshot(live)
    live["w"].zero_()
    live["tally"][:] = 7
    live["lr"][0] = 0.2
    state = read_all(taken)
    assert (state["w"].tolist(), state["tally"].tolist(), state["lr"]) == ([1.0] * 3, [0, 1, 2], [0.1])
    assert state["half"].dtype is torch.bfloat16
    assert taken.moved == taken.total == 12 + 4 + 24


def test_tensors_that_do_not_change_are_read_where_they_are():
    taken, _ = lively(w=torch.arange(1.0, 6.0))
    assert taken._tensors[0].data_ptr() == _["w"].data_ptr()
    assert read_all(taken)["w"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("read", [0, 1, 2, 3], ids="{} pieces were read".format)
def test_what_was_not_read_before_a_change_is_copied_and_what_was_read_is_not(read):
    taken, live = lively(v=torch.arange(4.0), w=torch.arange(5.0))
    first = taken.pieces(0)
    data = [bytes(next(first)) for _ in range(min(read, 2))]
    if read == 3:
        assert next(first, None) is None
    taken.settle()
    for tensor in live.values():
        tensor.fill_(-1.0)
    data += [bytes(piece) for piece in first]
    assert np.frombuffer(b"".join(data), np.float32).tolist() == [0, 1, 2, 3]
    assert np.frombuffer(b"".join(map(bytes, taken.pieces(1))), np.float32).tolist() == [0, 1, 2, 3, 4]
    assert taken._tensors == [None, None], "what all have read is kept no longer"


def test_each_reader_gets_all_of_it():
    taken = Snapshot({"w": torch.arange(5.0)}, readers=2, live=lambda _: True)
    assert b"".join(map(bytes, taken.pieces(0))) == b"".join(map(bytes, taken.pieces(0)))
    with pytest.raises(CheckpointError, match="was dropped"):
        next(taken.pieces(0))


def test_a_change_waits_for_readers_but_no_longer_than_half_of_the_time_since_the_snapshot(monkeypatch):
    taken = Snapshot({"w": torch.arange(5.0)}, patience=0.5, live=lambda _: True)
    waited = []
    monkeypatch.setattr(taken._changed, "wait_for", lambda over, limit: waited.append((over(), limit)))
    monkeypatch.setattr(snapshots.time, "monotonic", lambda: taken._born + 3.0)
    taken.settle()
    assert waited == [(False, 1.5)]
    taken.settle()
    assert len(waited) == 1, "it depends on nothing any more"


def test_a_change_goes_on_as_soon_as_all_is_read():
    taken = Snapshot({"w": torch.arange(5.0)}, patience=1e9, live=lambda _: True)
    reader = threading.Thread(target=read_all, args=(taken,))
    reader.start()
    taken.settle()
    reader.join()
    assert taken._tensors == [None]


def test_a_tensor_that_something_else_changes_fails_its_readers_instead_of_giving_a_torn_state():
    taken, live = lively(w=torch.arange(5.0))
    pieces = taken.pieces(0)
    next(pieces)
    live["w"].mul_(2.0)
    with pytest.raises(CheckpointError, match="outside of the optimizer's step"):
        next(pieces)
    later, live = lively(w=torch.arange(5.0))
    live["w"].mul_(2.0)
    later.settle()
    assert later.torn
    with pytest.raises(CheckpointError, match="outside of the optimizer's step"):
        read_all(later)


def test_readers_of_a_closed_snapshot_fail():
    taken, _ = lively(w=torch.arange(5.0))
    pieces = taken.pieces(0)
    next(pieces)
    taken.close()
    with pytest.raises(CheckpointError, match="was dropped"):
        next(pieces)


@pytest.mark.parametrize("tensor", [torch.ones(4, 4).t()[1:], torch.ones(2)], ids=["not contiguous", "small"])
def test_other_tensors_are_copied_at_once(tensor):
    taken, _ = lively(w=tensor)
    expected = tensor.clone()
    tensor.zero_()
    assert torch.equal(read_all(taken)["w"], expected)


def test_a_tensor_that_is_changed_while_its_last_piece_is_read_fails_its_reader_too(monkeypatch):
    taken, live = lively(w=torch.arange(5.0))
    pieces = taken.pieces(0)
    next(pieces), next(pieces)
    live["w"].mul_(2.0)
    with pytest.raises(CheckpointError, match="outside of the optimizer's step"):
        next(pieces)


@pytest.fixture
def spilling(monkeypatch, tmp_path):
    monkeypatch.setattr(snapshots, "LEAST_SPILLED", 20)
    monkeypatch.setattr(snapshots, "STILL_S", 0.0)  # nothing reads
    live = {"v": torch.arange(4.0), "w": torch.arange(5.0)}
    return Snapshot(live, live=lambda _: True, spill=tmp_path / "checkpoints"), live


@pytest.mark.parametrize("read", [False, True])
def test_a_large_rest_waits_on_the_disk_and_not_in_memory(spilling, tmp_path, read):
    taken, live = spilling
    first = taken.pieces(0)
    data = [bytes(next(first))] if read else []
    taken.settle()
    for tensor in live.values():
        tensor.fill_(-1.0)
    assert taken._tensors == [None, None]
    assert list((tmp_path / "checkpoints").iterdir()) == [], "in a file without a name"
    data += map(bytes, first)
    assert np.frombuffer(b"".join(data), np.float32).tolist() == [0, 1, 2, 3]
    assert np.frombuffer(b"".join(map(bytes, taken.pieces(1))), np.float32).tolist() == [0, 1, 2, 3, 4]
    taken.close()


def test_a_change_waits_for_a_reader_that_writes_until_the_rest_fits_the_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(snapshots, "LEAST_SPILLED", 16)
    live = {name: torch.arange(4.0) for name in "abcd"}
    taken = Snapshot(live, live=lambda _: True, spill=tmp_path)
    taken.shelf = torch.zeros(20, dtype=torch.uint8)

    def read_another(over, limit):
        assert limit == snapshots.STILL_S
        while not over():
            data.append(b"".join(map(bytes, taken.pieces(len(data)))))
        return over()

    data = []
    monkeypatch.setattr(taken._changed, "wait_for", read_another)
    taken.settle()
    assert len(data) == 3, "of the last two the shelf has room for one"
    live["d"].zero_()
    data.append(b"".join(map(bytes, taken.pieces(3))))
    assert [np.frombuffer(one, np.float32).tolist() for one in data] == [[0, 1, 2, 3]] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_change_waits_no_longer_for_a_reader_that_is_stopped(spilling, monkeypatch):
    taken, live = spilling
    first, waits = taken.pieces(0), []
    next(first)

    def read_a_piece(over, limit):
        waits.append(next(first, None) is not None)
        return over()

    monkeypatch.setattr(taken._changed, "wait_for", read_a_piece)
    taken.settle()
    assert waits == [True, False, False], "until it has read nothing since the last look"
    assert taken._spilled, "the rest waits on the disk"
    live["w"].zero_()
    assert np.frombuffer(b"".join(map(bytes, taken.pieces(1))), np.float32).tolist() == [0, 1, 2, 3, 4]
    taken.close()


def test_a_small_rest_and_one_that_the_disk_does_not_take_are_copied_in_memory(spilling, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    taken, live = spilling
    monkeypatch.setattr(snapshots.tempfile, "TemporaryFile", full)
    taken.settle()
    live["v"].zero_()
    assert read_all(taken)["v"].tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(snapshots, "LEAST_SPILLED", 1000)
    small = Snapshot(live, live=lambda _: True, spill=taken._spill)
    small.settle()
    assert [tensor is None for tensor in small._tensors] == [False, False]


def test_what_fits_is_copied_into_the_memory_that_it_was_given_and_the_rest_waits_on_the_disk(spilling, monkeypatch):
    monkeypatch.setattr(snapshots, "LEAST_SPILLED", 16)
    taken, live = spilling
    taken.shelf = torch.zeros(24, dtype=torch.uint8)
    taken.settle()
    for tensor in live.values():
        tensor.fill_(-1.0)
    assert taken.live_bytes == 16 + 20
    assert taken._tensors[1].data_ptr() == taken.shelf.data_ptr(), "the last tensors first: they are read last"
    assert taken._tensors[0] is None
    state = read_all(taken)
    taken.close()
    assert (state["v"].tolist(), state["w"].tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3, 4])


def test_readers_of_a_closed_snapshot_that_was_spilled_fail(spilling):
    taken, _ = spilling
    taken.settle()
    taken.close()
    with pytest.raises(CheckpointError, match="was dropped"):
        next(taken.pieces(0))


@pytest.mark.parametrize("room", [1, 3, 8, 13, 100])
@pytest.mark.parametrize("kind", ["in place", "copied", "on the shelf", "on the disk"])
def test_the_bytes_of_a_tensor_are_copied_to_rooms_of_any_size(spilling, monkeypatch, kind, room):
    monkeypatch.setattr(snapshots, "ALIGNMENT", 4)  # so that a piece begins behind one
    if kind == "on the shelf":
        monkeypatch.setattr(snapshots, "LEAST_SPILLED", 1000)
    taken, live = spilling
    taken.shelf = torch.empty(36 if kind == "on the shelf" else 0, dtype=torch.uint8)
    taken = Snapshot(live) if kind == "copied" else taken
    if kind != "in place":
        taken.settle()
        for tensor in live.values():
            tensor.fill_(-1.0)
    assert bool(taken._spilled) == (kind == "on the disk")
    found = [bytearray(), bytearray()]
    for index, data in enumerate(found):
        while len(data) < taken.layout[index].nbytes:
            space = bytearray(room)
            count = taken.read_into(index, len(data), memoryview(space))
            assert 0 < count <= room
            data += space[:count]
    assert [np.frombuffer(data, np.float32).tolist() for data in found] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert (taken.moved, taken._tensors) == (taken.total, [None, None]), "what was read is kept no longer"
    taken.close()


def test_a_tensor_without_elements_is_read_at_once_and_a_dropped_one_not_at_all():
    taken, _ = lively(w=torch.empty(0), v=torch.arange(5.0))
    assert taken.read_into(0, 0, memoryview(bytearray(4))) == 0
    assert taken._tensors[0] is None
    taken.close()
    with pytest.raises(CheckpointError, match="was dropped"):
        taken.read_into(1, 0, memoryview(bytearray(4)))


def test_a_tensor_that_was_changed_by_something_else_is_copied_to_no_room():
    taken, live = lively(w=torch.arange(5.0))
    taken.read_into(0, 0, memoryview(bytearray(8)))
    live["w"].mul_(2.0)
    with pytest.raises(CheckpointError, match="outside of the optimizer's step"):
        taken.read_into(0, 8, memoryview(bytearray(12)))


def read_later(taken, order):
    """A thread that reads the tensors of `taken`, one for each release of a semaphore; what it gets, by index."""
    turns, found, errors = threading.Semaphore(0), {}, []

    def run():
        try:
            for index in order:
                turns.acquire()
                found[index] = np.frombuffer(b"".join(map(bytes, taken.pieces(index))), np.float32).tolist()
        except CheckpointError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return turns, found, errors, thread


def step_watched(taken, optimizer, tensors, turns, per_release=1):
    """A step during which the reader gets a turn for each tensor that has to be released."""

    def release(address):
        if taken._changing and address in taken._changing:
            for _ in range(per_release):
                turns.release()
        taken.release(address)

    for one in tensors:
        one.grad = torch.ones_like(one)
    taken.begin_change()
    with ChangeWatch(release):
        optimizer.step()
    taken.end_change()


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_begins_while_the_state_is_read_and_each_tensor_is_read_before_an_operator_changes_it(
    monkeypatch, tmp_path, make, fused
):
    monkeypatch.setattr(snapshots, "LEAST_SPILLED", 0)
    monkeypatch.setattr(snapshots, "STILL_S", 20.0)
    tensors = [torch.nn.Parameter(torch.arange(1.0, 8.0) * (1 + i)) for i in range(5)]
    optimizer = make(tensors, lr=0.5, **({"fused": True} if fused and make is torch.optim.Adam else {"foreach": fused}))
    before = [one.detach().tolist() for one in tensors]
    taken = Snapshot({"w": [one.detach() for one in tensors]}, live=lambda _: True, spill=tmp_path)
    assert taken.can_wait()
    turns, found, errors, thread = read_later(taken, range(5))
    step_watched(taken, optimizer, tensors, turns, per_release=5)
    thread.join()
    assert not errors
    assert [found[i] for i in range(5)] == before
    assert all(one.detach().tolist() != was for one, was in zip(tensors, before, strict=True))


def test_what_a_stopped_reader_has_left_when_an_operator_changes_it_is_copied(monkeypatch, tmp_path):
    monkeypatch.setattr(snapshots, "STILL_S", 0.01)
    monkeypatch.setattr(snapshots, "LEAST_SPILLED", 0)
    tensors = [torch.nn.Parameter(torch.arange(1.0, 8.0) * (1 + i)) for i in range(3)]
    before = [one.detach().tolist() for one in tensors]
    taken = Snapshot({"w": [one.detach() for one in tensors]}, live=lambda _: True, spill=tmp_path)
    turns, found, errors, thread = read_later(taken, range(3))
    step_watched(taken, torch.optim.Adam(tensors), tensors, turns, per_release=0)
    turns.release(3)
    thread.join()
    taken.close()
    assert not errors
    assert [found[i] for i in range(3)] == before


def test_what_fits_the_memory_is_copied_when_an_operator_changes_it_without_waiting(tmp_path):
    tensors = [torch.nn.Parameter(torch.arange(1.0, 8.0) * (1 + i)) for i in range(3)]
    before = [one.detach().tolist() for one in tensors]
    taken = Snapshot({"w": [one.detach() for one in tensors]}, live=lambda _: True, spill=tmp_path)
    taken.shelf = torch.empty(60, dtype=torch.uint8)
    turns, found, errors, thread = read_later(taken, range(3))
    step_watched(taken, torch.optim.SGD(tensors, lr=0.1), tensors, turns, per_release=0)
    turns.release(3)
    thread.join()
    assert not errors
    assert [found[i] for i in range(3)] == before


def test_a_change_by_something_that_is_no_operator_fails_the_reader_however_late_it_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(snapshots, "LEAST_SPILLED", 0)
    tensor = torch.arange(1.0, 8.0)
    taken = Snapshot({"w": [tensor]}, live=lambda _: True, spill=tmp_path)
    turns, found, errors, thread = read_later(taken, range(1))
    taken.begin_change()
    tensor.numpy()[:] = 7.0
    turns.release()
    with taken._changed:
        taken._await_reader(lambda: not taken._live)
    taken.end_change()
    thread.join()
    assert taken.torn
    assert not found
    assert errors == ["the state was changed by something that is no operator of torch's"]


def test_only_optimizers_of_torchs_and_what_is_made_of_them_are_watched():
    class Lively(torch.optim.Adam):
        pass

    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    weight = [torch.nn.Parameter(torch.ones(2))]
    assert changes_by_operators(torch.optim.SGD(weight))
    assert not changes_by_operators(Lively(weight))
    assert not changes_by_operators(Own(weight))
    hooked = torch.optim.SGD(weight)
    hooked.register_step_post_hook(lambda *_: None)
    assert not changes_by_operators(hooked)
