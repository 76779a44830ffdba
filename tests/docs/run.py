"""Runs the documentation as a reader would: `make test-docs`.

usage: python -m docs.run [PAGE...]     all pages of `PAGES` unless given

A notebook is run by nbclient. Each other page is one terminal in an empty folder: files are saved, commands and scripts
run in order, and what they print is compared with what the page shows. Prints a line for each page and the first thing
in it that is not so; last, one JSON object with `blocks`, `blocks_run`, `seconds`, `failed` and `not_run`. The exit
status is 1 if a page failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from docs.blocks import RUN, Block, blocks_of, output_after
from docs.notebook import blocks_of_notebook, run_notebook
from docs.session import Failed, Session
from docs.shown import difference, json_difference

ROOT = Path(__file__).parents[2]
BINARIES = Path(sys.executable).parent
PAGES = ("README.md", "docs/start", "docs/tutorials", "docs/coming-from")


@dataclass
class Outcome:
    """What became of a page's blocks."""

    page: Path
    blocks: list[Block]
    done: list[Block] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""

    @property
    def runnable(self) -> list[Block]:
        return [block for block in self.blocks if block.kind in (*RUN, "not run")]

    def __str__(self) -> str:
        name = self.page.relative_to(ROOT)
        return f"{len(self.done):3d} of {len(self.runnable):3d} blocks {self.seconds:6.1f} s  {name}"


def _compare(output: Block, printed: str) -> None:
    compare = json_difference if output.language == "json" else difference
    if found := compare(output.text, printed):
        raise Failed(f"{output.where}: {found}\nall of it:\n{printed}")


def _show(printed: str) -> None:
    if os.environ.get("SHOW"):
        print(printed, flush=True)


def _run_block(session: Session, block: Block, output: Block | None) -> None:
    shown = output.text if output else ""
    if block.kind == "commands":
        _show(f"$ {block.text.rstrip()}")
    if block.kind == "file":
        session.write(block.title, block.text)
    elif block.keeps_running:
        _show(session.start(block.text, shown))
    else:
        script = f"python - <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK\n" if block.kind == "script" else block.text
        printed = session.run(script, fails=any(line.startswith("error:") for line in shown.splitlines()))
        _show(printed)
        if output:
            _compare(output, printed)


def _run_terminal(outcome: Outcome) -> None:
    with Session(BINARIES) as session:
        for at, block in enumerate(outcome.blocks):
            if block.kind in ("file", "commands", "script"):
                output = output_after(outcome.blocks, at)
                try:
                    _run_block(session, block, output)
                except Failed as error:
                    raise Failed(f"{block.where}\n{error}") from None
                outcome.done += [block, output] if output else [block]


def run_page(page: Path) -> Outcome:
    """Runs the blocks of `page` in order, up to the first that fails."""
    is_notebook, began = page.suffix == ".ipynb", time.monotonic()
    outcome = Outcome(page, blocks_of_notebook(page) if is_notebook else blocks_of(page))
    try:
        if is_notebook:
            run_notebook(page)
            outcome.done += outcome.blocks
        else:
            _run_terminal(outcome)
    except Failed as error:
        outcome.failure = str(error)
    outcome.seconds = time.monotonic() - began
    return outcome


def pages_of(places: list[str]) -> list[Path]:
    """The pages in `places`, files or folders of the repository."""
    paths = [ROOT / place for place in places]
    inside = ("*.md", "*.ipynb")
    return [
        page
        for path in paths
        for page in (sorted(one for form in inside for one in path.glob(form)) if path.is_dir() else [path])
    ]


def main(places: list[str]) -> int:
    outcomes = []
    for page in pages_of(places or [place for place in PAGES if (ROOT / place).exists()]):
        outcomes.append(run_page(page))
        print(outcomes[-1], flush=True)
        if outcomes[-1].failure:
            print(outcomes[-1].failure, flush=True)
    skipped = [block for outcome in outcomes for block in outcome.blocks if block.kind == "not run"]
    for block in skipped:
        print(f"not run: {block.where}: {block.reason}")
    failed = [str(outcome.page.relative_to(ROOT)) for outcome in outcomes if outcome.failure]
    print(
        json.dumps(
            {
                "blocks": sum(len(outcome.runnable) for outcome in outcomes),
                "blocks_run": sum(len(outcome.done) for outcome in outcomes),
                "not_run": len(skipped),
                "pages": len(outcomes),
                "failed": failed,
                "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
            }
        )
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
