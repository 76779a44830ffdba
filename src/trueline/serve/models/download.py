"""A bundle in an object store, brought here once: `s3://bucket/digits.tlb`, `gs://bucket/digits.bundle#sha256:…`.

A packed file or a folder, at any URL that fsspec reads. What arrives is opened with every check of a bundle on this
disk, and kept in the user's cache under its digest. `#sha256:DIGEST` says which bundle it has to be, so that a store
where others write cannot exchange it. Knows no client: only the operator names URLs.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline import files
from trueline.bundle import schema, signing
from trueline.bundle.read import Bundle, open_folder
from trueline.bundle.unpack import unpack
from trueline.errors import BundleError, UsageError
from trueline.storage.checkpoint_store import translate_errors

if TYPE_CHECKING:
    from trueline.bundle.schema import BundleManifest

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_url(source: str) -> bool:
    """Whether `source` lies in a store.

    >>> is_url("s3://bucket/digits.tlb"), is_url("models:/digits@champion"), is_url("/srv/digits.bundle")
    (True, False, False)
    """
    return bool(_URL.match(source))


def parted(source: str) -> tuple[str, str | None]:
    """The URL, and the digest that it has to have. Raises UsageError.

    >>> parted("s3://bucket/digits.tlb")
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


def fetched(source: str, cache: Path) -> Bundle:
    """The bundle at `source`, verified, from `cache` when it is there. Blocks.

    Raises UsageError, StorageError when the store does not answer, BundleError when it holds another bundle or none.
    """
    import fsspec

    url, digest = parted(source)
    known = cache / digest if digest is not None else None
    if known is not None and known.is_dir():
        return _opened(known)
    with translate_errors(url, "opening"):
        fs, root = fsspec.url_to_fs(url)
        folder = not fs.isfile(root)
        if folder and not fs.isfile(f"{root}/{schema.MANIFEST}"):
            raise BundleError(f"there is no bundle at {url}", hint="it is a packed file, or a folder with bundle.json")
    cache.mkdir(parents=True, exist_ok=True)
    found = _folder(fs, str(root), url, cache) if folder else _packed(fs, str(root), url, cache)
    if digest is not None and found.digest != digest:
        raise BundleError(
            f"{url} holds the bundle of digest {found.digest[:12]}, asked for was {digest[:12]}",
            hint="the stored bundle was exchanged; upload the right one, or name the new digest",
        )
    return found


def signature(source: str) -> str | None:
    """What vouches for the bundle at `source`: what lies there as its name and `.sig`; None when nothing does. Blocks.

    Raises UsageError, StorageError.
    """
    import fsspec

    place = f"{parted(source)[0].rstrip('/')}{signing.SUFFIX}"
    with translate_errors(place, "reading"):
        fs, root = fsspec.url_to_fs(place)
        if not fs.isfile(root):
            return None
        found: bytes = fs.cat_file(root, start=0, end=signing.MAX_BYTES)
    return found.decode("ascii", "replace")


def _packed(fs: Any, root: str, url: str, cache: Path) -> Bundle:
    with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=cache) as scratch:
        file = Path(scratch, "packed.tlb")
        with translate_errors(url, "reading"):
            fs.get_file(root, str(file))
        bundle = open_folder(unpack(file, Path(scratch, "bundle")))
        return _kept(bundle, cache)


def _folder(fs: Any, root: str, url: str, cache: Path) -> Bundle:
    manifest = _manifest(fs, root, url)
    known = cache / manifest.digest
    if known.is_dir():
        return _opened(known)
    with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=cache) as scratch:
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
        return _kept(open_folder(folder), cache)


def _manifest(fs: Any, root: str, url: str) -> BundleManifest:
    path = f"{root}/{schema.MANIFEST}"
    with translate_errors(url, f"reading {schema.MANIFEST} of"):
        if fs.size(path) > schema.MANIFEST_BYTES:
            raise BundleError(f"{url}/{schema.MANIFEST} has more than {schema.MANIFEST_BYTES} bytes")
        text: bytes = fs.cat_file(path)
    return schema.decode(text, f"{url}/{schema.MANIFEST}")


def _kept(bundle: Bundle, cache: Path) -> Bundle:
    """`bundle` under its digest in `cache`; another process may have been faster, with the same bytes."""
    target = cache / bundle.digest
    try:
        bundle.path.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise files.storage_error(error, target) from error
    return _opened(target)


def _opened(folder: Path) -> Bundle:
    """What lies in the cache, verified; what was damaged there is removed, so that the next try brings it again."""
    try:
        return open_folder(folder)
    except BundleError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
