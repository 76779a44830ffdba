"""`tiny` with one record that cannot be trained: POISON says where it fails (read, decode, forward, loss,
nan, gradient, crash; the last one not before the file CRASHES_AFTER is there).

With POISON=spin no record is bad, but worker-1.0 computes for ever from its second epoch on; with POISON=frail every
worker of slot 2 ends at its third step after the first of the job.
"""

import importlib.util
import os
import signal
from pathlib import Path

import torch

_tiny = importlib.util.spec_from_file_location("tiny", Path(__file__).parent / "tiny.py")
tiny = importlib.util.module_from_spec(_tiny)
_tiny.loader.exec_module(tiny)

name = "poisoned"
epochs = 3
global_batch = tiny.global_batch
BAD = 17
HOW = os.environ.get("POISON", "")


class Poisoned(tiny.Generated):
    def __getitem__(self, index):
        if index == BAD and HOW == "read":
            raise ValueError("the image is torn")
        if index == BAD and HOW == "decode":
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


class Careless(tiny.Counting):
    def has_trained(self):
        """Trials of model and loss are before the first step; they give counts of zero other values, no whole ones."""
        return self.seen.max() > 0 and bool((self.seen - self.seen.round()).abs().max() < 1e-4)

    def forward(self, inputs, ids):
        if HOW == "forward" and (ids == BAD).any():
            raise ValueError("a label of -1")
        if HOW == "crash" and self.training and (ids == BAD).any():
            if self.has_trained():
                tiny.wait_for_file(os.environ["CRASHES_AFTER"], 10.0)
            os.kill(os.getpid(), signal.SIGSEGV)
        if HOW == "frail" and os.environ.get("TRUELINE_REF", "").startswith("worker-2") and self.has_trained():
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 3:
                os._exit(3)
        spins = HOW == "spin" and os.environ.get("TRUELINE_REF") == "worker-1.0"
        while spins and self.seen.max() > 1.5 and self.has_trained():
            continue
        logits, seen = super().forward(inputs, ids)
        if HOW in ("nan", "loss"):
            logits = torch.where((ids == BAD)[:, None], torch.nan, logits)
        if HOW == "gradient":  # finite numbers, whose slope is not
            at = (ids == BAD).nonzero()[:, 0]
            logits = logits.index_add(0, at, (logits[at] * 0.0).sqrt())
        return logits, seen


def model():
    return Careless()


def dataset(mode):
    return Poisoned()


def loss(outputs, labels):
    if HOW == "loss" and outputs[0].isnan().any():  # after the whole forward
        raise ValueError("a label of 7")
    return tiny.loss(outputs, labels)


optimizer = tiny.optimizer
