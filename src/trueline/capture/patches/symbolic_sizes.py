"""Functions of torch that make a number of a size, or bound it, without need.

`affine_grid` and `linspace` fix their sizes, and `cdist` takes another algorithm from 26 rows on. Here the first two
are computed from the size, by their documentation, and the last calls the operator that decides at run time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.trace_rules import get_torch_obj_rule_map

from trueline.capture.patches import Patch

PATCH = Patch(issue="pytorch/pytorch#172930", versions="torch 2.13", cost="under 0.1 ms", helps=("vq_vae", "dgcnn"))

_MODES = {"use_mm_for_euclid_dist_if_necessary": None, "use_mm_for_euclid_dist": 1, "donot_use_mm_for_euclid_dist": 2}


@contextmanager
def keep_sizes_free() -> Iterator[None]:
    """In the block, these functions leave sizes free."""
    get_torch_obj_rule_map()  # Dynamo looks torch's functions up by name once, and would keep these for good
    originals = torch.affine_grid_generator, torch.cdist, torch.linspace
    torch.affine_grid_generator, torch.cdist, torch.linspace = affine_grid, cdist, _linspace(torch.linspace)
    try:
        yield
    finally:
        torch.affine_grid_generator, torch.cdist, torch.linspace = originals


def _linspace(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.linspace, except for a number of steps that is free."""

    def linspace(start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
        dtype = options.get("dtype") or torch.get_default_dtype()
        numbers = isinstance(start, int | float) and isinstance(end, int | float)
        if isinstance(steps, int) or not numbers or not dtype.is_floating_point or options.get("out") is not None:
            return original(start, end, steps, **options)
        return space_evenly(start, end, steps, dtype, options.get("device"))

    return linspace


def space_evenly(start: float, end: float, steps: Any, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """`steps` numbers from `start` to `end`; a single one is `start`."""
    places = torch.arange(steps, device=device)
    last = torch.sym_max(steps - 1, 1)  # type: ignore[no-untyped-call]
    distance = torch.full((), end - start, dtype=dtype, device=device) / last
    return torch.where(places < steps // 2, start + places * distance, end - (last - places) * distance)


def cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> torch.Tensor:
    """Distance of each row of `x1` [..., P, M] to each of `x2` [..., R, M]: [..., P, R]."""
    distances: torch.Tensor = torch.ops.aten._cdist_forward(x1, x2, p, _MODES[compute_mode])
    return distances


def affine_grid(theta: torch.Tensor, size: Sequence[int | torch.SymInt], align_corners: bool) -> torch.Tensor:
    """Source of each point of an image of `size` [N, C, H, W] (or with a depth) under the affine maps `theta`
    [N, 2, 3]: [N, H, W, 2], coordinates from -1 to 1, the last dimension of the image first."""

    def coordinates(length: Any) -> Any:
        places = torch.arange(length, device=theta.device).to(theta.dtype) * 2 - (length - 1)
        step: Any = torch.sym_max(length - 1, 1) if align_corners else length  # type: ignore[no-untyped-call]
        return places / step

    grids = torch.meshgrid(*map(coordinates, size[2:]), indexing="ij")
    points = torch.stack([*reversed(grids), torch.ones_like(grids[0])], dim=-1)
    mapped = points.flatten(0, -2) @ theta.transpose(1, 2)
    return mapped.reshape(mapped.shape[0], *size[2:], mapped.shape[-1])
