"""The workarounds for upstream defects, as a table: `make patches` runs this. Reads syntax trees; imports no torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1] / "src" / "trueline" / "capture"
FIELDS = ("issue", "versions", "cost", "helps")
ISSUE = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")
URL = r"https://github.com/\1/issues/\2"


def patches() -> dict[str, dict[str, Any]]:
    """The fields of each `PATCH = Patch(...)` below capture, with the number of lines of its module."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PATCH":
                assert isinstance(node.value, ast.Call)
                fields = {str(one.arg): ast.literal_eval(one.value) for one in node.value.keywords}
                found[path.relative_to(ROOT).with_suffix("").as_posix()] = {**fields, "lines": len(text.splitlines())}
    return found


def main() -> None:
    for name, patch in patches().items():
        helped = patch["helps"]
        more = f" and {len(helped) - 4} more" if len(helped) > 4 else ""
        print(f"{name:28} {patch['lines']:4} lines   {patch['versions']}")
        print(f"    issue  {ISSUE.sub(URL, patch['issue'])}")
        print(f"    cost   {patch['cost']}")
        print(f"    helps  {', '.join(helped[:4])}{more}")
    print(f"{len(patches())} patches, {sum(patch['lines'] for patch in patches().values())} lines")


if __name__ == "__main__":
    main()
