"""Files of checkpoints that forks of a server write, and who waits for them."""

from collections.abc import Callable
from pathlib import Path

from trueline import files
from trueline.errors import StorageError, TruelineError
from trueline.ps.server.listen import CallerLine, CallerLines
from trueline.ps.server.snapshot import ForkedWrite, Header
from trueline.ps.wire import Array

_REMEMBERED = 8
_Waiter = tuple[CallerLine, int]


class Saves:
    """`refuse` answers a request with an error."""

    def __init__(self, lines: CallerLines, refuse: Callable[[CallerLine, int, TruelineError], None]) -> None:
        self._lines, self._refuse = lines, refuse
        self._writing: dict[Path, tuple[ForkedWrite, list[_Waiter]]] = {}
        self._ended: dict[Path, TruelineError | None] = {}

    def begin(self, path: Path, dump: Callable[[], tuple[Header, list[Array]]]) -> None:
        """Starts a child that writes the state of this moment. Raises StorageError."""
        if path in self._writing:
            raise StorageError(f"{path} is being written already", hint="wait for it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            child = ForkedWrite(path, dump, durable=True)
        except OSError as error:
            raise files.storage_error(error, path) from error
        self._ended.pop(path, None)
        self._writing[path] = (child, [])
        self._lines.watch(child, lambda: self._end(path))

    def wait(self, path: Path, line: CallerLine, number: int) -> None:
        """Has the request answered when the file is on the disk."""
        if path in self._writing:
            self._writing[path][1].append((line, number))
        elif path in self._ended:
            self._tell((line, number), self._ended[path])
        else:
            self._refuse(line, number, StorageError(f"this server does not write {path}", hint="ask for it again"))

    def _end(self, path: Path) -> None:
        child, waiters = self._writing.pop(path)
        self._lines.ignore(child)
        self._ended[path] = child.finish()
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        for waiter in waiters:
            self._tell(waiter, self._ended[path])

    def _tell(self, waiter: _Waiter, error: TruelineError | None) -> None:
        if error is None:
            self._lines.reply(*waiter)
        else:
            self._refuse(*waiter, error)

    def close(self) -> None:
        """Ends the children before their time."""
        for child, _ in self._writing.values():
            child.end()
        self._writing.clear()
