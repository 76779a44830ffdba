"""A row of the report: what was done, what it costs, and whether it is offered."""

from __future__ import annotations

from typing import Literal

import msgspec

from trueline.compress.measure.latency import Timing
from trueline.compress.method import format_of

Verdict = Literal["offered", "over budget", "not compressed", "no gain", "failed", "left out"]


class CompressedCandidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One candidate. Fields that were not measured keep their defaults."""

    name: str
    kind: str
    exclude: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    base: str = ""
    trial: int = 0
    """Number of a choice of the Bayesian search; 0 for all others."""
    verdict: Verdict
    why: str = ""
    lacks_package: bool = False
    """Whether it failed since a package is not installed."""
    note: str = ""
    """How it was made, where that is not what its name says."""
    metric: float | None = None
    """Mean of the budget's metric over the evaluation records."""
    loss: float | None = None
    """How much of it is lost; negative: gained."""
    loss_low: float | None = None
    loss_high: float | None = None
    """One-sided 95 % bounds of the loss."""
    records_needed: int | None = None
    changed: int | None = None
    """Records whose decision is another one than the parent's."""
    size_bytes: int = 0
    memory_bytes: int | None = None
    quantized: int = 0
    floating: int = 0
    """Heavy kernels in the program as the runtime runs it."""
    left: tuple[str, ...] = ()
    """Names of the first operators that stay in float32."""
    fixed: dict[str, int] = {}
    """Sizes by symbol, for which the program is compiled a second time; the times are with it."""
    timings: dict[int, Timing] = {}
    """By batch size."""
    vs_fp32: dict[int, float] = {}
    """How many times as fast as the parent's program in the same runtime."""
    vs_fp32_low: dict[int, float] = {}
    """Its lower bound (99 %)."""
    vs_eager: dict[int, float] = {}
    """As `vs_fp32`, beside the recipe's model in PyTorch."""
    seconds: float = 0.0
    """Spent on it by the search."""
    folder: str = ""
    """Of its program, in the search's folder."""

    @property
    def format(self) -> str:
        return format_of(self.kind)

    @property
    def throughput(self) -> float | None:
        """Records each second at the largest batch."""
        if not self.timings:
            return None
        batch = max(self.timings)
        return 1e3 * batch / self.timings[batch].median_ms
