"""Functions of torch that make a number of a size, or bound it, without need.

`max_pool1d`, `take_along_dim`, `bincount`, `bucketize`, `new_tensor`, `kron`, `affine_grid`, `linspace`, `nbytes`,
windows, frequencies, indices of triangles, covariance, gradients, tables of powers and chains of products fix their
sizes, and `cdist` takes another algorithm from 26 rows on. Here they are computed from the size, by their
documentation, or by an operator that decides at run time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch._dynamo.trace_rules import get_torch_obj_rule_map

from trueline.capture.patches import Patch
from trueline.capture.patches.stand_ins import size_parts, size_scales

PATCH = Patch(
    issue="pytorch/pytorch#172930", versions="torch 2.13", cost="under 0.1 ms", helps=("vq_vae", "dgcnn", "textcnn")
)

FIRST = ("window_length", "n", "input", "x", "tensors")
"""How torch calls the first argument of these functions."""
_MODES = {"use_mm_for_euclid_dist_if_necessary": None, "use_mm_for_euclid_dist": 1, "donot_use_mm_for_euclid_dist": 2}


@contextmanager
def keep_sizes_free() -> Iterator[None]:
    """In the block, these functions leave sizes free."""
    get_torch_obj_rule_map()  # Dynamo looks torch's functions up by name once, and would keep these for good
    fft, differences = torch.fft, cast(Callable[..., Any], torch.gradient)
    with ExitStack() as stack:
        for holder, name, stand_in in (
            (torch, "affine_grid_generator", affine_grid),
            (torch, "cdist", cdist),
            (torch, "kron", kron),
            (torch, "arange", _arange(torch.arange)),
            (torch, "bincount", _bincount(torch.bincount)),
            (torch.Tensor, "bincount", _bincount(torch.Tensor.bincount)),
            (torch, "bucketize", _bucketize(torch.bucketize)),
            (torch, "linspace", _linspace(torch.linspace)),
            (torch, "take_along_dim", _take_along_dim(torch.take_along_dim)),
            (torch, "tensor_split", size_parts.split_evenly(torch.tensor_split)),
            (torch.Tensor, "tensor_split", size_parts.split_evenly(torch.Tensor.tensor_split)),
            (torch, "unravel_index", size_parts.unravel(torch.unravel_index)),
            (torch.Tensor, "fill_diagonal_", size_parts.fill_diagonal(torch.Tensor.fill_diagonal_)),
            (torch.Tensor, "nbytes", property(lambda tensor: tensor.numel() * tensor.element_size())),
            (torch.Tensor, "new_tensor", _new_tensor(torch.Tensor.new_tensor)),
            (torch.Tensor, "take_along_dim", _take_along_dim(torch.Tensor.take_along_dim)),
            (fft, "fftfreq", _if_free(fft.fftfreq, frequencies)),
            (fft, "rfftfreq", _if_free(fft.rfftfreq, half_frequencies)),
            (torch, "bartlett_window", _if_free(torch.bartlett_window, triangle)),
            (torch, "kaiser_window", _if_free(torch.kaiser_window, kaiser)),
            (torch, "vander", _if_of_free(torch.vander, powers)),
            (torch, "gradient", _if_of_free(differences, _differences(differences))),
            (torch, "triu_indices", _if_square(torch.triu_indices, upper_indices)),
            (torch, "tril_indices", _if_square(torch.tril_indices, lower_indices)),
            (torch, "cov", _if_of_free(torch.cov, covariance)),
            (torch, "corrcoef", _if_of_free(torch.corrcoef, correlation)),
            (torch.linalg, "multi_dot", _if_of_free(torch.linalg.multi_dot, multiply)),
            *((torch, f"{name}_window", _if_free(getattr(torch, f"{name}_window"), _window(terms)))
              for name, terms in COSINES.items()),
            (F, "interpolate", size_scales.resize_by(F.interpolate)),
            *size_parts.list_pools(_max_pool1d),
        ):  # fmt: skip
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, stand_in)
        yield


def _if_free(original: Callable[..., torch.Tensor], stand_in: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """`original`, and `stand_in` for a size that is free."""

    def call(*args: Any, **options: Any) -> torch.Tensor:
        (size, *args_after), options = _with_first(args, options)
        return (original if isinstance(size, int) else stand_in)(size, *args_after, **options)

    return call


def _with_first(args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The same with the first argument by place, where all are given by name."""
    name = next((one for one in FIRST if one in options), None)
    if args or name is None:
        return args, dict(options)
    return [options[name]], {key: value for key, value in options.items() if key != name}


def _if_of_free(original: Callable[..., torch.Tensor], stand_in: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """`original`, and `stand_in` for tensors of which a size is free."""

    def call(*args: Any, **options: Any) -> torch.Tensor:
        (given, *args_after), options = _with_first(args, options)
        tensors = [given] if isinstance(given, torch.Tensor) else given
        fixed = all(isinstance(size, int) for one in tensors for size in one.shape)
        return (original if fixed else stand_in)(given, *args_after, **options)

    return call


def _arange(original: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """`original`, and fractional steps as torch computes them, in double: ONNX counts them in single precision."""

    def call(*of: Any, **options: Any) -> torch.Tensor:
        free = any(isinstance(one, torch.SymInt | torch.SymFloat) for one in of)
        if not free or not any(isinstance(one, float | torch.SymFloat) for one in of) or not _are_fractions(options):
            return original(*of, **options)
        start, end, step = (0, *of, 1) if len(of) == 1 else (*of, 1)[:3]
        count: Any = torch.sym_max(math.ceil((end - start) / step), 0)  # type: ignore[no-untyped-call]
        first, by = (torch.full((), one, dtype=torch.float64, device=options.get("device")) for one in (start, step))
        places = original(count, device=options.get("device")).double()
        return (first + by * places).to(options.get("dtype") or torch.get_default_dtype())

    return call


def _bincount(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """With a least length, which is then the length: a larger number is refused where torch would count it too."""

    def count(input: torch.Tensor, weights: Any = None, minlength: Any = 0) -> torch.Tensor:
        if weights is not None or type(input) is torch.Tensor or (isinstance(minlength, int) and minlength < 1):
            return original(input, weights, minlength)
        torch._assert_async(((input >= 0) & (input < minlength)).all(), "bincount counts numbers below minlength here")
        found = torch.zeros(minlength, dtype=torch.int64, device=input.device)
        return found.scatter_add(0, input.long(), torch.ones_like(input, dtype=torch.int64))

    return count


def _bucketize(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Among a free number of borders: what `searchsorted` finds, which leaves it free."""

    def find(input: Any, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False) -> torch.Tensor:
        if not isinstance(input, torch.Tensor) or isinstance(boundaries.shape[-1], int):
            return original(input, boundaries, out_int32=out_int32, right=right)
        return torch.searchsorted(boundaries, input, out_int32=out_int32, right=right)

    return find


def _are_fractions(options: Mapping[str, Any]) -> bool:
    dtype = options.get("dtype") or torch.get_default_dtype()
    return options.keys() <= {"dtype", "device"} and bool(dtype.is_floating_point)


def _if_square(original: Callable[..., torch.Tensor], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, and `stand_in` for a side that is free, where the triangle is a half of a square."""

    def call(row: Any, col: Any, offset: int = 0, *, dtype: Any = torch.long, **options: Any) -> Any:
        half = offset >= 0 if stand_in is upper_indices else offset <= 0
        if isinstance(row, int) or (row is not col and row != col) or not half:
            return original(row, col, offset, dtype=dtype, **options)
        return torch.stack(stand_in(row, abs(offset), options.get("device"))).to(dtype)

    return call


def lower_indices(size: Any, less: int, device: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the numbers below a diagonal of a square, row by row. Row r of them has r + 1."""
    rows: Any = torch.sym_max(size - less, 0) if less > 1 else size - less  # type: ignore[no-untyped-call]
    places = torch.arange(rows * (rows + 1) // 2, device=device)
    row = ((torch.sqrt(8 * places.double() + 1) - 1) / 2).floor().long()
    row = row - (row * (row + 1) // 2 > places).long()  # where the root was rounded
    row = row + ((row + 1) * (row + 2) // 2 <= places).long()
    return row + less, places - row * (row + 1) // 2


def upper_indices(size: Any, less: int, device: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same above a diagonal: from the end they are those below it."""
    row, column = lower_indices(size, less, device)
    return size - 1 - row.flip(0), size - 1 - column.flip(0)


def covariance(input: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> torch.Tensor:
    """Of the rows of `input`."""
    if fweights is not None or aweights is not None:
        raise NotImplementedError("torch.cov with weights over a free size has no stand-in")
    rows = input if input.ndim > 1 else input.unsqueeze(0)
    apart = rows - rows.mean(1, keepdim=True)
    count: Any = torch.sym_max(rows.shape[1] - correction, 0)  # type: ignore[no-untyped-call]
    found: torch.Tensor = (apart @ apart.mH / torch.full((), count, device=input.device)).squeeze()
    return found


def correlation(input: torch.Tensor) -> torch.Tensor:
    found = covariance(input)
    if not found.ndim:
        return found / found
    spread = found.diagonal().sqrt()
    return (found / spread[:, None] / spread).clip(-1, 1)


def multiply(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """From the left; torch chooses the order that takes the fewest steps."""
    found: torch.Tensor = tensors[0]
    for one in tensors[1:]:
        found = found @ one
    return found


def _new_tensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Of a size, or of a plain list with sizes."""

    def new(like: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
        numbers: Any = [data] if isinstance(data, torch.SymInt | torch.SymFloat) else data
        plain = isinstance(numbers, list | tuple) and all(isinstance(one, _NUMBERS) for one in numbers)
        if not plain or all(isinstance(one, int | float) for one in numbers):
            return original(like, data, **options)
        kind, device = options.get("dtype") or like.dtype, options.get("device") or like.device
        found = [torch.full((), one, dtype=kind, device=device) for one in numbers]
        return found[0] if numbers is not data else torch.stack(found)

    return new


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def _max_pool1d(*args: Any, **options: Any) -> torch.Tensor:
    largest, _ = torch.max_pool1d_with_indices(*args, **options)
    return largest


def _take_along_dim(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """With indices of as many dimensions as the tensor. One outside of the size is taken modulo it, as by torch."""

    def take(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> Any:
        if dim is None or indices.ndim != input.ndim:
            return original(input, indices, dim)
        dim %= input.ndim
        shapes = [
            (one, one) if axis == dim else (other, one)
            for axis, (one, other) in enumerate(zip(indices.shape, input.shape, strict=True))
        ]
        whole: Any = torch.broadcast_shapes(*zip(*shapes, strict=True))  # type: ignore[no-untyped-call]
        tall = [input.shape[axis] if axis == dim else size for axis, size in enumerate(whole)]
        places = torch.remainder(indices, input.shape[dim])
        return input.expand(tall).gather(dim, places.expand(whole))

    return take


def kron(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Each number of `input` times all of `other`: dimensions are the products of both."""
    rank = max(input.ndim, other.ndim)
    a, b = ((1,) * (rank - one.ndim) + tuple(one.shape) for one in (input, other))
    left = input.reshape([size for one in a for size in (one, 1)])
    right = other.reshape([size for one in b for size in (1, one)])
    return (left * right).reshape([one * two for one, two in zip(a, b, strict=True)])


COSINES = {"hann": (0.5, 0.5), "hamming": (0.54, 0.46), "blackman": (0.42, 0.5, 0.08)}
"""Window -> weights of the cosines of 0, 1, 2 turns; every other is subtracted. Source: torch.hann_window."""


def _window(terms: Sequence[float]) -> Callable[..., torch.Tensor]:
    def window(size: Any, periodic: bool = True, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        places = torch.arange(size, device=device).to(dtype or torch.get_default_dtype())
        last: Any = size if periodic else torch.sym_max(size - 1, 1)  # type: ignore[no-untyped-call]
        turn = places * (torch.full((), 2 * math.pi, dtype=torch.float64, device=device) / last).to(places.dtype)
        found: Any = sum((-1) ** at * weight * torch.cos(at * turn) for at, weight in enumerate(terms))
        return torch.where(torch.full((), size, device=device) == 1, torch.ones_like(turn), found)

    return window


def triangle(size: Any, periodic: bool = True, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """torch.bartlett_window: from 0 up to 1 in the middle, and down."""
    count: Any = size + 1 if periodic else size
    places = torch.arange(size, device=device).to(dtype or torch.get_default_dtype())
    last: Any = torch.sym_max(count - 1, 1)  # type: ignore[no-untyped-call]
    rising = places * (torch.full((), 2.0, dtype=torch.float64, device=device) / last).to(places.dtype)
    found = torch.where(places < (count - 1) // 2 + 1, rising, 2 - rising)
    return torch.where(torch.full((), size, device=device) == 1, torch.ones_like(found), found)


def kaiser(
    size: Any, periodic: bool = True, beta: float = 12.0, *, dtype: Any = None, device: Any = None, **_: Any
) -> torch.Tensor:
    """torch.kaiser_window: a Bessel function over a half circle."""
    count: Any = size + 1 if periodic else size
    places = torch.arange(size, device=device).to(dtype or torch.get_default_dtype())
    last: Any = torch.sym_max(count - 1, 1)  # type: ignore[no-untyped-call]
    turned = places * (torch.full((), 2.0, dtype=torch.float64, device=device) / last).to(places.dtype) - 1
    top = torch.i0(torch.full((), beta, dtype=places.dtype, device=device))
    found = torch.i0(beta * (1 - turned * turned).clamp(min=0).sqrt()) / top
    return torch.where(torch.full((), size, device=device) == 1, torch.ones_like(found), found)


def powers(x: torch.Tensor, N: Any = None, increasing: bool = False) -> torch.Tensor:
    """torch.vander: the powers of each number, the highest first."""
    count: Any = x.shape[0] if N is None else N
    x = x if x.is_floating_point() or x.is_complex() else x.long()
    steps = torch.cat([torch.ones_like(x).unsqueeze(1), x.unsqueeze(1).expand(x.shape[0], count)], 1)
    found = steps.cumprod(1)[:, :-1]
    return found if increasing else found.flip(1)


def _differences(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.gradient with steps of one number; those of tensors are left to torch."""

    def gradient(input: torch.Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
        dims = range(input.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
        if not isinstance(spacing, int | float) or not input.is_floating_point():
            return original(input, spacing=spacing, dim=dim, edge_order=edge_order)
        return tuple(_difference(input, axis, spacing, edge_order) for axis in dims)

    return gradient


def _difference(x: torch.Tensor, axis: int, step: float, edge_order: int) -> torch.Tensor:
    size = x.shape[axis]
    if size < edge_order + 1:
        raise RuntimeError(f"torch.gradient expects at least {edge_order + 1} values along a dimension")

    def at(place: int) -> torch.Tensor:
        return x.narrow(axis, size + place if place < 0 else place, 1)

    if edge_order == 1:
        first, last = (at(1) - at(0)) / step, (at(-1) - at(-2)) / step
    else:
        first = (-1.5 * at(0) + 2 * at(1) - 0.5 * at(2)) / step
        last = (0.5 * at(-3) - 2 * at(-2) + 1.5 * at(-1)) / step
    inside = (x.narrow(axis, 2, size - 2) - x.narrow(axis, 0, size - 2)) / (2 * step)
    return torch.cat([first, inside, last], axis)


def frequencies(size: Any, d: float = 1.0, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """torch.fft.fftfreq: 0, 1, …, -2, -1 over `size` times `d`."""
    places = torch.arange(size, device=device)
    return _per_sample(torch.where(places < (size + 1) // 2, places, places - size), size, d, dtype)


def half_frequencies(size: Any, d: float = 1.0, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """torch.fft.rfftfreq: 0, 1, … up to half of `size`, over `size` times `d`."""
    return _per_sample(torch.arange(size // 2 + 1, device=device), size, d, dtype)


def _per_sample(places: torch.Tensor, size: Any, d: float, dtype: Any) -> torch.Tensor:
    step = torch.ones((), dtype=torch.float64, device=places.device) / (size * d)
    kind: torch.dtype = dtype or torch.get_default_dtype()
    found: torch.Tensor = places.to(kind) * step.to(kind)
    return found


def _linspace(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.linspace, except for a number of steps that is free."""

    def linspace(start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
        dtype = options.get("dtype") or torch.get_default_dtype()
        numbers = all(isinstance(one, int | float | torch.SymInt | torch.SymFloat) for one in (start, end))
        if isinstance(steps, int) or not numbers or not dtype.is_floating_point or options.get("out") is not None:
            return original(start, end, steps, **options)
        return space_evenly(start, end, steps, dtype, options.get("device"))

    return linspace


def space_evenly(start: float, end: float, steps: Any, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """`steps` numbers from `start` to `end`; a single one is `start`."""
    places = torch.arange(steps, device=device)
    last = torch.sym_max(steps - 1, 1)  # type: ignore[no-untyped-call]
    first, final = (torch.full((), one, dtype=dtype, device=device) for one in (start, end))
    distance = (final - first) / last
    if dtype == torch.float32:  # torch multiplies and adds in one rounding
        first, final, distance = first.double(), final.double(), distance.double()
    before, after = (first + places * distance).to(dtype), (final - (last - places) * distance).to(dtype)
    half_way = torch.sym_max(steps // 2, 1)  # type: ignore[no-untyped-call]
    return torch.where(places < half_way, before, after)


def cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> torch.Tensor:
    """Distance of each row of `x1` [..., P, M] to each of `x2` [..., R, M]: [..., P, R]."""
    distances: torch.Tensor = torch.ops.aten._cdist_forward(x1, x2, p, _MODES[compute_mode])
    return distances


def affine_grid(theta: torch.Tensor, size: Sequence[int | torch.SymInt], align_corners: bool) -> torch.Tensor:
    """Source of each point of an image of `size` [N, C, H, W] (or with a depth) under the affine maps `theta`
    [N, 2, 3]: [N, H, W, 2], coordinates from -1 to 1, the last dimension of the image first. Rounded as by torch: the
    pixel nearest to a point may depend on the last digit. Source: aten/src/ATen/native/AffineGridGenerator.cpp."""

    def coordinates(length: Any) -> Any:
        places = torch.linspace(-1.0, 1.0, length, dtype=theta.dtype, device=theta.device)
        places = places if align_corners else places * (length - 1) / length
        return torch.where(torch.full((), length, device=theta.device) == 1, torch.zeros_like(places), places)

    grids = torch.meshgrid(*map(coordinates, size[2:]), indexing="ij")
    points = torch.stack([*reversed(grids), torch.ones_like(grids[0])], dim=-1)
    mapped = points.flatten(0, -2) @ theta.transpose(1, 2)
    return mapped.reshape(mapped.shape[0], *size[2:], mapped.shape[-1])
