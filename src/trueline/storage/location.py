"""Local paths and URLs of object stores."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

Uri = str | os.PathLike[str]
Location = str | Path
"""A local path or a URL. A URL stays a string: a Path would drop one of its two slashes."""


def is_remote(uri: Uri) -> bool:
    text = os.fspath(uri)
    return "://" in text and urlsplit(text).scheme != "file"


def local_path(uri: Uri) -> Path:
    text = os.fspath(uri)
    return Path(unquote(urlsplit(text).path)) if "://" in text else Path(text)


def parse_location(location: Location) -> Location:
    """`location` as a Path when it is local, else as a URL without a slash at its end.

    >>> parse_location("s3://bucket/digits/"), parse_location("file:///tmp/digits")
    ('s3://bucket/digits', PosixPath('/tmp/digits'))
    """
    return str(location).rstrip("/") if is_remote(location) else local_path(location)


def join_location(location: Location, name: str) -> Location:
    """
    >>> join_location("s3://bucket/digits", "step-00000120")
    's3://bucket/digits/step-00000120'
    """
    parent = parse_location(location)
    return parent / name if isinstance(parent, Path) else f"{parent}/{name}"


def split_location(location: Location) -> tuple[Location, str]:
    """The parent and the name in it.

    >>> split_location("s3://bucket/digits/step-00000120")
    ('s3://bucket/digits', 'step-00000120')
    """
    parsed = parse_location(location)
    if isinstance(parsed, Path):
        return parsed.absolute().parent, parsed.absolute().name
    head, _, name = parsed.rpartition("/")
    return head, name
