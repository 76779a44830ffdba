"""The process of one handler: loads it, then answers batches until the server closes the socket.

It has neither the server's sockets nor its tokens, and imports torch only if the handler does. The handler's output
goes to the server's log. As in TorchServe's ts/service.py an exception fails the batch with 503, a PredictionException
with its own code, and lack of memory with 507.
"""

import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from trueline.serve.handlers import envelopes, framing
from trueline.serve.handlers.envelopes import Entry

COMPAT = Path(__file__).parents[2] / "torchserve" / "compat"  # the folder of our own `ts` package
LOAD_BYTES = 2**20
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
DEFAULTS = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "text_classifier",
    "text_handler",
    "vision_handler",
)
Initialize = Callable[[Any], Any]


def _ts(name: str) -> Any:
    """A module of our `ts` package, which `main` has put on the path."""
    return importlib.import_module(f"ts.{name}")


class _Unserialisable(Exception):
    """No body can be made of the output."""


class Service:
    def __init__(self, launch: Mapping[str, Any], sock: socket.socket) -> None:
        """Loads and initializes. Raises whatever the handler raises."""
        self._sock = sock
        self._decodes = launch["decode"]
        self._open: list[int] = []  # the requests of the current batch that the handler is called with
        folder = Path(launch["folder"])
        self._metrics = _ts("metrics.metrics_store").MetricsStore(launch["model"])
        self._context = _ts("context").Context(
            launch["model"],
            str(folder),
            _manifest(folder),
            launch["batch_size"],
            launch["gpu"],
            launch["server_version"],
            True,
            self._metrics,
            _config(folder, launch["config_file"]),
        )
        self._context.send_piece = self._send_piece
        self._answer, initialize = load_handler(launch["handler"], folder)
        if launch["envelope"]:
            self._answer = envelopes.within(launch["envelope"], self._answer)
        initialize(self._context)

    def predict(self, head: Mapping[str, Any], parts: Sequence[bytearray]) -> None:
        """Answers one batch: frames of pieces, then one of the answers."""
        data: list[dict[str, Any]] = []
        processors, at = [], 0
        for request in head["requests"]:
            given: dict[str, Any] = {}
            headers: dict[str, Any] = {}
            for name, kind in request["parts"]:
                given[name] = _decode(parts[at], kind) if self._decodes else parts[at]
                headers[name] = {"content-type": kind}
                at += 1
            data.append(given)
            processors.append(_ts("context").RequestProcessor(headers | request["headers"]))
        ids = [request["id"] for request in head["requests"]]
        began = time.perf_counter()
        try:
            bodies = self._steps(data, processors, ids)
        except Exception as error:  # noqa: BLE001 - user code: any error fails its batch
            code, message = _refusal(error)
            metrics = self._metrics.drain()
            framing.send(self._sock, {"kind": "refused", "code": code, "message": message, "metrics": metrics})
            return
        self._metrics.add_time("PredictionTime", (time.perf_counter() - began) * 1e3)
        answers = [_head(one) for one in processors]
        framing.send(self._sock, {"kind": "answers", "answers": answers, "metrics": self._metrics.drain()}, bodies)

    def _steps(self, data: list[Any], processors: list[Any], ids: list[str]) -> list[bytes | bytearray]:
        """The answers of a batch. A handler that sets stopping criteria is called again for the requests whose
        criterion returns False; what it has answered so far is sent as a piece.
        """
        last: dict[int, bytes | bytearray] = {}
        self._open = list(range(len(data)))
        while self._open:
            context, going = self._context, self._open
            context.request_ids = {index: ids[at] for index, at in enumerate(going)}
            context.request_processor = [processors[at] for at in going]
            context.stopping_criteria = None
            found = self._answer([data[at] for at in going], context)
            last |= zip(going, _bodies(found, len(going)), strict=True)
            criteria = context.stopping_criteria or {}
            stops = [criteria[index](found[index]) if criteria else None for index in range(len(going))]
            self._open = [at for at, stop in zip(going, stops, strict=True) if stop is not None and not stop]
            for at in self._open:
                framing.send(self._sock, {"kind": "piece", "index": at, "answer": _head(processors[at])}, [last[at]])
        return [last[at] for at in range(len(data))]

    def _send_piece(self, values: Sequence[Any], request_ids: Mapping[int, str], code: int) -> None:
        for index, value in enumerate(values):
            if index in request_ids:
                head = _head(self._context.request_processor[index]) | {"status": code}
                framing.send(
                    self._sock, {"kind": "piece", "index": self._open[index], "answer": head}, [_encode(value)]
                )


def _manifest(folder: Path) -> dict[str, Any]:
    """Empty for the functions of a workflow."""
    path = folder / "MAR-INF" / "MANIFEST.json"
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return found


def _config(folder: Path, name: str) -> dict[str, Any]:
    if not name:
        return {}
    import yaml

    found = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _decode(value: bytearray, kind: str) -> Any:
    """Valid JSON as its value and text as str, else the bytes."""
    try:
        if kind.lower().startswith("application/json"):
            return json.loads(value)
        if kind.lower().startswith("text/"):
            return value.decode("utf-8")
    except (ValueError, RecursionError):
        return value
    return value


def _bodies(found: Any, count: int) -> list[bytes | bytearray]:
    """The answers of a batch of `count`. Raises PredictionException with TorchServe's messages."""
    refused = _ts("utils.util").PredictionException
    if not isinstance(found, list):
        print(f"the handler returned {type(found).__name__}, not a list", file=sys.stderr)  # noqa: T201 - the log
        raise refused("Invalid model predict output", 503)
    if len(found) != count:
        print(f"the handler returned {len(found)} answers to {count} requests", file=sys.stderr)  # noqa: T201
        raise refused("number of batch response mismatched", 503)
    try:
        return [_encode(one) for one in found]
    except _Unserialisable as error:
        raise refused("Unsupported model output data type.", 503) from error


def _encode(value: Any) -> bytes | bytearray:
    if isinstance(value, bytes | bytearray):
        return value
    if isinstance(value, str):
        return value.encode("utf-8")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        import io

        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()
    try:
        return json.dumps(value, indent=2).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise _Unserialisable(str(error)) from error


def _refusal(error: Exception) -> tuple[int, str]:
    """Code and message of a failed batch. The traceback goes to the log."""
    traceback.print_exception(error)
    if isinstance(error, _ts("utils.util").PredictionException):
        failure: Any = error
        return int(failure.error_code), str(failure.message)
    if isinstance(error, MemoryError) or "CUDA" in str(error) or "out of memory" in str(error).lower():
        return 507, "Out of resources"
    return 503, "Prediction failed"


def _head(processor: Any) -> dict[str, Any]:
    return {
        "status": int(processor.get_response_status_code()),
        "phrase": str(processor.get_response_status_phrase() or ""),
        "headers": {str(name): str(value) for name, value in processor.get_response_headers().items()},
    }


class NoHandler(Exception):
    """The archive has no such handler."""


def load_handler(handler: str, folder: Path) -> tuple[Entry, Initialize]:
    """The function that answers, and the one that is called once before. Raises NoHandler, and what the module raises.

        "my_handler.py", "my_handler"    the module's function `handle(data, context)`, else its only class
        "my_handler:answer"              the module's function of that name
        "image_classifier", ...          a default handler of the `ts` package

    A function is called once with data None so that it can load its model; a class has `initialize`.
    Source: TorchServe's model_loader.
    """
    named, _, function = handler.partition(":")
    module = _import_handler(named.rsplit("/", 1)[-1].removesuffix(".py"), folder)
    found = getattr(module, function or "handle", None)
    if callable(found) and not inspect.isclass(found):
        entry: Entry = found
        return entry, lambda context: entry(None, context)
    if function:
        raise NoHandler(f"the handler module '{module.__name__}' has no function '{function}'")
    made = _handler_class(module)()
    return made.handle, made.initialize


def _import_handler(name: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    if path.is_file():
        if name in sys.modules:
            raise NoHandler(f"the handler's file is called as the module '{name}' that is in use already; rename it")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None  # it is a .py file
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    if name in DEFAULTS:
        return importlib.import_module(f"ts.torch_handler.{name}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise NoHandler(
            f"there is no handler '{name}': neither {name}.py in the archive nor a default ({', '.join(DEFAULTS)})"
        ) from error


def _handler_class(module: ModuleType) -> Any:
    """The module's only class; of a class and its subclasses the last. Raises NoHandler."""
    own = [one for _, one in inspect.getmembers(module, inspect.isclass) if one.__module__ == module.__name__]
    able = [one for one in own if hasattr(one, "handle") and hasattr(one, "initialize")]
    leaves = [one for one in able if not any(other is not one and issubclass(other, one) for other in able)]
    if len(leaves) != 1:
        raise NoHandler(
            f"the handler module '{module.__name__}' is to have a function handle(data, context) or one class with "
            f"initialize and handle; it has the classes {', '.join(one.__name__ for one in own) or 'none'}"
        )
    return leaves[0]


def confine(*, parent: int, address_space: int, open_files: int) -> None:
    """Bounds this process and all that it starts: no new privileges, no core files, no life after the server.

    It protects against accidents, not against hostile code, which runs as the server's user with that user's files and
    network. `address_space`: bytes, 0 for no bound. Raises OSError. Sources: prctl(2), getrlimit(2).
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
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


def main(descriptor: int, parent: int) -> int:
    """Loads the handler that the first frame names and serves it; returns the exit code."""
    sock = socket.socket(fileno=descriptor)
    launch, _ = framing.receive(sock, LOAD_BYTES)
    try:
        confine(parent=parent, address_space=launch["address_space"], open_files=launch["open_files"])
        sys.path[:0] = [launch["folder"], str(COMPAT)]
        service = Service(launch, sock)
    except Exception as error:  # noqa: BLE001 - user code: the server gets the reason
        traceback.print_exception(error)
        why = traceback.format_exception_only(error)[-1].strip()
        framing.send(sock, {"kind": "failed", "why": why[:2000]})
        return 1
    framing.send(sock, {"kind": "ready"})
    while True:
        try:
            head, parts = framing.receive(sock, launch["max_bytes"])
        except framing.Closed:
            return 0
        service.predict(head, parts)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
