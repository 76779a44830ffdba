"""Registers a bundle as the next version of a model, together with the run that made it.

    experiment (one for each model) ─▶ run: params, metrics, tags ─▶ logged model: MLmodel + bundle/
                                                                         └─▶ version n of the model ◀─ alias

The bundle is verified before anything is written, and the version appears, with its digest, only when all its files are
stored: a process that dies before leaves a run marked as running and no version.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trueline import events
from trueline.bundle import schema, signing
from trueline.bundle.read import Bundle, open_bundle
from trueline.errors import UsageError
from trueline.registry import describe, store
from trueline.registry.find import ModelVersion, to_version
from trueline.registry.follow import record

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_MAX_PARAM = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run that made the model; shown beside it in MLflow."""

    params: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    job_dir: Path | None = None
    """The training job: its run in the same store is the run; one that has none there is logged now, with the times,
    parameters and curves of the job."""
    artifacts: tuple[Path, ...] = ()
    """Further files that the run keeps, as the doctor's report."""


def register(
    bundle_path: str | Path,
    *,
    name: str | None = None,
    alias: str | None = "champion",
    tracking_uri: str | None = None,
    run: RunFacts | None = None,
) -> ModelVersion:
    """Registers the bundle as the next version of model `name` (the bundle's own unless given) and moves `alias` to it.

    From then on `mlflow.pyfunc.load_model("models:/NAME@champion")` runs the bundle's proven program. A signature
    beside it (`trueline bundle sign`) goes with it. Raises BundleError before anything is written, RegistryError,
    UsageError.
    """
    bundle = open_bundle(Path(bundle_path))
    model = bundle.name if name is None else name
    if not model or set(model) & set("/:@"):
        raise UsageError(f"'{model}' cannot name a registered model; use a name without / : @")
    facts = run or RunFacts()
    with store.open_store(tracking_uri) as client:
        joined = _job_run(client, facts.job_dir, model) if facts.job_dir else None
        experiment = store.experiment_of(client, model) if joined is None else str(joined.info.experiment_id)
        run_id = _log_run(client, joined or _begin_run(client, experiment, bundle), bundle, facts)
        try:
            version = _add_version(client, experiment, run_id, model, bundle, signing.beside(Path(bundle_path)), facts)
            if alias:
                client.set_registered_model_alias(model, alias, version)
        except BaseException:
            if joined is None:
                client.set_terminated(run_id, "FAILED")
            raise
        if joined is None:
            client.set_terminated(run_id, "FINISHED")
        found = to_version(client.get_model_version(model, version))
    events.emit("model.registered", uri=found.uri, digest=found.digest, alias=alias)
    return found


def _begin_run(client: MlflowClient, experiment: str, bundle: Bundle) -> Run:
    tags = {"mlflow.source.name": "trueline", "mlflow.user": "trueline"}
    return client.create_run(experiment, tags=tags, run_name=f"{bundle.name}-{bundle.digest[:8]}")


def _job_run(client: MlflowClient, job_dir: Path, experiment: str) -> Run | None:
    """The run that `follow` keeps for the job in this store, or that it makes of the job's files; None without them."""
    link = store.link_of(job_dir, client.tracking_uri)
    run = None
    with store.ignoring("RESOURCE_DOES_NOT_EXIST"):
        run = client.get_run(link["run_id"]) if link else None
    if run is not None:
        return run if run.info.lifecycle_stage == "active" else None
    recorded = record(job_dir.resolve(), client, experiment)
    return client.get_run(recorded) if recorded else None


def _log_run(client: MlflowClient, run: Run, bundle: Bundle, facts: RunFacts) -> str:
    """Logs facts that the run lacks, and returns its id; MLflow does not allow changing parameters."""
    from mlflow.entities import Metric, Param, RunTag

    at_ms = int(run.info.end_time or run.info.start_time)
    client.log_batch(
        run.info.run_id,
        metrics=[Metric(key, float(value), at_ms, 0) for key, value in facts.metrics.items()],
        params=[Param(k, str(v)[:_MAX_PARAM]) for k, v in facts.params.items() if k not in run.data.params],
        tags=[RunTag(key, value) for key, value in {**facts.tags, **_tags(bundle)}.items()],
    )
    client.log_inputs(run.info.run_id, [describe.dataset_of(bundle, facts.params)])
    for name in (schema.EVIDENCE, schema.LINEAGE):
        client.log_artifact(run.info.run_id, str(bundle.path / name), "evidence")
    for path in (*facts.artifacts, *_doctor_reports(facts.job_dir)):
        client.log_artifact(run.info.run_id, str(path), "evidence")
    return str(run.info.run_id)


def _doctor_reports(job_dir: Path | None) -> list[Path]:
    """What `trueline doctor` keeps beside the job's recipe."""
    try:
        recipe = Path(json.loads(((job_dir or Path()) / "job.json").read_bytes())["recipe"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [path for path in [recipe.with_suffix(".doctor.json")] if recipe.suffix and path.is_file()]


def _tags(bundle: Bundle) -> dict[str, str]:
    return {
        store.DIGEST_TAG: bundle.digest,
        store.RECIPE_TAG: bundle.manifest.lineage.recipe_digest,
        "trueline.formats": ",".join(program.format for program in bundle.manifest.programs),
    }


def _add_version(
    client: MlflowClient,
    experiment: str,
    run_id: str,
    model: str,
    bundle: Bundle,
    signature: str | None,
    facts: RunFacts,
) -> str:
    from mlflow.entities import LoggedModelOutput
    from mlflow.entities.logged_model_status import LoggedModelStatus

    from trueline.registry import flavor

    tags = _tags(bundle) | ({} if signature is None else {store.SIGNATURE_TAG: signature.strip()})
    logged = client.create_logged_model(experiment, bundle.name, run_id, tags, model_type="trueline")
    with tempfile.TemporaryDirectory(prefix="trueline-model-") as folder:
        where = logged.artifact_location
        flavor.describe_model(bundle, Path(folder), model_id=logged.model_id, run_id=run_id, where=where)
        client.log_model_artifacts(logged.model_id, folder)
    client.log_model_artifacts(logged.model_id, str(bundle.path), store.BUNDLE_FOLDER)
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    job = {"job": facts.job_dir.name} if facts.job_dir else {}
    tags |= {f"trueline.{name}": value for name, value in job.items()}
    text = describe.describe_lineage(bundle, {**facts.params, **job})
    client.set_tag(run_id, "mlflow.note.content", text)  # the description of the run's page
    with store.ignoring("RESOURCE_ALREADY_EXISTS"):
        client.create_registered_model(model)
    # A server resolves `models:/<id>` in its own store; in this process MLflow would use the global one instead.
    served = client.tracking_uri.startswith("http")
    source = f"models:/{logged.model_id}" if served else logged.artifact_location
    version = client.create_model_version(model, source, run_id, tags, description=text, model_id=logged.model_id)
    link = json.dumps([{"name": model, "version": str(version.version)}])
    client.set_logged_model_tags(logged.model_id, {"mlflow.modelVersions": link})
    return str(version.version)
