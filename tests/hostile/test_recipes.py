"""Malformed recipes: as files, as settings, and as sections with values that nobody means."""

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.support import (
    DOCUMENTED,
    cases,
    exit_code,
    often,
    spoiled_bytes,
    unchanged,
    values,
)
from tests.support import make_corpus, recipe_table, write_toml

from trellis.training.distributed import Processes
from trellis.training.estimate import check_fits
from trellis.training.recipe import Recipe, from_dict, load_recipe

SECTIONS = {
    section.name: [key.name for key in dataclasses.fields(section.default_factory)]
    for section in dataclasses.fields(Recipe)
}
keys = st.sampled_from([(s, k) for s, names in SECTIONS.items() for k in names])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@often
def test_values_that_nobody_means(corpus, times):
    group = Processes(0, 1, torch.device("cpu"), 1, None)

    @cases(60, times)
    @given(st.dictionaries(keys, values, min_size=1, max_size=3))
    def check(changes):
        table = recipe_table(corpus)
        for (section, key), value in changes.items():
            table.setdefault(section, {})[key] = value
        try:
            recipe = from_dict(table)
            check_fits(recipe, 257, group)
        except DOCUMENTED:
            return
        assert recipe.steps >= 1
        assert recipe.rows >= 1

    check()


@often
def test_files_that_are_spoiled(corpus, tmp_path, times):
    whole = write_toml(tmp_path / "whole.toml", recipe_table(corpus)).read_bytes()
    path = tmp_path / "r.toml"

    @cases(40, times)
    @given(spoiled_bytes(whole))
    def check(data):
        path.write_bytes(data)
        with contextlib.suppress(*DOCUMENTED):
            load_recipe(path)

    check()


@often
def test_the_command_refuses_in_one_line(corpus, tmp_path, times):
    path = write_toml(tmp_path / "r.toml", recipe_table(corpus))
    odd = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
    bad = st.one_of(
        odd, st.sampled_from(["-1", "[1,", "{", "1e999", "nan", str(2**70), '"x', "[[1]]"])
    )

    @cases(12, times)
    @given(keys, bad)
    def check(key, text):
        setting = f"{'.'.join(key)}={text}"
        with unchanged(tmp_path):
            code, said = exit_code(
                "train", path, "--out", tmp_path / "run", "--dry-run", "--set", setting
            )
        assert code in (0, 1, 2)
        assert "Traceback" not in said
        assert not code or said

    check()
