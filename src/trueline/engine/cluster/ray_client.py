"""The helper of `ray.py`: connects to Ray, answers calls on a socket, and ends a minute after the last one.

`main ADDRESS SOCKET`. Its first line on stdout says that it is ready, or why not. On a node of the cluster it is a
driver of Ray; by `ray://` it runs each call as a task there.
"""

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from trueline.errors import MissingPackage, first_line
from trueline.extras import naming_extras

IDLE_S = 60.0
CONNECT_S = 40
REACH_S = 2.0
AUTO = "auto"


class RayConnection:
    """A connection to a cluster. `is_over`: no client has called for a minute, or the connection is lost."""

    def __init__(self, address: str) -> None:
        import ray

        from trueline.engine.cluster import ray_records, ray_side

        for module in (ray_records, ray_side):
            ray.cloudpickle.register_pickle_by_value(module)
        self._called_at, self._lost, self._running = time.monotonic(), False, 0
        remote = address.startswith("ray://")
        options = {} if remote else {"log_to_driver": False}
        ray.init(address=address, namespace=ray_records.NAMESPACE, logging_level="error", **options)
        self._perform = ray_side.perform
        if remote:
            task = ray.remote(num_cpus=0, max_retries=0)(ray_side.perform)
            self._perform = lambda call, given: ray.get(task.remote(call, given))
        self.serve = ray_side.serve

    def is_over(self) -> bool:
        idle = not self._running and time.monotonic() - self._called_at > IDLE_S
        return self._lost or idle

    def answer(self, call: str, given: dict[str, object]) -> dict[str, object]:
        self._running += 1
        try:
            reply: dict[str, object] = self._perform(call, given)
        except Exception as error:  # noqa: BLE001 - Ray has dozens, and no common one
            reply = {"away": first_line(error)}
        finally:
            self._running -= 1
            self._called_at = time.monotonic()
        self._lost = self._lost or "away" in reply
        return reply


def check_reachable(address: str) -> None:
    """Raises OSError at once where Ray would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=REACH_S).close()


def describe_failure(error: BaseException, address: str) -> dict[str, str]:
    """Why there is no connection, and what to do."""
    if isinstance(error, MissingPackage):
        return {"why": error.message.partition(":")[0], "hint": error.hint}
    if isinstance(error, ConnectionRefusedError) or (
        isinstance(error, OSError) and not isinstance(error, ConnectionError)
    ):
        return {"why": f"no Ray cluster answers at {address}: {error.strerror or error}"}
    if isinstance(error, ConnectionError):
        return {"why": f"there is no Ray cluster at '{address}': {first_line(error)}"}
    why = " ".join(str(error).split())
    if "mismatch" in why.lower():
        return {
            "why": f"this Python does not fit the Ray cluster's: {why[:300]}",
            "hint": "use the cluster's versions of Python and Ray",
        }
    return {
        "why": f"Ray at '{address}' cannot be used from here: {why[:300]}",
        "hint": 'from a machine that is no node of the cluster: address = "ray://HOST:10001" in [engine.ray]',
    }


def main() -> NoReturn:
    address, path = sys.argv[1:]
    address = address or os.environ.get("RAY_ADDRESS") or AUTO
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints
    signal.alarm(CONNECT_S)
    try:
        check_reachable(address)
        with naming_extras():
            connection = RayConnection(address)
    except Exception as error:  # noqa: BLE001 - Ray has dozens, and no common one
        print(json.dumps(describe_failure(error, address)), file=pipe, flush=True)
        os._exit(1)
    signal.alarm(0)
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    ready = [json.dumps({"ready": True})]

    def is_over() -> bool:  # called once it listens
        if ready:
            with suppress(OSError), pipe:
                print(ready.pop(), file=pipe)
        return connection.is_over()

    connection.serve(f"/proc/self/fd/{folder}/{Path(path).name}", connection.answer, is_over)
    os._exit(0)  # Ray's threads may wait for a cluster that is gone
