"""Membership is invisible to the mathematics: jobs that differ in who trained what end with the same weights."""

import pytest
import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.train.api import train
from trueline.train.settings import Fault
from trueline.train.step.ledger import Ledger
from worlds import TESTS
from worlds.jobs import TINY, JobGate

pytestmark = pytest.mark.jobs

LIVELY = TESTS / "train" / "recipes" / "lively.py"
LARGE = TESTS / "train" / "recipes" / "large.py"
KILLS = [Fault(step=3, slot=0, phase="backward"), Fault(step=7, slot=1, phase="applied")]
"""For three workers: the third keeps the state even when no replacement has started between the two kills."""


def final(tmp_path, recipe=LIVELY, **options) -> dict:
    folder = tmp_path / f"job-{len(list(tmp_path.iterdir()))}"
    result = train(recipe, job_dir=folder, **options)
    assert result.summary.exactly_once
    return checkpoint.read(result.checkpoint).state


def apart(one: dict, other: dict) -> float:
    """Greatest relative difference of two models' weights and buffers."""
    assert one["model"].keys() == other["model"].keys()
    found = 0.0
    for name, value in one["model"].items():
        wide, its = value.double(), other["model"][name].double()
        found = max(found, ((wide - its).norm() / wide.norm().clamp_min(1e-12)).item())
    return found


def same_bits(one: dict, other: dict) -> bool:
    return all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())


def test_normalization_dropout_and_augmentation_do_not_depend_on_who_trains(tmp_path):
    alone = final(tmp_path, workers=1)
    assert apart(alone, final(tmp_path, workers=3)) < 1e-4
    assert apart(alone, final(tmp_path, workers=3, faults=KILLS)) < 1e-4
    assert alone["model"]["first.1.num_batches_tracked"] == 15  # a step is one batch, however many shards it has


def test_a_sync_batch_norm_has_the_statistics_of_its_shard_whoever_trains_it(tmp_path, monkeypatch):
    plain = final(tmp_path, workers=2)
    monkeypatch.setenv("LIVELY_SYNCED", "1")
    assert apart(plain, final(tmp_path, workers=3)) < 1e-4


def test_bit_for_bit_weights_are_those_of_any_number_of_workers_and_of_a_kill_storm(tmp_path):
    options = {"bitwise": True, "ema": 0.9, "clip_norm": 0.5}
    alone = final(tmp_path, workers=1, **options)
    two = final(tmp_path, workers=2, **options)
    storm = final(tmp_path, workers=3, faults=KILLS, **options)
    assert same_bits(alone, two)
    assert same_bits(alone, storm)
    for name, value in alone["ema"].items():
        assert torch.equal(value, storm["ema"][name])
        assert not torch.equal(value, alone["model"][name])


def test_bit_for_bit_weights_survive_the_death_of_everybody(tmp_path):
    options = {"bitwise": True, "checkpoint_every": 2}
    deaths = [Fault(step=7, slot=slot, phase="before") for slot in range(2)]
    assert same_bits(final(tmp_path, workers=1, **options), final(tmp_path, workers=2, faults=deaths, **options))


def test_bit_for_bit_works_without_anything_that_needs_shards(tmp_path):
    assert same_bits(final(tmp_path, TINY, workers=1, bitwise=True), final(tmp_path, TINY, workers="2:3", bitwise=True))


def test_micro_batches_change_no_step_of_a_model_that_looks_at_one_record_at_a_time(tmp_path):
    whole = final(tmp_path, TINY, workers=2)
    assert apart(whole, final(tmp_path, TINY, workers=3, micro_batch=4)) < 1e-12


def test_half_precision_with_a_scaler_applies_every_record_though_steps_overflow(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVELY_LOUD", "1000")
    heard = []
    with events.listening(lambda name, fields: heard.append((name, fields))):
        state = final(tmp_path, workers=2, precision="fp16")
    assert sum(fields.get("redone", 0) for name, fields in heard if name == "step.applied") > 0
    assert state["scaler"]["scale"] < 65536.0
    assert apart(state, final(tmp_path, workers=2)) < 0.2


def test_autocast_to_bf16_changes_the_weights_a_little(tmp_path):
    assert 0 < apart(final(tmp_path, workers=2), final(tmp_path, workers=2, precision="bf16")) < 0.2


def test_a_compiled_model_does_not_depend_on_who_trains_either(tmp_path):
    assert apart(final(tmp_path, workers=1, compile=True), final(tmp_path, workers=2, compile=True)) < 1e-4


@pytest.mark.parametrize("how", ["plain", pytest.param("reentrant", marks=pytest.mark.long)])
def test_activation_checkpointing_draws_the_same_masks_and_counts_a_batch_once(tmp_path, monkeypatch, how):
    plain = final(tmp_path, workers=2)
    monkeypatch.setenv("LIVELY_CHECKPOINTED", how)
    assert apart(plain, final(tmp_path, workers=3)) < 1e-4


def test_a_large_state_is_streamed_to_who_is_behind_while_the_others_go_on(tmp_path, monkeypatch):
    faults = [Fault(step=9, slot=1, phase="backward"), Fault(step=25, slot=0, phase="allreduced")]
    gate = JobGate(tmp_path, monkeypatch)
    with events.listening(gate.open_at(("worker.joined", "worker-0.1"), ("worker.joined", "worker-1.1"))):
        storm = final(tmp_path, LARGE, workers=3, faults=faults, epochs=20)
    logs = "".join(path.read_text() for path in tmp_path.glob("job-*/logs/worker-*.log"))
    assert "worker.caught_up" in logs
    assert storm["model"]["seen"].round(decimals=6).unique().tolist() == [20.0]
    assert apart(storm, final(tmp_path, LARGE, workers=1, epochs=20)) < 1e-9


def test_evaluations_find_the_best_stop_early_and_are_the_same_for_any_number_of_workers(tmp_path):
    options = {"evaluate_every": 2, "monitor": "-accuracy", "patience": 2, "epochs": 20, "bitwise": True}
    one = final(tmp_path, workers=1, **options)
    two = final(tmp_path, workers=3, faults=[Fault(step=4, slot=1, phase="evaluating")], **options)
    ours, theirs = (Ledger.from_tree(left["ledger"]).evaluations for left in (one, two))
    assert ours == theirs
    assert ours[-1]["stop"]
    assert one["ledger"]["steps"] < 100
    assert any(found["best"] for found in ours)
