"""`verify`: the proof of a bundle, made again on this machine.

    golden records ──replay──▶ every program
    probes (seeded) ──against──▶ the recipe's model, or, without one, every program against the one that is served

Every program gets a verdict, also after one that fails. No code of the bundle runs; with a recipe, the recipe does.
Without torch only golden records are replayed, and a note says so.
Importing this imports no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline import events
from trueline.bundle.read import Bundle, open_bundle
from trueline.bundle.schema import Evidence
from trueline.capture.proof.attempt import State
from trueline.errors import TruelineError, UsageError
from trueline.runtime.open import open_program, replay
from trueline.runtime.session import NATIVE, Session

if TYPE_CHECKING:
    from trueline.bundle.signature import Signature
    from trueline.capture.proof.observe import Observation
    from trueline.capture.proof.prove import Proof
    from trueline.recipe.contract import Recipe
    from trueline.storage.location import Location

TORCHLESS = ("onnx", "openvino")
"""Formats whose programs run without torch."""
FRESH_SEED = 1
"""Capture uses seed 0, whose probes were passed already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramVerdict:
    """The result for one program on this machine."""

    format: str
    holds: bool
    why: str
    """Empty when it holds."""
    golden: int = 0
    """Golden records that it answered correctly."""
    probes: int = 0
    """Probes inside the proven range that agree; 0 for the program that is the oracle when there is no recipe."""
    max_abs_error: float = 0.0
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The verdicts over a bundle's programs."""

    path: Path
    digest: str
    against: str
    seed: int
    programs: tuple[ProgramVerdict, ...]
    notes: tuple[str, ...]
    """Reasons why the comparison is weaker than at capture, e.g. another recipe than the bundle's."""

    @property
    def holds(self) -> bool:
        """Whether all programs that were checked hold; false where none was."""
        return bool(self.programs) and all(program.holds for program in self.programs)

    def as_dict(self) -> dict[str, Any]:
        kept = ("format", "holds", "why", "golden", "probes", "max_abs_error")
        return {
            "path": str(self.path),
            **{name: getattr(self, name) for name in ("digest", "against", "seed", "holds")},
            "notes": list(self.notes),
            "programs": [{name: getattr(program, name) for name in kept} for program in self.programs],
        }


def verify(
    bundle: str | Path | Bundle,
    *,
    against: str | Path | Recipe | None = None,
    checkpoint: Location | None = None,
    format: str | None = None,
    seed: int = FRESH_SEED,
    native: bool = False,
) -> Verified:
    """Proves the programs of `bundle` again here: golden records, and probes made from `seed`.

    `against` is the recipe (or the Hugging Face folder) whose model, with the parameters of `checkpoint`, is the
    oracle; without it the oracle is the program that is served. A failing program is a verdict, not an exception.
    Machine code is opened, which runs it, only with `native`, for bundles of a trusted maker; else it is left out, and
    a note says so. Raises BundleError, UsageError, RecipeError, CheckpointError, CaptureError.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
    _check_against(opened, against, checkpoint)
    wanted = [opened.program(format)] if format else list(opened.manifest.programs)
    closed = [entry.format for entry in wanted if entry.format in NATIVE and not native]
    if closed and format:
        raise UsageError(
            f"the {format} program of '{opened.name}' is machine code, and proving it runs it",
            hint="if you trust who made the bundle: --native (native=True)",
        )
    runtime_only = against is None and importlib.util.find_spec("torch") is None
    oracle, example, notes = _oracle(opened, against, checkpoint)
    notes += [f"the {format} program was not checked: it is machine code, and --native runs it" for format in closed]
    wanted = [entry for entry in wanted if entry.format not in closed]
    if runtime_only:
        notes += [
            f"the {one.format} program was not checked: it needs torch" for one in wanted if one.format not in TORCHLESS
        ]
        notes.append("new probes were not made, which needs torch: pip install 'trueline[train]'")
        wanted = [entry for entry in wanted if entry.format in TORCHLESS]
    observations = None if runtime_only else _observe(oracle, opened, example, seed)
    verdicts = []
    for entry in wanted:
        itself = against is None and entry.format == oracle.format
        verdicts.append(_verdict(opened, entry.format, None if itself else observations, oracle, native=native))
        events.emit("program.verified", format=entry.format, holds=verdicts[-1].holds, why=verdicts[-1].why or None)
    name = "eager model" if against is not None else f"{oracle.format} program"
    return Verified(
        path=opened.path, digest=opened.digest, against=name, seed=seed, programs=tuple(verdicts), notes=tuple(notes)
    )


def _check_against(opened: Bundle, against: str | Path | Recipe | None, checkpoint: Location | None) -> None:
    """Raises UsageError for an oracle that says nothing of this bundle."""
    if checkpoint is not None and against is None:
        raise UsageError(
            "a checkpoint holds parameters, and without a recipe there is no model for them",
            hint="add --against RECIPE",
        )
    if against is not None and "compression" in opened.lineage():
        raise UsageError(
            f"bundle '{opened.name}' is compressed: its answers were accepted within a budget, and are not the model's",
            hint="leave out --against: the golden records have the tolerance that was accepted; or verify its parent",
        )


def _oracle(
    bundle: Bundle, against: str | Path | Recipe | None, checkpoint: Location | None
) -> tuple[Session, Mapping[str, Any], list[str]]:
    """The oracle, an example, and the reasons why it is weaker than the oracle of the capture."""
    if against is None:
        notes = ["no recipe was given: beside the golden records, programs are compared with each other only"]
        return open_program(bundle), bundle.golden()[-1 if len(bundle.golden()) < 3 else 2].inputs, notes
    from trueline.capture import subject
    from trueline.capture.files import model_folder
    from trueline.checkpoint.checkpoint import read_manifest
    from trueline.recipe.contract import ONLY_CALLED
    from trueline.recipe.load import load_recipe

    folder = isinstance(against, str | Path) and model_folder.is_model_folder(against)
    recipe = model_folder.read_folder(Path(str(against))) if folder else load_recipe(against, needs=ONLY_CALLED)
    notes = []
    if recipe.digest != bundle.manifest.lineage.recipe_digest:
        notes.append(f"recipe '{recipe.name}' is not the file that the bundle was captured from: its digest differs")
    digest = read_manifest(checkpoint).get("digest") if checkpoint is not None else None
    if digest != bundle.manifest.lineage.checkpoint_digest:
        notes.append("the parameters are not those of the checkpoint that the bundle was captured from")
    state: State = "explicit" if bundle.signature.state else "refuse"
    stored = {table.get("stored_as", "float32") for table in bundle.lineage().get("tables", ())} or {"float32"}
    random = bundle.signature.random
    eager = subject.prepare(recipe, checkpoint, state=state, allow_random=random, table_rows=stored.pop()).eager
    _check_interface(bundle, eager.signature)
    return eager, eager.example, notes


def _check_interface(bundle: Bundle, seen: Signature) -> None:
    sides = (bundle.signature, seen)
    want, have = ([(spec.name, spec.datatype, len(spec.shape)) for spec in side.inputs] for side in sides)
    gives, returns = ([spec.name for spec in side.outputs] for side in sides)
    if want != have or gives != returns:
        raise UsageError(
            f"the recipe's model takes {have} and gives {returns}, the bundle {want} and {gives}",
            hint="give the recipe that the bundle was captured from",
        )


def _observe(oracle: Session, bundle: Bundle, example: Mapping[str, Any], seed: int) -> tuple[Observation, ...]:
    """The oracle's answers at the ends of every range, and at the sizes of the capture's probes."""
    from trueline.capture.proof.narrowing import takes
    from trueline.capture.proof.observe import observe
    from trueline.capture.proof.probes import LIMIT, make_probes
    from trueline.capture.proof.value_probes import make_value_probes
    from trueline.runtime import distribution

    signature = bundle.signature
    sizes: dict[str, dict[int, None]] = {symbol: {} for symbol in signature.symbols}
    for symbol, known in sizes.items():
        dim = signature.dims[symbol]
        ends = (dim.min, dim.max, None if dim.max is None else dim.max + 1)
        known.update(dict.fromkeys(size for size in ends if size is not None))
    for one in bundle.evidence():
        for symbol, (name, axis) in signature.symbols.items():
            if name in one.shapes:
                sizes[symbol][one.shapes[name][axis]] = None
    limit, num_draws = (distribution.PROBES, distribution.DRAWS) if signature.random else (LIMIT, 0)
    probes = make_probes(example, signature=signature, sizes=sizes, seed=seed, limit=limit)
    probes = (*probes, *make_value_probes(example, bundle.signature_of(), seed=seed))
    kept = [probe for probe in probes if takes(oracle.signature, probe.inputs) or not takes(signature, probe.inputs)]
    return observe(oracle, kept, num_draws=num_draws)


def _verdict(
    bundle: Bundle, format: str, observations: Sequence[Observation] | None, oracle: Session, *, native: bool
) -> ProgramVerdict:
    """`observations` is None for the program that is the oracle itself."""
    try:
        session = open_program(bundle, format, native=native)
        replayed = replay(bundle, session)
        proof = None if observations is None else _judge(session, observations, oracle)
    except TruelineError as error:
        return ProgramVerdict(format=format, holds=False, why=error.message)
    evidence = proof.evidence if proof else ()
    return ProgramVerdict(
        format=format,
        holds=proof is None or proof.proven,
        why=proof.reason if proof else "",
        golden=len(replayed),
        probes=sum(one.verdict == "agrees" for one in evidence),
        max_abs_error=max([*(one.max_abs_error for one in replayed.values()), proof.max_abs_error if proof else 0.0]),
        evidence=evidence,
    )


def _judge(session: Session, observations: Sequence[Observation], oracle: Session) -> Proof:
    from trueline.capture.model.eager import EagerSession
    from trueline.capture.proof import stateful
    from trueline.capture.proof.prove import judge

    proof = judge(session, observations)
    return stateful.prove_sequences(proof, session, oracle) if isinstance(oracle, EagerSession) else proof
