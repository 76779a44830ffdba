"""Whether a folder that was written by range is whole, for who reads it: `write.py` says what lies in such a folder.

A folder without a plan is taken as it is: nobody has said what belongs in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from trueline.errors import DataError

COMMIT, PLAN = "_commit.json", "_plan.json"


def check_complete(where: str, names: Collection[str], read: Callable[[str], bytes]) -> None:
    """Raises DataError when the folder `where`, which holds `names`, lacks a part of what it was to hold.

    `read` gives the content of one of them.
    """
    if PLAN not in names:
        return
    endings = sorted({name[name.rindex(".") :] for name in names if name.startswith("part-") and "." in name})
    there = f"name the parts that are there: {where}/part-*{endings[0]}" if endings else "name another folder"
    if COMMIT not in names:
        raise DataError(
            f"{where} is not whole: who wrote it has not finished it (it has {PLAN} and no {COMMIT})",
            hint=f"run again what wrote it, or {there}",
        )
    try:
        parts = [str(part["name"]) for part in json.loads(read(COMMIT))["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}/{COMMIT} is torn: {type(error).__name__}: {error}") from error
    lost = [name for name in parts if name not in names]
    if lost:
        raise DataError(
            f"{where} is not whole: {len(lost)} of the {len(parts)} parts that {COMMIT} lists are not there, "
            f"first {lost[0]}",
            hint=f"write it again to a new folder, or {there}",
        )
