"""Emits TorchScript: by trace, by script, or by a mix of both for each submodule.

    trace    records one call; wrong as soon as the code branches
    script   compiles the code with all branches, but only a part of Python
    mix      a submodule whose own code branches is scripted, and those that cannot be scripted are traced

The caller proves each in turn and takes the first that holds. Nested inputs and outputs become flat tensors in the
order of the signature.
"""

import ast
import copy
import functools
import inspect
import io
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from trueline import files
from trueline.bundle.signature import TensorSpec
from trueline.capture.export.caught_errors import follow
from trueline.capture.export.tracing import quiet
from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.dynamic_dims import resize_tensor
from trueline.capture.model.signature import BATCH, Calling, TensorModule
from trueline.errors import BundleError, CaptureError, first_line, name_type
from trueline.runtime import torchscript_archive
from trueline.runtime.torchscript import FILE, first, ignore_deprecation

Way = Literal["script", "mix", "trace"]
_BRANCHES = (ast.If, ast.IfExp, ast.While, ast.For, ast.Break, ast.Continue, ast.Try)
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


def emit(
    module: torch.nn.Module, calling: Calling, folder: Path, way: Way, *, frozen: list[SourceLine] | None = None
) -> tuple[Path, str]:
    """Writes `folder/programs/model.ts`; returns its path and which submodules were scripted and traced.

    Appends to `frozen` the lines at which a trace freezes what a size decides. Raises CaptureError, with the user's
    line where it is known, when the model cannot be emitted in this way.
    """
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ignore_deprecation(), quiet(), torch.no_grad(), _note_frozen([] if frozen is None else frozen):
            made, how = _make(module, calling, way)
            raw = io.BytesIO(made.save_to_buffer())
    except Exception as error:
        if isinstance(error, CaptureError):
            raise
        place = code_paths.users_line(error)
        raise CaptureError(
            f"TorchScript by {way} cannot hold the model: {first(error)}", hint=f"{place}" if place else ""
        ) from error
    try:
        torchscript_archive.clean(raw, path)
    except BundleError as error:
        raise CaptureError(f"the TorchScript program cannot go into a bundle: {error.message}") from error
    except OSError as error:
        raise files.storage_error(error, path) from error
    return path, how


@contextmanager
def _note_frozen(places: list[SourceLine]) -> Iterator[None]:
    """Appends to `places` the lines for which torch warns that a trace freezes what a size decides; in a layer of torch
    that is torch's own affair, but a library may read a size as an array."""
    found: dict[SourceLine, None] = {}

    def note(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, torch.jit._trace.TracerWarning):
            asked = filename == torch._tensor.__file__  # `Tensor.__array__` and its like
            place = code_paths.current_line() if asked else SourceLine(file=filename, line=lineno)
            if place is not None and code_paths.is_users(place.file):
                found[place] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always", torch.jit._trace.TracerWarning)
        warnings.showwarning = note
        yield
    places += found


class _NoteRaised(TorchFunctionMode):
    """Notes the first error that an operator raises, whether the model catches it or not."""

    why = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.why = self.why or first_line(error)
            raise


def _make(module: torch.nn.Module, calling: Calling, way: Way) -> tuple[Any, str]:
    if way == "trace":
        example = tuple(
            resize_tensor(tensor, {axis: max(2, tensor.shape[axis]) for axis in _batch_axes(spec)})
            for spec, tensor in zip(calling.signature.inputs, calling.example, strict=True)
        )
        whole = TensorModule(module, calling).eval()
        return torch.jit.freeze(trace(whole, example, strict=False)), "by trace"
    if way == "script":
        return _flatten(torch.jit.script(module), module, calling), "by script"
    mixer = _Mixer(module, calling)
    if mixer.script(module) is not None:
        raise CaptureError("the whole model can be scripted: a mix is no other program")
    return _flatten(mixer.mix(module), module, calling), mixer.how()


def trace(module: torch.nn.Module, example: tuple[Any, ...], *, strict: bool) -> Any:
    """`torch.jit.trace` without its check. Raises CaptureError where it would end the process (torch 2.13): an operator
    fails, and the model catches that; and where the model catches an error of the trace alone."""
    with _NoteRaised() as raised, torch.no_grad():
        module(*example)
    if raised.why:
        raise CaptureError(f"the model catches an error of torch, which a trace does not survive: {raised.why}")
    options: Any = {"check_trace": False, "strict": strict}
    return follow(module, example, lambda: torch.jit.trace(module, example, **options))  # type: ignore[no-untyped-call]


def _batch_axes(spec: TensorSpec) -> list[int]:
    """The dimension that counts the records: a trace makes a constant of a size of 1."""
    free = [axis for axis, size in enumerate(spec.shape) if isinstance(size, str)]
    return free if spec.role == "state" else [axis for axis in free if spec.shape[axis] == BATCH]


def _flatten(scripted: Any, module: torch.nn.Module, calling: Calling) -> Any:
    """`scripted` with flat tensors in and out: the call and the way to each output are written as text."""
    # a new class each time: torch.jit shares the types of one class
    outer = torch.jit.script(type("Program", (_FlatProgram,), {"__module__": "trueline"})(scripted))
    outer.define(_forward_text(module, calling))
    return torch.jit.freeze(outer.eval())


class _FlatProgram(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def _forward_text(module: torch.nn.Module, calling: Calling) -> str:
    args, kwargs = calling.arguments([_Name(f"x{i}") for i in range(len(calling.example))])
    given = [_literal(value) for value in args] + [f"{key}={_literal(value)}" for key, value in kwargs.items()]
    args, kwargs = calling.arguments(calling.example)
    found = pytree.tree_flatten_with_path(module(*args, **kwargs))[0]
    ways = [way for way, leaf in found if isinstance(leaf, torch.Tensor)]
    takes = ", ".join(f"x{i}: Tensor" for i in range(len(calling.example)))
    lines = [f"def forward(self, {takes}):", f"    found = self.module({', '.join(given)})"]
    for i, way in enumerate(ways):
        lines += _unwrap(i, way)
    return "\n".join([*lines, f"    return ({', '.join(f'y{i}' for i in range(len(ways)))},)"]) + "\n"


def _unwrap(i: int, way: Sequence[Any]) -> list[str]:
    """Lines that set y`i` to the tensor at `way`, one name a step: TorchScript has one type for each name."""
    lines = [f"    y{i}_0 = found"]
    for step, key in enumerate(way, 1):
        lines += [f"    y{i}_{step} = y{i}_{step - 1}{key}", f"    assert y{i}_{step} is not None"]
    return [*lines, f"    y{i} = y{i}_{len(way)}"]


class _Name(str):
    """A variable's name, in place of a tensor."""

    __slots__ = ()


def _literal(value: Any) -> str:
    if isinstance(value, _Name):
        return str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        return f"float('{value}')"
    if type(value) is tuple:
        return f"({' '.join(_literal(one) + ',' for one in value)})"
    if type(value) is list:
        return f"[{', '.join(map(_literal, value))}]"
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {_literal(one)}" for key, one in value.items()) + "}"
    raise CaptureError(
        f"the model is called with {name_type(value)}, which TorchScript cannot be given",
        hint="call it with tensors, numbers, and tuples, lists and dicts of them",
    )


class _Mixer:
    """Scripts submodules that branch, traces those that cannot be scripted. Modules with replaced parts are copied."""

    def __init__(self, module: torch.nn.Module, calling: Calling) -> None:
        self._calls = _record_calls(module, calling)
        self._names = {id(part): name for name, part in module.named_modules()}
        self._done: dict[str, list[str]] = {"scripted": [], "traced": []}

    def how(self) -> str:
        done = [f"{what}: {', '.join(names)}" for what, names in self._done.items() if names]
        return "by a mix (" + "; ".join(done) + ")"

    def mix(self, module: torch.nn.Module) -> Any:
        """`module` as a ScriptModule. Raises what torch.jit raises for a part."""
        whole = self.script(module)
        if whole is not None:
            return whole
        if not branches(module):
            parts = {
                name: self.mix(child)
                for name, child in module.named_children()
                if any(branches(part) for part in child.modules())
            }
            return self._trace(module, parts)
        parts = {name: self._part(part) for name, part in module.named_children()}
        scripted = torch.jit.script(_replace_parts(module, parts))
        self._note("scripted", module)
        return scripted

    def _part(self, module: torch.nn.Module) -> torch.nn.Module:
        if isinstance(module, _CONTAINERS):
            return _replace_parts(module, {name: self._part(part) for name, part in module.named_children()})
        found: torch.nn.Module = self.mix(module)
        return found

    def script(self, module: torch.nn.Module) -> Any:
        """`module` compiled; None when the compiler cannot."""
        try:
            made = torch.jit.script(module)
        except Exception:  # noqa: BLE001 - whatever the compiler raises: the module is then traced, or taken apart
            return None
        self._note("scripted", module)
        return made

    def _trace(self, module: torch.nn.Module, parts: dict[str, Any]) -> Any:
        call = self._calls.get(id(module))
        if call is None:
            raise CaptureError(f"submodule '{self._names[id(module)]}' was not called on the example: it has no trace")
        made = trace(_replace_parts(module, parts), call, strict=False)
        self._note("traced", module)
        return made

    def _note(self, what: str, module: torch.nn.Module) -> None:
        self._done[what].append(self._names[id(module)] or "the model")


def _replace_parts(module: torch.nn.Module, parts: dict[str, Any]) -> torch.nn.Module:
    """`module` with other children; the parameters are the same tensors."""
    if not parts:
        return module
    made = copy.copy(module)
    made._modules = {**module._modules, **parts}
    return made


def _record_calls(module: torch.nn.Module, calling: Calling) -> dict[int, tuple[Any, ...]]:
    """The positional arguments of the first call of each submodule, in one call of `module` on its example."""
    calls: dict[int, tuple[Any, ...]] = {}

    def note(part: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs:
            bound = inspect.signature(part.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        calls.setdefault(id(part), args)

    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in module.modules()]
    try:
        calling.call(module, calling.example)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def branches(module: torch.nn.Module) -> bool:
    """Whether the module's own code, not that of its parts, has a branch or a loop. torch's modules trace well."""
    return any(_has_branches(kind) for kind in type(module).__mro__ if not kind.__module__.startswith("torch."))


@functools.cache
def _has_branches(kind: type) -> bool:
    methods = [one for name, one in vars(kind).items() if inspect.isfunction(one) and not name.startswith("__")]
    return any(isinstance(node, _BRANCHES) for one in methods for node in ast.walk(_tree(one)))


def _tree(function: Callable[..., Any]) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ast.Module(body=[], type_ignores=[])  # made without source: it can be traced only
