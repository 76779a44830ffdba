"""Publishes the master's events: to its log, to followers, to JOB/events.jsonl, and to the live page's hook.

None of these may end the job. Lines that a full disk does not take are written once there is room.
"""

import asyncio
import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from trueline import events, full_disk
from trueline.events import Field
from trueline.wire import train_pb2 as pb

BUNDLE = 256  # events in one message
KEPT = 20_000  # past events that a new follower gets
PIECE, MOST_HISTORY = 1 << 20, 32 << 20
"""Bytes of past events in one message, and of all for a host that could lead the job: the newest."""
UNWRITTEN_BYTES = 16 << 20
"""Lines that are kept for the file while the disk is full."""
Hook = Callable[[str, dict[str, Field], float], None]
"""Called with name, fields and time (seconds since 1970) of each event."""
NamedEvent = tuple[str, dict[str, Field]]
_FREQUENT = {"step.applied"}
"""Events that only JOB/events.jsonl and the journal get, not the process's own log."""


def encode_fields(fields: dict[str, Field]) -> bytes:
    """`fields` as JSON; numbers that are not finite as json writes them, which msgspec would make null.

    >>> encode_fields({"step": 3, "loss": 0.5}), encode_fields({"loss": math.nan})
    (b'{"step":3,"loss":0.5}', b'{"loss": NaN}')
    """
    if all(map(math.isfinite, (value for value in fields.values() if type(value) is float))):
        return msgspec.json.encode(fields)
    return json.dumps(fields).encode()


class EventPublisher:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.hook: Hook | None = None
        self.replicate: Callable[[bytes], None] = lambda lines: None
        """Called with the lines of new events."""
        self.recent: deque[pb.Event] = deque(maxlen=KEPT)
        self.seq = 0
        self._unwritten = bytearray()
        self._added = asyncio.Event()

    def publish(self, named_events: Sequence[NamedEvent]) -> None:
        """Publishes events that became known together, such as the ten or so steps of a report, in one write."""
        if not named_events:
            return
        at, lines = time.time(), list[bytes]()
        for name, fields in named_events:
            self.seq += 1
            text = encode_fields(fields)
            if name not in _FREQUENT:
                events.emit(name, **fields)
            self.recent.append(pb.Event(seq=self.seq, name=name, fields=text.decode(), at=at))
            lines.append(b'{"at":%.3f,"seq":%d,"name":"%s","fields":%s}\n' % (at, self.seq, name.encode(), text))
        together = b"".join(lines)
        self._unwritten += together
        self.flush()
        self.replicate(together)
        added, self._added = self._added, asyncio.Event()
        added.set()
        if self.hook is None:
            return
        try:
            for name, fields in named_events:
                self.hook(name, fields, at)
        except Exception as error:  # noqa: BLE001  a page that fails must not end the training that it shows
            self.hook = None
            events.emit("page.failed", why=repr(error))

    def flush(self) -> None:
        """Writes lines that a full disk did not take; those beyond UNWRITTEN_BYTES are lost, the oldest first."""
        try:
            while self._unwritten:
                end = self._unwritten.find(b"\n", min(PIECE, len(self._unwritten) - 1)) + 1
                full_disk.append_lines(self.path, bytes(self._unwritten[:end]))
                del self._unwritten[:end]
        except OSError:  # most likely a full disk
            if len(self._unwritten) > UNWRITTEN_BYTES:
                rest = self._unwritten.index(b"\n", len(self._unwritten) - UNWRITTEN_BYTES) + 1
                del self._unwritten[:rest]

    def read_history(self) -> Iterator[bytes]:
        """All events so far, the newest MOST_HISTORY bytes of them, in pieces."""
        past = b""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - MOST_HISTORY)
            file.seek(start)
            past = file.read()
            past = past[past.find(b"\n") + 1 :] if start else past
        past += self._unwritten
        yield from (past[at : at + PIECE] for at in range(0, len(past), PIECE))

    async def follow(self, after: int) -> AsyncIterator[pb.Events]:
        """Yields the events after number `after` in bundles as they come, without end; the oldest may be missing."""
        while True:
            added = self._added
            while after < self.seq:
                first = self.seq - len(self.recent)
                start = max(after, first) - first
                bundle = list(islice(self.recent, start, start + BUNDLE))
                after = first + start + len(bundle)
                yield pb.Events(events=bundle)
            await added.wait()
