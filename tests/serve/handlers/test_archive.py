"""Model archives: what is laid out, and what is refused by the name of its entry. No server, no code of theirs."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from trueline import serve
from trueline.cli import app
from trueline.files import sha256_file
from trueline.serve.handlers import archive
from trueline.serve.handlers.archive import ArchiveError, Caps
from worlds import archives, servers


def unpacked(path: Path, tmp_path: Path, caps: Caps | None = None) -> archive.Archive:
    into = tmp_path / "into"
    into.mkdir()
    return archive.unpack(path, into, caps)


def tar(path: Path, files: dict[str, bytes], top: str = "") -> Path:
    with tarfile.open(path, "w:gz") as made:
        for name, content in files.items():
            info = tarfile.TarInfo(top + name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return path


def test_a_mar_a_tar_with_and_without_a_top_folder_and_a_plain_folder_are_read_alike(tmp_path: Path) -> None:
    files = archives.files(config="batchSize: 4\nmine: {a: 1}", extra={"extra/labels.json": b"{}"})
    folder = tmp_path / "plain"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    sources = {
        "zip": archives.mar(
            tmp_path / "a.mar", config="batchSize: 4\nmine: {a: 1}", extra={"extra/labels.json": b"{}"}
        ),
        "tar": tar(tmp_path / "a.tar.gz", files),
        "top": tar(tmp_path / "b.tar.gz", files, top="model-1/"),
        "dot": tar(tmp_path / "c.tar.gz", files, top="./"),
        "folder": folder,
    }
    for what, source in sources.items():
        assert archive.is_archive(source), what
        (tmp_path / what).mkdir()
        found = unpacked(source, tmp_path / what)
        assert (found.manifest.model, found.manifest.version, found.manifest.handler) == ("noop", "1.0", "noop.py")
        assert found.config == {"batchSize": 4, "mine": {"a": 1}}, what
        laid_out = {
            p.relative_to(found.folder).as_posix(): p.read_bytes() for p in found.folder.rglob("*") if p.is_file()
        }
        assert laid_out == files, what
        assert archive.peek(source).model == "noop"


def test_the_digest_names_the_content_and_a_changed_archive_has_another(tmp_path: Path) -> None:
    one = unpacked(archives.mar(tmp_path / "a.mar"), tmp_path)
    (tmp_path / "second").mkdir()
    two = unpacked(archives.mar(tmp_path / "b.mar", "def handle(data, context): return []"), tmp_path / "second")
    assert one.digest == sha256_file(tmp_path / "a.mar") != two.digest


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil", "a/../../evil", "..\\evil", "C:\\evil", "a/../../intox"])
def test_an_entry_that_leaves_the_folder_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    path = archives.mar(tmp_path / "a.mar")
    with zipfile.ZipFile(path, "a") as made:
        made.writestr(zipfile.ZipInfo(name), b"x")
    with pytest.raises(ArchiveError, match="leaves the archive's folder") as refused:
        unpacked(path, tmp_path)
    assert name.replace("\\", "\\")[:8] in str(refused.value)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.mar", "into"]


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    path = archives.mar(tmp_path / "a.mar")
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as made:
        made.writestr(link, "/etc/passwd")
    with pytest.raises(ArchiveError, match="entry 'link' is a link or a device"):
        unpacked(path, tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_devices_and_pipes_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as made:
        info = tarfile.TarInfo("top/odd")
        info.type, info.linkname = kind, "/etc/passwd"
        made.addfile(info)
    with pytest.raises(ArchiveError, match="entry 'top/odd' is a link or a device"):
        unpacked(tmp_path / "a.tar.gz", tmp_path)


def test_a_link_in_a_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "MAR-INF" / "MANIFEST.json").write_bytes(archives.manifest())
    os.symlink("/etc/passwd", folder / "stolen")
    with pytest.raises(ArchiveError, match="entry 'stolen' is a link or a device"):
        unpacked(folder, tmp_path)


def test_too_many_entries_too_many_bytes_and_a_bomb_are_refused(tmp_path: Path) -> None:
    zeros = archives.mar(tmp_path / "zeros.mar", extra={"zeros": bytes(3_000_000)})
    many = archives.mar(tmp_path / "many.mar", extra={f"f{i}": b"" for i in range(30)})
    squeezed = tar(tmp_path / "zeros.tar.gz", archives.files(extra={"zeros": bytes(3_000_000)}))
    refusals = [
        (many, Caps(entries=20), "beyond the 20 that an archive may have"),
        (zeros, Caps(total_bytes=2_000_000), "'zeros' the archive is over 2000000 bytes"),
        (zeros, Caps(ratio=100, ratio_from_bytes=1_000_000), "'zeros' the archive unpacks into more than 100 times"),
        (squeezed, Caps(ratio=100, ratio_from_bytes=1_000_000), "more than 100 times"),
        (squeezed, Caps(total_bytes=2_000_000, entries=50), "over 2000000 bytes|over 2102400 bytes"),
    ]
    for number, (path, caps, words) in enumerate(refusals):
        into = tmp_path / f"into-{number}"
        into.mkdir()
        with pytest.raises(ArchiveError, match=words):
            archive.unpack(path, into, caps)


def test_a_tar_header_that_asks_for_a_gigabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**30
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(10_000)))
    with pytest.raises(ArchiveError, match="made to fill the memory"):
        unpacked(tmp_path / "a.tar.gz", tmp_path)


def test_an_entry_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as made:
        for _ in range(2):
            made.addfile(tarfile.TarInfo("a"), io.BytesIO())
    with pytest.raises(ArchiveError, match="entry 'a' comes twice"):
        unpacked(tmp_path / "b.tar.gz", tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "torn, or neither"),
        (b"PK\x03\x04 not a zip", "torn, or neither"),
        (b"\x1f\x8b" + b"x" * 50, "torn|neither"),
    ],
)
def test_what_is_no_archive_is_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.mar").write_bytes(content)
    with pytest.raises(ArchiveError, match=words):
        unpacked(tmp_path / "a.mar", tmp_path)


def test_a_torn_archive_is_refused(tmp_path: Path) -> None:
    path = archives.mar(tmp_path / "a.mar", extra={"weights": os.urandom(100_000)})
    content = bytearray(path.read_bytes())
    content[50_000] ^= 255
    path.write_bytes(content)
    with pytest.raises(ArchiveError, match="torn"):
        unpacked(path, tmp_path)


def test_an_archive_without_a_manifest_says_how_one_is_made(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.mar", "w") as made:
        made.writestr("handler.py", b"")
    with pytest.raises(ArchiveError, match=r"has no MAR-INF/MANIFEST\.json") as refused:
        unpacked(tmp_path / "a.mar", tmp_path)
    assert "torch-model-archiver" in refused.value.hint


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"model": {"modelName": "x"}}', b'{"model": 1}', b"\xff"])
def test_a_manifest_that_says_nothing_usable_is_refused(tmp_path: Path, text: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "a.mar", "w") as made:
        made.writestr("MAR-INF/MANIFEST.json", text)
    with pytest.raises(ArchiveError, match="no manifest of an archive"):
        unpacked(tmp_path / "a.mar", tmp_path)


def test_another_runtime_is_refused_in_torchserves_words(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.mar", "w") as made:
        made.writestr("MAR-INF/MANIFEST.json", archives.manifest().replace(b'"python"', b'"LSP"'))
    with pytest.raises(ArchiveError, match="Invalid RuntimeType value: LSP"):
        unpacked(tmp_path / "a.mar", tmp_path)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system ['true']", "- a\n- b", "a: [", "? [1, 2]\n: 3"])
def test_a_configuration_that_is_code_or_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ArchiveError, match=r"'model-config\.yaml' is"):
        unpacked(archives.mar(tmp_path / "a.mar", config=text), tmp_path)


def test_an_archive_without_a_program_is_told_how_to_become_a_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = archives.mar(tmp_path / "a.mar", modelFile="model.py", serializedFile="w.pt")
    assert app.run(["torchserve", "import", str(weights)]) == 2
    said = capsys.readouterr().err
    assert "holds weights and a model in Python (model.py), and no program" in said
    assert "torch.load(..., weights_only=True)" in said
    own = archives.mar(tmp_path / "b.mar")
    assert app.run(["torchserve", "import", str(own)]) == 2
    assert "trueline serve --allow-code" in capsys.readouterr().err
    elsewhere = archives.mar(tmp_path / "c.mar", serializedFile="../../etc/passwd")
    assert app.run(["torchserve", "import", str(elsewhere)]) == 2
    assert app.run(["torchserve", "import", str(tmp_path / "none.mar")]) == 2


def test_a_configuration_outside_the_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="which the archive does not hold"):
        unpacked(archives.mar(tmp_path / "a.mar", configFile="../../etc/hosts"), tmp_path)


SCORED = """
    import torch

    class Handler:
        def initialize(self, context):
            folder = context.system_properties["model_dir"]
            self.model = torch.jit.load(folder + "/model.pt")

        def handle(self, data, context):
            with torch.no_grad():
                return [self.model(torch.tensor([row["body"]])).tolist()[0] for row in data]
"""


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:.*torch\.jit")
def test_an_archive_of_torchscript_becomes_a_bundle_that_answers_as_its_handler_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()).eval()
    torch.jit.save(torch.jit.trace(model, torch.randn(2, 3)), tmp_path / "model.pt")
    program = {"model.pt": (tmp_path / "model.pt").read_bytes()}
    store = tmp_path / "store"
    store.mkdir()
    made = archives.mar(store / "noop.mar", SCORED, extra=program, serializedFile="model.pt")
    asked = ["torchserve", "import", str(made), "--out", str(tmp_path / "noop.bundle")]
    assert app.run(asked) == 2
    assert "--example" in capsys.readouterr().err
    assert app.run([*asked, "--example", "input=FP32[batch,3]"]) == 0
    assert "left behind: the handler 'noop.py'" in capsys.readouterr().out
    row = [0.5, -1.0, 2.0]
    answers = []
    for source, options in ((tmp_path / "noop.bundle", {}), (made, {"allow_code": True})):
        with serve.start(source, **options) as server:  # type: ignore[arg-type]
            found = servers.post(f"{server.url}/predictions/{server.model}", json=row)
            assert found.status_code == 200, found.text
            answers.append(found.json())
    assert answers[0] == pytest.approx(answers[1], rel=1e-6)


BILLION = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    "text", [BILLION + "minWorkers: *a8", "a: &a [*a]", "a: &a {b: *a}", "a: [" + "1," * 10_001 + "]"]
)
def test_a_configuration_that_stands_for_billions_of_values_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ArchiveError, match=r"'model-config\.yaml' has more than 10000 values") as refused:
        unpacked(archives.mar(tmp_path / "a.mar", config=text), tmp_path)
    assert len(refused.value.message) < 200


def test_a_configuration_may_use_aliases(tmp_path: Path) -> None:
    text = "a: &a {minWorkers: 2}\nb: *a\n<<: *a"
    assert unpacked(archives.mar(tmp_path / "a.mar", config=text), tmp_path).config["minWorkers"] == 2


@pytest.mark.parametrize("folder", [True, False])
def test_no_more_of_a_manifest_is_read_than_a_manifest_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    monkeypatch.setattr(archive, "TEXT_BYTES", 1000)
    made = tmp_path / ("a" if folder else "a.mar")
    if folder:
        (made / "MAR-INF").mkdir(parents=True)
        (made / "MAR-INF" / "MANIFEST.json").write_bytes(b" " * 5000 + archives.manifest())
    else:
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("MAR-INF/MANIFEST.json", b" " * 5000 + archives.manifest())
    assert len(archive.read_text_file(Path(__file__))) == 1001
    for read in (lambda: archive.peek(made), lambda: unpacked(made, tmp_path)):
        with pytest.raises(ArchiveError, match="over 1000 bytes"):
            read()
