"""Files in object stores: every store that fsspec can reach, in ranges, through the machine's block cache.

Here is how a URI is opened and listed; what is asked how often is in `store`, and how an object is read in `blocks`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any
from urllib.parse import urlsplit

from trueline.errors import DataError, join_names
from trueline.storage.block_cache import BlockCache
from trueline.storage.blocks import StoredFile
from trueline.storage.completeness import check_complete
from trueline.storage.file import File, is_visible
from trueline.storage.object_store import (
    ListedPrefix,
    ObjectStore,
    RetryPolicy,
    find_objects,
    redact_text,
    redact_uri,
    stamp_of,
)
from trueline.storage.offset_index import cache_folder

CACHE_BYTES = "TRUELINE_CACHE_BYTES"
_DEFAULT_CACHE_BYTES = 20 << 30


def list_store(
    uri: str, suffixes: Sequence[str], *, store: ObjectStore | None = None, complete: bool = False
) -> list[File]:
    """The objects of `uri`: one, those that match a pattern, or those below a folder. Raises DataError, if `whole` also
    for a folder that was written in part."""
    fs, root = open_store(uri)
    store = store or ObjectStore(fs, RetryPolicy(), _shared_cache())
    scheme = urlsplit(uri).scheme
    where = redact_uri(uri)
    pattern = any(sign in root for sign in "*?[")
    top = root.split("*")[0].split("?")[0].split("[")[0].rpartition("/")[0] if pattern else root
    infos = store.retry.call(partial(find_objects, store.fs, top), where)
    if complete and not pattern:
        below = root.rstrip("/") + "/"
        names = [key.removeprefix(below) for key in infos]
        check_complete(where, names, lambda name: store.retry.call(partial(store.fs.cat_file, below + name), where))
    if pattern:
        chosen = {key: one for key, one in infos.items() if fnmatch.fnmatchcase(key, root)}
    elif list(infos) == [root]:
        chosen = infos
    else:
        chosen = {key: one for key, one in infos.items() if key.endswith(tuple(suffixes)) and is_visible(key)}
    if not chosen:
        kind = f"folder has no {join_names(suffixes)} files" if infos and not pattern else "object does not exist"
        raise DataError(f"no records at '{where}': the {kind}", hint="look at the name, and at the credentials")
    host, place = f"{scheme}://", ListedPrefix(where, top, len(infos))
    return [
        StoredFile(redact_uri(host + key.lstrip("/")), key, stamp_of(one), store, place)
        for key, one in sorted(chosen.items())
    ]


def open_store(uri: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(uri)
    except (ImportError, ValueError) as error:
        scheme = urlsplit(uri).scheme
        hint = f"pip install 'trueline[{scheme}]'" if scheme in ("s3", "gcs") else "see fsspec's list of stores"
        raise DataError(f"cannot open '{redact_uri(uri)}': {redact_text(str(error))}", hint=hint) from None
    return fs, str(root)


@lru_cache(maxsize=1)
def _shared_cache() -> BlockCache:
    given = os.environ.get(CACHE_BYTES, str(_DEFAULT_CACHE_BYTES))
    if not given.isdigit():
        raise DataError(f"{CACHE_BYTES} is '{given}', expected a number of bytes")
    return BlockCache(cache_folder() / "blocks", int(given))
