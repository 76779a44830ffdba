"""Manifests of Fabric for Deep Learning on real engines: learners, their groups over gloo, deaths, halt and resume."""

import os
import signal
import zipfile

import pytest

from trueline.registry import event_file
from trueline.train.learners.metrics.tensorboard import EventFolder
from worlds import slurm as slurms
from worlds.engine_clients import *  # noqa: F403 - the fixture `engine` and what it needs; its client is another one
from worlds.learners import GLOO, LearnerClient
from worlds.waiting import until

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(900)]  # a real cluster takes its time to start


@pytest.fixture
def client(tmp_path):
    made = LearnerClient(tmp_path)
    yield made
    made.close()


@on_each_engine("local", "podman", "slurm")  # noqa: F405
@pytest.mark.parametrize("rank", ["number - 1", "0", "(number - 1) * 7"])
def test_learners_meet_in_a_group_whatever_their_ranks_and_end_with_the_first_one(rank, engine, client):
    client.submit_command(f'python train.py "{rank}"', on=engine, learners=2, train_py=GLOO)
    for number in (1, 2):
        client.wait_output(number, f"rank {number - 1} of 2, sum 1")
    assert client.read()["state"] == "running"
    client.open_gate()
    end = client.wait_end()
    assert (end.outcome, end.why) == ("finished", "")
    corrected = [fields for name, fields, _ in client.events() if name == "group.corrected"]
    assert bool(corrected) == (rank != "number - 1")
    client.expect_nothing_left()
    assert "[2] rank 1 of 2, sum 1" in client.run("logs", client.job)
    assert client.run("logs", client.job, "--worker", "learner-1").startswith("rank 0 of 2")


@on_each_engine("local", "podman", "slurm")  # noqa: F405
def test_a_death_starts_all_again_without_a_stale_file_and_no_process_stays(engine, client):
    client.submit_command('python train.py "0"', on=engine, learners=2, train_py=GLOO)
    client.wait_output(1, "rank 0 of 2")
    client.wait_output(2, "rank 1 of 2")
    client.kill_script(2)
    client.wait_output(1, "rank 0 of 2", count=2)
    client.wait_output(2, "rank 1 of 2", count=2)
    why = next(fields["why"] for name, fields, _ in client.events() if name == "learners.restarting")
    assert why.startswith("learner 2: ")
    client.open_gate()
    assert client.wait_end().outcome == "finished"
    client.expect_nothing_left()


@on_each_engine("local", "podman", "slurm")  # noqa: F405
def test_a_host_that_is_lost_is_submitted_again_and_all_start_again(engine, client):
    client.submit_command("echo began $LEARNER_ID; sleep 1000", on=engine, learners=2)
    for number in (1, 2):
        client.wait_output(number, f"began {number}")
    client.kill("learner-2")
    client.wait_output(2, "began 2", count=2)
    client.wait_output(1, "began 1", count=2)
    assert client.wait("host.submitted", host="learner-2-2")
    client.run("halt", client.job)
    client.expect_nothing_left()


@on_each_engine("local", "podman", "slurm")  # noqa: F405
def test_a_halted_job_resumes_on_its_folders_with_its_id(engine, client):
    """SIGTERM ends the shell around the script at once, and a checkpoint takes its time: here, several forks."""
    keep = (
        'trap "for i in 1 2 3; do /bin/true; done; echo kept > $CHECKPOINT_DIR/$LEARNER_ID; exit 0" TERM\n'
        "if [ -e $CHECKPOINT_DIR/$LEARNER_ID ]; then echo again $TRAINING_ID; cat $RESULT_DIR/first; exit 0; fi\n"
        "echo first > $RESULT_DIR/first; echo began; sleep 1000 & wait\n"
    )
    job = client.submit_command("bash train.sh", on=engine, learners=2, train_sh=keep)
    for number in (1, 2):
        client.wait_output(number, "began")
    assert "RESULT_DIR and CHECKPOINT_DIR stay" in client.run("halt", job)
    assert client.read()["state"] == "stopped"
    client.expect_nothing_left()
    client.run("resume", job, *(["--on", "local"] if engine == "slurm" else []))
    assert client.wait_end().outcome == "finished"
    assert f"again {client.unique}\nfirst\n" in client.read_output(1)
    assert "has finished already" in client.run("resume", job, code=2)


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_two_manifests_that_each_hold_half_of_a_cluster_do_not_wait_for_each_other_forever(slurm_client, slurm):
    """Both heads are in the queue before either can submit its second learner; each gets a node."""
    client = slurm_client
    (client.folder / "trueline.toml").write_text('[engine.slurm]\noptions = ["--exclusive"]\n')
    for _ in slurms.NODES:
        slurm.call("sbatch", "--exclusive", "-N1", "-Jfill", "--output=/dev/null", "--wrap=exec sleep 1000")
    until(lambda: slurm.count_idle() == 0, lambda: slurm.call("sinfo"))
    jobs = [client.submit_command("echo began", on="slurm", learners=2) for _ in range(2)]
    slurm.call("scancel", "--name=fill")
    launches = 0
    for client.job in jobs:
        until(lambda: client.read()["state"] == "finished", client.logs)
        assert client.read_output(1) == "began\n"
        launches += client.where.last_launch().number
    assert launches > 2, "one of them queued again"


def test_the_end_of_the_head_ends_all_and_resume_starts_them_again(client):
    job = client.submit_command("echo began; sleep 1000", learners=2)
    client.wait_output(2, "began")
    client.kill("head")
    until(lambda: client.read()["state"] == "dead", client.read)
    client.expect_nothing_left()
    client.run("resume", job)
    client.wait_output(2, "began", count=2)
    client.run("halt", job)
    client.expect_nothing_left()


def test_a_command_that_fails_fails_the_job_and_says_which_learner_it_was(client):
    client.submit_command("if [ $LEARNER_ID = 2 ]; then echo no >&2; exit 3; fi; sleep 1000", learners=2)
    end = client.wait_end()
    assert (end.outcome, end.why) == ("failed", "learner 2: exit code 3")
    assert client.read_output(2) == "no\n"
    client.expect_nothing_left()


def test_a_member_that_fails_in_a_process_of_its_own_fails_the_job(client):
    script = (
        "import os\nfrom torch.multiprocessing import Process\nimport torch.distributed as dist\n"
        "def run():\n"
        "    dist.init_process_group('gloo', init_method='file:///job/x', world_size=1, rank=0)\n"
        "    raise ValueError('no data')\n"
        "if __name__ == '__main__':\n"
        "    p = Process(target=run)\n    p.start()\n    p.join()\n    print('done')\n"
    )
    client.submit_command("python train.py", learners=1, train_py=script)
    end = client.wait_end()
    assert end.outcome == "failed"
    assert "failed with exit code 1" in end.why


def test_a_killed_member_is_a_death_although_its_parent_ends_well(client):
    forking = (
        "import runpy\nfrom torch.multiprocessing import Process\n"
        "if __name__ == '__main__':\n"
        "    p = Process(target=runpy.run_path, args=('train.py',))\n    p.start()\n    p.join()\n"
    )
    client.submit_command('python fork.py "0"', learners=2, train_py=GLOO, fork_py=forking)
    client.wait_output(1, "rank 0 of 2")
    client.wait_output(2, "rank 1 of 2")
    client.kill_script(1)
    client.wait_output(1, "rank 0 of 2", count=2)
    why = next(fields["why"] for name, fields, _ in client.events() if name == "learners.restarting")
    assert "left its process group without an end" in why or "signal 9" in why
    client.run("halt", client.job)
    client.expect_nothing_left()


def test_a_learner_has_ffdls_environment_its_code_and_its_volume(client):
    (client.folder / "cosdata/in").mkdir(parents=True)
    (client.folder / "cosdata/in/data.txt").write_text("42")
    (client.folder / "m").mkdir()
    (client.folder / "m/helper.py").write_text("def read(path): return open(path).read()\n")
    (client.folder / "m/train.py").write_text(
        "import helper, os; print('data', helper.read(os.environ['DATA_DIR'] + '/data.txt'))\n"
    )
    (client.folder / "m/manifest.yml").write_text(
        "name: has spaces\nlearners: 2\ndata_stores:\n"
        "- {type: mount_volume, training_data: {container: in}, training_results: {container: out},"
        f" connection: {{type: host_mount, name: host-mount, path: {client.folder}/cosdata}}}}\n"
        "framework:\n  name: pytorch\n  command: >\n    python $MODEL_DIR/train.py;\n    pwd; env | sort;\n"
        '    if [ "$LEARNER_ID" == "1" ]; then echo 1 > /job/master_node.txt; fi;\n'
        "    until [ -e /job/master_node.txt ]; do sleep 0.1; done; echo model > $RESULT_DIR/model-$LEARNER_ID\n"
    )
    assert client.submit_manifest(client.folder / "m/manifest.yml") == "has-spaces-1"
    assert client.wait_end().outcome == "finished"
    out = client.read_output(2) + client.read_output(1)
    assert "data 42\n" in out
    assert "GPU_COUNT=0.000000\n" in out
    results = client.folder / "cosdata/out" / client.unique
    assert (results / "model-1").read_text() == "model\n"
    assert (results / "learner-1/training-log.txt").read_text() == client.read_output(1)
    with zipfile.ZipFile(results / "_submitted_code/model.zip") as archive:
        assert "train.py" in archive.namelist()


def test_metrics_of_the_log_are_the_curves_of_the_job(client):
    path = client.folder / "m/manifest.yml"
    path.parent.mkdir()
    path.write_text(
        "name: m\nframework:\n  name: x\n  command: for i in 1 2 3; do echo step $i loss 0.$i; done\n"
        "evaluation_metrics:\n  type: regex_extractor\n  groups:\n    train:\n"
        "      regex: 'step %{INT:step} loss %{FLOAT:loss}'\n      scalars: {loss: {value: $loss}}\n"
        "      etimes: {step: {type: INT, value: $step}}\n"
    )
    client.submit_manifest(path)
    assert client.wait_end().outcome == "finished"
    facts = client.read()
    assert (facts["step"], facts["loss"]) == (3, 0.3)
    scalars = [one for _, one in EventFolder(client.store / client.job).read()]
    assert [(one.tag, one.step, round(one.value, 3)) for one in scalars] == [
        ("train/loss", 1, 0.1), ("train/loss", 2, 0.2), ("train/loss", 3, 0.3),
    ]  # fmt: skip
    assert (client.store / client.job / event_file.NAME).is_file()


def test_what_a_script_leaves_in_the_background_ends_with_it(client):
    client.submit_command("(setsid sleep 1000 &) ; sleep 1000 & disown; echo done", learners=1)
    assert client.wait_end().outcome == "finished"
    client.expect_nothing_left()


def test_a_killed_guard_takes_its_script_along_and_all_start_again(client):
    client.submit_command("echo began; sleep 1000", learners=1)
    client.wait_output(1, "began")
    (guard,) = (one for one in client.find_scripts(1) if "guard.py" in " ".join(one.cmdline()))
    os.kill(guard.pid, signal.SIGKILL)
    client.wait_output(1, "began", count=2)
    client.run("halt", client.job)
    client.expect_nothing_left()
