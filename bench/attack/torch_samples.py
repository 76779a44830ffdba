"""Reads torch's own list of its operators and modules, with the inputs that its tests use. Prints cases as JSON lines.

A process of its own (`python -m bench.attack.torch_samples`): the list changes settings of torch when it is imported.
"""

from __future__ import annotations

import json
import os
import re
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from bench.attack.operator_case import HEAD, OperatorCase
from torch.utils import _pytree as pytree

MOST, LOOKED_AT = 512, 16
"""Numbers of a constant or an example; samples of one operator."""
SKIPPED: Mapping[str, str] = {
    r"rand|.*bernoulli|.*multinomial|normal|.*dropout|uniform|exponential|geometric|cauchy|log_normal|.*rrelu"
    r"|.*fractional_max_pool|svd_lowrank|pca_lowrank": "random",
    r"empty|new_|zeros|ones|full|arange|linspace|logspace|eye$|tri[lu]_indices|signal\.windows|.*_like$|scalar_tensor"
    r"|.*fftfreq|.*rfftfreq|complex$|polar$": "makes its answer of sizes",
    r"sparse|.*to_sparse|jiterator|.*ops\.|resize|set_|.*_jvp|.*backward|.*from_dlpack|.*as_tensor|.*segment"
    r"|nonzero_static": "sparse, of a device, or of torch's inside",
    r"nn\.functional\.(embedding|one_hot)": "takes indices, which have cases of their own",
    r"equal$|allclose|is_same_size|item|.*is_|_(?!_)": "answers no tensor, or is private",
}
INDEXED: Mapping[str, tuple[str, int]] = {
    "embedding": ("F.embedding(x, C0)", 2),
    "embedding_bag sum": ('F.embedding_bag(x, C0, mode="sum")', 2),
    "embedding_bag max": ('F.embedding_bag(x, C0, mode="max")', 2),
    "one_hot": ("F.one_hot(x, 5).float()", 2),
    "gather": ("torch.gather(C0.expand(x.shape[0], 5, 4), 1, x[..., None].expand(-1, -1, 4))", 2),
    "take": ("torch.take(C0, x)", 2),
    "index": ("C0[x]", 2),
    "index_select": ("torch.index_select(C0, 0, x)", 1),
    "scatter": ("torch.zeros(x.shape[0], 5).scatter(1, x, 1.5)", 2),
    "scatter_add": ("torch.zeros(x.shape[0], 5).scatter_add(1, x, torch.ones_like(x, dtype=torch.float32))", 2),
    "index_add": ("torch.zeros(5).index_add(0, x, torch.ones_like(x, dtype=torch.float32))", 1),
    "index_put": ("torch.zeros(5).index_put((x,), torch.ones(()), accumulate=True)", 1),
    "bincount": ("torch.bincount(x, minlength=5)", 1),
    "cross_entropy": ("F.cross_entropy(C0[:1].expand(x.shape[0], 4), x % 4)", 1),
    "nll_loss": ("F.nll_loss(C0[:1].expand(x.shape[0], 4), x % 4, reduction='none')", 1),
    "repeat_interleave": ("torch.repeat_interleave(x, 2, dim=1)", 2),
    "searchsorted": ("torch.searchsorted(torch.tensor([1, 2, 4]), x)", 2),
    "unique": ("torch.unique(x)", 1),
    "isin": ("torch.isin(x, torch.tensor([1, 3]))", 2),
    "sort stable": ("torch.sort(x, stable=True)", 2),
    "cumsum": ("torch.cumsum(x, 1)", 2),
    "mod": ("x % 3 - x // 2", 2),
    "shift": ("(x << 2) | (x >> 1)", 2),
    "mean of floats": ("x.float().mean(1)", 2),
    "tril by index": ("torch.where(x[:, :, None] >= x[:, None, :], 1.0, 0.0)", 2),
}
"""Expressions whose input is an index below 5, with the dimensions of it; `C0` is a table of 5 by 4."""


class Unwritten(Exception):
    """A value that a recipe file cannot hold."""


def literal(tensor: torch.Tensor) -> str:
    """Python that makes `tensor`. Raises Unwritten."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.numel() > MOST or tensor.is_nested:
        raise Unwritten("a constant that a file cannot hold")
    kind = str(tensor.dtype)
    values = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).tolist()
    if tensor.dtype.is_complex:
        words = [f"complex({one.real:.9g}, {one.imag:.9g})" for one in values]
    elif tensor.dtype.is_floating_point:
        words = [f"{one:.17g}" if tensor.dtype == torch.float64 else f"{one:.9g}" for one in values]
    else:
        words = [repr(one) for one in values]
    return f"torch.tensor([{', '.join(words)}], dtype={kind}).reshape({tuple(tensor.shape)!r})"


@dataclass
class Writer:
    """Turns the arguments of a call into Python; the first float tensor is `x`."""

    kind: torch.dtype
    x: torch.Tensor | None = None
    constants: list[str] = field(default_factory=list)

    def write(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple | list):
            inside = [self.write(one) for one in value]
            return f"[{', '.join(inside)}]" if isinstance(value, list) else f"({''.join(f'{one}, ' for one in inside)})"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {self.write(one)}' for key, one in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self.write(value.start)}, {self.write(value.stop)}, {self.write(value.step)})"
        if isinstance(value, torch.dtype | torch.memory_format | torch.layout) or value is None or value is Ellipsis:
            return "..." if value is Ellipsis else str(value)
        if isinstance(value, bool | int | float | complex | str):
            return repr(value)
        raise Unwritten(f"an argument of {type(value).__name__}")

    def _tensor(self, value: torch.Tensor) -> str:
        if self.x is None and value.dtype == self.kind and value.layout == torch.strided and value.numel():
            self.x = value.detach().clone()
            return "x"
        self.constants.append(literal(value))
        return f"C{len(self.constants) - 1}"


def call(function: str, writer: Writer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The call as Python, with the first argument written first."""
    words = [writer.write(one) for one in args]
    words += [f"{name}={writer.write(one)}" for name, one in kwargs.items()]
    return f"{function}({', '.join(words)})"


def scope() -> dict[str, Any]:
    made: dict[str, Any] = {}
    exec(HEAD, made)
    return made


def evaluate(case: Mapping[str, Any], x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of the case's answer for `x`. Raises what the operator raises, Unwritten for no tensor."""
    names = scope() | {f"C{at}": eval(text, scope()) for at, text in enumerate(case["constants"])}
    if case["module"]:
        torch.manual_seed(0)
        names["M"] = eval(case["module"], names).eval()
    with torch.no_grad():
        found = eval(case["expression"], names | {"x": x.clone()})
    leaves = [found] if isinstance(found, torch.Tensor) else list(found) if isinstance(found, tuple | list) else []
    if not leaves or not all(isinstance(one, torch.Tensor) and one.layout == torch.strided for one in leaves):
        raise Unwritten("answers no tensor, or is private")
    if any(one.is_quantized or one.is_nested for one in leaves):
        raise Unwritten("answers no dense tensor")
    return leaves


def with_batch(name: str, parts: dict[str, Any], x: torch.Tensor, ids: str = "") -> OperatorCase:
    """The case with the batch where it is taken: the sample's first axis, one before it, or each record alone. Raises
    Unwritten."""
    kind = ids or ("real" if x.dtype.is_floating_point else "int")
    for ahead in (False, True):
        given = x[None].repeat(3, *[1] * x.ndim) if ahead else x
        if not given.ndim:
            continue
        size = len(given)
        if all(_answers(parts, given, rows) for rows in (1, 2, size + 1, size + 4, 2 * size)):
            field_ = " ".join((kind, "batch", *map(str, given.shape[1:])))
            return OperatorCase(name, sample=literal(given), field=field_, sizes=(max(size, 2), size + 3), **parts)
    return _one_by_one(name, parts, x, kind)


def _one_by_one(name: str, parts: dict[str, Any], x: torch.Tensor, kind: str) -> OperatorCase:
    """An operator that takes no batch, called for each record."""
    if len(evaluate(parts, x)) > 1:
        raise Unwritten("takes no batch, and answers several tensors")
    given = x[None].repeat(3, *[1] * x.ndim)
    each = {**parts, "expression": f"torch.stack([(lambda x: {parts['expression']})(row) for row in x])"}
    if not _answers(each, given, 2):
        raise Unwritten("takes no batch")
    field_ = " ".join((kind, "batch", *map(str, x.shape)))
    return OperatorCase(name, sample=literal(given), field=field_, sizes=(3, 6), **each)


def _answers(parts: dict[str, Any], sample: torch.Tensor, rows: int) -> bool:
    try:
        evaluate(parts, sample[torch.arange(rows) % len(sample)])
    except Exception:  # noqa: BLE001 - whatever the operator raises: it does not answer this size
        return False
    return True


def functions_of(name: str) -> Iterator[str]:
    """Expressions that may call the operator."""
    for text in (f"torch.{name}", f"torch.Tensor.{name.rpartition('.')[2]}"):
        try:
            if callable(eval(text, scope())):
                yield text
        except AttributeError:
            continue


def of_operator(info: Any, samples: int) -> Iterator[OperatorCase]:
    """Cases of one operator. Raises Unwritten with the first reason where there is none."""
    kinds = [one for one in (torch.float32, torch.int64) if info.supports_dtype(one, "cpu")]
    if not kinds:
        raise Unwritten("neither floats nor whole numbers")
    name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
    made: list[OperatorCase] = []
    reasons: list[str] = []
    for at, sample in enumerate(islice(info.sample_inputs("cpu", kinds[0], requires_grad=False), LOOKED_AT)):
        try:
            made.append(_of_sample(info, f"{name}#{at}", sample, kinds[0]))
        except Unwritten as error:
            reasons.append(str(error))
        except Exception as error:  # noqa: BLE001 - a sample that its operator refuses
            reasons.append(f"its sample is refused ({type(error).__name__})")
    if not made:
        raise Unwritten(reasons[0] if reasons else "no sample")
    made.sort(key=lambda case: (case.one_by_one, case.field.count(" ") < 2))  # a batch first, then more than one axis
    yield from dict.fromkeys(made[(len(made) - 1) * at // max(samples - 1, 1)] for at in range(samples))


def _of_sample(info: Any, name: str, sample: Any, kind: torch.dtype) -> OperatorCase:
    expected = info.op(_copy(sample.input), *_copy(sample.args), **_copy(sample.kwargs))
    why = "no public name that calls it so"
    for function in functions_of(info.name):
        writer = Writer(kind)
        text = call(function, writer, (sample.input, *sample.args), sample.kwargs)
        if writer.x is None or not writer.x.numel():
            raise Unwritten("no input of numbers")
        parts = {"expression": text, "constants": tuple(writer.constants), "module": ""}
        try:
            found = evaluate(parts, writer.x)
        except Unwritten as error:
            why = str(error)
            continue
        except Exception:  # noqa: BLE001 - the name takes other arguments
            continue
        if _same(pytree.tree_leaves(expected), found):
            return with_batch(name, parts, writer.x)
    raise Unwritten(why)


def _copy(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def _same(expected: Sequence[Any], found: Sequence[torch.Tensor]) -> bool:
    if len(expected) != len(found):
        return False
    pairs = list(zip(expected, found, strict=True))
    return all(isinstance(e, torch.Tensor) and e.shape == f.shape and e.dtype == f.dtype for e, f in pairs)


def of_module(info: Any, samples: int) -> Iterator[OperatorCase]:
    """Cases of one module class. Raises Unwritten."""
    made, reasons, kind = [], [], torch.float32
    given = info.module_inputs_func(info, device="cpu", dtype=kind, requires_grad=False, training=False)
    for at, one in enumerate(islice(given, LOOKED_AT)):
        try:
            built = Writer(torch.bool)
            named = {k: v for k, v in one.constructor_input.kwargs.items() if k not in ("device", "dtype")}
            module = call(f"nn.{info.module_cls.__name__}", built, one.constructor_input.args, named)
            for number, text in enumerate(built.constants):
                module = re.sub(rf"\bC{number}\b", text.replace("\\", r"\\"), module)
            writer = Writer(kind)
            text = call("M", writer, one.forward_input.args, one.forward_input.kwargs)
            if writer.x is None:
                raise Unwritten("no input of numbers")
            parts = {"expression": text, "constants": tuple(writer.constants), "module": module}
            evaluate(parts, writer.x)
            made.append(with_batch(f"{info.module_cls.__name__}#{at}", parts, writer.x))
        except Unwritten as error:
            reasons.append(str(error))
        except Exception as error:  # noqa: BLE001 - a sample that its module refuses in evaluation
            reasons.append(f"its sample is refused ({type(error).__name__})")
    if not made:
        raise Unwritten(reasons[0] if reasons else "no sample")
    made.sort(key=lambda case: case.one_by_one)
    yield from dict.fromkeys(made[(len(made) - 1) * at // max(samples - 1, 1)] for at in range(samples))


def of_indices() -> Iterator[OperatorCase]:
    table = torch.arange(20, dtype=torch.float32).reshape(5, 4) / 7 - 1
    for name, (text, ndim) in INDEXED.items():
        x = torch.tensor([[0, 3, 1, 4, 2], [2, 2, 0, 1, 4], [4, 0, 3, 3, 1]])
        parts = {"expression": text, "constants": (literal(table),) if "C0" in text else (), "module": ""}
        yield with_batch(f"ids.{name}", parts, x if ndim == 2 else x[0], ids="ids:5")


def import_lists() -> tuple[list[Any], list[Any]]:
    """torch's operators and modules. Its test tools need `expecttest`, of which the list uses nothing."""
    if find_spec("expecttest") is None:
        made = types.ModuleType("expecttest")
        made.TestCase, made.ACCEPT = unittest.TestCase, False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = made
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return op_db, module_db


def main() -> None:
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    operators, modules = import_lists()
    for case in of_indices():
        print(json.dumps(case.as_record()))
    for info in (*operators, *modules):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            print_cases(info, samples)
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(json.dumps({"skipped": name_of(info), "why": "ends its process at a size that it does not take"}))


def name_of(info: Any) -> str:
    return str(info.module_cls.__name__ if hasattr(info, "module_cls") else info.name)


def print_cases(info: Any, samples: int) -> None:
    name, is_module = name_of(info), hasattr(info, "module_cls")
    why = "" if is_module else next((why for words, why in SKIPPED.items() if re.match(words, name)), "")
    try:
        if why:
            raise Unwritten(why)
        found = list((of_module if is_module else of_operator)(info, samples))
    except Unwritten as error:
        print(json.dumps({"skipped": name, "why": str(error)}))
    except Exception as error:  # noqa: BLE001 - samples that cannot be made on this machine
        print(json.dumps({"skipped": name, "why": f"its samples raise {type(error).__name__}"}))
    else:
        for case in found:
            print(json.dumps(case.as_record()))


if __name__ == "__main__":
    main()
