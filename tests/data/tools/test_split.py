"""A split is the same for the same seed, has the sizes that were wanted, and loses and doubles no record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from trueline.data.tools.split import SplitRule, parse_parts, split
from trueline.errors import DataError, UsageError

PARTS = {"train": 0.7, "valid": 0.1, "test": 0.2}


def write(folder: Path, count: int = 1000, group: int = 100, name: str = "all.parquet") -> Path:
    random = np.random.default_rng(3)
    table = pa.table({
        "id": range(count),
        "patient": [f"p{at}" for at in random.integers(0, 200, count)],
        "label": [["ill", "well", None][at] for at in random.choice(3, count, p=[0.1, 0.85, 0.05])],
    })  # fmt: skip
    pq.write_table(table, folder / name, row_group_size=group)
    return folder / name


def parts_of(folder: Path) -> dict[str, pa.Table]:
    return {name: pq.read_table(folder / f"{name}.parquet") for name in PARTS}


def test_each_record_is_in_one_part_and_the_sizes_are_exact(tmp_path: Path) -> None:
    counts = split(str(write(tmp_path)), tmp_path / "out", SplitRule(parts=PARTS))
    assert counts == {"train": 700, "valid": 100, "test": 200}
    ids = [one for table in parts_of(tmp_path / "out").values() for one in table["id"].to_pylist()]
    assert sorted(ids) == list(range(1000))
    assert parts_of(tmp_path / "out")["test"]["id"].to_pylist()[-1] > 900  # drawn from everywhere, in order


def test_the_seed_and_not_the_row_groups_decide(tmp_path: Path) -> None:
    for name, group, seed in (("a", 100, 0), ("b", 37, 0), ("c", 100, 1)):
        source = write(tmp_path, group=group, name=f"{name}.parquet")
        split(str(source), tmp_path / f"{name}.out", SplitRule(parts=PARTS, stratify="label", seed=seed))
    first, second, third = (parts_of(tmp_path / f"{name}.out")["test"]["id"].to_pylist() for name in "abc")
    assert first == second
    assert first != third


def test_a_stratified_split_shares_out_every_class(tmp_path: Path) -> None:
    source = write(tmp_path)
    split(str(source), tmp_path / "out", SplitRule(parts=PARTS, stratify="label"))
    whole = pq.read_table(source)["label"].to_pylist()
    for name, fraction in PARTS.items():
        labels = parts_of(tmp_path / "out")[name]["label"].to_pylist()
        for value in ("ill", "well", None):
            assert abs(labels.count(value) - fraction * whole.count(value)) < 1


def test_records_of_one_value_stay_together_also_when_the_data_grow(tmp_path: Path) -> None:
    homes: list[dict[str, str]] = []
    for count in (1000, 3000):
        split(str(write(tmp_path, count)), tmp_path / str(count), SplitRule(parts=PARTS, by="patient"))
        found = parts_of(tmp_path / str(count))
        pairs = {(one, name) for name, table in found.items() for one in table["patient"].to_pylist()}
        homes.append(dict(pairs))
        assert len(homes[-1]) == len(pairs)
    assert all(homes[1][patient] == home for patient, home in homes[0].items())


def test_csv_stays_csv_with_its_missing_cells(tmp_path: Path) -> None:
    text = "age,city\n" + "".join(f"{at if at % 3 else ''},{'Rome' if at % 4 else ''}\n" for at in range(40))
    (tmp_path / "all.csv").write_text(text)
    split(str(tmp_path / "all.csv"), tmp_path, SplitRule(parts={"a": 0.5, "b": 0.5}))
    read = [pyarrow.csv.read_csv(tmp_path / f"{name}.csv") for name in "ab"]
    assert [len(table) for table in read] == [20, 20]
    assert sum(table["age"].null_count for table in read) == 14


def test_nothing_is_written_where_a_part_would_be_empty_or_exists(tmp_path: Path) -> None:
    source = str(write(tmp_path, 3))
    with pytest.raises(DataError, match="part 'valid' would have none of the 3 records"):
        split(source, tmp_path / "out", SplitRule(parts=PARTS))
    assert not list((tmp_path / "out").glob("*.parquet"))
    rule = SplitRule(parts={"all2": 0.5, "rest": 0.5})
    split(source, tmp_path, rule)
    with pytest.raises(UsageError, match=r"all2\.parquet exists already"):
        split(source, tmp_path, rule)
    assert split(source, tmp_path, rule, overwrite=True)


@pytest.mark.parametrize("text", ["train", "train=0.8", "train=2,test=-1", "=1", "a b=0.5,c=0.5", "train=x,test=0.2"])
def test_parts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_parts(text)


def test_a_column_that_is_not_there_gets_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'labl'") as caught:
        split(str(write(tmp_path)), tmp_path / "out", SplitRule(parts=PARTS, stratify="labl"))
    assert caught.value.hint == "did you mean 'label'?"
