"""TensorBoard's event file of a job, without TensorFlow: `tensorboard --logdir runs` shows every job.

    JOB/job.json, events.jsonl ──▶ Curves ──▶ JOB/events.out.tfevents.0.trueline

The file follows from these two alone. A launcher that resumes a job compares what is there with what it would have
written, and appends the rest: after a crash nothing is missing, torn or there twice.

Sources: TensorFlow's record_writer.cc (framing), event.proto and summary.proto; plugin_data.proto of
TensorBoard's hparams; RFC 3720, appendix B.4 (CRC-32C).
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from trueline import files
from trueline.errors import StorageError
from trueline.registry.curves import Curves, Point, read_events

NAME = "events.out.tfevents.0.trueline"
HYPERPARAMETERS = (
    "epochs", "global_batch", "micro_batch", "seed", "shuffle", "reduction", "precision", "clip_norm", "ema", "weights",
)  # fmt: skip
"""Settings that change what is learned; the plugin shows a column for each."""
EVERY_S, PAUSE_S = 1.0, 0.02
SLICE = 1000
"""Events that are read at once: a job that is resumed may have a million."""


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC = _crc_table()


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of `data`.

    >>> _checksum(b"123456789").hex()
    'e5b08ac7'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(encoded) + bytes([value])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _event(at_ms: int, step: int, content: bytes) -> bytes:
    """An Event: wall_time (seconds) and step before one field of `content`."""
    return _frame(b"\x09" + struct.pack("<d", at_ms / 1000) + b"\x10" + _varint(max(step, 0)) + content)


def _hyperparameters(settings: Mapping[str, object], at_ms: int) -> bytes:
    """The Summary by which the plugin `hparams` knows a run."""

    def value(given: object) -> bytes:  # a google.protobuf.Value
        if isinstance(given, bool):
            return b"\x20" + bytes([given])
        return b"\x11" + struct.pack("<d", given) if isinstance(given, int | float) else _field(3, str(given).encode())

    known = [(name, settings[name]) for name in HYPERPARAMETERS if name in settings]
    pairs = b"".join(_field(1, _field(1, name.encode()) + _field(2, value(given))) for name, given in known)
    started = _field(3, pairs + b"\x29" + struct.pack("<d", at_ms / 1000))
    plugin = _field(1, _field(1, b"hparams") + _field(2, started))
    return _field(1, _field(1, b"_hparams_/session_start_info") + _field(9, plugin))


class EventEncoder:
    """Points as records of the file, after the job's settings.

    A curve that goes back begins a session there: TensorBoard then drops the points of steps that were rolled back.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = settings
        self._last: dict[str, int] = {}
        self._began = False

    def encode(self, points: list[Point]) -> bytes:
        records = bytearray()
        for key, value, at_ms, step in points:
            if not self._began:
                self._began = True
                records += _event(at_ms, 0, _field(3, b"brain.Event:2"))
                records += _event(at_ms, 0, _field(5, _hyperparameters(self._settings, at_ms)))
            if step < self._last.get(key, step):
                self._last.clear()
                records += _event(at_ms, step, _field(7, b"\x08\x01"))  # SessionLog.START
            self._last[key] = step
            summary = _field(1, _field(1, key.encode()) + b"\x15" + bytes(ctypes.c_float(value)))
            records += _event(at_ms, step, _field(5, summary))
        return bytes(records)


class EventFile:
    """The event file of the job in `job_dir`."""

    def __init__(self, job_dir: Path) -> None:
        self.path, self._log = job_dir / NAME, job_dir / "events.jsonl"
        settings: dict[str, object] = {}
        with suppress(OSError, ValueError):
            settings = json.loads((job_dir / "job.json").read_bytes())
        self._curves, self._encoder, self._read = Curves(), EventEncoder(settings), 0
        self._known = b""
        """What the file had, while that is compared with what it should have."""
        with suppress(FileNotFoundError):
            self._known = self.path.read_bytes()
        self._at, self._unwritten = 0, b""

    def update(self) -> bool:
        """Appends the points of the next events; whether there may be more. A full disk is tried again."""
        events = list(islice(read_events(self._log, self._read), SLICE))
        for end, event in events:
            with suppress(LookupError, ValueError, TypeError):  # an event of another version
                self._curves.hear(event["name"], event["fields"], event["at"])
            self._read = end
        self._unwritten += self._encoder.encode(self._curves.points)
        self._curves.points.clear()
        with suppress(OSError, StorageError):
            self._write()
        return len(events) == SLICE

    def _write(self) -> None:
        data, known = self._unwritten, self._known[self._at :]
        shared = min(len(data), len(known))
        if known[:shared] != data[:shared]:  # lines of events.jsonl were lost, on a full disk
            files.write_atomic(self.path, self._known[: self._at] + data)
            self._known = b""
        elif len(data) > shared:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.ftruncate(file, self._at + shared)
                while shared < len(data):
                    shared += os.pwrite(file, data[shared:], self._at + shared)
            finally:
                os.close(file)
            self._known = b""
        self._at, self._unwritten = self._at + len(data), b""


@contextmanager
def writing(job_dir: Path) -> Iterator[None]:
    """Keeps the job's event file up to date while the block runs, in a thread, and completes it at the end."""
    file, ended = EventFile(job_dir), threading.Event()

    def run() -> None:
        more = True
        while not ended.wait(PAUSE_S if more else EVERY_S):
            more = file.update()

    thread = threading.Thread(target=run, name="tensorboard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        while file.update():
            pass
