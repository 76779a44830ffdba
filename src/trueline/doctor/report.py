"""The doctor's result: a row for each submodule and the proven rewrites; as values, as text, and as a page of HTML.

Pure, without torch. The page needs nothing else: no script, font or picture.
"""

from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

Kind = Literal[
    "value branch", "size branch", "value loop", "time loop", "item", "fixed size", "masked selection", "state",
    "break", "exporter",
]  # fmt: skip
"""`exporter`: a limit of torch.export itself."""

Status = Literal["ready", "rewritten", "waits", "blocked"]
"""`ready`: exports as it is. `rewritten`: exports with the rewrite shown. `waits`: only a submodule blocks it.
`blocked`: it needs a rewrite, and none was proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The first line of the user's code that blocks a submodule, and the condition in words."""

    kind: Kind
    file: str
    line: int
    source: str
    words: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Edits of one class that were proven equal to the original."""

    class_name: str
    file: str
    steps: tuple[str, ...]
    diff: str
    probes: int
    """Calls on which the original and the exported rewrite agree."""
    max_abs_error: float
    onnx: str
    """`proven`, or why it has no ONNX program; empty when that was not tried."""
    state: tuple[str, ...] = ()
    """Buffers that answers depend on: the model has to be captured with its state explicit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One submodule, as it is before any rewrite."""

    path: str
    """As in `named_modules()`; `(model)` is the whole."""
    class_name: str
    status: Status
    traceable: bool = False
    scriptable: bool = False
    exportable: bool = False
    cause: Cause | None = None
    rewrite: Rewrite | None = None
    why_not: str = ""
    """Why a blocked submodule has no rewrite; how a ready one that keeps a state is captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All rows in reading order, and how many submodules can be captured: now, with the rewrites, at the last run."""

    recipe: str
    rows: tuple[Row, ...]
    before: int | None
    """Submodules that were ready at the last run; None at the first."""

    @property
    def ready(self) -> int:
        return sum(row.status == "ready" for row in self.rows)

    @property
    def healed(self) -> int:
        """Submodules that are ready once the rewrites are applied."""
        return sum(row.status != "blocked" for row in self.rows)

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """Each rewrite once, in reading order of the first submodule that it heals."""
        return tuple(dict.fromkeys(row.rewrite for row in self.rows if row.rewrite is not None))

    @property
    def progress(self) -> str:
        """`7 of 9 submodules, was 5`."""
        was = "" if self.before is None else f", was {self.before}"
        return f"{self.ready} of {len(self.rows)} submodules{was}"

    def facts(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        return {
            "recipe": self.recipe, "submodules": len(self.rows), "ready": self.ready, "healed": self.healed,
            "before": self.before, "rows": [asdict(row) for row in self.rows],
        }  # fmt: skip


STATUS = {
    "ready": "ready",
    "rewritten": "needs a rewrite: below",
    "waits": "ready with the rewrites below",
    "blocked": "needs a rewrite by hand",
}


def text(diagnosis: Diagnosis, *, diffs: bool = True) -> str:
    """The whole report."""
    head = ("submodule", "class", "trace", "script", "export", "status")
    table = [head, *((row.path, row.class_name, *_marks(row), STATUS[row.status]) for row in diagnosis.rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    for row in diagnosis.rows:
        lines += _explain(row)
    for rewrite in diagnosis.rewrites if diffs else ():
        heading = f"{rewrite.class_name}: {'; then '.join(rewrite.steps)}"
        lines += ["", heading, f"  {proof(rewrite)}", rewrite.diff.rstrip()]
    return "\n".join([*lines, "", summary(diagnosis)])


def summary(diagnosis: Diagnosis) -> str:
    """`1 of 3 submodules, was 0, can be exported; 3 of 3 with the rewrites`."""
    rewrites = f"; {diagnosis.healed} of {len(diagnosis.rows)} with the rewrites" if diagnosis.rewrites else ""
    comma = "" if diagnosis.before is None else ","
    return f"{diagnosis.progress}{comma} can be exported{rewrites}"


def _marks(row: Row) -> tuple[str, ...]:
    return tuple("yes" if mark else "no" for mark in (row.traceable, row.scriptable, row.exportable))


def _explain(row: Row) -> list[str]:
    if row.cause is None:
        return ["", f"{row.path}: {row.why_not}"] if row.why_not else []
    place = f"{shorten_path(row.cause.file)}:{row.cause.line}"
    lines = ["", f"{row.path}: {row.cause.words}", f"  {place}: {row.cause.source}"]
    return [*lines, f"  no rewrite: {row.why_not}"] if row.why_not else lines


def proof(rewrite: Rewrite) -> str:
    """What was proven of a rewrite, in one line."""
    onnx = f"; ONNX: {rewrite.onnx}" if rewrite.onnx else ""
    explicit = f" with its state explicit ({', '.join(rewrite.state)})" if rewrite.state else ""
    in_order = ", one after the other," if rewrite.state else ""
    return (
        f"exported{explicit} and equal to the original on {rewrite.probes} calls{in_order} "
        f"(largest difference {rewrite.max_abs_error:.2g}){onnx}"
    )


def shorten_path(file: str) -> str:
    """A path relative to the current folder, where the file is inside it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --warn: #9a6700; --bad: #cf222e; --faint: #8881; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --warn: #d4a72c; --bad: #ff8182; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.bar { display: flex; height: .6rem; border-radius: .3rem; overflow: hidden; background: var(--line); margin: .8rem 0; }
.bar span { display: block; } .bar .ready { background: var(--good); } .bar .healed { background: var(--warn); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } .cause { display: block; opacity: .8; font-size: .9em; overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: var(--faint); border: 1px solid var(--line); border-radius: .4rem; padding: .8rem; overflow-x: auto; }
.ready { color: var(--good); } .rewritten, .waits { color: var(--warn); } .blocked { color: var(--bad); }
.bar .ready, .bar .healed { color: inherit; }
.added { color: var(--good); } .gone { color: var(--bad); }
@media (max-width: 44rem) { /* the status goes below the other cells */
  tr { display: grid; grid-template-columns: 4fr 4fr 3fr 3fr 3fr; border-bottom: 1px solid var(--line); }
  th, td { border: 0; padding: .2rem .4rem .2rem 0; min-width: 0; overflow-wrap: anywhere; }
  th:last-child, td:last-child { grid-column: 1 / -1; } }
"""


def page(diagnosis: Diagnosis) -> str:
    """The report as a page."""
    name = escape(diagnosis.recipe)
    rows = "\n".join(_row_html(row) for row in diagnosis.rows)
    rewrites = "\n".join(_rewrite_html(rewrite) for rewrite in diagnosis.rewrites)
    total = max(1, len(diagnosis.rows))
    ready, healed = diagnosis.ready / total, (diagnosis.healed - diagnosis.ready) / total
    heading = "<h2>Rewrites, each proven equal to the original</h2>" if diagnosis.rewrites else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>doctor: {name}</title><style>{_STYLE}</style></head><body>
<h1>{name}</h1>
<p>{escape(summary(diagnosis))}</p>
<div class="bar"><span class="ready" style="width:{ready:.1%}"></span>
<span class="healed" style="width:{healed:.1%}"></span></div>
<div class="scroll"><table>
<tr><th>Submodule</th><th>Class</th><th>Trace</th><th>Script</th><th>Export</th><th>Status</th></tr>
{rows}
</table></div>
{heading}
{rewrites}
</body></html>
"""


def _row_html(row: Row) -> str:
    marks = "".join(f"<td>{mark}</td>" for mark in _marks(row))
    notes = []
    if row.cause is not None:
        place = f"{shorten_path(row.cause.file)}:{row.cause.line}"
        source = f"<code>{escape(place)}</code>: <code>{escape(row.cause.source)}</code>"
        notes.append(f"{escape(row.cause.words)}<br>{source}")
    if row.why_not:
        notes.append(escape(row.why_not))
    causes = "".join(f'<span class="cause">{note}</span>' for note in notes)
    return (
        f"<tr><td><code>{escape(row.path)}</code></td><td>{escape(row.class_name)}</td>{marks}"
        f'<td><span class="{row.status}">{STATUS[row.status]}</span>{causes}</td></tr>'
    )


def _rewrite_html(rewrite: Rewrite) -> str:
    steps = "".join(f"<li>{escape(step)}</li>" for step in rewrite.steps)
    lines = []
    for line in rewrite.diff.splitlines():
        kind = "added" if line.startswith("+") else "gone" if line.startswith("-") else ""
        lines.append(f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line))
    diff = "\n".join(lines)
    return f"<h2>{escape(rewrite.class_name)}</h2><ol>{steps}</ol><p>{escape(proof(rewrite))}</p><pre>{diff}</pre>"
