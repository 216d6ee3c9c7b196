"""Recipes: what they say, and what is said of a slip."""

from pathlib import Path

import pytest
from tests.support import TABLE, write_toml

from trellis.mixers import MIXERS
from trellis.models.presets import count_parameters
from trellis.training.optimization import context_at, learning_rate
from trellis.training.recipe import from_dict, load_recipe, override, read_table

RECIPES = Path(__file__).parents[2] / "recipes"
WHOLE = sorted(
    p for p in RECIPES.rglob("*.toml") if p.parent.name not in ("size", "text", "context", "mqar")
)
#: What the paper reports results of, size, text and context; and on how many tokens it trained.
PAPER = {
    **{f"125m-books-{c}": 2.4e9 for c in ("512", "1k", "2k", "4k", "8k", "16k", "32k")},
    **{f"350m-c4-{c}": 15e9 for c in ("2k", "4k", "8k", "16k")},
    **{f"780m-c4-{c}": 30e9 for c in ("2k", "4k", "8k", "16k")},
    "125m-pile-2k": 2.4e9,
    "125m-pile-8k": 2.4e9,
    "350m-pile-2k": 7.5e9,
}


def made(**sections):
    table = {section: dict(values) for section, values in TABLE.items()}
    table["data"]["path"] = "somewhere"
    for section, values in sections.items():
        if isinstance(values, dict):
            table.setdefault(section, {}).update(values)
        else:
            table[section] = values
    return table


def test_the_papers_runs_and_no_others_carry_its_name():
    assert {p.stem for p in (RECIPES / "paper").iterdir()} == PAPER.keys()


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_runs_have_its_size_text_context_and_tokens(name):
    recipe = load_recipe(RECIPES / "paper" / f"{name}.toml")
    size, text, context = name.split("-")
    assert (recipe.model.preset, recipe.data.path) == (size, f"data/{text}")
    assert recipe.data.context == int(context.replace("k", "")) * (1024 if "k" in context else 1)
    assert recipe.train.tokens == PAPER[name]


@pytest.mark.parametrize("path", WHOLE, ids=[str(p.relative_to(RECIPES)) for p in WHOLE])
def test_every_recipe_is_valid_for_every_mixer(path):
    counts = {}
    if read_table(path)["model"].get("start"):  # the folder's model, which is not there yet
        assert load_recipe(path).model.start
        return
    for mixer in MIXERS:
        recipe = load_recipe(path, [f"model.mixer={mixer}"])
        if path.parent.name in ("paper", "more"):
            assert recipe.rows * recipe.data.context == 524288
            continue  # building models of these sizes on no device takes a second each
        counts[mixer] = count_parameters(recipe.model.config(2048))
    assert not counts or max(counts.values()) <= 1.02 * min(counts.values())


def test_included_recipes_are_overridden_by_the_file_and_by_settings(tmp_path):
    write_toml(tmp_path / "base.toml", made())
    (tmp_path / "mine.toml").write_text(
        'include = "base.toml"\n[train]\ntokens = 1e6\n[data]\ncontext = 50\n'
    )
    recipe = load_recipe(tmp_path / "mine.toml", ["train.seed=7", "model.mixer=transformer"])
    assert (recipe.data.context, recipe.train.seed, recipe.model.mixer) == (50, 7, "transformer")
    assert recipe.steps == 5000  # tokens replaced the base's steps
    assert override(recipe, ["train.steps=3"]).steps == 3
    assert from_dict(recipe.as_dict()) == recipe
    (tmp_path / "base.toml").write_text('include = "mine.toml"')
    with pytest.raises(ValueError, match="includes itself"):
        load_recipe(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"lerning_rate": 1}}, "no key train.lerning_rate; did you mean train.learning"),
        ({"trian": {}}, "no section trian; did you mean train?"),
        ({"train": {"context": 8}}, "no key train.context; did you mean data.context?"),
        ({"train": {"steps": "ten"}}, "train.steps must be a whole number; got 'ten'"),
        ({"train": {"steps": 2.5}}, "train.steps must be a whole number; got 2.5"),
        ({"train": {"checkpointing": 1}}, "train.checkpointing must be true or false; got 1"),
        ({"train": {"rows": True}}, "train.rows must be a whole number; got True"),
        ({"train": {"betas": [0.9, "x"]}}, "train.betas must be a number; got 'x'"),
        ({"train": 3}, "train must be a section; got 3"),
        ({"train": {"tokens": 10}}, "exactly one of train.steps and train.tokens"),
        ({"train": {"precision": "fp8"}}, "train.precision must be one of auto, fp32, bf16"),
        ({"train": {"warmup": 2}}, "train.warmup must be a share from 0 to 1; got 2"),
        ({"train": {"rows": 0}}, "train.rows must be a whole number of at least 1; got 0"),
        ({"train": {"sequence_parallel": 5}}, "must divide data.context, 32; got 5"),
        ({"train": {"context_warmup": [[0.5, 8], [0.2, 16]]}}, "pairs .* with rising shares"),
        ({"train": {"context_warmup": [[0.5, 0]]}}, "at least one token; got"),
        ({"train": {"device": "gpu"}}, "train.device must be one of auto, cpu, cuda, mps"),
        ({"train": {"seed": 2**70}}, "train.seed must be from 0 to"),
        ({"model": {"norm_eps": -1}}, "model.norm_eps must be a number of at least 0; got -1"),
        ({"data": {"batches": "random"}}, "data.batches must be one of packed, contiguous"),
        ({"data": {"path": ""}}, "data.path must name a folder"),
        ({"model": {"mixer": "treliss"}}, "did you mean 'trellis'"),
        ({"model": {"mixer_config": {"slts": 8}}}, "no field 'slts'; did you mean 'slots'"),
        (
            {"model": {"hidden_size": 33, "mixer": "gated_delta_net"}},
            "needs a width of which 0.75 is whole; got 33",
        ),
        ({"model": {"preset": "2b"}}, "model.preset must be one of 125m"),
        ({"model": {"num_hidden_layers": None}}, "num_hidden_layers must be given"),
    ],
)
def test_slips_are_named(sections, message):
    with pytest.raises(ValueError, match=message):
        from_dict(made(**sections))


def test_settings_and_files_that_are_no_recipe(tmp_path):
    path = write_toml(tmp_path / "r.toml", made())
    with pytest.raises(ValueError, match=r"--set must be section\.key=value; got 'train\.steps'"):
        load_recipe(path, ["train.steps"])
    with pytest.raises(ValueError, match=r"--set train\.steps=\[1,: .* is not valid TOML"):
        load_recipe(path, ["train.steps=[1,"])
    with pytest.raises(ValueError, match=r"train\.steps must be a whole number; got '1e'"):
        load_recipe(path, ["train.steps=1e"])
    (tmp_path / "twice.toml").write_text("[[model]]\nhidden_size = 32\n")
    said = r"model must be one section, \[model\]; got a list of 1, as \[\[model\]\] makes it"
    with pytest.raises(ValueError, match=said):
        load_recipe(tmp_path / "twice.toml")
    with pytest.raises(FileNotFoundError, match=r"there is no recipe .*none\.toml"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[train\n")
    with pytest.raises(ValueError, match=r"broken\.toml is not valid TOML"):
        load_recipe(tmp_path / "broken.toml")
    levels = 5000
    for deep in (
        "x = " + "[" * levels,
        "[train]\nx = " + "{a=" * levels,
        "train.steps" + ".a" * levels + "=1",
    ):
        (tmp_path / "deep.toml").write_text(deep)
        with pytest.raises(ValueError, match="nested too deeply"):
            load_recipe(tmp_path / "deep.toml")
    for deep in ("train.steps=" + "[" * levels, "train.steps" + ".a" * levels + "=1"):
        with pytest.raises(ValueError, match="nested too deeply"):
            load_recipe(path, [deep])
    (tmp_path / "odd.toml").write_text("include = 3\n")
    with pytest.raises(ValueError, match="include must be one or several file names; got 3"):
        load_recipe(tmp_path / "odd.toml")


def test_the_learning_rate_warms_up_and_falls_to_its_minimum():
    train = {"steps": 100, "warmup": 0.1, "learning_rate": 1.0, "min_learning_rate": 0.1}
    recipe = from_dict(made(train=train))
    rates = [learning_rate(recipe, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))
    assert rates[-1] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.55, abs=0.02)


def test_the_context_warms_up():
    recipe = from_dict(made(train={"steps": 10, "context_warmup": [[0.2, 8], [0.5, 16]]}))
    assert [context_at(recipe, step) for step in range(6)] == [8, 8, 16, 16, 16, 32]
