"""Each patch is needed: without it, the shortest reproducer still shows the upstream defect.

A test that fails after an upgrade names a patch to delete, with its module and its tests.
"""

from __future__ import annotations

import io
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch._export import utils as export_utils
from torch.backends import opt_einsum
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.onnx._internal._lazy_import import onnxscript_apis
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

import patches
from trueline.capture.export.tracing import quiet
from trueline.capture.onnx import emit, indices
from trueline.capture.onnx.translations import TRANSLATIONS
from trueline.capture.patches import recurrent as recurrent_patch
from trueline.capture.patches import symbolic_sizes
from trueline.recipe.eager_mode import as_trained
from worlds.cases import few

FREE = torch.export.Dim.DYNAMIC
X = torch.linspace(-2, 2, 60).reshape(3, 5, 4)
SPECIALIZED = "as dynamic but .* be a constant"
"""What torch.export says when an operation makes a number of a size."""
DATA_DEPENDENT = "data-dependent"

Reproducer = Callable[[], bool]
REPRODUCERS: dict[str, Reproducer] = {}
"""Name of a module with a patch -> whether the defect is there."""


def shows(name: str) -> Callable[[Reproducer], Reproducer]:
    """Registers the reproducer of the defect that the patch in module `name` works around."""

    def register(reproducer: Reproducer) -> Reproducer:
        REPRODUCERS[name] = reproducer
        return reproducer

    return register


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*self.parts, *tensors)


def export(module: Of, *tensors: Tensor, free: Sequence[int] = (1,)) -> torch.export.ExportedProgram:
    """`module` as torch alone exports it; the axes `free` of each tensor are dynamic."""
    shapes = tuple({axis: FREE for axis in free if axis < tensor.ndim} for tensor in tensors)
    with torch.no_grad(), quiet():
        return torch.export.export(module.eval(), tensors, dynamic_shapes=(shapes,), strict=False)


def refused(module: Of, *tensors: Tensor, message: str) -> bool:
    """Whether torch.export raises an error with this message when axis 1 is dynamic."""
    with as_trained(), pytest.raises(Exception, match=message or None):
        export(module, *tensors)
    return True


def answers(program: torch.export.ExportedProgram, *tensors: Tensor) -> list[Any]:
    """What ONNX Runtime computes with the program as torch.onnx writes it."""
    with torch.no_grad(), quiet():
        made = torch.onnx.export(program, (), dynamo=True, verbose=False)
    assert made is not None
    return run(made, *tensors)


def run(program: torch.onnx.ONNXProgram, *tensors: Tensor) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {one.name: tensor.numpy() for one, tensor in zip(session.get_inputs(), tensors, strict=True)}
    found: list[Any] = session.run(None, feeds)
    return found


# ---- torch.export


@shows("patches/recurrent")
def unrolls_a_recurrent_layer() -> bool:
    return refused(Of(lambda layer, x: layer(x)[0], nn.LSTM(4, 3, batch_first=True)), X, message=SPECIALIZED)


@shows("patches/packed_sequence")
def refuses_packed_sequences() -> bool:
    def packed(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        found = layer(pack_padded_sequence(x, lengths, batch_first=True))[0]
        return pad_packed_sequence(found, batch_first=True, total_length=x.shape[1])[0]

    return refused(
        Of(packed, nn.GRU(4, 3, batch_first=True)), X, torch.tensor([5, 3, 2]), message="must be tuple of ints"
    )


@shows("patches/fake_quantization")
def has_no_sizes_of_fake_quantized_values() -> bool:
    module = Of(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127))
    return refused(module, X, message="fake_quantize")


@shows("patches/causal_mask")
def compares_a_mask_with_the_causal_one() -> bool:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    module = Of(lambda body, x: body(x, mask=torch.ones(x.shape[1], x.shape[1]).triu(1).bool()), body)
    return refused(module, X, message=DATA_DEPENDENT)


@shows("export/attention")
def moves_many_whole_tensors_in_an_attention_layer() -> bool:
    """Queries, keys, values and the answer have to be moved once each, and the batch need not be."""
    module = Of(lambda layer, x: layer(x, x, x, need_weights=False)[0], nn.MultiheadAttention(4, 2, batch_first=True))
    moves = [
        node
        for node in export(module, X).graph.nodes
        if "transpose" in str(node.target) or "permute" in str(node.target)
    ]
    return len(moves) > 5


@shows("patches/symbolic_sizes")
def fixes_the_sizes_of_grids_ramps_and_distances() -> bool:
    def grid(x: Tensor) -> Tensor:
        return F.affine_grid(torch.ones(1, 2, 3), [1, 1, x.shape[1], 4], align_corners=False)

    ramp, pool = lambda x: torch.linspace(0, 1, x.shape[1]), lambda x: F.max_pool1d(x.transpose(1, 2), 2)
    for function in (grid, ramp, pool, lambda x: torch.hann_window(x.shape[1])):
        refused(Of(function), X, message=SPECIALIZED)
    near = export(Of(lambda x: torch.cdist(x, x)), X)
    return any(span.upper <= 25 for span in near.range_constraints.values())


@shows("patches/stand_ins/size_multiples")
def keeps_a_sum_that_is_a_multiple_as_a_sum() -> bool:
    def in_windows(x: Tensor) -> Tensor:
        filled = F.pad(x, (0, 0, 0, (4 - x.shape[1] % 4) % 4))
        return filled.reshape(x.shape[0], filled.shape[1] // 4, 4, x.shape[2])

    return any("%" in guard for guard in export(Of(in_windows), X)._guards_code)


@shows("patches/size_keys")
def has_no_hash_of_a_size() -> bool:
    return refused(Of(lambda x: x * {}.get(x.shape[1], 2)), X, message="unhashable type")


@shows("patches/module_to")
def replaces_the_weights_of_a_part_that_is_converted() -> bool:
    return refused(Of(lambda layer, x: layer.to(x.dtype)(x), nn.Linear(4, 4)), X, message="Couldn't swap Linear.weight")


@shows("patches/inverse_stft")
def makes_numbers_of_the_lengths_of_a_signal() -> bool:
    def there_and_back(x: Tensor) -> Tensor:
        window = torch.hann_window(4)
        spectrum = torch.stft(x, 4, 2, window=window, return_complex=True)
        return torch.istft(spectrum, 4, 2, window=window, length=x.shape[1])

    return refused(Of(there_and_back), torch.randn(2, 32), message=SPECIALIZED)


@shows("patches/einsum_order")
def makes_numbers_of_the_sizes_of_a_product_of_three() -> bool:
    """With opt_einsum, which is not installed here: it makes an int of each size."""

    def contract_path(equation: str, *operands: Tensor, optimize: object) -> tuple[list[tuple[int, int]], str]:
        assert all(int(size) for one in operands for size in one.shape)
        return [(1, 2), (0, 1)], ""

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(opt_einsum, "get_opt_einsum", lambda: SimpleNamespace(contract_path=contract_path))
        patched.setattr(opt_einsum, "is_available", lambda: True)
        patched.setattr(opt_einsum, "enabled", True, raising=False)
        return refused(Of(lambda x: torch.einsum("bnd,bne,bn->bde", x, x, x[..., 0])), X, message=SPECIALIZED)


@shows("patches/stand_ins/size_lengths")
def makes_numbers_of_lengths() -> bool:
    return refused(Of(lambda x: x.new_zeros(len(x.transpose(0, 1)))), X, message=SPECIALIZED)


@shows("patches/stand_ins/size_functions")
def makes_a_number_of_a_common_divisor() -> bool:
    return refused(Of(lambda x: x[:, : math.gcd(x.shape[1], 4)]), X, message=SPECIALIZED)


@shows("patches/stand_ins/size_numbers")
def makes_a_constant_of_a_whole_part_of_a_logarithm() -> bool:
    return refused(Of(lambda x: x[:, : int(2 * math.log(x.shape[1]))]), X, message=SPECIALIZED)


@shows("patches/stand_ins/size_lists")
def makes_a_constant_of_a_list_of_a_size() -> bool:
    return refused(Of(lambda x: x[:, torch.tensor(list(range(x.shape[1]))[1:])]), X, message=SPECIALIZED)


@shows("patches/stand_ins/size_rows")
def makes_a_constant_of_a_number_of_rows() -> bool:
    return refused(Of(lambda x: sum(x.unbind(1))), X, message=SPECIALIZED)


@shows("patches/stand_ins/size_parts")
def makes_a_constant_of_the_size_of_a_diagonal() -> bool:
    return refused(Of(lambda x: (x[0] @ x[0].T).fill_diagonal_(0)), X, message=SPECIALIZED)


@shows("patches/stand_ins/size_scales")
def makes_a_constant_of_a_factor_made_of_sizes() -> bool:
    resize = torch.nn.functional.interpolate
    program = export(Of(lambda x: resize(x.transpose(1, 2), scale_factor=8 / x.shape[1], mode="linear")), X)
    with pytest.raises(AssertionError, match=r"Guard failed: 8 / .* == 1\.6"):
        program.module()(torch.ones(3, 7, 4))
    return True


@shows("onnx/signals/windows")
def lacks_frequencies_of_a_length() -> bool:
    with pytest.raises(Exception, match="fft_rfftfreq"):
        answers(export(Of(lambda x: x[..., :3] * torch.fft.rfftfreq(4)), X), X)
    return True


@shows("patches/stand_ins/size_slices")
def holds_on_one_side_of_the_end_of_a_slice() -> bool:
    program = export(Of(lambda x: x[:, :8]), X)
    return all(one.upper <= 8 for one in program.range_constraints.values())


@shows("patches/stand_ins/numpy_arrays")
def refuses_an_array_of_a_size() -> bool:
    return refused(Of(lambda x: x + torch.from_numpy(np.sin(np.arange(x.shape[1])))[:, None]), X, message="")


@shows("patches/value_checks")
def refuses_a_check_of_values() -> bool:
    def check(x: Tensor) -> Tensor:
        assert not x.isnan().any()
        return x

    return refused(Of(check), X, message=DATA_DEPENDENT)


@shows("patches/distribution_checks")
def refuses_the_check_of_a_distribution() -> bool:
    return refused(Of(lambda x: torch.distributions.Normal(x, x.exp()).entropy()), X, message=DATA_DEPENDENT)


@shows("patches/parameter_branches")
def refuses_a_branch_on_a_parameter() -> bool:
    module = Of(lambda layer, x: layer(x) if (layer.weight < 9).all() else x, nn.Linear(4, 4))
    return refused(module, X, message=DATA_DEPENDENT)


@shows("patches/scalar_indices")
def refuses_to_write_at_a_position_that_a_tensor_holds() -> bool:
    def write(x: Tensor) -> Tensor:
        ring = torch.zeros(16, 4)
        ring[x.sum().long() % 16] = x[0, 0]
        return ring + x[0, 1]

    return refused(Of(write), X, message=DATA_DEPENDENT)


@shows("patches/nonzero_loops")
def refuses_a_loop_over_the_places_of_a_mask() -> bool:
    def chosen(x: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for place in (x.sum((0, 1)) > 0).nonzero():
            found = found + x * place
        return found

    return refused(Of(chosen), X, message=DATA_DEPENDENT)


@shows("patches/below_python")
def refuses_a_gradient_inside_forward() -> bool:
    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            return torch.autograd.grad(x.tanh().sum(), x)[0]

    return refused(Of(slope), X, message="fake tensor in the exported program constant")


@shows("patches/per_record")
def unrolls_a_loop_over_records() -> bool:
    return refused(Of(lambda x: torch.stack([row.tanh() for row in x.transpose(0, 1)])), X, message=SPECIALIZED)


@shows("patches/rounding")
def cannot_save_a_size_that_python_rounded() -> bool:
    program = export(Of(lambda x: x[:, : math.ceil(0.5 * x.shape[1])]), X)
    with pytest.raises(Exception, match="ceil"), quiet():
        torch.export.save(program, io.BytesIO())
    return True


@shows("export/tracing")
def leaves_its_mode_behind_when_a_model_enters_another_and_fails() -> bool:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    module, mode = Of(lambda x: x if x.sum() > 0 else -x), Mode()
    module.register_forward_pre_hook(lambda *_: mode.__enter__() and None)
    module.register_forward_hook(lambda *_: mode.__exit__(None, None, None), always_call=True)
    refused(module, X, message=DATA_DEPENDENT)
    left = len(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    for _ in range(left):
        _pop_mode()  # type: ignore[no-untyped-call]
    return left > 0


@shows("patches/decomposition_cache")
def looks_its_operators_up_for_each_namespace() -> bool:
    looked_up: list[None] = []
    materialize: Any = export_utils._materialize_cpp_cia_ops
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(export_utils, "_materialize_cpp_cia_ops", lambda: looked_up.append(materialize()))
        program = export(Of(torch.tanh), X)
        with quiet():
            program.run_decompositions()
    return len(looked_up) > 1


# ---- torch.onnx and ONNX Runtime


@shows("onnx/torchlib_cache")
def lists_its_translations_for_each_export() -> bool:
    apis: Any = onnxscript_apis
    return apis.get_torchlib_ops() is not apis.get_torchlib_ops()


@shows("onnx/pass_workarounds")
def stumbles_over_a_difference_of_integers_and_parts_of_a_size() -> bool:
    for function, message in ((lambda x: x * (1.0 - (x > 0).long()), "export"), (lambda x: x.chunk(2, 1), "pass")):
        with pytest.raises(Exception, match=message or None):
            answers(export(Of(function), X), X)
    return True


@shows("onnx/padded_pool")
def makes_the_zeros_of_a_pad_part_of_the_window() -> bool:
    below = -torch.rand(1, 1, 5)
    module = Of(nn.Sequential(nn.ConstantPad1d(1, 0.0), nn.MaxPool1d(3, stride=2)))
    return not np.allclose(answers(export(module, below, free=()), below)[0], module(below))


@shows("onnx/integer_arithmetic")
def ends_the_process_where_the_smallest_number_is_divided_by_minus_one() -> bool:
    """Without the patch: a model of one node, in a process of its own."""
    one = helper.make_node("Div", ["a", "b"], ["c"])
    values = [helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in "abc"]
    graph = helper.make_graph([one], "g", values[:2], values[2:])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    code = (
        "import sys, numpy, onnxruntime as o; s = o.InferenceSession(sys.stdin.buffer.read()); "
        "s.run(None, {'a': numpy.array([-(2**63)]), 'b': numpy.array([-1])})"
    )
    return subprocess.run([sys.executable, "-c", code], input=model.SerializeToString()).returncode == -signal.SIGFPE


@shows("onnx/dtypes/casts")
def leaves_out_roundings_to_half_precision_and_of_casts_in_a_row() -> bool:
    """All of them: an output in half precision, a sum in it, and a number that wraps."""
    module = Of(lambda x: (x.half().sum(1), (x.half() + 1).float() - 1, (x * 3e9).long().int()))
    total, rounded, wrapped = answers(export(module, X, free=()), X)
    expected = module(X)
    return (
        total.dtype == np.float32
        and not np.array_equal(rounded, expected[1])
        and not np.array_equal(wrapped, expected[2])
    )


@shows("onnx/dtypes/exact_numbers")
def rounds_numbers_beside_doubles() -> bool:
    module, x = Of(lambda x: x.masked_fill(x > 0, 0.1)), X.double()
    (found,) = answers(export(module, x, free=()), x)
    return bool(found.max() != 0.1)


@shows("onnx/dtypes/half_numbers")
def rounds_numbers_beside_halves() -> bool:
    x = torch.full((3, 5), 100.0)
    (found,) = answers(export(Of(lambda x: (x.half() * 3.3).float()), x, free=()), x)
    return bool(found.max() != 330)


@shows("onnx/dtypes/fusions")
def joins_a_factor_of_doubles_to_a_product_in_single_precision() -> bool:
    """Of ONNX Runtime: the program has the factor in double."""
    x = torch.eye(3, dtype=torch.float64)
    (found,) = answers(export(Of(lambda x: (x @ x) * 0.1), x, free=()), x)
    return bool(found.max() != 0.1)


@shows("onnx/large_integers")
def takes_two_to_the_power_of_31_for_less_than_one_and_loses_digits_in_sums() -> bool:
    numbers = torch.tensor([[2**31, -3_000_000_000] * 4, [2**53 + 1, 0] * 4])
    module = Of(lambda x: (x.clamp(-4, 3), x.sum(1)))
    limited, total = answers(export(module, numbers, free=()), numbers)
    return not np.array_equal(limited, numbers.clamp(-4, 3)) and not np.array_equal(total, numbers.sum(1))


@shows("patches/whole_division")
def ends_the_process_where_the_smallest_number_is_divided_by_minus_one_and_truncated() -> bool:
    code = "import torch; torch.div(torch.tensor([-(2**63)]), torch.tensor([-1]), rounding_mode='trunc')"
    return subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGFPE


@shows("onnx/precision")
def adds_one_after_the_other_in_single_precision() -> bool:
    equal = torch.full((1, 4096), 0.0129871)
    module = Of(lambda x: x.cumsum(1))
    return not np.allclose(answers(export(module, equal, free=()), equal)[0], module(equal), rtol=1e-5)


@shows("onnx/lstm_steps")
def takes_a_gate_that_is_all_but_shut_for_a_closed_one() -> bool:
    layer, x = nn.LSTM(1, 1, batch_first=True), torch.ones(1, 1, 1)
    with torch.no_grad():
        for parameter, values in zip(layer.parameters(), ((1.0, 1, 1, -30), (0.0,) * 4, (0.0,) * 4), strict=False):
            parameter.copy_(torch.tensor(values).reshape(parameter.shape))
    module = Of(lambda layer, x: layer(x)[0], layer)
    return not np.allclose(answers(export(module, x, free=()), x)[0], module(x).detach(), rtol=1e-3, atol=0.0)


@shows("onnx/size_arithmetic")
def computes_shares_of_sizes_in_single_precision() -> bool:
    """0.29 * 100 is 28.999999999999996 in Python."""
    module, x = Of(lambda x: x[:, : math.floor(0.29 * x.shape[1])]), torch.ones(1, 100)
    return tuple(answers(export(module, x[:, :7]), x)[0].shape) != module(x).shape


@shows("onnx/optimizer_rules")
def takes_a_small_constant_for_zero_and_joins_limits_that_do_not_overlap() -> bool:
    small, limits, x = Of(lambda x: torch.log(x + 1e-12)), Of(lambda x: x.clamp(0, 1).clamp(5, 9)), torch.zeros(1, 3)
    infinite, limited = (answers(export(module, x, free=()), x)[0] for module in (small, limits))
    with pytest.raises(Exception, match=r"[Ss]equence|Type"):  # tensors of two dtypes
        answers(export(Of(lambda x: torch.hstack([x, x.long()])), X), X)
    return bool(np.isinf(infinite).any() and (limited != 5).any())


@shows("onnx/weight_parts")
def leaves_the_split_of_a_weight_to_the_runtime() -> bool:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.weight.chunk(2)
            return F.linear(x, one) * F.linear(x, other)

    with torch.no_grad(), quiet():
        program = torch.onnx.export(Parts().eval(), (X,), dynamo=True, verbose=False)
    assert program is not None
    return any(node.op_type == "Split" for node in program.model.graph)


# ---- translations of single operators

NAN, INF = math.nan, math.inf
A = torch.tensor([[0.0, -0.0, 1.0, -1.0, NAN, 2.0], [3.0, 1.0, 1.0, -INF, INF, 0.5]])
B = A.flip(1).contiguous()
R = 3 * torch.sin(torch.arange(12.0)).reshape(2, 6)
SIX = torch.arange(1, 7)
SURE, GONE = torch.tensor([[20.0, 0.0]]), torch.tensor([[1e8, 1.0, -1e8]])
SEVENTHS = torch.arange(1.0, 51.0) * 0.7
SHOWN = torch.tensor([[True, False], [False, False]])
CUBE = torch.sin(torch.arange(24.0)).reshape(2, 3, 4)
IMAGE = torch.sin(torch.arange(210.0)).reshape(2, 3, 7, 5)


@shows("onnx/kernels")
def opens_no_where_of_int16() -> bool:
    """Of ONNX Runtime: the operator has this dtype."""
    kinds = {"c": TensorProto.BOOL, "a": TensorProto.INT16, "b": TensorProto.INT16, "y": TensorProto.INT16}
    *values, result = (helper.make_tensor_value_info(name, kind, [2]) for name, kind in kinds.items())
    graph = helper.make_graph([helper.make_node("Where", ["c", "a", "b"], ["y"])], "where", values, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - the class is not public
        return "NOT_IMPLEMENTED" in str(error)
    return False


@dataclass(frozen=True)
class Case:
    """A call that torch.onnx cannot write, or writes so that it answers otherwise than torch."""

    module: Of
    example: tuple[Tensor, ...]
    free: tuple[int, ...] = ()
    others: tuple[Tensor, ...] = ()
    """Inputs of other sizes, where the example shows nothing."""
    atol: float = 1e-6
    rtol: float = 1e-5


def of(function: Callable[..., Any], *example: Tensor, parts: Sequence[nn.Module] = (), **more: Any) -> Case:
    return Case(Of(function, *parts), example, **more)


def wide(function: Callable[..., Any], *parts: nn.Module) -> Case:
    """Of doubles, right to their last digits."""
    return of(function, X[0].double(), parts=parts, atol=1e-15, rtol=1e-13)


def resized(mode: str) -> Case:
    x = torch.randn(1, 1, 1000, 4, generator=torch.Generator().manual_seed(0))
    module = Of(lambda x: F.interpolate(x, size=(9, 7), mode=mode))
    return Case(module, (x[:, :, :20],), free=(2,), others=(x,), atol=1e-5)


def resized_by(factor: float, mode: str, axes: int) -> Case:
    """0.58 * 50 is 29 in single precision, and 28 in double; five elements times 1.1 are five, and copied."""
    x = torch.randn(1, 1, 50, *[4] * (axes - 1), generator=torch.Generator().manual_seed(0))
    module = Of(lambda x: F.interpolate(x, scale_factor=(factor, *[1.0] * (axes - 1)), mode=mode))
    return Case(module, (x[:, :, :20],), free=(2,), others=(x, x[:, :, :5]), atol=1e-5)


def nearest(axes: int) -> Case:
    """Wrong at lengths of 25, 26, 30, 35, … and right at most others."""
    longer = [torch.arange(1.0 * n).reshape(1, 1, n, *[1] * (axes - 1)) for n in (10, 25, 26, 30, 35)]
    module = Of(lambda x: F.interpolate(x, size=(x.shape[2] // 2 + 3, *[1] * (axes - 1))))
    return Case(module, (longer[0],), free=(2,), others=tuple(longer))


def attention(mask: Tensor) -> Case:
    heads = torch.ones(1, 1, 2, 4)
    return of(lambda x, mask: F.scaled_dot_product_attention(x, x, x, mask), heads, mask)


def recurrent(activation: str) -> Case:
    layer = nn.RNN(4, 3, batch_first=True, nonlinearity=activation)
    return of(lambda layer, x: layer(x)[0], CUBE, parts=[layer])


_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims
WHOLE = torch.tensor([2**53 + 1, -(2**60) + 1, 2**62 - 3])
BYTES, BY = torch.tensor([3, 100, 200, 255], dtype=torch.uint8), torch.tensor([1, 7, 0, 8], dtype=torch.uint8)
COUNTS = torch.tensor([3, -7, 2**40])
HIGH = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0)) + 1e6
CASES: dict[Any, Case] = {
    _ATEN.var.correction: of(lambda x: x.var(1), HIGH),
    _ATEN.std.correction: of(lambda x: x.std(1) * 1e30, torch.randn(2, 8) * 1e-30),
    _ATEN.var_mean.correction: of(lambda x: torch.var_mean(x, 1)[0], HIGH),
    _ATEN.std_mean.correction: of(lambda x: torch.std_mean(x, 1)[0] * 1e30, torch.randn(2, 8) * 1e-30),
    _ATEN.fmod.Scalar: of(lambda x: torch.fmod(x, 7), WHOLE),
    _ATEN.fmod.Tensor: of(torch.fmod, WHOLE, WHOLE.flip(0) // 9),
    _ATEN.remainder.Scalar: of(lambda x: x % 0.7, SEVENTHS),
    _ATEN.remainder.Tensor: of(lambda x, y: x % y, SEVENTHS, torch.full((50,), 0.7)),
    _ATEN.floor_divide.default: of(lambda x: x // 0.7, SEVENTHS),
    _ATEN.floor_divide.Scalar: of(lambda x: x // 2.5, COUNTS),
    _ATEN.div.Tensor_mode: of(lambda x: torch.div(x, 0.7, rounding_mode="floor"), SEVENTHS),
    _ATEN.div.Scalar_mode: of(lambda x: _ATEN.div.Scalar_mode(x, 0.7, rounding_mode="floor"), SEVENTHS),
    _ATEN.bitwise_left_shift.Tensor: of(torch.bitwise_left_shift, BYTES, BY),
    _ATEN.__lshift__.Tensor: of(lambda x, y: x << y, BYTES, BY),
    _ATEN.__lshift__.Scalar: of(lambda x: x << 1, BYTES),
    _ATEN.bitwise_right_shift.Tensor: of(torch.bitwise_right_shift, BYTES, BY),
    _ATEN.__rshift__.Tensor: of(lambda x, y: x >> y, BYTES, BY),
    _ATEN.__rshift__.Scalar: of(lambda x: x >> 0, BYTES),
    _ATEN.floor.default: of(torch.floor, COUNTS),
    _ATEN.ceil.default: of(torch.ceil, COUNTS),
    _ATEN.round.default: of(torch.round, COUNTS),
    _ATEN.trunc.default: of(torch.trunc, COUNTS),
    _ATEN.isnan.default: of(torch.isnan, COUNTS),
    _ATEN.isfinite.default: of(torch.isfinite, COUNTS),
    _ATEN.signbit.default: of(torch.signbit, A),
    _PRIMS.signbit.default: of(torch.copysign, A.nan_to_num(1.0), B.nan_to_num(1.0)),
    _ATEN.atan2.default: of(torch.atan2, A, B),
    _ATEN.erf.default: wide(torch.erf),
    _ATEN.erfc.default: wide(torch.erfc),
    _ATEN.gelu.default: wide(F.gelu),
    _ATEN.atan.default: wide(torch.atan),
    _ATEN.asin.default: wide(lambda x: (x / 9).asin()),
    _ATEN.acos.default: wide(lambda x: (x / 9).acos()),
    _ATEN.tan.default: wide(torch.tan),
    _ATEN.sinh.default: wide(torch.sinh),
    _ATEN.cosh.default: wide(torch.cosh),
    _ATEN.asinh.default: wide(torch.asinh),
    _ATEN.acosh.default: wide(lambda x: (x.abs() + 1).acosh()),
    _ATEN.atanh.default: wide(lambda x: (x / 9).atanh()),
    _ATEN.log2.default: wide(lambda x: (x.abs() + 1).log2()),
    _ATEN.log10.default: wide(lambda x: (x.abs() + 1).log10()),
    _ATEN.sinc.default: wide(torch.sinc),
    _ATEN.arange.start_step: wide(lambda x: x * torch.arange(0, 0.4, 0.1, dtype=torch.float64)),
    _ATEN.leaky_relu.default: wide(lambda x: F.leaky_relu(x, 0.1)),
    _ATEN.prelu.default: wide(lambda layer, x: layer(x), nn.PReLU().double()),
    _ATEN.softplus.default: wide(F.softplus),
    _ATEN.mish.default: wide(F.mish),
    _ATEN.hardsigmoid.default: wide(F.hardsigmoid),
    _ATEN.hardswish.default: wide(F.hardswish),
    _ATEN.hardtanh.default: wide(lambda x: F.hardtanh(x, -0.1, 0.3)),
    _ATEN.fill.Scalar: wide(lambda x: x * torch.empty_like(x).fill_(0.1)),
    _ATEN.addmm.default: wide(lambda x: torch.addmm(x @ x.T, x, x.T, alpha=0.1, beta=0.3)),
    _ATEN.addmv.default: wide(lambda x: torch.addmv(x[:, 0], x, x[0], alpha=0.1, beta=0.3)),
    _ATEN.addbmm.default: wide(lambda x: torch.addbmm(x, x[None], (x.T @ x)[None], alpha=0.1, beta=0.3)),
    _ATEN.addcmul.default: wide(lambda x: torch.addcmul(x, x, x, value=0.1)),
    _ATEN.addcdiv.default: wide(lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.1)),
    _ATEN.linalg_vector_norm.default: wide(lambda x: x.norm(0.7, dim=1)),
    _ATEN.fft_fftfreq.default: wide(lambda x: x * torch.fft.fftfreq(4, 0.3, dtype=torch.float64)),
    _ATEN.fft_rfftfreq.default: of(lambda x: x[:, :3] * torch.fft.rfftfreq(4), X[0]),
    _ATEN.bartlett_window.default: wide(lambda x: x * torch.bartlett_window(4, dtype=torch.float64)),
    _ATEN.bartlett_window.periodic: of(lambda x: x * torch.bartlett_window(4, False), X[0]),
    _ATEN.kaiser_window.default: of(lambda x: x * torch.kaiser_window(4), X[0]),
    _ATEN.kaiser_window.periodic: of(lambda x: x * torch.kaiser_window(4, False), X[0]),
    _ATEN.kaiser_window.beta: of(lambda x: x * torch.kaiser_window(4, True, 5.0), X[0]),
    _ATEN.hamming_window.default: of(lambda x: x.half() * torch.hamming_window(4, dtype=torch.half), X[0]),
    _ATEN.hamming_window.periodic: of(lambda x: x * torch.hamming_window(4, False, dtype=torch.float32), X[0]),
    _ATEN.hamming_window.periodic_alpha: of(lambda x: x * torch.hamming_window(4, True, 0.6), X[0]),
    _ATEN.hamming_window.periodic_alpha_beta: of(lambda x: x * torch.hamming_window(4, False, 0.6, 0.3), X[0]),
    _ATEN.upsample_bicubic2d.vec: resized("bicubic"),
    _ATEN.upsample_bilinear2d.vec: resized("bilinear"),
    _ATEN.upsample_linear1d.vec: resized_by(1.1, "linear", 1),
    _ATEN.upsample_trilinear3d.vec: resized_by(0.58, "trilinear", 3),
    _PRIMS.hypot.default: of(torch.hypot, A * 1e30, B * 1e30),
    _PRIMS.fmax.default: of(torch.fmax, A, B),
    _PRIMS.fmin.default: of(torch.fmin, A, B),
    _ATEN.logaddexp.default: of(torch.logaddexp, R * 300, R.flip(1) * 300),
    _ATEN.logaddexp2.default: of(torch.logaddexp2, R * 300, R.flip(1) * 300),
    _ATEN.logcumsumexp.default: of(lambda x: torch.logcumsumexp(x, 1), R * 300),
    _ATEN.log_sigmoid.default: of(F.logsigmoid, R * 300),
    _ATEN.log1p.default: of(torch.log1p, R.abs() * 1e-5, atol=0.0),
    _ATEN.expm1.default: of(torch.expm1, R * 1e-5, atol=0.0),
    _ATEN.elu.default: of(F.elu, -R.abs() * 1e-5, atol=0.0),
    _ATEN.celu.default: of(F.celu, -R.abs() * 1e-5, atol=0.0),
    _ATEN.selu.default: of(F.selu, -R.abs() * 1e-5, atol=0.0),
    round: of(lambda x: x[:, : round(x.shape[1] * 0.5)], R, free=(1,)),
    _ATEN.roll.default: of(lambda x: x.roll(x.shape[1] // 2, 1), R, free=(1,)),
    _ATEN.scaled_dot_product_attention.default: attention(SHOWN),
    _ATEN.pow.Tensor_Tensor: of(lambda x: x + x.double().abs().amax() ** x, R),
    _ATEN.argmax.default: of(lambda x: x.argmax(1), A),
    _ATEN.argmin.default: of(lambda x: x.argmin(1), A),
    _ATEN.amax.default: of(lambda x: x.amax(), R),
    _ATEN.amin.default: of(lambda x: x.amin(), R),
    _ATEN.kthvalue.default: of(lambda x: x.kthvalue(2, 1)[0], R),
    _ATEN.median.dim: of(lambda x: x.median(1)[0], R),
    _ATEN.median.default: of(torch.median, R),
    _ATEN.nanmedian.dim: of(lambda x: x.nanmedian(1)[0], R),
    _ATEN.mode.default: of(lambda x: x.round().mode(1)[0], R),
    _ATEN.cummax.default: of(lambda x: tuple(x.cummax(1)), R),
    _ATEN.cummin.default: of(lambda x: tuple(x.cummin(1)), R),
    _ATEN.searchsorted.Tensor: of(torch.searchsorted, R.sort(1)[0], R),
    _ATEN.sort.default: of(lambda x: x.log().sort(1).values, R),
    _ATEN.topk.default: of(lambda x: x.log().topk(2, 1)[0], R),
    _ATEN.sort.stable: of(lambda x: tuple(torch.sort(x, dim=1, stable=True)), R.round()),
    _ATEN.masked_select.default: of(lambda x: x.masked_select(x > 0), R),
    _ATEN.unique_consecutive.default: of(
        lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True), torch.tensor([2**31 - 1, 5, 5])
    ),
    _ATEN.adaptive_max_pool2d.default: of(lambda x: F.adaptive_max_pool2d(x, (2, 4), return_indices=True), IMAGE),
    _ATEN.where.self: of(lambda x: torch.where(x > 0, x > 0.5, x < -0.5), R),
    _ATEN.diagonal_scatter.default: of(lambda x: x.diagonal_scatter(x[0, 1:], 1), CUBE[0].T @ CUBE[1]),
    _ATEN.instance_norm.default: of(
        lambda norm, x: norm(x), torch.full((1, 2, 31, 31), 1 / 3), parts=[nn.InstanceNorm2d(2)], atol=1e-5
    ),
    _ATEN.rnn_tanh.input: recurrent("tanh"),
    _ATEN.rnn_relu.input: recurrent("relu"),
    _ATEN.repeat_interleave.self_int: of(lambda x: x.repeat_interleave(x.shape[1], dim=1), CUBE, free=(1,)),
    _PRIMS.prod.default: of(lambda x: x.cumprod(1), R),
    _ATEN._cdist_forward.default: of(lambda x: torch.cdist(x, x.flip(1)), CUBE),
    _ATEN._pdist_forward.default: of(F.pdist, CUBE[0]),
    _PRIMS.frexp.default: of(lambda x: tuple(torch.frexp(x)), R),
    _PRIMS.lgamma.default: of(torch.lgamma, R),
    _PRIMS.digamma.default: of(torch.digamma, R),
    _PRIMS.erf_inv.default: of(lambda x: torch.erfinv(x / 4), R),
    _PRIMS.ndtri.default: of(lambda x: torch.special.ndtri(x.sigmoid()), R),
    _PRIMS.bessel_i0.default: of(torch.special.i0, R),
    _PRIMS.bessel_i0e.default: of(torch.special.i0e, R),
    _PRIMS.bessel_i1.default: of(torch.special.i1, R),
    _PRIMS.bessel_i1e.default: of(torch.special.i1e, R),
    _ATEN.put.default: of(lambda x: x.put(SIX[:2], x[0, :2], accumulate=True), R),
    _ATEN.index_reduce.default: of(lambda x: x.index_reduce(1, SIX[[0, 0, 1]], x[:, :3], "mean"), R),
    _ATEN.scatter.reduce: of(lambda x: x.scatter(1, SIX[None, :2], x[:1, :3], reduce="multiply"), R),
    _ATEN.scatter.value_reduce: of(lambda x: x.scatter(1, SIX[None, :2], 3.0, reduce="multiply"), R),
    _ATEN.zeros.default: of(lambda x: (torch.zeros(6, dtype=torch.cfloat) + x).imag, R),
    _ATEN.ones.default: of(lambda x: (torch.ones(6, dtype=torch.cfloat) * x).imag, R),
    _ATEN.full.default: of(lambda x: (torch.full((6,), 1 + 2j) * x).imag, R),
    _ATEN.adaptive_avg_pool2d.default: of(
        lambda pool, x: pool(x),
        IMAGE,
        parts=[nn.AdaptiveAvgPool2d((3, 2))],
        free=(2, 3),
        others=(torch.ones(2, 3, 9, 8),),
    ),
    _ATEN.upsample_nearest1d.vec: nearest(1),
    _ATEN.upsample_nearest2d.vec: nearest(2),
    _ATEN.upsample_nearest3d.vec: nearest(3),
    _ATEN.multinomial.default: of(lambda x: torch.multinomial(x, 6).sort(1)[0], torch.ones(2, 6)),
    torch.ops.higher_order.map_impl: of(lambda x: torch._higher_order_ops.map(lambda row: row * 2, x), R),
    _ATEN.add.Tensor: of(lambda x: (x > 0) + (x > 1), R),
    _ATEN.divide.Tensor: of(torch.divide, R, SIX),
    _ATEN.multiply.Tensor: of(torch.multiply, R, SIX),
    _ATEN.subtract.Tensor: of(torch.subtract, R, SIX),
    _ATEN.softmax.int: of(lambda x: 1 - x.softmax(1, dtype=torch.float64), SURE, atol=0.0),
    _ATEN.log_softmax.int: of(lambda x: x.log_softmax(1, dtype=torch.float64), SURE, atol=0.0),
    _ATEN.mean.default: of(lambda x: x[x > 9].mean(), R),
    _ATEN.mean.dim: of(lambda x: x.mean(1, dtype=torch.float64), GONE),
}
"""Operator of `onnx.translations.TRANSLATIONS` -> a call that needs the translation."""


def is_right(case: Case, operators: Mapping[Any, Any]) -> bool:
    """Whether ONNX Runtime answers as torch when these operators have our translation."""
    with recurrent_patch.keep_layers_whole(), symbolic_sizes.keep_sizes_free():
        program = export(case.module, *case.example, free=case.free)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(emit, "TRANSLATIONS", operators)
        inputs = [f"input{at}" for at in range(len(case.example))]
        outputs = [f"output{at}" for at in range(len(program.graph_signature.user_outputs))]
        try:
            made = emit.translate(program, inputs, outputs)
            found = [run(made, *([one] if case.others else case.example)) for one in case.others or (None,)]
        except Exception:  # noqa: BLE001 - what it cannot write or run it does not answer
            return False
    for one, answer in zip(case.others or (None,), found, strict=True):
        with torch.no_grad():
            expected = case.module(*case.example if one is None else (one,))
        for ours, theirs in zip(answer, expected if isinstance(expected, tuple) else (expected,), strict=True):
            if ours.shape != theirs.shape or not np.allclose(
                ours, theirs, rtol=case.rtol, atol=case.atol, equal_nan=True
            ):
                return False
    return True


@pytest.mark.slow  # exports programs
@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("operator", few(CASES, 5), ids=str)
def test_torch_onnx_still_needs_the_translation(operator: Any) -> None:
    others = {name: written for name, written in TRANSLATIONS.items() if name is not operator}
    assert is_right(CASES[operator], TRANSLATIONS)
    assert not is_right(CASES[operator], others), f"the translation of {operator} is no longer needed: delete it"


@pytest.mark.slow
def test_each_translation_has_a_case() -> None:
    refusing = indices.TRANSLATIONS.keys()  # in `onnx/test_precision.py`: torch has no answer to compare
    assert CASES.keys() | refusing == TRANSLATIONS.keys()
    assert not CASES.keys() & refusing


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", few(sorted(REPRODUCERS), 5))
def test_upstream_still_has_the_defect(name: str) -> None:
    assert REPRODUCERS[name](), f"{name} is no longer needed: delete it with its tests"


TABLES = {"onnx/numerics", "onnx/translations", "onnx/resampling", "onnx/dtypes/double_operators"}
"""Patches that are translations of operators: each operator has a case above."""


def test_each_patch_has_a_complete_header_a_reproducer_and_two_models_that_need_it() -> None:
    found = patches.patches()
    paths = (path.relative_to(patches.ROOT) for path in (patches.ROOT / "patches").rglob("*.py"))
    modules = {path.with_suffix("").as_posix() for path in paths if path.stem != "__init__"}
    assert modules <= found.keys()
    assert found.keys() == REPRODUCERS.keys() | TABLES
    for name, patch in found.items():
        assert patch["issue"] == "none found" or patches.ISSUE.fullmatch(patch["issue"]), name
        assert all(patch[field] for field in patches.FIELDS), name
        assert len(patch["helps"]) > 1 or patch["helps"] == ("all",), name
