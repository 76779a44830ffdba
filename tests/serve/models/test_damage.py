"""A store in which anything at all is wrong with some entries serves all others, and names each that it refuses."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trueline.bundle import pack
from trueline.serve import server
from trueline.serve.assembly import assemble
from trueline.serve.models.sources import NotInStore, Store
from trueline.serve.settings import ServeSettings
from worlds import archives, bundles
from worlds.servers import StoreApp


def tamper(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def lead_out(path: Path) -> None:
    """A link to the same content outside the bundle and the store."""
    outside = path.parents[3] / f"{path.parents[1].name}.{path.name}"
    shutil.copy(path, outside)
    replace(path, lambda link: link.symlink_to(outside))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "tampered": tamper,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"?"),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "a folder": lambda path: replace(path, Path.mkdir),
    "a pipe": lambda path: replace(path, os.mkfifo),
    "a link to nothing": lambda path: replace(path, lambda link: link.symlink_to("nothing")),
    "a loop of links": lambda path: replace(path, lambda link: link.symlink_to(path.name)),
    "a link that leads out": lead_out,
}
FILES = ("programs/model.onnx", "golden/outputs.safetensors")


def test_whatever_is_wrong_with_a_file_of_a_bundle_it_is_named_and_the_others_are_served(tmp_path: Path) -> None:
    store = bundles.store(tmp_path / "store", "good")
    whole = bundles.double_plus(tmp_path / "whole").path
    bad = {}
    for damage, harm in DAMAGES.items():
        for file in FILES:
            name = f"{damage} {Path(file).stem}".replace(" ", "-")
            shutil.copytree(whole, store / f"{name}.bundle")
            harm(store / f"{name}.bundle" / file)
            bad[name] = file

    async def start() -> dict[str, tuple[str, str]]:
        parts = assemble(ServeSettings(model_store=str(store), load="all", port=0))
        await server._begin(parts)
        return {one.model: (one.state, one.reason) for one in parts.core.fleet.models.all()}

    found = asyncio.run(start())
    assert found.pop("good") == ("ready", "")
    assert found.keys() == bad.keys()
    assert {state for state, _ in found.values()} == {"failed"}
    assert all(reason and str(tmp_path) not in reason for _, reason in found.values())


@pytest.mark.parametrize("name", ["odd.tlb", "odd.bundle", "odd.mar", "odd"])
@pytest.mark.parametrize("damage", ["a pipe", "a link to nothing", "a loop of links"])
def test_an_entry_that_is_no_file_and_no_folder_is_left_alone_and_hides_no_other(
    tmp_path: Path, damage: str, name: str
) -> None:
    """A loop of links ended the server at its start; reading a pipe would have waited without end."""
    store = bundles.store(tmp_path / "store", "good")
    (store / name).write_bytes(b"")
    DAMAGES[damage](store / name)
    with StoreApp(store) as app:
        assert [entry.model for entry in app.store.entries()] == ["good"]
        with pytest.raises(NotInStore):
            app.store.find(name)
        status, _ = app.manage("POST", f"/models?url={name}")
        assert status == 404
        assert app.manage("POST", "/models?url=good.bundle&initial_workers=1")[0] == 200


def test_a_hard_link_in_the_store_is_an_entry_of_its_own_and_removing_it_leaves_the_other(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    pack(bundles.double_plus(tmp_path / "whole").path, store / "one.tlb")
    os.link(store / "one.tlb", store / "two.tlb")
    os.link(archives.mar(store / "noop.mar"), store / "again.mar")
    assert {entry.source for entry in Store(store).entries()} == {"one.tlb", "two.tlb"}
    (store / "one.tlb").unlink()
    with StoreApp(store) as app:
        assert app.manage("POST", "/models?url=two.tlb&initial_workers=1")[0] == 200
