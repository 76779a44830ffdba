"""The log of a learner: what it has written is in the store, once, whatever the store did meanwhile."""

import threading

from trueline.errors import StorageError
from trueline.train.cluster.store import JobStore
from trueline.train.learners import output
from trueline.train.learners.output import StoredLog


class FailingStore(JobStore):
    """A store that is away as long as `away` is set."""

    away = False

    def append(self, name, data):
        if self.away:
            raise StorageError("the store is away")
        super().append(name, data)


def test_whole_lines_are_appended_and_the_last_one_at_the_end(tmp_path):
    log = StoredLog(JobStore(tmp_path / "m-1"), "learner-1", [tmp_path / "copy/training-log.txt"])
    log.write(b"one\ntw")
    log.flush()
    assert JobStore(tmp_path / "m-1").read_log("logs/learner-1.log") == b"one\n"
    log.write(b"o")
    log.flush(whole=True)
    log.flush(whole=True)
    assert JobStore(tmp_path / "m-1").read_log("logs/learner-1.log") == b"one\ntwo\n"
    assert (tmp_path / "copy/training-log.txt").read_bytes() == b"one\ntwo"


def test_what_came_while_the_store_was_away_follows_up_to_a_bound_that_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "MOST_PENDING", 8)
    store = FailingStore(tmp_path / "m-1")
    log = StoredLog(store, "learner-1")
    store.away = True
    log.write(b"first\n")
    log.flush()
    log.write(b"second\n")
    log.flush()
    store.away = False
    log.flush(whole=True)
    text = store.read_log("logs/learner-1.log").decode()
    assert text == "first\nse\ntrueline: 5 bytes are missing here: the store was away\n"


def test_lines_that_come_during_a_flush_are_neither_lost_nor_repeated(tmp_path):
    store = JobStore(tmp_path / "m-1")
    log, stop = StoredLog(store, "learner-1"), threading.Event()

    def flush():
        while not stop.is_set():
            log.flush()

    threads = [threading.Thread(target=flush) for _ in range(2)]
    for one in threads:
        one.start()
    for number in range(2000):
        log.write(b"%d\n" % number)
    stop.set()
    for one in threads:
        one.join()
    log.flush(whole=True)
    assert store.read_log("logs/learner-1.log").split() == [b"%d" % number for number in range(2000)]
