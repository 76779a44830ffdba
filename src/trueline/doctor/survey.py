"""Each submodule with code of the user's own, innermost first: whether it can be captured, the line and construct that
block it, and the edit that heals it.

The whole model answers its probes once, while the calls of each submodule are recorded; each submodule is then examined
by itself on its calls. Rewrites of inner classes are in force while the outer ones are examined, so that a part that
only waits for another is distinguished from one that needs a rewrite itself.
"""

import ast
import difflib
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from trueline import events
from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.time_limit import OutOfTime, TimeLimit
from trueline.doctor.examine import Finding, Oracle, ask_original, examine, find_rank_change, scripts, traces
from trueline.doctor.export import copy_without_hooks
from trueline.doctor.patch import class_node, file_of, owner_of, patch_module
from trueline.doctor.recorded_calls import RecordedCall, alike, answer_of, recording
from trueline.doctor.report import Cause, Kind, Rewrite, Row, Status
from trueline.doctor.rewrites.scope import Scope, Spot
from trueline.doctor.rewrites.state import written_attribute
from trueline.doctor.rewrites.tensors.numbers import free_size
from trueline.doctor.search import Healed, function_at, heal, locals_of
from trueline.errors import join_names
from trueline.recipe.eager_mode import as_trained

MAX_CALLS = 32
"""Calls that one submodule is compared on."""
WHOLE = "(model)"
SHARE = 0.5
"""Of the time that is left, for one submodule: the others and the whole are examined in the rest."""

OnnxCheck = Callable[[Finding, Oracle], str]
Refusal = Callable[[torch.nn.Module], tuple[str, SourceLine | None]]
"""Why capture refuses the whole model, and the line; empty where it does not."""


@dataclass(slots=True, kw_only=True)
class Survey:
    """Rows by path, and the user's files as edited by the rewrites."""

    onnx: OnnxCheck | None = None
    refuse: Refusal | None = None
    base: Path = field(default_factory=Path.cwd)
    rows: dict[str, Row] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    rewrites: dict[type, Rewrite] = field(default_factory=dict)
    known: dict[object, Row] = field(default_factory=dict)
    freed: bool = False
    """Whether a rewrite freed a size: other modules may then accept only multiples."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A submodule with its calls and answers."""

    path: str
    module: torch.nn.Module
    oracle: Oracle

    def row(
        self, status: Status, finding: Finding, cause: Cause | None, rewrite: Rewrite | None = None, why: str = ""
    ) -> Row:
        return Row(
            path=self.path,
            class_name=type(self.module).__name__,
            status=status,
            traceable=traces(self.module, self.oracle),
            scriptable=scripts(self.module, self.oracle),
            exportable=not finding.reason,
            cause=cause,
            rewrite=rewrite,
            why_not=why,
        )


@as_trained()
def survey(
    model: torch.nn.Module,
    calls: Iterable[RecordedCall],
    *,
    onnx: OnnxCheck | None,
    base: Path,
    limit: TimeLimit | None = None,
    refuse: Refusal | None = None,
) -> Survey:
    """Examines `model` (in evaluation mode) and its submodules on `calls` of the whole.

    `onnx` decides whether a rewrite's program is right as ONNX too, `refuse` whether capture makes a graph of the
    whole; paths in diffs are relative to `base`. A submodule that does not end within its share of `limit` is blocked
    for want of time. Raises OutOfTime where the model itself does not answer its probes within it.
    """
    limit = limit or TimeLimit()
    watched = copy_without_hooks(model)
    modules = {path or WHOLE: part for path, part in watched.named_modules() if is_own(part)}
    modules.setdefault(WHOLE, watched)
    with recording(modules) as recorded:
        limit.run("the model on its probes", lambda: [answer_of(watched, call, watch=True) for call in calls])
    originals = dict(model.named_modules())
    done = Survey(onnx=onnx, refuse=refuse, base=base)
    for path in sorted(modules, key=lambda path: -1 if path == WHOLE else path.count("."), reverse=True):
        events.emit("doctor.examining", submodule=path)
        part = originals["" if path == WHOLE else path]
        stage = partial(_row, path, part, _spread(alike(recorded[path])), done)
        try:
            done.rows[path] = limit.run(f"submodule {path}", stage, share=1.0 if path == WHOLE else SHARE)
        except OutOfTime as error:
            why = error.with_line().message
            done.rows[path] = Row(path=path, class_name=type(part).__name__, status="blocked", why_not=why)
    done.rows = {path: done.rows[path] for path in modules}
    return done


def is_own(module: torch.nn.Module) -> bool:
    """Whether the module's `forward` is the user's code, or of a library that is not torch."""
    try:
        return code_paths.is_users(file_of(owner_of(module)))
    except StopIteration:
        return False


def _spread(calls: list[RecordedCall]) -> list[RecordedCall]:
    """At most MAX_CALLS of the calls, of as many shapes and kinds of values as possible, in their order."""
    if len(calls) <= MAX_CALLS:
        return calls
    shapes: dict[object, list[int]] = {}
    for index, call in enumerate(calls):
        shapes.setdefault(tuple(tensor.shape for tensor in call.tensors), []).append(index)
    mix = random.Random(0)
    for indices in shapes.values():
        rest = indices[1:]
        mix.shuffle(rest)
        indices[1:] = rest
    chosen: list[int] = []
    while len(chosen) < MAX_CALLS:
        chosen += [indices.pop(0) for indices in shapes.values() if indices]
    return [calls[index] for index in sorted(chosen[:MAX_CALLS])]


def _row(path: str, module: torch.nn.Module, calls: list[RecordedCall], done: Survey) -> Row:
    if not calls:
        why = "no probe of the model reached it"
        return Row(path=path, class_name=type(module).__name__, status="blocked", why_not=why)
    key = _key(module, calls)
    if key in done.known:
        return replace(done.known[key], path=path)
    oracle = ask_original(module, calls)
    part = _Part(path, module, replace(oracle, refuse=done.refuse) if path == WHOLE else oracle)
    finding = examine(module, part.oracle)
    ranks = find_rank_change(part.oracle) if path == WHOLE and not finding.reason else None
    if ranks is not None:
        cause = _cause("size branch", ranks.places[0], ranks.reason) if ranks.places else None
        row = part.row("blocked", ranks, cause, why=ranks.reason)
    elif finding.reason:
        row = _heal(part, finding, done)
    else:
        state = join_names(finding.memory.names) if finding.memory is not None else ""
        why = f"it keeps a state in its buffers ({state}): capture it with --state explicit" if state else ""
        row = part.row("ready", finding, None, why=why)
    done.known[key] = row
    return row


def _key(module: torch.nn.Module, calls: list[RecordedCall]) -> object:
    """Equal for modules that differ in their parameters' values only."""
    plain = {name: repr(value) for name, value in vars(module).items() if isinstance(value, int | float | str | tuple)}
    shapes = [(name, tuple(value.shape)) for name, value in module.state_dict().items()]
    return (type(module), tuple(sorted(plain.items())), tuple(shapes), calls[0].form)


def _heal(part: _Part, finding: Finding, done: Survey) -> Row:
    """The row of a part that cannot be exported, with a rewrite if one is proven."""
    cause = _cause_of(part.module, part.oracle, finding)
    owner, after = owner_of(part.module), finding
    if done.texts:
        after = examine(patch_module(part.module, done.texts), part.oracle)
        in_units = after.reason and done.freed
        if not after.reason or (
            in_units and not examine(patch_module(part.module, done.texts), part.oracle, in_units=True).reason
        ):
            status: Status = "rewritten" if owner in done.rewrites else "waits"
            return part.row(status, finding, cause, done.rewrites.get(owner))
    # a part that no probe reached has no cause, and nothing waits for it
    inside = [row for path, row in done.rows.items() if part.path == WHOLE or path.startswith(f"{part.path}.")]
    blocked = [row.path for row in inside if row.status == "blocked" and row.cause is not None]
    own = cause.file == file_of(owner)
    if own or not blocked:
        healed = heal(part.module, part.oracle, done.texts, after)
    else:
        healed = f"waits for {', '.join(blocked)}"
    if isinstance(healed, str):
        return part.row("blocked", finding, cause, why=healed)
    return part.row("rewritten", finding, cause, _keep_rewrite(healed, part, done))


def _keep_rewrite(healed: Healed, part: _Part, done: Survey) -> Rewrite:
    owner, finding = owner_of(part.module), healed.finding
    file = file_of(owner)
    before = done.texts.get(file) or Path(file).read_text()
    done.texts[file] = healed.text
    done.freed = done.freed or healed.frees
    units, relative = finding.divisors.values(), Path(os.path.relpath(file, done.base)).as_posix()
    name = Path(file).name if relative.startswith("..") else relative
    old, new = before.splitlines(keepends=True), healed.text.splitlines(keepends=True)
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=2)
    rewrite = Rewrite(
        class_name=owner.__name__,
        file=file,
        steps=(*healed.steps, *([f"for sizes that are multiples of {max(units)}"] if units else ())),
        diff="".join(line if line.endswith("\n") else line + "\n" for line in lines),
        probes=finding.compared,
        max_abs_error=finding.max_abs_error,
        onnx=done.onnx(finding, part.oracle) if done.onnx is not None else "",
        state=finding.memory.names if finding.memory is not None else (),
    )
    done.rewrites[owner] = rewrite
    events.emit("doctor.rewritten", module=owner.__name__, steps="; ".join(healed.steps), probes=rewrite.probes)
    return rewrite


def _cause_of(module: torch.nn.Module, oracle: Oracle, finding: Finding) -> Cause:
    """The first line of the user's code that explains `finding`, and why."""
    for place in finding.places:
        cause = _explain(place, module, oracle)
        if cause is not None:
            return cause
    state = None if oracle.forgetful and not oracle.written else _state(module)
    if state is not None:
        return state
    if finding.fixed:
        place = finding.fixed[0]
        return _cause("fixed size", place, f"it makes a constant of a size that varies: `{place.source}`")
    if finding.places:
        return _cause("exporter", finding.places[0], finding.reason)
    owner = owner_of(module)
    line = vars(owner)["forward"].__code__.co_firstlineno
    return _cause("exporter", SourceLine(file=file_of(owner), line=line), finding.reason)


def _cause(kind: Kind, place: SourceLine, words: str) -> Cause:
    return Cause(kind=kind, file=place.file, line=place.line, source=place.source, words=words)


def _explain(place: SourceLine, module: torch.nn.Module, oracle: Oracle) -> Cause | None:
    try:
        text = Path(place.file).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    function = function_at(ast.parse(text), place.line)
    if function is None:
        return None
    seen = locals_of(module, oracle, place.file, function)
    scope = Scope(text=text, function=function, seen=seen)
    spot = scope.spot(place.line)
    found = _construct(scope, spot) if spot is not None else None
    return None if found is None else _cause(found[0], place, found[1])


def _construct(scope: Scope, spot: Spot) -> tuple[Kind, str] | None:
    statement = spot.statement
    tried = [one.statement.body[-1].end_lineno or 0 for one in spot.outer if isinstance(one.statement, ast.Try)]
    if tried and statement.lineno <= tried[-1] and not isinstance(statement, ast.If | ast.While | ast.For):
        return "value branch", f"it takes another way where values make this raise: `{ast.unparse(statement)}`"
    if isinstance(statement, ast.If):
        return _branch(scope, statement.test, "if")
    if isinstance(statement, ast.While):
        return "value loop", f"values decide how often the loop runs: `while {ast.unparse(statement.test)}`"
    if isinstance(statement, ast.For):
        source = ast.unparse(statement.iter)
        if scope.depends_on(statement.iter) in ("size", "tensor"):
            return "time loop", f"the loop takes as many steps as a size that varies: `{source}`"
        return "value loop", f"values decide how often the loop runs: `{source}`"
    if isinstance(statement, ast.Break | ast.Continue):
        return "break", "values end the loop early"
    if isinstance(statement, ast.Assert):
        return _branch(scope, statement.test, "assert")
    return _expression(scope, statement)


def _branch(scope: Scope, test: ast.expr, word: str) -> tuple[Kind, str]:
    text, dependence = ast.unparse(test), scope.depends_on(test)
    if dependence == "size":
        return "size branch", f"it branches on a size that varies: `{word} {text}`"
    if dependence == "static":
        return "value branch", f"it branches on something that changes from call to call: `{word} {text}`"
    return "value branch", f"it branches on values: `{word} {text}`"


def _expression(scope: Scope, statement: ast.stmt) -> tuple[Kind, str] | None:
    for node in ast.walk(statement):
        if isinstance(node, ast.IfExp) and scope.depends_on(node.test) != "static":
            return _branch(scope, node.test, "… if")
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "tolist"):
            return "item", f"it takes numbers out of a tensor: `{ast.unparse(node)}`"
        if free_size(scope, node) is not None:
            return "fixed size", f"it makes a number of a size that varies: `{ast.unparse(node)}`"
        match node:
            case ast.Call(func=ast.Name(id="int" | "float" | "bool"), args=[given, *_]):
                if scope.depends_on(given) == "tensor":
                    return "item", f"it takes a number out of a tensor: `{ast.unparse(node)}`"
        if isinstance(node, ast.Call) and scope.depends_on(node) == "number":
            return "item", f"it computes with a number that was taken out of a tensor: `{ast.unparse(node)}`"
        match node:
            case ast.Subscript(slice=ast.Name() | ast.Compare() as mask) if scope.depends_on(mask) == "tensor":
                return "masked selection", f"values decide how much is selected: `{ast.unparse(node)}`"
        if isinstance(node, ast.ListComp) and any(scope.depends_on(one.iter) != "static" for one in node.generators):
            return "time loop", f"it takes as many steps as something that varies: `{ast.unparse(node)}`"
    return ("state", _state_words(statement)) if written_attribute(statement) else None


def _state_words(statement: ast.stmt) -> str:
    return f"it keeps a state between calls: `{ast.unparse(statement)}`"


def _state(module: torch.nn.Module) -> Cause | None:
    """The first line of the module's own class, or of a submodule's, that writes into `self`."""
    for part in module.modules():
        if type(part).__module__.startswith("torch."):
            continue
        file = file_of(owner_of(part))
        try:
            node = class_node(ast.parse(Path(file).read_text()), owner_of(part))
        except (OSError, SyntaxError):
            continue
        for statement in ast.walk(node) if node is not None else ():
            if isinstance(statement, ast.FunctionDef) and statement.name != "__init__":
                for one in ast.walk(statement):
                    if isinstance(one, ast.stmt) and written_attribute(one):
                        return _cause("state", SourceLine(file=file, line=one.lineno), _state_words(one))
    return None
