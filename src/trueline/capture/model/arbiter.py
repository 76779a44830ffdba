"""The arbiter: the user's model in float64, run twice on a probe, the second time with every result rounded at random.

    eager, float32       what is served has to answer this
    arbiter, float64     its distance from eager is the rounding error that eager made
    arbiter, rounded     its distance from the first is what rounding does to this model on these inputs

No parameter is written. Each operator gets its operands in float64, whatever dtype the model casts to, so that a
`.float()` inside does not make the arbiter a float32 model. Small models are held in float64; of large ones one
operator's parameters at a time. Source of the second run: stochastic arithmetic (Vignes, 1993; Verificarlo, 2016).
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from trueline.bundle.signature import Array
from trueline.capture.model.dispatch import OperatorMode
from trueline.capture.model.eager import EagerSession
from trueline.recipe.eager_mode import as_trained
from trueline.runtime.tensors import to_array, to_tensors

WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
HELD = 32 << 20
"""Bytes of parameters up to which a model is held in float64."""
PIECE = 1 << 23
"""Elements of a large tensor that are rounded at once, and of weights from which on they are widened by parts."""
PART = 1 << 21
"""Elements of such weights that are widened at once. The memory of larger parts is new to the process each time, and no
cache holds them until they are multiplied: a linear layer takes eight times as long."""
COLUMNS = 1 << 23
"""Elements of the columns of an image, up to which a convolution over large weights is a product of matrices."""
NOISE = 1 << 18
"""Random factors that are drawn once."""
_MOVES = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")
"""Operators that move numbers: they do so in the dtype of their operand, and only what they return is widened."""
_SUMS = tuple(
    f"aten::{name}" for name in ("sum", "mean", "cumsum", "norm", "linalg_vector_norm", "var", "std", "var_mean")
)
"""Operators whose rounding grows with the number of terms, and with the order in which a runtime adds them."""
_CANCELLING = ("aten::gelu", "aten::mish")
"""Operators inside of which nearly equal numbers cancel: they are rounded part by part."""
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::convolution": 0}
"""Operators that add products, and which operand is rounded: the error grows with the number of products."""
_LARGE = ("aten::mm", "aten::addmm", "aten::convolution")
"""Operators whose weights may be large: they are widened by parts."""
LANES = 64
"""Sums that a runtime keeps side by side in a product: fewer products than that are as exact as their result."""
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_CHECKED = ("prelu", "bilinear", "scaled_dot_product_attention")
"""Functions that compare the dtypes of their operands before any operator runs; a convolution of input and bias."""


class Widened(OperatorMode):  # type: ignore[no-untyped-call]
    """Runs every operator in float64, whatever the dtypes of its operands; with `unit`, moves what it returns by
    up to that fraction, at random. Exact results stay as they are."""

    def __init__(self, unit: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self._unit = unit
        self._single = torch.float32 if unit > 2**-30 else None
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.rand(NOISE if unit else 0, generator=generator, dtype=torch.float64) * 2 - 1
        self._at = 0
        self.narrow: set[str] = set()
        """Operators that have no float64 kernel, and so ran as in the eager model."""

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if func.is_view or name in _MOVES:
            found = func(*args, **kwargs)
            return found if func.is_view else tree_map(_widen, found)
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs)
        if self._unit and name in _CANCELLING and func in decomposition_table:
            with self:
                return decomposition_table[func](*tree_map(_widen, tuple(args)), **kwargs)
        if self._unit and name in _PRODUCTS:
            args = self._shake_products(_PRODUCTS[name], args, convolves=name == "aten::convolution")
        if not self._unit or name not in _SUMS:
            return tree_map(self._round, self._call(func, args, kwargs))
        found = self._call(func, (self._terms(args[0]), *args[1:]), kwargs)
        return self.shake(found, times=found.shape[-1] ** 0.5) if name == "aten::cumsum" and found.numel() else found

    def _terms(self, value: Any) -> Any:
        """The terms of a sum, off by as much as adding them one after the other may take the sum."""
        wide = _widen(value)
        if not isinstance(wide, torch.Tensor) or wide.dtype != torch.float64 or wide.ndim < 1 or not wide.numel():
            return value
        return self.shake(wide, times=wide.shape[-1] ** 0.5, whole=True)

    def _shake_products(self, at: int, args: Any, *, convolves: bool) -> Any:
        """The operands of a product, one of them off by as much as adding the products may take the result."""
        wide, weights = _widen(args[at]), args[at + 1]
        products = wide.shape[-1]
        if convolves:  # of each output channel, which is the second axis of transposed weights
            products = weights.numel() // max(weights.shape[1 if args[6] else 0], 1)
        if wide.dtype != torch.float64 or not wide.numel() or products <= LANES:
            return args
        return (*args[:at], self.shake(wide, times=(products / LANES) ** 0.5, whole=True), *args[at + 1 :])

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        large = args[1 if name == "aten::convolution" else -1] if args and not kwargs and name in _LARGE else None
        if isinstance(large, torch.Tensor) and large.numel() > PIECE and large.dtype in WIDE:
            if name == "aten::convolution" and args[-1] == 1 and not args[6]:
                return _convolve_by_parts(func, *args)
            if name != "aten::convolution":
                return _multiply_by_parts(args)
        wide = {key: WIDE.get(value, value) if key == "dtype" else value for key, value in kwargs.items()}
        try:
            found = func(*tree_map(_widen, tuple(args)), **tree_map(_widen, wide))
        except (NotImplementedError, RuntimeError):
            found = func(*tree_map(_narrow, tuple(args)), **tree_map(_narrow, kwargs))
            self.narrow.add(str(func))
        return tree_map(_widen, found)

    def _mutate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that writes: what it writes into keeps its dtype, the others take that dtype."""
        target = kwargs.get("out", next((one for one in tree_leaves(args) if isinstance(one, torch.Tensor)), None))
        if not isinstance(target, torch.Tensor) or target.dtype not in WIDE:
            return func(*tree_map(_widen, tuple(args)), **tree_map(_widen, kwargs))
        self.narrow.add(str(func))

        def narrow(value: Any) -> Any:
            wide = isinstance(value, torch.Tensor) and value.dtype in WIDE.values()
            return value.to(target.dtype) if wide else value

        return func(*tree_map(narrow, tuple(args)), **tree_map(narrow, kwargs))

    def _round(self, value: Any) -> Any:
        if not self._unit or not isinstance(value, torch.Tensor) or value.dtype != torch.float64 or not value.numel():
            return value
        return self.shake(value)

    def shake(self, value: torch.Tensor, *, times: float = 1.0, whole: bool = False) -> torch.Tensor:
        """`value`, rounded at random where it is not exact in the model's own precision, or with `whole` where it is no
        whole number. Large values in pieces: what each step makes would be in memory five times."""
        if value.numel() > PIECE:
            shaken = torch.empty(value.shape, dtype=value.dtype)
            pairs = zip(torch.split(shaken.view(-1), PIECE), torch.split(value.reshape(-1), PIECE), strict=True)
            for into, one in pairs:
                into.copy_(self.shake(one, times=times, whole=whole))
            return shaken
        factors = self._factors(value.numel()).reshape(value.shape) * times
        exact = value.round() if whole or self._single is None else value.to(self._single).to(value.dtype)
        return torch.where(exact == value, value, value + value * factors)

    def _factors(self, count: int) -> torch.Tensor:
        self._at = (self._at * 31 + 7919) % (NOISE // 2)
        repeats = -(-(self._at + count) // NOISE)
        pool = self._noise if repeats == 1 else self._noise.repeat(repeats)
        return pool[self._at : self._at + count] * self._unit

    def _inside(self, value: Any) -> Any:
        return _widen(value) if isinstance(value, torch.Tensor) else super()._inside(value)


def _multiply_by_parts(args: Any) -> torch.Tensor:
    """What mm or addmm returns; parts of a large matrix one after the other, as they lie in memory."""
    matrix, left = args[-1], _widen(args[-2])
    if matrix.stride(0) < matrix.stride(1):  # the weights of a linear layer, which torch turns
        found = _multiply_rows(matrix.t(), left.t()).t().contiguous()
    else:
        width = max(PART // len(matrix), 1)
        found = torch.empty(len(left), matrix.shape[1], dtype=left.dtype)
        parts = zip(torch.split(found, width, dim=1), _widen_parts(torch.split(matrix, width, dim=1)), strict=True)
        for into, one in parts:
            torch.mm(left, one, out=into)
    return found.add_(_widen(args[0])) if len(args) > 2 else found


def _multiply_rows(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`matrix`, some rows of it in float64 at a time, times `right`."""
    width = max(PART // matrix.shape[1], 1)
    found = torch.empty(len(matrix), right.shape[1], dtype=right.dtype)
    for into, one in zip(torch.split(found, width), _widen_parts(torch.split(matrix, width)), strict=True):
        torch.mm(one, right, out=into)
    return found


def _convolve_by_parts(func: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: Any, *how: Any) -> torch.Tensor:
    """What a convolution without groups returns; output channels of large weights one after the other. Of small images
    as a product of matrices: torch does the same for float64, but makes the columns for each part again."""
    wide, (stride, padding, dilation, *_) = _widen(inputs), how
    sizes = zip(wide.shape[2:], weight.shape[2:], stride, padding, dilation, strict=False)
    places = [(size + 2 * pad - apart * (span - 1) - 1) // step + 1 for size, span, step, pad, apart in sizes]
    if weight.ndim == 4 and weight[0].numel() * len(wide) * math.prod(places) <= COLUMNS:
        columns = torch.nn.functional.unfold(wide, weight.shape[2:], dilation, padding, stride)
        flat = columns.transpose(0, 1).reshape(columns.shape[1], -1)
        found = _multiply_rows(weight.reshape(len(weight), -1), flat)
        found = found.view(len(weight), len(wide), *places).transpose(0, 1).contiguous()
    else:
        width = max(PIECE // weight[0].numel(), 1)
        parts = [func(wide, one, None, *how) for one in _widen_parts(torch.split(weight, width))]
        found = torch.cat(parts, dim=1)
    return found if bias is None else found + _widen(bias).reshape(-1, *[1] * (weight.ndim - 2))


def _widen_parts(parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each part in float64, in the memory of the part before: its pages are there already, which takes a third of the
    time. The first part is the largest."""
    room = torch.empty(parts[0].numel(), dtype=WIDE[parts[0].dtype])
    for one in parts:
        yield room[: one.numel()].view(one.shape).copy_(one)


class _WidenedFunctions(TorchFunctionMode):
    """Gives functions that compare dtypes all operands in float64: the parameters of a large model are not held so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _CHECKED:
            args, kwargs = tree_map(_widen, tuple(args)), tree_map(_widen, kwargs)
        elif name in _CONVOLUTIONS:  # its weights are widened by parts
            args = tuple(one if at == 1 else _widen(one) for at, one in enumerate(args))
            kwargs = {key: one if key == "weight" else _widen(one) for key, one in kwargs.items()}
        return func(*args, **kwargs)


def _widen_weights(layer: torch.nn.RNNBase) -> None:
    """Recurrent layers compare the dtype of their weights themselves: these are in float64 while one is called."""
    kept = layer._flat_weights

    def widen(*_: Any) -> None:
        layer._flat_weights = [_widen(one) for one in kept]

    def restore(*_: Any) -> None:
        layer._flat_weights = kept

    layer.register_forward_pre_hook(widen)
    layer.register_forward_hook(restore, always_call=True)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in WIDE and not value.is_quantized:
        return value.to(WIDE[value.dtype])
    return value


def _narrow(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value


@final
class Arbiter:
    """Answers of `eager`'s model in float64. The model itself is not called: a copy is, which shares what is large."""

    def __init__(self, eager: EagerSession) -> None:
        self._eager = eager
        parts = (*eager.module.parameters(), *eager.module.buffers())
        self.small = sum(part.nbytes for part in parts) <= HELD
        """Whether it holds the parameters in float64."""
        self._module = _copy(eager.module, held=self.small)
        for layer in self._module.modules() if not self.small else ():
            if isinstance(layer, torch.nn.RNNBase):
                _widen_weights(layer)
        tensors = [*eager.module.parameters(), *eager.module.buffers(), *eager.calling.example]
        dtypes = {one.dtype for one in tensors if one.is_floating_point()}
        units = [torch.finfo(dtype).eps / 2 for dtype in dtypes if dtype in WIDE or dtype == torch.float64]
        self._unit = max(units, default=2**-24)

    def run(self, inputs: Mapping[str, Array], *, rounded: int = 0) -> dict[str, Array]:
        """The outputs, floats as float64, rounded by the draws of that number; 0: not rounded. Raises what the model
        raises in float64."""
        mode = Widened(self._unit if rounded else 0.0, rounded)
        tensors = [_widen(tensor) for tensor in to_tensors(self._eager.signature, inputs)]
        with torch.no_grad(), as_trained(), _WidenedFunctions(), mode:
            outputs = self._eager.calling.call(self._module, tensors)
        named = zip(self._eager.signature.outputs, outputs, strict=True)
        return {spec.name: to_array(_widen(tensor.detach())) for spec, tensor in named}


def _copy(module: torch.nn.Module, *, held: bool) -> torch.nn.Module:
    """`module` with attributes of its own: a table that it keeps for a size stays float32 in the original. Its
    parameters are in float64 if they are `held`, else those of the original. Raises what cannot be copied."""
    made: dict[int, Any] = {}
    for one in module.parameters():
        made[id(one)] = torch.nn.Parameter(_widen(one.detach()), one.is_floating_point()) if held else one
    for buffer in module.buffers():
        made[id(buffer)] = _widen(buffer.detach()).clone() if held else buffer.detach().clone()
    return copy.deepcopy(module, made)
