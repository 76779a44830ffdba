"""Each submodule with code of the user's own, innermost first: whether it can be captured, and the edit that heals it.

The whole model answers its probes once, while the calls of each submodule are recorded; each submodule is then examined
by itself on its calls. Rewrites of inner classes are in force while the outer ones are examined, so that a part that
only waits for another is distinguished from one that needs a rewrite itself.
"""

from __future__ import annotations

import difflib
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trueline import events
from trueline.capture.model import code_paths
from trueline.doctor.causes import cause_of, cause_of_rank_change
from trueline.doctor.diagnosis import Cause, Rewrite, Row, Status
from trueline.doctor.examine import Finding, Oracle, ask_original, examine, find_rank_change, scripts, traces
from trueline.doctor.export import copy_without_hooks
from trueline.doctor.patch import file_of, owner_of, patch_module
from trueline.doctor.recorded_calls import RecordedCall, alike, answer_of, recording
from trueline.doctor.search import Healed, heal
from trueline.errors import join_names

MAX_CALLS = 32
"""Calls that one submodule is compared on."""
WHOLE = "(model)"

OnnxCheck = Callable[[Finding, Oracle], str]


@dataclass(slots=True, kw_only=True)
class Survey:
    """Rows by path, and the user's files as edited by the rewrites."""

    onnx: OnnxCheck | None = None
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


def survey(model: torch.nn.Module, calls: Iterable[RecordedCall], *, onnx: OnnxCheck | None, base: Path) -> Survey:
    """Examines `model` (in evaluation mode) and its submodules on `calls` of the whole.

    `onnx` decides whether a rewrite's program is right as ONNX too; paths in diffs are relative to `base`.
    """
    watched = copy_without_hooks(model)
    modules = {path or WHOLE: part for path, part in watched.named_modules() if is_own(part)}
    modules.setdefault(WHOLE, watched)
    with recording(modules) as recorded:
        for call in calls:
            answer_of(watched, call, watch=True)
    originals = dict(model.named_modules())
    done = Survey(onnx=onnx, base=base)
    for path in sorted(modules, key=lambda path: -1 if path == WHOLE else path.count("."), reverse=True):
        events.emit("doctor.examining", submodule=path)
        part = originals["" if path == WHOLE else path]
        done.rows[path] = _row(path, part, _spread(alike(recorded[path])), done)
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
        return Row(
            path=path,
            class_name=type(module).__name__,
            status="blocked",
            traceable=False,
            scriptable=False,
            exportable=False,
            cause=None,
            rewrite=None,
            why_not="no probe of the model reached it",
        )
    key = _key(module, calls)
    if key in done.known:
        return replace(done.known[key], path=path)
    part = _Part(path, module, ask_original(module, calls))
    finding = examine(module, part.oracle)
    ranks = find_rank_change(part.oracle) if path == WHOLE and not finding.reason else None
    if ranks is not None:
        row = part.row("blocked", ranks, cause_of_rank_change(ranks), why=ranks.reason)
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
    cause = cause_of(part.module, part.oracle, finding)
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
    units = finding.divisors.values()
    rewrite = Rewrite(
        class_name=owner.__name__,
        file=file,
        steps=(*healed.steps, *([f"for sizes that are multiples of {max(units)}"] if units else ())),
        diff=_diff(before, healed.text, _relative(file, done.base)),
        probes=finding.compared,
        max_abs_error=finding.max_abs_error,
        onnx=done.onnx(finding, part.oracle) if done.onnx is not None else "",
        state=finding.memory.names if finding.memory is not None else (),
    )
    done.rewrites[owner] = rewrite
    events.emit("doctor.rewritten", module=owner.__name__, steps="; ".join(healed.steps), probes=rewrite.probes)
    return rewrite


def _relative(file: str, base: Path) -> str:
    relative = os.path.relpath(file, base)
    return Path(file).name if relative.startswith("..") else Path(relative).as_posix()


def _diff(before: str, after: str, name: str) -> str:
    """The edits as a unified diff of the user's file."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=2)
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
