"""A job's metrics in Prometheus' text format; docs/guides/see.md has their names and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trueline.train.monitor.job_view import JobView

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class JobCollector:
    """Gives a job view as Prometheus metrics."""

    def __init__(self, view: JobView, now: float) -> None:
        self._view, self._now = view, now

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at a scrape."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._with_labels()

    def _gauges(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily as Gauge

        view = self._view
        checkpoint = view.checkpoint["step"] if view.checkpoint else 0
        quarantined = sum(bool(lane.quarantined) for lane in view.lanes.by_slot.values())
        yield Gauge("trueline_job_step", "Steps that the surviving state has applied.", value=view.step)
        yield Gauge("trueline_job_total_steps", "Steps that the job is to have.", value=view.total)
        yield Gauge("trueline_job_records_per_second", "Over the last 10 s.", value=view.recent.rates(self._now)[0])
        yield Gauge("trueline_job_members", "Workers of the view.", value=view.workers)
        yield Gauge("trueline_job_generation", "Number of the view.", value=view.generation)
        yield Gauge("trueline_job_checkpoint_step", "Step of the newest checkpoint.", value=checkpoint)
        yield Gauge("trueline_job_records_set_aside", "Records left out of training.", value=len(view.set_aside))
        yield Gauge("trueline_job_quarantined_slots", "Slots that stay empty.", value=quarantined)
        yield Gauge("trueline_job_evaluations", "Evaluations kept.", value=len(view.evaluations))
        if view.loss is not None:
            yield Gauge("trueline_job_loss", "Mean loss of the last step.", value=view.loss)

    def _counters(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import HistogramMetricFamily

        view = self._view
        yield Counter("trueline_job_steps_applied", "Steps applied, repeated ones too.", value=view.steps_applied)
        yield Counter("trueline_job_records_applied", "Records in applied steps.", value=view.records)
        yield Counter("trueline_job_views", "Views published.", value=view.num_regroups)
        yield Counter("trueline_job_checkpoints", "Checkpoints written.", value=view.checkpoints)
        yield Counter("trueline_job_steps_redone", "Computed again after an overflow.", value=view.redone)
        gaps = HistogramMetricFamily("trueline_job_regroup_gap_seconds", "From the last step before to the next.")
        gaps.add_metric([], view.gaps_s.cumulative(), view.gaps_s.total)
        yield gaps

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
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(view, now))
    return generate_latest(registry)
