"""The tables of a recipe's model in a worker of a hybrid job: rows come from the servers, gradients are gathered.

Each forward of the model begins a minibatch of lookups; the rows that earlier forwards told to expect are pulled at
once. Before the job begins, while the loss is tried, rows have their initial values, and there are no servers.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueline.errors import RecipeError
from trueline.ps.messages import ModelSpec, OptimizerSpec
from trueline.ps.model.convert import convert_embeddings, refuse_table_weights
from trueline.ps.model.embedding import Rows
from trueline.ps.model.minibatch import Minibatch, Tables, sum_by_id
from trueline.ps.model.strategy import TABLE_STATE, describe_tables, read_group
from trueline.ps.partition import Ids
from trueline.ps.tables.initial import initial_rows
from trueline.recipe.contract import Recipe
from trueline.train.step.joint import JointOptimizer

AveragedPuller = Callable[[dict[str, Ids], bool], Mapping[str, Rows]]
"""Unique ids by table, and whether their averages are wanted -> float32 (n, dim)."""
_UNUSED = OptimizerSpec(kind="sgd")
"""Of a group without tables: its parameters are stepped by the workers, with any optimizer."""


class HybridTables:
    """`pull`: where rows come from; None: they have their initial values. `weights`: the file from which the model
    begins."""

    def __init__(self, seed: int, ema: float = 0.0, *, tables_above: int = 0, weights: Path | None = None) -> None:
        self._seed, self._ema, self._tables_above, self._weights = seed, ema, tables_above, weights
        self.pull: AveragedPuller | None = None
        self.tables: Tables
        self.optimizer: torch.optim.Optimizer
        self._pieces: list[Minibatch] = []

    def watch(self, recipe: Recipe) -> Recipe:
        """The recipe with a model whose tables look up their rows here."""

        @functools.wraps(recipe.model)
        def model(*columns: Any) -> torch.nn.Module:
            return self._take_model(recipe.model(*columns))

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            given = list(parameters)
            made = recipe.optimizer(given)
            if {id(one) for one in given} & {id(one) for one in self._model.parameters()}:
                self.optimizer = made  # else it is tried with a copy of the model
            return made

        return replace(recipe, model=model, optimizer=optimizer)

    def _take_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._tables_above:
            convert_embeddings(model, self._tables_above)
        self.tables, self._model = Tables(model), model
        if not len(self.tables):
            raise RecipeError(
                "the model has no table for the servers", hint="trueline.Embedding is one; else leave --strategy out"
            )
        if self._weights is not None:
            refuse_table_weights(self.tables, self._weights)
        for name, modules in self.tables.modules.items():
            for module in modules:
                module.source, module.table = self, name
                module.anchor.requires_grad_(False)  # it takes no part in the all-reduce
        model.register_load_state_dict_pre_hook(self._leave_out)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        return model

    def _leave_out(self, model: Any, state: dict[str, Any], *_: Any) -> None:
        """A worker does not load the rows of a checkpoint: they are the servers'."""
        for name, prefixes in self.tables.prefixes.items():
            for prefix in prefixes:
                for key in [key for key in state if key.startswith(prefix)]:
                    del state[key]
                for key in TABLE_STATE:
                    state[prefix + key] = getattr(self.tables.modules[name][0], key).detach()

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """Raises UsageError for a table's optimizer that the servers do not have."""
        parts = self.optimizer.parts if isinstance(self.optimizer, JointOptimizer) else (self.optimizer,)
        groups = [(part, group) for part in parts for group in part.param_groups]
        group_of = {id(one): at for at, (_, group) in enumerate(groups) for one in group["params"]}
        tables = describe_tables(self.tables, group_of)
        used = {table.group for table in tables}
        specs = tuple(read_group(*one) if at in used else _UNUSED for at, one in enumerate(groups))
        return ModelSpec(seed=self._seed, groups=specs, tables=tables, ema=self._ema)

    @functools.cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that the workers step."""
        return [one for one in self._model.parameters() if one.requires_grad]

    @property
    def lrs(self) -> tuple[float, ...]:
        """The learning rate of each group now."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    @property
    def connected(self) -> bool:
        """Whether rows come from servers."""
        return self.pull is not None

    def initial(self, table: str, ids: Ids) -> Rows:
        spec = next(one for one in self.spec.tables if one.name == table)
        return initial_rows(spec, self._seed, ids)

    def _pull(self, wanted: dict[str, Ids]) -> Mapping[str, Rows]:
        if self.pull is not None:
            return self.pull(wanted, bool(self._ema) and not self._model.training)  # as OptimizerStep.use_averages
        return {table: self.initial(table, ids) for table, ids in wanted.items()}

    def _begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = args, kwargs
        if not torch.is_grad_enabled() and self._pieces and not self._pieces[-1].trains:
            self._pieces.pop()  # of the batch before of an evaluation
        plan = self.tables.predict(inputs)
        self._pieces.append(Minibatch(self.tables, self._pull, inputs, plan, self._pull(plan.wanted) if plan else {}))

    def look_up(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        if not self._pieces:  # a part of the model was called by itself
            self._pieces.append(Minibatch(self.tables, self._pull, None, None, {}))
        return self._pieces[-1].look_up(table, ids)

    def take_gradients(self, factor: float = 1.0) -> dict[str, tuple[Ids, Rows]]:
        """Of all forwards since the last call, for each table: unique ids and the sums of their gradients, float32
        (n, dim), times `factor`."""
        parts: dict[str, list[tuple[Ids, Rows]]] = {}
        for piece in self._pieces:
            for table, found in piece.gradients().items():
                parts.setdefault(table, []).append(found)
        self.drop()
        summed = {table: some[0] if len(some) == 1 else sum_by_id(some) for table, some in parts.items()}
        return {table: (ids, rows if factor == 1.0 else rows * np.float32(factor))
                for table, (ids, rows) in summed.items()}  # fmt: skip

    def drop(self) -> None:
        """Forgets the forwards since the last step."""
        self._pieces.clear()

    def state(self, rows: Mapping[str, tuple[Ids, Rows]]) -> dict[str, torch.Tensor]:
        """The entries of the model's state_dict for the servers' ids and rows."""
        state: dict[str, torch.Tensor] = {}
        for table in self.spec.tables:
            ids, values = rows.get(table.name, (np.empty(0, np.int64), np.empty((0, table.dim), np.float32)))
            initial: Callable[[Ids], Rows] = functools.partial(self.initial, table.name)
            state.update(self.tables.state(table.name, ids, values, initial))
        return state

    def list_names(self) -> list[str]:
        """The names in the model's state_dict in whose place `state` stands."""
        return [prefix + key for one in self.tables.prefixes.values() for prefix in one for key in TABLE_STATE]
