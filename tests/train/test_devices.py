"""Promises of devices: where workers compute, and that nothing they say to each other depends on it."""

import numpy as np
import pytest
import torch

from trueline.batch.evaluate import evaluate
from trueline.data.loading.seeding import SeededReader
from trueline.data.open import as_source
from trueline.data.source import Batch
from trueline.errors import TrainError, UsageError
from trueline.train import devices
from trueline.train.api import prepare
from trueline.train.elastic import Elastic
from trueline.train.settings import JobSettings, apply_overrides, device_kind, load
from worlds import TESTS

META = torch.device("meta")
JOB = JobSettings(name="x", recipe="r.py", recipe_digest="", workers=2, epochs=1, global_batch=8, seed=0)


@pytest.fixture
def two_devices(monkeypatch) -> list[int]:
    """A machine that says it has two CUDA devices; which of them were made the current one."""
    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    return used


@pytest.mark.parametrize("wanted", ["tpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", ""])
def test_a_name_that_is_no_device_is_refused_before_a_job_begins(wanted):
    with pytest.raises(UsageError, match=rf"device is '{wanted}'") as raised:
        apply_overrides(JOB, {"device": wanted}, cores=2)
    assert "cuda:N" in raised.value.hint
    with pytest.raises(UsageError):
        device_kind(wanted)


@pytest.mark.parametrize("wanted", ["mpi", "glo", "a:", ":b", "a b:c"])
def test_a_backend_that_is_none_or_cannot_lose_a_worker_is_refused_by_name_before_a_job_begins(wanted):
    with pytest.raises(UsageError, match=rf"backend is '{wanted}'") as raised:
        apply_overrides(JOB, {"backend": wanted}, cores=2)
    assert "gloo" in raised.value.hint
    for known in ("gloo", "nccl", "ours.planes:connect"):
        assert apply_overrides(JOB, {"backend": known}, cores=2).backend == known


@pytest.mark.parametrize("wanted", ["mpi", "glo"])
def test_a_backend_that_a_recipe_asks_for_is_refused_as_that_of_the_command_is_which_wins(tmp_path, wanted):
    shown = (TESTS / "train" / "recipes" / "counting.py").read_text()
    recipe = tmp_path / "asks.py"
    recipe.write_text(f'{shown}\nbackend = "{wanted}"\n')
    with pytest.raises(UsageError, match=rf"backend is '{wanted}'") as raised:
        prepare(recipe, workers=2, job_dir=tmp_path / "refused")
    assert "--backend" in raised.value.hint
    assert not (tmp_path / "refused").exists()
    assert load(prepare(recipe, workers=2, job_dir=tmp_path / "told", backend="gloo")).backend == "gloo"


@pytest.mark.parametrize("said", ['"cuda:1"', 'torch.device("cuda", 1)'])
def test_a_device_that_a_recipe_asks_for_is_where_it_trains_and_that_of_the_command_wins(tmp_path, said):
    shown = (TESTS / "train" / "recipes" / "counting.py").read_text()
    recipe = tmp_path / "asks.py"
    recipe.write_text(f"{shown}\ndevice = {said}\n")
    assert load(prepare(recipe, workers=2, job_dir=tmp_path / "asked")).device == "cuda:1"
    assert load(prepare(recipe, workers=2, job_dir=tmp_path / "told", device="cpu")).device == "cpu"


def test_a_device_of_a_recipe_that_is_none_is_refused_before_a_job_begins(tmp_path):
    shown = (TESTS / "train" / "recipes" / "counting.py").read_text()
    recipe = tmp_path / "asks.py"
    recipe.write_text(f'{shown}\ndevice = torch.device("mps")\n')
    with pytest.raises(UsageError, match="device is 'mps'") as raised:
        prepare(recipe, workers=2, job_dir=tmp_path / "refused")
    assert "`_device`" in raised.value.hint
    assert not (tmp_path / "refused").exists()


def test_a_recipe_is_evaluated_and_predicts_on_the_device_that_it_asks_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = (TESTS / "train" / "recipes" / "counting.py").read_text()
    recipe = tmp_path / "asks.py"
    recipe.write_text(f'{shown}\ndevice = "cuda"\n')
    with pytest.raises(UsageError, match=r"'cuda'.*finds no CUDA device"):
        evaluate(recipe, None)
    assert evaluate(recipe, None, device="cpu").records == 1440


def test_workers_share_out_the_devices_of_a_machine_by_their_slots(two_devices, monkeypatch):
    assert [devices.choose("auto", slot).index for slot in range(4)] == [0, 1, 0, 1]
    assert devices.choose("cuda:1", 0) == torch.device("cuda", 1)
    assert devices.choose("cpu", 1) == torch.device("cpu")
    assert two_devices == [0, 1, 0, 1, 1]
    monkeypatch.setenv("TRUELINE_REF", "worker-3.7")
    assert devices.choose_own("auto").index == 1


def test_a_device_that_a_machine_does_not_have_is_named_with_what_it_has(two_devices, monkeypatch):
    with pytest.raises(UsageError, match=r"'cuda:2'.*finds 2 CUDA devices"):
        devices.choose("cuda:2", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"'cuda'.*finds no CUDA device"):
        devices.choose("cuda", 0)
    assert devices.choose("auto", 0) == torch.device("cpu")


def test_bit_for_bit_asks_a_device_for_algorithms_that_repeat(two_devices, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, warn_only: asked.append((mode, warn_only)))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    devices.choose_own("cpu", repeatable=True)
    assert asked == []
    devices.choose_own("cuda", repeatable=True)
    assert asked == [(True, True)]


def test_batches_are_placed_whatever_they_are_nested_in():
    one = torch.ones(2)
    found = devices.place({"a": (one, [one, None]), "b": "text", "n": 3}, META)
    assert [found["a"][0].device, found["a"][1][0].device] == [META, META]
    assert (found["a"][1][1], found["b"], found["n"]) == (None, "text", 3)
    pair = torch.nn.utils.rnn.PackedSequence(one, torch.ones(2, dtype=torch.int64))
    assert devices.place(pair, META).data.device == META
    batch = Batch(one, one)
    assert devices.place_batch(batch, torch.device("cpu")) is batch
    assert devices.place_batch(batch, META).labels.device == META


def test_the_way_to_cuda_leads_through_pinned_memory_and_waits_for_nothing(monkeypatch):
    went = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: went.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: went.append((str(device), how)) or self)
    devices.place({"a": torch.ones(2)}, torch.device("cuda", 1))
    assert went == ["pinned", ("cuda:1", {"non_blocking": True})]


@pytest.mark.parametrize("draws", [False, True])
def test_a_reader_places_what_it_reads_also_record_by_record(draws):
    class Records(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(3) if draws else torch.full((3,), float(index)), index

    source = as_source(Records(), mode="training", feed=None, recipe="job")
    reader = SeededReader(source, 0, lambda batch: devices.place_batch(batch, META))
    found = reader.read(np.array([3, 1]), epoch=0)
    assert reader.drawing is draws
    assert (found.inputs.device, found.inputs.shape) == (META, (2, 3))


def loop_that_raises(error: Exception) -> None:
    model = torch.nn.Linear(2, 1)
    records = [(torch.ones(2), torch.ones(1))] * 8
    job = Elastic(model, torch.optim.SGD(model.parameters(), 0.1), records, global_batch=4)
    for batch in job:
        try:
            raise error
        except RuntimeError as met:
            job.blame(met, batch.records)


def test_a_device_that_is_lost_ends_its_worker_and_blames_no_record():
    with pytest.raises(torch.AcceleratorError):
        loop_that_raises(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))


def test_records_that_do_not_fit_a_devices_memory_together_are_no_poison():
    with pytest.raises(TrainError, match="3 records take at once") as raised:
        loop_that_raises(torch.OutOfMemoryError("CUDA out of memory"))
    assert "micro_batch" in raised.value.hint
