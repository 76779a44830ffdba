"""Which version a request goes to: by its name, the split, or the default; and what was remembered of it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trueline.errors import NotReady, RequestError
from trueline.serve.models.catalog import Models, Shadow, UnknownModel, UnknownVersion
from trueline.serve.models.split import Split
from trueline.serve.models.version import ProgramVersion


def served(*versions: str, model: str = "tiny") -> Models:
    """A model of ready versions, the first of which is its default."""
    models = Models()
    for version in versions:
        models.show(ProgramVersion(model=model, version=version, state="ready"))
    return models


def asked(models: Models, times: int = 200) -> set[str]:
    """The versions that requests of many keys, and of none, go to."""
    keyed = {models.find("tiny", key=f"user-{number}").version for number in range(times)}
    return keyed | {models.find("tiny").version for _ in range(times)}


def test_a_request_goes_to_the_version_it_names_and_else_to_the_first_until_another_is_the_default() -> None:
    models = served("10", "9", "2")
    assert (models.find("tiny", "9").version, asked(models)) == ("9", {"10"})
    models.set_default("tiny", "2")
    assert (models.find("tiny", "10").version, asked(models)) == ("10", {"2"})
    with pytest.raises(UnknownVersion):
        models.find("tiny", "1")
    with pytest.raises(UnknownModel):
        models.find("tinier")


def test_where_the_default_goes_the_oldest_that_stays_takes_its_place() -> None:
    models = served("2", "1", "10")
    models.remove("tiny", "2")
    assert models.default("tiny") == "1"
    models.remove("tiny", "10")
    assert asked(models) == {"1"}
    models.remove("tiny", "1")
    assert models.names() == []


@pytest.mark.parametrize("state", ["loading", "failed", "retiring"])
def test_no_traffic_is_sent_to_a_version_that_is_not_ready(state: str) -> None:
    models = served("1", "2")
    models.find("tiny", "2").state = state  # type: ignore[assignment]
    with pytest.raises(NotReady):
        models.set_default("tiny", "2")
    with pytest.raises(NotReady):
        models.set_split("tiny", Split({"1": 1, "2": 1}))
    assert (models.split("tiny"), asked(models)) == (None, {"1"})


def test_a_split_sends_requests_to_all_that_have_weight_and_ends_with_a_default() -> None:
    models = served("1", "2", "3")
    models.set_split("tiny", Split({"1": 1, "2": 1, "3": 0}))
    assert asked(models) == {"1", "2"}
    models.set_default("tiny", "3")
    assert (models.split("tiny"), asked(models)) == (None, {"3"})


def test_a_split_gives_each_version_its_share_with_a_key_and_without() -> None:
    split = Split({"1": 3, "2": 1})
    keyed = sum(split.choose(f"user-{number}") == "2" for number in range(4000))
    drawn = sum(split.choose() == "2" for _ in range(4000))
    assert 850 < keyed < 1150
    assert 850 < drawn < 1150


@pytest.mark.parametrize("weights", [{}, {"1": 0}, {"1": 0, "2": 0}, {"1": -1}, {"1": 1, "2": -0.1}, {"1": 1e9},
                                     {"1": float("nan")}, {"1": float("inf")}])  # fmt: skip
def test_weights_are_numbers_from_0_on_and_one_is_above_it(weights: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        Split(weights)


def remembers(models: Models) -> Callable[[], bool]:
    """Whether what was remembered of where requests go stands no more, since it was last asked."""
    before = [models.changes]

    def changed() -> bool:
        before.append(models.changes)
        return before[-1] != before[-2]

    return changed


def test_every_act_that_sends_requests_elsewhere_ends_what_is_remembered() -> None:
    models = served("1", "2")
    changed = remembers(models)
    models.show(ProgramVersion(model="tiny", version="2", state="ready"))
    assert changed()
    models.set_default("tiny", "2")
    assert changed()
    models.set_split("tiny", Split({"1": 1, "2": 1}))
    assert changed()
    models.restore("tiny", "1", None)
    assert changed()
    models.remove("tiny", "2")
    assert changed()
    models.add("tiny", "3")
    assert changed()
    models.find("tiny")
    models.versions("tiny")
    assert not changed()


def test_what_leads_to_one_version_alone_is_a_name_or_the_default_and_no_split() -> None:
    models = served("1", "2")
    first, second = (models.find("tiny", version) for version in ("1", "2"))
    assert models.leads_to(first, "tiny", None)
    assert models.leads_to(second, "tiny", "2")
    assert not models.leads_to(second, "tiny", None)
    models.set_split("tiny", Split({"1": 1}))
    assert not models.leads_to(first, "tiny", None)
    assert models.leads_to(first, "tiny", "1")
    models.show(ProgramVersion(model="tiny", version="1", state="ready"))
    assert not models.leads_to(first, "tiny", "1")


def test_default_and_split_are_put_back_as_they_were() -> None:
    models = served("1", "2")
    models.set_split("tiny", Split({"1": 1, "2": 1}))
    models.restore("tiny", "2", None)
    assert asked(models) == {"2"}
    models.restore("tiny", "1", Split({"1": 1, "2": 1}))
    assert asked(models) == {"1", "2"}


def test_a_version_takes_its_split_and_its_shadow_along_and_no_others() -> None:
    models = served("1", "2", "3")
    models.set_split("tiny", Split({"1": 1, "2": 1}))
    models.shadows["tiny"] = Shadow(models.find("tiny", "3"))
    models.remove("tiny", "3")
    assert (models.shadows, models.split("tiny") is None) == ({}, False)
    models.shadows["tiny"] = Shadow(models.find("tiny", "1"))
    models.remove("tiny", "2")
    assert (list(models.shadows), models.split("tiny")) == (["tiny"], None)


@pytest.mark.parametrize(
    ("state", "at_start", "later"), [("ready", True, True), ("loading", False, True), ("failed", False, False),
                                     ("retiring", False, False)]
)  # fmt: skip
def test_a_server_is_ready_when_every_default_is_and_while_it_runs_also_when_one_loads(
    state: str, at_start: bool, later: bool
) -> None:
    models = served("1", "2")
    models.show(ProgramVersion(model="other", version="1", state=state))  # type: ignore[arg-type]
    models.find("tiny", "2").state = "failed"  # not the default: the server is ready without it
    assert models.ready is at_start
    models.started = True
    assert models.ready is later


def test_a_server_without_models_is_ready_once_it_has_started() -> None:
    models = Models()
    assert not models.ready
    models.started = True
    assert models.ready
