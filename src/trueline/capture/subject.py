"""The subject of a capture: the model in evaluation mode, its oracle, and examples of its inputs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.arguments import as_arguments, register_containers
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.max_norm import shorten_rows
from trueline.capture.proof.attempt import TABLE_FILE_MB, State, TableRows
from trueline.capture.proof.observe import Observation, observe, watch_again
from trueline.capture.proof.probes import Probe
from trueline.checkpoint.checkpoint import bind_columns, load_model
from trueline.columns.fitted import FittedColumns
from trueline.data.source import Source
from trueline.data.sources.table_source import TableSource
from trueline.errors import CaptureError, DataError, RecipeError, TruelineError, UsageError, join_names
from trueline.recipe.contract import Mode, Recipe
from trueline.recipe.eager_mode import as_trained
from trueline.storage.location import Location

NUM_EXAMPLES = 5
"""Records of the example batch: a prime, so that it is seldom equal to another size of the model by chance."""
COUNTED, COUNTED_AT_ONCE = 2048, 256
"""Records whose ids are counted, for the most frequent ids of a table."""
NUM_LOOKED_AT = 4
"""Further records, spread over the data, that show the dimensions in which records differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to capture. `data` names the source of its examples."""

    module: torch.nn.Module
    eager: EagerSession
    data: dict[str, str | int]
    random: bool = False
    """Whether the model may draw random numbers; it is then compared by the distribution of its answers."""
    columns: FittedColumns | None = None
    rows: tuple[dict[str, Any], ...] = ()
    """The records of the example as JSON's values, where `columns` makes the inputs of them."""

    @property
    def num_bytes(self) -> int:
        """Of parameters and buffers."""
        return sum(one.nbytes for one in (*self.module.parameters(), *self.module.buffers()))

    def observe(self, probes: Iterable[Probe], *, num_draws: int = 0) -> tuple[Observation, ...]:
        """Runs the model once on each probe; all later steps compare with these answers."""
        observations = observe(self.eager, probes, num_draws=num_draws)
        kept = not num_draws and self.eager.recall.find_changed()
        return watch_again(self.eager, observations) if kept else observations


def prepare(
    recipe: Recipe,
    checkpoint: Location | None,
    *,
    dynamic_shapes: Mapping[str, Mapping[int, Any]] | None = None,
    state: State = "refuse",
    allow_random: bool = False,
    table_rows: TableRows = "float32",
    table_file_mb: int = TABLE_FILE_MB,
) -> Subject:
    """Loads the model and its examples. `dynamic_shapes` adds to what the recipe declares; `table_rows`: how the rows
    of embedding tables are stored, in files of at most `table_file_mb` each.

    With `state="explicit"` the buffers that the model writes become inputs and outputs. Raises RecipeError,
    CheckpointError, DataError, CaptureError.
    """
    if table_file_mb < 1:
        raise UsageError(f"table_file_mb is {table_file_mb}, expected a whole number of at least 1")
    recipe = bind_columns(recipe, checkpoint)
    with _locate_errors(recipe, "model"):
        made = load_model(recipe, checkpoint)
    module = _on_this_machine(made, recipe).eval()
    if table_rows != "float32":
        _narrow_tables(module, table_rows)
    for table in _find_tables(module):
        table.split_rows(table_file_mb * 1_000_000)
    with _locate_errors(recipe, "dataset" if recipe.examples is None else "examples"):
        batches, data, rows = _examples(recipe)
    shorten_rows(module, batches)
    if state == "explicit":
        module, batches = with_state(module, batches)
    with _locate_errors(recipe, "dynamic_shapes"):
        declared = dict(recipe.dynamic_shapes()) if recipe.dynamic_shapes is not None else {}
    for name, axes in (dynamic_shapes or {}).items():
        declared[name] = {**axes, **declared.get(name, {})}
    eager = EagerSession(module, batches[0], others=batches[1:], dynamic_shapes=declared)
    turned = [name or "the model" for name, part in module.named_modules() if part.training]
    if turned:
        raise CaptureError(
            f"the model turns itself to training mode when it is called ({turned[0]} is then in training): "
            "its answers are not those of a served model",
            hint="forward must not call self.train(); the caller of the model decides its mode",
        )
    return Subject(module=module, eager=eager, data=data, random=allow_random, columns=recipe.fitted, rows=rows)


def count_table_lookups(recipe: Recipe, module: torch.nn.Module) -> int:
    """Has the embedding tables of `module` count the ids of up to COUNTED records of the recipe, evaluation records if
    there are some; returns the number of records. None are counted where the model cannot read them in batches."""
    tables: list[Any] = [one for one in module.modules() if hasattr(one, "count_lookups")]  # `ps/model/embedding.py`
    if not tables:
        return 0
    done = 0
    with ExitStack() as counting, torch.no_grad():
        for table in tables:
            counting.enter_context(table.count_lookups())
        with suppress(Exception):  # a table of contents, which a capture does not fail for
            source, _ = _source(recipe)
            for start in range(0, min(COUNTED, source.num_records), COUNTED_AT_ONCE):
                stop = min(start + COUNTED_AT_ONCE, COUNTED, source.num_records)
                batch = _as_tensors(source.read(np.arange(start, stop, dtype=np.int64)).inputs)
                call = as_arguments(batch)
                module(*call.args, **call.kwargs)
                done = stop
    return done


def _narrow_tables(module: torch.nn.Module, kind: TableRows) -> None:
    tables = _find_tables(module)
    if not tables:
        raise UsageError(f"table rows were requested as {kind}, and the model has no table", hint="leave it out")
    for table in tables:
        table.narrow_rows(kind)


def _find_tables(module: torch.nn.Module) -> list[Any]:
    return [one for one in module.modules() if hasattr(one, "narrow_rows")]  # `ps/model/embedding.py`


@contextmanager
def _locate_errors(recipe: Recipe, blank: str) -> Iterator[None]:
    """An exception of the recipe's function `blank` becomes a RecipeError with the user's line."""
    try:
        yield
    except TruelineError:
        raise
    except Exception as error:
        place = code_paths.users_line(error)
        if place is None:
            raise
        message = "".join(f": {line}" for line in str(error).strip().splitlines()[:1])
        raise RecipeError(
            f"recipe '{recipe.name}': {blank}() raises {type(error).__name__}{message}; see {place}",
            hint=f"{blank}() is called as it is in the recipe, on this machine and from this folder",
        ) from error


def _on_this_machine(module: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    try:
        return module.cpu()
    except (NotImplementedError, RuntimeError) as error:
        devices = join_names(sorted({str(one.device) for one in (*module.parameters(), *module.buffers())}))
        raise RecipeError(
            f"recipe '{recipe.name}': the model is on {devices} and cannot be moved to the CPU: "
            f"{str(error).strip().splitlines()[0]}",
            hint="model() returns a model with its parameters; capture it on a machine that has the device, or build "
            "it on the CPU",
        ) from error


def with_state(module: torch.nn.Module, batches: Sequence[Any]) -> tuple[torch.nn.Module, list[Any]]:
    """`module` with its state explicit, and the examples with a state. Raises CaptureError."""
    with explicit_state.preserve_buffers(module):
        first = EagerSession(module, batches[0])  # raises, in words, what is wrong with the example
    weights = [name for name, _ in module.named_parameters() if name in first.changed]
    if weights:
        place = code_paths.writing_line(module, tuple(weights))
        raise CaptureError(
            f"the model writes its own parameters when it is called ({join_names(weights)})"
            + (f"; see {place}" if place else ""),
            hint="a state is made of buffers; call the model on its data once and capture what it then is",
        )
    calls = [as_arguments(batch) for batch in batches]
    with as_trained():
        explicit = explicit_state.lift_state(module, calls)
    if explicit is None:
        return module, list(batches)
    return explicit.eval(), [explicit_state.with_state(explicit, call) for call in calls]


def _examples(recipe: Recipe) -> tuple[list[Any], dict[str, str | int], tuple[dict[str, Any], ...]]:
    """Batches of examples: dimensions in which they differ are free. With columns, also the first batch as rows."""
    if recipe.examples is not None:
        given = recipe.examples()
        batches = list(given) if isinstance(given, Iterator) else [given]
        if not batches:
            raise RecipeError(
                f"recipe '{recipe.name}': examples() yielded nothing", hint="yield at least one small batch"
            )
        return [_as_tensors(batch) for batch in batches], {"examples": "recipe.examples()"}, ()
    source, mode = _source(recipe)
    count = min(NUM_EXAMPLES, source.num_records)
    ends = np.linspace(0, source.num_records - 1, NUM_LOOKED_AT).round()
    alone = {end: source.read(np.array([end], dtype=np.int64)).inputs for end in dict.fromkeys(map(int, ends))}
    first, which = _first(source, count, alone)
    facts = {"mode": mode, "num_records": source.num_records, "fingerprint": source.fingerprint()}
    rows: tuple[dict[str, Any], ...] = ()
    if recipe.fitted is not None and isinstance(source, TableSource) and recipe.feed is None:
        rows = tuple(recipe.fitted.rows_of_table(source.table(np.arange(count, dtype=np.int64))))
    return [_as_tensors(batch) for batch in (first, *alone.values())], {"examples": which, **facts}, rows


def _first(source: Source, count: int, alone: Mapping[int, Any]) -> tuple[Any, str]:
    """A batch of the first `count` records, and which they are. Records of unequal sizes make no batch: then it is the
    largest of those that were read `alone`, repeated. Raises DataError."""
    try:
        return source.read(np.arange(count, dtype=np.int64)).inputs, f"first {count} records"
    except DataError as error:
        sizes = {
            index: sum(math.prod(leaf.shape) for leaf in pytree.tree_leaves(inputs) if hasattr(leaf, "shape"))
            for index, inputs in alone.items()
        }
        largest = max(sizes, key=sizes.__getitem__)
        try:
            return source.read(np.full(count, largest)).inputs, f"record {largest}, {count} times"
        except DataError:
            raise error from None


def _source(recipe: Recipe) -> tuple[Source, Mode]:
    modes: tuple[Mode, ...] = ("evaluation", "training")
    why: list[str] = []
    for mode in modes:
        try:
            source = recipe.source(mode)
        except (DataError, RecipeError) as error:
            why.append(f"{mode}: {error.message}")
            continue
        if source.num_records:
            return source, mode
        why.append(f"{mode}: no records")
    raise RecipeError(
        f"recipe '{recipe.name}' gives no example to capture with ({'; '.join(why)})",
        hint="define examples() -> inputs of a small batch",
    )


def _as_tensors(inputs: Any) -> Any:
    """numpy arrays as tensors, through tuples, lists and dicts."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
            raise RecipeError(
                f"the example holds a tensor {list(leaf.shape)} on device 'meta', which has no numbers",
                hint="examples() returns real tensors",
            )
        if isinstance(leaf, np.ndarray):
            return torch.from_numpy(leaf)
        return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf

    register_containers(inputs)
    return pytree.tree_map(change, inputs)
