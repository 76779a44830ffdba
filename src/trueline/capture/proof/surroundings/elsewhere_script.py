"""Replays calls of the standard library in a process of its own, for `replay.py`, and writes what they returned.

Runs by itself, without Trueline. With "other" as argument the process is as unlike the one that started it as it can
be made: it works in another folder, thread and locale, with other limits, handlers of signals and settings.
"""

import contextlib
import enum
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import threading
import warnings
from typing import Any

READS = tuple(
    """open os.listdir os.scandir os.walk os.fwalk import compile exec marshal. object. sys. code. socket.gethost
    socket.getaddrinfo glob. pathlib. time. gc. builtins.id""".split()  # noqa: SIM905 - as prose they take two lines
)
"""Events of Python's audit that change nothing outside of the process."""
MOST = 10_000
FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""A handler in Python would return to the instruction that failed, and fail again without end."""


def refuse_changes(event: str, args: Any) -> None:
    reads = event.startswith(READS)
    if event == "open":
        mode, flags = args[1], args[2] or 0
        reads = mode.startswith("r") if isinstance(mode, str) else not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if not reads:
        raise PermissionError(event)


def become_another() -> None:
    """Changes what a process inherits or sets for itself, of modules that are imported anyway."""
    os.chdir("/")
    os.umask(0o037)
    for stream in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    with contextlib.suppress(OSError):
        os.nice(1)
    with contextlib.suppress(OSError):
        os.setsid()
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *FATAL}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(one, lambda *_: None)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 1e6)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    sys.path[:] = ["/other", *sys.path]
    sys.argv[:] = ["other.py", "one", "two"]
    sys.setswitchinterval(0.0123)
    sys.setrecursionlimit(4321)
    gc.disable()
    gc.set_threshold(1234, 5, 6)
    threading.stack_size(1 << 20)
    warnings.simplefilter("error")
    for name, change in CHANGES.items():
        if name in sys.modules:
            with contextlib.suppress(Exception):
                change(sys.modules[name])


def limit_resources(resource: Any) -> None:
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK, resource.RLIMIT_CORE, resource.RLIMIT_CPU):
        with contextlib.suppress(OSError, ValueError):
            soft, hard = resource.getrlimit(limit)
            resource.setrlimit(limit, (soft // 2 if soft > 1 else 1 << 30, hard))


CHANGES: dict[str, Any] = {
    "atexit": lambda module: module.register(len, ()),
    "calendar": lambda module: module.setfirstweekday(3),
    "csv": lambda module: module.field_size_limit(4321),
    "decimal": lambda module: setattr(module.DefaultContext, "prec", 9),
    "faulthandler": lambda module: module.enable(os.open(os.devnull, os.O_WRONLY)),
    "locale": lambda module: module.setlocale(module.LC_ALL, "C"),
    "logging": lambda module: (module.disable(30), module.getLogger().addHandler(module.NullHandler())),
    "multiprocessing": lambda module: module.set_start_method("spawn"),
    "resource": limit_resources,
    "socket": lambda module: module.setdefaulttimeout(12.5),
    "tracemalloc": lambda module: module.start(),
}
"""By the module to which a setting belongs, how it is changed."""


def evaluate(tree: Any, made: Any) -> Any:
    kind, *rest = tree
    if kind == "plain":
        return rest[0]
    if kind == "made":
        return made[rest[0]]
    if kind == "module":
        return importlib.import_module(rest[0])
    if kind == "field":
        return getattr(evaluate(rest[0], made), rest[1])
    if kind == "named":
        found = importlib.import_module(rest[0])
        for name in rest[1].split("."):
            found = getattr(found, name)
        return found
    function, args, options = rest
    given = [evaluate(one, made) for one in args]
    return evaluate(function, made)(*given, **{name: evaluate(one, made) for name, one in options.items()})


def replay(steps: Any) -> list[Any]:
    made, values = list[Any](), list[Any]()
    for tree in steps[:MOST]:
        try:
            found = evaluate(tree, made)
        except BaseException as error:  # noqa: BLE001 - whatever a call raises in another process
            found = None
            values.append(("raised", type(error).__name__))
        else:
            values.append(as_plain(found))
        made.append(found)
    return values


def as_plain(value: Any) -> tuple[str, Any]:
    """A value that can be compared and given to another process; of any other one its kind."""
    if type(value) in (bool, int, float, complex, str, bytes, type(None)):
        return "value", value
    if type(value) in (list, tuple, set, frozenset, dict):
        with contextlib.suppress(Exception):
            return "value", pickle.loads(pickle.dumps(value))
    return "kind", f"{value!r}" if isinstance(value, enum.Enum) else type(value).__name__


def import_all(trees: Any) -> None:
    """Imports the modules that are named."""
    for tree in trees:
        if isinstance(tree, (tuple, list)):
            if len(tree) > 1 and tree[0] in ("module", "named"):
                with contextlib.suppress(Exception):
                    importlib.import_module(tree[1])
            else:
                import_all(tree)
        elif isinstance(tree, dict):
            import_all(tree.values())


def main() -> None:
    steps, values = pickle.load(sys.stdin.buffer), list[Any]()
    out, other = os.fdopen(os.dup(1), "wb"), sys.argv[1:] == ["other"]
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
    import_all(steps)

    def run() -> None:
        if "random" in sys.modules:  # what is drawn is judged by itself
            sys.modules["random"].seed(0)
        if other and "asyncio" in sys.modules:
            sys.modules["asyncio"]._set_running_loop(loop)
        values.extend(replay(steps))

    kept = [object() for _ in range(4321 * other)]
    if other:
        loop = sys.modules["asyncio"].new_event_loop() if "asyncio" in sys.modules else None
        become_another()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        thread = threading.Thread(target=run, name="other", daemon=True)

        def refuse_here(event: str, args: Any) -> None:
            if threading.current_thread() is thread:
                refuse_changes(event, args)

        sys.addaudithook(refuse_here)
        thread.start()
        thread.join()
    else:
        sys.addaudithook(refuse_changes)
        run()
    with contextlib.suppress(BaseException):
        pickle.dump(values, out)
        out.flush()
    os._exit(len(kept) * 0)


if __name__ == "__main__":
    main()
