"""What each port of a server may take of the process's open files and memory."""

from __future__ import annotations

import pytest

from trueline.serve.process.listeners import MANAGEMENT_BYTES, OPEN_FILES, _limits_of
from trueline.serve.protocols.dispatch import is_vital

PORTS = ("data", "management", "metrics", "grpc", "grpc_management")


@pytest.mark.parametrize("open_files", [512, 1024, OPEN_FILES])
def test_all_ports_with_all_their_connections_leave_open_files_for_the_server(open_files: int) -> None:
    limits = [_limits_of(port, 2**26, open_files) for port in PORTS]
    assert (
        sum(one.connections + one.spare for one in limits[:3]) + sum(one.connections for one in limits[3:]) < open_files
    )


def test_management_and_metrics_take_small_bodies_and_the_data_port_what_it_is_told() -> None:
    assert [_limits_of(port, 2**26, OPEN_FILES).body_bytes for port in PORTS[:3]] == [2**26, *[MANAGEMENT_BYTES] * 2]
    assert _limits_of("management", 1000, OPEN_FILES).body_bytes == 1000


@pytest.mark.parametrize(
    "path", ["/ping", "/health", "/metrics", "/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"]
)
def test_health_and_metrics_are_vital(path: str) -> None:
    assert is_vital(path)
    assert not is_vital(path.replace("/v2/health", "/v2") + "/infer")
