"""The files that URIs name, in a fixed order, each with the stamp of its content: local ones and objects of a store.

No content is read. A file that is named twice is refused, since its records would be trained twice, and so is a folder
that `data/tools/writer.py` has written in part.
"""

import fnmatch
import glob
import json
import os
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from trueline.errors import DataError, join_names
from trueline.storage import object_store
from trueline.storage.blocks import StoredFile
from trueline.storage.cache import BlockCache, cache_folder
from trueline.storage.location import File, LocalFile, Uri, is_remote, local_path
from trueline.storage.object_store import ListedPrefix, ObjectStore, map_concurrently, redact_uri

COMMIT, PLAN = "_commit.json", "_plan.json"
CACHE_BYTES = "TRUELINE_CACHE_BYTES"


def list_files(uris: Sequence[Uri], suffixes: Sequence[str], *, complete: bool = True) -> list[File]:
    """The files of `uris` in the order given: paths, globs, folders (files that end in one of `suffixes`, by name).

    A file that is named outright is taken whatever its ending. Raises DataError for what does not exist, for a folder
    without such files, for a file that is named twice and, if `complete`, for a folder that was written in part.
    """
    list_one = partial(_list_one, suffixes, complete)
    listings = map_concurrently(list_one, uris) if any(map(is_remote, uris)) else map(list_one, uris)
    files: dict[str, File] = {}
    for file in chain.from_iterable(listings):
        identity = os.path.realpath(file.path) if file.path else file.uri
        if files.setdefault(identity, file) is not file:
            raise DataError(
                f"{file.uri} is given twice", hint="name each file once; its records would be trained twice"
            )
    return list(files.values())


def is_visible(path: str) -> bool:
    """False for files that a writer left for itself (`_SUCCESS`, `.crc`) and that hold no records."""
    return not path.rpartition("/")[2].startswith((".", "_"))


def _list_one(suffixes: Sequence[str], complete: bool, uri: Uri) -> list[File]:
    if is_remote(uri):
        return list_store(os.fspath(uri), suffixes, complete=complete)
    path = local_path(uri)
    if complete and (path / PLAN).exists():
        _check_complete(str(uri), os.listdir(path), lambda name: (path / name).read_bytes())
    if path.is_dir():
        paths = sorted(
            file for file in path.rglob("*") if file.suffix in suffixes and is_visible(file.name) and file.is_file()
        )
    elif path.exists():
        paths = [path]
    else:
        paths = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    if not paths:
        kind = f"folder has no {join_names(suffixes)} files" if path.is_dir() else "file does not exist"
        raise DataError(
            f"no records at '{uri}': the {kind}",
            hint="paths are relative to the recipe's folder, or to the current one",
        )
    return [LocalFile.at(path) for path in paths]


def list_store(
    uri: str, suffixes: Sequence[str], *, store: ObjectStore | None = None, complete: bool = False
) -> list[File]:
    """The objects of `uri`: one, those that match a pattern, or those below a folder. Raises DataError."""
    fs, root = object_store.open_store(uri)
    store = store or ObjectStore(fs, object_store.RetryPolicy(), _shared_cache())
    shown = redact_uri(uri)
    pattern = any(sign in root for sign in "*?[")
    top = root.split("*")[0].split("?")[0].split("[")[0].rpartition("/")[0] if pattern else root
    infos = store.retry.call(partial(object_store.find_objects, store.fs, top), shown)
    if complete and not pattern:
        below = root.rstrip("/") + "/"
        names = [key.removeprefix(below) for key in infos]
        _check_complete(shown, names, lambda name: store.retry.call(partial(store.fs.cat_file, below + name), shown))
    if pattern:
        chosen = {key: info for key, info in infos.items() if fnmatch.fnmatchcase(key, root)}
    elif list(infos) == [root]:
        chosen = infos
    else:
        chosen = {key: info for key, info in infos.items() if key.endswith(tuple(suffixes)) and is_visible(key)}
    if not chosen:
        kind = f"folder has no {join_names(suffixes)} files" if infos and not pattern else "object does not exist"
        raise DataError(f"no records at '{shown}': the {kind}", hint="look at the name, and at the credentials")
    host, prefix = f"{urlsplit(uri).scheme}://", ListedPrefix(shown, top, len(infos))
    return [
        StoredFile(redact_uri(host + key.lstrip("/")), key, object_store.stamp_of(info), store, prefix)
        for key, info in sorted(chosen.items())
    ]


@lru_cache(maxsize=1)
def _shared_cache() -> BlockCache:
    max_bytes = os.environ.get(CACHE_BYTES, str(20 << 30))
    if not max_bytes.isdigit():
        raise DataError(f"{CACHE_BYTES} is '{max_bytes}', expected a number of bytes")
    return BlockCache(cache_folder() / "blocks", int(max_bytes))


def _check_complete(folder: str, names: Collection[str], read: Callable[[str], bytes]) -> None:
    """Raises DataError when `folder`, which holds `names` that `read` returns, lacks a part of its plan."""
    if PLAN not in names:
        return
    endings = sorted({name[name.rindex(".") :] for name in names if name.startswith("part-") and "." in name})
    hint = f"name the parts that are there: {folder}/part-*{endings[0]}" if endings else "name another folder"
    if COMMIT not in names:
        raise DataError(
            f"{folder} is not whole: its writer has not finished it (it has {PLAN} and no {COMMIT})",
            hint=f"run again what wrote it, or {hint}",
        )
    try:
        parts = [str(part["name"]) for part in json.loads(read(COMMIT))["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}/{COMMIT} is torn: {type(error).__name__}: {error}") from error
    lost = [name for name in parts if name not in names]
    if lost:
        raise DataError(
            f"{folder} is not whole: {len(lost)} of the {len(parts)} parts that {COMMIT} lists are missing, "
            f"first {lost[0]}",
            hint=f"write it again to a new folder, or {hint}",
        )
