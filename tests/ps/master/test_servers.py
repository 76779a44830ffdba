"""What is shown of parameter servers: rates between two reports, and the table that takes most time."""

from msgspec.structs import replace

from trueline.cli.jobs.status import format_status
from trueline.ps.master.servers import ServerMeter
from trueline.ps.messages import ServerReport, TableStats
from trueline.ps.server.memory import describe_kill


def table(name, busy_s, rows=10):
    return TableStats(name=name, rows=rows, bytes=4_000_000, busy_s=busy_s)


FIRST = ServerReport(
    ref="server-0.1", pid=1, routing=1, initialized=True, steps=8, pulls=100, pushes=80, memory=50_000_000,
    staleness=(60, 0, 20, 0), tables=(table("items", 5.0), table("users", 1.0)),
)  # fmt: skip
LATER = replace(
    FIRST, pulls=300, pushes=180, staleness=(150, 10, 20, 0), tables=(table("items", 5.1), table("users", 1.5))
)


def show(*reports):
    meter = ServerMeter(lambda name, **fields: None)
    for at, report in reports:
        meter.add("server-0", report, at)
    (shown,) = meter.describe()
    return shown


def test_rates_and_the_slowest_table_are_those_since_the_report_before():
    shown = show((10.0, FIRST), (12.0, LATER))
    assert (shown["pulls_per_s"], shown["pushes_per_s"]) == (100.0, 50.0)
    assert (shown["slowest"], shown["busy"]) == ("users", 0.25)
    assert (shown["stale"], shown["staleness"], shown["rows"]) == ([150, 10, 20], round(50 / 180, 2), 20)


def test_the_first_report_of_a_process_has_no_rates():
    for reports in ([(10.0, FIRST)], [(10.0, LATER), (12.0, replace(FIRST, ref="server-0.2"))]):
        shown = show(*reports)
        assert (shown["pulls_per_s"], shown["pushes_per_s"], shown["busy"]) == (0.0, 0.0, 0.0)
        assert shown["slowest"] == "items"


def test_a_second_report_at_the_same_moment_changes_no_rate():
    assert show((10.0, FIRST), (12.0, LATER), (12.01, LATER))["pulls_per_s"] == 100.0


def test_a_server_that_waits_is_told_once_and_once_that_it_goes_on():
    told = []
    meter = ServerMeter(lambda name, **fields: told.append((name, *fields.values())))
    for at, lacking in enumerate(("", "no room left", "no room left (8 KB free)", "", "")):
        meter.add("server-0", replace(FIRST, lacking=lacking), float(at))
    assert told == [("server.waits", "server-0", "no room left"), ("server.continues", "server-0")]


def test_status_shows_them():
    live = {
        "servers": [show((10.0, FIRST), (12.0, LATER))], "epoch": 0, "records_per_s": 1.0, "members": [], "workers": 1,
        "generation": 1,
    }  # fmt: skip
    facts = {
        "live": live, "why": "", "started": 0.0, "name": "job", "state": "running", "page": "", "loss": None, "step": 1,
        "total": 2, "checkpoint": 0, "folder": "job",
    }  # fmt: skip
    (line,) = [line for line in format_status(facts, 5.0).splitlines() if "server-0.1" in line]
    for word in ("100.0", "50.0", "0.28, 83% are 0", "users, 25.0% of a core", "8.0 MB"):
        assert word in line
    live["servers"] = [show((10.0, replace(FIRST, lacking="no room left", queued=3)))]
    assert "server-0.1 waits, with 3 pushes: no room left" in format_status(facts, 5.0).splitlines()


def test_a_server_that_is_killed_again_and_again_says_what_its_rows_cost():
    meter = ServerMeter(lambda name, **fields: None)
    meter.add("server-0", FIRST, 10.0)
    found = describe_kill("killed by SIGKILL", meter.find_report("server-0.7"))
    assert "0.05 GB in memory: items has 10 rows of 400000 bytes; users has" in found
    assert "resume it on a larger one; or bound the tables of a new job" in found
    assert describe_kill("exit code 1", meter.find_report("server-0.7")) == ""
    assert describe_kill("killed by SIGKILL", meter.find_report("server-1.0")) == ""
