"""What every Scheduler promises of output, signals, arguments and names; `scheduler.py` has the fixtures."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from conformance.scheduler import ENDED, POLITE, QUEUED, RUNNING, STUBBORN, Scheduled
from trueline.engine.cluster.contract import Submission
from worlds.waiting import until

ORDER = (QUEUED, RUNNING, ENDED)


def test_what_is_killed_by_someone_else_has_ended_with_a_reason_and_is_not_started_again(scheduled):
    mark = f"{scheduled.folder}/killed"
    name = scheduled.submit("head", f": {mark}; {POLITE}")
    scheduled.wait_ready(name)
    scheduled.kill(mark)
    found = scheduled.wait(name, ENDED)
    assert found.reason
    assert found.code != 0
    scheduled.submit("head", f": {mark}; {POLITE}")
    assert scheduled.find(name).state is ENDED
    assert scheduled.scheduler.read_log(name).count(b"ready") == 1


def test_what_kills_itself_has_not_ended_well(scheduled):
    good, bad = scheduled.submit("head", "exit 0"), scheduled.submit("host-1", "kill -KILL $$")
    assert scheduled.wait(bad, ENDED).reason != scheduled.wait(good, ENDED).reason
    assert scheduled.find(bad).code != 0


def test_an_end_is_told_the_same_way_each_time_and_to_each_client(scheduled, other_client):
    name = scheduled.submit("head", "exit 7")
    first = scheduled.wait(name, ENDED)
    for client in (scheduled.scheduler, other_client, scheduled.scheduler):
        assert client.list(f"{scheduled.job}.1") == [first]


def test_a_state_never_goes_back(scheduled):
    gate, seen = scheduled.folder / "gate", []
    name = scheduled.submit("head", f"echo ready; until test -e {gate}; do sleep 0.05; done")

    def look() -> bool:
        seen.append(scheduled.find(name).state)
        if seen[-1] is RUNNING:
            gate.touch()
        return seen[-1] is ENDED

    until(look, lambda: f"the end after {seen}")
    look()
    assert [ORDER.index(state) for state in seen] == sorted(ORDER.index(state) for state in seen)
    assert RUNNING in seen


def test_what_was_written_before_a_kill_stays_readable(scheduled):
    name = scheduled.submit("head", f"echo one; echo two >&2; {STUBBORN}")
    scheduled.wait_ready(name)
    scheduled.scheduler.cancel(name, grace=False)
    scheduled.wait(name, ENDED)
    assert {*scheduled.scheduler.read_log(name).splitlines()} >= {b"one", b"two", b"ready"}


def test_output_and_errors_are_one_log_each_in_its_order(scheduled):
    name = scheduled.submit("head", "for i in 1 2 3; do echo out $i; echo err $i >&2; done")
    scheduled.wait(name, ENDED)
    shown = scheduled.scheduler.read_log(name).decode().splitlines()
    for stream in ("out", "err"):
        assert [line for line in shown if line.startswith(stream)] == [f"{stream} {number}" for number in (1, 2, 3)]
    assert len(shown) == 6


def test_a_large_log_arrives_whole(scheduled):
    """A kubelet adds 45 bytes to each line, and cuts a log at 10 MiB."""
    name = scheduled.submit("head", "seq -f 'line %060.0f' 1 20000")
    scheduled.wait(name, ENDED)
    expected = b"".join(b"line %060d\n" % number for number in range(1, 20_001))
    until(lambda: scheduled.scheduler.read_log(name) == expected, "1.3 MB of output")


def test_bytes_that_are_no_text_and_a_line_without_an_end_arrive_as_they_are(scheduled):
    name = scheduled.submit("head", r"printf '\377\376 \303\274\nend'")
    scheduled.wait(name, ENDED)
    assert scheduled.scheduler.read_log(name) == b"\xff\xfe \xc3\xbc\nend"


def test_another_client_reads_how_a_dead_process_ended_and_what_it_wrote(scheduled, other_client):
    name = scheduled.submit("head", "echo hello; exit 7")
    scheduled.wait(name, ENDED)
    assert other_client.read_log(name) == b"hello\n"
    (found,) = other_client.list(f"{scheduled.job}.1")
    assert (found.state, bool(found.reason)) == (ENDED, True)


def test_what_ignores_its_notice_is_ended_by_a_cancel_without_grace(scheduled):
    name = scheduled.submit("head", STUBBORN)
    scheduled.wait_ready(name)
    scheduled.scheduler.cancel(name)
    scheduled.scheduler.cancel(name)
    scheduled.scheduler.cancel(name, grace=False)
    assert scheduled.wait(name, ENDED).reason


def test_a_cancel_right_after_the_submission_ends_it(scheduled):
    name = scheduled.submit("head", STUBBORN)

    def ended() -> bool:
        scheduled.scheduler.cancel(name, grace=False)
        return scheduled.find(name).state is ENDED

    until(ended, lambda: scheduled.find(name))
    scheduled.submit("head", STUBBORN)
    assert scheduled.find(name).state is ENDED


def test_two_clients_that_cancel_at_once_get_no_error(scheduled, other_client):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one.cancel, name, grace=False) for one in (scheduled.scheduler, other_client)]:
            done.result()
    scheduled.wait(name, ENDED)


def test_the_end_of_one_process_leaves_the_others(scheduled):
    names = [scheduled.submit(role, POLITE) for role in ("head", "host-1")]
    for name in names:
        scheduled.wait_ready(name)
    scheduled.scheduler.cancel(names[1], grace=False)
    scheduled.wait(names[1], ENDED)
    assert scheduled.find(names[0]).state is RUNNING
    assert {one.name for one in scheduled.scheduler.list(f"{scheduled.job}.1")} == {*names}


def test_a_notice_comes_to_the_command_itself(scheduled):
    """A shell between would keep it until its child has ended."""
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('left', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.05)"
    )
    plain = scheduled.make("head", "")
    command = (sys.executable, "-S", "-c", script)
    scheduled.scheduler.submit(Submission(name=plain.name, command=command, log=plain.log))
    scheduled.wait_ready(plain.name)
    scheduled.scheduler.cancel(plain.name)
    scheduled.wait(plain.name, ENDED)
    assert b"left" in scheduled.scheduler.read_log(plain.name).splitlines()


def test_standard_input_is_empty(scheduled):
    name = scheduled.submit("head", "cat; echo end")
    scheduled.wait(name, ENDED)
    assert scheduled.scheduler.read_log(name) == b"end\n"


def test_values_with_lines_and_empty_ones_arrive_and_replace_what_the_engine_gives(scheduled):
    env = {"LINES_": "a\nb", "EMPTY": "", "HOME": "/nowhere", "EQUALS": "x=y"}
    name = scheduled.submit("head", 'echo "$LINES_,${EMPTY-unset},$HOME,$EQUALS"', env=env)
    scheduled.wait(name, ENDED)
    assert scheduled.scheduler.read_log(name) == b"a\nb,,/nowhere,x=y\n"


def test_a_long_argument_arrives_whole(scheduled):
    plain = scheduled.make("head", "")
    command = ("sh", "-c", "echo ${#1}", "sh", "x" * 100_000)
    scheduled.scheduler.submit(Submission(name=plain.name, command=command, log=plain.log))
    scheduled.wait(plain.name, ENDED)
    assert scheduled.scheduler.read_log(plain.name) == b"100000\n"


def test_a_command_that_is_not_there_ends_with_a_reason(scheduled):
    plain = scheduled.make("head", "")
    scheduled.scheduler.submit(Submission(name=plain.name, command=("/no/such/python", "x"), log=plain.log))
    found = scheduled.wait(plain.name, ENDED)
    assert found.reason
    assert found.code != 0


@pytest.mark.parametrize("more", ["_Big.v2", "-" + 25 * "long"])
def test_names_of_jobs_may_have_capitals_dots_and_a_hundred_letters(scheduled, more):
    world = Scheduled(scheduled.scheduler, scheduled.folder, f"{scheduled.job}{more}")
    name = world.submit("head", "echo hello")
    assert world.wait(name, ENDED).name == name
    assert world.scheduler.read_log(name) == b"hello\n"
    assert scheduled.scheduler.list(f"{scheduled.job}.1") == []


def test_launches_whose_numbers_begin_alike_are_listed_apart(scheduled):
    names = [scheduled.submit("head", "true", launch=launch) for launch in (2, 21)]
    for name in names:
        scheduled.wait(name, ENDED)
        assert [one.name for one in scheduled.scheduler.list(name.rpartition(".")[0])] == [name]
