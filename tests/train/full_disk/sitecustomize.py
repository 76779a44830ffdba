"""A process with this on its path meets a full disk whenever it would put a checkpoint in its place."""

import errno
import os

_rename = os.rename


def rename(source, target, **options):
    if "checkpoints" in str(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
    _rename(source, target, **options)


os.rename = rename
