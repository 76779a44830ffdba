"""Every candidate side by side: a table for the terminal, the same as values, and an HTML page with plots. Pure.

The page holds no script and loads nothing. It has the looks of a bundle's report.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from trueline.bundle import report as page
from trueline.compress.candidate import CompressedCandidate

HEADS = (
    "candidate", "verdict", "front", "metric", "lost", "at most", "changed", "size", "memory", "int8", "batch 1 ms",
    "p99", "large ms", "records/s", "x fp32", "x eager",
)  # fmt: skip


def sort_rows(rows: Iterable[CompressedCandidate]) -> list[CompressedCandidate]:
    """Parents first, then what is offered, the fastest first."""
    order = {"offered": 0, "no gain": 1, "over budget": 2, "not compressed": 3, "failed": 4, "left out": 5}

    def key(row: CompressedCandidate) -> tuple[bool, int, float]:
        speed = row.vs_fp32.get(min(row.vs_fp32)) if row.vs_fp32 else None
        return row.kind != "parent", order[row.verdict], -(speed or 0.0)

    return sorted(rows, key=key)


def find_front(rows: Iterable[CompressedCandidate]) -> set[str]:
    """Names of the candidates on the Pareto front: no other is at least as good in loss, speed, size and memory, and
    better in one of them."""
    points = {
        row.name: (row.loss, -row.vs_fp32[min(row.vs_fp32)], row.size_bytes, row.memory_bytes or 0)
        for row in rows
        if row.loss is not None and row.vs_fp32
    }

    def is_beaten(one: tuple[float, ...]) -> bool:
        return any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in points.values())

    return {name for name, point in points.items() if not is_beaten(point)}


def cells(row: CompressedCandidate, front: Collection[str] = ()) -> tuple[str, ...]:
    """The row as the text of each column of HEADS."""
    first, last = (min(row.timings), max(row.timings)) if row.timings else (None, None)
    one = row.timings[first] if first is not None else None
    large = row.timings[last] if last is not None and last != first else None
    verdict = "" if row.kind == "parent" else row.verdict
    heavy = f"{row.quantized}/{row.quantized + row.floating}" if row.quantized + row.floating else ""
    return (
        row.name, verdict, "*" if row.name in front else "", _number(row.metric, "{:.4f}"),
        _number(row.loss, "{:+.4f}"), _number(row.loss_high, "{:.4f}"), _number(row.changed, "{}"),
        _bytes(row.size_bytes), _bytes(row.memory_bytes),
        heavy, _number(one.median_ms if one else None, "{:.3f}"), _number(one.p99_ms if one else None, "{:.3f}"),
        _number(large.median_ms if large else None, "{:.3f}"), _number(row.throughput, "{:.0f}"),
        _number(row.vs_fp32.get(first or 0), "{:.2f}"), _number(row.vs_eager.get(first or 0), "{:.2f}"),
    )  # fmt: skip


def as_table(rows: Iterable[CompressedCandidate]) -> str:
    """An aligned table, and a line for each candidate that is not offered, with the reason."""
    ordered = sort_rows(rows)
    front = find_front(ordered)
    lines = [HEADS, *(cells(row, front) for row in ordered)]
    used = find_used(lines[1:])
    widths = [max(len(line[at]) for line in lines) for at in used]
    text = ["  ".join(line[at].ljust(width) for at, width in zip(used, widths, strict=True)).rstrip() for line in lines]
    text += [f"  {row.name}: {reason}" for row in ordered if (reason := reasons(row))]
    return "\n".join(text)


def as_facts(rows: Iterable[CompressedCandidate], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same as values that JSON can hold."""
    rows = list(rows)
    return {
        **facts,
        "front": sorted(find_front(rows)),
        "candidates": [msgspec.to_builtins(row, str_keys=True) for row in sort_rows(rows)],
    }


def as_page(rows: Iterable[CompressedCandidate], facts: Mapping[str, Any]) -> str:
    """One HTML page: what was sealed, the plot of loss over speed, the table, the reasons, the request.
    `facts["chosen"]` names the candidate that was sealed; empty or not there: none was."""
    ordered, chosen = sort_rows(rows), facts.get("chosen") or ""
    title = f"{facts.get('name', 'bundle')}: compressed"
    front = find_front(ordered)
    lines = [cells(row, front) for row in ordered]
    at = HEADS.index("verdict")
    lines = [(*line[:at], "sealed", *line[at + 1 :]) if line[0] == chosen else line for line in lines]
    used = find_used(lines)
    parts = [
        f"<h1>{page.text(title)}</h1><div class=dim>for {page.text(facts.get('target', 'latency'))}, budget "
        f"{page.text(facts.get('budget', ''))}</div>",
        page.section("Result", *_result(ordered, facts)),
        page.section("Lost metric over speed", plot(ordered, facts.get("budget_amount")), _LEGEND),
        page.section(
            "Candidates",
            page.table([HEADS[at] for at in used], [[line[at] for at in used] for line in lines]),
            _COLUMNS,
        ),
        page.section(
            "Notes", page.table(("candidate", "reason"), [(row.name, reasons(row)) for row in ordered if reasons(row)])
        ),
        page.section("Request", page.table(("", ""), _request(facts))),
    ]
    return page.document(title, "".join(parts), wide=True)


_LEGEND = (
    "<p class=dim><span class=good>●</span> offered <span class=bad>●</span> over the budget, whose bound is the red "
    "line <span>●</span> no gain. A ring: on the Pareto front. Across: times the parent's speed at batch 1, which the "
    "upright line marks; up: the most that is lost of the metric (95 %).</p>"
)
_COLUMNS = (
    "<p class=dim>lost, at most: of the metric, and its bound (95 %). changed: records whose decision is another one. "
    "int8: heavy operators in int8, of all. batch 1 ms, p99, large ms: of a call with one record, and with many. "
    "x fp32, x eager: times as fast as the parent in its runtime, and as the model in PyTorch. front (*): no other "
    "candidate is better in loss, speed, size and memory at once.</p>"
)


def _result(rows: Sequence[CompressedCandidate], facts: Mapping[str, Any]) -> Iterable[str]:
    row = next((one for one in rows if one.name == facts.get("chosen")), None)
    if row is None:
        yield "<p>Nothing is sealed: no candidate keeps the budget and is better for the target.</p>"
        if why := facts.get("none_is_faster"):
            yield f"<p>None is faster: {page.text(why)}</p>"
        return
    lost = f"{facts.get('metric', 'metric')} {_number(row.metric, '{:.4f}')}, {_number(row.loss, '{:+.4f}')} lost, "
    speed = f"; {row.vs_fp32[min(row.vs_fp32)]:.2f} times as fast as the parent" if row.vs_fp32 else ""
    bound = f"{describe_bound(row)}; {_bytes(row.size_bytes)}"
    yield f"<p>Sealed: <b>{page.text(row.name)}</b>. {page.text(lost + bound + speed)}.</p>"
    if row.why:
        yield f"<p class={'bad' if row.why.startswith('ruined') else 'warn'}>{page.text(row.why)}</p>"


def describe_bound(row: CompressedCandidate) -> str:
    """How much of the metric the row may lose. JSON has no infinity: a row that was read again has None for it."""
    if row.loss_high is None or not math.isfinite(row.loss_high):
        return "without a bound: the records are too few"
    return f"{row.loss_high:.4f} at most (95 %)"


def _request(facts: Mapping[str, Any]) -> list[tuple[str, object]]:
    hidden = ("budget_amount", "none_is_faster", "chosen")
    shown = {key: value for key, value in facts.items() if key not in hidden and not isinstance(value, dict | list)}
    return [
        (key.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else value) for key, value in shown.items()
    ]


def find_used(lines: Sequence[Sequence[str]]) -> list[int]:
    """Places of the columns in which a line has text."""
    return [at for at in range(len(HEADS)) if any(line[at] for line in lines)]


def reasons(row: CompressedCandidate) -> str:
    """Why the candidate is not offered, what its name does not say, and which operators no kernel in int8 was found
    for."""
    more = ", ..." if row.floating > len(row.left) else ""
    shown = row.left and (row.quantized or row.verdict == "not compressed")
    left = f"in float32: {', '.join(row.left)}{more}" if shown else ""
    return "; ".join(part for part in (row.why, row.note, left) if part)


def plot(rows: Sequence[CompressedCandidate], budget: float | None) -> str:
    """A dot for each candidate: how many times as fast as the parent, and the upper bound of what it loses. Dots of the
    Pareto front have a ring."""
    front = find_front(rows)
    dots = [
        (row.vs_fp32[min(row.vs_fp32)], max(row.loss_high, 0.0), row)
        for row in rows
        if row.vs_fp32 and row.loss_high is not None and math.isfinite(row.loss_high)
    ]
    if not dots:
        return "<p class=dim>no candidate was judged and timed</p>"
    finite = budget is not None and math.isfinite(budget)
    top = 1.1 * max([loss for _, loss, _ in dots] + ([budget or 0.0] if finite else []) + [1e-6])
    right = 1.1 * max([speed for speed, _, _ in dots] + [1.0])
    x, y = page.scale(0, right, page.LEFT, page.WIDTH - 8), page.scale(0, top, page.HEIGHT - page.BOTTOM, 10)
    content = "".join(page.rule(y(value), f"{value:.2g}") for value in (0.0, top / 2, top))
    if finite:
        at = y(budget)
        content += f'<line x1="{page.LEFT}" x2="{page.WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--bad)"/>'
    content += f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="10" y2="{y(0):.1f}" stroke="var(--line)"/>'
    for speed, loss, row in sorted(dots, key=lambda dot: dot[2].verdict == "offered"):  # what is offered lies on top
        color = "good" if row.verdict == "offered" else "bad" if row.verdict == "over budget" else "dim"
        ring = f' stroke="var(--{color})" stroke-width="5" stroke-opacity="0.35"' if row.name in front else ""
        content += (
            f'<circle cx="{x(speed):.1f}" cy="{y(loss):.1f}" r="4" fill="var(--{color})"{ring}>'
            f"<title>{page.text(row.name)}: {speed:.2f} times as fast, loses at most {loss:.4g}</title></circle>"
        )
    foot = page.HEIGHT - 5
    content += f'<text x="{page.LEFT}" y="{foot}">0</text>'
    content += f'<text x="{page.WIDTH - 8}" y="{foot}" text-anchor="end">{right:.1f} times the parent\'s speed</text>'
    return page.svg("Loss of the metric, at most, over speed", content)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _bytes(value: int | None) -> str:
    if not value:
        return ""
    return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.0f} KiB"
