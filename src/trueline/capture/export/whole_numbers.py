"""Whole numbers that Python computes without a limit, and compiled programs in 64 bits: `n ** 5 % 97` of a length,
`total * 2654435761 % 97` of a sum.

What follows from sizes ends the claims below the size at which it passes 2**63. What follows from values has no such
end, so formats that compute in 64 bits are refused where it may pass: torch.export's own programs run in Python.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from trueline.bundle.signature import Signature, TensorSpec
from trueline.capture.export.exported import Exported
from trueline.capture.export.traced_lines import find_own_line, graphs_of
from trueline.errors import CaptureError

WIDEST = 2**63
SIZE_BITS, VALUE_BITS = 26, 53
LARGEST_SIZE = 2**SIZE_BITS
"""Sizes beyond this one are not looked at: a column of them is 256 MB of floats. A whole number of which nothing is
known is taken to have at most 53 bits, as exact floats have."""
TOGETHER_BITS = 36
"""The same of a product of sizes, in bits."""
_STEPS = 32
"""Operators that are looked at for what bounds a number."""
Sizes = Mapping[str, int]
Expression = Any
"""A number of torch's symbols, of sympy."""


def end_claims(exported: Exported) -> Exported:
    """`exported` with claims that end below the sizes at which a number of the program passes 2**63."""
    numbers = [expr for expr in _find_computed(exported) if not free_unbacked_symbols(expr)]
    if not numbers:
        return exported
    claims = tuple(_end(claim, exported, numbers) for claim in exported.claims)
    at = exported.claims.index(exported.signature)
    return replace(exported, claims=claims, signature=claims[at])


def refuse_large(exported: Exported) -> None:
    """Raises CaptureError, with the line, where a number that follows from values may pass 2**63."""
    sources, names = _find_sources(exported), exported.program.graph_signature.user_inputs
    given = {str(name): spec for name, spec in zip(names, exported.signature.inputs, strict=False)}
    for expr, node in _find_computed(exported).items():
        unbacked = free_unbacked_symbols(expr)
        most = {symbol: _find_most(sources.get(str(symbol)), given, _STEPS) for symbol in unbacked}
        if most and _may_pass(expr, exported, most):
            place = next(iter(find_own_line(node)), None)
            raise CaptureError(
                "a whole number that follows from values may pass 2**63, where Python continues to count and this "
                "format starts again from -2**63",
                hint=f"{place}" if place else "take the remainder first, or serve torch_export",
            )


def _may_pass(expr: Expression, exported: Exported, most: Mapping[Any, int]) -> bool:
    """Whether a number reaches 2**63 for values up to `most`, tried from small ones on: a power may have no end."""
    for bits in range(1, VALUE_BITS + 1):
        sizes = dict.fromkeys(exported.signature.symbols, 2 ** min(bits, SIZE_BITS))
        for sign in (1, -1):
            values = {symbol: sign * min(bound, 2**bits) for symbol, bound in most.items()}
            if _evaluate(expr, exported, sizes, values) >= WIDEST:
                return True
    return False


def _find_computed(exported: Exported) -> dict[Expression, torch.fx.Node]:
    """What the program computes of numbers, each with its first operator."""
    found: dict[Expression, torch.fx.Node] = {}
    for node in (node for graph in graphs_of(exported) for node in graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.is_symbolic() and node.op == "call_function":
            expr = value.node.expr
            if expr.args:
                found.setdefault(expr, node)
    return found


def _evaluate(expr: Expression, exported: Exported, sizes: Sizes, values: Mapping[Any, int]) -> int:
    """The magnitude of a number at these sizes; 0 where it is none."""
    known: dict[Any, int] = dict(values)
    for symbol in expr.free_symbols - known.keys():
        named = _names_of(str(symbol), exported)
        known[symbol] = next((sizes[ours] // step for ours, step in named.items()), 2)
    try:
        found = expr.subs(known)
        return abs(int(found)) if found.is_number and found.is_finite else 0
    except (OverflowError, AttributeError):  # what sympy makes of a number that its own floats cannot hold
        return WIDEST
    except (ArithmeticError, TypeError, ValueError):  # a division by a difference that is 0 at these sizes
        return 0


def _names_of(theirs: str, exported: Exported) -> dict[str, int]:
    """The signature's name of torch's symbol, with the size of one unit where it counts these (`4*units`)."""
    for name, ours in exported.symbols.items():
        if theirs in re.findall(r"\w+", name):
            step = re.match(r"(\d+)\*", name)
            return {ours: int(step[1]) if step else 1}
    return {}


def _end(claim: Signature, exported: Exported, numbers: Collection[Expression]) -> Signature:
    """`claim`, each size of it alone, and those of one number together, cut to where the numbers stay below 2**63."""
    few = dict.fromkeys(claim.symbols, 2)
    for expr in numbers:
        own = [ours for theirs in expr.free_symbols for ours in _names_of(str(theirs), exported) if ours in few]
        together = [(own, 2 ** (TOGETHER_BITS // len(own)))] if len(own) > 1 else []
        for symbols, most in (*(([symbol], LARGEST_SIZE) for symbol in own), *together):

            def fits(size: int, expr: Expression = expr, symbols: Collection[str] = symbols) -> bool:
                return _evaluate(expr, exported, few | dict.fromkeys(symbols, size), {}) < WIDEST

            largest = _largest(fits, most)
            for symbol in symbols:
                claim = _cut(claim, symbol, largest)
    return claim


def _largest(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest size up to `most` that fits; None where all do. Larger ones are not tried: a power may have no
    end."""
    good = 1
    while good < most and fits(min(2 * good, most)):
        good = min(2 * good, most)
    if good == most:
        return None
    bad = min(2 * good, most)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _cut(claim: Signature, symbol: str, most: int | None) -> Signature:
    dim = claim.dims[symbol]
    if most is None or (dim.max is not None and dim.max <= most):
        return claim
    largest = max(most - most % dim.multiple_of, dim.min)
    return msgspec.structs.replace(
        claim, dims={**claim.dims, symbol: msgspec.structs.replace(dim, max=largest, probed=False)}
    )


def _find_sources(exported: Exported) -> dict[str, torch.fx.Node]:
    """The tensors that numbers are taken out of, by torch's names of the numbers."""
    return {
        str(symbol): node.all_input_nodes[0]
        for graph in graphs_of(exported)
        for node in graph.nodes
        for symbol in node.meta.get("unbacked_bindings") or {}
        if node.all_input_nodes
    }


_COUNTS = "argmax argmin argsort nonzero searchsorted bucketize count_nonzero arange sort topk"
_SUMS = "sum cumsum"
_KEEPS = (
    "item select slice view reshape _unsafe_view clone alias detach contiguous max min amax amin squeeze unsqueeze "
    "expand flip index index_select gather masked_select permute transpose t getitem to _to_copy unbind split cummax "
    "cummin abs neg clamp clamp_min clamp_max where cat stack maximum minimum lift_fresh_copy"
)
_OPERATORS = {
    **dict.fromkeys(_COUNTS.split(), "counts"),
    **dict.fromkeys(_SUMS.split(), "sums"),
    **dict.fromkeys(_KEEPS.split(), "keeps"),
}


def _find_most(node: torch.fx.Node | None, given: Mapping[str, TensorSpec], steps: int) -> int:
    """What the numbers of a tensor are at most, in magnitude."""
    value = None if node is None else node.meta.get("val")
    if node is None or not steps:
        return WIDEST
    kind = value.dtype if isinstance(value, torch.Tensor) else None
    if kind is torch.bool:
        return 1
    whole = kind is not None and not kind.is_floating_point and not kind.is_complex
    own: int = int(torch.iinfo(kind).max) + 1 if kind is not None and whole else WIDEST
    if node.op == "placeholder":
        values = given[node.name].values if node.name in given else None
        ends = () if values is None or values.size else (values.low, values.high)
        limits = [abs(int(end)) for end in ends if end is not None]
        return min(own, max(limits)) if len(limits) == 2 else own
    name = getattr(node.target, "overloadpacket", node.target)
    how = _OPERATORS.get(getattr(name, "__name__", ""), "")
    inner = max((_find_most(one, given, steps - 1) for one in node.all_input_nodes), default=WIDEST)
    found = {"counts": LARGEST_SIZE, "sums": inner * LARGEST_SIZE, "keeps": inner}.get(how, WIDEST)
    return own if own < found else found
