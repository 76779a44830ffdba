"""MLflow as a tracker of jobs: a run with the job's settings, curves, tags, times and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.registry import store
from trueline.registry.curves import Point, TrackedJob, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

_BATCH, _TAGS = 900, 100  # MLflow takes at most 1000 metrics and 100 tags at once


class MlflowTracker:
    def __init__(self, client: MlflowClient, experiment: str | None = None) -> None:
        self.client, self._experiment, self._run = client, experiment, ""
        self.place = store.absolute(client.tracking_uri)

    def begin(self, job: TrackedJob, run: str) -> str:
        from mlflow.entities import Param

        self._run = run
        if run:
            self.client.update_run(run, status="RUNNING")
            return run
        name = str(job.settings["name"])
        where = store.experiment_of(self.client, self._experiment or job.group)
        tags = {"trueline.job": name, "trueline.job_dir": str(job.folder), "trueline.state": "running",
                "mlflow.source.name": "trueline",
                "mlflow.user": "trueline", store.RECIPE_TAG: job.settings["recipe_digest"]}  # fmt: skip
        begun = self.client.create_run(where, start_time=job.began_ms, tags=tags, run_name=name)
        self._run = str(begun.info.run_id)
        params = [Param(key, str(value)[:6000]) for key, value in job.plain_settings.items()]
        self.client.log_batch(self._run, params=params)
        return self._run

    def log(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        from mlflow.entities import Metric, RunTag

        left = [RunTag(key, value) for key, value in tags.items()]
        for start in range(0, max(len(points), len(left), 1), _BATCH):
            metrics = [Metric(key, value, at_ms, step) for key, value, at_ms, step in points[start : start + _BATCH]]
            now, left = left[:_TAGS], left[_TAGS:]
            self.client.log_batch(self._run, metrics, tags=now)

    def end(self, status: str, at_ms: int | None, kept: Sequence[Path]) -> None:
        for path in kept:
            self.client.log_artifact(self._run, str(path))
        self.client.set_terminated(self._run, status, at_ms)


@contextmanager
def open_tracker(tracking_uri: str | None, experiment: str | None) -> Iterator[Tracker]:
    """The tracker over one connection to the store. Raises as `store.open_store` does."""
    with store.open_store(tracking_uri) as client:
        yield MlflowTracker(client, experiment)
