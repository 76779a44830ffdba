"""`trueline.ship`: the whole line in one call, from a recipe to proven answers of a server.

    train ─▶ evaluate ─▶ capture ─▶ [compress ─▶] register ─▶ serve ─▶ compare

It uses the public verbs only, which exchange checkpoint, bundle and registry entry. The last stage sends the whole
held-out split to the server over both of its protocols and compares every answer with the eager model's, or, of a
compressed program, with the answers that its budget was judged by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trueline import events
from trueline.errors import NotProven, RecipeError, TruelineError

if TYPE_CHECKING:
    import httpx

    from trueline.batch.evaluate import Evaluation
    from trueline.bundle.signature import Array
    from trueline.columns.fitted import FittedColumns
    from trueline.compress.api import Compressed
    from trueline.recipe.contract import Recipe
    from trueline.registry import ModelVersion, RunFacts
    from trueline.runtime.session import Session
    from trueline.serve.api import RunningServer
    from trueline.train.api import TrainResult

Result = TypeVar("Result")

STAGES = ("train", "evaluate", "capture", "register", "serve", "compare")
WITH_COMPRESS = ("train", "evaluate", "capture", "compress", "register", "serve", "compare")
ROWS = 32
"""Records in one request of the comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerComparison:
    """The server's answers, compared with the eager model's."""

    url: str
    ready_s: float
    records: int
    requests: int
    max_abs_error: float
    decisions_changed: int
    records_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    trained: TrainResult
    evaluation: Evaluation
    bundle: Path
    digest: str
    version: ModelVersion
    compressed: Compressed | None = None
    served: ServerComparison
    seconds: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.trained.chosen),
            "job": self.trained.job_dir.name,
            "summary": self.trained.summary.as_dict(),
            "evaluation": self.evaluation.as_dict(),
            "bundle": str(self.bundle),
            "digest": self.digest,
            "version": self.version.uri,
            **({"compressed": self.compressed.as_dict()} if self.compressed is not None else {}),
            "served": {name: getattr(self.served, name) for name in self.served.__slots__},
            "seconds": self.seconds,
        }

    def as_text(self) -> str:
        served = self.served
        against = "the eager model's" if self.compressed is None else "the compressed program's"
        small = [] if self.compressed is None else [("compress", self.compressed.summary)]
        rows = [
            ("train", self.trained.summary.as_text().replace("\n", "\n" + " " * 11)),
            ("evaluate", self.evaluation.as_text()),
            ("capture", f"{self.bundle} (sha256 {self.digest[:16]}…)"),
            *small,
            ("register", f"{self.version.uri}, alias {', '.join(self.version.aliases) or 'none'}"),
            ("serve", f"ready in {served.ready_s:.2f} s, golden records replayed before the first request"),
            (
                "compare",
                f"{served.records} held-out records over the Open Inference Protocol and /predictions: all equal "
                f"{against}\n{' ' * 11}answers (largest difference {served.max_abs_error:.1e}, "
                f"{served.decisions_changed} decisions changed)",
            ),
        ]
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return "\n".join(f"{name:<11}{text}" for name, text in rows) + f"\n{'seconds':<11}{spent}"


def ship(
    recipe: str | Path | Recipe,
    *,
    workers: str | int = 3,
    epochs: int | None = None,
    out: str | Path | None = None,
    name: str | None = None,
    alias: str = "champion",
    tracking_uri: str | None = None,
    drill: bool = True,
    compress: str | None = None,
) -> Shipped:
    """Runs the whole line for `recipe` and returns the result of each stage.

    With `compress`, a budget such as `accuracy=1%`, the fastest program that keeps it is registered and served.

    `drill` kills one worker with SIGKILL a third of the way, as a test that the job survives a death. Stops at the
    first stage that fails and raises its error; files that were made until then stay, processes do not.
    """
    from trueline.batch.evaluate import evaluate
    from trueline.bundle.read import open_bundle
    from trueline.capture.api import capture
    from trueline.recipe.load import load_recipe
    from trueline.registry import register
    from trueline.runtime.open import open_program
    from trueline.serve.api import start

    loaded = load_recipe(recipe)
    _check_budget(loaded, compress)
    stages = _Stages(STAGES if compress is None else WITH_COMPRESS)
    trained = stages.run("train", lambda: train_with_kill(loaded, recipe, workers, epochs, drill))
    evaluation = stages.run("evaluate", lambda: evaluate(loaded, trained.chosen))
    bundle = Path(out) if out is not None else trained.job_dir / f"{loaded.name}.bundle"
    captured = stages.run("capture", lambda: capture(loaded, trained.chosen, bundle))
    small = None if compress is None else stages.run("compress", lambda: _compress(loaded, bundle, compress))
    digest, bundle = (captured.digest, captured.path) if small is None else (small.digest, small.path)
    facts = _run_facts(loaded, trained, evaluation)
    version = stages.run(
        "register", lambda: register(bundle, name=name, alias=alias, tracking_uri=tracking_uri, run=facts)
    )
    uri, log = f"models:/{version.name}@{alias}" if alias else version.uri, trained.job_dir / "logs" / "server.log"
    with stages.run("serve", lambda: start(uri, tracking_uri=tracking_uri, log=log)) as server:
        events.emit("server.started", url=server.url, model=server.model, version=server.version)
        ready_s = stages.seconds["serve"]
        oracle = None if small is None else open_program(open_bundle(bundle))
        served = stages.run("compare", lambda: _compare(loaded, trained, server, ready_s, oracle))
    return Shipped(
        trained=trained, evaluation=evaluation, bundle=bundle, digest=digest, version=version, compressed=small,
        served=served, seconds=stages.seconds,
    )  # fmt: skip


class _Stages:
    """Announces and times each stage."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.seconds: dict[str, float] = {}

    def run(self, stage: str, work: Callable[[], Result]) -> Result:
        events.emit("stage.started", stage=stage, number=self.names.index(stage) + 1, of=len(self.names))
        began = time.monotonic()
        result = work()
        self.seconds[stage] = time.monotonic() - began
        return result


def train_with_kill(
    recipe: Recipe, given: Any, workers: str | int, epochs: int | None, drill: bool, job_dir: Path | None = None
) -> TrainResult:
    """Trains; with `drill` and several workers, one of them is killed with SIGKILL a third of the way."""
    from trueline.train.api import train
    from trueline.train.settings import Fault, parse_workers
    from trueline.train.step.plan import JobPlan

    defaults = recipe.defaults
    plan = JobPlan(
        num_records=recipe.source("training").num_records,
        global_batch=defaults.global_batch,
        epochs=epochs or defaults.epochs,
        seed=defaults.seed,
    )
    enough = parse_workers(str(workers))[1] > 1
    faults = [Fault(step=plan.total_steps // 3, slot=1)] if drill and enough else []
    trained = train(recipe if recipe.path else given, workers=workers, epochs=epochs, faults=faults, job_dir=job_dir)
    if trained.chosen != trained.checkpoint:
        events.emit("checkpoint.chosen", path=str(trained.chosen))
    return trained


def compare_served(recipe: Recipe, trained: TrainResult, server: RunningServer, ready_s: float) -> ServerComparison:
    """Sends the evaluation records to `server` over both protocols. Raises NotProven where an answer differs."""
    return _compare(recipe, trained, server, ready_s)


def _run_facts(recipe: Recipe, trained: TrainResult, evaluation: Evaluation) -> RunFacts:
    from trueline.registry import RunFacts

    facts = trained.summary.as_dict()
    gaps = [regroup["gap_ms"] for regroup in facts["regroups"]]
    return RunFacts(
        params={key: facts[key] for key in ("epochs", "global_batch", "steps", "records", "workers_started")},
        metrics={
            "loss": evaluation.loss,
            **evaluation.metrics,
            "train_seconds": facts["seconds"],
            "regroup_max_ms": max(gaps, default=0.0),
        },
        tags={"job": trained.job_dir.name, "recipe": recipe.name},
        job_dir=trained.job_dir,
    )


def _check_budget(recipe: Recipe, budget: str | None) -> None:
    """Raises UsageError for a budget that compress would refuse after the training."""
    from trueline.compress.method import parse_budget
    from trueline.compress.promise import check_before_training

    if budget is not None:
        check_before_training(recipe, parse_budget(budget))


def _compress(recipe: Recipe, bundle: Path, budget: str) -> Compressed:
    from trueline.compress.api import compress

    return compress(bundle, recipe=recipe, budget=budget)


def _compare(
    recipe: Recipe, trained: TrainResult, server: RunningServer, ready_s: float, oracle: Session | None = None
) -> ServerComparison:
    """`oracle`: what gives the expected answers; None: the eager model."""
    import httpx
    import numpy as np

    from trueline.capture.model.eager import EagerSession
    from trueline.checkpoint.checkpoint import bind_columns, load_model
    from trueline.data.sources.table_source import TableSource
    from trueline.runtime.compare import compare

    recipe = bind_columns(recipe, trained.chosen)
    model = load_model(recipe, trained.chosen)
    records = recipe.source("evaluation")
    worst, changed, requests = 0.0, 0, 0
    began = time.monotonic()
    with httpx.Client(base_url=server.url, timeout=120.0, trust_env=False) as client:
        for start in range(0, records.num_records, ROWS):
            indices = np.arange(start, min(start + ROWS, records.num_records), dtype=np.int64)
            eager = EagerSession(model, records.read(indices).inputs)
            expected = (oracle or eager).run(eager.example)
            pairs = [(expected, partial(_ask_inference_protocol, client, server.model, eager))]
            if recipe.fitted is not None and isinstance(records, TableSource) and recipe.feed is None:
                rows = recipe.fitted.rows_of_table(records.table(indices))
                wanted = _numbers_of(recipe.fitted, expected)
                pairs.append((wanted, partial(_ask_rows, client, server.model, rows, next(iter(wanted)))))
            else:
                pairs.append((expected, partial(_ask_torchserve, client, server.model, eager)))
            for answer, ask in pairs:
                found = compare(answer, ask())
                requests += 1
                worst, changed = max(worst, found.max_abs_error), changed + found.decisions_changed
                if not found.agrees:
                    raise NotProven(
                        f"the server's answers to records {start} to {indices[-1]} differ: {found.reason}",
                        hint="keep the bundle and the log for a report; the model is not in service",
                    )
            events.emit("comparison.advanced", done=start + len(indices), total=records.num_records)
    if not requests:
        raise RecipeError("dataset('evaluation') has no records to compare the server's answers on")
    return ServerComparison(
        url=server.url,
        ready_s=ready_s,
        records=records.num_records,
        requests=requests,
        max_abs_error=worst,
        decisions_changed=changed,
        records_per_s=2 * records.num_records / (time.monotonic() - began),
    )


def _ask_inference_protocol(client: httpx.Client, model: str, eager: Any) -> dict[str, Array]:
    import numpy as np

    specs = {spec.name: spec for spec in eager.signature.inputs}
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": specs[name].datatype, "data": array.ravel().tolist()}
        for name, array in eager.example.items()
    ]
    answer = _post(client, f"/v2/models/{model}/infer", {"inputs": inputs})
    dtypes = {spec.name: spec.dtype for spec in eager.signature.outputs}
    return {
        output["name"]: np.array(output["data"], dtype=dtypes[output["name"]]).reshape(output["shape"])
        for output in answer["outputs"]
    }


def _numbers_of(fitted: FittedColumns, outputs: dict[str, Array]) -> dict[str, Array]:
    """The numbers of an answer to records with columns: probabilities, or values; else the outputs."""
    import numpy as np

    from trueline.columns import answers

    named = answers.columns_of(fitted, outputs)
    if not named:
        return outputs
    name = answers.PROBABILITIES if answers.PROBABILITIES in named else answers.VALUE
    return {name: named[name].astype(np.float32)}


def _ask_rows(client: httpx.Client, model: str, rows: list[dict[str, Any]], name: str) -> dict[str, Array]:
    """Asks with the records as they are in the table. `name`: of an answer that is numbers alone."""
    import numpy as np

    found = _post(client, f"/predictions/{model}", rows)
    if not isinstance(found[0], dict):
        return {name: np.array(found, np.float32)}
    names = [name for name in ("probabilities", "value") if name in found[0]] or list(found[0])
    listed = {name: [one[name] for one in found] for name in names}
    return {
        name: np.array([[*one.values()] if isinstance(one, dict) else one for one in values], np.float32)
        for name, values in listed.items()
    }


def _ask_torchserve(client: httpx.Client, model: str, eager: Any) -> dict[str, Array]:
    import numpy as np

    answer = _post(client, f"/predictions/{model}", {name: array.tolist() for name, array in eager.example.items()})
    outputs = eager.signature.outputs
    named = {outputs[0].name: answer} if len(outputs) == 1 else answer
    return {spec.name: np.array(named[spec.name], dtype=spec.dtype) for spec in outputs}


def _post(client: httpx.Client, path: str, body: Any) -> Any:
    answer = client.post(path, json=body)
    if answer.status_code != 200:
        raise TruelineError(f"the server answered {answer.status_code} to POST {path}: {answer.text[:300]}")
    return answer.json()
