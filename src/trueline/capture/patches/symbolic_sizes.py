"""Functions of torch that look at a size and need not: while a model is traced they stay functions of it.

| function | what torch does | what is traced |
|---|---|---|
| `affine_grid` | fixes its sizes | coordinate i of n: `(2 i + 1) / n - 1`, between corners `2 i / (n - 1) - 1` |
| `cdist` | another algorithm from 26 rows on | the operator that looks at the rows when it runs |
| `linspace` | fixes its steps | step i of n from both ends, `start + i d` and `end - (n - 1 - i) d` |

Sources: the documentation of torch.nn.functional.affine_grid, of torch.cdist (`compute_mode`) and of torch.linspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.trace_rules import get_torch_obj_rule_map

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="https://github.com/pytorch/pytorch/issues/172930",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("vq_vae", "dgcnn"),
)

_MODES = {
    "use_mm_for_euclid_dist_if_necessary": None,
    "use_mm_for_euclid_dist": 1,
    "donot_use_mm_for_euclid_dist": 2,
}


@contextmanager
def free_sizes() -> Iterator[None]:
    """While a model is traced in the block, these functions leave its sizes free."""
    get_torch_obj_rule_map()  # Dynamo looks torch's functions up by name once, and would keep these for good
    before = torch.affine_grid_generator, torch.cdist, torch.linspace
    torch.affine_grid_generator, torch.cdist, torch.linspace = affine_grid, cdist, _linspace(torch.linspace)
    try:
        yield
    finally:
        torch.affine_grid_generator, torch.cdist, torch.linspace = before


def _linspace(torchs_own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.linspace, but for a size that is free in place of a number of steps."""

    def linspace(start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
        kind = options.get("dtype") or torch.get_default_dtype()
        numbers = isinstance(start, int | float) and isinstance(end, int | float)
        if isinstance(steps, int) or not numbers or not kind.is_floating_point or options.get("out") is not None:
            return torchs_own(start, end, steps, **options)
        return spaced(start, end, steps, kind, options.get("device"))

    return linspace


def spaced(start: float, end: float, steps: Any, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """`steps` numbers from `start` to `end`, equally far from each other; one alone is `start`."""
    places = torch.arange(steps, device=device)
    last = torch.sym_max(steps - 1, 1)  # type: ignore[no-untyped-call]
    apart = torch.full((), end - start, dtype=dtype, device=device) / last
    return torch.where(places < steps // 2, start + places * apart, end - (last - places) * apart)


def cdist(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> torch.Tensor:
    """The distance of each row of `x1` [..., P, M] to each of `x2` [..., R, M]: [..., P, R]."""
    found: torch.Tensor = torch.ops.aten._cdist_forward(x1, x2, p, _MODES[compute_mode])
    return found


def affine_grid(theta: torch.Tensor, size: Sequence[int | torch.SymInt], align_corners: bool) -> torch.Tensor:
    """Where each point of an image of `size` [N, C, H, W] (or with a depth) comes from under the affine maps `theta`
    [N, 2, 3]: [N, H, W, 2], coordinates from -1 to 1, the last dimension of the image first."""
    axes = [_coordinates(length, theta, align_corners) for length in size[2:]]
    grids = torch.meshgrid(*axes, indexing="ij")
    points = torch.stack([*reversed(grids), torch.ones_like(grids[0])], dim=-1)
    found = points.flatten(0, -2) @ theta.transpose(1, 2)
    return found.reshape(found.shape[0], *size[2:], found.shape[-1])


def _coordinates(length: Any, like: torch.Tensor, align_corners: bool) -> torch.Tensor:
    places = torch.arange(length, device=like.device).to(like.dtype) * 2 - (length - 1)
    apart = torch.sym_max(length - 1, 1) if align_corners else length  # type: ignore[no-untyped-call]
    found: torch.Tensor = places / apart
    return found
