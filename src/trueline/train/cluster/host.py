"""A host of a submitted job. Its agent begins to import torch first, since that is what takes most of its time.

`python -m trueline.train.cluster.host STORE/JOB LAUNCH ROLE`, started by a scheduler for the head. SIGTERM takes the
cores back between two steps.
"""

import logging
import os
import sys
from pathlib import Path

from trueline.engine.hosts.agent import HostAgent
from trueline.errors import JobStopped, TruelineError
from trueline.files import TemporaryFolder
from trueline.train.cluster.store import JobStore
from trueline.train.launch.preload import find_preload


def begin_agent(store: JobStore, scratch: Path) -> HostAgent:
    """An agent that imports what the job's workers need, as the head has it import. Raises StorageError."""
    job = store.read_job()
    users = (job.script or (job.recipe,))[0]
    file = scratch / "users.py"
    for one in job.files:
        if one.path == users:
            file.write_bytes(store.get(f"files/{one.digest}") or b"")
    agent = HostAgent()
    agent.begin(find_preload("allreduce", file))
    return agent


def run(store: JobStore, number: int, role: str, scratch: Path) -> str:
    """Lends the cores until the job does not need them; returns why that is."""
    agent = begin_agent(store, scratch)
    from trueline.train.cluster import lending  # which imports half a second

    return lending.run(store, number, role, agent)


def main() -> None:
    where, number, role = sys.argv[1:]
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    temporary = TemporaryFolder.after_sweep("host")
    scratch = temporary.path
    os.chdir(scratch)
    try:
        print(run(JobStore(where), int(number), role, scratch), file=sys.stderr)  # noqa: T201 - the log of this process
    except JobStopped as error:
        print(error.message, file=sys.stderr)  # noqa: T201 - this host has led the job to a halt
    except TruelineError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    finally:
        temporary.remove()


if __name__ == "__main__":
    main()
