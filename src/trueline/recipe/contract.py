"""The recipe: a researcher fills in the blanks, Trueline does the rest.

A recipe is a Python file (or an importable object) with plain functions named in the field's terms. This
module holds the blanks and the value that the loader makes of them; it imports no torch, so that the CLI can
name a missing blank before anything heavy is loaded. Source: DESIGN §2; ElasticDL's model zoo for the other
spellings.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    """One name that a recipe may define."""

    name: str
    required: bool
    form: str
    """How it is written, e.g. `loss(outputs, labels)`."""
    meaning: str
    aliases: tuple[str, ...] = ()
    """ElasticDL's spellings, accepted as they are."""
    guessed: bool = True
    """Whether a function of nearly this name is taken for a misspelling: not where helpers are called so."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The positional arguments that Trueline calls it with, read off `form`."""
        inside = self.form[self.form.index("(") + 1 : self.form.index(")")]
        return tuple(name.strip() for name in inside.split(",") if name.strip())


BLANKS: tuple[Blank, ...] = (
    Blank(
        name="model",
        required=True,
        form="model() -> torch.nn.Module",
        meaning="a new, untrained model",
        aliases=("CustomModel", "custom_model"),
    ),
    Blank(
        name="loss",
        required=True,
        form="loss(outputs, labels) -> Tensor",
        meaning="the mean loss over the records of a batch (or one loss for each record)",
    ),
    Blank(
        name="optimizer",
        required=True,
        form="optimizer(params) -> torch.optim.Optimizer",
        meaning="an optimizer over the model's parameters",
    ),
    Blank(
        name="dataset",
        required=True,
        form="dataset(mode) -> map-style Dataset, or the URI of records",
        meaning="the records for mode 'training', 'evaluation' or 'prediction'",
        aliases=("dataset_fn",),
    ),
    Blank(
        name="feed",
        required=False,
        form="feed(records, mode) -> (inputs, labels)",
        meaning="turns a table of records (pyarrow.Table) into tensors; by their columns when it is left out",
    ),
    Blank(
        name="vocabulary",
        required=False,
        form="vocabulary() -> {column: [word, ...]}",
        meaning="the words of text columns, for records without a feed; a word is its place in the list",
        guessed=False,
    ),
    Blank(
        name="tokenizer",
        required=False,
        form="tokenizer() -> function(texts) -> Tensor or dict of them",
        meaning="makes tensors of a list of texts, for records without a feed",
        guessed=False,
    ),
    Blank(
        name="metrics",
        required=False,
        form="metrics() -> {name: function(outputs, labels)}",
        meaning="what evaluate reports beside the loss: one value for each record, or the mean of them",
        aliases=("eval_metrics_fn",),
    ),
    Blank(
        name="scheduler",
        required=False,
        form="scheduler(optimizer) -> torch.optim.lr_scheduler.LRScheduler",
        meaning="the learning-rate schedule, advanced once for each optimizer step",
        aliases=("learning_rate_scheduler",),
    ),
    Blank(
        name="examples",
        required=False,
        form="examples() -> inputs of a small batch",
        meaning="inputs to capture and prove with; the evaluation records are used when it is left out. Yield several "
        "batches and the dimensions in which they differ are free",
    ),
    Blank(
        name="dynamic_shapes",
        required=False,
        form="dynamic_shapes() -> {input: {axis: name}}",
        meaning="further free dimensions of the inputs, as torch.export declares them",
    ),
    Blank(
        name="preprocess",
        required=False,
        form="preprocess(request) -> inputs",
        meaning="turns a served request into the model's inputs",
    ),
    Blank(
        name="postprocess",
        required=False,
        form="postprocess(outputs) -> JSON value",
        meaning="turns the model's outputs into a served answer",
    ),
    Blank(
        name="search_space",
        required=False,
        form="search_space(trial) -> dict",
        meaning="hyper-parameters that tune may vary",
    ),
)


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
    metrics: Callable[[], Mapping[str, Callable[[Any, Any], Any]]] | None = None
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    examples: Callable[[], Any] | None = None
    dynamic_shapes: Callable[[], Mapping[str, Any]] | None = None
    preprocess: Callable[[Any], Any] | None = None
    postprocess: Callable[[Any], Any] | None = None
    search_space: Callable[[Any], Mapping[str, Any]] | None = None
    defaults: TrainingSettings = field(default_factory=TrainingSettings)
    """What the recipe sets at its top level; flags of the command win."""

    def source(self, mode: Mode) -> Source:
        """The records for `mode` as a Source. Raises RecipeError or DataError."""
        from trueline.data.open import as_source

        return as_source(
            self.dataset(mode),
            mode=mode,
            feed=self.feed,
            recipe=self.name,
            vocabulary=self.vocabulary,
            tokenizer=self.tokenizer,
        )


Names = Sequence[str]
