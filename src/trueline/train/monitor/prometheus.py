"""A job's metrics in Prometheus' text format; docs/guides/see.md has their names and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trueline.train.monitor.job_view import JobView

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class JobCollector:
    def __init__(self, view: JobView, now: float) -> None:
        self._view, self._now = view, now

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        view = self._view
        checkpoint = view.checkpoint["step"] if view.checkpoint else 0
        quarantined = sum(bool(lane.quarantined) for lane in view.lanes.by_slot.values())
        for name, text, value in (
            ("step", "Steps that the surviving state has applied.", view.step),
            ("total_steps", "Steps that the job is to have.", view.total),
            ("records_per_second", "Over the last 10 s.", view.recent.rates(self._now)[0]),
            ("members", "Workers of the view.", view.workers),
            ("generation", "Number of the view.", view.generation),
            ("checkpoint_step", "Step of the newest checkpoint.", checkpoint),
            ("records_set_aside", "Records left out of training.", len(view.set_aside)),
            ("quarantined_slots", "Slots that stay empty.", quarantined),
            ("evaluations", "Evaluations kept.", len(view.evaluations)),
            ("loss", "Mean loss of the last step.", view.loss),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"trueline_job_{name}", text, value=value)
        for name, text, value in (
            ("steps_applied", "Steps applied, repeated ones too.", view.steps_applied),
            ("records_applied", "Records in applied steps.", view.records),
            ("views", "Views published.", view.num_regroups),
            ("checkpoints", "Checkpoints written.", view.checkpoints),
            ("steps_redone", "Computed again after an overflow.", view.redone),
        ):
            yield CounterMetricFamily(f"trueline_job_{name}", text, value=value)
        gaps = HistogramMetricFamily("trueline_job_regroup_gap_seconds", "From the last step before to the next.")
        gaps.add_metric([], view.gaps_s.cumulative(), view.gaps_s.total)
        yield gaps
        yield from self._with_labels()

    def _with_labels(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        view = self._view
        phase = Gauge("trueline_job_phase", "1 for the phase that the job is in.", labels=["phase"])
        phase.add_metric([view.phase], 1)
        deaths = Counter("trueline_job_deaths", "Deaths of workers.", labels=["reason"])
        for reason, count in sorted(view.deaths.items()):
            deaths.add_metric([reason], count)
        seconds = Counter("trueline_job_step_seconds", "Where the steps' time went.", labels=["phase"])
        for name, total_ms in view.phase_ms.items():
            seconds.add_metric([name], total_ms / 1e3)
        metric = Gauge("trueline_job_evaluation", "The last evaluation.", labels=["metric"])
        last = view.evaluations[-1] if view.evaluations else {"loss": None, "metrics": {}}
        for name, value in {"loss": last["loss"], **last["metrics"]}.items():
            if value is not None:
                metric.add_metric([name], value)
        yield from (phase, deaths, seconds, metric)


def render(view: JobView, now: float) -> bytes:
    """The text that a scrape gets."""
    from prometheus_client.exposition import generate_latest

    return generate_latest(JobCollector(view, now))
