"""Explains a disagreement: the smallest input that shows it, and the first submodule whose output the program lacks.

    eager      forward hooks note what each call of a submodule returned, in the order in which the calls end
    program    every node of a graph names the submodules it is in: its value is noted for each of them

Calls end from the inside outwards, so the first one that no value of the program agrees with is the innermost. A
submodule without a node (an identity, or an unused one) does not count against the program, and one with several
outputs agrees when any of them does: a program leaves out what is not used.
"""

import inspect
import operator
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from trueline import events
from trueline.bundle.signature import DATATYPES, Array
from trueline.capture.export.exported import Exported
from trueline.capture.model import code_paths
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.explicit_state import users_own
from trueline.capture.onnx import emit
from trueline.capture.proof.careful import care
from trueline.capture.proof.observe import Observation, with_least_bounds
from trueline.capture.proof.probes import Probe, fit, resize
from trueline.capture.proof.prove import Proof, disagreement
from trueline.errors import TruelineError
from trueline.recipe.eager_mode import as_trained
from trueline.runtime import compare
from trueline.runtime.session import Session
from trueline.runtime.tensors import to_array, to_tensors

OWN = "the model itself, and none of its submodules"
QUESTIONS = 60
"""Inputs tried when shrinking; each is one run of the model and one of the program."""
SHOWN = 16
"""Elements of an input that are written out."""
_REPEAT = re.compile(r"@\d+")
"""torch marks a second call of the same submodule."""

Inputs = Mapping[str, Array]
Values = Mapping[str, Sequence[Array]]
"""Qualified name of a submodule, "" for the model -> the values that were computed in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submodule:
    """A part of the user's model."""

    name: str
    """Qualified; empty for the model itself."""
    kind: str
    place: str
    """`file:line` of its class; empty where there is no source."""

    def __str__(self) -> str:
        return f"'{self.name}' ({self.kind})" if self.name else f"{OWN} ({self.kind})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known of a disagreement."""

    probe: str = ""
    smallest: str = ""
    """The smallest input that shows it, and how."""
    stage: str = ""
    """In words, when the fault is not the export's; else empty."""
    submodule: Submodule | None = None

    @property
    def text(self) -> str:
        return self.smallest + (f"; {self.stage}" if self.stage else "")

    def amend(self, proof: Proof) -> Proof:
        """`proof` with the submodule in the evidence of the probe."""
        if self.submodule is None:
            return proof
        more = f"; first in submodule {self.submodule}"
        evidence = (
            msgspec.structs.replace(one, reason=one.reason + more) if one.probe == self.probe else one
            for one in proof.evidence
        )
        return replace(proof, evidence=tuple(evidence))


UNEXPLAINED = Explanation()
TIES = (
    "; in which order torch.topk, sort without stable=True and kthvalue take equal values is open, and no other "
    "runtime has torch's: torch.sort(x, dim, stable=True) has one that all have, and the first k of it are topk's "
    "values"
)
_OPEN = frozenset({torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.kthvalue.default})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """An input as small as it could be made, on which program and model still disagree."""

    inputs: Inputs
    reason: str

    def __str__(self) -> str:
        return "; ".join(_describe(name, array) for name, array in self.inputs.items())


def explain(
    format: str, exported: Exported, eager: EagerSession, probe: Probe, *, shrunk: Shrunk | None, work: Path
) -> Explanation:
    """Why the program in `format`, which disagrees on `probe`, does so, as far as it can be found out. `shrunk` is what
    `shrink` made of the probe; files are written to the disk of the folder `work`."""
    smallest = f"; the smallest input that shows it: {shrunk}: {shrunk.reason}" if shrunk else ""
    try:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            stage, submodule = blame(format, exported, eager, shrunk.inputs if shrunk else probe.inputs, Path(folder))
    except Exception as error:  # noqa: BLE001 - the graph of a wrong program, run node by node: it may raise anything
        events.emit("submodule.unknown", format=format, why=f"{type(error).__name__}: {error}")
        stage, submodule = "", None
    return Explanation(probe=probe.name, smallest=smallest, stage=stage, submodule=submodule)


def shrink(program: Session, eager: Session, probe: Probe, *, questions: int = QUESTIONS) -> Shrunk | None:
    """Shrinks `probe` greedily: sizes towards 1, then values towards zeros. None when the two agree on it (a
    disagreement that does not come back)."""
    runs = 0

    def differs(inputs: Inputs) -> str:
        nonlocal runs
        runs += 1
        if runs > questions:
            return ""
        try:
            program.signature.check(inputs)
            with code_paths.watch(ends=True), care(probe):
                expected = eager.run(inputs)
        except (TruelineError, RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            return ""  # outside the claim, or the model itself cannot answer it
        seen = Observation(probe=replace(probe, inputs=inputs), outputs=expected, error="", way=())
        return disagreement(program, *with_least_bounds(eager, [seen]))

    reason = differs(probe.inputs)
    if not reason:
        return None
    smallest = Shrunk(inputs=probe.inputs, reason=reason)
    for step in (_smaller, _simpler):
        smallest = _descend(smallest, step, program, differs)
    return smallest


def _descend(
    smallest: Shrunk,
    step: Callable[[Session, Inputs], Iterator[Inputs]],
    program: Session,
    differs: Callable[[Inputs], str],
) -> Shrunk:
    """Takes the first candidate that still differs, until none does."""
    while True:
        for candidate in step(program, smallest.inputs):
            reason = differs(candidate)
            if reason:
                smallest = Shrunk(inputs=candidate, reason=reason)
                break
        else:
            return smallest


def _smaller(program: Session, inputs: Inputs) -> Iterator[Inputs]:
    signature = program.signature
    base = signature.sizes(inputs)
    for symbol, size in base.items():
        step = signature.dims[symbol].multiple_of
        for wanted in sorted({step, 2 * step, 3 * step, size // 2 // step * step, size - step}):
            sizes = fit(signature, base, {symbol: wanted}) if 0 < wanted < size else None
            if sizes is not None and all(sizes[other] <= base[other] for other in base):
                yield resize(inputs, signature, sizes)


def _simpler(program: Session, inputs: Inputs) -> Iterator[Inputs]:
    for name, array in inputs.items():
        for candidate in _plainer(array):
            if not np.array_equal(candidate, array, equal_nan=array.dtype.kind == "f"):
                yield {**inputs, name: candidate}


def _plainer(array: Array) -> Iterator[Array]:
    """Simpler values: all alike, one half zero, whole numbers. Integers become the smallest that is there."""
    if not array.size:
        return
    if array.dtype.kind != "f":
        yield np.full_like(array, array.min())
        return
    yield np.zeros_like(array)
    if np.all(array == array.reshape(-1)[0]):
        return
    yield np.ones_like(array)
    flat = array.reshape(-1)
    kept = np.flatnonzero(flat)
    for part in (kept[: len(kept) // 2], kept[len(kept) // 2 :]) if len(kept) > 1 else ():
        fewer = flat.copy()
        fewer[part] = 0
        yield fewer.reshape(array.shape)
    yield np.asarray(np.sign(array) * np.ceil(np.abs(array)))


def _describe(name: str, array: Array) -> str:
    head = f"{name} {DATATYPES[array.dtype]} {list(array.shape)}"
    if array.size <= SHOWN:
        return f"{head} = {np.array2string(array, separator=', ', max_line_width=10_000, precision=4)}"
    return f"{head} from {array.min():.4g} to {array.max():.4g}"


def blame(
    format: str, exported: Exported, eager: EagerSession, inputs: Inputs, folder: Path
) -> tuple[str, Submodule | None]:
    """Where the program in `format` parts from the eager model on `inputs`: the stage, empty when it is the export, and
    the submodule. If `exported`, from which it was made, agrees, the fault lies in a later stage. Files are written to
    the empty `folder`."""
    calls = record_calls(eager, inputs)
    guilty = first_difference(calls, _exported_values(exported, inputs))
    if guilty is not None or format == "torch_export":
        return "", _submodule(eager, guilty)
    if format not in ("onnx", "openvino"):
        return "the exported program agrees, what was compiled from it does not", None
    guilty = first_difference(calls, emit.values(exported, inputs, folder))
    if guilty is None and format == "openvino":
        return "the ONNX program agrees in ONNX Runtime, and not in OpenVINO", None
    ties = TIES if uses_places_in_order(exported.program) else ""
    return f"the exported program agrees, its translation to ONNX does not{ties}", _submodule(eager, guilty)


def uses_places_in_order(program: torch.export.ExportedProgram) -> bool:
    """Whether something reads the places that an operator returns which leaves the order of equal values open."""
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return any(
        node.target is operator.getitem
        and node.args[1] == 1
        and node.users
        and getattr(node.args[0], "target", None) in _OPEN
        for graph in graphs
        for node in graph.nodes
    )


def _submodule(eager: EagerSession, name: str | None) -> Submodule | None:
    if name is None:
        return None
    kind = type(users_own(eager.module).get_submodule(name))
    try:
        place = f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        place = ""  # a class that was made without source
    return Submodule(name=name, kind=kind.__name__, place=place)


Call = tuple[str, tuple[Array, ...]]
"""A call of a submodule that ended: its name, and the tensors that it returned."""


def record_calls(eager: EagerSession, inputs: Inputs) -> list[Call]:
    """What each call of a submodule returns on `inputs`, in the order in which the calls end."""
    calls: list[Call] = []
    users = users_own(eager.module)
    names = {id(part): name for name, part in users.named_modules()}

    def note(part: torch.nn.Module, args: Any, output: Any) -> None:
        calls.append((names[id(part)], tuple(_arrays(output))))

    hooks = [part.register_forward_hook(note) for part in users.modules()]
    try:
        with code_paths.watch(ends=True):
            eager.run(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def first_difference(calls: Sequence[Call], values: Values) -> str | None:
    """The submodule of the first call that `values` do not agree with; None when all do."""
    for name, outputs in calls:
        known = values.get(name, ())
        pairs = [
            (want, got) for want in outputs for got in known if want.shape == got.shape and want.dtype == got.dtype
        ]
        if pairs and not any(compare.compare({"": want}, {"": got}).agrees for want, got in pairs):
            return name
    return None


class _NotingInterpreter(torch.fx.Interpreter):
    """Runs a graph and keeps the value of every node, by the submodules of the node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, list[Array]] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        arrays = list(_arrays(value))
        stack = n.meta.get("nn_module_stack") or {}
        for name in {emit.users_name(_REPEAT.sub("", path)) for path, _ in stack.values()} - {None}:
            self.values.setdefault(str(name), []).extend(arrays)
        return value


def _exported_values(exported: Exported, inputs: Inputs) -> Values:
    noting = _NotingInterpreter(exported.program.module(check_guards=False))
    with torch.no_grad(), as_trained():
        outputs = noting.run(*to_tensors(exported.signature, inputs), enable_io_processing=True)
    noting.values.setdefault("", []).extend(_arrays(outputs))
    return noting.values


def _arrays(value: Any) -> list[Array]:
    """Copies of the tensors in `value` that numpy knows."""
    return [
        to_array(leaf).copy()
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.dtype != torch.bfloat16 and not leaf.is_complex()
    ]
