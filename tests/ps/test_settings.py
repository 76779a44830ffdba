"""A job with parameter servers refuses the settings that it does not have, by name."""

import pytest

from trueline.errors import UsageError
from trueline.train.settings import JobSettings, apply_overrides


def settings_of(**wanted):
    job = JobSettings(name="job", recipe="r.py", recipe_digest="", workers=2)
    return apply_overrides(job, wanted, cores=2)


@pytest.mark.parametrize(
    "wanted",
    [{"bitwise": True}, {"autoscale": True}, {"ema": 0.9}, {"backend": "nccl"}, {"precision": "bf16"}, {"patience": 2},
     {"readers": 2}],
    ids=lambda wanted: next(iter(wanted)),
)  # fmt: skip
def test_what_servers_do_not_have_is_refused_by_its_option(wanted):
    (name,) = wanted
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} does not apply to --strategy ps"):
        settings_of(strategy="ps", **wanted)


@pytest.mark.parametrize(
    "wanted", [{"servers": 2}, {"staleness": 1}, {"half_rows": True}, {"tables_above": 9}, {"hot_rows": 9}],
    ids=lambda wanted: next(iter(wanted)),
)  # fmt: skip
def test_what_only_servers_have_is_refused_without_them(wanted):
    with pytest.raises(UsageError, match="does not apply to --strategy allreduce"):
        settings_of(**wanted)


@pytest.mark.parametrize("wanted", [{"staleness": 1}, {"bitwise": True}, {"compile": True}],
                         ids=lambda wanted: next(iter(wanted)))  # fmt: skip
def test_what_hybrid_jobs_do_not_have_is_refused_by_its_option(wanted):
    (name,) = wanted
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} does not apply to --strategy hybrid"):
        settings_of(strategy="hybrid", servers=2, half_rows=True, **wanted)


def test_hybrid_jobs_have_no_scaled_loss_and_publishing_names_both_of_its_options():
    assert settings_of(strategy="hybrid", precision="bf16", evaluate_every=5).precision == "bf16"
    with pytest.raises(UsageError, match="would get the scaled gradients"):
        settings_of(strategy="hybrid", precision="fp16")
    for wanted in ({"publish_every": 10.0}, {"publish_to": "models/"}):
        with pytest.raises(UsageError, match="--publish-every and --publish-to belong together"):
            settings_of(strategy="ps", **wanted)


def test_tables_of_a_hybrid_job_on_several_hosts_need_a_folder_that_these_see():
    wanted = {"strategy": "hybrid", "listen": "127.0.0.1:0"}
    assert settings_of(checkpoints="/shared/run", **wanted).listen
    with pytest.raises(UsageError, match="--checkpoints is s3://bucket/run, expected a folder"):
        settings_of(checkpoints="s3://bucket/run", **wanted)
    assert settings_of(strategy="ps", listen="127.0.0.1:0", checkpoints="s3://bucket/run").listen


def test_a_model_store_is_a_folder():
    with pytest.raises(UsageError, match="--publish-to is s3://models, expected a folder"):
        settings_of(strategy="ps", publish_every=10.0, publish_to="s3://models")


def test_out_of_range_is_named_with_the_range():
    with pytest.raises(UsageError, match="servers is 0, expected at least 1"):
        settings_of(strategy="ps", servers=0)
    with pytest.raises(UsageError, match="staleness is -2, expected at least -1"):
        settings_of(strategy="ps", staleness=-2)


def test_copies_of_rows_need_the_bound_that_they_have():
    assert settings_of(strategy="ps", hot_rows=100, staleness=3).hot_rows == 100
    for staleness, why in ((-1, "not given"), (0, "synchronous")):
        with pytest.raises(UsageError, match=f"--hot-rows keeps rows .*{why}"):
            settings_of(strategy="ps", hot_rows=100, staleness=staleness)
