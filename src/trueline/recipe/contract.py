"""The blanks of a recipe, a Python file (or an importable object) with plain functions, and the value that the loader
makes of them.

Imports no torch, so that the CLI can name a missing blank before anything heavy is loaded. Source of the other
spellings: ElasticDL's model zoo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline import events
from trueline.columns.declared import Declared
from trueline.data.source import Mode as Mode
from trueline.errors import RecipeError
from trueline.recipe.settings import TrainingSettings

if TYPE_CHECKING:
    import torch

    from trueline.columns.fitted import FittedColumns
    from trueline.data.source import Source


ONLY_CALLED = ("model",)
"""What a recipe needs whose model is called and not trained, beside examples or a data set."""


@dataclass(frozen=True, slots=True)
class Blank:
    """One name that a recipe may define."""

    name: str
    form: str
    """How it is written, e.g. `loss(outputs, labels)`."""
    meaning: str
    required: bool = False
    aliases: tuple[str, ...] = ()
    """ElasticDL's spellings, which are accepted."""
    guessed: bool = True
    """Whether a function of a similar name counts as a misspelling: not where helpers often have such names."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The positional arguments that Trueline calls it with, read from `form`."""
        inside = self.form[self.form.index("(") + 1 : self.form.index(")")]
        return tuple(name.strip() for name in inside.split(",") if name.strip())


BLANKS: tuple[Blank, ...] = (
    Blank("model", "model() -> torch.nn.Module",
          "a new, untrained model; model(columns) receives the fitted columns, if the recipe declares any",
          required=True, aliases=("CustomModel", "custom_model")),
    Blank("loss", "loss(outputs, labels) -> Tensor",
          "the mean loss over the records of a batch (or their sum, or one loss for each record)", required=True),
    Blank("weight", "weight(labels) -> number",
          "what the mean loss of a batch with these labels divides by, where that is not its number of records: the "
          "tokens that are no padding, the sum of the class weights", guessed=False),
    Blank("optimizer", "optimizer(params) -> torch.optim.Optimizer", "an optimizer over the model's parameters",
          required=True),
    Blank("dataset", "dataset(mode) -> map-style Dataset, or the URI of records",
          "the records for mode 'training', 'evaluation' or 'prediction'", required=True, aliases=("dataset_fn",)),
    Blank("feed", "feed(records, mode) -> (inputs, labels)",
          "turns a table of records (pyarrow.Table) into tensors; by their columns when it is left out"),
    Blank("augment", "augment(inputs) -> inputs",
          "changes the inputs of training records at random, for records with columns; seeded for each record",
          guessed=False),
    Blank("tokenizer", "tokenizer() -> function(texts) -> Tensor or dict of them",
          "makes tensors of a list of texts, for records without a feed", guessed=False),
    Blank("metrics", "metrics() -> {name: function(outputs, labels)}",
          "what evaluate reports beside the loss: one value for each record, or the mean of them",
          aliases=("eval_metrics_fn",)),
    Blank("scheduler", "scheduler(optimizer) -> torch.optim.lr_scheduler.LRScheduler",
          "the learning-rate schedule, advanced once for each optimizer step", aliases=("learning_rate_scheduler",)),
    Blank("examples", "examples() -> inputs of a small batch",
          "inputs to capture and prove with; the evaluation records are used when it is left out. Yield several "
          "batches and the dimensions in which they differ are free"),
    Blank("dynamic_shapes", "dynamic_shapes() -> {input: {axis: name}}",
          "further free dimensions of the inputs, as torch.export declares them"),
    Blank("preprocess", "preprocess(request) -> inputs", "turns a served request into the model's inputs"),
    Blank("postprocess", "postprocess(outputs) -> JSON value", "turns the model's outputs into a served answer"),
    Blank("search_space", "search_space(trial) -> dict", "hyper-parameters that tune may vary"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe whose blanks are checked. Calling them may import torch; holding one does not."""

    name: str
    digest: str
    """SHA-256 of the recipe's source file."""
    path: Path | None
    """Its file, for another process to load it from; None for a recipe that is an object or a module."""
    model: Callable[..., torch.nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    dataset: Callable[[Mode], Any]
    feed: Callable[[Any, Mode], tuple[Any, Any]] | None = None
    columns: Mapping[str, Declared] | None = None
    """What the columns of the records are (`columns/declared.py`), for records without a feed."""
    fitted: FittedColumns | None = None
    """`columns`, fitted to the training records."""
    augment: Callable[[Any], Any] | None = None
    tokenizer: Callable[[], Callable[[list[str]], Any]] | None = None
    weight: Callable[[Any], Any] | None = None
    metrics: Callable[[], Mapping[str, Callable[[Any, Any], Any]]] | None = None
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    examples: Callable[[], Any] | None = None
    dynamic_shapes: Callable[[], Mapping[str, Any]] | None = None
    preprocess: Callable[[Any], Any] | None = None
    postprocess: Callable[[Any], Any] | None = None
    search_space: Callable[[Any], Mapping[str, Any]] | None = None
    missing: str | Mapping[str, str | int | float] = "refuse"
    """What stands in the place of missing values: a rule for all columns, or by column (`data/missing.py`)."""
    defaults: TrainingSettings = field(default_factory=TrainingSettings)
    """What the recipe sets at its top level; flags of the command win."""

    def records(self, mode: Mode) -> Any:
        """What `dataset(mode)` returns; relative paths are those beside the recipe's file, where there are such."""
        from trueline.data.open import beside

        return beside(self.dataset(mode), self.path.parent if self.path is not None else None)

    def source(self, mode: Mode) -> Source:
        """The records for `mode` as a Source. Raises RecipeError or DataError."""
        from trueline.data.loading.column_feed import ColumnFeed
        from trueline.data.missing import Missing
        from trueline.data.open import as_source

        feed: Callable[..., Any] | None = self.feed
        if feed is None and self.columns is not None:
            fitted = self.with_columns().fitted
            assert fitted is not None
            feed = ColumnFeed(fitted, self.augment)
        return as_source(
            self.records(mode),
            mode=mode,
            feed=feed,
            recipe=self.name,
            tokenizer=self.tokenizer,
            missing=Missing(self.missing, lambda: self.records("training")),
        )

    def with_columns(self, fitted: FittedColumns | None = None) -> Recipe:
        """This recipe with `fitted` columns, or with its own fitted to the training records, unless they are already.

        Raises RecipeError if `fitted` is of another declaration, DataError.
        """
        from trueline.data.open import fit_columns

        if self.columns is None or (fitted is None and self.fitted is not None):
            return self
        if fitted is not None:
            declared = {one.name: one.declared for one in fitted.columns}
            for name in {**self.columns, **declared}:
                if self.columns.get(name) != declared.get(name):
                    raise RecipeError(
                        f"recipe {self.name}: column '{name}' is declared as {self.columns.get(name)}, and was fitted "
                        f"as {declared.get(name)}",
                        hint="the recipe was changed since; restore it, or train again",
                    )
            return replace(self, fitted=fitted)
        dataset = self.records("training")

        def report(done: int, total: int) -> None:
            events.emit("columns.advanced", done=done, total=total)

        return replace(self, fitted=fit_columns(dataset, self.columns, report=report))

    def make_model(self) -> Any:
        """What `model()` returns, or `model(columns)` where it takes an argument. Raises RecipeError, DataError."""
        if self.columns is None or not takes_columns(self.model):
            return self.model()
        return self.model(self.with_columns().fitted)


def takes_columns(model: Callable[..., Any]) -> bool:
    """Whether `model` has a parameter without a default."""
    import inspect

    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in positional and one.default is one.empty for one in parameters)
