"""The files of tables beside the checkpoints of a hybrid job, which servers write. No torch."""

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from trueline.errors import StorageError
from trueline.ps.hybrid.kept import choose_old
from trueline.ps.link import ServerLink

Act = Callable[[ServerLink], Coroutine[Any, Any, None]]
SAVING_S = 60.0
"""How long a server that is taken away may write its part of a checkpoint."""


class TableFiles:
    """`repeat` has a server act, once it is there. The files of a step lie in `folder`/STEP.SERVERS.RANDOM until all
    are there, then in step-STEP; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int, repeat: Callable[[str, Act], Coroutine[Any, Any, None]]) -> None:
        self._folder, self._keep, self._repeat = folder, keep, repeat
        self._writing, self._all_written = set[str](), asyncio.Event()
        self._all_written.set()

    async def begin(self, step: int, servers: Sequence[str]) -> str:
        """Has all servers begin to write; the name of their folder. Raises StorageError, with nothing left behind."""
        name = f"{step}.{len(servers)}.{secrets.token_hex(4)}"
        with self._removing_torn(name):
            for server in servers:
                await self._repeat(server, lambda link: link.save(str(self._folder / name / f"{link.ref}.part")))
        self._writing.add(name)
        self._all_written.clear()
        return name

    async def wait(self, step: int, name: str, servers: Sequence[str]) -> Path:
        """The folder of the files, once all are on the disk. Raises StorageError, also when a server that died while it
        wrote has gone on since; then nothing is left behind."""
        written, final = self._folder / name, self._folder / f"step-{step}"
        try:
            with self._removing_torn(name):
                for server in servers if written.exists() or not final.exists() else ():
                    await self._repeat(server, lambda link: self._finish(link, step, written))
        finally:
            self._writing.discard(name)
            if not self._writing:
                self._all_written.set()
        if written.exists():
            shutil.rmtree(final, ignore_errors=True)
            written.rename(final)
        past = choose_old(list(self._folder.glob("step-*")), step, self._keep)
        for old in (*past, *self._list_torn(step)):
            shutil.rmtree(old, ignore_errors=True)
        return final

    def _list_torn(self, step: int) -> list[Path]:
        """Folders that no checkpoint got, of steps up to this one: those of later ones may be being written."""
        numbers = ((path, path.name.partition(".")[0]) for path in self._folder.iterdir())
        return [path for path, number in numbers if number.isdecimal() and int(number) <= step]

    @contextlib.contextmanager
    def _removing_torn(self, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            shutil.rmtree(self._folder / name, ignore_errors=True)
            raise

    async def _finish(self, link: ServerLink, step: int, folder: Path) -> None:
        path = folder / f"{link.ref}.part"
        try:
            await link.wait_saved(str(path))
        except StorageError:
            if path.exists() or (await link.stats()).steps != step:
                raise
            await link.save(str(path))  # it has begun again, and nothing was applied since
            await link.wait_saved(str(path))

    async def wait_all(self) -> None:
        """Until no server writes, for SAVING_S at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_written.wait(), SAVING_S)
