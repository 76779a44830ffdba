"""What a learner finds: its environment, its folders, its tools, and no /job."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trueline.engine.cluster.settings import (
    KubernetesSettings,
    LocalSettings,
    PodmanSettings,
    RaySettings,
    SlurmSettings,
)
from trueline.errors import UsageError
from trueline.train.cluster.store import JobStore
from trueline.train.learners import places
from trueline.train.learners.environment import localize, make_environment, replace_job
from trueline.train.learners.manifest.read import DataStore, FfdlManifest
from trueline.train.learners.scripts.command import complete_environment, find_interface
from trueline.train.learners.submission import fit_engine, load_manifest, unpack_model

FFDL = """
    MODEL_DIR DATA_DIR RESULT_DIR RESULT_BUCKET_DIR LOG_DIR CHECKPOINT_DIR JOB_STATE_DIR TRAINING_JOB TRAINING_COMMAND
    TRAINING_ID LEARNER_ID GPU_COUNT NUM_LEARNERS LEARNER_NAME_PREFIX DOWNWARD_API_POD_NAME DOWNWARD_API_POD_NAMESPACE
"""  # the whitelist of lcm/service/lcm/learner/envvars.go


def make(**fields) -> FfdlManifest:
    return FfdlManifest(**({"name": "m", "command": "python train.py", "framework": "pytorch"} | fields))


def folders_of(manifest: FfdlManifest, tmp_path: Path):
    return places.place_folders(JobStore(tmp_path / "m-1"), manifest, "m-1-abc", tmp_path / "scratch")


def test_every_variable_that_ffdl_gave_is_there_with_its_form(tmp_path):
    manifest = make(learners=3, gpus=1.0, store=DataStore(type="mount_cos", data="in", results="out", endpoint="x"))
    env = make_environment(manifest, "m-1-abc", 2, folders_of(manifest, tmp_path))
    assert set(FFDL.split()) <= set(env)
    assert (env["LEARNER_ID"], env["NUM_LEARNERS"], env["GPU_COUNT"]) == ("2", "3", "1.000000")
    assert env["DATA_DIR"].endswith("/data/in")
    assert env["RESULT_DIR"] == env["RESULT_BUCKET_DIR"] + "/m-1-abc"
    assert env["CHECKPOINT_DIR"] == env["RESULT_BUCKET_DIR"] + "/_wml_checkpoints/m-1-abc"
    assert env["LOG_DIR"] == env["JOB_STATE_DIR"] + "/logs"
    assert env["DOWNWARD_API_POD_NAME"] == env["LEARNER_NAME_PREFIX"] + "-1"
    shell = "echo $((${DOWNWARD_API_POD_NAME##*-} + 1))"  # how FfDL's train.sh found the LEARNER_ID
    assert subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True).stdout == "2\n"


def test_the_python_of_ffdls_images_is_the_learners_python_where_it_is_missing(tmp_path):
    asked = make(command="/opt/conda/bin/python -u x.py /opt/conda/bin/python.txt; ls /job/x")
    command = make_environment(asked, "m-1-abc", 1, folders_of(asked, tmp_path))["TRAINING_COMMAND"]
    assert command == f"python -u x.py /opt/conda/bin/python.txt; ls {tmp_path}/m-1/state/x"


def test_folders_of_a_volume_are_those_of_the_host(tmp_path):
    store = DataStore(type="mount_volume", path=str(tmp_path / "cosdata"), data="in", results="out")
    found = folders_of(make(store=store), tmp_path)
    assert found.data == tmp_path / "cosdata/in"
    assert not found.data.exists()  # what is missing is not made up
    assert found.results == tmp_path / "cosdata/out/m-1-abc"
    assert found.results.is_dir()


def test_job_is_replaced_in_texts_as_a_folder_alone(tmp_path):
    state = Path("/shared/state")
    assert replace_job("echo x > /job/master_node.txt; ls /jobs /x/job/ ./job/", state) == (
        "echo x > /shared/state/master_node.txt; ls /jobs /x/job/ ./job/", 1,
    )  # fmt: skip
    assert replace_job('init_method="file:///job/" + x', state)[1] == 0  # the hook meets there
    (tmp_path / "setup.sh").write_text("cat /job/master_node.txt\n")
    (tmp_path / "binary").write_bytes(b"\0/job/x")
    assert list(localize(tmp_path, state)) == [("setup.sh", 1)]
    assert (tmp_path / "setup.sh").read_text() == "cat /shared/state/master_node.txt\n"
    assert (tmp_path / "binary").read_bytes() == b"\0/job/x"


def test_files_by_which_learners_met_before_are_gone_at_the_next_start_and_folders_stay(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("master_node.txt", "logs/training-log.txt"):
        (tmp_path / name).write_text("stale")
    (tmp_path / "latest-log").symlink_to("nowhere")
    places.clear_state(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]
    assert (tmp_path / "logs/training-log.txt").exists()


def test_hostname_gives_the_address_that_other_learners_reach(tmp_path):
    env = complete_environment({}, tmp_path, "127.0.0.1")
    ask = "hostname --ip-address; hostname -i; hostname; python -c 'import sys; print(sys.executable)'"
    done = subprocess.run(["bash", "-c", ask], env=env, capture_output=True, text=True, check=True)
    first, second, name, python = done.stdout.split()
    assert (first, second, name) == ("127.0.0.1", "127.0.0.1", os.uname().nodename)
    assert Path(python).resolve() == Path(sys.executable).resolve()
    assert env["GLOO_SOCKET_IFNAME"] == find_interface("127.0.0.1") == "lo"


def test_resources_are_those_of_each_learner():
    asked = make(learners=2, cpus=0.5, memory=10**9)
    fitted, notes = fit_engine(LocalSettings(slots=7, capacity=8), asked)
    assert (fitted.slots, fitted.memory_mb) == (1, 954)
    assert "pytorch" in notes[-1]
    assert fit_engine(LocalSettings(slots=7, capacity=8), make())[0].slots == 7
    with pytest.raises(UsageError, match="2 learners with 16 CPUs each need 32 slots, and this machine has 8"):
        fit_engine(LocalSettings(capacity=8), make(learners=2, cpus=15.5))
    slurm, _ = fit_engine(SlurmSettings(), make(cpus=4, gpus=2, gpu_type="a100"))
    assert (slurm.slots, slurm.options) == (4, ("--gres=gpu:a100:2",))


def test_gpus_that_this_machine_has_not_are_refused_with_a_way_out():
    with pytest.raises(UsageError) as refused:
        fit_engine(LocalSettings(), make(gpus=1000, learners=2))
    assert "2 learners with 1000 GPUs each need 2000, and this machine has" in refused.value.message
    assert "--set gpus=0" in refused.value.hint


def test_podman_has_the_volume_and_the_image_of_a_custom_framework():
    store = DataStore(type="mount_volume", path="/cosdata", data="in")
    asked = make(framework="custom", framework_version="me/torch:1", store=store)
    fitted, notes = fit_engine(PodmanSettings(), asked)
    assert (fitted.image, fitted.mounts) == ("me/torch:1", ("/cosdata",))
    assert "me/torch:1" in notes[-1]
    assert fit_engine(PodmanSettings(image="own"), asked)[0].image == "own"


def test_gpus_and_images_are_those_of_kubernetes_and_ray():
    asked = make(gpus=2, gpu_type="a100", framework="custom", framework_version="me/torch:1")
    pods, notes = fit_engine(KubernetesSettings(resources={"fast/disk": "1"}), asked)
    assert (pods.image, pods.resources) == ("me/torch:1", {"nvidia.com/gpu": "2", "fast/disk": "1"})
    assert "gpu_type: a100 has no effect here" in notes[0]
    assert fit_engine(KubernetesSettings(image="own"), asked)[0].image == "own"
    assert fit_engine(RaySettings(resources=("disk=1",)), asked)[0].resources == ("disk=1", "GPU=2")
    assert fit_engine(RaySettings(), make())[0].resources == ()


def test_a_zip_is_a_model_definition_and_one_that_leaves_its_folder_is_refused(tmp_path):
    good, bad = tmp_path / "good.zip", tmp_path / "bad.zip"
    for path, name in ((good, "sub/train.py"), (bad, "../train.py")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, "pass")
    (tmp_path / "a").mkdir()
    assert (unpack_model(good, tmp_path / "a") / "sub/train.py").read_text() == "pass"
    with pytest.raises(UsageError, match="outside"):
        unpack_model(bad, tmp_path / "a")
    (tmp_path / "text").write_text("x")
    with pytest.raises(UsageError, match="neither a folder nor a zip"):
        unpack_model(tmp_path / "text", tmp_path / "a")
    with pytest.raises(UsageError, match="there is no folder or zip"):
        unpack_model(tmp_path / "none", tmp_path / "a")


def test_a_relative_volume_lies_beside_its_manifest_and_a_missing_folder_is_noted(tmp_path):
    path = tmp_path / "manifest.yml"
    path.write_text(
        "framework: {name: x, command: y}\n"
        "data_stores: [{type: mount_volume, training_data: {container: in}, connection: {path: volume}}]\n"
    )
    read = load_manifest(path)
    assert read.store.path == str(tmp_path / "volume")
    assert f"there is no folder {tmp_path / 'volume/in'}" in read.notes[-1]


def test_the_code_of_a_job_is_kept_beside_its_results(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/train.py").write_text("pass")
    for _ in range(2):
        places.keep_code(tmp_path / "model", tmp_path / "results")
    with zipfile.ZipFile(tmp_path / "results/_submitted_code/model.zip") as archive:
        assert archive.namelist() == ["train.py"]
