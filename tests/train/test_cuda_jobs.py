"""Promises of training on CUDA, in whole jobs; skipped where torch finds no device."""

import pytest
import torch
from job_worlds import TINY, seen_counts

from trueline.state import checkpoint
from trueline.train.api import train
from trueline.train.evaluate import evaluate
from trueline.train.settings import Fault

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


def weights(where):
    return {name: value for name, value in checkpoint.read(where).state["model"].items() if name != "seen"}


def test_a_job_on_cuda_that_loses_a_worker_arrives_where_the_cpu_does(tmp_path):
    plain = train(TINY, job_dir=tmp_path / "cpu", workers=1, device="cpu")
    found = train(TINY, job_dir=tmp_path / "cuda", workers=3, device="cuda", faults=(Fault(step=10, slot=1),))
    assert seen_counts(found.checkpoint) == seen_counts(plain.checkpoint)
    for name, value in weights(found.checkpoint).items():
        torch.testing.assert_close(value, weights(plain.checkpoint)[name], rtol=1e-4, atol=1e-5)
    assert all(value.device.type == "cpu" for value in weights(found.checkpoint).values())
    on_cuda = evaluate(TINY, found.checkpoint, device="cuda")
    assert on_cuda.loss == pytest.approx(evaluate(TINY, found.checkpoint, device="cpu").loss, rel=1e-4)


def test_bit_for_bit_holds_on_cuda_for_any_number_of_workers(tmp_path):
    one = train(TINY, job_dir=tmp_path / "one", workers=1, device="cuda", bitwise=True)
    three = train(TINY, job_dir=tmp_path / "three", workers=3, device="cuda", bitwise=True)
    assert all(torch.equal(value, weights(three.checkpoint)[name]) for name, value in weights(one.checkpoint).items())
