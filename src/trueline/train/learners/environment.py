"""The environment of a learner, as FfDL gave it. Pure, but for `localize`, which changes a copy of the user's files.

    MODEL_DIR          the model definition; the command runs there, and PYTHONPATH has it
    DATA_DIR           the container of the training data
    RESULT_DIR         RESULT_BUCKET_DIR/TRAINING_ID, kept: trained models, learner-N/ with the logs
    CHECKPOINT_DIR     RESULT_BUCKET_DIR/_wml_checkpoints/TRAINING_ID, kept
    JOB_STATE_DIR      what all learners share, FfDL's /job; LOG_DIR is below it

Source: FfDL's lcm/service/lcm/learner/envvars.go and the learner's train.sh. There CHECKPOINT_DIR was the same for all
jobs of a bucket, so that jobs overwrote each other's checkpoints.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trueline.train.learners.manifest.read import FfdlManifest

NAMESPACE = "default"
SHELL = 'cd "$MODEL_DIR" || exit 1; export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD"; eval "$TRAINING_COMMAND"'
"""What a learner runs by bash, as FfDL's train.sh does."""
MOST_TEXT = 1 << 20
IMAGE_PYTHON = "/opt/conda/bin/python"
"""Of FfDL's images, which some manifests name; where it is missing, `python` is meant."""
_JOB = re.compile(r"(?<![\w./$}])/job(?=/)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerFolders:
    model: Path
    data: Path
    bucket: Path
    """Of the results of all jobs."""
    results: Path
    checkpoints: Path
    state: Path

    @property
    def logs(self) -> Path:
        return self.state / "logs"


def make_environment(manifest: FfdlManifest, training: str, number: int, folders: LearnerFolders) -> dict[str, str]:
    """`training`: the TRAINING_ID; `number`: the LEARNER_ID, from 1 on."""
    command, _ = replace_job(manifest.command, folders.state)
    if not Path(IMAGE_PYTHON).exists():
        command = re.sub(rf"(?<!\S){IMAGE_PYTHON}(?=3?\s)", "python", command)
    prefix = f"learner-{training}"
    return {
        "MODEL_DIR": str(folders.model),
        "DATA_DIR": str(folders.data),
        "RESULT_DIR": str(folders.results),
        "RESULT_BUCKET_DIR": str(folders.bucket),
        "CHECKPOINT_DIR": str(folders.checkpoints),
        "JOB_STATE_DIR": str(folders.state),
        "LOG_DIR": str(folders.logs),
        "TRAINING_JOB": training,
        "TRAINING_COMMAND": command,
        "TRAINING_ID": training,
        "DLAAS_JOB_ID": training,
        "LEARNER_ID": str(number),
        "NUM_LEARNERS": str(manifest.learners),
        "GPU_COUNT": f"{manifest.gpus:.6f}",
        "LEARNER_NAME_PREFIX": prefix,
        "DOWNWARD_API_POD_NAME": f"{prefix}-{number - 1}",
        "DOWNWARD_API_POD_NAMESPACE": NAMESPACE,
    }


def replace_job(text: str, state: Path) -> tuple[str, int]:
    """`text` with `state` in place of /job, and the number of replacements.

    >>> replace_job("cat /job/master_node.txt file:///job/x", Path("/shared/state"))
    ('cat /shared/state/master_node.txt file:///job/x', 1)
    """
    return _JOB.subn(str(state).replace("\\", r"\\"), text)


def localize(model: Path, state: Path) -> Iterator[tuple[str, int]]:
    """Replaces /job in the texts of the model definition; yields the files that had it, and how often."""
    for path in sorted(model.rglob("*")):
        if not path.is_file() or path.stat().st_size > MOST_TEXT:
            continue
        data = path.read_bytes()
        if b"/job/" not in data or b"\0" in data:
            continue
        changed, count = replace_job(data.decode("utf-8", "surrogateescape"), state)
        if count:
            path.write_bytes(changed.encode("utf-8", "surrogateescape"))
            yield path.relative_to(model).as_posix(), count
