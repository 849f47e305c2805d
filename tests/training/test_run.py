"""The recipe in a run's folder."""

import random

import pytest

import atas
from atas.errors import DataError
from atas.training.run import RunFolder, load_recipe, write_recipe


@pytest.fixture
def run_folder(tmp_path, toy_recipe):
    folder = RunFolder(tmp_path)
    write_recipe(folder, toy_recipe("atas", {"method.eps": 0.2}))
    return folder


def test_a_recipe_is_read_as_it_was_written(run_folder, toy_recipe):
    assert load_recipe(run_folder) == toy_recipe("atas", {"method.eps": 0.2})
    assert atas.recipes.load(run_folder.recipe).method.eps == 0.2, "it is a recipe as any other"


def test_a_recipe_that_lost_lines_is_refused(run_folder):
    """It would be valid, with the default budget."""
    lines = run_folder.recipe.read_text().splitlines(keepends=True)
    generator = random.Random(0)
    for _ in range(30):
        first = generator.randrange(2, len(lines))
        last = generator.choice([len(lines), first + 1])
        run_folder.recipe.write_text("".join(lines[:first] + lines[last:]))
        with pytest.raises(DataError, match=r"was changed or damaged since its run began.*remove its second line"):
            load_recipe(run_folder)


def test_a_recipe_without_a_checksum_is_used_as_it_is(run_folder):
    lines = run_folder.recipe.read_text().replace("51/255", "0.3").splitlines(keepends=True)
    run_folder.recipe.write_text("".join(lines[:1] + lines[2:]))
    assert load_recipe(run_folder).method.eps == 0.3
