"""What the first worker has found out about a loss, for all workers of its job: in JOB/loss.json, or on the master."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from trueline import events
from trueline.full_disk import write_when_room
from trueline.train.job_dir import JobDir
from trueline.train.link.grpc_client import settle_on_master
from trueline.train.step.model_traits import ModelTraits

_SETTLED = ("draws", "reduction", "even", "whole", "buffers", "skips", "half", "form", "divisors",
            "looks", "reads")  # fmt: skip
"""What the first worker finds out for all others of the job, in JOB/loss.json."""


def load_traits(shown: ModelTraits) -> ModelTraits | None:
    """`shown` with what another worker of this job has settled; None if there is nothing yet."""
    if "TRUELINE_CA" in os.environ:
        settled = settle_on_master(b"")
        return replace(shown, **json.loads(settled)) if settled else None
    try:
        return replace(shown, **json.loads(JobDir(Path(os.environ["TRUELINE_JOB"])).loss.read_bytes()))
    except (KeyError, FileNotFoundError):
        return None


def settle_traits(traits: ModelTraits) -> ModelTraits:
    """Settles `traits` for the job, unless another worker already has; returns what is settled."""
    settled = {name: value for name, value in asdict(traits).items() if name in _SETTLED}
    events.emit("loss.tried", **{name: value for name, value in settled.items() if name != "reads"})
    if "TRUELINE_JOB" not in os.environ:
        return traits
    if "TRUELINE_CA" in os.environ:
        return replace(traits, **json.loads(settle_on_master(json.dumps(settled).encode())))
    write_when_room(JobDir(Path(os.environ["TRUELINE_JOB"])).loss, json.dumps(settled).encode(), replace=False)
    return load_traits(traits) or traits
