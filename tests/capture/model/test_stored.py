"""Large answers of the eager model are in a file while a proof runs."""

import errno
import tempfile

import ml_dtypes
import numpy as np
import torch

from trueline.capture.model import stored
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.stored import StoredArrays, StoredParts, store
from trueline.capture.proof.observe import observe_one
from trueline.capture.proof.probes import Probe
from trueline.runtime.compare import compare

ARRAYS = {
    "floats": np.arange(24, dtype=np.float32).reshape(4, 6).T,
    "half": np.ones((2, 1), ml_dtypes.bfloat16),
    "flags": np.array([True, False]),
    "none": np.empty((0, 3), np.int64),
    "one": np.float64(2.5).reshape(()),
}


def test_arrays_of_all_kinds_come_back_as_they_were_in_any_order():
    found = StoredArrays(ARRAYS)
    assert list(found) == list(ARRAYS)
    for name in reversed(ARRAYS):
        assert (found[name].dtype, found[name].shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
        assert found[name].tobytes() == ARRAYS[name].tobytes()


def test_a_large_answer_of_the_model_is_not_kept_in_memory_and_a_small_one_is():
    for width, kind in ((3, dict), (stored.LEAST_BYTES // 8, StoredArrays)):
        model = torch.nn.Linear(2, width)
        example = torch.ones(2, 2)
        eager = EagerSession(model, example)
        probe = Probe(name="a", origin="given", num_records=2, inputs={eager.signature.inputs[0].name: example.numpy()})
        (output,) = eager.run(probe.inputs).values()
        seen = observe_one(eager, probe)
        assert type(seen.outputs) is kind
        assert [one.tobytes() for one in seen.outputs.values()] == [output.tobytes()]


def test_where_the_disk_has_no_room_answers_stay_in_memory(monkeypatch):
    monkeypatch.setattr(stored, "LEAST_BYTES", 0)
    assert isinstance(store(dict(ARRAYS)), StoredArrays)

    def refuse(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    kept = store(ARRAYS)
    assert [one.tobytes() for one in kept.values()] == [one.tobytes() for one in ARRAYS.values()]
    assert not any(np.shares_memory(one, ARRAYS[name]) for name, one in kept.items())


def test_a_small_answer_is_kept_as_it_was_when_the_model_writes_into_what_it_returned():
    kept = torch.zeros(2, 2)

    class Writing(torch.nn.Module):
        def forward(self, x):
            return kept.copy_(x)

    eager = EagerSession(Writing(), torch.ones(2, 2))
    probe = Probe(name="a", origin="given", num_records=2, inputs={"x": np.full((2, 2), 3, np.float32)})
    seen = observe_one(eager, probe)
    kept.fill_(7)
    assert [one.tolist() for one in seen.outputs.values()] == [[[3, 3], [3, 3]]]


def test_a_stored_answer_is_compared_without_all_of_it_in_memory(monkeypatch):
    monkeypatch.setattr("trueline.runtime.compare.PIECE", 100)
    want = {"a": np.arange(2400, dtype=np.float32).reshape(4, 20, 30), "none": ARRAYS["none"], "one": ARRAYS["one"]}
    sizes = []
    read = StoredParts.__getitem__

    def note(self, part):
        found = read(self, part)
        sizes.append(found.size)
        return found

    monkeypatch.setattr(StoredParts, "__getitem__", note)
    for wrong in (0.0, 1.0):
        got = {name: one.copy() for name, one in want.items()}
        got["a"][3, 7, 11] += wrong
        assert compare(StoredArrays(want).by_parts(), got) == compare(want, got)
    assert max(sizes) <= 100
