"""Builds the documentation site into build/site: `make docs`.

usage: python -m docs.site

docs/ and the pages beside it are copied to build/pages, so that links between them hold; Zensical builds them with
warnings as errors; then every link of the result is followed. Last line: one JSON object with `pages`, `broken_links`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from docs.links import problems

ROOT = Path(__file__).parents[2]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
BESIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages outside docs/, and their place in the site."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[#)])")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def place_of(source: Path) -> Path | None:
    """Where a file of the repository is in the site, if it is there."""
    name = source.relative_to(ROOT)
    if name.parts[0] == "docs":
        return PAGES / Path(*name.parts[1:])
    return PAGES / BESIDE[str(name)] if str(name) in BESIDE else None


def staged(source: Path) -> str:
    """The page `source` with its links as they lead from its place in the site; links to source code become code."""
    target = place_of(source)
    assert target is not None

    def lead(match: re.Match[str]) -> str:
        linked = (source.parent / match[1]).resolve()
        place = place_of(linked) if linked.is_relative_to(ROOT) and linked.exists() else None
        return os.path.relpath(place, target.parent) if place else match[1]

    text, parts, end = source.read_text(), [], 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(lead, text[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, _LINK.sub(lead, text[end:])])


def stage() -> None:
    """Copies all pages to build/pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for source in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in BESIDE)]:
        target = place_of(source)
        assert target is not None
        target.write_text(staged(source))


def unlisted() -> list[str]:
    """Pages that no menu of the site leads to; decisions are listed by their own page."""
    menu = (ROOT / "zensical.toml").read_text()
    pages = [str(page.relative_to(PAGES)) for page in sorted(PAGES.rglob("*.md"))]
    return [page for page in pages if f'"{page}"' not in menu and not page.startswith("decisions/")]


def main() -> int:
    stage()
    for page in unlisted():
        print(f"{page} is not in the navigation of zensical.toml")
    shutil.rmtree(SITE, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=ROOT, check=False)
    found = list(problems(SITE)) if SITE.exists() else ["the site was not built"]
    print("\n".join(found))
    pages = len(list(SITE.rglob("*.html")))
    print(json.dumps({"pages": pages, "broken_links": len(found)}))
    return bool(found) or built.returncode


if __name__ == "__main__":
    sys.exit(main())
