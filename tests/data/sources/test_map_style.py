from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from conformance.source import COUNT, SourceConformance
from trueline.data.open import as_source
from trueline.data.source import Source
from trueline.data.sources.map_style import DatasetSource
from trueline.errors import DataError, RecipeError


def tensors(count: int = COUNT) -> TensorDataset:
    numbers = torch.arange(count)
    return TensorDataset(torch.stack([numbers, 2 * numbers], dim=1).float(), numbers)


class Items(Dataset[Any]):
    """Whatever `make` gives for an index."""

    def __init__(self, make: Any, count: int = 10) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class ManyAtOnce(Items):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


class TestTensorDataset(SourceConformance):
    @pytest.fixture
    def source(self) -> Source:
        return DatasetSource(tensors(), mode="training")


class TestSubsetWhichReadsManyAtOnce(SourceConformance):
    @pytest.fixture
    def source(self) -> Source:
        return DatasetSource(Subset(tensors(), range(COUNT)), mode="training")


class TestListOfPairs(SourceConformance):
    @pytest.fixture
    def source(self) -> Source:
        pairs = [(torch.tensor([i, 2.0 * i]), i) for i in range(COUNT)]
        return as_source(pairs, mode="training", feed=None, recipe="r")


@pytest.mark.parametrize("kind", [Items, ManyAtOnce])
def test_a_record_that_fails_is_named(kind: type[Items]) -> None:
    def make(index: int) -> Any:
        if index == 7:
            raise OSError("no such scan")
        return torch.tensor(index), index

    source = DatasetSource(kind(make), mode="training")
    with pytest.raises(DataError, match=r"record 7 of dataset .* OSError: no such scan"):
        source.read(np.array([1, 7, 2]))


def test_items_that_are_no_pairs_are_refused_except_for_prediction() -> None:
    alone = Items(lambda index: torch.tensor([float(index)]))
    with pytest.raises(DataError, match=r"expected \(inputs, label\)"):
        DatasetSource(alone, mode="evaluation").read(np.array([0]))
    batch = DatasetSource(alone, mode="prediction").read(np.array([4, 5]))
    assert batch.inputs.tolist() == [[4.0], [5.0]]
    assert batch.labels is None
    single = DatasetSource(TensorDataset(torch.ones(3, 2)), mode="prediction").read(np.array([0, 2]))
    assert single.inputs.shape == (2, 2)


def test_inputs_may_be_a_dict_or_a_tuple_of_tensors() -> None:
    source = DatasetSource(Items(lambda i: ({"a": torch.tensor(i), "b": torch.ones(2)}, i)), mode="training")
    batch = source.read(np.array([3, 1]))
    assert batch.inputs["a"].tolist() == [3, 1]
    assert batch.inputs["b"].shape == (2, 2)


def test_records_of_unequal_shape_are_refused_with_the_way_out() -> None:
    source = DatasetSource(Items(lambda i: (torch.ones(i), i)), mode="training")
    with pytest.raises(DataError, match="do not make a batch") as caught:
        source.read(np.array([1, 2]))
    assert "pad or crop" in caught.value.hint


def test_the_fingerprint_changes_with_the_records_and_not_with_random_augmentation() -> None:
    same, other = DatasetSource(tensors(), mode="training"), DatasetSource(tensors(99), mode="training")
    assert same.fingerprint() == DatasetSource(tensors(), mode="training").fingerprint() != other.fingerprint()
    changed = Items(lambda i: (torch.tensor([i + 0.5]), i))
    plain = Items(lambda i: (torch.tensor([float(i)]), i))
    assert DatasetSource(changed, mode="training").fingerprint() != DatasetSource(plain, mode="training").fingerprint()

    def shaken(index: int) -> Any:
        return torch.randn(2) + random.random() + np.random.rand(), index

    augmented = DatasetSource(Items(shaken), mode="training")
    state = torch.get_rng_state()
    assert augmented.fingerprint() == augmented.fingerprint()
    assert torch.equal(torch.get_rng_state(), state)
    own = np.random.default_rng()
    restless = DatasetSource(Items(lambda i: (own.random(3), i)), mode="training")
    assert restless.fingerprint() == restless.fingerprint()


def test_a_record_that_fails_for_a_moment_changes_no_fingerprint_and_one_that_always_fails_ends_no_job() -> None:
    """Every worker makes it, also one that joins: a step finds a damaged record, and sets it aside."""
    failures = [OSError(5, "failed"), OSError(5, "failed")]

    def flaky(index: int) -> Any:
        if failures and index == 0:
            raise failures.pop()
        return torch.tensor([float(index)]), index

    source = DatasetSource(Items(flaky), mode="training")
    found = source.fingerprint()
    assert failures == []
    assert found == source.fingerprint()

    def torn(index: int) -> Any:
        if index == 0:
            raise OSError(5, "failed")
        return flaky(index)

    damaged = DatasetSource(Items(torn), mode="training")
    assert damaged.fingerprint() == damaged.fingerprint() != found


def test_a_dataset_without_records_or_length_is_refused() -> None:
    with pytest.raises(DataError, match="has no records"):
        DatasetSource([], mode="training")

    class Endless(Dataset[int]):
        def __len__(self) -> int:
            raise NotImplementedError("endless")

    with pytest.raises(DataError, match="does not know its length"):
        DatasetSource(Endless(), mode="training")  # type: ignore[arg-type]  # has no __getitem__, on purpose


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "returned NoneType; expected a map-style Dataset"),
        (Stream(), "can be iterated but not indexed"),
        ((tensors(), tensors()), "returned tuple"),
        ({"train": tensors()}, "returned dict"),
    ],
)
def test_what_is_no_source_is_a_recipe_error_that_says_what_was_found(found: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        as_source(found, mode="training", feed=None, recipe="digits")


def test_a_source_is_taken_as_it_is() -> None:
    source = DatasetSource(tensors(), mode="training")
    assert as_source(source, mode="training", feed=None, recipe="r") is source


def pad(items):
    inputs, labels = zip(*items, strict=True)
    return torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.tensor(labels)


class Unequal(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.arange(index + 1), index


def test_a_collate_fn_of_the_dataset_or_of_a_dataloader_makes_the_batches():
    batch = as_source(
        torch.utils.data.DataLoader(Unequal(), collate_fn=pad), mode="training", feed=None, recipe="r"
    ).read(np.array([2, 0]))
    assert batch.inputs.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.labels.tolist() == [2, 0]
    dataset = Unequal()
    dataset.collate_fn = pad
    assert (
        as_source(dataset, mode="training", feed=None, recipe="r").read(np.array([2, 0])).inputs.tolist()
        == batch.inputs.tolist()
    )
    dataset.collate_fn = lambda items: pad(items)[0]
    with pytest.raises(DataError, match=r"collate_fn made a Tensor .* expected \(inputs, labels\)"):
        as_source(dataset, mode="training", feed=None, recipe="r").read(np.array([2, 0]))


def test_a_dataloader_without_a_collate_fn_of_its_own_reads_as_its_dataset():
    dataset = torch.utils.data.TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
    found, plain = (
        as_source(one, mode="training", feed=None, recipe="r")
        for one in (torch.utils.data.DataLoader(dataset), dataset)
    )
    assert torch.equal(found.read(np.array([3, 1])).inputs, plain.read(np.array([3, 1])).inputs)
    assert found.fingerprint() == plain.fingerprint()


def test_a_stream_is_refused_with_the_way_out_though_it_tells_a_length():
    class Counted(torch.utils.data.IterableDataset):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(range(3))

    for stream in (Counted(), torch.utils.data.DataLoader(Counted())):
        with pytest.raises(RecipeError, match="can be iterated but not indexed") as caught:
            as_source(stream, mode="training", feed=None, recipe="r")
        assert "write a stream to a file of records once" in caught.value.hint


def test_tensors_of_types_that_numpy_does_not_have_count_in_the_fingerprint_as_others_do():
    inputs = torch.arange(8).bfloat16()
    one, same = (TensorDataset(value, torch.ones(8)) for value in (inputs, inputs.clone()))
    other = TensorDataset(inputs + 1, torch.ones(8))
    found = [DatasetSource(data, mode="training").fingerprint() for data in (one, same, other)]
    assert found[0] == found[1] != found[2]
