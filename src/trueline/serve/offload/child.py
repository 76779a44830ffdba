"""The process beside the loop: `python -m trueline.serve.offload.child DESCRIPTOR`.

It runs one function after the other and sends back what it returns or raises. It ends when a body has made it grow,
since an allocator keeps much of what it took; when nothing has come for some seconds; and with the server.
"""

import contextlib
import gc
import socket
import sys
from typing import Any

from trueline.errors import TooLarge, TruelineError
from trueline.serve import host, json_records
from trueline.serve.offload import frames

IDLE_S = 10.0
MAX_GROWN_KIB = 64 * 2**10
PRELOADED = (json_records,)
"""Imported before the first body comes, and with them what reads tensors."""


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    host.yield_to_others()  # the event loop answers others meanwhile
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")
    base = _peak_kib()
    with contextlib.suppress(frames.Ended, TimeoutError):
        ends = False
        while not ends:
            sock.settimeout(IDLE_S)
            job = frames.receive(sock)
            sock.settimeout(None)
            gc.disable()  # millions of values would be looked through again and again
            reply = _run(job)
            gc.enable()
            ends = _peak_kib() - base > MAX_GROWN_KIB
            frames.send(sock, (*reply, ends))
            del job, reply


def _peak_kib() -> int:
    """The most memory so far. getrusage would count the parent's from before exec."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def _run(job: Any) -> tuple[bool, object]:
    """Whether the function returned, and what it returned or raised."""
    function, args = job
    try:
        return True, function(*args)
    except MemoryError:
        return False, TooLarge("reading the body takes more memory than this server has", hint="send it in parts")
    except TruelineError as error:
        return False, error.with_traceback(None)
    except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails
        return False, RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
