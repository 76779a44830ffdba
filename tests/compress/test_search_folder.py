"""A search has its folder for itself, and takes over only what still stands of an earlier call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import trueline
from trueline.bundle import open_bundle
from trueline.bundle.write import pack
from trueline.compress import search as searching
from trueline.compress.candidate import CompressedCandidate
from trueline.compress.method import CompressMethod
from trueline.compress.search_folder import clear_folder, hold_folder
from trueline.errors import StorageError, UsageError
from trueline.files import PARTIAL
from worlds import compressible

HOLDER = """
import sys
from pathlib import Path
from trueline.compress.search_folder import hold_folder

with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def list_tried(events: pytest.MonkeyPatch) -> list[str]:
    """Names of the candidates that are tried from now on."""
    tried: list[str] = []
    whole = searching.Search._measure

    def note(self: searching.Search, method: CompressMethod) -> CompressedCandidate:
        tried.append(method.name)
        return whole(self, method)

    events.setattr(searching.Search, "_measure", note)
    return tried


@pytest.mark.slow
def test_two_searches_at_once_in_one_folder_are_one_search_and_one_clear_error(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    folder, out = tmp_path / "small.bundle.search", tmp_path / "small.bundle"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match="another search is at work in") as refused:
            trueline.compress(trained.bundle.path, quantize=["dynamic"], out=out)
        assert "--out" in refused.value.hint
        holder.kill()  # the kernel drops the lock
    assert trueline.compress(trained.bundle.path, quantize=["dynamic"], out=out).path == out


def test_a_request_that_is_refused_leaves_no_folder(trained: compressible.Compressible, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be promised"):
        trueline.compress(trained.bundle.path, budget="accuracy=0.01%", out=tmp_path / "deep" / "small.bundle")
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_folder_is_cleared_without_being_given_up_and_links_are_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "search"
    (outside / "kept").mkdir(parents=True)
    with hold_folder(folder):
        number = folder.stat().st_ino
        (folder / "work" / "deep").mkdir(parents=True)
        (folder / "rows.jsonl").write_text("{}")
        (folder / "link").symlink_to(outside)
        clear_folder(folder)
        assert list(folder.iterdir()) == []
        assert folder.stat().st_ino == number
        with pytest.raises(UsageError, match="another search"), hold_folder(folder):
            pytest.fail("it was held twice")
    assert not folder.exists()
    assert (outside / "kept").is_dir()


def test_what_a_kill_has_left_half_written_is_no_reason_to_refuse_and_is_removed(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    folder = tmp_path / "small.bundle.search"
    (folder / f"{PARTIAL}bundle" / "programs").mkdir(parents=True)
    (folder / f"{PARTIAL}search.json").write_bytes(b"{")
    trueline.compress(trained.bundle.path, quantize=["dynamic"], out=tmp_path / "small.bundle")
    assert not list(folder.glob(f"{PARTIAL}*"))


def test_a_folder_that_is_no_search_is_not_replaced(trained: compressible.Compressible, tmp_path: Path) -> None:
    mine = tmp_path / "small.bundle.search" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(StorageError, match="is no search"):
        trueline.compress(trained.bundle.path, quantize=["dynamic"], out=tmp_path / "small.bundle")
    assert mine.read_text() == "mine"


def test_a_candidate_that_lacked_a_package_is_tried_again_and_others_are_not(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(*ways: str) -> None:
        with pytest.raises(trueline.errors.BudgetMissed):
            trueline.compress(trained.bundle.path, quantize=ways, budget="accuracy=3%", out=tmp_path / "small.bundle")

    monkeypatch.setitem(sys.modules, "nncf", None)
    monkeypatch.setattr(searching, "GAIN", 1000.0)  # none is good enough
    search("openvino", "dynamic")
    tried = list_tried(monkeypatch)
    search("openvino", "dynamic")
    assert tried == ["openvino:mixed"]


@pytest.mark.jobs
def test_after_a_search_that_sealed_its_bundle_everything_is_tried_again(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search() -> None:
        ways = ["dynamic", "weights:int4"]
        trueline.compress(trained.bundle.path, quantize=ways, out=tmp_path / "small.bundle", overwrite=True)

    from trueline.compress.apply import weights
    from trueline.errors import CaptureError

    def fail(*_: object) -> None:
        raise CaptureError("not today")

    with monkeypatch.context() as broken:
        broken.setattr(weights.WeightQuantizer, "apply", fail)
        search()
    tried = list_tried(monkeypatch)
    search()
    assert tried == ["dynamic:u8", "weights:int4"]


def test_rows_of_another_release_are_tried_again(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    whole = CompressedCandidate(name="dynamic:u8", kind="dynamic", verdict="failed")
    rows.write_bytes(b'{"name": "static", "verdict": "splendid"}\n' + msgspec.json.encode(whole) + b"\n")
    assert [row.name for row in searching.read_rows(rows)] == ["dynamic:u8"]


@pytest.mark.jobs
def test_candidates_that_were_judged_by_other_records_do_not_count(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.py"
    noise = tmp_path / "noise"
    begins, read = "def dataset(mode):", f"float(pathlib.Path({str(noise)!r}).read_text())"
    recipe.write_text("import pathlib\n" + compressible.RECIPE.replace(begins, f"{begins}\n    NOISE = {read}"))
    monkeypatch.setattr(searching, "GAIN", 1000.0)

    def search() -> None:
        with pytest.raises(trueline.errors.BudgetMissed):
            trueline.compress(
                trained.bundle.path, recipe=recipe, quantize=["dynamic"], budget="accuracy=3%", out=tmp_path / "b"
            )

    noise.write_text("0.35")
    search()
    tried = list_tried(monkeypatch)
    search()
    assert tried == []
    noise.write_text("0.9")  # the recipe and the number of records are as they were
    search()
    assert tried == ["dynamic:u8"]


@pytest.mark.parametrize("out", ["drawn.bundle", "drawn.bundle/programs/small.bundle", "link.bundle"])
def test_the_bundle_that_is_compressed_is_never_replaced(
    trained: compressible.Compressible, tmp_path: Path, out: str
) -> None:
    sealed = compressible.seal(trained.module, tmp_path / "drawn.bundle", trained.bundle.manifest.lineage.recipe_digest)
    (tmp_path / "link.bundle").symlink_to("drawn.bundle")
    with pytest.raises(UsageError, match="is the bundle that is compressed"):
        trueline.compress(sealed.path, recipe=trained.recipe, quantize=["dynamic"], out=tmp_path / out, overwrite=True)
    assert open_bundle(tmp_path / "drawn.bundle").digest == sealed.digest


def test_a_folder_that_is_no_bundle_is_not_overwritten_and_refused_before_anything_is_tried(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    tried = list_tried(monkeypatch)
    with pytest.raises(UsageError, match="is no bundle"):
        trueline.compress(trained.bundle.path, quantize=["dynamic"], out=tmp_path / "mine", overwrite=True)
    assert tried == []


def test_a_packed_bundle_is_compressed_beside_its_file(trained: compressible.Compressible, tmp_path: Path) -> None:
    packed = pack(trained.bundle.path, tmp_path / "drawn.bundle")
    (tmp_path / "recipe.py").write_bytes(trained.recipe.read_bytes())  # found beside the file
    found = trueline.compress(packed, quantize=["dynamic"])
    assert found.path == tmp_path / "drawn-latency.bundle"
    assert open_bundle(found.path).manifest.lineage.parent == trained.bundle.digest


def test_a_recipe_that_was_changed_since_is_named_and_not_taken_in_silence(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digest, recipe = trained.bundle.manifest.lineage.recipe_digest, tmp_path / "recipe.py"
    sealed = compressible.seal(trained.module, tmp_path / "drawn.bundle", digest)
    (tmp_path / "job.json").write_bytes(msgspec.json.encode({"recipe": str(recipe), "recipe_digest": digest}))
    recipe.write_text(compressible.RECIPE.replace("NOISE = 10, 0.35", "NOISE = 10, 0.1"))
    with pytest.raises(UsageError, match=r"recipe\.py, has changed since") as refused:
        trueline.compress(sealed.path, quantize=["dynamic"])
    assert f"--recipe {recipe}" in refused.value.hint
    recipe.write_text(compressible.RECIPE)
    assert trueline.compress(sealed.path, quantize=["dynamic"]).row.name == "dynamic:u8"
