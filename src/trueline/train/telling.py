"""How a master tells what happens: to its log, to who follows, to JOB/events.jsonl, and to the live page's hook.

None of these may end the job: a disk that is full costs lines of the file and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from itertools import islice
from pathlib import Path

from trueline import events
from trueline.events import Field
from trueline.wire import train_pb2 as pb

BUNDLE = 256
"""Events in one message."""
KEPT = 20_000
"""Events that somebody who begins to follow can still get."""
Hook = Callable[[str, dict[str, Field], float], None]
"""Called with name, fields and time (seconds since 1970) of each event."""


def _opened(path: Path) -> int:
    """A descriptor at the beginning of a line, the last: whoever wrote before may have died within one."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file


class Teller:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.hook: Hook | None = None
        self.said: deque[pb.Event] = deque(maxlen=KEPT)
        self.seq = 0
        self._file = -1
        self._news = asyncio.Event()

    def say(self, name: str, fields: dict[str, Field]) -> None:
        at = time.time()
        self.seq += 1
        events.emit(name, **fields)
        self.said.append(pb.Event(seq=self.seq, name=name, fields=json.dumps(fields), at=at))
        self._write({"at": round(at, 3), "seq": self.seq, "name": name, "fields": fields})
        news, self._news = self._news, asyncio.Event()
        news.set()
        if self.hook is not None:
            try:
                self.hook(name, fields, at)
            except Exception as error:  # noqa: BLE001  a page that fails must not end the training that it shows
                self.hook = None
                events.emit("page.failed", why=repr(error))

    def _write(self, event: dict[str, object]) -> None:
        try:
            if self._file < 0:
                self._file = _opened(self.path)
            os.write(self._file, json.dumps(event).encode() + b"\n")
        except OSError:  # a part of the line may be there: the file is opened again, and the next one begins anew
            self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    async def follow(self, after: int) -> AsyncIterator[pb.Events]:
        """The events beyond number `after`, for ever, in bundles as they come; those that are too old are left out."""
        while True:
            news = self._news
            while after < self.seq:
                first = self.seq - len(self.said)
                start = max(after, first) - first
                bundle = list(islice(self.said, start, start + BUNDLE))
                after = first + start + len(bundle)
                yield pb.Events(events=bundle)
            await news.wait()
