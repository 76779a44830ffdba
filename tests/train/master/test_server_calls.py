"""Promises of the master's door: whom it lets in, what it takes from a worker, and what it answers."""

import asyncio

import grpc
import pytest

from trueline.train.membership import events as h
from trueline.wire import train_pb2 as pb
from worlds.masters import JOB, RECORDS, SECRET, STEPS, WAIT_S, A, B, at_work, finish, said, serving
from worlds.waiting import until_async

STRANGER = "worker-0.7"
STEP = pb.Applied(step=0, generation=1, records=4, digest=1, workers=2)
HELLO = pb.Hello(ref=A, store="a:1", state="a:2", num_records=RECORDS, total_steps=STEPS)


def calls(ref: str) -> dict[str, tuple[str, object]]:
    """Each call that a worker can make, as `ref` makes it."""
    return {
        "Report": pb.Progress(ref=ref, generation=1, step=1, applied=[STEP]),
        "Leave": pb.Worker(ref=ref),
        "ReportBrokenGroup": pb.Fault(ref=ref, generation=1, what="reset by peer"),
        "Fail": pb.Fault(ref=ref, what="recipe_raised|odd", detail="look"),
        "RecordCheckpoint": pb.Checkpoint(ref=ref, step=1, path="/elsewhere"),
        "Suspect": pb.Suspicion(ref=ref, records=[3], why="odd"),
        "Try": pb.Trial(ref=ref, record=3),
        "Enter": pb.Entry(ref=ref, generation=1, step=1, progress=pb.Progress(ref=ref, applied=[STEP])),
        "Finish": pb.Entry(ref=ref, generation=1, step=1),
    }


def scene(tmp_path, act, *, job=JOB, prepare=at_work):
    """What `act` makes of a master that serves, and of a client's stub, after `prepare`."""

    async def run():
        async with serving(job, tmp_path) as (master, stub):
            if prepare is not None:
                prepare(master)
            found = await act(master, stub)
            await asyncio.gather(*master._tasks)
            return found

    return asyncio.run(run())


@pytest.mark.parametrize("name", calls(STRANGER))
def test_a_worker_that_was_given_up_is_fenced_at_every_call_and_leaves_no_trace(tmp_path, name):
    async def act(master, stub):
        before = len(said(master)), master.state.generation
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await getattr(stub, name)(calls(STRANGER)[name], metadata=SECRET, timeout=WAIT_S)
        assert [event for event, _ in said(master)[before[0] :] if event != "worker.fenced"] == []
        assert (master.progress.logged, master.state.generation, master.state.phase) == (0, before[1], "running")
        assert (master.state.checkpoint, master.state.suspects, master.saving.save_from) == ("", {}, 0)
        return refused.value

    refused = scene(tmp_path, act)
    assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.details() == f"fenced: {STRANGER} is not of this job any more"


def test_a_worker_that_was_given_up_gets_no_view(tmp_path):
    async def act(master, stub):
        hello = pb.Hello(ref=STRANGER, store="x:1", num_records=RECORDS, total_steps=STEPS)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(hello, metadata=SECRET).read()
        return refused.value.code()

    assert scene(tmp_path, act) is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "metadata", [(), (("authorization", "Bearer other"),), (("authorization", "secret"),)], ids=str
)
def test_without_the_jobs_secret_nothing_is_answered(tmp_path, metadata):
    async def act(master, stub):
        codes = []
        for call in (
            stub.Report(calls(A)["Report"], metadata=metadata),
            stub.Stop(pb.StopRequest(why="x"), metadata=metadata),
            stub.Watch(HELLO, metadata=metadata).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            codes.append(refused.value.code())
        return codes, master.progress.logged, master.stopped.is_set()

    assert scene(tmp_path, act) == ([grpc.StatusCode.UNAUTHENTICATED] * 3, 0, False)


@pytest.mark.parametrize("name", ["Enter", "Finish"])
@pytest.mark.parametrize("generation", [0, 2])
def test_who_enters_or_finishes_another_generation_is_answered_at_once_that_it_is_superseded(
    tmp_path, name, generation
):
    async def act(master, stub):
        entry = pb.Entry(ref=A, generation=generation, step=2)
        plan = await getattr(stub, name)(entry, metadata=SECRET, timeout=WAIT_S)
        return plan, master.state.finishing, master.state.members[A].entered

    assert scene(tmp_path, act) == (pb.Plan(superseded=True), False, -1)


def test_what_a_worker_reports_is_entered_counted_and_acknowledged(tmp_path):
    async def act(master, stub):
        master.saving.save_from = 7
        ack = await stub.Report(calls(A)["Report"], metadata=SECRET)
        return ack, master.state.members[A].steps

    assert scene(tmp_path, act) == (pb.Ack(committed=1, save_from=7), 1)


def test_who_enters_brings_along_what_it_had_not_reported_and_its_speed(tmp_path):
    async def act(master, stub):
        master.handle(h.GroupBroken(A, 1, "reset by peer"))
        entries = [
            pb.Entry(ref=ref, generation=2, step=step, rate=rate, progress=pb.Progress(ref=ref, applied=[STEP]))
            for ref, step, rate in ((A, 1, 10.0), (B, 0, 30.0))
        ]
        first, second = await asyncio.gather(*(stub.Enter(entry, metadata=SECRET, timeout=WAIT_S) for entry in entries))
        assert first == second
        logged = [event for event, _ in said(master) if event == "step.applied"]
        return list(first.steps), first.source, list(first.rates), logged, master.progress.logged

    assert scene(tmp_path, act) == ([1, 0], 0, [10.0, 30.0], ["step.applied"], 1)


def test_a_group_that_cannot_be_used_is_said_of_its_own_generation_only(tmp_path):
    async def act(master, stub):
        for generation in (0, 1, 1):
            await stub.ReportBrokenGroup(pb.Fault(ref=A, generation=generation, what="reset by peer"), metadata=SECRET)
        return master.state.generation, master.view.reason

    assert scene(tmp_path, act) == (2, f"{A} cannot use generation 1: reset by peer")


def test_a_departure_a_trial_and_a_vote_reach_the_decision(tmp_path):
    async def act(master, stub):
        await stub.Try(pb.Trial(ref=A, record=3, where="record 3 of x"), metadata=SECRET)
        trying = master.state.members[A].trying, master.state.members[A].trying_where
        vote = pb.Suspicion(ref=A, records=[3, 5], why="odd", where="record 3 of x")
        await stub.Suspect(vote, metadata=SECRET)
        await stub.Leave(pb.Worker(ref=B), metadata=SECRET)
        return trying, master.state.suspects, master.state.members[B].leaving

    trying, suspects, leaving = scene(tmp_path, act)
    assert (trying, suspects, leaving) == ((3, "record 3 of x"), {3: {A: "odd"}, 5: {A: "odd"}}, True)


@pytest.mark.parametrize("pending", [False, True])
def test_an_error_that_every_worker_would_meet_ends_the_job_with_its_words(tmp_path, pending):
    async def act(master, stub):
        await stub.Fail(pb.Fault(ref=A, what="recipe_raised|ValueError: a|b", detail="at x.py:3"), metadata=SECRET)
        return said(master)[-1]

    found = scene(tmp_path, act, prepare=None if pending else at_work)
    assert found == ("job.failed", {"code": "recipe_raised", "why": f"{A}: ValueError: a|b", "hint": "at x.py:3"})


def test_a_worker_that_asks_after_the_end_is_answered_that_the_job_is_finished(tmp_path):
    async def act(master, stub):
        return await stub.Finish(pb.Entry(ref=A, generation=1, step=STEPS), metadata=SECRET, timeout=WAIT_S)

    assert scene(tmp_path, act, prepare=finish) == pb.Plan(finished=True)


def test_a_worker_of_a_job_that_failed_at_its_end_is_not_answered_that_it_is_finished(tmp_path):
    async def act(master, stub):
        master.finishing.clear()
        asked = asyncio.ensure_future(stub.Finish(pb.Entry(ref=A, generation=1, step=STEPS), metadata=SECRET))
        await until_async(lambda: A in master.finishing or asked.done(), "the worker waits at the finish")
        answered = asked.done() or master.finishing[A].done()
        asked.cancel()
        return master.state.phase, answered

    assert scene(tmp_path, act, prepare=lambda master: finish(master, checkpoint_step=1)) == ("failed", False)


def test_who_watches_gets_the_view_in_force_and_each_new_one_once(tmp_path):
    async def act(master, stub):
        watching = stub.Watch(HELLO, metadata=SECRET, timeout=WAIT_S)
        generations = [(await watching.read()).generation]
        for generation in (1, 2):
            master.handle(h.GroupBroken(A, generation, "reset by peer"))
            generations.append((await watching.read()).generation)
        watching.cancel()
        return generations, master.state.members[A].state

    assert scene(tmp_path, act) == ([1, 2, 3], "a:2")


def test_the_first_worker_says_what_the_job_is_and_one_that_sees_other_data_ends_it(tmp_path):
    async def act(master, stub):
        watching = stub.Watch(HELLO, metadata=SECRET)
        await until_async(lambda: A in master.state.members, "the worker is a member")
        facts = [body for kind, body in master.journal.rows() if kind == "FACTS"]
        other = pb.Hello(ref=B, store="b:1", num_records=RECORDS + 1, total_steps=STEPS)
        late = stub.Watch(other, metadata=SECRET)
        await until_async(lambda: master.failed, "the job fails")
        watching.cancel(), late.cancel()
        return facts, said(master)

    facts, told = scene(tmp_path, act, prepare=None)
    assert facts == [{"num_records": RECORDS, "total_steps": STEPS, "shard_records": 0}]
    (failed,) = [fields for name, fields in told if name == "job.failed"]
    assert (failed["code"], failed["why"]) == ("data", "a worker sees 9 records (2 steps), the others 8 (2 steps)")


def test_a_checkpoint_that_was_asked_for_is_wanted_until_one_of_that_step_or_later_is_saved(tmp_path):
    async def act(master, stub):
        asked = [(await stub.Save(pb.Cursor(), metadata=SECRET)).save_from]
        await stub.Report(calls(A)["Report"], metadata=SECRET)
        await stub.Report(pb.Progress(ref=A, step=2, applied=[pb.Applied(step=1, records=4)]), metadata=SECRET)
        asked.append((await stub.Save(pb.Cursor(), metadata=SECRET)).save_from)
        for step in (1, 2):
            await stub.RecordCheckpoint(
                pb.Checkpoint(ref=A, step=step, path=f"/step-{step}", digest="d"), metadata=SECRET
            )
            asked.append((await stub.Report(pb.Progress(ref=A, step=2), metadata=SECRET)).save_from)
        return asked, master.state.checkpoint, [body for kind, body in master.journal.rows() if kind == "CKPT"]

    asked, newest, rows = scene(tmp_path, act)
    assert (asked, newest) == ([1, 2, 2, 0], "/step-2")
    assert rows[-1] == {"step": 2, "path": "/step-2", "digest": "d"}


def test_an_end_that_is_asked_for_ends_the_master(tmp_path):
    async def act(master, stub):
        await stub.Stop(pb.StopRequest(why="trueline halt"), metadata=SECRET)
        return master.stopped.is_set(), said(master)[-1]

    assert scene(tmp_path, act) == (True, ("job.stopping", {"why": "trueline halt"}))
