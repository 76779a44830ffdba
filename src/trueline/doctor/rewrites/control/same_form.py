"""What `torch.where` chooses between has one shape and dtype, or calls took both ways.

`torch.where` broadcasts and promotes: of `x if small else x.mean(0, keepdim=True)` it makes a tensor of x's shape, also
where the mean is chosen. The edit is run in a form that raises where the two differ.
"""

import ast
import copy
from collections.abc import Sequence
from dataclasses import replace

from trueline.doctor.rewrites.scope import Candidate, Scope, expression

_ONE_FORM = (
    "not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or (a.shape, a.dtype) == (b.shape, b.dtype)"
)
_WORDS = "the two ways have other shapes or dtypes, and no call goes the other way"


def check_forms(
    scope: Scope, block: Sequence[ast.stmt], new: Sequence[ast.stmt], words: str, ways: tuple[int, int] | None = None
) -> Candidate | None:
    """The edit that puts `new` in the place of `block`. `ways` are the lines of the condition and of one way: where
    calls do not take both, whatever `new` chooses between has to have one form on all of them."""
    candidate = scope.candidate(block, new, words)
    if candidate is None:
        return None
    known = {ast.unparse(node) for one in block for node in ast.walk(one) if isinstance(node, ast.Call)}
    checked = scope.replace(block, [_Checked(known).visit(copy.deepcopy(one)) for one in new])
    apart = ways if ways is not None and ways[0] != ways[1] else None
    return replace(candidate, alike=(checked,) if checked else (), ways=apart)


class _Checked(ast.NodeTransformer):
    """Choices that the edit makes, in a form that raises where the two differ."""

    def __init__(self, known: set[str]) -> None:
        self.known = known

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node)
        self.generic_visit(node)
        if ast.unparse(node.func) != "torch.where" or len(node.args) != 3 or text in self.known:
            return node
        given = ", ".join(ast.unparse(one) for one in node.args)
        return expression(f"(lambda p, a, b: torch.where(p, a, b) if {_ONE_FORM} else {{}}[{_WORDS!r}])({given})")
