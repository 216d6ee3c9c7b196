"""Multi-query associative recall: the sequences, the score, the training and the command."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from trellis.cli.evaluation import app, show
from trellis.evaluation import mqar
from trellis.evaluation.mqar import batches, train
from trellis.evaluation.mqar.data import (
    POWER,
    Group,
    Preset,
    Setting,
    Source,
    accuracy,
    examples,
    preset,
    query_logits,
)
from trellis.models.config import TrellisConfig
from trellis.models.loss import IGNORED
from trellis.models.modeling import TrellisForCausalLM

TINY = Setting(12, 2)
LONGER = Setting(16, 3)


def tiny_preset(**changed):
    values = {
        "vocab_size": 12,
        "groups": (Group((Source(TINY, 10_000),), (TINY, LONGER)),),
        "widths": (16,),
        "learning_rates": (1e-2,),
        "steps": 4,
        "batch_tokens": 96,
        "test_examples": 70,
        "validation_examples": 10,
        "check_every": 2,
        "clip": 1.0,
    }
    return Preset("tiny", **{**values, **changed})


def tiny_config(mixer="gated_delta_net", width=16, layers=1, vocab_size=12):
    return TrellisConfig(
        vocab_size=vocab_size, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=1, mixer=mixer,
    )  # fmt: skip


def measured(*arguments, **options):
    """Trains as the command does, prints the report, and returns the records."""
    report = mqar.run(*arguments, say=lambda line: print(line, file=sys.stderr), **options)
    show(report)
    return report.found


def pairs_of(row, pairs):
    return {row[2 * n]: row[2 * n + 1] for n in range(pairs)}


@pytest.mark.parametrize("setting", [Setting(64, 4), Setting(32, 8), Setting(41, 3)])
@pytest.mark.parametrize("random_non_queries", [False, True])
def test_sequences_are_built_as_said(setting, random_non_queries):
    vocab = 32
    data = examples(setting, vocab, 100, split="train", random_non_queries=random_non_queries)
    assert data.inputs.shape == data.labels.shape == (100, setting.length)
    for row, labels in zip(data.inputs.tolist(), data.labels.tolist()):
        known = pairs_of(row, setting.pairs)
        assert len(known) == len(set(known.values())) == setting.pairs  # all different
        assert all(1 <= key < vocab // 2 <= value < vocab for key, value in known.items())
        places = [place for place, label in enumerate(labels) if label != IGNORED]
        assert sorted(row[place] for place in places) == sorted(known)  # every key once
        assert all(labels[place] == known[row[place]] for place in places)
        gaps = [place - 2 * setting.pairs for place in places]
        assert min(gaps) >= 0
        assert all(gap % 2 == 0 for gap in gaps)
        assert len(set(gaps)) == setting.pairs
        rest = [row[p] for p in range(2 * setting.pairs, setting.length) if p not in places]
        assert all(0 <= token < vocab for token in rest)
        assert random_non_queries or not any(rest)
    if random_non_queries:
        filled = data.inputs[:, 2 * setting.pairs + 1 :: 2]  # odd places have no queries
        assert set(filled.flatten().tolist()) == set(range(vocab))


def test_gaps_follow_the_power_law_of_one_by_one_draws():
    setting, rows = Setting(40, 5), 4096
    data = examples(setting, 32, rows, split="train", random_non_queries=False)
    space = 15
    found = (data.labels[:, 10::2] != IGNORED).double().mean(0).numpy()
    chances = np.arange(1, space + 1) ** (POWER - 1)
    chances /= chances.sum()
    generator = np.random.default_rng(5)
    counts = np.zeros(space)
    for _ in range(rows):
        counts[generator.choice(space, size=5, replace=False, p=chances)] += 1
    expected = counts / rows
    error = np.sqrt(2 * expected * (1 - expected) / rows)
    assert (np.abs(found - expected) < 5 * error).all()
    assert found[0] > found[3] > found[14]  # soon is likelier
    # The first key is the first draw.
    first = (data.inputs[:, 10::2] == data.inputs[:, :1]).double().mean(0).numpy()
    assert (np.abs(first - chances) < 5 * np.sqrt(chances * (1 - chances) / rows)).all()


def test_all_keys_and_values_are_used_alike():
    data = examples(Setting(16, 3), 20, 6400, split="test", random_non_queries=False)
    for tokens, kinds in ((data.inputs[:, 0:6:2], 9), (data.inputs[:, 1:6:2], 10)):
        counts = tokens.flatten().bincount(minlength=20).double()
        counts = counts[counts > 0]
        assert len(counts) == kinds
        mean = 3 * 6400 / kinds
        assert (counts - mean).abs().max() < 5 * mean**0.5


def test_an_example_depends_on_its_number_alone():
    setting = Setting(32, 4)
    whole = examples(setting, 64, 200, split="test", seed=3)
    for first, count in ((0, 1), (0, 70), (63, 2), (130, 70)):
        part = examples(setting, 64, count, split="test", seed=3, first=first)
        assert torch.equal(part.inputs, whole.inputs[first : first + count])
        assert torch.equal(part.labels, whole.labels[first : first + count])
    assert part.sha256() != whole.sha256()
    assert examples(setting, 64, 200, split="test", seed=3).sha256() == whole.sha256()
    assert examples(setting, 64, 200, split="test", seed=4).sha256() != whole.sha256()


def assignments(data, pairs):
    """What each sequence asks to remember, whatever the order of its pairs."""
    rows = data.inputs[:, : 2 * pairs].reshape(-1, pairs, 2)
    order = rows[:, :, 0].argsort(1)
    ordered = rows.gather(1, order[:, :, None].expand(-1, -1, 2))
    return {row.tobytes() for row in ordered.numpy()}


def test_nothing_tested_is_trained_on():
    small = preset("small")
    (group,) = small.groups
    for source in group.train:
        setting = source.setting
        draw = {"setting": setting, "vocab_size": small.vocab_size}
        seen = assignments(examples(**draw, count=source.examples, split="train"), setting.pairs)
        assert len(seen) == source.examples
        tested = assignments(examples(**draw, count=500, split="test"), setting.pairs)
        validated = assignments(examples(**draw, count=500, split="validation"), setting.pairs)
        assert not seen & tested
        assert not seen & validated
        assert not validated & tested


def copier(vocab_size):
    """Logits of what came after the first token at an even place that is like this one."""

    def logits(ids):
        found = torch.zeros(*ids.shape, vocab_size)
        for row, tokens in enumerate(ids.tolist()):
            for place, token in enumerate(tokens):
                before = tokens[: place + 1 : 2]
                if token in before[:-1]:
                    found[row, place, tokens[2 * before.index(token) + 1]] = 1.0
        return found

    return logits


@pytest.mark.parametrize("setting", [Setting(64, 4), Setting(64, 16)])
@pytest.mark.parametrize("random_non_queries", [False, True])
def test_a_perfect_copier_scores_all(setting, random_non_queries):
    data = examples(setting, 256, 50, split="test", random_non_queries=random_non_queries)
    assert accuracy(copier(256), data) == 1.0


def test_a_guesser_scores_chance():
    vocab, count = 64, 2000
    data = examples(Setting(32, 8), vocab, count, split="test")
    generator = torch.Generator().manual_seed(1)

    def guess(ids):
        values = torch.randint(vocab // 2, vocab, ids.shape, generator=generator)
        return torch.nn.functional.one_hot(values, vocab)

    chance = 1 / (vocab // 2)
    error = (chance * (1 - chance) / (8 * count)) ** 0.5
    assert abs(accuracy(guess, data) - chance) < 4 * error


@pytest.mark.parametrize("mixer", ["trellis", "transformer", "mamba2"])
def test_batched_is_one_by_one_and_cached_is_whole(mixer):
    model = TrellisForCausalLM(tiny_config(mixer, vocab_size=16)).eval()
    data = examples(Setting(24, 4), 16, 70, split="test")
    whole = query_logits(model, *data)
    asked = data.labels != IGNORED
    assert torch.allclose(whole, model(data.inputs).logits[asked], atol=1e-6)

    def cached(ids):
        cache = model.init_cache(len(ids))
        parts = [model(part, past_key_values=cache).logits for part in ids.split(7, dim=1)]
        return torch.cat(parts, 1)

    with torch.no_grad():
        assert torch.allclose(whole, query_logits(cached, *data), atol=1e-5)
    together = accuracy(model, data)
    assert together == accuracy(model, data, batch_tokens=1) == accuracy(cached, data)


def test_a_small_model_learns():
    config = tiny_config(width=32)
    learning = tiny_preset(
        learning_rates=(2e-2,), steps=200, batch_tokens=768, validation_examples=64,
        check_every=20, stop_at=0.8,
    )  # fmt: skip
    (group,) = learning.groups
    trained = train(config, learning, group)
    # A guess among the two values of the context is right in half of the cases.
    assert accuracy(trained.model, examples(TINY, 12, 200, split="test")) > 0.7
    (attempt,) = trained.attempts
    assert attempt["steps"] == attempt["curve"][-1]["step"] < 200  # stopped early
    assert attempt["curve"][-1]["loss"] < attempt["curve"][0]["loss"]


def test_training_is_set_by_its_seed():
    (group,) = tiny_preset().groups
    first, again = (train(tiny_config(), tiny_preset(), group, seed=2) for _ in range(2))
    assert first.attempts[0]["curve"] == again.attempts[0]["curve"]
    other = train(tiny_config(), tiny_preset(), group, seed=3)
    assert other.attempts[0]["curve"] != first.attempts[0]["curve"]


def test_short_sequences_come_first_and_no_example_twice():
    small = preset("small").changed(steps=40)
    (group,) = small.groups
    drawn = [data for _, data in zip(range(40), batches(small, group, seed=0))]
    lengths = [data.inputs.shape[1] for data in drawn]
    assert set(lengths[:16]) == {64}  # easy_first = 0.4
    assert set(lengths[16:]) == {64, 128, 256}
    rows = [tuple(row) for data in drawn for row in data.inputs.tolist()]
    assert len(set(rows)) == len(rows)


def test_a_rate_that_is_good_enough_is_the_last():
    easy = tiny_preset(learning_rates=(1e-3, 1e-2), steps=2, stop_at=-1.0)
    found = train(tiny_config(), easy, easy.groups[0])
    assert [attempt["learning_rate"] for attempt in found.attempts] == [1e-3]


def test_the_best_rate_is_kept_and_divergence_recorded():
    (group,) = tiny_preset().groups
    lines = []
    rates = tiny_preset(learning_rates=(1e30, 1e-2, 1e-9))
    trained = train(tiny_config(), rates, group, say=lines.append)
    diverged, *others = trained.attempts
    assert diverged["diverged"]
    assert diverged["accuracy"] is None
    assert any("given up" in line for line in lines)
    assert trained.best["accuracy"] == max(attempt["accuracy"] for attempt in others)
    assert [attempt["learning_rate"] for attempt in trained.attempts] == [1e30, 1e-2, 1e-9]
    alone = train(tiny_config(), tiny_preset(learning_rates=(1e30,)), group)
    assert alone.model is None
    assert alone.best is None


def test_a_rate_that_diverges_after_a_good_one():
    rates = tiny_preset(learning_rates=(1e-2, 1e30))
    trained = train(tiny_config(), rates, rates.groups[0])
    assert [attempt["diverged"] for attempt in trained.attempts] == [False, True]
    assert trained.best["learning_rate"] == 1e-2
    assert trained.model is not None


def test_every_rate_is_tried_where_the_preset_says_so():
    every = tiny_preset(learning_rates=(1e-3, 1e-2), stop_at=-1.0, every_rate=True)
    found = train(tiny_config(), every, every.groups[0])
    assert [attempt["learning_rate"] for attempt in found.attempts] == [1e-3, 1e-2]
    assert [attempt["steps"] for attempt in found.attempts] == [2, 2]  # each stops by itself


def test_a_fixed_order_goes_through_the_sources_and_is_looked_at_after_each_epoch(monkeypatch):
    sources = (Source(TINY, 20), Source(LONGER, 5))
    fixed = tiny_preset(
        groups=(Group(sources, (TINY, LONGER)),), steps=None, epochs=2, check_every=None,
        batch_rows=((12, 8),), batch_tokens=48, shuffle=False, validate_on="test", clip=None,
    )  # fmt: skip
    (group,) = fixed.groups
    assert fixed.epoch_of(group) == 5
    drawn = [data.inputs for _, data in zip(range(10), batches(fixed, group, seed=0))]
    shapes = [(8, 12), (8, 12), (4, 12), (3, 16), (2, 16)]
    assert [tuple(inputs.shape) for inputs in drawn] == 2 * shapes
    assert all(torch.equal(a, b) for a, b in zip(drawn[:5], drawn[5:]))
    whole = examples(TINY, 12, 20, split="train").inputs
    assert torch.equal(torch.cat(drawn[:3]), whole)

    seen = []

    def held_out(model, data):
        seen.append(data)
        return 0.0

    monkeypatch.setattr(mqar, "accuracy", held_out)
    (attempt,) = train(tiny_config(), fixed, group).attempts
    assert [look["step"] for look in attempt["curve"]] == [5, 10]
    expected = [examples(setting, 12, 10, split="validation").sha256() for setting in group.test]
    assert [data.sha256() for data in seen] == 2 * expected


def test_results_are_kept_and_shown_together(tmp_path, capsys, monkeypatch):
    small = tiny_preset()
    first = measured(["trellis"], small, tmp_path)
    assert [record["setting"]["test"] for record in first] == [[12, 2], [16, 3]]
    result = first[0]["result"]
    assert set(result["training"][0]["curve"][0]) == {"step", "loss", "accuracy"}
    assert result["training"][0]["seconds"] > 0
    assert result["state_size"] == 2 * (
        16 * (16 + 32) + 3 * (3 * 16 + 32)
    )  # memories, convolutions

    both = measured(["transformer"], small, tmp_path)
    assert {record["model"]["name"] for record in both} == {"trellis", "transformer"}
    captured = capsys.readouterr()
    assert "12/2" in captured.out
    assert "transformer, width 16, seed 0: rate 0.01, step 4/4: loss" in captured.err
    (drawn,) = (tmp_path / "mqar").glob("tiny-*.png")
    assert drawn.stat().st_size > 1000
    assert len(list((tmp_path / "mqar").glob("*.json"))) == 4

    def refuse(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(mqar, "train", refuse)
    assert measured(["trellis", "transformer"], small, tmp_path) == both
    with pytest.raises(AssertionError, match="trained again"):
        measured(["trellis"], small, tmp_path, seeds=[1])


def test_all_mixers_have_equal_parameters_and_seeds_are_averaged(tmp_path, capsys):
    small = tiny_preset(steps=1, layers=1)
    found = measured(["transformer", "trellis"], small, tmp_path, seeds=[0, 1])
    sizes = {record["model"]["parameters"] for record in found}
    assert max(sizes) <= 1.02 * min(sizes)
    assert sorted({record["setting"]["seed"] for record in found}) == [0, 1]
    test = found[0]["setting"]["test"]
    mine = [
        100 * r["result"]["accuracy"] for r in found
        if r["model"]["mixer"] == "trellis" and r["setting"]["test"] == test
    ]  # fmt: skip
    assert f"{fmean(mine):.1f} ± {stdev(mine):.1f}" in capsys.readouterr().out


def test_only_what_is_missing_is_measured(tmp_path):
    small = tiny_preset()
    whole = measured(["gsa"], small, tmp_path)
    lost, kept = sorted((tmp_path / "mqar").glob("*.json"))
    before = kept.read_bytes()
    lost.unlink()
    again = measured(["gsa"], small, tmp_path)
    assert kept.read_bytes() == before
    assert [r["result"]["accuracy"] for r in again] == [r["result"]["accuracy"] for r in whole]


def test_divergence_at_every_rate_is_a_result(tmp_path, capsys):
    (first, _) = measured(["transformer"], tiny_preset(learning_rates=(1e30,)), tmp_path)
    assert first["result"]["accuracy"] is None
    assert "diverged" in capsys.readouterr().out


def test_the_command(tmp_path):
    command = [
        "mqar", "--mixers", " mamba2, gsa", "--widths", "16", "--steps", "1",
        "--batch-tokens", "64", "--vocab-size", "140", "--learning-rates", "1e-3, 1e-2",
        "--limit", "3", "--set", "mamba2.state_dim=8", "--no-random-non-queries",
        "--out", str(tmp_path),
    ]  # fmt: skip
    out = CliRunner().invoke(app, command)
    assert out.exit_code == 0, out.output
    records = [json.loads(path.read_text()) for path in (tmp_path / "mqar").glob("*.json")]
    assert [record["model"]["mixer"] for record in records].count("gsa") == 5
    assert len(records) == 10
    for record in records:
        wanted = {"mamba2": {"state_dim": 8}} if record["model"]["mixer"] == "mamba2" else {}
        assert record["model"]["fields"] == wanted
        setting = record["setting"]
        assert setting["preset"] == "small"
        assert (setting["vocab_size"], setting["test_examples"], setting["seed"]) == (140, 3, 0)
        assert [a["learning_rate"] for a in record["result"]["training"]] == [1e-3, 1e-2]
        limited = examples(
            Setting(*setting["test"]), 140, 3, split="test", random_non_queries=False
        )
        assert setting["test_sha256"] == limited.sha256()


@pytest.mark.parametrize(
    ("setting", "vocab_size", "message"),
    [
        (
            Setting(15, 4),
            64,
            "4 pairs and their queries take at least 16 tokens; got a length of 15",
        ),
        (Setting(64, 16), 32, "a vocabulary of 32 has 15 keys.*got 16 pairs"),
        (Setting(64, 4), 33, "vocab_size must be even and at least 4; got 33"),
        (Setting(64, 0), 32, "the number of pairs must be a whole number of at least 1; got 0"),
    ],
)
def test_sequences_that_do_not_exist_are_errors(setting, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        examples(setting, vocab_size, 1, split="test")


def test_bad_options_are_errors_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="preset must be one of zoology, based, small"):
        preset("large")
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1; got 0"):
        preset("small").changed(steps=0)
    few = "easy_first = 0.4 of 5000 steps are 2000 batches of the shortest.*an epoch has 1250;"
    with pytest.raises(ValueError, match=few):
        preset("small").changed(steps=5000)
    assert preset("small").changed(steps=5000, easy_first=0.2).easy_first == 0.2
    with pytest.raises(ValueError, match="validate_on must be train or test; got 'exam'"):
        preset("small").changed(validate_on="exam")
    with pytest.raises(ValueError, match="a vocabulary of 64 has 31 keys"):
        preset("small").changed(vocab_size=64)
    with pytest.raises(ValueError, match="learning_rates must be a number above 0; got -1"):
        preset("small").changed(learning_rates=(-1.0,))
    with pytest.raises(ValueError, match="heads must divide the width, 16; got 3"):
        measured(["transformer"], tiny_preset(heads=3), tmp_path)
    with pytest.raises(ValueError, match="'trellis', which is not among the mixers"):
        mqar.run(["gsa"], tiny_preset(mixer_config={"trellis": {"slots": 4}}), tmp_path)
    with pytest.raises(ValueError, match="split must be one of train, validation, test"):
        examples(TINY, 12, 1, split="exam")
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass
class Published:
    """Of a group: length/pairs: examples, rows of a batch, and the steps of an epoch."""

    train: list[tuple[int, int, int, int]]
    test: list[tuple[int, int]]
    epoch: int


PUBLISHED = {
    "zoology": [
        Published([(64, 4, 100_000, 512)], [(64, 4)], 196),
        Published([(128, 8, 100_000, 512)], [(128, 8)], 196),
        Published([(256, 16, 100_000, 256)], [(256, 16)], 391),
        Published([(512, 64, 100_000, 128)], [(512, 64)], 782),
    ],
    "based": [
        Published(
            [(64, 4, 100_000, 256), (128, 8, 20_000, 256), (256, 16, 20_000, 256),
             (256, 32, 20_000, 256), (256, 64, 20_000, 256)],
            [(64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)],
            391 + 4 * 79,
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "widths", "rates", "epochs", "tested", "random_non_queries"),
    [
        ("zoology", (64, 128, 256, 512), np.logspace(-4, -2, 4), 64, 3000, False),
        ("based", (64, 128, 256), np.logspace(-3, -1.5, 4), 32, 1000, True),
    ],
)
def test_the_published_sizes(name, widths, rates, epochs, tested, random_non_queries):
    found = preset(name)
    found.check()
    assert found.widths == widths
    assert found.learning_rates == pytest.approx(rates)
    assert (found.epochs, found.test_examples) == (epochs, tested)
    assert found.random_non_queries == random_non_queries
    assert (found.vocab_size, found.layers, found.heads, found.stop_at) == (8192, 2, 1, 0.99)
    assert (found.warmup, found.clip, found.weight_decay, found.betas) == (
        0.0, None, 0.1, (0.9, 0.999),
    )  # fmt: skip
    assert found.every_rate
    for group, published in zip(found.groups, PUBLISHED[name], strict=True):
        train = [(*s.setting, s.examples, found.rows(s.setting)) for s in group.train]
        assert train == published.train
        assert [tuple(setting) for setting in group.test] == published.test
        assert found.validated(group) == list(group.test)
        assert found.epoch_of(group) == published.epoch
        assert found.steps_of(group) == epochs * published.epoch
        assert dataclasses.replace(found, steps=7).steps_of(group) == 7


def test_settings_are_toml_in_place_of_the_values_of_a_preset(tmp_path):
    settings = ["steps=40", "widths=[16, 8]", "clip=0.5", "trellis.slots=64", "gsa.slots = 4"]
    found = preset("zoology", [*settings, "trellis.conv_on=['q']", "validate_on=train"])
    assert (found.steps, found.epochs, found.widths, found.clip) == (40, None, (16, 8), 0.5)
    assert found.validate_on == "train"  # a word needs no quotes
    assert found.mixer_config == {"trellis": {"slots": 64, "conv_on": ["q"]}, "gsa": {"slots": 4}}
    assert preset("based", ["batch_tokens=2048"]).batch_rows == ()
    small = preset("small", ["easy_first=0", "groups=[{train=[[12, 2, 10000]], test=[[12, 2]]}]"])
    assert small.groups == (Group((Source(TINY, 10_000),), (TINY,)),)
    (tmp_path / "mine.toml").write_text('include = "base.toml"\nlayers = 3\n[trellis]\nslots = 8\n')
    folder = Path(__file__).parents[2] / "recipes" / "mqar"
    (tmp_path / "base.toml").write_bytes((folder / "small.toml").read_bytes())
    mine = preset(str(tmp_path / "mine.toml"), ["heads=2"])
    assert (mine.name, mine.layers, mine.heads, mine.vocab_size) == ("mine", 3, 2, 192)
    assert mine.mixer_config == {"trellis": {"slots": 8}}
    for settings, message in (
        (["stepps=4"], "a preset of MQAR has no key stepps; did you mean steps"),
        (["treliss.slots=4"], "has no key treliss; did you mean trellis"),
        (["steps=many"], "steps must be a whole number; got 'many'"),
        (["widths=16"], "widths must be a list, each a whole number; got 16"),
        (["trellis=4"], "trellis must be a section of the mixer's fields; got 4"),
        (["groups=[[1]]"], r"groups must have train, a list of \[tokens, pairs, examples\]"),
        (["groups=[{train=[], test=[[12, 2]]}]"], "every group must have something to train and"),
        (["steps"], "--set must be"),
    ):
        with pytest.raises(ValueError, match=message):
            preset("small", settings)
    with pytest.raises(FileNotFoundError, match=r"nothing\.toml"):
        preset("nothing.toml")


def test_tokens_asked_for_replace_the_rows_of_a_preset():
    changed = preset("based").changed(batch_tokens=2048)
    assert [changed.rows(Setting(length, 4)) for length in (64, 128, 256)] == [32, 16, 8]


def test_the_figure_is_named_by_what_it_shows():
    def picture(one, *seeds):
        return mqar._picture(one, seeds or (0,))

    small = preset("small")
    assert picture(small) == picture(small.changed(widths=(16,))) == "small.png"
    others = [picture(small, 1), picture(small, 0, 1), picture(small.changed(steps=9)),
              picture(tiny_preset())]  # fmt: skip
    assert len(set(others)) == 4
    for name, start in zip(others, ("small-", "small-", "small-", "tiny-")):
        assert re.fullmatch(start + r"[0-9a-f]{8}\.png", name)
