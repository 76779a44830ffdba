"""A job's board in Prometheus' text. Built only when it is asked for; names and meaning are in docs/guides/see.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trueline.train.monitor.job_view import Board

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Collector:
    """Reads a board as Prometheus metrics."""

    def __init__(self, board: Board, now: float) -> None:
        self._board, self._now = board, now

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at a scrape."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._labelled()

    def _gauges(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily as Gauge

        board = self._board
        checkpoint = board.checkpoint["step"] if board.checkpoint else 0
        quarantined = sum(bool(lane.quarantined) for lane in board.lanes.by_slot.values())
        yield Gauge("trueline_job_step", "Steps that the surviving state has applied.", value=board.step)
        yield Gauge("trueline_job_total_steps", "Steps that the job is to have.", value=board.total)
        yield Gauge("trueline_job_records_per_second", "Over the last 10 s.", value=board.recent.rates(self._now)[0])
        yield Gauge("trueline_job_members", "Workers of the view.", value=board.workers)
        yield Gauge("trueline_job_generation", "Number of the view.", value=board.generation)
        yield Gauge("trueline_job_checkpoint_step", "Step of the newest checkpoint.", value=checkpoint)
        yield Gauge("trueline_job_records_set_aside", "Records left out of training.", value=len(board.set_aside))
        yield Gauge("trueline_job_quarantined_slots", "Slots that stay empty.", value=quarantined)
        yield Gauge("trueline_job_evaluations", "Evaluations kept.", value=len(board.evaluations))
        if board.loss is not None:
            yield Gauge("trueline_job_loss", "Mean loss of the last step.", value=board.loss)

    def _counters(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import HistogramMetricFamily

        board = self._board
        yield Counter("trueline_job_steps_applied", "Steps applied, repeated ones too.", value=board.steps_applied)
        yield Counter("trueline_job_records_applied", "Records in applied steps.", value=board.records)
        yield Counter("trueline_job_views", "Views published.", value=board.regroups_seen)
        yield Counter("trueline_job_checkpoints", "Checkpoints written.", value=board.checkpoints)
        yield Counter("trueline_job_steps_redone", "Computed again after an overflow.", value=board.redone)
        gaps = HistogramMetricFamily("trueline_job_regroup_gap_seconds", "From the last step before to the next.")
        gaps.add_metric([], board.gaps_s.cumulative(), board.gaps_s.total)
        yield gaps

    def _labelled(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        board = self._board
        phase = Gauge("trueline_job_phase", "1 for the phase that the job is in.", labels=["phase"])
        phase.add_metric([board.phase], 1)
        deaths = Counter("trueline_job_deaths", "Deaths of workers.", labels=["reason"])
        for reason, count in sorted(board.deaths.items()):
            deaths.add_metric([reason], count)
        seconds = Counter("trueline_job_step_seconds", "Where the steps' time went.", labels=["phase"])
        for name, total_ms in board.phase_ms.items():
            seconds.add_metric([name], total_ms / 1e3)
        metric = Gauge("trueline_job_evaluation", "The last evaluation.", labels=["metric"])
        last = board.evaluations[-1] if board.evaluations else {"loss": None, "metrics": {}}
        for name, value in {"loss": last["loss"], **last["metrics"]}.items():
            if value is not None:
                metric.add_metric([name], value)
        yield from (phase, deaths, seconds, metric)


def page(board: Board, now: float) -> bytes:
    """The whole page."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(board, now))
    return generate_latest(registry)
