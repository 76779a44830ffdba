"""Embedding tables without a vocabulary, for a recipe's model: ids are any int64.

    self.users = trueline.Embedding(16)                # a row of 16 numbers for each id
    self.words = trueline.EmbeddingBag(32, "mean")     # one row for each bag of ids

In a job of `--strategy ps` a table lies on the servers, and a module looks up rows of the minibatch. Everywhere else
(evaluate, capture, serve) it has the table of a checkpoint: sorted `ids` and their `rows`, found by a binary search
of gathers, which every program format has. There an id without a row gets zeros, the mean of its initial value.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import nn

from trueline.errors import UsageError
from trueline.ps.partition import Ids, mix

Rows = npt.NDArray[np.float32]
Mode = Literal["sum", "mean", "max"]
_SHOWN = 5


class TableOptions(TypedDict, total=False):
    """What `Embedding` and `EmbeddingBag` take beside their size."""

    name: str
    """Of the table; modules of one name share it. Left out: the path of the module in the model."""
    init: Literal["uniform", "normal", "zeros"]
    scale: float
    """The bound of a uniform initial value (0.05 when left out), the standard deviation of a normal one."""
    padding_idx: int
    """An id whose row is zeros, in training too; a bag leaves it out."""
    admit_after: int
    """A row is created when its id is trained for the next time after this number of times; until then the id has its
    initial value."""
    max_rows: int
    """Bound on the rows of the table in the whole job; 0: none."""
    evict: Literal["", "lru", "lfu"]
    """Which row makes room at the bound: the one that was not used for longest, or the one that was used least. Empty:
    none, and new ids get no row."""


class TableSettings(Struct, frozen=True, kw_only=True):
    dim: int
    name: str = ""
    init: Literal["uniform", "normal", "zeros"] = "uniform"
    scale: float = 0.05
    padding_idx: int | None = None
    admit_after: int = 0
    max_rows: int = 0
    evict: Literal["", "lru", "lfu"] = ""


class TablePart(NamedTuple):
    """Rows of a table, of ids from one to another."""

    ids: torch.Tensor
    rows: torch.Tensor
    scales: torch.Tensor | None


def _search_part(part: TablePart, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each id has a row in it, and the rows, [*ids.shape, dim] float32; of ids without one any row."""
    left = part.ids.shape[0]
    at = torch.zeros_like(ids)
    while left > 1:  # the row, if there is one, is among `left` rows from `at` on
        half = left // 2
        middle = at + half
        at = torch.where(part.ids[middle] <= ids, middle, at)
        left -= half
    rows = part.rows[at].to(torch.float32)
    if part.scales is not None:
        rows = rows * part.scales[at].unsqueeze(-1)
    return part.ids[at] == ids, rows


def choose_cuts(ids: Ids, most: int) -> list[int]:
    """Places that cut sorted ids into pieces of at most `most`, and at least seven eighths of it but for the last.

    A cut depends on the ids about it, so the next version of a table, with some ids more and some less, has the same
    cuts but for few: content-defined chunking, as in rsync.
    """
    cuts, at = list[int](), 0
    while len(ids) - at > most:
        first = at + most - most // 8
        window = ids[first : at + most + 1]
        at = first + int(np.argmin(mix(window.astype(np.int64).view(np.uint64).copy())))
        cuts.append(at)
    return cuts


class RowSource(Protocol):
    """Where a table's rows come from in training."""

    def look_up(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """[*ids.shape, dim] The rows of `ids` (int64), of which gradients are collected."""


class TableModule(nn.Module):
    """What `Embedding` and `EmbeddingBag` have in common: a table, and its lookup."""

    ids: torch.Tensor
    """[rows] int64, sorted."""
    rows: torch.Tensor
    """[rows, dim] float32; float16 or int8 after `narrow_rows`."""
    scales: torch.Tensor | None
    """[rows] float32: what int8 rows are multiplied by."""

    def __init__(self, dim: int, **options: Unpack[TableOptions]) -> None:
        super().__init__()
        self.settings = _check(TableSettings(dim=dim, **options))
        self.anchor = nn.Parameter(torch.empty(0, dim))
        """Without elements: the optimizer's group of this parameter is the table's."""
        self.register_buffer("ids", torch.empty(0, dtype=torch.int64))
        self.register_buffer("rows", torch.empty(0, dim))
        self.register_buffer("scales", None, persistent=False)
        self._parts: list[str] = []
        """What the names of the buffers with further rows end with, in their order."""
        self._narrowed: dict[str, str | float] = {}
        self._counted: list[Ids] | None = None
        self._frequent: tuple[Ids, Ids] | None = None
        self.table = self.settings.name
        self.source: RowSource | None = None

    @property
    def works_in_forks(self) -> bool:
        """A fork of this process has none of the threads that rows from servers come by."""
        return not getattr(self.source, "connected", False)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """[*ids.shape, dim] float32. Raises UsageError for ids that are no integers, and for training without
        servers."""
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise UsageError(
                f"ids of table '{self.table or 'without a name'}' are {str(ids.dtype).removeprefix('torch.')}, "
                "expected int64",
                hint="an id is an integer: hash what is none in the recipe's feed",
            )
        ids = ids.long()
        if self._counted is not None:
            self._counted.append(ids.detach().reshape(-1).cpu().numpy())
        if self.source is not None:
            return self.source.look_up(self.table, ids)
        if self.training and torch.is_grad_enabled():
            raise UsageError(
                f"the model has a table without a vocabulary ({self}), which is trained by parameter servers",
                hint="add --strategy ps to the command; torch.nn.Embedding has a fixed number of rows and needs none",
            )
        return self._search(ids)

    def _search(self, ids: torch.Tensor) -> torch.Tensor:
        result = self.rows.new_zeros((*ids.shape, self.settings.dim), dtype=torch.float32)
        for part in self._list_parts():
            if len(part.ids):
                found, rows = _search_part(part, ids)
                result = torch.where(found.unsqueeze(-1), rows, result)
        return result

    def _list_parts(self) -> list["TablePart"]:
        names = ["", *self._parts]
        return [TablePart(*(getattr(self, f"{what}{name}") for what in ("ids", "rows", "scales"))) for name in names]

    def split_rows(self, file_bytes: int) -> None:
        """Cuts the table into tables of ascending ids whose rows have at most `file_bytes`: each becomes a file of a
        bundle."""
        cuts = choose_cuts(self.ids.numpy(), max(1, file_bytes // max(1, self.rows[:1].nbytes)))
        whole = TablePart(self.ids, self.rows, self.scales)
        for number, (start, stop) in enumerate(pairwise([0, *cuts, len(self.ids)]) if cuts else (), 1):
            name = f"_{number}" if number > 1 else ""
            for what, tensor in whole._asdict().items():
                self.register_buffer(
                    what + name, None if tensor is None else tensor[start:stop].clone(), persistent=not name
                )
            self._parts += [name] if name else []

    def keeps(self, ids: torch.Tensor) -> torch.Tensor:
        """Which ids count in a bag: all but the padding."""
        padding = self.settings.padding_idx
        return torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        ids, rows = state_dict.get(f"{prefix}ids"), state_dict.get(f"{prefix}rows")
        if ids is not None and rows is not None:
            if tuple(rows.shape) != (len(ids), self.settings.dim) or ids.dtype != torch.int64:
                errors.append(
                    f"table {prefix}rows has shape {list(rows.shape)} for {len(ids)} ids, and the model's table has "
                    f"dim {self.settings.dim}"
                )
                return
            if not bool((ids[1:] > ids[:-1]).all()):
                errors.append(f"{prefix}ids are not sorted and unique")
                return
            self.ids = ids.to(self.ids.device)
            self.rows = rows.to(self.rows.device)
        for name in ("ids", "rows"):
            if f"{prefix}{name}" not in state_dict and strict:
                missing.append(f"{prefix}{name}")

    def state_entries(self, ids: Ids, rows: Rows, initial: Callable[[Ids], Rows]) -> dict[str, torch.Tensor]:
        """The entries of the module's state_dict for trained `ids`, sorted, and their rows. `initial` gives the initial
        values of ids."""
        return {"anchor": self.anchor.detach(), "ids": torch.from_numpy(ids), "rows": torch.from_numpy(rows)}

    @torch.no_grad()
    def narrow_rows(self, kind: Literal["float16", "int8"]) -> None:
        """Stores the rows in half or a quarter of the memory: as float16, or as int8 with a scale for each row, the
        largest of its numbers / 127. Raises UsageError for numbers that float16 does not have."""
        before, self.scales = self._widen(self.rows, self.scales), None
        if kind == "float16":
            self.rows = before.half()
        else:
            self.scales = before.abs().amax(dim=1) / 127 if len(before) else before.new_zeros(0)
            divisors = torch.where(self.scales > 0, self.scales, torch.ones_like(self.scales))
            self.rows = (before / divisors.unsqueeze(-1)).round().to(torch.int8)
        change = (self._widen(self.rows, self.scales) - before).abs().max() if before.numel() else torch.zeros(())
        if not bool(torch.isfinite(change)):
            name, largest = self.table or self.settings.name, float(before.abs().max())
            raise UsageError(
                f"table '{name}' has numbers beyond {kind}, up to {largest:.6g}", hint="keep its rows as float32"
            )
        self._narrowed = {"stored_as": kind, "largest_change": float(f"{float(change):.3g}")}

    @staticmethod
    def _widen(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return rows.float() if scales is None else rows.float() * scales.unsqueeze(-1)

    @contextmanager
    def count_lookups(self) -> Iterator[None]:
        """Lookups in the block are counted for `describe_table`."""
        self._counted = []
        try:
            yield
        finally:
            counted, self._counted = self._counted, None
            self._frequent = np.unique(np.concatenate(counted), return_counts=True) if counted else None

    def _describe_frequent(self) -> dict[str, str]:
        if self._frequent is None:
            return {}
        ids, counts = self._frequent
        most = np.argsort(-counts, kind="stable")[:_SHOWN]
        shares = [f"{ids[at]} ({100 * counts[at] / counts.sum():.3g} %)" for at in most]
        return {"most_frequent_ids": ", ".join(shares)}

    def describe_table(self) -> dict[str, int | float | str]:
        """Its size, the mean and the largest of the rows' lengths (L2), the ids of the longest rows, those that were
        looked up most and how often, and how rows are stored if that is not as float32: for the lineage of a bundle."""
        parts = self._list_parts()
        ids = torch.cat([one.ids for one in parts])
        norms = torch.cat(
            [self._widen(one.rows, one.scales).norm(dim=1) for one in parts] if len(ids) else [torch.zeros(1)]
        )
        longest = ids[norms.topk(min(_SHOWN, len(ids))).indices]
        return {
            "rows": len(ids), "dim": self.settings.dim, "mean_norm": round(float(norms.mean()), 6),
            "largest_norm": round(float(norms.max()), 6), "longest_rows": ", ".join(map(str, longest.tolist())),
            **self._describe_frequent(), **self._narrowed,
        }  # fmt: skip

    def extra_repr(self) -> str:
        name = f", name={self.settings.name!r}" if self.settings.name else ""
        return f"{self.settings.dim}{name}, rows={len(self.ids)}"


def _check(settings: TableSettings) -> TableSettings:
    for what, least in (("dim", 1), ("max_rows", 0), ("admit_after", 0)):
        value = getattr(settings, what)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{what} of a table is {value!r}, expected a whole number of at least {least}")
    for what, choices in (("init", ("uniform", "normal", "zeros")), ("evict", ("", "lru", "lfu"))):
        if getattr(settings, what) not in choices:
            raise UsageError(f"{what} of a table is {getattr(settings, what)!r}, expected one of {choices}")
    if not 0 <= settings.scale < float("inf"):
        raise UsageError(f"scale of a table is {settings.scale}, expected a number of at least 0")
    if settings.evict and not settings.max_rows:
        raise UsageError(
            f"a table evicts by {settings.evict}, and its number of rows has no bound", hint="set max_rows as well"
        )
    return settings


class Embedding(TableModule):
    """A row of `dim` numbers for each id, for ids of any shape: [...] int64 -> [..., dim] float32."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(ids)


class EmbeddingBag(TableModule):
    """One row for each bag of ids: the sum, mean or maximum of their rows; zeros for an empty bag.

    Bags are the lines of a matrix of ids [bags, length], of which `mask` or `padding_idx` tells the ids that count, or
    stand one after the other in a vector, where `offsets` [bags] tells their first positions. `per_sample_weights`, of
    the shape of the ids, are for sums. Source: torch.nn.EmbeddingBag, which has the same rules.
    """

    def __init__(self, dim: int, mode: Mode = "mean", **options: Unpack[TableOptions]) -> None:
        super().__init__(dim, **options)
        if mode not in ("sum", "mean", "max"):
            raise UsageError(f"mode of a bag is {mode!r}, expected sum, mean or max")
        self.mode = mode

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[bags, dim] float32. Raises UsageError for arguments that do not go together."""
        if (ids.dim(), offsets is None) not in ((2, True), (1, False)):
            given = "without offsets" if offsets is None else "with offsets"
            raise UsageError(
                f"a bag was given ids with {ids.dim()} dimensions {given}, expected [bags, length], or a vector with "
                "offsets"
            )
        if per_sample_weights is not None and self.mode != "sum":
            raise UsageError(
                f"a bag of mode {self.mode} was given weights, which are for sums", hint='EmbeddingBag(dim, "sum")'
            )
        rows, kept = self.look_up(ids), self.keeps(ids)
        if mask is not None:
            kept = kept & mask.bool()
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        if offsets is None:
            return self._reduce_lines(rows, kept.unsqueeze(-1))
        return self._reduce_vector(rows, kept, _bag_numbers(ids, offsets), offsets.shape[0])

    def _reduce_lines(self, rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        if self.mode == "max":
            largest = rows.masked_fill(~kept, float("-inf")).amax(dim=1)
            return torch.where(kept.any(dim=1), largest, torch.zeros_like(largest))
        total = torch.where(kept, rows, torch.zeros_like(rows)).sum(dim=1)
        return total if self.mode == "sum" else total / kept.sum(dim=1).clamp(min=1)

    def _reduce_vector(self, rows: torch.Tensor, kept: torch.Tensor, bags: torch.Tensor, count: int) -> torch.Tensor:
        empty = rows.new_zeros((count, rows.shape[1]))
        numbers = rows.new_zeros(count).index_add(0, bags, kept.to(rows.dtype)).unsqueeze(-1)
        if self.mode == "max":
            least = rows.masked_fill(~kept.unsqueeze(-1), float("-inf"))
            where = bags.unsqueeze(-1).expand_as(rows)
            largest = (empty - float("inf")).scatter_reduce(0, where, least, "amax")
            return torch.where(numbers > 0, largest, empty)
        total = empty.index_add(0, bags, torch.where(kept.unsqueeze(-1), rows, torch.zeros_like(rows)))
        return total if self.mode == "sum" else total / numbers.clamp(min=1)


def _bag_numbers(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[ids] The bag of each id. Several bags at one offset: all but the last are empty."""
    starts = torch.zeros(ids.shape[0] + 1, dtype=torch.int64, device=ids.device)
    return starts.scatter_add(0, offsets.long(), torch.ones_like(offsets, dtype=torch.int64)).cumsum(0)[:-1] - 1
