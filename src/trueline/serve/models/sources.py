"""The model store, and what a source resolves to: a path, a URL, a name in the registry, an entry of the store.

Clients may load bundles and archives of the store by name: `NAME.bundle` and `NAME.tlb` are version 1 of NAME,
`NAME/VERSION.bundle` is another version; archives have the names of their manifests. Clients never name paths: `..`,
absolute paths and links that leave the store are rejected (compare CVE-2024-35198). Other sources are for operators.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from trueline import events, files
from trueline.bundle import schema, signing
from trueline.errors import NotFound, RegistryError, RequestError, ServerFault, rebuild_error
from trueline.serve.models.downloads import (
    AllowedUrls,
    AlreadyStored,
    DownloadFailed,
    NotAllowed,
    download,
    file_of,
    is_http,
)
from trueline.serve.models.fetch import fetch, signature_of
from trueline.serve.models.loader import ResolvedSource
from trueline.serve.settings import ServeSettings
from trueline.storage.object_store import redact_uri

_RESOLVE_S = 300.0
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")

T = TypeVar("T")
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class NotInStore(NotFound):
    torchserve_type = "ModelNotFoundException"


class OutsideStore(NotInStore):
    """The name of an entry would leave the store."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A bundle or an archive; clients name it by `source`."""

    model: str
    version: str
    source: str
    path: Path


def check_name(what: str, name: str) -> str:
    """`name`, if it is a valid name of a model or a version. Raises RequestError."""
    if not NAME.fullmatch(name):
        raise RequestError(
            f"{what} '{name[:64]}' is no name here: letters, digits and . _ - go, at most 128, not a dot first"
        )
    return name


class Store:
    def __init__(self, folder: Path, name_of: Callable[[Path], tuple[str, str] | None] = lambda _: None) -> None:
        """`name_of`: model and version of an archive; None for other files."""
        self.folder = folder.resolve()
        self._name_of = name_of

    def find(self, source: str) -> Path:
        """The path of the entry `source`. Raises NotInStore, OutsideStore; ServerFault when the store is away."""
        parts = source.split("/")
        named = len(parts) <= 2 and all(map(NAME.fullmatch, parts))
        path = _follow(self.folder / source) if named else None
        if path is None or not path.is_relative_to(self.folder):
            raise OutsideStore(f"Relative path is not allowed in url: {source[:128]}")
        if not path.is_file() and not path.is_dir():
            if not self.folder.is_dir():
                raise ServerFault(
                    "the model store of this server is away", hint="send the request again when it is back"
                )
            raise NotInStore(f"Model not found at: {source[:128]}")
        return path

    def entries(self) -> list[Entry]:
        """All bundles and archives that can be read. Raises OSError when the store itself cannot be listed."""
        found: list[Entry] = []
        for path in sorted(self._visible(self.folder)):
            try:
                found += self._entries_at(path)
            except OSError as error:  # one unreadable entry hides no other
                events.emit("store.unreadable", entry=path.name, why=str(error))
        return found

    def _entries_at(self, path: Path) -> list[Entry]:
        if not path.is_dir() and not path.is_file():  # reading a pipe would never end; a loop of links is nothing
            events.emit("store.unreadable", entry=path.name, why="it is neither a file nor a folder")
            return []
        if _is_bundle(path):
            return [Entry(_stem(path), "1", path.name, path)]
        if (name := self._name_of(path)) is not None:
            return [Entry(*name, path.name, path)]
        if not path.is_dir():
            return []
        inner = sorted(one for one in self._visible(path) if one.is_dir() or one.is_file())
        found = [Entry(path.name, _stem(one), f"{path.name}/{one.name}", one) for one in inner if _is_bundle(one)]
        named = [(self._name_of(one), one) for one in inner]
        return found + [Entry(*name, f"{path.name}/{one.name}", one) for name, one in named if name is not None]

    def of(self, model: str) -> list[Entry]:
        """The versions of one model, the newest last: by number if all are numbers, else by name."""
        found = [entry for entry in self.entries() if entry.model == model]
        numbered = all(entry.version.isdecimal() for entry in found)
        return sorted(found, key=lambda entry: int(entry.version) if numbered else entry.version)

    def _visible(self, folder: Path) -> list[Path]:
        return [
            path for path in folder.iterdir() if NAME.fullmatch(path.name) and _follow(path).is_relative_to(self.folder)
        ]


def _follow(path: Path) -> Path:
    """Where the links of `path` lead; the link itself for a loop of links, for which Path.resolve raises."""
    return Path(os.path.realpath(path))


def _stem(path: Path) -> str:
    return path.name.removesuffix(".tlb").removesuffix(".bundle")


def _is_bundle(path: Path) -> bool:
    """A sealed folder, or a packed file."""
    return (path / schema.MANIFEST).is_file() if path.is_dir() else path.name.endswith((".bundle", ".tlb"))


def resolve(source: str, tracking_uri: str | None, *, signed: bool = False) -> ResolvedSource:
    """The bundle of a path, a URL, or a registry's name; `signed`: with its signature. Blocks.

    A child process reads the registry, whose client is heavy. Raises RegistryError, BundleError, StorageError,
    UsageError.
    """
    if is_url(source):
        bundle = fetch(source, files.user_cache() / "served")
        signature = signature_of(source) if signed else None
        return ResolvedSource(path=bundle.path, digest=bundle.digest, signature=signature)
    if not source.startswith("models:/"):
        return ResolvedSource(path=Path(source))
    command = [sys.executable, "-P", "-m", "trueline.registry", "resolve", source]
    if tracking_uri is not None:
        command += ["--tracking-uri", tracking_uri]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RESOLVE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RegistryError(f"the registry did not resolve {source} within {_RESOLVE_S:g} s") from error
    try:
        reply = json.loads(done.stdout.strip().splitlines()[-1])
        if done.returncode:
            raise rebuild_error(reply["error"], reply)
        return ResolvedSource.from_registry(reply)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        lines = done.stderr.strip().splitlines()
        last = f"; its last line: {lines[-1]}" if lines else ""
        raise RegistryError(
            f"the registry's answer for {source} is not understood (exit code {done.returncode}){last}"
        ) from error


class Sources:
    def __init__(self, settings: ServeSettings, store: Store | None, loop: asyncio.AbstractEventLoop) -> None:
        self._uri = settings.tracking_uri
        self._signed = settings.trusted_keys is not None
        self._allowed, self._strict = AllowedUrls.parse(settings.allowed_urls), settings.torchserve_strict
        self._registry = settings.tracking_uri is not None or (settings.source or "").startswith("models:/")
        self._store, self._loop = store, loop

    async def find(self, source: str) -> ResolvedSource:
        """For operators: a path, a URL, a registry URI, or an entry of the store."""
        if self._allowed.allows(source) and (kept := find_download(self._store, source)) is not None:
            return ResolvedSource(path=kept)
        if self._store is not None and not source.startswith(("/", "models:/")) and not is_url(source):
            return ResolvedSource(path=self._store.find(source))
        return await in_thread(self._loop, lambda: resolve(source, self._uri, signed=self._signed))

    async def find_allowed(self, url: str) -> ResolvedSource:
        """For clients. Raises NotFound for what they may not load."""
        if url.startswith("models:/") and self._registry:
            return await in_thread(self._loop, lambda: resolve(url, self._uri, signed=self._signed))
        if self._store is None or (":" in url and not is_http(url)):
            raise NotAllowed(url)
        if is_http(url):
            return ResolvedSource(path=await self.download(url, self._store))
        return ResolvedSource(path=self._store.find(url))

    async def download(self, url: str, store: Store) -> Path:
        """The new file of `store` with what is at `url`.

        Raises NotFound, AlreadyStored, DownloadFailed, StorageError.
        """
        any_address = self._strict and not self._allowed.patterns  # TorchServe's default
        if not any_address and ".." not in url and not self._allowed.allows(url):
            raise NotAllowed(url)
        name, suffix = file_of(url), signing.SUFFIX
        if any_address:
            if (store.folder / name).exists():
                raise AlreadyStored(name)
            raise DownloadFailed(f"Failed to download archive from: {redact_uri(url)[:128]}", hint="see --allowed-urls")

        def work() -> Path:
            path = download(url, name, store.folder, self._allowed)
            if self._signed:
                with contextlib.suppress(DownloadFailed):  # an unsigned archive is refused later
                    parts = urlsplit(url)
                    signed = urlunsplit(parts._replace(path=parts.path + suffix))
                    download(signed, name + suffix, store.folder, self._allowed, max_bytes=signing.MAX_BYTES)
            return path

        return await in_thread(self._loop, work)

    def forget(self, url: str) -> None:
        """Deletes what was downloaded from `url`; nothing is served from it any more."""
        if self._allowed.allows(url):
            forget(self._store, url)


def find_download(store: Store | None, source: str) -> Path | None:
    """The file of `store` that was downloaded from the address `source`, if there is one."""
    if store is None or not is_http(source):
        return None
    try:
        path = store.folder / file_of(source)
    except RequestError:
        return None
    return path if path.is_file() else None


def forget(store: Store | None, source: str) -> None:
    """Deletes what was downloaded from `source`, when nothing is served from it any more, as TorchServe does."""
    path = find_download(store, source)
    if path is not None:
        for file in (path, path.with_name(path.name + signing.SUFFIX)):
            file.unlink(missing_ok=True)


def in_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work` in a daemon thread, so that a stopping server does not wait for a load."""
    answer: asyncio.Future[T] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        if not answer.done():
            act()

    def body() -> None:
        try:
            made = work()
            act = partial(answer.set_result, made)
        except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
            act = partial(answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, act)

    threading.Thread(target=body, name="load", daemon=True).start()
    return answer


# downloads


def is_url(source: str) -> bool:
    """Whether `source` is in an object store.

    >>> is_url("s3://bucket/digits.tlb"), is_url("models:/digits@champion"), is_url("/srv/digits.bundle")
    (True, False, False)
    """
    return bool(_URL.match(source))
