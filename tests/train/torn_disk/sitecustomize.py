"""The first worker with this on its path tears its second checkpoint, writes no other, and dies soon after."""

import errno
import os
import signal
import threading
from pathlib import Path

_rename = os.rename
_written = []


def rename(source, target, **options):
    first = os.environ.get("TRUELINE_REF") == "worker-0.0" and Path(target).name.startswith("step-")
    if first and len(_written) == 2:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
    _rename(source, target, **options)
    if first:
        _written.append(target)
    if len(_written) == 2:
        torn = Path(target) / "state.safetensors"
        os.truncate(torn, torn.stat().st_size - 8)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()


os.rename = rename
