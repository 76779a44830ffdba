"""int8 for torch's own compiler: torchao quantizes the bundle's exported program, AOTInductor compiles and freezes it.

Without freezing the compiler keeps float32 in silence (pytorch/ao#4566), so int8 kernels are counted in the C++ that it
wrote, and the compiled program is compared with the quantized model: torch 2.13 compiles some of them wrong. What it
makes is machine code, which a server runs with `--allow-code` alone, so no search tries it unless a user names it.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from trueline.capture.export.aotinductor import compile_program
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.graph import quiet
from trueline.compress.measure.kernels import Kernels
from trueline.compress.method import CompressMethod
from trueline.errors import CaptureError, MissingPackage, first_line
from trueline.runtime import torch_export
from trueline.runtime.tensors import to_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Signature


_SOURCES: dict[str, Any] = {
    "aten.conv1d.default": nn.Conv1d,
    "aten.conv2d.default": nn.Conv2d,
    "aten.linear.default": nn.Linear,
    "aten.batch_norm.default": nn.BatchNorm2d,
    "aten.relu.default": nn.ReLU,
    "aten.relu_.default": nn.ReLU,
    "aten.hardtanh.default": nn.Hardtanh,
    "aten.hardtanh_.default": nn.Hardtanh,
    "aten.relu6.default": nn.ReLU6,
    "aten.hardswish.default": nn.Hardswish,
    "aten.hardswish_.default": nn.Hardswish,
    "aten.silu.default": nn.SiLU,
    "aten.silu_.default": nn.SiLU,
    "aten.gelu.default": nn.GELU,
    "aten.tanh.default": nn.Tanh,
    "aten.leaky_relu.default": nn.LeakyReLU,
    "aten.add.Tensor": operator.add,
    "aten.add_.Tensor": operator.add,
}
"""The layers that torchao's patterns for x86 are made of."""
_CLOSE = 0.05
"""Relative difference between the compiled and the quantized model: their int8 sums are the same, but for rounding."""


@final
class InductorQuantizer:
    def list_variants(self) -> Sequence[CompressMethod]:
        return [CompressMethod("inductor", ("static",)), CompressMethod("inductor", ("dynamic",))]

    def apply(self, method: CompressMethod, program: ParentProgram, out: Path) -> None:
        if program.exported is None or program.signature is None:
            raise CaptureError(
                "torchao quantizes a torch.export program, and this bundle has none",
                hint="capture it with --for torch, or without --for",
            )
        prepare, convert, quantizer = _import_torchao(dynamic=method.words[0] == "dynamic")
        exported, signature = torch_export.load(program.exported), program.signature
        try:
            with quiet(), warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                batches = [to_tensors(signature, batch) for batch in program.calibration()]
                module = exported.module(check_guards=False)
                _name_sources(module)
                for name in _find_miscompiled(module):
                    quantizer.set_module_name_qconfig(name, None)
                watched = prepare(module, quantizer)
                for given in batches:
                    watched(*given)
                quantized = convert(watched)
                again = torch.export.export(
                    quantized, tuple(batches[0]), dynamic_shapes=_free_axes(quantized, signature)
                )
        except Exception as error:
            raise CaptureError(f"torchao does not quantize it: {first_line(error)}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile_program(again, out)
        _check_compiled(out, quantized, batches[0])

    def find_fault(self, kernels: Kernels) -> str:
        return "" if kernels.quantized else "not quantized: the compiled code computes every heavy operator in float32"


def _name_sources(module: torch.fx.GraphModule) -> None:
    """Notes at each node which layer it is, which torchao's patterns compare, and a module of its own: an archive has
    neither."""
    for node in module.graph.nodes:
        kind = _SOURCES.get(str(node.target)) if node.op == "call_function" else None
        if kind is not None:
            node.meta["source_fn_stack"] = [(node.name, kind)]
            node.meta["nn_module_stack"] = {node.name: (node.name, kind)}


def _find_miscompiled(module: torch.fx.GraphModule) -> Sequence[str]:
    """Convolutions over one channel. Inductor lays out what their int8 kernel returns otherwise than it says (torch
    2.13: one channel is both dense and channels-last), and the next operator reads it in that order."""
    found = []
    for node in module.graph.nodes:
        if node.op == "call_function" and _SOURCES.get(str(node.target)) in (nn.Conv1d, nn.Conv2d):
            values = [node.args[at].meta.get("val") for at in (0, 1)]
            if all(value is not None and value.shape[1] == 1 for value in values):
                found.append(node.name)
    return found


def _check_compiled(path: Path, quantized: Any, given: Sequence[torch.Tensor]) -> None:
    """Raises CaptureError where the compiled program computes otherwise than the quantized model it is made of."""
    with torch.no_grad():
        want = [leaf for leaf in torch.utils._pytree.tree_leaves(quantized(*given)) if isinstance(leaf, torch.Tensor)]
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    have = loader.boxed_run([one.clone() for one in given])
    for one, other in zip(want, have, strict=True):
        gap = float((one.double() - other.double()).norm() / one.double().norm().clamp_min(1e-12))
        if not gap <= _CLOSE:
            raise CaptureError(
                f"AOTInductor's program answers otherwise than the quantized model that it was compiled from: off by "
                f"{gap:.2g} of the answer, {_CLOSE:g} at most",
                hint="a fault of torch's compiler here; the other ways run in ONNX Runtime and OpenVINO",
            )


def _free_axes(module: torch.nn.Module, signature: Signature) -> tuple[Any, ...]:
    free = torch.export.Dim.DYNAMIC
    axes = tuple(
        {axis: free for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in signature.inputs
    )
    kinds = [one.kind for one in inspect.signature(module.forward).parameters.values()]
    return (axes,) if inspect.Parameter.VAR_POSITIONAL in kinds else axes


def _import_torchao(*, dynamic: bool) -> tuple[Any, Any, Any]:
    """What prepares, what converts, and the choice of operators for x86. Raises MissingPackage."""
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.quantization.pt2e import quantize_pt2e
            from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{error.name} is not installed, and int8 for AOTInductor is made with it",
            hint="pip install 'trueline[inductor]'",
        ) from error
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    return quantize_pt2e.prepare_pt2e, quantize_pt2e.convert_pt2e, quantizer
