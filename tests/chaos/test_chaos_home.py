"""Where `trueline chaos` keeps its jobs."""

from trueline.chaos.storm import home_for


def test_the_folder_that_is_to_keep_the_storms_is_made_and_each_storm_has_one_of_its_own(tmp_path):
    keep = tmp_path / "not" / "there"
    homes = {home_for(str(keep)), home_for(str(keep))}
    assert len(homes) == 2
    assert all(home.is_dir() and home.parent == keep for home in homes)
