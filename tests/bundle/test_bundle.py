"""A bundle is what was sealed, to the byte, or an error that names the file."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib
import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from trueline import files
from trueline.bundle import (
    Contents,
    Dim,
    Evidence,
    Golden,
    ProgramEntry,
    Signature,
    Summary,
    TensorSpec,
    golden,
    open_bundle,
    pack,
    seal,
    unpack,
)
from trueline.bundle.describe import describe, to_json
from trueline.errors import BundleError, StorageError, UsageError

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=("batch", 3)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=("batch",)),),
    dims={"batch": Dim(min=1, max=6)},
)


def contents(folder: Path) -> Contents:
    (folder / "programs").mkdir(parents=True)
    (folder / "programs" / "model.onnx").write_bytes(b"a program, as far as a bundle cares")
    entry = ProgramEntry(
        format="onnx",
        file="programs/model.onnx",
        proven=True,
        seconds=1.5,
        probes=1,
        max_abs_error=1e-7,
        versions={"torch": "2.13"},
    )
    evidence = Evidence(
        format="onnx",
        against="eager",
        probe="batch 1, zeros",
        origin="made",
        inputs_sha256="0" * 64,
        shapes={"x": (1, 3)},
        verdict="agrees",
        max_abs_error=1e-7,
    )
    golden = [
        Golden(case=f"batch-{n}", inputs={"x": np.ones((n, 3), np.float32)}, outputs={"y": np.ones(n, np.float32)})
        for n in (1, 4)
    ]
    return Contents(
        name="digits",
        signature=SIGNATURE,
        programs=[(entry, folder)],
        serve="onnx",
        golden=golden,
        evidence=[evidence],
        lineage={"recipe": {"name": "digits", "digest": "ab"}, "certificates": [{"step": 1}], "parent": None},
        summary=Summary(recipe="digits", recipe_digest="ab"),
    )


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    seal(tmp_path / "digits.bundle", contents(tmp_path / "work"))
    return tmp_path / "digits.bundle"


ALL_FILES = [
    "bundle.json",
    "programs/model.onnx",
    "golden/inputs.safetensors",
    "golden/outputs.safetensors",
    "evidence.jsonl",
    "lineage.json",
]


def reseal(folder: Path, change: dict[str, object]) -> None:
    """What an attacker who knows the format does: edits the manifest and mends its digest."""
    raw = json.loads((folder / "bundle.json").read_text()) | change | {"digest": ""}
    digest = files.sha256_bytes(msgspec.json.encode(raw, order="sorted"))
    (folder / "bundle.json").write_text(json.dumps(raw | {"digest": digest}))


def test_what_was_sealed_is_what_is_opened(sealed: Path) -> None:
    bundle = open_bundle(sealed)
    assert bundle.signature == SIGNATURE
    assert bundle.program_path().read_bytes() == b"a program, as far as a bundle cares"
    assert [golden.case for golden in bundle.golden()] == ["batch-1", "batch-4"]
    assert bundle.golden()[1].inputs["x"].shape == (4, 3)
    assert [one.probe for one in bundle.evidence()] == ["batch 1, zeros"]
    assert bundle.lineage()["certificates"] == [{"step": 1}]
    assert len(bundle.digest) == 64


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_changed_byte_is_an_error_that_names_the_file(sealed: Path, name: str) -> None:
    content = bytearray((sealed / name).read_bytes())
    content[len(content) // 2] ^= 0x20
    (sealed / name).write_bytes(content)
    with pytest.raises(BundleError, match=name):
        open_bundle(sealed)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_torn_file_is_an_error_that_names_it(sealed: Path, name: str) -> None:
    content = (sealed / name).read_bytes()
    (sealed / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(BundleError, match=name):
        open_bundle(sealed)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_missing_file_is_an_error_that_names_it(sealed: Path, name: str) -> None:
    (sealed / name).unlink()
    with pytest.raises(BundleError, match=name):
        open_bundle(sealed)


def opened_or_why(folder: Path) -> object:
    """The manifest, or the name of the file that the error names."""
    try:
        return open_bundle(folder).manifest
    except BundleError as error:
        return next((name for name in ALL_FILES if name in error.message), error.message)


def test_every_single_changed_byte_of_the_manifest_is_noticed_or_changes_nothing(sealed: Path) -> None:
    path = sealed / "bundle.json"
    original, meant = path.read_bytes(), open_bundle(sealed).manifest
    for position in range(0, len(original), 7):
        changed = bytearray(original)
        changed[position] ^= 0x01
        path.write_bytes(changed)
        assert opened_or_why(sealed) in (meant, "bundle.json")


def test_a_schema_of_another_time_is_refused_with_its_number(sealed: Path) -> None:
    (sealed / "bundle.json").write_text('{"schema": 7, "anything": []}')
    with pytest.raises(BundleError, match="schema 7"):
        open_bundle(sealed)


def test_a_file_that_does_not_belong_is_refused(sealed: Path) -> None:
    (sealed / "programs" / "extra.pkl").write_bytes(b"cos\nsystem\n.")
    with pytest.raises(BundleError, match=r"extra\.pkl"):
        open_bundle(sealed)


def test_a_link_is_refused_even_when_what_it_points_to_is_right(sealed: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (sealed / "lineage.json").rename(target)
    (sealed / "lineage.json").symlink_to(target)
    with pytest.raises(BundleError, match=r"lineage\.json"):
        open_bundle(sealed)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a//b", "a/../b", ".", "a\\b", "bundle.json", "a\nb"])
def test_a_path_that_leads_outside_is_refused(sealed: Path, name: str) -> None:
    table = json.loads((sealed / "bundle.json").read_text())["files"]
    reseal(sealed, {"files": {**table, name: {"sha256": "0" * 64, "size": 1}}})
    with pytest.raises(BundleError, match="not a plain path"):
        open_bundle(sealed)


def test_a_program_that_the_table_does_not_hold_is_refused(sealed: Path) -> None:
    programs = json.loads((sealed / "bundle.json").read_text())["programs"]
    reseal(sealed, {"programs": [{**programs[0], "file": "../../bin/sh"}]})
    with pytest.raises(BundleError, match="table of files"):
        open_bundle(sealed)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is no bundle"):
        open_bundle(tmp_path)


def test_an_unknown_format_is_answered_with_the_formats_there_are(sealed: Path) -> None:
    with pytest.raises(BundleError, match="has: onnx"):
        open_bundle(sealed).program("torch_export")


def test_a_bundle_needs_a_golden_example(tmp_path: Path) -> None:
    without = contents(tmp_path / "work")
    with pytest.raises(UsageError, match="golden"):
        seal(tmp_path / "b", Contents(**{f: getattr(without, f) for f in without.__slots__} | {"golden": []}))
    assert not (tmp_path / "b").exists()


def test_overwriting_replaces_a_bundle_and_nothing_else(sealed: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="exists already"):
        seal(sealed, contents(tmp_path / "again"))
    assert seal(sealed, contents(tmp_path / "more"), overwrite=True).name == "digits"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="no bundle"):
        seal(tmp_path / "home", contents(tmp_path / "third"), overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_a_full_disk_while_sealing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    given = contents(tmp_path / "work")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(StorageError, match="no room left"):
            seal(tmp_path / "digits.bundle", given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]


def test_a_full_disk_while_replacing_keeps_the_old_bundle(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_bundle(sealed).digest
    given = contents(sealed.parent / "again")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError):
            seal(sealed, given, overwrite=True)
    assert open_bundle(sealed).digest == before


def test_packing_and_unpacking_gives_the_same_bundle(sealed: Path, tmp_path: Path) -> None:
    packed = pack(sealed, tmp_path / "digits.zip")
    bundle = open_bundle(packed)
    assert bundle.digest == open_bundle(sealed).digest
    assert open_bundle(unpack(packed, tmp_path / "again")).digest == bundle.digest
    assert stat.S_IMODE(bundle.program_path().stat().st_mode) & 0o111 == 0


def test_equal_bundles_pack_to_equal_bytes(sealed: Path, tmp_path: Path) -> None:
    first = pack(sealed, tmp_path / "one.zip").read_bytes()
    os.utime(sealed / "lineage.json", (0, 0))
    assert pack(sealed, tmp_path / "two.zip").read_bytes() == first


def test_a_packed_bundle_is_unpacked_once_into_a_cache(sealed: Path, tmp_path: Path) -> None:
    packed = pack(sealed, tmp_path / "digits.zip")
    first = open_bundle(packed, cache=tmp_path / "cache").path
    assert open_bundle(packed, cache=tmp_path / "cache").path == first
    (first / "lineage.json").write_text("{}")
    with pytest.raises(BundleError, match=r"lineage\.json"):
        open_bundle(packed, cache=tmp_path / "cache")


def test_the_temporary_folder_of_a_packed_bundle_goes_when_the_bundle_does(sealed: Path, tmp_path: Path) -> None:
    bundle = open_bundle(pack(sealed, tmp_path / "digits.zip"))
    folder = bundle.path
    assert folder.exists()
    del bundle
    assert not folder.exists()


def repacked(packed: Path, name: str, content: bytes, *, mode: int = 0) -> Path:
    """The packed bundle with one more member, or with a member's content replaced."""
    out = packed.with_name("evil.zip")
    with zipfile.ZipFile(packed) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            if member.filename != name:
                target.writestr(member.filename, source.read(member))
        added = zipfile.ZipInfo(name)
        added.external_attr = mode << 16
        target.writestr(added, content)
    return out


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "programs/../../escaped", "extra.txt", "programs/"])
def test_a_packed_file_that_the_table_does_not_name_never_reaches_the_disk(
    sealed: Path, tmp_path: Path, name: str
) -> None:
    evil = repacked(pack(sealed, tmp_path / "digits.zip"), name, b"")
    with pytest.raises(BundleError, match="no plain file of the bundle"):
        unpack(evil, tmp_path / "inner" / "out")
    assert not list(tmp_path.rglob("*escaped*"))
    assert not (tmp_path / "inner" / "out").exists()


def test_a_packed_link_is_refused(sealed: Path, tmp_path: Path) -> None:
    evil = repacked(pack(sealed, tmp_path / "digits.zip"), "lineage.json", b"/etc/passwd", mode=stat.S_IFLNK | 0o777)
    with pytest.raises(BundleError, match=r"lineage\.json"):
        unpack(evil, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"{}", b"0" * 30_000_000])
def test_a_packed_file_of_another_length_is_torn_and_a_bomb_is_not_unpacked(
    sealed: Path, tmp_path: Path, content: bytes
) -> None:
    evil = repacked(pack(sealed, tmp_path / "digits.zip"), "lineage.json", content)
    with pytest.raises(BundleError, match=r"lineage\.json"):
        unpack(evil, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_manifest_that_is_a_bomb_is_refused_before_it_is_read(sealed: Path, tmp_path: Path) -> None:
    evil = repacked(pack(sealed, tmp_path / "digits.zip"), "bundle.json", b" " * 20_000_000)
    with pytest.raises(BundleError, match="more than"):
        unpack(evil, tmp_path / "out")


def test_a_torn_packed_bundle_is_an_error(sealed: Path, tmp_path: Path) -> None:
    packed = pack(sealed, tmp_path / "digits.zip")
    content = packed.read_bytes()
    packed.write_bytes(content[: len(content) - 40])
    with pytest.raises(BundleError, match=r"digits\.zip"):
        open_bundle(packed)


def test_a_changed_byte_in_a_packed_bundle_is_an_error_that_names_the_file(sealed: Path, tmp_path: Path) -> None:
    packed = pack(sealed, tmp_path / "digits.zip")
    content = packed.read_bytes()
    packed.write_bytes(content.replace(b"as far as a bundle cares", b"as far as a bundle Cares"))
    with pytest.raises(BundleError, match=r"digits\.zip|model\.onnx"):
        open_bundle(packed)


def test_the_description_says_what_is_taken_proven_and_where_it_came_from(sealed: Path) -> None:
    text = describe(open_bundle(sealed))
    for word in ("batch from 1 to 6", "FP32", "[batch, 3]", "proven, served", "batch 1, zeros", "recipe.digest"):
        assert word in text
    assert json.loads(json.dumps(to_json(open_bundle(sealed))))["manifest"]["name"] == "digits"


@pytest.mark.parametrize("attempts", ["all", [7], [{}], [{"format": "onnx", "verdict": "refused", "why": 5}]])
def test_whatever_a_lineage_says_of_attempts_is_shown_and_breaks_nothing(tmp_path: Path, attempts: object) -> None:
    made = contents(tmp_path / "work")
    seal(tmp_path / "b", dataclasses.replace(made, lineage={**made.lineage, "attempts": attempts}))
    assert ("\nattempts\n" in describe(open_bundle(tmp_path / "b"))) == (attempts not in ("all", [7]))


def test_the_bundle_room_imports_no_torch() -> None:
    code = "import sys, trueline.bundle, trueline.bundle.describe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_packed_bundle_and_a_sealed_one_are_on_the_disk_before_their_names(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def recording(call: str, name: Callable[..., Any]) -> None:
        real = getattr(os, call)

        def recorded(*args: Any, **more: Any) -> Any:
            asked.append(f"{call} {Path(name(*args)).name}")
            return real(*args, **more)

        monkeypatch.setattr(os, call, recorded)

    recording("fsync", lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
    recording("replace", lambda _, target: target)
    recording("rename", lambda _, target: target)
    pack(sealed, tmp_path / "packed" / "digits.zip")
    assert [one.partition(files.PARTIAL)[0] for one in asked] == ["fsync ", "replace digits.zip", "fsync packed"]

    asked.clear()
    seal(tmp_path / "again" / "digits.bundle", contents(tmp_path / "work-again"))
    named = asked.index("rename digits.bundle")
    assert {Path(name).name for name in ALL_FILES} | {"programs", "golden"} <= {one[6:] for one in asked[:named]}
    assert asked[named + 1 :] == ["fsync again"]


WEIGHTS = "programs/model.onnx.data"
NESTED = "programs/parts/first.pt2"


@pytest.fixture
def weighty(tmp_path: Path) -> Path:
    """A bundle whose programs have files beside them, one of more than a mebibyte."""
    given = contents(tmp_path / "work")
    (tmp_path / "work" / WEIGHTS).write_bytes(np.arange(300_000, dtype=np.float32).tobytes())
    (tmp_path / "work" / NESTED).parent.mkdir()
    (tmp_path / "work" / NESTED).write_bytes(b"line one\nline two\n")
    return seal(tmp_path / "weighty.bundle", given).path


@pytest.mark.parametrize("name", [WEIGHTS, NESTED, *ALL_FILES])
@pytest.mark.parametrize("place", [0.0, 0.001, 0.5, 0.999, 1.0])
def test_one_changed_bit_anywhere_in_any_file_is_an_error_that_names_the_file(
    weighty: Path, name: str, place: float
) -> None:
    content = bytearray((weighty / name).read_bytes())
    at = round(place * (len(content) - 1))
    # Spaces between the words of a manifest say nothing: the next letter is changed there.
    at = next(
        at for at in [*range(at, len(content)), *range(at, -1, -1)] if name == WEIGHTS or content[at] not in b" \n"
    )
    content[at] ^= 1
    (weighty / name).write_bytes(content)
    with pytest.raises(BundleError, match=name.replace(".", r"\.")):
        open_bundle(weighty)


@pytest.mark.parametrize("name", [WEIGHTS, NESTED, *ALL_FILES])
def test_a_file_that_is_a_byte_shorter_or_longer_is_torn(weighty: Path, name: str) -> None:
    content = (weighty / name).read_bytes()
    for changed in (content[:-1] if name != "bundle.json" else content[:-2], content + b"x"):
        (weighty / name).write_bytes(changed)
        with pytest.raises(BundleError, match=name.replace(".", r"\.") + ".*torn"):
            open_bundle(weighty)


def test_two_files_that_have_changed_places_are_an_error(weighty: Path) -> None:
    given, answered = (weighty / "golden" / f"{name}.safetensors" for name in ("inputs", "outputs"))
    one, other = given.read_bytes(), answered.read_bytes()
    given.write_bytes(other)
    answered.write_bytes(one)
    with pytest.raises(BundleError, match=r"inputs\.safetensors|outputs\.safetensors"):
        open_bundle(weighty)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"created": "1970-01-01T00:00:00+00:00"},
        {"serve": "torch_export"},
        {"golden": ["batch-1"]},
        {"golden": []},
        {"files": {}},
        {"lineage": {"recipe": "digits", "recipe_digest": "cd"}},
        {"digest": ""},
        {"digest": "0" * 64},
    ],
    ids=str,
)
def test_each_word_of_the_manifest_is_under_its_digest(sealed: Path, change: dict[str, object]) -> None:
    raw = json.loads((sealed / "bundle.json").read_text())
    (sealed / "bundle.json").write_text(json.dumps(raw | change))
    with pytest.raises(BundleError, match=r"bundle\.json was changed after it was sealed"):
        open_bundle(sealed)


def test_the_range_and_the_digest_of_a_file_are_under_the_manifests_digest(sealed: Path) -> None:
    text = (sealed / "bundle.json").read_text()
    raw = json.loads(text)
    evil = b"a program, as far as a bundle carEs"
    (sealed / "programs" / "model.onnx").write_bytes(evil)
    raw["files"]["programs/model.onnx"]["sha256"] = files.sha256_bytes(evil)
    wider = json.loads(text)
    wider["signature"]["dims"]["batch"]["max"] = 7
    for changed in (raw, wider):
        (sealed / "bundle.json").write_text(json.dumps(changed))
        with pytest.raises(BundleError, match=r"bundle\.json was changed after it was sealed"):
            open_bundle(sealed)


def test_a_manifest_of_an_older_schema_is_refused_as_one_of_a_newer_is(sealed: Path) -> None:
    for schema in (0, 2):
        (sealed / "bundle.json").write_text(json.dumps({"schema": schema}))
        with pytest.raises(BundleError, match=f"schema {schema}"):
            open_bundle(sealed)


def test_what_is_sealed_is_opened_with_every_check_before_it_is_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.atomic_dir

    @contextmanager
    def torn(path: Path, *, replace: bool = False) -> Iterator[Path]:
        with real(path, replace=replace) as partial:
            yield partial
        (path / "lineage.json").write_text("{}")

    monkeypatch.setattr(files, "atomic_dir", torn)
    with pytest.raises(BundleError, match=r"lineage\.json"):
        seal(tmp_path / "digits.bundle", contents(tmp_path / "work"))


def test_every_piece_of_evidence_is_sealed_in_order(tmp_path: Path) -> None:
    made = contents(tmp_path / "work")
    many = [msgspec.structs.replace(made.evidence[0], probe=f"batch {n}", verdict="outside") for n in range(1, 4)]
    bundle = seal(tmp_path / "b", dataclasses.replace(made, evidence=many))
    assert list(bundle.evidence()) == many


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("a condition on values of 'mask'", {"programs": [{"rows": {"mask": "some"}}]}),
        ("lists 'length' as padded", {"signature": {"padded": ["length"]}}),
        ("a program compiled for", {"programs": [{"fixed": {"length": 1}}]}),
        ("a program compiled for", {"programs": [{"fixed": {"batch": 0}}]}),
        ("a guard that cannot be read", {"signature": {"guards": [("d0 == d0", ["batch"]), ("d0 == d1", ["batch"])]}}),
        ("a guard that cannot be read", {"signature": {"guards": [("d0 == 1", ["other"])]}}),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_though_its_digest_is_right(
    sealed: Path, what: str, change: dict[str, Any]
) -> None:
    raw = json.loads((sealed / "bundle.json").read_text())
    programs = [program | more for program, more in zip(raw["programs"], change.get("programs", [{}]), strict=True)]
    signature = raw["signature"] | change.get("signature", {})
    if "guards" in signature:
        rules = signature["guards"]
        signature["guards"] = [{"text": rule, "rule": rule, "symbols": symbols} for rule, symbols in rules]
    reseal(sealed, {"programs": programs, "signature": signature})
    with pytest.raises(BundleError, match=what):
        open_bundle(sealed)


@pytest.mark.parametrize("name", ["programs/" + "x" * 247, "golden/..", "programs/./model.onnx", "./a", "a/"])
def test_a_name_that_is_too_long_or_not_plain_is_refused(sealed: Path, name: str) -> None:
    table = json.loads((sealed / "bundle.json").read_text())["files"]
    reseal(sealed, {"files": {**table, name: {"sha256": "0" * 64, "size": 1}}})
    with pytest.raises(BundleError, match="not a plain path"):
        open_bundle(sealed)


@pytest.mark.parametrize("case", ["batch-9", "batch-", "batch-1/x"])
def test_a_golden_example_that_the_files_do_not_hold_is_an_error(sealed: Path, case: str) -> None:
    reseal(sealed, {"golden": ["batch-1", case]})
    with pytest.raises(BundleError, match=f"lack case '{case}'"):
        open_bundle(sealed).golden()


def test_a_golden_example_has_answers_and_not_only_questions() -> None:
    x, y = {"x": np.ones((1, 3), np.float32)}, {"y": np.ones(1, np.float32)}
    inputs, outputs, _ = golden.encode([Golden(case="a", inputs=x, outputs=y)])
    without, _, _ = golden.encode([Golden(case="b", inputs=x, outputs=y)])
    for given, answered in ((inputs, without), (without, outputs)):
        with pytest.raises(BundleError, match="lack case 'a'"):
            golden.decode(["a"], given, answered, "here")


def test_a_packed_bundle_that_names_a_file_twice_is_refused(sealed: Path, tmp_path: Path) -> None:
    packed = pack(sealed, tmp_path / "digits.zip")
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("lineage.json", archive.read("lineage.json"))
    with pytest.raises(BundleError, match="holds a name twice"):
        unpack(packed, tmp_path / "out")


def test_a_packed_bundle_may_not_unpack_to_more_than_the_bound_in_all(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(sealed, tmp_path / "digits.zip")
    total = sum(entry.size for entry in open_bundle(sealed).manifest.files.values())
    unpacking = importlib.import_module("trueline.bundle.read")
    monkeypatch.setattr(unpacking, "MAX_BYTES", total)
    assert open_bundle(unpack(packed, tmp_path / "fits")).name == "digits"
    monkeypatch.setattr(unpacking, "MAX_BYTES", total - 1)
    with pytest.raises(BundleError, match=f"more than {total - 1} bytes"):
        unpack(packed, tmp_path / "out")


def test_a_packed_file_with_a_password_is_refused(sealed: Path, tmp_path: Path) -> None:
    packed = pack(sealed, tmp_path / "digits.zip")
    content = bytearray(packed.read_bytes())
    at = content.rindex(b"PK\x01\x02")
    content[at + 8] |= 1  # the flag of the last member, in the directory at the end
    packed.write_bytes(content)
    with pytest.raises(BundleError, match="no plain file of the bundle"):
        unpack(packed, tmp_path / "out")


def test_two_packed_bundles_of_one_file_name_have_places_of_their_own_in_a_cache(sealed: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    other = seal(tmp_path / "other.bundle", dataclasses.replace(contents(tmp_path / "more"), name="other")).path
    one = open_bundle(pack(sealed, tmp_path / "a" / "m.zip"), cache=tmp_path / "cache")
    two = open_bundle(pack(other, tmp_path / "b" / "m.zip"), cache=tmp_path / "cache")
    assert (one.name, two.name) == ("digits", "other")


def test_a_manifest_that_is_a_link_is_refused(sealed: Path, tmp_path: Path) -> None:
    (sealed / "bundle.json").rename(tmp_path / "elsewhere.json")
    (sealed / "bundle.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(BundleError, match="not a regular file"):
        open_bundle(sealed)


def test_a_manifest_without_a_golden_example_is_refused_though_its_digest_is_right(sealed: Path) -> None:
    reseal(sealed, {"golden": []})
    with pytest.raises(BundleError, match="names no golden record"):
        open_bundle(sealed)


def test_a_packed_link_is_refused_also_where_what_it_holds_is_what_was_sealed(sealed: Path, tmp_path: Path) -> None:
    right = (sealed / "lineage.json").read_bytes()
    evil = repacked(pack(sealed, tmp_path / "digits.zip"), "lineage.json", right, mode=stat.S_IFLNK | 0o777)
    with pytest.raises(BundleError, match="no plain file of the bundle"):
        unpack(evil, tmp_path / "out")


def test_a_line_that_is_no_evidence_is_named_by_its_number_counted_from_one(sealed: Path) -> None:
    bundle = open_bundle(sealed)
    line = (sealed / "evidence.jsonl").read_bytes()
    (sealed / "evidence.jsonl").write_bytes(line + line + b"{}\n")
    found = bundle.evidence()
    assert next(found) == next(found)
    with pytest.raises(BundleError, match=r"evidence\.jsonl line 3 is no evidence"):
        next(found)


@pytest.mark.parametrize("content", [b"[1]", b"3", b"null", b'"x"', b"{", b""])
def test_a_lineage_that_is_no_object_is_refused(sealed: Path, content: bytes) -> None:
    bundle = open_bundle(sealed)
    (sealed / "lineage.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"lineage\.json is no lineage"):
        bundle.lineage()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary folders are made."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_a_packed_bundle_is_unpacked_into_a_folder_that_says_whose_it_is(
    sealed: Path, tmp_path: Path, temporary: Path
) -> None:
    bundle = open_bundle(pack(sealed, tmp_path / "digits.zip"))
    assert (bundle.path.name, bundle.path.parent.parent) == ("bundle", temporary)
    assert bundle.path.parent.name.startswith("trueline-bundle-")
    assert bundle.manifest == open_bundle(sealed).manifest
    del bundle
    assert list(temporary.iterdir()) == []


def test_a_packed_bundle_that_is_refused_leaves_no_temporary_folder(
    sealed: Path, tmp_path: Path, temporary: Path
) -> None:
    packed = repacked(pack(sealed, tmp_path / "digits.zip"), "lineage.json", b"{}")
    with pytest.raises(BundleError, match=r"lineage\.json"):
        open_bundle(packed)
    assert list(temporary.iterdir()) == []


def test_a_manifest_is_read_up_to_its_bound_and_not_beyond(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (sealed / "bundle.json").stat().st_size
    monkeypatch.setattr("trueline.bundle.schema.MANIFEST_BYTES", size)
    assert open_bundle(sealed).name == "digits"
    monkeypatch.setattr("trueline.bundle.schema.MANIFEST_BYTES", size - 1)
    with pytest.raises(BundleError, match=f"not a regular file of at most {size - 1} bytes"):
        open_bundle(sealed)


@pytest.mark.parametrize("name", ['x\nint evil = system("id"); //', "\x1b[2J", "\u202egnp.exe", "\x9b31m", "n" * 1025])
@pytest.mark.parametrize("place", ["name", "input", "output", "size", "case"])
def test_a_name_that_would_end_a_line_or_drive_a_terminal_is_refused_wherever_it_stands(
    sealed: Path, name: str, place: str
) -> None:
    """A bundle's names become part of logs, of terminals and of the source text that export-cpp writes."""
    raw = json.loads((sealed / "bundle.json").read_text())
    signature = raw["signature"]
    if place == "name":
        reseal(sealed, {"name": name})
    elif place == "case":
        reseal(sealed, {"golden": [name]})
    else:
        if place == "size":
            signature["dims"][name] = {"min": 1}
        else:
            signature[f"{place}s"][0]["name"] = name
        reseal(sealed, {"signature": signature})
    with pytest.raises(BundleError, match="not printable text") as refused:
        open_bundle(sealed)
    assert refused.value.message.isprintable()


@pytest.mark.parametrize("change", [{"datatype": "EVIL"}, {"shape": [-1, 3]}])
def test_an_input_that_is_no_tensor_is_refused_when_the_bundle_is_opened(sealed: Path, change: dict[str, Any]) -> None:
    signature = json.loads((sealed / "bundle.json").read_text())["signature"]
    signature["inputs"][0] |= change
    reseal(sealed, {"signature": signature})
    with pytest.raises(BundleError, match="which no tensor has"):
        open_bundle(sealed)


def test_the_bounds_of_an_answer_travel_with_it_and_a_bundle_without_them_is_read(sealed: Path) -> None:
    x, y = {"x": np.ones((1, 3), np.float32)}, {"a/b": np.ones((1, 2), np.float32)}
    bounds = {"a/b": (np.array([3.0]), np.array([2.0]), np.array([1.0, 0.5]))}
    inputs, outputs, allowed = golden.encode([Golden(case="one", inputs=x, outputs=y, bounds=bounds)])
    (read,) = golden.decode(["one"], inputs, outputs, "here", allowed)
    assert [one.tolist() for one in read.bounds["a/b"]] == [[3.0], [2.0], [1.0, 0.5]]
    assert golden.decode(["one"], inputs, outputs, "here")[0].bounds == {}
    assert all(one.bounds == {} for one in open_bundle(sealed).golden())
    for wrong in ({"c": bounds["a/b"]}, {"a/b": bounds["a/b"][:2]}, {"a/b": (*bounds["a/b"][:2], np.ones(3))}):
        _, _, allowed = golden.encode([Golden(case="one", inputs=x, outputs=y, bounds=wrong)])
        with pytest.raises(BundleError, match="do not fit its shape"):
            golden.decode(["one"], inputs, outputs, "here", allowed)


def test_a_bundle_without_fields_that_were_added_later_is_opened_with_their_defaults(sealed: Path) -> None:
    path = sealed / "bundle.json"
    fields = json.loads(path.read_text())
    for dim in fields["signature"]["dims"].values():
        assert dim.pop("probed") is False
    fields["digest"] = ""
    digest = hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()
    path.write_text(json.dumps(fields | {"digest": digest}))
    bundle = open_bundle(sealed)
    assert bundle.digest == digest
    assert not any(dim.probed for dim in bundle.signature.dims.values())
