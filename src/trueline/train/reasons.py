"""Reasons of records that were set aside: equal ones are one line, with a count. Pure."""

import re
from collections.abc import Sequence
from typing import Any

LEFT_OUT_EXIT = 3
"""Exit code of a job that has finished without some records."""
_WHO, _NUMBER = re.compile(r"^worker-[^:]*: "), re.compile(r"\d+")


def find_reason(why: str) -> str:
    """What reasons have in common that differ in workers and numbers.

    >>> find_reason("worker-0.0 and worker-2.1: DataError: column 'x' has 2 records without a value")
    "DataError: column 'x' has # records without a value"
    """
    return _NUMBER.sub("#", _WHO.sub("", why.partition("; worker-")[0]))


def group_by_reason(aside: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Records set aside (as `State.list_set_aside` has them), by equal reasons."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in aside:
        groups.setdefault(find_reason(one["why"]), []).append(one)
    return list(groups.values())


def describe_group(group: Sequence[dict[str, Any]]) -> str:
    """Records set aside for equal reasons, in one line.

    >>> why = "worker-0.0: OSError: torn"
    >>> describe_group([{"record": n, "where": f"record {n} of b.parquet#1", "why": why} for n in (7, 9)])
    '2 records, the first is record 7 (record 7 of b.parquet#1): worker-0.0: OSError: torn'
    """
    first = group[0]
    where = f" ({first['where']})" if first.get("where") else ""
    many = f"{len(group)} records, the first is " if len(group) > 1 else ""
    return f"{many}record {first['record']}{where}: {first['why']}"
