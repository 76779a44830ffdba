"""From what a user wants to be derived of a bundle to the bundles of these models, which then compete with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from trueline.compress.derive.plan import RATE, SHORTER, DerivePlan, kind_of
from trueline.compress.derive.wishes import DeriveWishes
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bundle.signature import Signature
    from trueline.compress.measure.reference import Reference
    from trueline.compress.search import Search

TEMPERATURE = 2.0
"""Of a teacher's answers."""


def make_plans(reference: Reference, wishes: DeriveWishes) -> list[DerivePlan]:
    """What to train before anything is quantized. Raises UsageError, RecipeError, CheckpointError, CaptureError."""
    from trueline.compress.derive.bundles import check_checkpoint, find_checkpoint
    from trueline.compress.derive.qat import plan_qat
    from trueline.recipe.load import locate_recipe

    plans, recipe, start = [], reference.recipe, ""
    where = locate_recipe(recipe, recipe.path and str(recipe.path)) if wishes else ""
    if wishes.starts_from_checkpoint:
        start = find_checkpoint(reference.bundle, wishes.checkpoint)
        check_checkpoint(start)
    if wishes.amounts:
        kind, amounts, epochs = kind_of(wishes.amounts), dict(wishes.amounts), max(1, recipe.defaults.epochs // SHORTER)
        plans.append(DerivePlan(kind=kind, recipe=where, checkpoint=start, amounts=amounts, epochs=epochs, rate=RATE))
    if wishes.qat:
        plans.append(plan_qat(recipe, where, start))
    if wishes.student is not None or wishes.drop:
        plans.append(_plan_student(reference, wishes, where, start))
    return plans


def _plan_student(reference: Reference, wishes: DeriveWishes, where: str, start: str) -> DerivePlan:
    from trueline.checkpoint.checkpoint import load_model
    from trueline.compress.derive.layers import choose_kept
    from trueline.recipe.load import load_recipe, locate_recipe
    from trueline.storage.location import parse_location

    plan = DerivePlan(
        kind="taught", recipe=where, checkpoint=start, temperature=TEMPERATURE, matches=dict(wishes.matches),
        epochs=reference.recipe.defaults.epochs,
    )  # fmt: skip
    if wishes.student is None:
        model = load_model(reference.recipe, parse_location(start))
        return msgspec.structs.replace(plan, layers=choose_kept(model, wishes.drop))
    student = load_recipe(wishes.student)
    return msgspec.structs.replace(
        plan, recipe=locate_recipe(student, str(wishes.student)), epochs=student.defaults.epochs
    )


def derive_bundles(search: Search, plans: Sequence[DerivePlan]) -> None:
    """Trains and captures each plan's model; `search` gets their bundles as bases."""
    from trueline.capture.model.eager import EagerSession
    from trueline.checkpoint.checkpoint import load_model
    from trueline.compress.derive.bundles import derive
    from trueline.compress.derive.define import make_student, read_example
    from trueline.compress.derive.taught import Insides, write_answers
    from trueline.compress.measure.records import open_records
    from trueline.recipe.load import load_recipe
    from trueline.storage.location import parse_location

    reference = search.reference
    for number, plan in enumerate(plans):
        folder = search.folder / "derived" / str(number)
        if plan.kind == "taught":
            signature, student = reference.bundle.signature_of("onnx"), load_recipe(plan.recipe)
            made = make_student(student, plan).eval()
            check_alike(signature, EagerSession(made, read_example(student)).signature)
            insides = None
            if plan.matches:
                insides = Insides(
                    load_model(reference.recipe, parse_location(plan.checkpoint)), list(plan.matches.values())
                )
            records = open_records(student, "training", signature)
            answers = write_answers(folder / "answers", reference.session, records, reference.bundle.digest, insides)
            plan = msgspec.structs.replace(plan, answers=str(answers.absolute()))
        derived = derive(plan, folder)
        check_alike(reference.bundle.signature, derived.signature)
        search.bases[plan.name] = derived


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
