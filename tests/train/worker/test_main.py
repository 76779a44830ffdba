"""What a worker reports where the records that it tries first are at fault."""

import pytest

from trueline.errors import DataError, MissingValues
from trueline.train.worker import main


class Unreadable:
    """A trial whose records cannot be read, and their source, which counts why."""

    def __init__(self, *, counts: bool) -> None:
        self.counts = counts

    def find_traits(self) -> None:
        raise DataError("feed fails on 5 records")

    def check_missing(self) -> None:
        if self.counts:
            raise MissingValues("column 'a' has no value in 3 of 60 records")


@pytest.mark.parametrize(("counts", "words"), [(True, "in 3 of 60 records"), (False, "feed fails on 5 records")])
def test_where_the_first_records_cannot_be_read_the_error_counts_what_is_missing_in_all(counts, words):
    found = Unreadable(counts=counts)
    with pytest.raises(DataError, match=words):
        main._find_traits(found, found)
