"""The diagnosis as one page of HTML that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from html import escape

from trueline.doctor.diagnosis import Diagnosis, Rewrite, Row
from trueline.doctor.report import STATUS, proof, shorten_path, summary

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
@media (max-width: 44rem) { /* what there is to say stands below, and not beyond the edge */
  tr { display: grid; grid-template-columns: 4fr 4fr 3fr 3fr 3fr; border-bottom: 1px solid var(--line); }
  th, td { border: 0; padding: .2rem .4rem .2rem 0; min-width: 0; overflow-wrap: anywhere; }
  th:last-child, td:last-child { grid-column: 1 / -1; } }
"""


def page(diagnosis: Diagnosis) -> str:
    """The report as a page."""
    name = escape(diagnosis.recipe)
    rows = "\n".join(_row(row) for row in diagnosis.rows)
    rewrites = "\n".join(_rewrite(rewrite) for rewrite in diagnosis.rewrites)
    heading = "<h2>Rewrites, each proven equal to the original</h2>" if diagnosis.rewrites else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>doctor: {name}</title><style>{_STYLE}</style></head><body>
<h1>{name}</h1>
<p>{escape(summary(diagnosis))}</p>
{_bar(diagnosis)}
<div class="scroll"><table>
<tr><th>Submodule</th><th>Class</th><th>Trace</th><th>Script</th><th>Export</th><th>Status</th></tr>
{rows}
</table></div>
{heading}
{rewrites}
</body></html>
"""


def _bar(diagnosis: Diagnosis) -> str:
    total = max(1, len(diagnosis.rows))
    ready, healed = diagnosis.ready / total, (diagnosis.healed - diagnosis.ready) / total
    return (
        f'<div class="bar"><span class="ready" style="width:{ready:.1%}"></span>'
        f'<span class="healed" style="width:{healed:.1%}"></span></div>'
    )


def _row(row: Row) -> str:
    marks = "".join(f"<td>{'yes' if fine else 'no'}</td>" for fine in (row.traceable, row.scriptable, row.exportable))
    return (
        f"<tr><td><code>{escape(row.path)}</code></td><td>{escape(row.class_name)}</td>{marks}"
        f'<td><span class="{row.status}">{STATUS[row.status]}</span>{_cause(row)}</td></tr>'
    )


def _cause(row: Row) -> str:
    parts = []
    if row.cause is not None:
        place = f"{shorten_path(row.cause.file)}:{row.cause.line}"
        parts.append(
            f"{escape(row.cause.words)}<br><code>{escape(place)}</code>: <code>{escape(row.cause.source)}</code>"
        )
    if row.why_not:
        parts.append(escape(row.why_not))
    return "".join(f'<span class="cause">{part}</span>' for part in parts)


def _rewrite(rewrite: Rewrite) -> str:
    steps = "".join(f"<li>{escape(step)}</li>" for step in rewrite.steps)
    lines = "\n".join(_line(line) for line in rewrite.diff.splitlines())
    return f"<h2>{escape(rewrite.class_name)}</h2><ol>{steps}</ol><p>{escape(proof(rewrite))}</p><pre>{lines}</pre>"


def _line(line: str) -> str:
    kind = "added" if line.startswith("+") else "gone" if line.startswith("-") else ""
    return f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line)
