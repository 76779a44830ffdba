"""The records of a job's step, by the arithmetic of its order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trueline.data.order.permutation import locate, record_at


def step_records(step: int, *, seed: int, num_records: int, global_batch: int) -> npt.NDArray[np.int64]:
    epoch, start, stop = locate(step, num_records=num_records, global_batch=global_batch)
    return record_at(np.arange(start, stop), seed=seed, epoch=epoch, num_records=num_records)
