"""The blanks of a recipe, a Python file (or an importable object) with plain functions, and the value that the loader
makes of them.

Imports no torch, so that the CLI can name a missing blank before anything heavy is loaded. Source of the other
spellings: ElasticDL's model zoo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline.data.source import Mode as Mode
from trueline.recipe.settings import TrainingSettings

if TYPE_CHECKING:
    import torch

    from trueline.data.source import Source

MODES: tuple[Mode, ...] = ("training", "evaluation", "prediction")


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
    Blank("model", "model() -> torch.nn.Module", "a new, untrained model",
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
    Blank("vocabulary", "vocabulary() -> {column: [word, ...]}",
          "the words of text columns, for records without a feed; a word is its index in the list", guessed=False),
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
    model: Callable[[], torch.nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    dataset: Callable[[Mode], Any]
    feed: Callable[[Any, Mode], tuple[Any, Any]] | None = None
    vocabulary: Callable[[], Mapping[str, Sequence[str]]] | None = None
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

    def source(self, mode: Mode) -> Source:
        """The records for `mode` as a Source. Raises RecipeError or DataError."""
        from trueline.data.missing import Missing
        from trueline.data.open import as_source

        return as_source(
            self.dataset(mode),
            mode=mode,
            feed=self.feed,
            recipe=self.name,
            vocabulary=self.vocabulary,
            tokenizer=self.tokenizer,
            missing=Missing(self.missing, lambda: self.dataset("training")),
        )


Names = Sequence[str]
