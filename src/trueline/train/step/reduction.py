"""How a loss reduces over the records of a batch, decided from a trial before the first step.

    mean       the loss of a batch is the mean of its parts' losses by records: gradients are averaged by records
    sum        it is their sum: gradients are summed
    weighted   it is their mean by weights (tokens, class weights), which `weight` gives: gradients are averaged by them

Names as in torch.nn (`reduction`); fairseq's `sample_size`, Megatron's `num_tokens` and the `num_items_in_batch` of
transformers are such weights. A loss that is none of them compares records of a batch, or is a mean by weights that are
not known: it is refused, unless the job is given a `reduction`, with which it is computed over fixed shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trueline.errors import RecipeError, UsageError
from trueline.train.step.parts import no_tensor

Tensor = torch.Tensor
MOST_NODES = 256
BESIDE = 1e-6
"""How far a mean by weights may be off by an epsilon in its divisor, `sum / (weight + 1e-6)`, as float32 rounds."""
CERTAIN, ALIKE, ROUNDING = 16, 0.99, 2e-6
"""Elements from which on a direction is no chance, its least cosine, and what rounding leaves in any case."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a piece of a step counts."""

    gradient: float
    """Its gradient is multiplied by this before all are summed."""
    loss: float
    """Its loss in the step's sum of losses."""
    weight: float
    """In the weight of the step, which divides the sum of losses; and the sum of gradients of a weighted mean."""


def share_of(reduction: str, records: int, of_step: float, weight: float | None) -> Share:
    """The share of a piece of `records` records, which are the fraction `of_step` of their step.

    >>> share_of("mean", 4, 0.5, None), share_of("sum", 4, 0.5, None)
    (Share(gradient=0.5, loss=4, weight=4), Share(gradient=1.0, loss=1.0, weight=4))
    >>> share_of("weighted", 4, 0.5, 20.0)
    Share(gradient=2.5, loss=20.0, weight=20.0)
    """
    if reduction == "sum":
        return Share(1.0, 1.0, records)
    if reduction == "mean" or weight is None:
        return Share(of_step, records, records)
    return Share(of_step * weight / max(records, 1), weight, weight)


def as_scalar(loss: Any, records: int, reduction: str = "mean") -> Tensor:
    """The loss of a batch as one number: `loss` itself, or of one loss for each record their mean (or sum).

    Raises RecipeError for any other shape: torch refuses it too, and its mean would be not the loss that was written.
    """
    if not isinstance(loss, torch.Tensor):
        raise no_tensor.refuse(loss)
    if loss.dim() == 0:
        return loss
    if loss.numel() == records and loss.shape[0] in (1, records):
        return loss.sum() if reduction == "sum" else loss.mean()
    raise RecipeError(
        f"the loss of {records} records has the shape {list(loss.shape)}, expected one number, or one for each record",
        hint="write .mean() or .sum() where that is meant: losses.mean(dim=1) is one for each record",
    )


def as_weight(weight: Any, records: int) -> float:
    """`weight` of a batch as a number. Raises RecipeError unless it is one of at least 0."""
    found = float(weight.sum().item() if isinstance(weight, torch.Tensor) else weight)
    if not 0.0 <= found < float("inf"):
        raise RecipeError(f"the weight of {records} records is {found}, expected a number of at least 0",
                          hint="it is what the mean divides by, e.g. the number of tokens that count")  # fmt: skip
    return found


def count_loss(
    reduction: str, loss: Any, weight: float | None, *, records: int, of_step: float, step: int, even: bool
) -> tuple[Tensor, Share]:
    """The loss of a piece of `step` as one number, and what it counts. Raises RecipeError for a loss of another shape,
    UsageError for a weight or, if `even`, a divisor of a cross entropy that the batches of the trial did not have."""
    if (reduction == "weighted") != (weight is not None):
        this, those = ("no", "one") if weight is None else ("a", "none")
        raise UsageError(f"a batch of step {step} has {this} weight, and those that were tried before had {those}",
                         hint="give every batch its weight, or none")  # fmt: skip
    value = as_scalar(loss, records, reduction)
    found = averaged_elements(value) if even and reduction == "mean" else None
    if found is not None and found[0] != found[1]:
        raise UsageError(
            f"in step {step} a cross entropy of {found[1]} labels divides by {found[0]:g} (ignored labels or class "
            "weights), so that its mean depends on how the step is shared",
            hint="give the divisor as job.step(loss, weight=...) or as weight(labels) of the recipe",
        )
    return value, share_of(reduction, records, of_step, weight)


def zero_loss(used: Sequence[Tensor]) -> Tensor:
    """Stands in for the loss of a batch without weight, which may be 0/0: the gradients of what it used are zero."""
    return sum((value.reshape(-1)[:1].sum() * 0.0 for value in used), torch.zeros((), requires_grad=True))


def averaged_elements(loss: Tensor) -> tuple[float, int] | None:
    """Divisor and number of the elements of a cross entropy that is a part of `loss`; None: there is none.

    torch saves the sum of the class weights of all targets that are not ignored.
    """
    nodes = [loss.grad_fn]
    for _ in range(8):
        node = nodes.pop(0) if nodes else None
        if node is None:
            return None
        if node.name().startswith("NllLoss") and node._saved_reduction == 1:  # type: ignore[attr-defined]
            target = node._saved_target  # type: ignore[attr-defined]
            return float(node._saved_total_weight), target.numel()  # type: ignore[attr-defined]
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return None


class Divisors(NamedTuple):
    """What a loss of `records` records divides by."""

    records: int
    form: str
    """The operations of one number at the top of the loss, down to those that reduce many."""
    values: tuple[float, ...]
    """Of each, what it divides by; nan: it does not."""


Rule = tuple[float, float] | None
"""A divisor by the number of records: a factor and a constant, of which one is 0; None: it may be anything."""


def read_divisors(loss: Tensor, records: int) -> Divisors:
    """What `loss` divides by, as autograd has saved it."""
    nodes, names, values = [loss.grad_fn], list[str](), list[float]()
    while nodes and len(names) < MOST_NODES:
        node = nodes.pop(0)
        if node is None or any(part.shape for part in getattr(node, "_input_metadata", ())):
            continue
        names.append(node.name())
        values.append(_read_divisor(node))
        nodes += [parent for parent, _ in node.next_functions]
    return Divisors(records, " ".join(names), tuple(values))


def _read_divisor(node: Any) -> float:
    name = node.name()
    try:
        if name in ("DivBackward0", "MulBackward0"):
            other = node._saved_other
            value = math.nan
            if other is not None and not other.dim() and not other.requires_grad:
                value = float(other.tolist())  # under a mode of dispatch `item` fails for a number of Python's
            return value if name.startswith("Div") or not value else 1.0 / value
        if getattr(node, "_saved_reduction", 0) == 1:
            return float(node._saved_total_weight if name.startswith("Nll") else node._saved_self.numel())
        return float(node._saved_self_sym_numel) if name == "MeanBackward0" else math.nan
    except (AttributeError, RuntimeError):  # it saves something else, or that was changed in place
        return math.nan


def fit_divisors(tried: Sequence[Divisors]) -> tuple[str, tuple[Rule, ...]]:
    """The form of the losses that were `tried`, and a rule for each divisor; no form if they have several, or all the
    same number of records."""
    if len({one.form for one in tried}) != 1 or len({one.records for one in tried}) < 2:
        return "", ()
    columns = zip(*(one.values for one in tried), strict=True)
    return tried[0].form, tuple(_fit_rule([one.records for one in tried], values) for values in columns)


def _fit_rule(records: Sequence[int], values: Sequence[float]) -> Rule:
    for rule in ((values[0] / records[0], 0.0), (0.0, values[0])):
        if all(fits(rule, count, value) for count, value in zip(records, values, strict=True)):
            return rule
    return None


def fits(rule: Rule, records: int, value: float) -> bool:
    """Whether a divisor is what `rule` says for this number of records.

    >>> fits((3.0, 0.0), 4, 12.0), fits((0.0, 1.0), 4, 1.0), fits((3.0, 0.0), 4, 11.0), fits(None, 4, 11.0)
    (True, True, False, True)
    """
    return rule is None or math.isclose(value, rule[0] * records + rule[1], rel_tol=1e-6)


def has_node(loss: Tensor, name: str) -> bool:
    """Whether an operation of this name (torch's `Node.name()`) led to `loss`."""
    nodes, seen = [loss.grad_fn], {loss.grad_fn}
    while nodes:
        node = nodes.pop()
        if node is None or node.name() == name:
            return node is not None
        parents = {parent for parent, _ in node.next_functions} - seen - {None}
        seen |= parents
        nodes += parents
    return False


@dataclass(frozen=True, slots=True)
class LossSample:
    """A loss that was tried, and the gradients of a few parameters."""

    records: int
    loss: float
    gradient: Tensor
    weight: float | None = None
    uneven: bool = False
    """A cross entropy in it divides by something else than its number of targets."""


def difference(one: LossSample, other: LossSample) -> float:
    """Of loss or gradient, whichever is greater, relative to the larger."""
    parts = [(torch.tensor([a.loss], dtype=torch.float64), a.gradient) for a in (one, other)]
    found = 0.0
    for mine, its in zip(*parts, strict=True):
        scale = max(mine.norm().item(), its.norm().item())
        found = max(found, (mine - its).norm().item() / scale if scale > 0 else 0.0)
    return found


def drifts(tried: Sequence[LossSample]) -> bool:
    """Whether losses or gradients of the same records move in one direction, as with a slow counter; what rounding
    does to them does not."""
    moves = [
        torch.cat([one.gradient - tried[0].gradient, torch.tensor([one.loss - tried[0].loss], dtype=torch.float64)])
        for one in tried
    ]
    steps = [later - earlier for earlier, later in itertools.pairwise(moves)]
    sizes = [float(step.norm()) for step in steps]
    ends = float(moves[-1].norm())
    return min(sizes) > 0 and ends > 0.8 * sum(sizes) and max(sizes) < 4 * min(sizes)


def combine(
    parts: Sequence[LossSample], reduction: str, epsilon: float = 0.0, total: float | None = None
) -> LossSample:
    """The loss of a batch with these `parts` if it reduces in this way. `epsilon`: beside the weights in divisors;
    `total`: the divisor of all, if it is not the sum of the weights."""
    records = sum(part.records for part in parts)
    factors = [float(part.records) / records for part in parts]
    if reduction == "sum":
        factors = [1.0 for _ in parts]
    if reduction == "weighted":
        weights = [part.weight or 0.0 for part in parts]
        factors = [(weight + epsilon) / (total or sum(weights) or 1.0) for weight in weights]
    pairs = [(factor, part) for factor, part in zip(factors, parts, strict=True) if factor]
    gradient = sum((factor * part.gradient for factor, part in pairs), torch.zeros_like(parts[0].gradient))
    return LossSample(records, sum(factor * part.loss for factor, part in pairs), gradient)


def decide(
    whole: LossSample | None, cuts: Sequence[Sequence[LossSample]], named: str, tolerance: float, *, draws: bool = False
) -> tuple[str, bool]:
    """How the loss reduces, and whether the trial confirms it. Raises UsageError if it does not and nothing is named.

    `draws`: whether the loop draws. `cuts`: the parts of `whole`, cut in several ways. `named`: the setting
    `reduction`; auto: as the trial shows.
    """
    if whole is None:
        return ("mean" if named == "auto" else named), True  # every step is one record
    weighted = whole.weight is not None
    if weighted and named == "sum":
        raise UsageError("reduction is 'sum', and the loss has a weight", hint="leave reduction out: weights average")
    kinds = ("weighted",) if weighted else ("mean", "sum")
    far = {kind: max(difference(whole, combine(parts, kind)) for parts in cuts) for kind in kinds}
    beside = find_epsilon(whole, cuts) if weighted and far["weighted"] > tolerance else None
    fitting = [kind for kind in kinds if far[kind] <= max(tolerance, 0.0 if beside is None else BESIDE)]
    if named != "auto":
        kind = "weighted" if weighted else named
        return kind, kind in fitting
    if fitting == ["sum"] and _has_constant(whole, cuts):
        far["sum"] = max(far["sum"], difference(whole, combine(cuts[0], "sum")))
        raise _refusal(whole, cuts[0], far, tied=False, draws=draws)
    if len(fitting) == 1:
        return fitting[0], True
    if beside is not None:
        raise UsageError(
            "the divisor of the loss, or its weight, has an epsilon beside a sum over the records: a step that is "
            f"shared would be {as_percent(far['weighted'])} off, and up to {as_percent(BESIDE)} count as rounding",
            hint="divide by the sum alone: m.sum().clamp(min=1) in the loss, with weight=m.sum()",
        )
    raise _refusal(whole, cuts[0], far, tied=bool(fitting), draws=draws)


def confirm(tried: Sequence[LossSample], how: str, named: str, tolerance: float, where: str) -> bool:
    """Whether a loss reduces as `how` says in another place, too, which `where` names. Raises UsageError if it does
    not, and nothing is named."""
    if not tried or not all(math.isfinite(one.loss) for one in tried):
        return True
    off = measure_off(tried, how)
    if tolerance < off <= BESIDE and how == "weighted" and find_epsilon(tried[0], cut_pairs(tried)) is not None:
        return True
    if off <= tolerance or named != "auto":
        return off <= tolerance
    error = _refusal(tried[0], tried[1:3], {how: off}, tied=False, draws=False)
    raise UsageError(f"{where}, {error.message}", hint=error.hint)


def measure_off(tried: Sequence[LossSample], how: str) -> float:
    """How far parts are from the whole, which is the first of those that were `tried`; two parts make one."""
    return max((difference(tried[0], combine(parts, how)) for parts in cut_pairs(tried)), default=0.0)


def cut_pairs(tried: Sequence[LossSample]) -> list[Sequence[LossSample]]:
    """The parts of those that were tried, by cuts."""
    return [tried[at : at + 2] for at in range(1, len(tried), 2)]


def find_epsilon(whole: LossSample, cuts: Sequence[Sequence[LossSample]]) -> float | None:
    """What a mean by weights has in its divisor beside the weight, if that (or the same in the weight, 0 then) is why
    it is not made of its parts; else None.

    >>> def sample(total, weight, divisor):
    ...     return LossSample(1, total / divisor, torch.tensor([2 * total / divisor]).double(), weight)
    >>> found = find_epsilon(sample(9.0, 6.0, 6.001), [[sample(4.0, 2.0, 2.001), sample(5.0, 4.0, 4.001)]])
    >>> round(found, 6), find_epsilon(sample(9.0, 3.0, 6.0), [[sample(4.0, 1.0, 1.0), sample(5.0, 2.0, 4.0)]])
    (0.001, None)
    """
    above = below = far = 0.0
    for parts in cuts:  # loss * (weight + epsilon) is the sum of that of its parts: epsilon by least squares
        over = whole.gradient - sum(part.gradient for part in parts)
        under = sum((part.weight or 0.0) * part.gradient for part in parts) - (whole.weight or 0.0) * whole.gradient
        above, below = above + float(over @ under), below + float(over @ over)
        far = max(far, difference(whole, combine(parts, "weighted")))
    epsilon, weight = above / below if below else 0.0, whole.weight or 0.0
    if not far or abs(epsilon) >= 0.1 * weight:
        return None
    left = max(difference(whole, combine(parts, "weighted", epsilon, weight + epsilon)) for parts in cuts)
    return epsilon if left <= 0.05 * far else None


def _has_constant(whole: LossSample, cuts: Sequence[Sequence[LossSample]]) -> bool:
    """Whether a part of the loss, small as it may be, is no sum over the records: a penalty of the weights, which each
    worker would add. What is left of the gradient is then the same for each way to cut; rounding is not."""
    left = [whole.gradient - combine(parts, "sum").gradient for parts in cuts]
    sizes = [value.norm().item() for value in left]
    if len(whole.gradient) < CERTAIN or min(sizes) <= ROUNDING * whole.gradient.norm().item():
        return False
    return bool(float(left[0] @ left[1]) > ALIKE * sizes[0] * sizes[1])


def as_percent(off: float) -> str:
    """
    >>> as_percent(0.123), as_percent(2e-7)
    ('12.3%', '2e-05%')
    """
    return f"{off:.1%}" if off >= 0.001 else f"{100 * off:.1g}%"


def _refusal(
    whole: LossSample, parts: Sequence[LossSample], far: dict[str, float], *, tied: bool, draws: bool
) -> UsageError:
    counts = " and ".join(str(part.records) for part in parts)
    losses = " and ".join(f"{part.loss:.6g}" for part in parts)
    found = f"the loss of {whole.records} records is {whole.loss:.6g}, and those of its parts of {counts} are {losses}"
    if tied:
        return UsageError(f"{found}: whether it is a mean or a sum cannot be seen",
                          hint="records that count nothing show neither; if it is one where records count, name that: "
                          'reduction = "mean" or "sum" (in a loop: Options(reduction=...))')  # fmt: skip
    names = {"weighted": "mean by the weights"}
    apart = ", ".join(f"as a {names.get(kind, kind)} it is {as_percent(off)} off" for kind, off in far.items())
    noise = 'the trial cannot hold still what numpy or random draw: name reduction = "mean" for a mean; '
    uneven = ", and its cross entropy has class weights or ignored labels" if whole.uneven else ""
    return UsageError(
        f"{found}: it is not made of its parts ({apart}, gradients included{uneven}), so training would depend on "
        "how a step is shared",
        hint=f"{noise if draws else ''}a mean by tokens or class weights: give the divisor as "
        "job.step(loss, weight=...) or as weight(labels) of the recipe; a loss or a model that compares records: set "
        'reduction = "mean" and micro_batch = N, and it is computed over whole shards of N records',
    )


def compute_gradients(loss: torch.Tensor, of: list[torch.nn.Parameter], model: torch.nn.Module) -> Sequence[Any]:
    """The gradients of some parameters. Reentrant activation checkpointing has to go through all of `model`."""
    if not has_node(loss, "CheckpointFunctionBackward"):
        return torch.autograd.grad(loss, of, allow_unused=True)
    held = [(value, value.grad) for value in model.parameters()]
    for value, _ in held:
        value.grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    found = [value.grad for value in of]
    for value, grad in held:
        value.grad = grad
    return found
