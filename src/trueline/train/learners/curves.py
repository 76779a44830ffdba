"""The metrics of a learner from where its manifest says: its log, TensorBoard's event files, or a file of records."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from trueline.train.learners.manifest.read import MetricsSpec
from trueline.train.learners.messages import LearnerMetric
from trueline.train.learners.metrics.extract import MetricExtractor, MetricRecord, parse_emetrics
from trueline.train.learners.metrics.tensorboard import EventFolder

EMETRICS = "evaluation-metrics.txt"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def expand(text: str, env: Mapping[str, str]) -> str:
    """
    >>> expand("$JOB_STATE_DIR/logs/${LEARNER_ID}", {"JOB_STATE_DIR": "/x", "LEARNER_ID": "1"})
    '/x/logs/1'
    """
    return _VARIABLE.sub(lambda match: env.get(match[1] or match[2], ""), text)


class MetricSource:
    """`send` gets each metric. `alone`: this learner sees no files of others, or reads those of all."""

    def __init__(
        self, spec: MetricsSpec | None, env: Mapping[str, str], send: Callable[[LearnerMetric], None], *, alone: bool
    ) -> None:
        self._spec, self._send = spec, send
        self._extractor: MetricExtractor | None = None
        self._events: EventFolder | None = None
        self._file: Path | None = None
        self._at, self._part, self._count = 0, b"", 0
        if spec is None:
            return
        where = expand(spec.where, env)
        if spec.type == "regex_extractor":
            self._extractor = MetricExtractor(spec.groups, spec.lookahead)
        elif alone and spec.type == "tensorboard":
            self._events = EventFolder(Path(where or os.path.join(env["LOG_DIR"], "tb")))
        elif alone:
            self._file = Path(where or os.path.join(env["LOG_DIR"], EMETRICS))

    def hear(self, data: bytes) -> None:
        """Takes output of the command."""
        if self._extractor is None:
            return
        *lines, self._part = (self._part + data).split(b"\n")
        for line in lines:
            for record in self._extractor.read(line.decode("utf-8", "replace") + "\n"):
                self._pass(record)

    def poll(self) -> None:
        """Reads what has come to the files."""
        if self._events is not None:
            for run, scalar in self._events.read():
                self._send(LearnerMetric(run, scalar.step, {scalar.tag: scalar.value}))
        if self._file is not None and self._file.is_file():
            with self._file.open("rb") as file:
                file.seek(self._at)
                for line in file:
                    if line.endswith(b"\n"):
                        self._at += len(line)
                        self._pass(parse_emetrics(line.decode("utf-8", "replace")))

    def _pass(self, record: MetricRecord | None) -> None:
        if record is not None and record.scalars:
            self._count += 1
            step = self._count if record.step is None else record.step
            self._send(LearnerMetric(record.group, step, record.scalars))
