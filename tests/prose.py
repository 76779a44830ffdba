"""Words that make the prose of this project hard to read, each with what to write instead: `make check` runs this.

usage: prose.py [PATH...]    files or folders; README, CONTRIBUTING, CHANGELOG, docs and src/trueline unless given

Reads Markdown without its code, and the docstrings, comments and literals of several words in Python. Prints one line a
find and exits with 1 when there is one.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "src/trueline")
INSTEAD = {
    r"anew": "again",
    r"beneath": "below, under",
    r"cannot be had": "is not available",
    r"for ever": "forever, without end",
    r"goes? on|went on|go on": "continue",
    r"heed(s|ed)?": "use, apply",
    r"in vain": "without success",
    r"(is|are|was|were|be|been|gets?) (asked|told)": "name who acts: receives, gets, is notified",
    r"lets? go of": "release",
    r"like-minded": "similar",
    r"lest": "so that … not",
    r"neighbours?": "the other rows, requests, records",
    r"nobody": "no client, no worker, …, or the passive",
    r"nought": "zero, nothing",
    r"of one's own": "custom, the user's own",
    r"rightly": "correctly",
    r"so many": "a number, or `that many`",
    r"(stands?|stood) still": "is stopped, hangs",
    r"thrice": "three times",
    r"whence": "from where",
    r"whoever": "name the component",
    r"who (asks?|says?|reads?|wants?)": "a client, a caller, a user that …",
}
FORBIDDEN = re.compile(
    "|".join(rf"(?P<_{at}>\b(?:{words})\b)".replace(" ", r"\s+") for at, words in enumerate(INSTEAD)), re.IGNORECASE
)
MARKDOWN_CODE = re.compile(r"^```.*?^```|^    [^\n]*|`[^`\n]*`", re.MULTILINE | re.DOTALL)
TEXT = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Passages of text, each with the number of its first line."""
    text = path.read_text()
    if path.suffix == ".md":
        text = text.partition("\n## Not used\n")[0]  # of the glossary
        yield 1, MARKDOWN_CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in TEXT and " " in token.string:
            yield token.start[0], token.string


def find_words(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, word and what to write instead, of each word in `path` that has a plainer one."""
    instead = list(INSTEAD.values())
    for first, passage in prose_of(path):
        for match in FORBIDDEN.finditer(passage):
            group = match.lastgroup or ""
            yield first + passage.count("\n", 0, match.start()), match.group(), instead[int(group[1:])]


def main(arguments: list[str]) -> int:
    found = []
    for place in arguments or READ:
        path = (ROOT / place).resolve()
        files = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        for file in files:
            if not file.stem.endswith(("_pb2", "_pb2_grpc")):
                name = file.relative_to(ROOT)
                found += [f"{name}:{line}: {word!r}: write {instead}" for line, word, instead in find_words(file)]
    print("\n".join([*found, f"{len(found)} words that have a plainer one"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
