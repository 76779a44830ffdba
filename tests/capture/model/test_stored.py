"""Large answers of the eager model are in a file while a proof runs."""

import errno
import tempfile

import ml_dtypes
import numpy as np
import torch

from trueline.capture.model import stored
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.stored import StoredArrays, store
from trueline.capture.proof.observe import observe_one
from trueline.capture.proof.probes import Probe

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
    assert store(ARRAYS) is ARRAYS
