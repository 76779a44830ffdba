"""Promises of who computes which chunk."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trueline.batch.chunks import MAX_TRIES, Chunks


def test_chunks_are_the_same_records_whoever_asks():
    chunks = Chunks(num_records=10, size=4)
    given = [chunks.give(worker, 0.0) for worker in ("a", "b", "c")]
    assert [(chunk.start, chunk.stop) for chunk in given] == [(0, 4), (4, 8), (8, 10)]
    assert chunks.give("d", 0.0) is None


def test_chunks_that_were_done_before_are_given_to_nobody():
    chunks = Chunks(num_records=10, size=4, replied={0, 2})
    assert chunks.give("a", 0.0) == chunks.chunk(1)
    assert chunks.give("b", 0.0) is None
    chunks.finish("a", 1.0)
    assert chunks.finished


def test_a_worker_that_has_a_chunk_gets_no_second_one():
    chunks = Chunks(num_records=10, size=4)
    assert chunks.give("a", 0.0) is not None
    assert chunks.give("a", 0.0) is None


def test_the_chunk_of_a_dead_worker_is_given_to_another():
    chunks = Chunks(num_records=8, size=4)
    lost = chunks.give("a", 0.0)
    chunks.give("b", 0.0)
    assert chunks.take_back("a") == lost
    assert chunks.give("c", 0.0) == lost
    assert chunks.tries[lost.index] == 1


def test_somebody_idle_takes_over_what_takes_three_times_as_long_and_the_first_answer_counts():
    chunks = Chunks(num_records=8, size=4)
    slow = chunks.give("a", 0.0)
    chunks.give("b", 0.0)
    chunks.finish("b", 2.0)
    assert chunks.give("b", 5.0) is None
    assert chunks.give("b", 7.0) == slow
    assert chunks.finish("b", 8.0) == slow
    assert chunks.finished
    assert chunks.finish("a", 9.0) is None
    assert chunks.take_back("a") is None


def test_the_death_of_one_of_two_that_compute_a_chunk_gives_it_to_nobody_else():
    chunks = Chunks(num_records=8, size=4)
    chunks.give("a", 0.0)
    chunks.give("b", 0.0)
    chunks.finish("b", 0.5)
    chunks.give("b", 5.0)
    chunks.take_back("a")
    assert chunks.give("c", 5.0) is None


def test_who_holds_a_chunk_for_ten_times_the_slowest_is_given_up():
    chunks = Chunks(num_records=12, size=4)
    for worker in ("a", "b"):
        chunks.give(worker, 0.0)
    assert chunks.find_stuck(19.0, patience_s=2.0) == []
    assert chunks.find_stuck(21.0, patience_s=2.0) == ["a", "b"]
    chunks.finish("b", 3.0)
    chunks.give("b", 3.0)
    assert chunks.find_stuck(30.0, patience_s=2.0) == []
    assert chunks.find_stuck(31.0, patience_s=2.0) == ["a"]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(1, 7), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
def test_whoever_dies_every_record_is_answered_exactly_once(num_records, size, happenings):
    chunks, answered, now = Chunks(num_records=num_records, size=size), [], 0.0

    def work(worker, dies):
        chunks.give(worker, now)
        chunk = None
        if dies:
            chunks.take_back(worker)
        elif worker in chunks.held:
            chunk = chunks.finish(worker, now)
        if chunk is not None:
            answered.extend(range(chunk.start, chunk.stop))

    for worker, dies in happenings:
        now += 1.0
        work(worker, dies)
    for _ in range(chunks.total):
        work("d", False)
    assert chunks.finished
    assert sorted(answered) == list(range(num_records))
    assert MAX_TRIES > 1


def test_a_slow_chunk_is_given_to_one_more_worker_once_it_is_known_what_slow_is():
    chunks = Chunks(num_records=6, size=3)
    assert [chunks.give(worker, 0.0).index for worker in "ab"] == [0, 1]
    assert chunks.give("c", 1000.0) is None, "nothing was finished yet: all of them may be long"
    chunks.finish("b", 0.1)
    assert chunks.give("b", 0.5) is None, "a second is not long for anything"
    assert chunks.give("b", 1.0) is None
    assert chunks.give("b", 1.01).index == 0
    assert chunks.give("c", 99.0) is None, "two have it"
    assert not chunks.finished
    assert chunks.finish("b", 2.0).index == 0
    assert chunks.finished
    assert (chunks.take_back("a"), chunks.tries[0]) == (None, 0), "nothing is lost with a second one"


def test_three_times_as_long_as_the_slowest_is_slow_and_ten_times_is_stuck():
    chunks = Chunks(num_records=9, size=3)
    for worker in "abc":
        chunks.give(worker, 0.0)
    assert (chunks.find_stuck(600.0, patience_s=60.0), chunks.find_stuck(600.1, patience_s=60.0)) == (
        [],
        ["a", "b", "c"],
    )
    chunks.finish("a", 0.2)
    assert (chunks.find_stuck(60.0, patience_s=60.0), chunks.find_stuck(60.1, patience_s=60.0)) == ([], ["b", "c"])
    chunks.finish("b", 10.0)
    assert (chunks.find_stuck(100.0, patience_s=60.0), chunks.find_stuck(100.1, patience_s=60.0)) == ([], ["c"])
    assert chunks.give("a", 30.0) is None
    assert chunks.give("a", 30.1).index == 2


def test_a_chunk_that_two_had_and_one_lost_stays_with_the_other():
    chunks = Chunks(num_records=6, size=3)
    for worker in "ab":
        chunks.give(worker, 0.0)
    chunks.finish("b", 0.1)
    chunks.give("b", 5.0)
    assert chunks.take_back("a").index == 0
    assert (chunks.tries[0], chunks.give("c", 6.0)) == (1, None)
    assert chunks.take_back("b").index == 0
    assert chunks.give("c", 6.0).index == 0
