"""Containers for the tests: what podman needs where the kernel is a guest's."""

import os
import shutil

CONFIG = """[containers]
default_ulimits=["nofile=20000:20000","nproc=10000:10000"]
[engine]
runtime="runc"
cgroup_manager="cgroupfs"
events_logger="file"
"""


def find_lack() -> str:
    """Why podman cannot run here; empty: it can."""
    if absent := [
        name for name in ("podman", "runc") if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]:
        return f"no {', '.join(absent)}: apt-get install podman runc catatonit"
    return "" if os.geteuid() == 0 else "containers over this machine's files need root"
