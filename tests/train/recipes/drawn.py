"""240 records drawn from files in DRAWN_FILES as DRAWN says: mixed, weighted, bucketed. One of them cannot be trained.

DRAWN_HOW says where it fails: in `feed`, or by killing the process in the forward. The model counts the steps that each
record was in, as `tiny` does.
"""

import importlib.util
import os
import signal
from pathlib import Path

import numpy as np

from trueline.data.loading.tensors import tensor
from trueline.data.sources.mixture import bucket_by_length, mix, sample_by_weight

_tiny = importlib.util.spec_from_file_location("tiny", Path(__file__).parent / "tiny.py")
tiny = importlib.util.module_from_spec(_tiny)
_tiny.loader.exec_module(tiny)

name = "drawn"
epochs = 3
global_batch = tiny.global_batch
shuffle = "none"
FIRST, RECORDS = 100, tiny.RECORDS
BAD = 112
"""The thirteenth record of b.parquet."""


class Careless(tiny.Counting):
    def forward(self, inputs, ids):
        if os.environ["DRAWN_HOW"] == "crash" and self.training and (ids == BAD).any():
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(inputs, ids)


def model():
    return Careless()


def weights():
    """The bad record is drawn some dozen times an epoch, and so several times in one step."""
    found = np.random.default_rng(0).random(RECORDS) + 0.5
    found[BAD] = 12.0
    return found


def lengths():
    return np.random.default_rng(1).integers(1, 50, RECORDS)


def dataset(mode):
    folder = Path(os.environ["DRAWN_FILES"])
    first, second = folder / "a.parquet", folder / "b.parquet"
    kind = os.environ["DRAWN"]
    if kind == "mixed":
        return mix([first, second], [1, 3], seed=1)
    if kind == "weighted":
        return sample_by_weight([first, second], weights(), seed=1)
    return bucket_by_length([first, second], lengths(), batch=global_batch, seed=1, pool_batches=4)


def feed(records, mode):
    ids = tensor(records["id"])
    if os.environ["DRAWN_HOW"] == "feed" and (ids == BAD).any():
        raise ValueError("the text is torn")
    return (tensor(records["x"]), ids), tensor(records["label"])


loss, optimizer = tiny.loss, tiny.optimizer
