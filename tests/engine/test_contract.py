"""What a master may read out of what an engine saw."""

import signal

import pytest

from trueline.engine.contract import Kind, ProcessSpec, Seen, make_ref, parse_ref


@pytest.mark.parametrize(
    ("how", "alive", "failed"),
    [
        ({"kind": Kind.STARTED}, True, False),
        ({"kind": Kind.LOST}, False, False),
        ({"kind": Kind.EXITED, "code": 0}, False, False),
        ({"kind": Kind.EXITED, "code": 3}, False, True),
        ({"kind": Kind.EXITED, "signal": signal.SIGSEGV}, False, True),
        ({"kind": Kind.EXITED, "signal": signal.SIGABRT}, False, True),
        ({"kind": Kind.EXITED, "signal": signal.SIGKILL}, False, False),
        ({"kind": Kind.EXITED, "signal": signal.SIGTERM}, False, False),
    ],
    ids=str,
)
def test_a_process_failed_that_brought_its_end_upon_itself(how, alive, failed):
    seen = Seen(ref="worker-0.0", **how)
    assert (seen.alive, seen.failed) == (alive, failed)


@pytest.mark.parametrize("parts", [("worker", 2, 0), ("worker", 10, 17), ("my-role", 0, 3)])
def test_a_ref_is_made_of_role_slot_and_incarnation(parts):
    role, slot, incarnation = parts
    spec = ProcessSpec(role=role, slot=slot, incarnation=incarnation, entry="a:b", log="x")
    assert spec.ref == make_ref(*parts)
    assert parse_ref(spec.ref) == parts


@pytest.mark.parametrize("ref", ["", "worker", "worker-2", "worker-x.0"])
def test_what_is_no_ref_is_refused(ref):
    with pytest.raises(ValueError):
        parse_ref(ref)
