"""Metrics from lines of a log, from records and from TensorBoard's event files."""

import json

from hypothesis import given
from hypothesis import strategies as st

from trueline.registry.event_file import EventEncoder
from trueline.train.learners.curves import MetricSource
from trueline.train.learners.manifest.read import MetricsSpec
from trueline.train.learners.metrics.extract import MetricExtractor, MetricGroup, MetricRecord, parse_emetrics
from trueline.train.learners.metrics.tensorboard import EventFolder, parse_event

LOSS = MetricGroup(
    name="train",
    regex=r"epoch %{INT:epoch} loss %{FLOAT:loss}",
    scalars={"loss": ("FLOAT", "$loss"), "kind": ("STRING", "sgd")},
    etimes={"iteration": ("INT", "$epoch")},
)


def extract(lines: str, group: MetricGroup = LOSS, lookahead: int = 4) -> list[MetricRecord]:
    extractor = MetricExtractor([group], lookahead)
    return [record for line in lines.splitlines(keepends=True) for record in extractor.read(line)]


def test_each_line_that_matches_is_a_record_of_the_numbers_it_names():
    found = extract("epoch 0 loss 1.5\nnoise\nepoch 1 loss -2e-3\n")
    assert found == [MetricRecord("train", 0, {"loss": 1.5}), MetricRecord("train", 1, {"loss": -0.002})]


def test_no_record_is_lost_when_two_lines_of_a_window_match():
    assert [one.step for one in extract("rank 0\nepoch 0 loss 3\nepoch 1 loss 2\nepoch 2 loss 1\n", lookahead=2)] == [
        0,
        1,
        2,
    ]


def test_a_record_may_span_as_many_lines_as_the_lookahead():
    group = MetricGroup(
        name="test", regex=r"Iteration %{INT:step}.*accuracy = %{FLOAT:accuracy}",
        scalars={"accuracy": ("FLOAT", "$accuracy")}, etimes={"iteration": ("INT", "$step")},
    )  # fmt: skip
    text = "Iteration 100, Testing net\nmore\naccuracy = 0.75\n"
    assert extract(text, group, lookahead=3) == [MetricRecord("test", 100, {"accuracy": 0.75})]
    assert extract(text, group, lookahead=2) == []


def test_a_line_of_an_emetrics_file_is_a_record():
    line = json.dumps({
        "meta": {"training_id": "x"}, "grouplabel": "test", "etimes": {"iteration": {"type": 1, "value": "12"}},
        "values": {"accuracy": {"type": 2, "value": "0.5"}, "name": {"type": 0, "value": "x"}},
    })  # fmt: skip
    assert parse_emetrics(line) == MetricRecord("test", 12, {"accuracy": 0.5})
    assert parse_emetrics("torn {") is None
    assert parse_emetrics("[1]") is None


def test_scalars_of_an_event_file_are_read_once_as_the_file_grows(tmp_path):
    encoder = EventEncoder({})
    first = encoder.encode([("loss", 0.5, 1000, 1)])
    second = encoder.encode([("loss", 0.25, 2000, 2)])
    path = tmp_path / "train" / "events.out.tfevents.1.host"
    path.parent.mkdir()
    folder = EventFolder(tmp_path)
    assert list(folder.read()) == []
    path.write_bytes(first + second[:-3])  # the last record is being written
    assert [(run, one.tag, one.step, one.value) for run, one in folder.read()] == [("train", "loss", 1, 0.5)]
    path.write_bytes(first + second)
    assert [(one.step, one.value) for _, one in folder.read()] == [(2, 0.25)]
    assert list(folder.read()) == []


def test_scalars_of_torchs_writer_are_read(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("accuracy", 0.75, 7)
    assert [(run, one) for run, one in EventFolder(tmp_path).read()] == [("", ("accuracy", 7, 0.75))]


@given(st.binary(max_size=64))
def test_bytes_that_are_no_event_are_refused_and_never_hang(data):
    try:
        list(parse_event(data))
    except ValueError:
        return


def test_a_source_counts_the_records_that_have_no_time_and_joins_torn_lines(tmp_path):
    sent = []
    group = MetricGroup(name="g", regex="loss %{FLOAT:loss}", scalars={"loss": ("FLOAT", "$loss")})
    spec = MetricsSpec(type="regex_extractor", groups=(group,))
    source = MetricSource(spec, {"LOG_DIR": str(tmp_path)}, sent.append, alone=True)
    source.hear(b"loss 1\nlo")
    source.hear(b"ss 2\n")
    assert [(one.step, one.scalars) for one in sent] == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]


def test_a_source_follows_a_file_of_records_in_the_folder_of_the_logs(tmp_path):
    sent = []
    source = MetricSource(MetricsSpec(type="emetrics_file"), {"LOG_DIR": str(tmp_path)}, sent.append, alone=True)
    source.poll()
    record = {"grouplabel": "a", "etimes": {"step": {"value": "3"}}, "values": {"x": {"value": "1"}}}
    (tmp_path / "evaluation-metrics.txt").write_text(json.dumps(record) + "\n{torn")
    source.poll()
    source.poll()
    assert [(one.group, one.step) for one in sent] == [("a", 3)]


def test_a_record_within_another_one_is_found_and_both_stay():
    outer = MetricGroup(
        name="test", regex=r"Iteration %{INT:step}.*?accuracy %{FLOAT:accuracy}",
        scalars={"accuracy": ("FLOAT", "$accuracy")}, etimes={"iteration": ("INT", "$step")},
    )  # fmt: skip
    extractor = MetricExtractor([outer, LOSS], 4)
    lines = ["Iteration 5\n", "epoch 1 loss 2\n", "accuracy 0.5\n"]
    assert [one.group for line in lines for one in extractor.read(line)] == ["train", "test"]
