"""The code blocks of a Markdown page, in order, and what each is for.

| fence | the block is |
|---|---|
| any language with `title="PATH"` | a file that the reader saves |
| `sh` | commands that the reader types; one whose last line ends in ` &` keeps running |
| `python` without a title | a script that the reader runs |
| `text`, `json` | what the block of commands or the script before it prints |
| anything else | an illustration |

A comment `<!-- not run: REASON -->` above a fence makes it an illustration that is counted, with its reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^```(?P<language>[\w-]*)(?P<options>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]+)"')
RUN = ("file", "commands", "script", "output")


@dataclass(frozen=True)
class Block:
    """One fenced block. `kind` is one of `RUN`, `not run`, or `illustration`."""

    page: Path
    line: int
    language: str
    kind: str
    text: str
    title: str = ""
    reason: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def keeps_running(self) -> bool:
        return self.kind == "commands" and self.text.rstrip().endswith(" &")


def _kind_of(language: str, title: str, reason: str, before: str) -> str:
    if reason:
        return "not run"
    if title:
        return "file"
    if language in ("sh", "python"):
        return "commands" if language == "sh" else "script"
    if language in ("text", "json") and before in ("commands", "script"):
        return "output"
    return "illustration"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """All fenced blocks of `page`, in order."""
    text = page.read_text() if text is None else text
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        titled = _TITLE.search(match["options"])
        title, reason = titled[1] if titled else "", match["reason"] or ""
        kind = _kind_of(match["language"], title, reason, found[-1].kind if found else "")
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(page, line, match["language"], kind, match["text"], title, reason))
    return found


def output_after(blocks: list[Block], at: int) -> Block | None:
    """The block that shows what the block `at` prints, if the next one does."""
    follows = blocks[at + 1] if at + 1 < len(blocks) else None
    return follows if follows and follows.kind == "output" else None
