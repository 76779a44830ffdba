"""All workers of a job read the same records, or the job is refused with the record or the fingerprint that differs."""

import numpy as np
import pytest
import torch

from trueline.data.loading.seeding import SeededReader
from trueline.data.open import open_training
from trueline.errors import DataError
from trueline.train import records
from trueline.train.job_dir import JobDir


class Numbers(torch.utils.data.Dataset):
    """`change` adds to the numbers of a record; `bad` cannot be read; `drift` makes each read another one."""

    def __init__(self, change=None, bad=(), drift=0.0):
        self.inputs = torch.from_numpy(np.random.default_rng(0).normal(size=(600, 4)))
        self.change, self.bad, self.drift = change or {}, bad, drift

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"record {index} is gone")
        self.inputs += self.drift
        return self.inputs[index] + self.change.get(index, 0.0), index


def measure(dataset, **how):
    source = open_training(dataset)
    return records.measure_records(SeededReader(source, 0), records.choose_records(range(source.num_records)), **how)


def test_a_worker_that_reads_another_record_than_the_first_one_is_refused_with_its_number():
    first = measure(Numbers(), most_s=60)
    assert len(first) == records.MOST
    records.expect_same_records(first, measure(Numbers(), most_s=60))
    changed = int(sorted(first)[7])
    with pytest.raises(DataError, match=f"record {changed} .*is another one than when the job began") as refused:
        records.expect_same_records(first, measure(Numbers({changed: 1e-3}), most_s=60))
    assert "start a new job" in refused.value.hint


def test_numbers_that_two_decoders_round_otherwise_are_the_same_record():
    records.expect_same_records(measure(Numbers(), most_s=60), measure(Numbers(dict.fromkeys(range(600), 1e-09))))


def test_records_of_another_form_are_refused():
    class Wider(Numbers):
        def __getitem__(self, index):
            inputs, label = super().__getitem__(index)
            return (inputs, inputs), label

    with pytest.raises(DataError, match="is another one"):
        records.expect_same_records(measure(Numbers()), measure(Wider()))


def test_records_that_fail_or_change_by_themselves_are_left_to_their_steps():
    """A step blames a damaged record, and the trial of the loss refuses a generator that no seed reaches."""
    first = measure(Numbers(), most_s=60)
    some = int(sorted(first)[3])
    found = measure(Numbers(bad={some}), most_s=60)
    assert str(some) not in found
    assert len(found) >= records.MOST - records.TOGETHER
    records.expect_same_records(first, found)
    assert measure(Numbers(drift=1e-6), most_s=60) == {}


def test_slow_records_are_compared_as_far_as_the_time_lets():
    found = measure(Numbers(), most_s=0.0)
    assert len(found) == 1
    assert found.keys() <= measure(Numbers(), most_s=60).keys()


def test_large_records_are_read_one_by_one(monkeypatch):
    monkeypatch.setattr(records, "MOST_BYTES", 100)
    source, asked = open_training(Numbers()), []
    reader = SeededReader(source, 0)
    read = reader.read
    reader.read = lambda ids, *, epoch: asked.append(len(ids)) or read(ids, epoch=epoch)
    assert len(records.measure_records(reader, np.arange(5))) == 5
    assert asked == [1] * 10


def test_a_file_that_is_replaced_while_a_job_trains_is_refused_until_the_next_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUELINE_JOB", str(tmp_path))
    records.expect_same_files("0123456789abcdef")
    records.expect_same_files("0123456789abcdef")
    with pytest.raises(DataError, match="fingerprint fedcba987654 now, expected 0123456789ab, as when this launch"):
        records.expect_same_files("fedcba9876543210")
    JobDir(tmp_path).begin_launch()
    records.expect_same_files("fedcba9876543210")


def test_outside_of_a_job_there_is_nobody_to_compare_with(tmp_path, monkeypatch):
    monkeypatch.delenv("TRUELINE_JOB", raising=False)
    monkeypatch.chdir(tmp_path)
    records.expect_same_files("0123")
    records.compare_with_first({}, SeededReader(open_training(Numbers()), 0))
    assert list(tmp_path.iterdir()) == []


def test_records_that_no_trial_has_read_are_not_compared() -> None:
    """One of them may kill the process that reads it."""
    read = {3, 17, *range(100, 140)}
    chosen = records.choose_records(read)
    assert sorted(chosen.tolist()) == sorted(read)
    assert len(records.choose_records(range(10_000))) == records.MOST
    assert len(records.choose_records(())) == 0
    first = records.measure_records(SeededReader(open_training(Numbers()), 0), chosen, 60)
    deadly = set(range(600)) - read
    records.compare_with_first(first, SeededReader(open_training(Numbers(bad=deadly)), 0), most_s=60)
