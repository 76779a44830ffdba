"""What a handler's process may not: gain privileges, outlive its server, fill the memory, leave a core behind.

Called by the child before any of the archive's code is imported. It is a fence against accidents and a bound for
mistakes, not a jail: the code runs as the server's user, with that user's files and network. Sources: prctl(2),
getrlimit(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def confine(*, parent: int, address_space: int, open_files: int) -> None:
    """Takes effect for this process and all that it starts. `address_space`: bytes, 0 for no bound. Raises OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        raise ProcessLookupError(f"the server {parent} is gone")
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, open_files)
    if address_space:
        _lower(resource.RLIMIT_AS, address_space)


def _lower(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (bound, bound))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
