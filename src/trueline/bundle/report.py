"""One HTML page about a bundle: signature, ranges in words, comparisons, evaluation, golden records, lineage. Pure.

The page holds no script and loads nothing, so it can be attached to a ticket or shown in a notebook. Plots are SVG.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trueline.bundle import describe
from trueline.bundle.evaluation import EvaluationRecord
from trueline.bundle.read import Bundle
from trueline.bundle.schema import Evidence
from trueline.columns.describe import HEAD, rows_of

WIDTH, HEIGHT, LEFT, BOTTOM = 620, 150, 56, 22
_CSS = """
:root { color-scheme: light dark; --ink: #1b2430; --dim: #64707f; --line: #d9dee5; --back: #f6f7f9; --card: #fff;
  --good: #1a7f4b; --bad: #c0332b; --warn: #a66300; --a: #2563c9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf0; --dim: #98a3b1; --line: #333c47; --back: #14181d;
  --card: #1c2229; --good: #4cc38a; --bad: #ff7b72; --warn: #e0a84a; --a: #6ea0ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 24px 16px 48px; }
.wide main { max-width: 1360px; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 0 0 8px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 16px; margin-top: 16px; overflow-x: auto; }
.dim { color: var(--dim); } .good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--dim); } th, td { padding: 3px 18px 3px 0; vertical-align: top; }
td { white-space: nowrap; } td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 9em; }
svg { width: 100%; min-width: 480px; max-width: 620px; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim); } details summary { cursor: pointer; }
.wide th, .wide td { padding-right: 12px; } .wide td:last-child { min-width: 4em; }
.wide th:first-child, .wide td:first-child { position: sticky; left: 0; background: var(--card); }
@media (max-width: 560px) { svg { min-width: 0; } svg text { font-size: 14px; }
  .wide td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 8em; } }
.matrix td:last-child { min-width: 0; white-space: nowrap; }
.matrix td, .matrix th { padding: 3px 8px; text-align: right; border: 1px solid var(--line); }
code { font: 12px ui-monospace, monospace; overflow-wrap: anywhere; }
"""

Row = Sequence[object]


def render(
    bundle: Bundle, *, losses: Sequence[tuple[int, float]] = (), evaluation: EvaluationRecord | None = None
) -> str:
    """The page. `losses`: step and training loss of the job that made the model, in order; `evaluation`: of one of its
    checkpoints.
    """
    manifest, evidence, lineage = bundle.manifest, list(bundle.evidence()), bundle.lineage()
    attempts = lineage.pop("attempts", None)
    signature = bundle.signature
    sealed = f"sealed {text(manifest.created)} · digest <code>{text(manifest.digest)}</code>"
    head = f"<h1>{text(manifest.name)}</h1><div class=dim>{sealed}</div>"
    tensors = [
        (side, spec.name, spec.datatype, "[" + ", ".join(map(str, spec.shape)) + "]")
        for side, specs in (("input", signature.inputs), ("output", signature.outputs))
        for spec in specs
    ]
    proven = describe.range_text(signature) or "every size is fixed"
    parts = [
        section(
            "Inputs and outputs", table(("", "name", "type", "shape"), tensors), f"<p>Proven for {text(proven)}.</p>"
        ),
        *_columns(bundle),
        section("Programs", table(*_head_and_rows(describe.program_rows(bundle))), _list_refused(attempts)),
        section("Compared with the eager model", *_comparisons(evidence)),
        section(
            "Golden records",
            table(("case", "inputs"), describe.golden_rows(bundle)),
            "<p class=dim>A server replays them before it takes a request.</p>",
        ),
    ]
    if losses:
        parts.append(section("Training loss", _line_plot(losses)))
    if evaluation is not None:
        captured = (lineage.get("checkpoint") or {}).get("digest") == evaluation.checkpoint_digest
        parts.append(section("Evaluation", *_evaluation(evaluation, captured)))
    parts.append(section("Lineage", table(("", ""), describe.lineage_rows(lineage))))
    return document(manifest.name, f"{head}{''.join(parts)}")


def _columns(bundle: Bundle) -> list[str]:
    fitted = bundle.columns()
    return [] if fitted is None else [section("Columns of a record", table(HEAD, rows_of(fitted)))]


def document(title: str, content: str, *, wide: bool = False) -> str:
    """A whole page with the looks of this one. `content` is HTML; `wide`: it has a table of many columns."""
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_CSS}</style></head><body{' class=wide' * wide}>"
        f"<main>{content}</main></body></html>\n"
    )


def _comparisons(evidence: Sequence[Evidence]) -> Iterable[str]:
    verdicts = {"agrees": "good", "disagrees": "bad", "outside": "warn", "unanswered": "dim"}
    words = {"outside": "outside of the range, which a server rejects", "unanswered": "the eager model raises an error"}
    for program in dict.fromkeys(one.format for one in evidence):
        of_program = [one for one in evidence if one.format == program]
        counts = {name: sum(one.verdict == name for one in of_program) for name in verdicts}
        summary = ", ".join(
            f"<span class={verdicts[name]}>{count} {text(words.get(name, name))}</span>"
            for name, count in counts.items()
            if count
        )
        rows = [
            (one.probe, one.verdict, _number(one.max_rel_error), _number(one.max_abs_error), one.reason)
            for one in of_program
        ]
        rows_of_probes = table(("probe", "verdict", "relative error", "absolute error", "reason"), rows)
        yield f"<p><b>{text(program)}</b>: {len(rows)} comparisons, {summary}</p>"
        yield _error_plot(of_program)
        yield f"<details><summary>every comparison</summary>{rows_of_probes}</details>"


def _error_plot(evidence: Sequence[Evidence]) -> str:
    """The largest relative error of each probe, on a logarithmic axis; errors of zero stand at its foot."""
    found = [one for one in evidence if one.max_rel_error is not None and math.isfinite(one.max_rel_error)]
    if not found:
        return ""
    top = max(math.ceil(math.log10(max([one.max_rel_error or 0.0 for one in found] + [1e-9]))), -6)
    foot = min(top - 3, -9)
    x = scale(0, max(len(found) - 1, 1), LEFT + 8, WIDTH - 8)
    y = scale(foot, top, HEIGHT - BOTTOM, 10)
    ticks = "".join(rule(y(power), f"1e{power}") for power in range(foot, top + 1, max(1, (top - foot) // 4)))
    dots = "".join(
        f'<circle cx="{x(i):.1f}" cy="{y(max(math.log10(one.max_rel_error or 10**foot), foot)):.1f}" r="3" '
        f'fill="var(--{"a" if one.verdict == "agrees" else "bad"})">'
        f"<title>{text(one.probe)}: {_number(one.max_rel_error)}</title></circle>"
        for i, one in enumerate(found)
    )
    label = f'<text x="{LEFT}" y="{HEIGHT - 5}">largest relative error of each probe, in the order of the probes</text>'
    return svg("Largest relative error of each probe", ticks + dots + label)


def _line_plot(points: Sequence[tuple[int, float]]) -> str:
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        return "<p class=dim>no step has a finite loss</p>"
    low, high = min(value for _, value in points), max(value for _, value in points)
    low = 0.0 if 0 <= low < high / 2 else low  # most losses end near zero, and a tick there is a short number
    x = scale(points[0][0], max(points[-1][0], points[0][0] + 1), LEFT, WIDTH - 8)
    y = scale(low, high if high > low else low + 1, HEIGHT - BOTTOM, 10)
    ticks = "".join(rule(y(value), f"{value:.3g}") for value in (low, (low + high) / 2, high))
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    foot = HEIGHT - 5
    ends = (
        f'<text x="{LEFT}" y="{foot}">step {points[0][0]}</text>'
        f'<text x="{WIDTH - 8}" y="{foot}" text-anchor="end">step {points[-1][0]}</text>'
    )
    curve = f'<polyline points="{line}" fill="none" stroke="var(--a)" stroke-width="1.6"/>'
    return svg("Training loss by step", ticks + curve + ends)


def _evaluation(found: EvaluationRecord, captured: bool) -> Iterable[str]:
    named = [("loss", found.loss), *found.metrics.items()]
    means = ", ".join(f"{text(name)} {'not finite' if value is None else f'{value:.4f}'}" for name, value in named)
    yield f"<p>{found.records} records of <code>dataset({text(repr(found.mode))})</code>: {means}</p>"
    if not captured:
        other = "The bundle was captured from another checkpoint than the one that was evaluated"
        yield f"<p class=warn>{other}, {text(found.checkpoint)}.</p>"
    if found.confusion:
        yield _confusion_matrix(found)
    if found.pairs:
        yield _pairs_plot(found.pairs)


def _confusion_matrix(found: EvaluationRecord) -> str:
    """Rows by label; a cell is shaded by its share of the row."""
    names = [text(found.class_name(at)) for at in range(len(found.confusion))]
    rows = []
    for at, row in enumerate(found.confusion):
        total = sum(row)
        cells = "".join(
            f'<td style="background:color-mix(in srgb, var(--{"good" if at == to else "bad"}) '
            f'{round(60 * count / max(total, 1))}%, transparent)">{count or ""}</td>'
            for to, count in enumerate(row)
        )
        share = f"{100 * row[at] / total:.1f} %" if total else ""
        rows.append(f"<tr><th>{names[at]}</th>{cells}<td>{total}</td><td>{share}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in ["label \\ answer", *names, "records", "right"])
    return f"<div class='scroll matrix'><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def _pairs_plot(pairs: Sequence[tuple[float, float]]) -> str:
    """Residuals over the labels: what a model misses shows as a slope or a cone."""
    residuals = [answer - label for label, answer in pairs]
    low, high = min(label for label, _ in pairs), max(label for label, _ in pairs)
    reach = max(map(abs, residuals)) or 1.0
    x = scale(low, high if high > low else low + 1, LEFT + 8, WIDTH - 8)
    y = scale(-reach, reach, HEIGHT - BOTTOM, 10)
    ticks = "".join(rule(y(value), f"{value:.3g}") for value in (-reach, 0.0, reach))
    dots = "".join(
        f'<circle cx="{x(label):.1f}" cy="{y(off):.1f}" r="2.5" fill="var(--a)" fill-opacity="0.6">'
        f"<title>label {label:.4g}, answer {answer:.4g}</title></circle>"
        for (label, answer), off in zip(pairs, residuals, strict=True)
    )
    foot = HEIGHT - 5
    ends = (
        f'<text x="{LEFT}" y="{foot}">label {low:.3g}</text>'
        f'<text x="{(WIDTH + LEFT) // 2}" y="{foot}" text-anchor="middle">answer less label</text>'
        f'<text x="{WIDTH - 8}" y="{foot}" text-anchor="end">label {high:.3g}</text>'
    )
    return svg("Answer less label of some records, by label", ticks + dots + ends)


def scale(low: float, high: float, start: float, stop: float) -> Any:
    return lambda value: start + (stop - start) * (value - low) / (high - low)


def rule(y: float, label: str) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def svg(title: str, content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{content}</svg>'


def _list_refused(attempts: object) -> str:
    """The formats that the capture tried and did not seal, with the reasons."""
    rows = [
        (one.get("format", ""), one.get("verdict", ""), one.get("why", ""))
        for one in (attempts if isinstance(attempts, list) else [])
        if isinstance(one, Mapping) and one.get("verdict") != "proven"
    ]
    return f"<h2>Not sealed</h2>{table(('format', 'verdict', 'why'), rows)}" if rows else ""


def section(title: str, *content: str) -> str:
    return f"<section><h2>{text(title)}</h2>{''.join(content)}</section>"


def _head_and_rows(rows: Sequence[Row]) -> tuple[Row, Sequence[Row]]:
    return rows[0], rows[1:]


def table(head: Row, rows: Iterable[Row]) -> str:
    heads = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{heads}</tr>{body}</table></div>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def text(value: object) -> str:
    return html.escape(str(value))
