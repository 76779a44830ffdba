"""From what a user wants to be derived of a bundle to the bundles of these models, which then compete with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trueline.compress.derive.plan import RATE, SHORTER, DerivePlan, kind_of
from trueline.compress.derive.wishes import DeriveWishes
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bundle.signature import Signature
    from trueline.compress.derive.bundles import Derived
    from trueline.compress.derive.training import Deadline
    from trueline.compress.measure.reference import Reference
    from trueline.compress.search import Search
    from trueline.recipe.contract import Recipe


def make_plans(reference: Reference, wishes: DeriveWishes, given: Path) -> list[list[DerivePlan]]:
    """What to train before anything is quantized: chains of plans, each of which begins where the one before it ended
    (distill, then prune, then train for int8). `given`: the bundle's folder or packed file.

    Raises UsageError, RecipeError, CheckpointError, CaptureError."""
    from trueline.compress.derive.bundles import check_checkpoint, find_checkpoint
    from trueline.recipe.load import load_recipe, locate_recipe

    if not wishes:
        return []
    recipe, start = reference.recipe, ""
    where = locate_recipe(recipe, recipe.path and str(recipe.path))
    if wishes.starts_from_checkpoint:
        start = find_checkpoint(reference.bundle, wishes.checkpoint, given)
        check_checkpoint(start)
    first, begins = [], DerivePlan(kind="qat", recipe=where, checkpoint=start, epochs=recipe.defaults.epochs)
    if wishes.student is not None or wishes.drop:
        first = [_plan_student(reference, wishes, where, start)]
        begins = first[0]
    short = max(1, begins.epochs // SHORTER)
    last = [msgspec.structs.replace(_CHANGED_BY, kind="qat", epochs=short)] if wishes.qat else []
    trained = recipe if wishes.student is None else load_recipe(wishes.student)
    pruned = [_plan_pruning(amounts, wishes.rounds, short, trained) for amounts in wishes.prunings]
    return [_join([*first, *stages, *last], begins) for stages in pruned or [[]]]


def name_plans(chains: Sequence[Sequence[DerivePlan]]) -> list[str]:
    """The names of all plans, each once."""
    return list(dict.fromkeys(plan.name for chain in chains for plan in chain))


_CHANGED_BY = DerivePlan(kind="qat", recipe="")


def _plan_pruning(amounts: Mapping[str, float], rounds: int, epochs: int, recipe: Recipe) -> list[DerivePlan]:
    """Masks are raised inside of one training; channels, heads and experts are removed before one training each."""
    kind = kind_of(amounts)
    if kind == "masks" or rounds == 1:
        steps = -(-recipe.source("training").num_records * epochs // recipe.defaults.global_batch) if rounds > 1 else 0
        return [DerivePlan(kind=kind, recipe="", amounts=dict(amounts), rounds=rounds, steps=steps, epochs=epochs)]
    each = {name: round(1 - (1 - amount) ** (1 / rounds), 4) for name, amount in amounts.items()}
    plan = DerivePlan(kind=kind, recipe="", amounts=each, epochs=max(1, epochs // rounds))
    named = DerivePlan(kind=kind, recipe="", amounts=dict(amounts)).name
    return [msgspec.structs.replace(plan, title=f"{named}, {number} of {rounds}") for number in range(1, rounds + 1)]


def _join(plans: Sequence[DerivePlan], begins: DerivePlan) -> list[DerivePlan]:
    """The plans as a chain: the first is of the parent's recipe or the student's, the others say in their titles what
    they follow. A training that follows another at a tenth of the rate keeps that rate."""
    found: list[DerivePlan] = []
    for plan in plans:
        fresh = not found or found[-1].kind == "taught"
        title = f"{found[-1].name} > {plan.name}" if found else plan.title
        if found and plan.title and found[-1].title and found[-1].amounts == plan.amounts:
            title = f"{found[-1].title.rpartition(', ')[0]}, {plan.title.rpartition(', ')[2]}"  # another round
        rate = plan.rate if plan.kind == "taught" else RATE if fresh else 1.0
        where = {} if found or plan.kind == "taught" else {"recipe": begins.recipe, "checkpoint": begins.checkpoint}
        found.append(msgspec.structs.replace(plan, title=title, rate=rate, **where))
    return found


def _plan_student(reference: Reference, wishes: DeriveWishes, where: str, start: str) -> DerivePlan:
    from trueline.checkpoint.checkpoint import load_model
    from trueline.compress.derive.layers import choose_kept
    from trueline.compress.derive.taught import find_distance
    from trueline.recipe.load import load_recipe, locate_recipe
    from trueline.storage.location import parse_location

    plan = DerivePlan(
        kind="taught", recipe=where, checkpoint=start, matches=dict(wishes.matches),
        distance=wishes.distance,
        epochs=reference.recipe.defaults.epochs,
    )  # fmt: skip
    if wishes.distance:
        find_distance(reference.recipe if wishes.student is None else load_recipe(wishes.student), wishes.distance)
    if wishes.student is None:
        model = load_model(reference.recipe, parse_location(start))
        return msgspec.structs.replace(plan, layers=choose_kept(model, wishes.drop))
    student = load_recipe(wishes.student)
    return msgspec.structs.replace(
        plan, recipe=locate_recipe(student, str(wishes.student)), epochs=student.defaults.epochs
    )


def prepare_first(search: Search, chains: Sequence[Sequence[DerivePlan]]) -> None:
    """Raises at once what is wrong with what a chain begins with: a student that is not called as the bundle, a model
    of which nothing can be removed. What was chosen is kept for its training."""
    from trueline.capture.model.eager import EagerSession
    from trueline.compress.derive.bundles import prepare
    from trueline.compress.derive.define import make_student, read_example
    from trueline.compress.derive.training import Deadline
    from trueline.recipe.load import load_recipe

    places, signature = _place_plans(search, chains), search.reference.bundle.signature_of("onnx")
    for plan in {chain[0].name: chain[0] for chain in chains}.values():
        folder = places[plan.name]
        if (folder / "recipe.py").is_file():
            continue
        if plan.kind == "taught":
            student = load_recipe(plan.recipe)
            check_alike(signature, EagerSession(make_student(student, plan).eval(), read_example(student)).signature)
        elif plan.kind != "qat":
            prepare(_complete(search, plan, None, folder, Deadline()), folder)


def _place_plans(search: Search, chains: Sequence[Sequence[DerivePlan]]) -> dict[str, Path]:
    return {name: search.folder / "derived" / str(at) for at, name in enumerate(name_plans(chains))}


def derive_bundles(
    search: Search, chains: Sequence[Sequence[DerivePlan]], ends: Callable[[], float], after: Callable[[str], None]
) -> None:
    """Trains and captures the models of each chain; `search` gets their bundles as bases, and `after` each one's name.
    What chains share is done once. What would end after `ends()`, on the search's clock, is a row that says so, and so
    is what begins with it."""
    from trueline.capture.time_limit import OutOfTime
    from trueline.compress.derive.training import Deadline

    places = _place_plans(search, chains)
    done: dict[str, Derived] = {}
    for chain in chains:
        last: Derived | None = None
        missing = ""
        for plan in chain:
            if missing:
                search.leave_out(plan.name, f"it begins with {missing}, which was not trained in time")
                continue
            try:
                if plan.name not in done:
                    deadline = Deadline(ends(), search.clock)
                    done[plan.name] = _derive(search, plan, last, places[plan.name], deadline)
                    after(done[plan.name].name)
                last = done[plan.name]
            except OutOfTime as error:
                missing = plan.name
                search.leave_out(plan.name, f"{error.message}; {error.hint}")
        if last is not None and not missing:
            search.finals.append(last.name)


def _derive(search: Search, plan: DerivePlan, last: Derived | None, folder: Path, deadline: Deadline) -> Derived:
    from trueline.compress.derive.bundles import derive, find_derived

    made = find_derived(folder)
    if made is None:
        begun = DerivePlan.read(folder / "recipe.py")  # as its job knows it
        made = derive(begun or _complete(search, plan, last, folder, deadline), folder, deadline)
    check_alike(search.reference.bundle.signature, made.bundle.signature)
    search.bases[made.name] = made.bundle
    return made


def _complete(search: Search, plan: DerivePlan, last: Derived | None, folder: Path, deadline: Deadline) -> DerivePlan:
    """The plan with what is known only now: where it begins, the teacher's answers, ranges, parts that stay."""
    from trueline.checkpoint.checkpoint import load_model
    from trueline.compress.derive.define import choose_parts
    from trueline.compress.derive.qat import measure_ranges
    from trueline.recipe.load import load_recipe
    from trueline.storage.location import parse_location

    if last is not None:
        _, follows, rest = plan.title.partition(" > ")
        title = f"{last.name.partition(' > ')[0]} > {rest}" if follows else plan.title  # a temperature is known now
        where = str(last.recipe.absolute())
        plan = msgspec.structs.replace(plan, title=title, recipe=where, checkpoint=last.checkpoint)
    if plan.kind == "taught":
        return _write_answers(search, plan, folder, deadline)
    recipe = load_recipe(plan.recipe)
    if plan.kind == "qat":
        model = load_model(recipe, parse_location(plan.checkpoint) if plan.checkpoint else None)
        return msgspec.structs.replace(plan, ranges=measure_ranges(model, recipe.source("training")))
    return choose_parts(recipe, plan)


def _write_answers(search: Search, plan: DerivePlan, folder: Path, deadline: Deadline) -> DerivePlan:
    from trueline.capture.model.eager import EagerSession
    from trueline.checkpoint.checkpoint import load_model
    from trueline.compress.derive.define import make_student, read_example
    from trueline.compress.derive.softening import soften
    from trueline.compress.derive.taught import Insides, write_answers
    from trueline.compress.measure.records import OutputForm, open_records
    from trueline.recipe.load import load_recipe
    from trueline.storage.location import parse_location

    reference = search.reference
    signature, student = reference.bundle.signature_of("onnx"), load_recipe(plan.recipe)
    made = make_student(student, plan).eval()
    check_alike(signature, EagerSession(made, read_example(student)).signature)
    insides = None
    if plan.matches:
        teacher = load_model(reference.recipe, parse_location(plan.checkpoint))
        insides = Insides(teacher, list(plan.matches.values()))
    records = open_records(student, "training", signature)
    answers = write_answers(
        folder / "answers", reference.session, records, reference.bundle.digest, insides, deadline.check
    )
    plan = msgspec.structs.replace(plan, answers=str(answers.absolute()))
    if plan.distance:
        return plan
    form = OutputForm(made, read_example(student), signature)
    return soften(plan, reference.session, records, lambda outputs, labels: student.loss(form.build(outputs), labels))


def check_alike(parent: Signature, made: Signature) -> None:
    """Raises UsageError unless a derived model is called as its parent."""
    sides = [
        [(spec.name, spec.datatype, len(spec.shape)) for spec in (*one.inputs, *one.outputs)] for one in (parent, made)
    ]
    if sides[0] != sides[1]:
        raise UsageError(
            f"the derived model takes and returns {sides[1]}, its parent {sides[0]}",
            hint="a student has the inputs and outputs of its teacher, by name",
        )
