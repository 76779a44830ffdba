"""A job's loss as a picture: static SVG without a script, for notebooks and files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

from trueline import files
from trueline.train.job_dir import JobDir, parse_events
from trueline.train.monitor.charts import Point, StepCurves

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 240, 56, 28, 16
_KEPT = (b'"step.applied"', b'"view.published"')


@dataclass(frozen=True, slots=True)
class Plot:
    """Shown by notebooks as it is; `save` writes it."""

    svg: str

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes an SVG file. Raises StorageError."""
        files.write_atomic(Path(path), self.svg.encode())


def plot_job(job_dir: Path) -> Plot:
    """The loss of each step of the job in `job_dir`, with a line at each change of its workers."""
    series, changes, step = StepCurves(), list[tuple[int, str]](), 0
    with JobDir(job_dir).events.open("rb") as lines:
        for name, fields, at in parse_events(line for line in lines if any(kept in line for kept in _KEPT)):
            if name == "step.applied":
                step, loss = int(fields["step"] or 0), float(fields["loss"] or 0)
                series.add(Point(step=step, at=at, loss=loss, records=int(fields["records"] or 0), seconds=0.0))
            elif series.points:
                changes.append((step, f"generation {fields.get('generation')}: {fields.get('why')}"))
    curve = [(point.step, point.loss / point.num) for point in series.points]
    return Plot(draw([(at, loss) for at, loss in curve if math.isfinite(loss)], changes, f"loss of {job_dir.name}"))


def draw(curve: list[tuple[int, float]], changes: list[tuple[int, str]], title: str) -> str:
    """`curve` over steps as SVG; `changes`: steps with what happened there, shown as lines with a tooltip."""
    low, high = min((loss for _, loss in curve), default=0.0), max((loss for _, loss in curve), default=1.0)
    last, span = max((step for step, _ in curve), default=1) or 1, (high - low) or 1.0

    def across(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 8) * step / last

    def down(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / span

    path = " ".join(f"{across(step):.1f},{down(loss):.1f}" for step, loss in curve)
    marks = "".join(
        f'<line x1="{across(step):.1f}" x2="{across(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#c33" '
        f'stroke-dasharray="3 3"><title>{escape(f"step {step}: {what}")}</title></line>'
        for step, what in changes
    )
    texts = [
        (LEFT - 6, TOP + 4, "end", f"{high:.4g}"), (LEFT - 6, HEIGHT - BOTTOM, "end", f"{low:.4g}"),
        (LEFT, HEIGHT - 8, "start", "step 0"), (WIDTH - 8, HEIGHT - 8, "end", f"step {last}"),
        (WIDTH // 2, HEIGHT - 8, "middle", title),
    ]  # fmt: skip
    labels = "".join(f'<text x="{x}" y="{y}" text-anchor="{to}">{escape(text)}</text>' for x, y, to, text in texts)
    frame = f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - 8}" fill="none" stroke="#999"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" style="max-width:{WIDTH}px" '
        f'role="img" font-family="sans-serif" font-size="11" fill="#777">{frame}{marks}'
        f'<polyline points="{path}" fill="none" stroke="#27c" stroke-width="1.5"/>{labels}</svg>'
    )
