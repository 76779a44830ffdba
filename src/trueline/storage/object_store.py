"""Object stores through fsspec: retries, stamps, and messages without secrets.

Transient errors are retried with growing waits; a missing object or a missing right is not. URIs are shown without
user, password and query, and a store's errors without keys and tokens: credentials come from the store's own
environment or from fsspec's configuration (`FSSPEC_S3_KEY`, ...).
"""

import os
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from threading import Lock
from typing import Any, TypeVar
from urllib.parse import urlsplit

from trueline import events
from trueline.errors import DataError
from trueline.storage.cache import BlockCache
from trueline.storage.location import Stamp

Item = TypeVar("Item")
Result = TypeVar("Result")

AT_ONCE = 64
"""Requests to a store: each takes some hundredths of a second, however many are under way."""
BLOCK_BYTES = 4 << 20
REFUSED = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
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
_VERSIONS = (
    "ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "last_modified", "mtime", "created",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Waits between attempts double from `first_s`, each shortened at random by up to half."""

    attempts: int = 6
    first_s: float = 0.2
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random

    def call(self, request: Callable[[], Result], what: str) -> Result:
        """`request()`. Raises DataError when it is refused, or has failed `attempts` times."""
        for attempt in range(self.attempts):
            try:
                return request()
            except REFUSED as error:
                raise _access_error(what, error) from None
            except DataError:
                raise
            except Exception as error:  # noqa: BLE001 - the library of each store has exceptions of its own
                if type(error).__name__ in _NO_CREDENTIALS:
                    raise _access_error(what, PermissionError(str(error))) from None
                why = describe_error(error)
                if attempt + 1 == self.attempts:
                    hint = _HINTS.get(type(error).__name__, "")
                    raise DataError(f"cannot read {what}: {why} ({self.attempts} attempts)", hint=hint) from None
                wait_s = self.first_s * 2**attempt * (1 - self.chance() / 2)
                events.emit("store.retried", what=what, why=why, wait_s=wait_s)
                self.sleep(wait_s)
        raise AssertionError("attempts is at least 1")


def start_all(
    call: Callable[[Item], Result], items: Iterable[Item], *, at_once: int = AT_ONCE
) -> Iterator[Callable[[], Result]]:
    """For each of `items`, in order, a function that returns `call(item)` or raises its error. At most `4 * at_once`
    items are taken ahead. The threads end with the call, so a process may fork between two calls."""
    threads = ThreadPoolExecutor(at_once, thread_name_prefix="store")
    try:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(threads.submit(call, item))
            if len(waiting) == 4 * at_once:
                yield waiting.popleft().result
        while waiting:
            yield waiting.popleft().result
    except BaseException:  # the caller stops early
        threads.shutdown(cancel_futures=True)
        raise
    threads.shutdown()


def map_concurrently(call: Callable[[Item], Result], items: Iterable[Item], *, at_once: int = AT_ONCE) -> list[Result]:
    """`call` of each of `items`, in order. Raises the first item's error that failed."""
    return [result() for result in start_all(call, items, at_once=at_once)]


class ObjectStore:
    """A store with connections of this process: a fork opens its own."""

    def __init__(
        self, fs: Any, retry: RetryPolicy | None = None, cache: BlockCache | None = None, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.retry, self.cache, self.block_bytes = retry or RetryPolicy(), cache, block_bytes
        self._opened = [(os.getpid(), fs)]
        """By process; the parent's stays, since to drop it is to close its connections."""
        self._lock = Lock()

    @property
    def fs(self) -> Any:
        pid, fs = self._opened[-1]
        if pid == os.getpid():
            return fs
        with self._lock:
            pid, fs = self._opened[-1]
            if pid != os.getpid():
                fs = type(fs)(*fs.storage_args, **fs.storage_options)
                self._opened.append((os.getpid(), fs))
        return fs


@dataclass(frozen=True, slots=True)
class ListedPrefix:
    """Where objects were listed: `uri` for messages, `top` as the store calls it."""

    uri: str
    top: str
    num_listed: int


def open_store(uri: str) -> tuple[Any, str]:
    """fsspec's file system of a URI, and its path there. Raises DataError."""
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(uri)
    except (ImportError, ValueError) as error:
        scheme = urlsplit(uri).scheme
        hint = f"pip install 'trueline[{scheme}]'" if scheme in ("s3", "gcs") else "see fsspec's list of stores"
        raise DataError(f"cannot open '{redact_uri(uri)}': {redact_text(str(error))}", hint=hint) from None
    return fs, str(root)


def find_objects(fs: Any, top: str) -> dict[str, dict[str, Any]]:
    """The store's facts on every object below `top`, or on the object `top`, on which fsspec's `find` has none."""
    fs.invalidate_cache(top)
    return {key: info if "size" in info else fs.info(key) for key, info in fs.find(top, detail=True).items()}


def get_info(fs: Any, key: str) -> dict[str, Any]:
    """The store's facts on one object now."""
    fs.invalidate_cache(key.rpartition("/")[0])
    return dict(fs.info(key))


def stamp_of(info: dict[str, Any]) -> Stamp:
    """From the first version field that the store has: times differ in form between listings and single objects."""
    version = next((info[name] for name in _VERSIONS if info.get(name)), "")
    if isinstance(version, datetime):
        version = version.timestamp()
    return Stamp(int(info["size"]), str(version).strip('"'))


def _access_error(what: str, error: OSError) -> DataError:
    if isinstance(error, PermissionError):
        return DataError(
            f"no right to read {what}: {redact_text(str(error))}", hint="the credentials may have expired; renew them"
        )
    return DataError(f"cannot read {what}: {describe_error(error)}")


def describe_error(error: Exception) -> str:
    return redact_text(f"{type(error).__name__}: {error}")


def redact_uri(uri: str) -> str:
    """
    >>> redact_uri("s3://id:secret@bucket/day.parquet?X-Amz-Signature=abc")
    's3://bucket/day.parquet'
    """
    return _USER.sub(r"\1", uri if "*" in uri or "[" in uri else uri.partition("?")[0])


def redact_text(text: str) -> str:
    """
    >>> redact_text("403 for https://id:pw@host/x?X-Amz-Signature=abc&n=1")
    '403 for https://host/x?X-Amz-Signature=***&n=1'
    """
    return _SECRET.sub(r"\1\2***", _USER.sub(r"\1", text))
