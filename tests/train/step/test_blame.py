"""Promises about records that are blamed: not for what is the matter with a column."""

import numpy as np
import pytest

from trueline.errors import MissingValues, UnequalLengths
from trueline.train.step.blame import Trials


@pytest.mark.parametrize("kind", [MissingValues, UnequalLengths])
def test_no_record_is_tried_or_set_aside_for_what_is_the_matter_with_a_column(kind):
    """Nothing that could read or compute records is there."""
    error = kind("column 'x' has lists of several lengths, from 1 to 2")
    with pytest.raises(kind) as caught:
        Trials(*[None] * 5).accuse(error, 3, np.array([1, 2]))
    assert caught.value is error
