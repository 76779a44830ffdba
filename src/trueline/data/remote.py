"""Files in object stores: every store that fsspec can reach, in ranges, through the machine's block cache.

What fails for a moment is tried again, with waits that grow; what is refused (no such object, no right) is not. An
object whose stamp changed between two reads is an error, not a mixture. URIs are shown without user, password and
query, and what a store says is shown without keys and tokens: credentials come from the store's own environment or
from fsspec's configuration (`FSSPEC_S3_KEY`, ...).
"""

from __future__ import annotations

import fnmatch
import io
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from trueline import events
from trueline.data.cache import BlockCache
from trueline.data.index import cache_folder
from trueline.data.listing import File, Stamp, visible
from trueline.errors import DataError, listed

Found = TypeVar("Found")

BLOCK_BYTES = 4 << 20
_LITTLE_BYTES = 256 << 10
"""Of a block, where only a footer is wanted: a thousand files have four gigabytes of large ones."""
CACHE_BYTES = "TRUELINE_CACHE_BYTES"
_DEFAULT_CACHE_BYTES = 20 << 30
_REFUSED = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError")
"""Of botocore, which does not call them PermissionError. They do not pass with time."""
_SECRET = re.compile(
    r"(?i)([\w-]*(?:signature|token|secret|passw(?:or)?d|credential|accesskey(?:id)?|access_key|key_id)[\w-]*)"
    r"([=:]\s*)[^&\s,;'\"]+"
)
_HINTS = {
    "FlexibleChecksumError": "set AWS_RESPONSE_CHECKSUM_VALIDATION=when_required: this server sends the checksum of "
    "the whole object with a part of it (rclone does)"
}
_USER = re.compile(r"(\w://)[^/@\s]+@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How often and how long a store is asked again: waits double from `first_s`, shortened at random by up to half."""

    attempts: int = 6
    first_s: float = 0.2
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random

    def ask(self, call: Callable[[], Found], what: str) -> Found:
        """What `call` gives. Raises DataError in words once it was refused, or failed `attempts` times."""
        for attempt in range(self.attempts):
            try:
                return call()
            except _REFUSED as error:
                raise _refused(what, error) from None
            except DataError:
                raise
            except Exception as error:  # noqa: BLE001 - the library of each store has exceptions of its own
                if type(error).__name__ in _NO_CREDENTIALS:
                    raise _refused(what, PermissionError(str(error))) from None
                why = redacted(f"{type(error).__name__}: {error}")
                if attempt + 1 == self.attempts:
                    hint = _HINTS.get(type(error).__name__, "")
                    raise DataError(f"cannot read {what}: {why} ({self.attempts} attempts)", hint=hint) from None
                wait_s = self.first_s * 2**attempt * (1 - self.chance() / 2)
                events.emit("store.retried", what=what, why=why, wait_s=wait_s)
                self.sleep(wait_s)
        raise AssertionError("attempts is at least 1")


@dataclass(frozen=True, slots=True)
class Store:
    fs: Any = field(repr=False)
    patience: Patience = field(default_factory=Patience)
    cache: BlockCache | None = field(default=None, repr=False)
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An object. `key` is its name in the store."""

    uri: str
    key: str = field(repr=False)
    stamp: Stamp
    store: Store = field(repr=False)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def path(self) -> Path | None:
        return None

    def open(self, *, little: bool = False) -> AbstractContextManager[BinaryIO]:
        small = min(_LITTLE_BYTES, self.store.block_bytes)
        file = replace(self, store=replace(self.store, block_bytes=small)) if little else self
        return cast(BinaryIO, io.BufferedReader(_Ranged(file), buffer_size=1 << 16))

    def check(self) -> None:
        """Blocks are checked as they are fetched; those that are here are of the listed content."""

    def block(self, index: int) -> memoryview:
        fetch = partial(self._fetched, index)
        if self.store.cache is None:
            return memoryview(fetch())
        return self.store.cache.get(f"{self.uri}|{self.stamp}|{self.store.block_bytes}", index, fetch)

    def _fetched(self, index: int) -> bytes:
        start = index * self.store.block_bytes
        stop = min(start + self.store.block_bytes, self.stamp.size)
        return self.store.patience.ask(partial(self._range, start, stop), self.uri)

    def _range(self, start: int, stop: int) -> bytes:
        try:
            data = bytes(self.store.fs.cat_file(self.key, start=start, end=stop))
        except _REFUSED:
            raise
        except Exception:
            self._check_stamp()  # rclone answers for an object that was written again with the sum of the first
            raise
        self._check_stamp()
        if len(data) != stop - start:
            raise EOFError(f"{len(data)} bytes came of {start} to {stop}")
        return data

    def _check_stamp(self) -> None:
        if _stamp(_info(self.store.fs, self.key)) != self.stamp:
            raise DataError(
                f"{self.uri} was changed while it was in use",
                hint="write new records to a new object, then start again",
            )


class _Ranged(io.RawIOBase):
    """A seekable reader over the blocks of an object."""

    def __init__(self, file: StoredFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.stamp.size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        size, block_bytes = self._file.stamp.size, self._file.store.block_bytes
        done = 0
        while done < len(target) and self._at < size:
            index, skip = divmod(self._at, block_bytes)
            piece = self._file.block(index)[skip : skip + len(target) - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done


def list_store(uri: str, suffixes: Sequence[str], *, store: Store | None = None) -> list[File]:
    """The objects of `uri`: one, those that match a pattern, or those below a folder. Raises DataError."""
    fs, root = opened(uri)
    store = store or Store(fs, Patience(), _shared_cache())
    scheme = urlsplit(uri).scheme
    where = shown(uri)
    pattern = any(sign in root for sign in "*?[")
    top = root.split("*")[0].split("?")[0].split("[")[0].rpartition("/")[0] if pattern else root
    infos = store.patience.ask(lambda: _found(fs, top), where)
    if pattern:
        chosen = {key: one for key, one in infos.items() if fnmatch.fnmatchcase(key, root)}
    elif list(infos) == [root]:
        chosen = infos
    else:
        chosen = {key: one for key, one in infos.items() if key.endswith(tuple(suffixes)) and visible(key)}
    if not chosen:
        kind = f"folder has no {listed(suffixes)} files" if infos and not pattern else "object does not exist"
        raise DataError(f"no records at '{where}': the {kind}", hint="look at the name, and at the credentials")
    host = f"{scheme}://"
    return [StoredFile(shown(host + key.lstrip("/")), key, _stamp(one), store) for key, one in sorted(chosen.items())]


def opened(uri: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(uri)
    except (ImportError, ValueError) as error:
        scheme = urlsplit(uri).scheme
        hint = f"pip install 'trueline[{scheme}]'" if scheme in ("s3", "gcs") else "see fsspec's list of stores"
        raise DataError(f"cannot open '{shown(uri)}': {redacted(str(error))}", hint=hint) from None
    return fs, str(root)


@lru_cache(maxsize=1)
def _shared_cache() -> BlockCache:
    given = os.environ.get(CACHE_BYTES, str(_DEFAULT_CACHE_BYTES))
    if not given.isdigit():
        raise DataError(f"{CACHE_BYTES} is '{given}', expected a number of bytes")
    return BlockCache(cache_folder() / "blocks", int(given))


def _found(fs: Any, top: str) -> dict[str, dict[str, Any]]:
    """fsspec says nothing of an object that is searched for by its own name."""
    fs.invalidate_cache(top)
    return {key: info if "size" in info else fs.info(key) for key, info in fs.find(top, detail=True).items()}


def _info(fs: Any, key: str) -> dict[str, Any]:
    fs.invalidate_cache(key.rpartition("/")[0])
    found: dict[str, Any] = fs.info(key)
    return found


def _stamp(info: dict[str, Any]) -> Stamp:
    """By the first that the store knows: listings and single objects give times in different forms."""
    names = (
        "ETag",
        "etag",
        "md5Hash",
        "content_md5",
        "generation",
        "LastModified",
        "last_modified",
        "mtime",
        "created",
    )
    version = next((info[name] for name in names if info.get(name)), "")
    if isinstance(version, datetime):
        version = version.timestamp()
    return Stamp(int(info["size"]), str(version).strip('"'))


def _refused(what: str, error: OSError) -> DataError:
    if isinstance(error, PermissionError):
        return DataError(
            f"no right to read {what}: {redacted(str(error))}", hint="the credentials may have expired; renew them"
        )
    return DataError(f"cannot read {what}: {type(error).__name__}: {redacted(str(error))}")


def shown(uri: str) -> str:
    """
    >>> shown("s3://id:secret@bucket/day.parquet?X-Amz-Signature=abc")
    's3://bucket/day.parquet'
    """
    glob = "*" in uri or "[" in uri
    return _USER.sub(r"\1", uri if glob else uri.partition("?")[0])


def redacted(text: str) -> str:
    """
    >>> redacted("403 for https://id:pw@host/x?X-Amz-Signature=abc&n=1")
    '403 for https://host/x?X-Amz-Signature=***&n=1'
    """
    return _SECRET.sub(r"\1\2***", _USER.sub(r"\1", text))
