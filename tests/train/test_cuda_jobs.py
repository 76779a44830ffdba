"""Promises of training on CUDA, in whole jobs; skipped where torch finds no device."""

import pytest
import torch

from trueline.batch.evaluate import evaluate
from trueline.checkpoint import checkpoint
from trueline.errors import TrainError
from trueline.train.api import train
from trueline.train.settings import Fault
from worlds.jobs import TINY, seen_counts

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


def test_gradients_over_nccl_are_those_over_gloo(tmp_path):
    host = train(TINY, job_dir=tmp_path / "gloo", workers=1, device="cuda")
    found = train(TINY, job_dir=tmp_path / "nccl", workers=1, device="cuda", backend="nccl")
    assert seen_counts(found.checkpoint) == seen_counts(host.checkpoint)
    for name, value in weights(found.checkpoint).items():
        torch.testing.assert_close(value, weights(host.checkpoint)[name], rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL has one worker for each device, and here are fewer than two"
)
def test_a_job_over_nccl_that_loses_workers_arrives_where_the_cpu_does(tmp_path):
    plain = train(TINY, job_dir=tmp_path / "cpu", workers=1, device="cpu")
    faults = (Fault(step=10, slot=1), Fault(step=20, slot=0, phase="allreduced"), Fault(step=30, slot=1, incarnation=1))
    found = train(TINY, job_dir=tmp_path / "nccl", workers=2, device="cuda", backend="nccl", faults=faults)
    assert found.summary.exactly_once
    assert seen_counts(found.checkpoint) == seen_counts(plain.checkpoint)
    for name, value in weights(found.checkpoint).items():
        torch.testing.assert_close(value, weights(plain.checkpoint)[name], rtol=1e-4, atol=1e-5)


def test_two_workers_on_one_device_are_refused_by_nccl_by_name(tmp_path):
    with pytest.raises(TrainError, match="share cuda:0"):
        train(TINY, job_dir=tmp_path / "job", workers=2, device="cuda:0", backend="nccl")
