"""Links of built HTML pages: each leads to a file and an anchor, and nothing is loaded from another host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "video": "src", "link": "href"}
_NOT_LOADED = {"canonical", "alternate", "prev", "next", "edit"}
"""Relations of a `link` element that a browser does not fetch."""


@dataclass
class _Page(HTMLParser):
    anchors: set[str] = field(default_factory=set)
    links: list[tuple[str, bool]] = field(default_factory=list)
    """Each address, and whether a browser loads it with the page."""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append((values["href"], False))
        elif (address := values.get(_LOADED.get(tag, ""))) and values.get("rel", "") not in _NOT_LOADED:
            self.links.append((address, True))


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def problems(site: Path) -> Iterator[str]:
    """A line for each link in `site` that leads nowhere, and each request that a page makes of another host."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(site)
        for address, loaded in page.links:
            parts = urlsplit(address)
            if parts.scheme in ("http", "https") or parts.netloc:
                if loaded:
                    yield f"{where}: loads {address}"
                continue
            if parts.scheme:
                continue
            place = unquote(parts.path)
            base = site if place.startswith("/") else path.parent
            target = (base / place.lstrip("/")).resolve() if place else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{where}: there is no {address}"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{where}: {address} has no such anchor"
