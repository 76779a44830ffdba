"""What the recipe's model and optimizer mean to parameter servers: names, shapes, groups, values and gradients.

The servers step the optimizer, so the optimizer of the recipe only says how: its class and settings by group when the
job begins, and the learning rate of each group at each push, which a scheduler may change.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trueline.errors import RecipeError, UsageError, join_names
from trueline.ps.messages import DenseSpec, ModelSpec, OptimizerSpec, TableSpec
from trueline.ps.model.embedding import Rows, TableModule
from trueline.ps.model.minibatch import Minibatch, Tables
from trueline.ps.partition import Ids
from trueline.train.step.joint import JointOptimizer

Flat = npt.NDArray[np.float32]
TABLE_STATE = ("anchor", "ids", "rows")
"""What a table's module has in the model's state_dict."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator for each row: the mean of the squares of its gradient. For embedding tables it takes
    a `dim`-th of Adagrad's memory.

    `lr`, `eps` and `initial_accumulator_value` are as in torch.optim.Adagrad. Source: FBGEMM's EXACT_ROWWISE_ADAGRAD.
    """

    def __init__(
        self, params: Any, lr: float = 0.01, *, eps: float = 1e-10, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
    ) -> None:  # fmt: skip
        settings = {
            "lr": lr, "eps": eps, "weight_decay": weight_decay, "initial_accumulator_value": initial_accumulator_value,
        }  # fmt: skip
        for name, value in settings.items():
            if not 0 <= value < float("inf"):
                raise UsageError(f"{name} of RowwiseAdagrad is {value}, expected a number of at least 0")
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._step(parameter, parameter.grad.to_dense(), group)
        return loss

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = gradient + group["weight_decay"] * parameter
        rows = gradient.reshape(len(gradient), -1) if gradient.dim() else gradient.reshape(1, 1)
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.full((len(rows),), group["initial_accumulator_value"], device=rows.device)
        state["sum"] += rows.square().mean(dim=1)
        scaled = rows / (state["sum"].sqrt() + group["eps"]).unsqueeze(1)
        parameter.sub_(scaled.reshape(parameter.shape), alpha=float(group["lr"]))


class ServedModel:
    """A model whose tables and parameters lie on servers.

    `spec` is what the servers are configured with; the names of dense parameters and buffers are those of the
    state_dict. Raises UsageError for an optimizer that the servers do not have, RecipeError for parameters that they
    cannot hold.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        *,
        seed: int = 0,
        clip_norm: float = 0.0,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.tables = Tables(model)
        self._clip_norm = clip_norm
        self._advanced = 0
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UsageError(
                "the scheduler ReduceLROnPlateau follows evaluations, and parameter servers go by the step",
                hint="take a scheduler of torch.optim.lr_scheduler that is a function of the step",
            )
        if scheduler is not None:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns otherwise: the servers step
        self._group_of = {id(one): i for i, group in enumerate(optimizer.param_groups) for one in group["params"]}
        self._parameters = {name: one for name, one in model.named_parameters() if self._is_dense(name, one)}
        self._buffers = dict(_find_buffers(model))
        groups = tuple(_read_groups(optimizer))
        dense = [
            DenseSpec(name=n, shape=tuple(one.shape), group=self._group_of[id(one)])
            for n, one in self._parameters.items()
        ]
        dense += [DenseSpec(name=name, shape=tuple(one.shape), group=-1) for name, one in self._buffers.items()]
        tables = describe_tables(self.tables, self._group_of)
        self.spec = ModelSpec(seed=seed, groups=groups, tables=tables, dense=tuple(dense))
        if not tables and not dense:
            raise RecipeError("the model has no parameter that its optimizer trains")

    def _is_dense(self, name: str, parameter: nn.Parameter) -> bool:
        if not parameter.numel() or id(parameter) not in self._group_of:
            return False
        if parameter.dtype not in _FLOATS:
            raise RecipeError(
                f"parameter '{name}' is {str(parameter.dtype).removeprefix('torch.')}, and servers hold float32",
                hint="model().float() makes all parameters float32",
            )
        return True

    def initial(self) -> dict[str, Flat]:
        """The values of dense parameters and buffers, flat, as the recipe made them."""
        return {name: _flatten(one) for name, one in {**self._parameters, **self._buffers}.items()}

    @torch.no_grad()
    def load(self, values: Mapping[str, Flat]) -> None:
        """Sets dense parameters and buffers in place; the names that are left out stay."""
        for name, flat in values.items():
            target = self._parameters[name] if name in self._parameters else self._buffers[name]
            target.copy_(torch.from_numpy(flat).view(target.shape))

    def gradients(self, minibatch: Minibatch) -> tuple[dict[str, tuple[Ids, Rows]], dict[str, Flat], float]:
        """After the backward: gradients of the tables, those of the dense parameters together with the buffers' values,
        and the norm of all gradients, after which they are clipped to `clip_norm`. The parameters' gradients are
        dropped. A parameter that took no part has zeros."""
        rows = minibatch.gradients()
        dense = {}
        for name, one in self._parameters.items():
            dense[name] = np.zeros(one.numel(), dtype=np.float32) if one.grad is None else _flatten(one.grad)
            one.grad = None
        norm = float(np.sqrt(sum(_sum_squares(one) for one in (*(r for _, r in rows.values()), *dense.values()))))
        if self._clip_norm and norm > self._clip_norm:
            factor = np.float32(self._clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            rows = {table: (ids, values * factor) for table, (ids, values) in rows.items()}
            dense = {name: values * factor for name, values in dense.items()}
        dense.update((name, _flatten(one)) for name, one in self._buffers.items())
        return rows, dense, norm

    def lrs(self, step: int) -> tuple[float, ...]:
        """The learning rate of each group at `step`, the number of steps that the servers have applied.

        Raises UsageError when the scheduler changes what servers were configured with.
        """
        while self.scheduler is not None and self._advanced < step:
            self.scheduler.step()
            self._advanced += 1
            if self._advanced == step and tuple(_read_groups(self.optimizer)) != self.spec.groups:
                raise UsageError(
                    f"the scheduler {type(self.scheduler).__name__} changes more of the optimizer than its learning "
                    "rate, and servers take that only",
                    hint="cycle_momentum=False for OneCycleLR and CyclicLR",
                )
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)

    def state_dict(self, dense: Mapping[str, Flat], tables: Mapping[str, tuple[Ids, Rows]]) -> dict[str, torch.Tensor]:
        """The model's state_dict with the servers' values: dense by name, flat, and ids and rows of each table."""
        from trueline.ps.tables.initial import initial_rows

        self.load(dense)
        state: dict[str, torch.Tensor] = dict(self.model.state_dict())
        for spec in self.spec.tables:
            ids, rows = tables.get(spec.name, (np.empty(0, np.int64), np.empty((0, spec.dim), np.float32)))
            for prefix in self.tables.prefixes[spec.name]:
                for key in TABLE_STATE:
                    del state[prefix + key]
            state.update(self.tables.state(spec.name, ids, rows, partial(initial_rows, spec, self.spec.seed)))
        return state


def describe_tables(tables: Tables, group_of: Mapping[int, int]) -> tuple[TableSpec, ...]:
    """`group_of`: the parameter group of each parameter, by its id(). Raises RecipeError for a table without one."""
    found = []
    for name, modules in tables.modules.items():
        groups = [group_of[id(one.anchor)] for one in modules if id(one.anchor) in group_of]
        if not groups:
            raise RecipeError(
                f"the optimizer was not given table '{name}'",
                hint="give it model.parameters(); each table has one without elements, for its group",
            )
        one = modules[0].settings
        found.append(TableSpec(
            name=name, dim=one.dim, group=groups[0], init=one.init, scale=one.scale, admit_after=one.admit_after,
            max_rows=one.max_rows, evict=one.evict,
        ))  # fmt: skip
    return tuple(found)


def _find_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers that are no table's."""
    kept = model.state_dict(keep_vars=True)
    tables = {f"{path}.{name}" if path else name for path, module in model.named_modules(remove_duplicate=False)
              if isinstance(module, TableModule) for name in TABLE_STATE}  # fmt: skip
    for name, one in model.named_buffers():
        if name in kept and name not in tables and one.numel():
            yield name, one


def _flatten(tensor: torch.Tensor) -> Flat:
    """A copy as float32; of a sparse gradient too."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    flat: Flat = dense.to(device="cpu", dtype=torch.float32, copy=True).reshape(-1).numpy()
    return flat


def _sum_squares(values: Rows) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))


def _read_groups(optimizer: torch.optim.Optimizer) -> Iterator[OptimizerSpec]:
    parts = optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)
    for part in parts:
        for group in part.param_groups:
            yield read_group(part, group)


def read_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> OptimizerSpec:
    """A group's settings for the servers. Raises UsageError for an optimizer that they do not have."""
    name = type(optimizer).__name__
    kinds = {"SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam", "SparseAdam": "adam", "AdamW": "adamw"}
    rowwise = isinstance(optimizer, RowwiseAdagrad)
    if not rowwise and (name not in kinds or not type(optimizer).__module__.startswith("torch.optim.")):
        raise UsageError(
            f"the optimizer {name} is not one that parameter servers step",
            hint=f"they have {join_names([*kinds, 'trueline.RowwiseAdagrad'])}; trueline.JointOptimizer joins several",
        )
    if group.get("amsgrad"):
        raise UsageError(f"{name} has amsgrad=True, which parameter servers do not have", hint="leave amsgrad out")
    kind = "rowwise_adagrad" if rowwise else kinds[name]
    known = {
        "momentum": "momentum", "dampening": "dampening", "nesterov": "nesterov", "weight_decay": "weight_decay",
        "eps": "eps", "betas": "betas", "lr_decay": "lr_decay", "initial_accumulator_value": "initial_accumulator",
        "maximize": "maximize",
    }  # fmt: skip
    found = {ours: group[theirs] for theirs, ours in known.items() if theirs in group}
    if "betas" in found:
        found["betas"] = tuple(map(float, found["betas"]))
    if kind == "adam" and group.get("decoupled_weight_decay"):
        kind = "adamw"
    return OptimizerSpec(kind=kind, **found)  # type: ignore[arg-type]
