"""Watches the steps for what the trial of the loss before the first one did not see.

A loss may depend on something that few records have: a mask, a rare label, a missing value. So each batch is compared
with the records that were looked at, and each loss, before it counts, with what those of the trial divided by, which
autograd saves. Where one differs the batch is tried as the first ones were, whole and in parts, in a fork; then the
loop gets it, or gets it again.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import numpy as np
import torch

from trueline import events
from trueline.data.source import Batch
from trueline.errors import UsageError
from trueline.train.rehearsal import fork
from trueline.train.rehearsal.modes import ModuleModes
from trueline.train.step import features
from trueline.train.step.contribution import StepBatch
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.plan import Ints
from trueline.train.step.reduction import Divisors, Rule, fits, read_divisors
from trueline.train.step.trial import LossTrial, TrialInputs

FEW, NEW_LABELS = 13, 8
"""Records of a trial where some of them are new; new labels, from which on they are nothing new."""
_WORDS = {
    "zeros": "another number of zeros than all records",
    "nans": "missing values, as no record had",
    "lowest": "negative numbers, as no record had",
    "value": "a label that no record had",
}
_HINT = (
    "give the divisor as job.step(loss, weight=...) or as weight(labels) of the recipe; or set reduction = "
    '"mean" and micro_batch = N, and the loss is computed over whole shards of N records'
)


class Doubts:
    """`why` a batch or its loss differs from those that were tried, and has to be tried; empty: it does not."""

    def __init__(self, traits: ModelTraits, loop_model: torch.nn.Module | None = None) -> None:
        """`loop_model`: what a loop of the user's own trains."""
        self.why, self._how = "", traits.reduction
        self._modes = ModuleModes(loop_model) if loop_model is not None else None
        self._rules: dict[str, list[Rule]] = {traits.form: list(traits.divisors)} if traits.form else {}
        self._columns: list[features.Column] = [(at, kind, list(seen)) for at, kind, seen in traits.looks]
        self._found = Divisors(0, "", ())
        self._odd: list[int] = []
        self._new: features.News | None = None
        self._labels = 0
        self._ahead: tuple[Batch, features.News | None] | None = None
        """A batch that was read ahead, and what is new in it."""

    def look_ahead(self, batch: Batch | None, records: int) -> None:
        """Looks at the batch of the next step, if it was read ahead, while the worker waits for the sums of this one:
        its `look` then takes no time."""
        self._ahead = None if batch is None else (batch, features.find_new(self._columns, batch, records))

    def look(self, batch: StepBatch) -> bool:
        """Whether `batch` has records that are unlike all that were looked at: it is tried before its loss."""
        if self._modes is not None:
            self._modes.begin()
        ahead, self._ahead, self._odd = self._ahead, None, []
        known = ahead is not None and ahead[0].inputs is batch.inputs and ahead[0].labels is batch.labels
        if ahead is not None and known:
            self._new = ahead[1]
        else:
            self._new = features.find_new(self._columns, batch, len(batch.records))
        if self._new is not None:
            record = batch.records[self._new.places[0]]
            what = _WORDS[self._new.column[1]]
            self.why = f"has records with {what} that was looked at before the first step (record {record})"
        return bool(self.why)

    def rise(self, loss: torch.Tensor, records: int) -> bool:
        """Whether the `loss` of this number of records is unlike those that were tried, and has to be tried first; or
        was computed in other modes, so that the loop gets the batch again. Raises UsageError for those of no step."""
        if self._modes is not None and self._modes.compare():
            self.why = "has parts of the model in another mode"
            return True
        if not self._rules:
            return False
        found, self._new = read_divisors(loss, records), None
        self._found, rules = found, self._rules.get(found.form)
        if rules is None:
            self.why, self._odd = "has a loss of other operations than those that were tried before the first", []
            return True
        self._odd = [at for at, rule in enumerate(rules) if not fits(rule, records, found.values[at])]
        if self._odd:
            slope, constant = rules[self._odd[0]] or (0.0, 0.0)
            self.why = (
                f"has a loss that divides by {found.values[self._odd[0]]:g} for {records} records, where those that "
                f"were tried before the first divide by {slope * records + constant:g}"
            )
        return bool(self._odd)

    def try_again(
        self, tried: TrialInputs, doubted: StepBatch, settings: OptimizerSettings
    ) -> Generator[tuple[LossTrial, StepBatch], None, None]:
        """The batches of a trial of `doubted`, with that trial. Raises UsageError if its loss reduces otherwise."""
        if self._modes is not None and self._modes.repeats:
            self._modes.reset()
            self.why = ""
            return
        step = doubted.step
        trial = LossTrial(replace(tried, chosen=self._choose(tried, doubted.records), step=step))
        events.emit("loss.doubted", step=step, why=self.why)
        try:
            for batch in fork.try_again(trial, settings):
                yield trial, batch
                if trial.failed:
                    break
        except UsageError as error:
            raise UsageError(f"step {step} {self.why}: {error.message}", hint=error.hint) from error
        if (traits := getattr(trial, "traits", None)) is None:
            events.emit("loss.untried", why=f"a record of step {step} failed")
        self._settle(traits, step)
        self.why = ""

    def _choose(self, tried: TrialInputs, records: Ints) -> Ints:
        """The new records with others of their batch, or all of it; a batch of one record needs others beside it."""
        new = records if self._new is None else records[self._new.places][: FEW // 2]
        most = max(min(FEW, tried.most), len(new), 2)
        chosen = np.concatenate([new, np.setdiff1d(records, new)])
        others = np.setdiff1d(np.arange(min(2 * FEW, tried.num_records)), records)[: max(0, most - len(chosen))]
        try:
            tried.reader.read(others, epoch=0)
        except Exception:  # noqa: BLE001  a damaged record may raise anything; its step finds it
            others = others[:0]
        return np.concatenate([chosen, others])[:most]

    def _settle(self, traits: ModelTraits | None, step: int) -> None:
        self._ahead = None  # the columns may change
        same = traits is not None and traits.form == self._found.form
        if traits is not None and (
            traits.reduction != self._how
            or traits.whole
            or (same and any(traits.divisors[at] is None for at in self._odd))
        ):
            raise UsageError(
                f"step {step} {self.why}: the loss depends on something that few records have, so that its mean "
                "depends on how the step is shared",
                hint=_HINT,
            )
        if self._new is not None:
            self._accept_new(self._new)
            return
        if self._found.form not in self._rules:
            rules = list(traits.divisors) if traits is not None and same else [None] * len(self._found.values)
            self._rules[self._found.form] = rules
        for at in self._odd:  # it follows from the step
            self._rules[self._found.form][at] = None

    def _accept_new(self, new: features.News) -> None:
        at, kind, seen = new.column
        self._columns.remove(new.column)
        if kind == "value" and len(seen) < features.MOST_VALUES and self._labels < NEW_LABELS:
            self._labels += 1
            self._columns.append((at, kind, sorted({*seen, *new.values})))
