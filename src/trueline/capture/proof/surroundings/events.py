"""What a model asks outside of its process on each call: another program, a host, a library of C, a database. Python's
audit events tell, whichever function is used."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trueline.capture.proof.state.files import is_for_user

ASKED = {
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"), "another program"),
    **dict.fromkeys(("socket.connect", "socket.sendto", "urllib.Request"), "a host"),
    **dict.fromkeys(("ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function"), "a library of C"),
    **dict.fromkeys(("sqlite3.connect",), "a database"),
}
"""By the event, what a model calls."""
_watching: list[Callable[[str], None]] = []
_hooked: list[bool] = []


@contextmanager
def watch_events(note: Callable[[str], None]) -> Iterator[None]:
    """Calls `note` with what the user's code asks. An audit hook stays for good; it does nothing outside."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_note_event)
    _watching.append(note)
    try:
        yield
    finally:
        _watching.pop()


def _note_event(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in ASKED and is_for_user(sys._getframe(1)):
        _watching[-1](ASKED[event])
