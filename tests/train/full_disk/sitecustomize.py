"""A process with this on its path cannot put a checkpoint in its place: FULL_TIMES times, else always."""

import errno
import os

_rename = os.rename
_left = [int(os.environ.get("FULL_TIMES", "1000000"))]
_why = getattr(errno, os.environ.get("FULL_ERROR", "ENOSPC"))


def rename(source, target, **options):
    if "checkpoints" in str(target) and _left[0]:
        _left[0] -= 1
        raise OSError(_why, os.strerror(_why), str(target))
    _rename(source, target, **options)


os.rename = rename
