"""`capture`: checkpoint in, bundle out, and nothing in it that was not proven.

    model + example ──observe──▶ eager answers and the way the code took
        └─export─▶ program ──judge──▶ proven | refused, with the user's line
                                 └─seal─▶ bundle

Holds the order of the steps and the rule which refusals are errors. Importing this imports no torch.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from trueline import events, files
from trueline.capture import opsets
from trueline.capture.proof.attempt import TABLE_FILE_MB, Attempt, Captured, State, TableRows
from trueline.errors import NotProven, UsageError, closest, join_names
from trueline.runtime.session import FORMATS, NATIVE, STAND_IN, USUAL, Format

if TYPE_CHECKING:
    from trueline.bundle import Bundle
    from trueline.capture.rung import Rung
    from trueline.capture.time_limit import TimeLimit
    from trueline.recipe.contract import Recipe
    from trueline.storage.location import Location


def capture(
    recipe: str | Path | Recipe,
    checkpoint: Location | None,
    out: str | Path,
    *,
    formats: Sequence[str] | None = None,
    one_is_enough: bool = False,
    overwrite: bool = False,
    state: State = "refuse", allow_random: bool = False, table_file_mb: int = TABLE_FILE_MB,
    opset: int | None = None, minutes: float | None = None, table_rows: TableRows = "float32",
) -> Captured:  # fmt: skip
    """Captures the recipe's model with `checkpoint`'s parameters into a bundle at `out`.

    Every format in `formats` has to be proven, or, with `one_is_enough`, one of them that may be served. Without
    `formats` the bundle takes each of the usual ones that can be proven, and TorchScript where none can. Without a
    checkpoint the model is captured as the recipe makes it. A model that writes its own buffers is refused, or, with
    `state="explicit"`, captured with an input `state.x` and an output `next.x` for each. One that draws random numbers
    is refused, or, with `allow_random`, compared by the distribution of its answers. `opset` (18 to 23) is that of the
    ONNX program, the exporter's own when left out. `table_rows` is how tables are stored, for eager and programs alike;
    beside the ONNX program a table has files of at most `table_file_mb` each.

    After `minutes` (30, and one for each 50 MB of weights, when left out) no further format is tried: the bundle takes
    what is proven by then, whatever `formats` says, and `Captured.programs` lists the others as untried.

    Raises OutOfTime when the model's own calls take longer, NotProven or CaptureError with the user's file and line
    where it is known, UsageError, RecipeError, CheckpointError, StorageError; nothing is then left at `out`.
    """
    wanted = _check_formats(formats)
    opset = opsets.check_opset(opset)
    _check_state(state)
    out = _check_free(out, overwrite=overwrite)
    from trueline.capture import sealing, subject
    from trueline.capture.ladder import climb
    from trueline.capture.time_limit import TimeLimit
    from trueline.recipe.contract import ONLY_CALLED
    from trueline.recipe.load import load_recipe

    limit = TimeLimit(minutes)
    recipe = load_recipe(recipe, needs=ONLY_CALLED)
    events.emit("capture.started", recipe=recipe.name, formats=",".join(wanted), out=str(out))
    prepare = partial(subject.prepare, recipe, checkpoint, state=state, allow_random=allow_random,
                      table_rows=table_rows, table_file_mb=table_file_mb)  # fmt: skip
    with _workplace(out, limit) as work:
        model = limit.run("the model with its example", prepare)
        limit.allow_weights(model.num_bytes)
        rungs = climb(model, wanted, work, otherwise=() if formats else STAND_IN, opset=opset, limit=limit)
        _require(rungs, every=bool(formats) and not one_is_enough, name=recipe.name)
        bundle = sealing.seal(recipe, checkpoint, model, rungs, out, overwrite=overwrite)
    return _report(bundle, out, rungs)


def capture_file(
    path: str | Path,
    out: str | Path,
    *,
    formats: Sequence[str] | None = None,
    one_is_enough: bool = False,
    overwrite: bool = False,
    inputs: Sequence[str] = (),
    trust: bool = False,
    opset: int | None = None,
    minutes: float | None = None,
) -> Captured:
    """Wraps the program at `path`, or captures the model in the folder `path`, into a bundle at `out`.

    Every format asked for has to be proven, or, with `one_is_enough`, one of those that can be made of the file;
    without `formats`, the file's own has to be, and ONNX of a .pt2 is tried. `inputs` declares what the file does not
    say (see `read_declarations`). With `trust` a pickled module is unpickled, which runs whatever its maker put
    into it, and a folder's weights may be a pickle, of which only tensors are taken. `minutes` is as in `capture`.

    Raises UsageError for a file that is no program (a pickle among them), for a format that cannot be made of it and
    for an `opset` of a program, OutOfTime, CaptureError, NotProven, BundleError, StorageError; nothing is then left at
    `out`.
    """
    path, out = Path(path), _check_free(out, overwrite=overwrite)
    from trueline.capture.files import input_specs, program
    from trueline.capture.time_limit import TimeLimit

    declared = input_specs.read_declarations(inputs) if inputs else None
    model = program.model_in(path, declared, trust=trust)
    how: dict[str, Any] = {"formats": formats, "one_is_enough": one_is_enough, "overwrite": overwrite}
    if model is not None:
        return capture(model, None, out, **how, opset=opset, minutes=minutes)
    if opset is not None:
        raise UsageError(
            f"{path.name} is a program, which keeps the operators that it has; opset {opset} was requested",
            hint="leave the release out, or capture the recipe that the file came from",
        )
    events.emit("capture.started", file=str(path), kind=program.kind_of(path), out=str(out))
    limit = TimeLimit(minutes)
    with _workplace(out, limit) as work:
        bundle, rungs = program.wrap(path, declared, work, out, **how, limit=limit)
    return _report(bundle, out, rungs)


def _check_state(state: str) -> None:
    if state not in get_args(State):
        raise UsageError(f"state is {state!r}, expected one of: {join_names(get_args(State))}")


def _check_free(out: str | Path, *, overwrite: bool) -> Path:
    if Path(out).exists() and not overwrite:
        raise UsageError(f"{out} exists already", hint="choose another name, or overwrite it (--overwrite)")
    return Path(out)


def _check_formats(formats: Sequence[str] | None) -> tuple[Format, ...]:
    if formats is None:
        return USUAL
    for name in formats:
        if name not in FORMATS:
            near = closest(name, FORMATS)
            raise UsageError(
                f"there is no program format '{name}' (there are: {join_names(FORMATS)})",
                hint=f"did you mean '{near}'?" if near else "",
            )
    if not formats:
        raise UsageError(f"name at least one format (there are: {join_names(FORMATS)})")
    if all(name in NATIVE for name in formats):
        raise UsageError(
            f"{join_names(formats)} is machine code and is never served by itself; ask for another format beside it",
            hint=f"add one of: {join_names(name for name in FORMATS if name not in NATIVE)}",
        )
    return tuple(name for name in FORMATS if name in formats)


@contextmanager
def _workplace(out: Path, limit: TimeLimit) -> Iterator[Path]:
    """A temporary folder on the disk of `out`, where a lack of space then shows."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=out.parent))
    except OSError as error:
        raise files.storage_error(error, out) from error
    from trueline.capture.time_limit import OutOfTime

    try:
        yield work
    except OutOfTime as error:
        raise error.with_line() from error
    finally:
        limit.wait_for_threads()
        shutil.rmtree(work, ignore_errors=True)


def _report(bundle: Bundle, out: Path, rungs: Sequence[Rung]) -> Captured:
    digest, serve = bundle.digest, bundle.manifest.serve
    events.emit("bundle.sealed", path=str(out), digest=digest, serve=serve)
    return Captured(path=out, digest=digest, serve=serve, programs=tuple(rung.attempt for rung in rungs))


def _require(rungs: Sequence[Rung], *, every: bool, name: str) -> None:
    refused = [rung.attempt for rung in rungs if rung.attempt.verdict == "refused"]
    untried = [rung.attempt for rung in rungs if rung.attempt.verdict == "untried"]
    proven = [rung.attempt.format for rung in rungs if rung.attempt.verdict == "proven"]
    if not (refused and every) and any(format not in NATIVE for format in proven):
        return
    first, *others = refused + untried
    also = f" (refused too: {join_names(attempt.format for attempt in others)})" if others else ""
    place = f"; see {first.line}" if first.line else ""
    raise NotProven(
        f"{first.format} program of '{name}' is not proven: {first.reason}{place}{also}", hint=_advice(first, proven)
    )


_BRANCHES = ("goes another way", "data-dependent", "DataDependent", "a number is taken out")
"""Words of a refusal that a branch on values is the cause of."""
_FIXED = re.compile(r"works for .* of \d+ only \(dimension")
"""Words of a refusal of a size that a line made a number of."""
_ALONE = re.compile(r"'batch 1, ([^']*, )?as given': the eager model raises")
"""Words of a refusal of a model that needs more than one record."""


def _advice(first: Attempt, proven: Sequence[Format]) -> str:
    from trueline.capture.proof.prove import ANSWERS
    from trueline.capture.rung import OTHER_SIZES

    if first.hint:
        return first.hint
    if ANSWERS in first.why:
        return (
            "the model refuses these values, no range of one input leaves them out, and the export lost the check: ask "
            "for torch_export or torchscript, which may keep it, or check before the model; `trueline doctor` may turn "
            "the check into a lookup that fails"
        )
    if _ALONE.search(first.why):
        return (
            "the model itself refuses one record alone, and a server has to answer a single request: statistics over "
            "the batch need more than one (a BatchNorm with track_running_stats answers it)"
        )
    if OTHER_SIZES in first.line and "ata-dependent" not in first.why:
        return (
            "that line goes by a size, and a program holds for all of them: `trueline doctor` looks for a rewrite "
            "without the branch or loop; or give examples of one size only"
        )
    if any(word in f"{first.line} {first.why}" for word in _BRANCHES):
        return (
            "a program follows one way only: make that line go one way, choosing with torch.where, or write it as "
            "torch.cond; a loop that ends by a value as torch.while_loop, or with all of its steps and a mask"
        )
    if _FIXED.search(first.why) and not proven:
        return (
            "that line makes a number of the size, which is then one for all sizes: compute with the size itself or "
            "with torch's functions of it (torch.hann_window(n) for np.hanning(n)); `trueline doctor` looks for a "
            "table over the size; or capture a bundle for each size, from examples of one size"
        )
    if "storage" in f"{first.line}" and not proven:
        return (
            "how large a storage is depends on how its tensor was made, and a request has none: compute with the sizes "
            "of the tensor (x.numel() * x.element_size())"
        )
    if first.line and not proven:
        return "`trueline doctor` looks for a rewrite of that line; --any takes any format that can be proven"
    return f"these formats are proven, ask for them alone: {join_names(proven)}" if proven else ""
