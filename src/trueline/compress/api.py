"""`trueline.compress`: the smallest or fastest program of a bundle that keeps a budget."""

from __future__ import annotations

import errno
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trueline import events, files
from trueline.bundle import Bundle, open_bundle
from trueline.compress.derive.wishes import DeriveWishes
from trueline.compress.find_recipe import find_recipe
from trueline.compress.method import BY_DEFAULT, TARGETS, Budget, CompressMethod, Target, parse_budget, parse_method
from trueline.compress.ordering import CandidateOrder, TimeShares, sort_chains
from trueline.compress.planning import derive_bundles, make_plans, name_plans, prepare_first
from trueline.compress.promise import check_promise
from trueline.compress.search_folder import hold_folder
from trueline.errors import BudgetMissed, BundleError, NotProven, StorageError, UsageError, closest, join_names

if TYPE_CHECKING:
    from trueline.compress.candidate import CompressedCandidate
    from trueline.compress.derive.plan import DerivePlan
    from trueline.compress.measure.reference import Reference
    from trueline.compress.search import Search
    from trueline.recipe.contract import Recipe
    from trueline.storage.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """A sealed bundle, and every candidate beside it."""

    path: Path
    digest: str
    parent: str
    row: CompressedCandidate
    rows: tuple[CompressedCandidate, ...]
    report: Path
    """The HTML page; report.json beside it has the values."""
    facts: dict[str, Any]
    ruined: str = ""
    """What a program that was chosen by hand has lost, and the operators to blame, where it is nearly everything."""

    def as_dict(self) -> dict[str, Any]:
        from trueline.compress.report import as_facts

        chosen = {"path": str(self.path), "digest": self.digest, "chosen": self.row.name, "report": str(self.report)}
        chosen["ruined"] = self.ruined
        return {**chosen, **as_facts(self.rows, self.facts)}

    @property
    def summary(self) -> str:
        """In one line."""
        from trueline.compress.report import describe_bound

        row, batch = self.row, min(self.row.vs_fp32, default=1)
        speed = (
            f"{row.vs_fp32[batch]:.2f} times as fast as its parent and {row.vs_eager[batch]:.2f} times as the eager "
        )
        speed += f"model at batch {batch}" if row.vs_fp32 else ""
        lost = f"{self.facts['metric']} {row.metric:.4f}, {row.loss:+.4f} lost, {describe_bound(row)}"
        return f"{self.path}: {row.name}; {speed}; {lost}"

    def as_text(self) -> str:
        from trueline.compress.report import as_table

        ruined = f"\nruined: {self.ruined}" if self.ruined else ""
        return f"{as_table(self.rows)}\n\n{self.summary}{ruined}\nreport: {self.report}"


def compress(
    bundle: str | Path | Bundle,
    *,
    recipe: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    budget: str | Budget | None = None,
    target: Target = "latency",
    quantize: Sequence[str] = (),
    prune: str | Sequence[str] | None = None,
    rounds: int = 1,
    distill: str | Path | None = None,
    drop: str | None = None,
    match: Sequence[str] = (),
    distill_loss: str | None = None,
    qat: bool = False,
    checkpoint: Location | None = None,
    minutes: float | None = None,
    overwrite: bool = False,
) -> Compressed:
    """Compresses the ONNX program of `bundle`, and seals the best candidate at `out` (NAME-TARGET.bundle beside it).

    Candidates are judged on the recipe's evaluation records; `recipe` is looked for by its digest when left out.
    `budget` says how much of a metric may be lost (`accuracy=1%`: 0.01, with 95 % confidence), 1 % of accuracy by
    default. `target` is what to make small. `quantize` names ways by hand (`static`, `static:s8s8,entropy`). `distill`
    is the recipe of a student, which learns from the bundle's answers; `drop` (`0.5`, `encoder.layers=0.5`) makes one
    of the model's own layers; `match` (`STUDENT=TEACHER`) lets submodules learn from outputs of others; `distill_loss`
    names the distance, a function of the student's recipe. `prune` (`conv=0.2,linear=0.4`: masks;
    `channels=0.3,heads=0.25,experts=0.5`: a smaller model; several compete) starts from the student or from
    `checkpoint`, looked for by its digest, and trains a third of the recipe's epochs at a tenth of its learning rate,
    in `rounds`. `qat` trains as long with weights and inputs rounded to int8. These follow one another. Each is
    captured and proven like a new model, then quantized: the last by `quantize`, or, with a budget, all in every way.
    Without a budget the best of what was named is sealed whatever it loses (`ruined` says so). `minutes` limit all,
    trainings by two thirds (later ones are rows); left out: candidates, by 15. Killed calls continue in OUT.search.

    Raises BudgetMissed with the table of all candidates when none keeps the budget, UsageError, RecipeError, DataError,
    BundleError, StorageError, and what training and capture raise; then nothing is at `out`. The parent never changes.
    """
    shares, methods = TimeShares(time.monotonic(), minutes, time.monotonic), _check(quantize, target, minutes)
    wishes = DeriveWishes.of(prune=prune, rounds=rounds, distill=distill, drop=drop, match=match, distance=distill_loss,
                             qat=qat, checkpoint=checkpoint)  # fmt: skip
    wanted = _read_budget(budget, by_hand=bool(quantize or wishes))
    parent, given = _open_parent(bundle)
    place = _check_free(given, out, target, overwrite=overwrite)
    with hold_folder(_folder_of(place)):
        reference = _open_reference(parent, recipe or find_recipe(parent, given), wanted)
        chains = sort_chains(make_plans(reference, wishes, given))
        search = _open_search(reference, place, target, methods, chains)
        with _announcing(search):
            _run(search, chains, CandidateOrder(search, methods, bool(chains), budget is not None), shares)
            return _finish(search, place)


@contextmanager
def _announcing(search: Search) -> Iterator[None]:
    """Says where the best so far is if the search is stopped. Raises StorageError for a full disk."""
    try:
        yield
    except (KeyboardInterrupt, StorageError):
        search.announce_best()
        raise
    except OSError as error:
        if error.errno not in (*files.NO_ROOM, errno.EFBIG):
            raise
        search.announce_best()
        raise files.storage_error(error, search.folder) from error


def _run(search: Search, chains: Sequence[Sequence[DerivePlan]], order: CandidateOrder, shares: TimeShares) -> None:
    """Tries what needs no training, then trains, then tries the rest."""

    def quantize(base: str) -> None:
        shares.try_early(partial(search.try_each, order.list_next(base)))

    if order.competes:
        prepare_first(search, chains)
        shares.try_early(partial(search.try_each, order.list_early()))
    derive_bundles(search, chains, lambda: shares.trainings_end, quantize)
    search.run_until(shares.end, order.list_all())


def _finish(search: Search, place: Path) -> Compressed:
    """Measures all together, writes the report and seals the best. Raises BudgetMissed."""
    from trueline.compress.no_gain import explain_no_gain
    from trueline.compress.ruin import explain_ruin
    from trueline.compress.search import refuse

    search.measure_all()
    facts = _facts(search.reference, search)
    while (best := search.best()) is not None:
        try:
            sealed = search.seal(best, place, facts)
            break
        except NotProven as error:  # one that only the last measurement made the best
            search.rows[best.name] = refuse(best, error)
    ruined = explain_ruin(search, best) if best is not None and search.by_hand else ""
    if best is not None and ruined:
        best = search.rows[best.name] = msgspec.structs.replace(best, why=f"ruined: {ruined}")
    if best is None and (why := explain_no_gain(search)):
        facts["none_is_faster"] = why
    facts["chosen"] = best.name if best is not None else ""
    report = _write_report(search, facts)
    if best is None:
        raise _make_missed(search, facts, report)
    _clear(search, best, place, sealed)
    parent = search.reference.bundle.digest
    return Compressed(
        path=place, digest=sealed.digest, parent=parent, row=best, rows=tuple(search.rows.values()), report=report,
        facts=facts, ruined=ruined,
    )  # fmt: skip


def _open_parent(bundle: str | Path | Bundle) -> tuple[Bundle, Path]:
    """The bundle, and where its user has it: a packed one is elsewhere once it is open. Raises BundleError, UsageError
    for one that cannot be compressed."""
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
    _check_parent(opened)
    return opened, bundle.path if isinstance(bundle, Bundle) else Path(bundle)


def _check_free(parent: Path, out: str | Path | None, target: str, *, overwrite: bool) -> Path:
    place = Path(out) if out is not None else parent.with_name(f"{parent.stem}-{target}.bundle")
    if place.resolve().is_relative_to(parent.resolve()):
        raise UsageError(
            f"{place} is the bundle that is compressed, which is never changed", hint="choose another name (--out)"
        )
    if place.exists() and not overwrite:
        raise UsageError(f"{place} exists already", hint="choose another name, or overwrite it (--overwrite)")
    if place.exists() and not (place / "bundle.json").is_file():
        raise UsageError(f"{place} exists and is no bundle; it is not replaced", hint="choose another name (--out)")
    return place


def _folder_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.search")


def _check(quantize: Sequence[str], target: str, minutes: float | None) -> list[CompressMethod]:
    if target not in TARGETS:
        near = closest(target, TARGETS)
        raise UsageError(
            f"target is '{target}', expected one of: {join_names(TARGETS)}",
            hint=f"did you mean '{near}'?" if near else "",
        )
    if minutes is not None and not 0 < minutes < math.inf:
        raise UsageError(f"minutes is {minutes:g}, expected a number above 0")
    return [parse_method(text) for text in quantize]


def _read_budget(budget: str | Budget | None, *, by_hand: bool) -> Budget | None:
    """None: the first metric of the recipe, and any loss of it."""
    if isinstance(budget, Budget):
        return budget
    if budget is None and by_hand:
        return None
    return parse_budget(BY_DEFAULT if budget is None else budget)


def _check_parent(parent: Bundle) -> None:
    """Raises BundleError, UsageError for a bundle that cannot be compressed. Masks add infinity, which is no weight."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    from trueline.compress.measure.kernels import WEIGHTED, walk

    if "onnx" not in [entry.format for entry in parent.manifest.programs]:
        formats = join_names(entry.format for entry in parent.manifest.programs)
        raise UsageError(
            f"bundle '{parent.name}' has no ONNX program, which is what is compressed (has: {formats})",
            hint="capture it with --for onnxruntime",
        )
    if parent.signature.random or parent.signature.state:
        what = "draws random numbers" if parent.signature.random else "keeps a state between requests"
        raise UsageError(
            f"bundle '{parent.name}' {what}: its answers to evaluation records say nothing of its accuracy"
        )
    graph = onnx.load(parent.program_path("onnx")).graph
    layers = {name for node in walk(graph) if node.op_type in WEIGHTED for name in node.input}
    for weight in graph.initializer:
        array = numpy_helper.to_array(weight)
        if array.dtype.kind != "f":
            continue
        if np.isnan(array).any() or (weight.name in layers and not np.isfinite(array).all()):
            raise BundleError(
                f"weight '{weight.name}' of bundle '{parent.name}' has {int((~np.isfinite(array)).sum())} values that "
                "are not finite",
                hint="train it again; an earlier checkpoint of the job may be whole",
            )


def _open_reference(parent: Bundle, recipe: str | Path | Recipe, budget: Budget | None) -> Reference:
    from trueline.compress.measure.reference import open_reference
    from trueline.recipe.load import load_recipe

    loaded = load_recipe(recipe)
    reference = open_reference(parent, loaded, budget)
    events.emit(
        "compress.started", bundle=parent.name, metric=reference.budget.metric, value=reference.value,
        records=reference.count,
    )  # fmt: skip
    check_promise(reference.budget, reference.answers.values, reference.count)
    return reference


def _open_search(
    reference: Reference, place: Path, target: Target, methods: Sequence[CompressMethod],
    chains: Sequence[Sequence[DerivePlan]],
) -> Search:  # fmt: skip
    from trueline.compress.search import Search
    from trueline.recipe.load import load_recipe

    by_hand = [*name_plans(chains), *(one.name for one in methods)]
    taught = [(load_recipe(chain[0].recipe).digest, chain[0].matches) for chain in chains if chain[0].kind == "taught"]
    folder = _folder_of(place)
    chosen = bool(by_hand) and math.isinf(reference.budget.amount)
    search = Search(reference, folder, target, math.inf, time.monotonic, chosen)
    spec = {
        "parent": reference.bundle.digest, "recipe": reference.recipe.digest, "budget": reference.budget.text,
        "target": target, "records": reference.fingerprints, "by_hand": by_hand, "taught": taught,
    }  # fmt: skip
    search.asked = tuple(by_hand)
    try:
        search.restore(spec)
    except OSError as error:
        raise files.storage_error(error, folder) from error
    return search


def _facts(reference: Reference, search: Search) -> dict[str, Any]:
    budget = reference.budget
    bounded = math.isfinite(budget.amount)
    return {
        "name": reference.bundle.name,
        "parent_digest": reference.bundle.digest,
        "target": search.target,
        "metric": budget.metric,
        "budget": budget.text if bounded else "none: chosen by hand",
        "budget_amount": budget.amount if bounded else None,
        "evaluation_records": reference.count,
        "parent_value": reference.value,
        "by_hand": ", ".join(search.asked) or "no",
        "batches": ", ".join(map(str, reference.timed)),
    }


def _write_report(search: Search, facts: dict[str, Any]) -> Path:
    from trueline.compress import report

    rows = list(search.rows.values())
    page = search.folder / "report.html"
    files.write_atomic(page, report.as_page(rows, facts).encode())
    values = msgspec.json.encode(report.as_facts(rows, facts))
    files.write_atomic(search.folder / "report.json", msgspec.json.format(values, indent=1))
    return page


def _make_missed(search: Search, facts: dict[str, Any], report: Path) -> BudgetMissed:
    from trueline.compress.report import as_table

    table, verdicts = as_table(search.rows.values()), {row.verdict for row in search.rows.values()}
    what = f"keeps {facts['budget']} and is better for {facts['target']}"
    if facts["budget_amount"] is None:
        what = "that was named could be made"
    more = "a larger budget or more evaluation records may let one pass"
    if "over budget" not in verdicts:
        more = "the last lines of the table say what each one lacks"
    if all(row.kind == "parent" for row in search.rows.values()):
        more = "the time was over before the first candidate: give it more --minutes"
    if "none_is_faster" in facts:
        table += f"\n\nnone is faster: {facts['none_is_faster']}"
        more = "--target size looks for the smallest, --target memory for the one that takes least"
    return BudgetMissed(f"no candidate {what}; nothing is sealed\n{table}", hint=f"{report} has the plots; {more}")


def _clear(search: Search, best: CompressedCandidate, place: Path, sealed: Bundle) -> None:
    """Removes what only the search needed."""
    for name in ("work", "programs", "best.bundle"):
        shutil.rmtree(search.folder / name, ignore_errors=True)
    if not (place / "bundle.json").is_file():
        raise StorageError(f"{place} was not written")
    events.emit("bundle.sealed", path=str(place), digest=sealed.digest, serve=best.format)
