"""The specification of a workflow. Pure.

    models:                       dag:
      min-workers: 1                pre: [a, b]         each node, and the nodes that get its answer
      batch-size: 4                 a: [join]
      a: {url: a.mar}               b: [join]
      b: {url: b.mar, timeout-ms: 500}

A node that is not under `models` is a function of the workflow's handler. Settings directly under `models` apply to all
models; `retry-attempts` and `timeout-ms` also to functions. The graph has one start, which gets the request; the nodes
that lead to no other give the answer.
Source: TorchServe 0.12's WorkFlow, Dag and WorkflowModel.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, TypeVar

import msgspec

from trueline.errors import join_names
from trueline.serve.handlers.archive import ArchiveError

T = TypeVar("T")
MAX_NODES = 64
"""Each runs in one process or several."""
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class SpecError(ArchiveError):
    """A specification that cannot be used; the message names the part."""


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Settings of one model, or of all; None: not set."""

    min_workers: _Count | None = None
    max_workers: _Count | None = None
    batch_size: _Positive | None = None
    max_batch_delay: _Count | None = None
    """Milliseconds."""
    retry_attempts: _Count | None = None
    timeout_ms: _Positive | None = None

    @property
    def workers(self) -> int | None:
        """TorchServe starts `max-workers` of them."""
        return max((count for count in (self.min_workers, self.max_workers) if count is not None), default=None)

    def over(self, other: NodeSettings) -> NodeSettings:
        """These settings, completed by `other`."""
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(other, **{name: own[name] for name in SETTINGS if name in own})


SETTINGS = tuple(one.name for one in msgspec.structs.fields(NodeSettings))
_KEYS = tuple(one.encode_name for one in msgspec.structs.fields(NodeSettings))
DEFAULTS = NodeSettings(
    min_workers=1, max_workers=1, batch_size=1, max_batch_delay=50, retry_attempts=1, timeout_ms=10_000
)
"""TorchServe's."""
_NOTHING = NodeSettings()


class _Model(NodeSettings, frozen=True, kw_only=True, rename="kebab"):
    url: str


_OF_MODEL = ("url", *_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node."""

    name: str
    url: str = ""
    """Of its archive; empty for a function."""
    settings: NodeSettings = _NOTHING
    """The node's own and those of all models."""
    parents: tuple[str, ...] = ()
    """The nodes whose answers it gets."""

    @property
    def parameters(self) -> dict[str, str]:
        """Its settings as parameters of a registration."""
        names = {"initial_workers": self.settings.workers, "batch_size": self.settings.batch_size,
                 "max_batch_delay": self.settings.max_batch_delay}  # fmt: skip
        return {name: str(value) for name, value in names.items() if value is not None}

    @property
    def attempts(self) -> int:
        """At most."""
        retries = self.settings.retry_attempts
        return 1 + (DEFAULTS.retry_attempts or 0 if retries is None else retries)

    @property
    def timeout_s(self) -> float:
        """Of one attempt."""
        return (self.settings.timeout_ms or DEFAULTS.timeout_ms or 0) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A specification. `nodes` are in an order in which each follows its parents; `dag` is as written."""

    nodes: tuple[Node, ...]
    dag: Mapping[str, tuple[str, ...]]
    common: NodeSettings = DEFAULTS
    """The settings of all models."""
    ignored: tuple[str, ...] = field(default=())
    """Entries without effect: models that the graph does not use, unknown keys."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """The nodes that lead to no other; their answers are the workflow's."""
        inner = {parent for node in self.nodes for parent in node.parents}
        return tuple(node.name for node in self.nodes if node.name not in inner)


def read(found: Mapping[str, Any], functions: Collection[str] | None) -> Spec:
    """The specification in `found`. `functions` are the names that the handler defines; None if only running it would
    show them. Raises SpecError.
    """
    common, models = _models(_mapping(found, "models"))
    dag = {name: _nexts(name, nexts) for name, nexts in _mapping(found, "dag").items()}
    parents: dict[str, list[str]] = {name: [] for name in dag}
    for name, nexts in dag.items():
        for child in nexts:
            parents.setdefault(child, []).append(name)
    if not 0 < len(parents) <= MAX_NODES:
        raise SpecError(f"the dag has {len(parents)} nodes; 1 to {MAX_NODES} go")
    unknown = [name for name in parents if name not in models and functions is not None and name not in functions]
    if unknown:
        raise SpecError(
            f"node '{unknown[0][:64]}' of the dag is neither a model of the specification (it has: {_names(models)}) "
            f"nor a function of the handler (it has: {_names(functions or ())})"
        )
    every = NodeSettings(retry_attempts=common.retry_attempts, timeout_ms=common.timeout_ms)
    nodes = tuple(
        Node(
            name=name,
            url=models[name].url if name in models else "",
            settings=models[name].over(common) if name in models else every,
            parents=tuple(parents[name]),
        )
        for name in _sort(parents)
    )
    starts = [node.name for node in nodes if not node.parents]
    if len(starts) != 1:
        raise SpecError(
            f"the dag has the start nodes {_names(starts)}; it may have one: put a function before them that passes "
            "the request on"
        )
    ignored = [key for key in found if key not in ("models", "dag")]
    ignored += [f"models.{name}" for name in models if name not in parents]
    ignored += [f"models.{name}.{key}" for name in models for key in found["models"][name] if key not in _OF_MODEL]
    return Spec(nodes=nodes, dag=dag, common=common.over(DEFAULTS), ignored=tuple(ignored))


def _mapping(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    mapping = found.get(key)
    if not isinstance(mapping, dict):
        raise SpecError(f"'{key}' of the specification is to be a mapping by name, it is {_kind(mapping)}")
    for name in mapping:
        if not isinstance(name, str):
            raise SpecError(f"{str(name)[:64]!r} under '{key}' is no text: put it into quotes")
    return mapping


def _models(given: Mapping[str, Any]) -> tuple[NodeSettings, dict[str, _Model]]:
    """The settings of all models, and the models by name."""
    settings = {key: value for key, value in given.items() if key in _KEYS}
    models = {}
    for name, value in given.items():
        if name in settings:
            continue
        if not isinstance(value, dict):
            raise SpecError(
                f"'{name[:64]}' under 'models' is {_kind(value)}, neither a model (url: file.mar) nor one of the "
                f"settings {', '.join(_KEYS)}"
            )
        models[name] = _convert(value, _Model, f"model '{name[:64]}'")
    return _convert(settings, NodeSettings, "'models'"), models


def _convert(value: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SpecError(f"{what} of the specification cannot be used: {error}") from error


def _nexts(name: str, nexts: Any) -> tuple[str, ...]:
    """The nodes that get the answer of `name`, each once; blank names are left out, as in TorchServe."""
    if not isinstance(nexts, list | None):
        raise SpecError(f"node '{name[:64]}' of the dag is to name a list of nodes, it is {_kind(nexts)}")
    for one in nexts or ():
        if not isinstance(one, str | None):
            raise SpecError(f"node '{name[:64]}' of the dag leads to something that is no name ({_kind(one)})")
    return tuple(dict.fromkeys(one.strip() for one in nexts or () if one and one.strip()))


def _names(names: Collection[str]) -> str:
    """The first 16, for a message."""
    shown = join_names(name[:64] for name in sorted(names)[:16])
    return shown if len(names) <= 16 else f"{shown} and {len(names) - 16} more"


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def _sort(parents: Mapping[str, list[str]]) -> list[str]:
    """Each node after its parents."""
    try:
        return list(TopologicalSorter(parents).static_order())
    except CycleError as error:
        circle = " -> ".join(str(name)[:64] for name in error.args[1][:9])
        raise SpecError(f"the dag goes in a circle: {circle}") from error


def functions_of(source: str) -> frozenset[str] | None:
    """The names that a module binds at its top level; None if a star import or a branch may bind others.

    Raises SpecError if it is no Python.

    >>> sorted(functions_of("from a import b as c\\nx = len\\ndef f(data, context): pass"))
    ['c', 'f', 'x']
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"the workflow's handler is no Python: {str(error)[:200]}") from error
    names: set[str] = set()
    for statement in module.body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(statement.name)
            case ast.Import() | ast.ImportFrom():
                names |= {(one.asname or one.name).partition(".")[0] for one in statement.names}
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Expr():
                names |= {
                    one.id
                    for one in ast.walk(statement)
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
                }
            case ast.Pass() | ast.Assert() | ast.Raise() | ast.Delete():
                pass
            case _:
                return None
    return None if "*" in names else frozenset(names)
