"""Fetches a bundle from a URL: a packed file or folder in a store that fsspec reads, `s3://bucket/digits.tlb#sha256:…`.

It is downloaded, verified and kept in the user's cache under its digest; `#sha256:DIGEST` protects against one that
was replaced in the store or in the cache.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline import files
from trueline.bundle import schema, signing
from trueline.bundle.read import Bundle, open_folder, unpack
from trueline.errors import BundleError, UsageError
from trueline.storage.checkpoint_store import translate_errors

if TYPE_CHECKING:
    from trueline.bundle.schema import BundleManifest

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def split_digest(source: str) -> tuple[str, str | None]:
    """The URL and the required digest. Raises UsageError.

    >>> split_digest("s3://bucket/digits.tlb")
    ('s3://bucket/digits.tlb', None)
    """
    url, mark, digest = source.partition("#")
    if not mark:
        return url, None
    found = _DIGEST.fullmatch(digest)
    if found is None:
        raise UsageError(
            f"'{digest[:80]}' after # is no digest of a bundle",
            hint="write #sha256: and the 64 hexadecimal digits that `trueline bundle inspect` shows",
        )
    return url, found[1]


def fetch(source: str, cache: Path) -> Bundle:
    """The verified bundle at `source`, from `cache` if possible. Raises UsageError, StorageError, BundleError."""
    import fsspec

    url, digest = split_digest(source)
    known = cache / digest if digest is not None else None
    if known is not None and known.is_dir():
        with contextlib.suppress(BundleError):  # damaged or another one: it is downloaded again
            return _open(known)
    with translate_errors(url, "opening"):
        fs, root = fsspec.url_to_fs(url)
        folder = not fs.isfile(root)
        if folder and not fs.isfile(f"{root}/{schema.MANIFEST}"):
            raise BundleError(f"there is no bundle at {url}", hint="it is a packed file, or a folder with bundle.json")
    cache.mkdir(parents=True, exist_ok=True)
    files.sweep_temporary(cache)  # what a killed server had begun to download
    if folder:
        found = _fetch_folder(fs, str(root), url, cache)
    else:
        with files.TemporaryFolder("download", cache) as scratch:
            file = Path(scratch, "packed.tlb")
            with translate_errors(url, "reading"):
                fs.get_file(str(root), str(file))
            found = _keep(open_folder(unpack(file, Path(scratch, "bundle"))), cache)
    if digest is not None and found.digest != digest:
        raise BundleError(
            f"{url} holds the bundle of digest {found.digest[:12]}, expected {digest[:12]}",
            hint="the stored bundle was replaced; upload the right one, or name the new digest",
        )
    return found


def signature_of(source: str) -> str | None:
    """The signature file beside the bundle at `source`, if there is one. Raises UsageError, StorageError."""
    import fsspec

    place = f"{split_digest(source)[0].rstrip('/')}{signing.SUFFIX}"
    with translate_errors(place, "reading"):
        fs, root = fsspec.url_to_fs(place)
        if not fs.isfile(root):
            return None
        found: bytes = fs.cat_file(root, start=0, end=signing.MAX_BYTES)
    return found.decode("ascii", "replace")


def _fetch_folder(fs: Any, root: str, url: str, cache: Path) -> Bundle:
    manifest = _manifest(fs, root, url)
    known = cache / manifest.digest
    if known.is_dir():
        with contextlib.suppress(BundleError):
            return _open(known)
    with files.TemporaryFolder("download", cache) as scratch:
        folder = Path(scratch, "bundle")
        for name, entry in manifest.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with translate_errors(url, f"reading {name} of"):
                size = fs.size(f"{root}/{name}")
                if size != entry.size:
                    raise BundleError(f"{url}/{name} has {size} bytes, sealed were {entry.size}", hint=schema.AGAIN)
                fs.get_file(f"{root}/{name}", str(target))
        (folder / schema.MANIFEST).write_bytes(schema.encode(manifest))
        return _keep(open_folder(folder), cache)


def _manifest(fs: Any, root: str, url: str) -> BundleManifest:
    path = f"{root}/{schema.MANIFEST}"
    with translate_errors(url, f"reading {schema.MANIFEST} of"):
        if fs.size(path) > schema.MANIFEST_BYTES:
            raise BundleError(f"{url}/{schema.MANIFEST} has more than {schema.MANIFEST_BYTES} bytes")
        text: bytes = fs.cat_file(path)
    return schema.decode(text, f"{url}/{schema.MANIFEST}")


def _keep(bundle: Bundle, cache: Path) -> Bundle:
    """Moves `bundle` to its digest in `cache`, where another process may have put the same bytes meanwhile."""
    target = cache / bundle.digest
    try:
        bundle.path.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise files.storage_error(error, target) from error
    return _open(target)


def _open(folder: Path) -> Bundle:
    """The bundle in the cache whose digest is the name of its folder; deletes one that is damaged or another.

    Raises BundleError.
    """
    try:
        found = open_folder(folder)
        if found.digest != folder.name:
            raise BundleError(f"{folder} holds the bundle of digest {found.digest[:12]}", hint="download it again")
        return found
    except BundleError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
