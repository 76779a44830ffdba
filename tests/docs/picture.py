"""Draws README's picture, docs/img/first-hour.svg, from the run that `docs.record` recorded. `make docs` runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from docs.record import OUT

SVG = OUT.with_suffix(".svg")
INK, LINE, DEAD, GOOD, AMBER = "#7d8590", "#2f7ff0", "#e5484d", "#2a9048", "#b87b00"
WIDTH, HEIGHT = 840, 330
LEFT, RIGHT, TOP, BOTTOM = 46, 450, 50, 230
"""The area of the loss curve."""


def _text(
    x: float, y: float, text: str, *, size: int = 12, fill: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{text}</text>'
    )


def _curve(record: dict[str, Any]) -> list[str]:
    """Loss over time, members below it, and a mark at each change of the group."""
    steps = record["steps"]
    last, top = steps[-1][1], max(loss for _, _, loss, _ in steps)

    def x_of(at: float) -> float:
        return LEFT + (RIGHT - LEFT) * min(max(at / last, 0), 1)

    def y_of(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * loss / top

    points = " ".join(f"{x_of(at):.1f},{y_of(loss):.1f}" for _, at, loss, _ in steps)
    drawn = [
        _text(LEFT, 24, "A job loses a worker, gets another, is scaled down", size=14, weight=600),
        f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="{INK}"/>',
        _text(LEFT - 6, TOP + 4, f"{top:.1f}", anchor="end"),
        _text(LEFT - 6, BOTTOM + 4, "0", anchor="end"),
        _text(LEFT + 14, TOP + 4, "loss"),
        f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="1.6" stroke-linejoin="round"/>',
        _text(RIGHT, BOTTOM + 18, f"{last:.0f} s, {steps[-1][0]} steps", anchor="end"),
        _text(LEFT, BOTTOM + 32, "workers"),
    ]
    views = [view for view in record["views"] if view[0] < last]
    for at, (began, workers, why) in enumerate(views):
        ends = views[at + 1][0] if at + 1 < len(views) else last
        colour = DEAD if "killed" in why else GOOD if "join" in why else AMBER if at else INK
        x = x_of(began)
        for lane in range(workers):
            y = BOTTOM + 62 - 10 * lane
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(x_of(ends) - x - 2, 1):.1f}" height="8" rx="2" fill="{LINE}"/>'
            )
        if at:
            side = -5 if "killed" in why else 5
            label = "SIGKILL" if "killed" in why else "joins" if "join" in why else "scaled"
            drawn.append(
                f'<path d="M{x:.1f} {TOP}V{BOTTOM + 70}" stroke="{colour}" stroke-dasharray="4 3" stroke-width="1.5"/>'
            )
            drawn.append(
                _text(x + side, TOP + 16, label, fill=colour, weight=600, anchor="end" if side < 0 else "start")
            )
    return drawn


def _proof(proof: dict[str, Any]) -> list[str]:
    """The answer to the first held-out record at each step of the line, and how far all answers are apart."""
    x, y = 500, TOP + 22
    drawn = [_text(x, 24, f"One scan, four times the same answer: a {proof['digit']}", size=14, weight=600)]
    for name, answer in proof["answers"].items():
        colour = GOOD if name == "served" else LINE
        drawn.append(f'<rect x="{x}" y="{y - 18}" width="300" height="28" rx="6" fill="{colour}"/>')
        drawn.append(_text(x + 12, y + 1, name, size=13, fill="#fff", weight=600))
        drawn.append(_text(x + 288, y + 1, f"{answer:.6f}", size=13, fill="#fff", anchor="end"))
        y += 38
    largest = max(proof["differences"].values())
    drawn += [
        _text(x, y + 6, f"{proof['records']} held-out records: largest difference {largest:.1e},", size=13),
        _text(x, y + 26, f"allowed {proof['tolerance']:.1e}; decisions changed: {proof['changed']}", size=13),
    ]
    return drawn


def picture(record: dict[str, Any]) -> str:
    """The picture as SVG."""
    certificates = record["certificates"]
    once = all(one["tally_min"] == one["tally_max"] == 1 for one in certificates)
    assert once, "the recorded run lost or repeated records"
    counted = f"each of the {certificates[0]['records']} records counted once in each of {len(certificates)} epochs"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" '
        'aria-label="Loss through a kill and a resize; the served answer equals the trained one">'
    )
    count = _text(LEFT, BOTTOM + 92, counted, size=13)
    return "\n".join([head, *_curve(record), count, *_proof(record["proof"]), "</svg>\n"])


def main() -> int:
    record = json.loads(OUT.read_text())
    SVG.write_text(picture(record))
    print(Path(SVG).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
