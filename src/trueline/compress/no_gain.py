"""Why no candidate is faster: what of a call is not the program's, and what int8 adds to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueline.compress import search as searching
from trueline.compress.measure.kernels import count_kernels
from trueline.compress.measure.overhead import measure_overhead

if TYPE_CHECKING:
    from trueline.compress.candidate import CompressedCandidate
    from trueline.compress.search import Search


def explain_no_gain(search: Search) -> str:
    """Where candidates keep the budget and none is faster; empty: that is not so."""
    slower = [row for row in search.rows.values() if row.verdict == "no gain" and row.kind != "parent" and row.vs_fp32]
    if search.target != "latency" or not slower:
        return ""
    batch = min(search.reference.timed)
    best = max(slower, key=lambda row: (row.quantized > 0, row.vs_fp32[batch]))
    call, empty = measure_overhead(search.reference, batch, searching.QUICK_S)
    empty = min(call, empty)
    return " ".join([
        f"at batch {batch} a call of the parent takes {call:.0f} us, and {empty:.0f} us if it computes nothing "
        f"(a program with its inputs and outputs and no operators): none in this runtime can be more than "
        f"{call / empty:.2g} times as fast.", _describe_best(search, best, call), _describe_large(slower),
    ]).strip()  # fmt: skip


def _describe_best(search: Search, best: CompressedCandidate, call: float) -> str:
    """How much of the best one is in int8, and how many operators that has taken."""
    batch = min(best.vs_fp32)
    if not best.quantized:
        return f"None of them computes in int8; the best, {best.name}, takes {call / best.vs_fp32[batch]:.0f} us."
    made = count_kernels(search.path_of(best), best.format)
    whole = count_kernels(search.bundle_of(best.base).program_path("onnx"))
    text = (
        f"The best in int8, {best.name}, has {made.text} heavy operators in int8 and takes "
        f"{call / best.vs_fp32[batch]:.0f} us"
    )
    if made.operators > whole.operators and best.vs_fp32[batch] < 1:
        text += (
            f": it runs {made.operators} operators where the parent has {whole.operators}, and those that round and "
            "widen cost more than int8 saves"
        )
    return f"{text}."


def _describe_large(rows: list[CompressedCandidate]) -> str:
    """A candidate that is faster for many records at once, which a server that batches calls."""
    batch = max(rows[0].vs_fp32)
    best = max(rows, key=lambda row: row.vs_fp32_low.get(batch, 0.0))
    if batch == min(best.vs_fp32) or best.vs_fp32_low.get(batch, 0.0) <= searching.GAIN:
        return ""
    return f"At batch {batch} {best.name} is {best.vs_fp32[batch]:.2f} times as fast as the parent."
