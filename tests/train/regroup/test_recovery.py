"""Promises of how members are brought to the state that is furthest ahead; what a broadcast brings is given."""

import time
from types import SimpleNamespace

import pytest
import torch

from trueline.checkpoint import checkpoint
from trueline.errors import CheckpointError
from trueline.train.faults import Faults
from trueline.train.regroup import recovery, state_transfer
from trueline.train.regroup.recovery import Recovery
from trueline.train.step.ledger import Ledger, StepAccount
from trueline.train.step.replica import Reduced
from trueline.wire import train_pb2 as pb

ROOM = {"w": torch.zeros(1)}
BROADCAST = {"name": "of the source"}


class Replica:
    """A replica as far as healing knows it: its state is a name."""

    def __init__(self, *, large=False, scaler=False):
        self.model = SimpleNamespace(
            parameters=lambda: [SimpleNamespace(nbytes=state_transfer.STREAM_BYTES if large else 4)],
            state_dict=lambda: ROOM,
        )
        self.optimizer_step = SimpleNamespace(scaler=SimpleNamespace(is_enabled=lambda: scaler))
        self.ledger = Ledger(num_records=4)
        self.taken = []

    def state(self):
        return {"name": "mine"}

    def snapshot(self, *, readers, patience):
        return {"name": "a copy of mine", "readers": readers}

    def restore(self, state):
        self.taken.append(state["name"])

    def keep(self, account, *, copied):
        self.copied = copied
        last = torch.tensor([1.0, torch.inf]) if account.loss_sum == 100.0 else torch.ones(2)
        return Reduced(account, torch.zeros(0), [None, last])


class Member:
    """One member of a group whose plan is given: what it takes, what it sends, what it offers and fetches."""

    def __init__(self, monkeypatch, steps, rank, *, source=0, checkpoint="", rates=(), at="there:1", **kind):
        self.replica, self.sent, self.offered, self.asked, self.rooms = Replica(**kind), [], [], [], []
        states = at if isinstance(at, list) else [at] * len(steps)
        plan = pb.Plan(source=source, steps=steps, checkpoint=checkpoint, states=states, rates=rates)
        self.behind = None
        self.group = SimpleNamespace(link=SimpleNamespace(), plan=plan, rank=rank, size=len(steps), generation=3,
                                       process_group=None,
                                       start_shares=lambda behind: setattr(self, "behind", behind),
                                       is_overtaken=lambda: False)  # fmt: skip
        self.withdrawn = 0

        def broadcast(group, state, *, source, room):
            self.rooms += [] if room is None else [room]
            self.sent.append((None if state is None else state["name"], source))
            return state if room is None else BROADCAST

        def fetch(address, generation, room):
            self.asked.append((address, generation))
            self.rooms.append(room)
            self.joined = []
            return SimpleNamespace(state=None, trouble="", over=False, began=time.monotonic(), moved=5, total=9,
                                   join=self.joined.append)  # fmt: skip

        monkeypatch.setattr(state_transfer, "broadcast", broadcast)
        monkeypatch.setattr(state_transfer, "Fetch", fetch)
        self.recovery = Recovery(self.replica, self.group, Faults((), "worker-0.0"), global_batch=64)
        self.recovery._offer.close()
        self.recovery._offer = SimpleNamespace(publish=lambda *what: self.offered.append(what), withdraw=self._withdraw)

    def _withdraw(self):
        self.withdrawn += 1

    def heal(self):
        self.recovery.heal()
        return self


@pytest.mark.parametrize(
    ("steps", "rank", "taken", "sent"),
    [
        ([5, 5], 0, [], []),
        ([5, 4], 0, [], [("mine", 0)]),
        ([5, 4], 1, ["of the source"], [(None, 0)]),
        ([5, 5, 4], 1, [], [(None, 0)]),
        ([5, 1], 1, ["of the source"], [(None, 0)]),
        ([5, -1], 1, ["of the source"], [(None, 0)]),
        ([-1, -1], 0, [], [("mine", 0)]),
        ([-1, -1], 1, ["of the source"], [(None, 0)]),
        ([0, 0], 1, [], []),
        ([0, -1], 1, ["of the source"], [(None, 0)]),
    ],
    ids=str,
)
def test_whoever_is_behind_by_a_step_or_more_takes_the_state_of_the_source_and_nobody_else_does(
    monkeypatch, steps, rank, taken, sent
):
    member = Member(monkeypatch, steps, rank).heal()
    assert (member.replica.taken, member.sent) == (taken, sent)
    assert (member.recovery.has_state, member.recovery.holds) == (True, True)
    assert member.behind == [False] * len(steps), "the state is there: all have a part in the next step"


@pytest.mark.parametrize(("rank", "sent"), [(0, [(None, 1)]), (1, [("mine", 1)])])
def test_the_source_is_the_member_that_the_plan_names(monkeypatch, rank, sent):
    member = Member(monkeypatch, [4, 5], rank, source=1).heal()
    assert member.sent == sent
    assert member.replica.taken == (["of the source"] if rank == 0 else [])


def checkpoints(folder, *steps):
    for step in steps:
        checkpoint.write(folder, step=step, state={"name": f"of step {step}"}, facts={})
    return str(folder / checkpoint.folder_name(steps[-1]))


@pytest.mark.parametrize("large", [False, True])
def test_where_all_died_the_source_takes_the_checkpoint_and_the_others_take_it_from_the_source(
    monkeypatch, tmp_path, large
):
    newest = checkpoints(tmp_path, 4, 8)
    source = Member(monkeypatch, [-1, -1], 0, checkpoint=newest, large=large).heal()
    assert (source.replica.taken, source.sent) == (["of step 8"], [("mine", 0)])
    other = Member(monkeypatch, [-1, -1], 1, checkpoint=newest, large=large).heal()
    assert (other.replica.taken, other.sent) == (["of the source"], [(None, 0)])
    assert (source.offered, other.asked) == ([], []), "nobody could go on anyway"


def test_a_torn_checkpoint_gives_way_to_an_older_one_and_the_only_one_to_its_error(monkeypatch, tmp_path):
    newest = checkpoints(tmp_path, 4, 8)
    manifest = tmp_path / "step-00000008" / checkpoint.MANIFEST
    manifest.write_text(manifest.read_text()[:-9])
    assert Member(monkeypatch, [-1, -1], 0, checkpoint=newest).heal().replica.taken == ["of step 4"]
    (tmp_path / "step-00000004" / checkpoint.MANIFEST).unlink()
    with pytest.raises(CheckpointError):
        Member(monkeypatch, [-1, -1], 0, checkpoint=newest).heal()


def test_a_large_state_is_offered_by_its_source_and_fetched_beside_the_steps(monkeypatch):
    source, joiner, third = (Member(monkeypatch, [5, -1, 5], rank, large=True).heal() for rank in range(3))
    assert [member.sent for member in (source, joiner, third)] == [[], [], []]
    assert (source.offered, joiner.offered, third.offered) == ([(3, {"name": "a copy of mine", "readers": 1})], [], [])
    assert (source.asked, joiner.asked, third.asked) == ([], [("there:1", 3)], [])
    assert [(member.recovery.has_state, member.recovery.holds) for member in (source, joiner, third)] == [
        (True, True), (False, False), (True, True),
    ]  # fmt: skip
    assert joiner.recovery.observed == 5, "it stands at the step of the source"
    assert joiner.behind == [False, True, False], "it has no part in the steps yet"


@pytest.mark.parametrize("how", [{"steps": [0, -1]}, {"steps": [-1, -1]}], ids=str)
def test_a_large_state_is_broadcast_where_the_others_have_no_step_to_go_on_with(monkeypatch, how):
    member = Member(monkeypatch, how.pop("steps"), 1, large=True, **how).heal()
    assert (member.replica.taken, member.asked) == (["of the source"], [])


@pytest.mark.parametrize(
    ("steps", "rates", "streamed", "at"),
    [
        ([5, -1], [64.0, -50.0], False, "there:1"),  # a step alone takes a second, the state a thirtieth of one
        ([5, -1], [3200.0, -50.0], True, "there:1"),
        ([5, -1], [3200.0, -50.0], False, "127.0.0.1:1"),  # on one machine it is read faster than it is sent
        ([5, -1], [6400.0, -50.0], True, "127.0.0.1:1"),
        ([5, -1], [0.0, 0.0], True, "127.0.0.1:1"),
        ([5, -1, 5], [64.0, -50.0, 64.0], True, "127.0.0.1:1"),  # the others continue in the meantime
    ],
)
def test_the_only_holder_of_a_large_state_sends_it_at_once_where_that_is_shorter_than_a_step(
    monkeypatch, steps, rates, streamed, at
):
    for rank in range(len(steps)):
        member = Member(monkeypatch, steps, rank, large=True, rates=rates, at=at).heal()
        assert (len(member.offered) + len(member.asked) > 0, len(member.sent) == 0) == (streamed and rank < 2, streamed)
        assert member.recovery.holds == (not streamed or rank != 1)


def test_who_held_a_state_and_is_one_step_behind_a_large_one_still_says_so_when_the_group_breaks(monkeypatch):
    member = Member(monkeypatch, [5, 4], 1, large=True)
    member.recovery.has_state = True
    member.heal()
    assert (member.recovery.has_state, member.recovery.holds) == (True, False)
    member.recovery.forget()
    assert member.recovery.holds, "with what it held before"


def observing(monkeypatch, **kind):
    return Member(monkeypatch, [5, -1], 1, large=True, **kind).heal()


def account(loss):
    return StepAccount(loss_sum=loss)


def test_an_observer_stands_at_the_step_that_the_others_have_applied(monkeypatch):
    healing = observing(monkeypatch).recovery
    for loss, at in ((1.0, 6), (float("nan"), 6), (float("inf"), 6), (2.0, 7)):
        healing.keep(account(loss))
        assert healing.observed == at
    scaled = observing(monkeypatch)
    scaled.replica.optimizer_step.scaler.is_enabled = lambda: True
    for loss, at in ((1.0, 6), (100.0, 6), (2.0, 7)):  # at 100 the gradients have overflowed
        scaled.recovery.keep(account(loss))
        assert scaled.recovery.observed == at


def test_an_observer_that_keeps_eight_steps_lets_the_others_wait(monkeypatch):
    healing = observing(monkeypatch).recovery
    crowded = []
    for _ in range(8):
        healing.keep(account(1.0))
        crowded.append(healing.crowded)
    assert crowded == [False] * 7 + [True]


def test_a_state_that_has_arrived_is_taken_with_what_is_to_be_applied_to_it_in_order(monkeypatch):
    member = observing(monkeypatch)
    healing = member.recovery
    healing.keep(account(1.0))
    healing.keep_evaluation([0.5])
    healing.keep(account(2.0))
    assert not healing.has_arrived()
    healing._fetch = SimpleNamespace(state={"name": "fetched"}, trouble="", over=True)
    assert healing.has_arrived()
    missed = healing.take()
    assert [one if isinstance(one, list) else one.account.loss_sum for one in missed] == [1.0, [0.5], 2.0]
    assert (member.replica.taken, healing.has_state, healing.holds, healing.has_arrived()) == (
        ["fetched"],
        True,
        True,
        False,
    )
    assert not healing.crowded
    assert healing._kept == []


def test_a_state_that_did_not_come_is_the_failure_of_a_peer(monkeypatch):
    member = observing(monkeypatch)
    member.recovery._fetch = SimpleNamespace(state=None, trouble="reset by peer", over=True)
    with pytest.raises(RuntimeError, match="ProcessGroup: reset by peer"):
        member.recovery.take()
    assert (member.replica.taken, member.recovery.has_state) == ([], False)


def test_leaving_a_group_voids_what_was_on_its_way(monkeypatch):
    member = observing(monkeypatch)
    member.recovery.keep(account(1.0))
    member.recovery.forget()
    assert (member.withdrawn, member.recovery.has_arrived(), member.recovery._kept) == (1, False, [])
    member.recovery.wait()  # there is nothing to wait for
    assert member.recovery._fetch is None


@pytest.mark.parametrize(("holders", "withdrawn"), [(1, 0), (2, 1)])
def test_the_copy_for_joiners_goes_when_all_members_hold_the_state(monkeypatch, holders, withdrawn):
    member = Member(monkeypatch, [5, -1], 0, large=True).heal()
    member.recovery.count_holders(holders)
    assert member.withdrawn == withdrawn


def evaluated(member, *steps):
    member.replica.ledger.steps = 5
    member.replica.ledger.evaluations = [{"step": step} for step in steps]
    return member


def test_an_evaluation_of_the_step_at_hand_is_made_again_by_all_who_hold_the_state(monkeypatch):
    member = evaluated(Member(monkeypatch, [5, 5], 0), 3, 5).heal()
    assert [one["step"] for one in member.replica.ledger.evaluations] == [3]
    assert len(evaluated(Member(monkeypatch, [5, 5], 0), 3, 4).heal().replica.ledger.evaluations) == 2
    observer = evaluated(Member(monkeypatch, [5, -1], 1, large=True), 3, 5).heal()
    assert len(observer.replica.ledger.evaluations) == 2, "what it holds is of another step"


def test_all_members_take_the_scale_of_the_source(monkeypatch):
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    scaler.scale(torch.zeros(()))
    scaler.update(new_scale=128.0)
    member = Member(monkeypatch, [5, 5], 1)
    member.replica.optimizer_step.scaler = scaler

    def broadcast(row, source, *, async_op):
        assert (source, async_op, row[0].item()) == (0, True, 128.0)
        row.copy_(torch.tensor([512.0, 3.0]))

    monkeypatch.setattr("trueline.train.regroup.recovery.dist.broadcast", broadcast)
    member.group.process_group = SimpleNamespace(wait=lambda work: None)
    member.heal()
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (512.0, 3)


def test_only_a_worker_without_a_state_receives_into_its_own_parameters(monkeypatch):
    for large, steps in ((True, [5, -1]), (False, [0, -1])):
        (room,) = Member(monkeypatch, steps, 1, large=large).heal().rooms
        assert room._model == ROOM
        holder = Member(monkeypatch, [5, 4], 1, large=large)
        holder.recovery.has_state = True
        (room,) = holder.heal().rooms
        assert room._model == {}, "a transfer that breaks off must not tear what it holds"


def test_sums_are_kept_without_a_copy_where_the_state_has_arrived_by_then(monkeypatch):
    member = observing(monkeypatch)
    member.recovery.keep(account(1.0))
    assert (member.replica.copied, len(member.joined)) == (True, 1), "it has waited for a moment"
    member.recovery._fetch.over = True
    member.recovery.keep(account(1.0))
    assert not member.replica.copied


def test_an_observer_waits_for_half_of_the_time_that_the_transfer_has_lasted_and_not_in_a_cut_group(monkeypatch):
    member, now = observing(monkeypatch), [0.0]
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now[0])
    member.recovery._fetch.began = -4.0
    member.recovery.keep(account(1.0))
    (given_up,) = member.joined
    for at, over in ((1.9, False), (2.1, True)):
        now[0] = at
        assert given_up() is over
    now[0], member.group.is_overtaken = 0.0, lambda: True
    assert given_up()


def test_a_large_models_observer_keeps_two_steps_and_then_lets_the_others_wait(monkeypatch):
    healing, crowded = observing(monkeypatch).recovery, []
    monkeypatch.setattr(recovery, "KEPT_BYTES", 7)
    for _ in range(2):
        healing.keep(account(1.0))
        crowded.append(healing.crowded)
    assert crowded == [False, True]


def test_a_transfer_is_told_with_its_bytes_by_both_ends(monkeypatch):
    member = observing(monkeypatch)
    assert member.group.link.transfer() == (5, 9, False)
    member.recovery._offer.progress, member.recovery._fetch.moved = (0, 0), 9
    assert member.group.link.transfer()[:2] == (0, 0), "a member that has all bytes is not judged by their progress"
    member.recovery.forget()
    member.recovery._offer.progress = (3, 8)
    assert member.group.link.transfer() == (3, 8, True)


@pytest.mark.parametrize(
    ("rank", "asked", "readers"), [(0, [], 1), (1, [], 1), (2, [("b:1", 3)], 0), (3, [("a:1", 3)], 0)], ids=str
)
def test_a_state_comes_from_a_member_of_the_same_host_where_there_is_one_that_has_it(monkeypatch, rank, asked, readers):
    member = Member(monkeypatch, [5, 5, -1, -1], rank, large=True, at=["a:1", "b:1", "b:2", "c:1"]).heal()
    assert member.asked == asked
    assert [what["readers"] for _, what in member.offered] == ([readers] if readers else [])
