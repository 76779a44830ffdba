"""The doctor's result: a row for each submodule, and the rewrites that were proven. Values only; no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
    traceable: bool
    scriptable: bool
    exportable: bool
    cause: Cause | None
    rewrite: Rewrite | None
    why_not: str
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
            "recipe": self.recipe,
            "submodules": len(self.rows),
            "ready": self.ready,
            "healed": self.healed,
            "before": self.before,
            "rows": [asdict(row) for row in self.rows],
        }
