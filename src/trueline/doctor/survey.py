"""Every submodule of the user's own, from the innermost outwards: can it be captured, and what would heal it.

The whole model is asked its probes once, while each submodule's calls are noted; each submodule is then
examined by itself on what it was asked. Rewrites of inner classes are in force while the outer ones are
examined, so that a part that only waits for another is told from one that needs a rewrite itself.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trueline import events
from trueline.capture.model import code_paths
from trueline.doctor import divisible_sizes
from trueline.doctor.causes import cause_of, cause_of_lost_dimension
from trueline.doctor.diagnosis import Cause, Rewrite, Row, Status
from trueline.doctor.examine import (
    Finding,
    Oracle,
    ask_original,
    copy_without_hooks,
    examine,
    of_other_ranks,
    scripts,
    traces,
)
from trueline.doctor.patch import file_of, owner_of, patch_module
from trueline.doctor.recorded_calls import RecordedCall, alike, answer_of, recording
from trueline.doctor.search import Healed, diff, heal
from trueline.errors import join_names

MAX_CALLS = 32
"""Calls that one submodule is compared on."""
WHOLE = "(model)"


@dataclass(slots=True)
class Survey:
    """Rows by path, and the user's files as the rewrites have them."""

    rows: dict[str, Row] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    rewrites: dict[type, Rewrite] = field(default_factory=dict)
    known: dict[object, Row] = field(default_factory=dict)
    freed: bool = False
    """Whether a rewrite freed a size: what is left may take it in multiples only."""


OnnxCheck = Callable[[Finding, Oracle], str]


def survey(model: torch.nn.Module, calls: Iterable[RecordedCall], *, onnx: OnnxCheck | None, base: Path) -> Survey:
    """Examines `model` (in evaluation mode) and its submodules on `calls` of the whole.

    `onnx` says of a rewrite's program whether it is right as ONNX too; paths in diffs are relative to `base`.
    """
    watched = copy_without_hooks(model)
    modules = {path or WHOLE: part for path, part in watched.named_modules() if is_own(part)}
    modules.setdefault(WHOLE, watched)
    with recording(modules) as noted:
        for call in calls:
            answer_of(watched, call, watch=True)
    originals = dict(model.named_modules())
    done = Survey()
    for path in sorted(modules, key=_depth, reverse=True):
        events.emit("doctor.examining", submodule=path)
        part = originals["" if path == WHOLE else path]
        if not noted[path]:
            done.rows[path] = _row_of_unreached(path, part)
            continue
        done.rows[path] = _row(path, part, _spread(alike(noted[path])), done, onnx, base)
    done.rows = {path: done.rows[path] for path in modules}
    return done


def _depth(path: str) -> int:
    return -1 if path == WHOLE else path.count(".")


def is_own(module: torch.nn.Module) -> bool:
    """Whether the module's `forward` is the user's code, or of a library that is not torch."""
    try:
        return code_paths.is_users(file_of(owner_of(module)))
    except StopIteration:
        return False


def _spread(calls: list[RecordedCall]) -> list[RecordedCall]:
    """At most MAX_CALLS of the calls, of as many shapes and as many kinds of values as can be, in the order in which
    they were made."""
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
        for indices in shapes.values():
            if indices:
                chosen.append(indices.pop(0))
    return [calls[index] for index in sorted(chosen[:MAX_CALLS])]


def _row_of_unreached(path: str, part: torch.nn.Module) -> Row:
    return _make_row(path, part, "blocked", Finding(reason="never called"), why="no probe of the model reached it")


def _row(
    path: str, part: torch.nn.Module, calls: list[RecordedCall], done: Survey, onnx: OnnxCheck | None, base: Path
) -> Row:
    key = _key(part, calls)
    if key in done.known:
        return _again(path, done.known[key])
    oracle = ask_original(part, calls)
    finding = examine(part, oracle)
    ranks = of_other_ranks(oracle) if path == WHOLE and not finding.reason else None
    if ranks is not None:
        row = _make_row(path, part, "blocked", ranks, part, oracle, cause_of_lost_dimension(ranks), why=ranks.reason)
    elif not finding.reason:
        row = _make_row(path, part, "ready", finding, part, oracle, why=_to_hand_on(finding))
    else:
        row = _unready(path, part, oracle, finding, done, onnx, base)
    done.known[key] = row
    return row


def _to_hand_on(finding: Finding) -> str:
    if finding.memory is None:
        return ""
    return f"it keeps a state in its buffers ({join_names(finding.memory.names)}): capture it with --state explicit"


def _key(part: torch.nn.Module, calls: list[RecordedCall]) -> object:
    """Equal for modules that differ in their parameters' values only."""
    plain = {name: repr(value) for name, value in vars(part).items() if isinstance(value, int | float | str | tuple)}
    shapes = [(name, tuple(value.shape)) for name, value in part.state_dict().items()]
    return (type(part), tuple(sorted(plain.items())), tuple(shapes), calls[0].form)


def _again(path: str, row: Row) -> Row:
    return replace(row, path=path)


def _unready(
    path: str,
    part: torch.nn.Module,
    oracle: Oracle,
    finding: Finding,
    done: Survey,
    onnx: OnnxCheck | None,
    base: Path,
) -> Row:
    cause = cause_of(part, oracle, finding)
    owner, after = owner_of(part), finding
    if done.texts:
        after = examine(patch_module(part, done.texts), oracle)
        found = examine(patch_module(part, done.texts), oracle, in_units=True) if after.reason and done.freed else after
        if not found.reason:
            status: Status = "rewritten" if owner in done.rewrites else "waits"
            return _make_row(path, part, status, finding, part, oracle, cause, done.rewrites.get(owner))
    # a part that no probe reached has no cause, and nothing waits for it
    inside = [row for row in done.rows.values() if _inside(row.path, path)]
    blocked = [row.path for row in inside if row.status == "blocked" and row.cause is not None]
    own = cause.file == file_of(owner)
    healed = heal(part, oracle, done.texts, after) if own or not blocked else "its submodule has to be healed first"
    if isinstance(healed, str):
        why = f"waits for {', '.join(blocked)}" if blocked and not own else healed
        return _make_row(path, part, "blocked", finding, part, oracle, cause, None, why)
    rewrite = _keep_rewrite(healed, part, oracle, done, onnx, base)
    return _make_row(path, part, "rewritten", finding, part, oracle, cause, rewrite)


def _inside(inner: str, outer: str) -> bool:
    return outer == WHOLE or inner.startswith(f"{outer}.")


def _keep_rewrite(
    found: Healed, part: torch.nn.Module, oracle: Oracle, done: Survey, onnx: OnnxCheck | None, base: Path
) -> Rewrite:
    owner = owner_of(part)
    file = file_of(owner)
    before = done.texts.get(file) or Path(file).read_text()
    done.texts[file] = found.text
    done.freed = done.freed or found.frees
    rewrite = Rewrite(
        class_name=owner.__name__,
        file=file,
        steps=(
            *found.steps,
            *([divisible_sizes.describe_divisors(found.finding.steps)] if found.finding.steps else ()),
        ),
        diff=diff(before, found.text, _relative(file, base)),
        probes=found.finding.compared,
        max_abs_error=found.finding.max_abs_error,
        onnx=onnx(found.finding, oracle) if onnx is not None else "",
        state=found.finding.memory.names if found.finding.memory is not None else (),
    )
    done.rewrites[owner] = rewrite
    events.emit("doctor.rewritten", module=owner.__name__, steps="; ".join(found.steps), probes=rewrite.probes)
    return rewrite


def _relative(file: str, base: Path) -> str:
    relative = os.path.relpath(file, base)
    return Path(file).name if relative.startswith("..") else Path(relative).as_posix()


def _make_row(
    path: str,
    part: torch.nn.Module,
    status: Status,
    finding: Finding,
    module: torch.nn.Module | None = None,
    oracle: Oracle | None = None,
    cause: Cause | None = None,
    rewrite: Rewrite | None = None,
    why: str = "",
) -> Row:
    asked_for = module is not None and oracle is not None
    return Row(
        path=path,
        class_name=type(part).__name__,
        status=status,
        traceable=asked_for and traces(part, oracle),  # type: ignore[arg-type]
        scriptable=asked_for and scripts(part, oracle),  # type: ignore[arg-type]
        exportable=not finding.reason,
        cause=cause,
        rewrite=rewrite,
        why_not=why,
    )
