"""`trueline submit manifest.yml`: what the command line refuses before anything is submitted."""

import pytest

from trueline.cli.app import run

MANIFEST = "name: a b\ngpus: 0\nlearners: 1\nframework: {name: pytorch, command: exit 0}\n"


@pytest.fixture
def refuse(tmp_path, monkeypatch, capsys):
    """Runs `submit` in an empty folder; returns its error and hint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments, manifest=MANIFEST):
        (tmp_path / "manifest.yml").write_text(manifest)
        assert run(["submit", *arguments]) == 2
        assert not (tmp_path / "jobs").exists()  # nothing was submitted
        return capsys.readouterr().err

    return call


def test_a_misspelt_field_is_one_error_with_its_place_and_a_hint(refuse):
    error = refuse("manifest.yml", manifest=MANIFEST.replace("learners", "lerners"))
    assert error.splitlines()[0].startswith("error: manifest.yml:3:1: there is no field 'lerners' (known: name,")
    assert "did you mean 'learners'?" in error.splitlines()[1]


def test_settings_of_a_recipe_are_no_settings_of_a_manifest(refuse):
    assert "a manifest has no use for workers, epochs" in refuse("manifest.yml", "--workers", "2", "--epochs", "3")


def test_options_of_a_manifest_are_refused_for_a_recipe_and_on_is_needed_there(refuse):
    assert "--model and --set are for manifests" in refuse("recipe.py", "--set", "gpus=0", "--on", "local")
    assert "--on is missing" in refuse("recipe.py")


def test_a_value_to_set_has_a_field_and_a_model_definition_exists(refuse):
    assert "--set gpus is not FIELD=VALUE" in refuse("manifest.yml", "--set", "gpus")
    assert "there is no folder or zip none.zip" in refuse("manifest.yml", "--model", "none.zip")
    assert "no size" in refuse("manifest.yml", "--set", "memory=2")
