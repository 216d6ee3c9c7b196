import json
import math
import os
import signal

import numpy as np
import pytest
from tests.support import make_corpus, recipe

from trellis.evaluation import comparison
from trellis.evaluation.comparison import (
    CompareSection,
    Comparison,
    bigram_loss,
    compare,
    load_comparison,
)
from trellis.training import loop
from trellis.training.metrics import read_metrics
from trellis.training.run import recipe_of


@pytest.fixture(autouse=True)
def quick_peak(monkeypatch):
    """Measuring the machine's peak takes a second per run."""
    monkeypatch.setitem(loop.PEAK_SIZES, "cpu", 256)


class Documents:
    """A token stream made of lists."""

    def __init__(self, *documents):
        self.ids = np.concatenate([np.asarray(d) for d in documents])
        self.ends = np.cumsum([len(d) for d in documents])
        self.tokens = len(self.ids)

    def read(self, start, stop):
        return self.ids[start:stop]


def test_bigram_counts_are_those_of_the_formula():
    train = Documents([0, 1, 0, 1, 0, 2], [2, 1])
    held_out = Documents([0, 1, 0], [1, 2])
    # Pairs cross no document: 0->1 twice, 1->0 twice, 0->2 once, 2->1 once; and held out 0->1,
    # 1->0 and 1->2.
    pairs = {(0, 1): 2, (1, 0): 2, (0, 2): 1, (2, 1): 1}
    first = [3, 2, 1]
    share = [(n + 0.5) / 7.5 for n in first]

    def loss(strength):
        seen = [(0, 1), (1, 0), (1, 2)]
        return -np.mean(
            [
                math.log((pairs.get(p, 0) + strength * share[p[1]]) / (first[p[0]] + strength))
                for p in seen
            ]
        )

    expected = min(loss(s) for s in (0.3, 1, 3, 10, 30, 100, 300, 1000))
    assert bigram_loss(train, held_out, 3, context=4, tokens=100) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"up to 8192; got 9000"):
        bigram_loss(train, held_out, 9000, context=4, tokens=100)


def of(chosen, *mixers, **section):
    """A comparison of mixers as they are by default."""
    return Comparison(chosen, CompareSection(variants={name: {} for name in mixers}, **section))


def test_mixers_are_trained_side_by_side(tmp_path):
    chosen = recipe(make_corpus(tmp_path), train={"steps": 4}, checkpoint={"every": 2})
    said = []
    out = tmp_path / "runs"
    result = compare(of(chosen, "transformer", "trellis"), out, said.append)
    assert [row["mixer"] for row in result["rows"]] == ["transformer", "trellis"]
    for row in result["rows"]:
        last = [r for r in read_metrics(out / row["mixer"]) if "validation_loss" in r][-1]
        assert row["validation_loss"] == last["validation_loss"]
        assert row["skipped_steps"] == 0
    assert json.loads((out / "comparison.json").read_text())["bigram_loss"] == pytest.approx(
        result["bigram_loss"]
    )
    table = (out / "comparison.md").read_text()
    assert "| transformer |" in table
    assert "| bigram counts of the training text |" in table
    assert (out / "comparison.png").stat().st_size > 1000

    # What is finished is not trained again; what is new is added.
    before = (out / "trellis" / "metrics.jsonl").read_bytes()
    again = compare(of(chosen, "trellis"), out, said.append)
    assert (out / "trellis" / "metrics.jsonl").read_bytes() == before
    assert again["rows"] == result["rows"][1:]

    other = recipe(make_corpus(tmp_path / "other"), train={"steps": 5})
    with pytest.raises(ValueError, match="trained by another recipe"):
        compare(of(other, "trellis"), out, said.append)


def test_a_run_that_diverges_shows(tmp_path):
    train = {"steps": 5, "learning_rate": 1e30, "warmup": 0.0, "clip": 0.0, "max_bad_steps": 50}
    chosen = recipe(make_corpus(tmp_path), train=train)
    said = []
    (row,) = compare(of(chosen, "transformer"), tmp_path / "runs", said.append)["rows"]
    assert row["first_loss"] is not None
    assert row["last_loss"] is None
    assert row["skipped_steps"] == 4
    assert any("not finite" in line for line in said)


def test_a_run_that_is_given_up_is_not_the_best(tmp_path):
    train = {"steps": 6, "warmup": 0.0, "clip": 0.0, "max_bad_steps": 2}
    chosen = recipe(make_corpus(tmp_path), train=train, log={"every": 1, "validate_every": 1})
    said = []
    result = compare(of(chosen, "transformer", rates=[1e30, 1e-9]), tmp_path / "runs", said.append)
    lost, kept = result["rows"]
    assert (lost["rate"], lost["validation_loss"]) == (1e30, None)
    assert kept["validation_loss"] is not None
    assert result["table"][0]["rate"] == 1e-9
    alone = compare(of(chosen, "transformer", rates=[1e30]), tmp_path / "alone", said.append)
    assert alone["table"][0]["validation_loss"] is None
    assert "not finite" in (tmp_path / "alone" / "comparison.md").read_text()


def test_a_signal_stops_the_comparison_and_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise loop.Interrupted("stopped", signal.SIGINT)

    monkeypatch.setattr(comparison, "train", interrupted)
    said = []
    with pytest.raises(loop.Interrupted) as stopped:
        compare(of(recipe(make_corpus(tmp_path)), "trellis"), tmp_path / "runs", said.append)
    assert stopped.value.exit_code == 130
    assert said[-1] == f"stopped in {tmp_path / 'runs' / 'trellis'}; the same command goes on"


def test_what_cannot_be_compared_is_said_before_anything_is_written(tmp_path):
    out = tmp_path / "runs"
    corpus = make_corpus(tmp_path)
    chosen = recipe(corpus, model={"mixer_config": {"slots": 8}})
    with pytest.raises(ValueError, match=r"mixer_config must be empty; got \{'slots': 8\}"):
        compare(of(chosen, "trellis"), out, print)
    with pytest.raises(ValueError, match="mixers must name at least one"):
        compare(of(recipe(corpus), "trellis").only([]), out, print)
    nothing = make_corpus(tmp_path / "all", held_out=0.0)
    with pytest.raises(ValueError, match="holds nothing out to compare on"):
        compare(of(recipe(nothing), "trellis"), out, print)
    missing = recipe(corpus, data={"path": str(tmp_path / "none")})
    with pytest.raises(FileNotFoundError, match="no prepared text"):
        compare(of(missing, "trellis"), out, print)
    assert not out.exists()


def test_text_that_is_missing_is_made_from_its_sources(tmp_path):
    corpus = make_corpus(tmp_path)
    path = tmp_path / "made"
    sources = [str(tmp_path / "source.jsonl")]
    chosen = recipe(corpus, data={"path": str(path), "sources": sources}, train={"steps": 1})
    compare(of(chosen, "transformer"), tmp_path / "runs", print)
    assert path.is_dir()


def test_the_best_rate_is_used_for_all_seeds_and_contexts(tmp_path):
    text = f"""
        [model]
        hidden_size = 16
        num_hidden_layers = 1
        num_attention_heads = 2
        [data]
        path = {json.dumps(str(make_corpus(tmp_path).path))}
        context = 16
        [train]
        steps = 3
        batch_tokens = 64
        [log]
        every = 1
        [compare]
        rates = [1e-9, 1e-2]
        seeds = [0, 1]
        contexts = [16, 32]
        [compare.variants.small]
        mixer = "trellis"
        mixer_config = {{slots = 4}}
        [compare.variants.transformer]
        seeds = [3]
        contexts = [32]
    """
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    out = tmp_path / "runs"
    result = compare(load_comparison(path), out, print)
    trained = {(r["variant"], r["context"], r["rate"], r["seed"]) for r in result["rows"]}
    assert trained == {
        ("small", 16, 1e-9, 0), ("small", 16, 1e-2, 0), ("small", 16, 1e-2, 1),
        ("small", 32, 1e-2, 0), ("small", 32, 1e-2, 1),
        ("transformer", 32, 1e-9, 3), ("transformer", 32, 1e-2, 3),
    }  # fmt: skip
    losses = {
        (r["variant"], r["context"], r["rate"], r["seed"]): r["validation_loss"]
        for r in result["rows"]
    }
    assert losses["small", 16, 1e-2, 0] < losses["small", 16, 1e-9, 0]
    (row,) = (r for r in result["table"] if (r["variant"], r["context"]) == ("small", 16))
    pair = [losses["small", 16, 1e-2, seed] for seed in (0, 1)]
    assert row["seeds"] == 2
    assert row["validation_loss"] == pytest.approx(np.mean(pair))
    assert row["deviation"] == pytest.approx(np.std(pair, ddof=1))
    assert all(r["tokens"] == 3 * 64 for r in result["rows"])
    assert recipe_of(out / "small" / "32-0.01-1").model.mixer_config == {"slots": 4}
    assert (out / "contexts.png").stat().st_size > 1000


def test_runs_side_by_side_are_those_of_one_process(tmp_path):
    comparison = of(recipe(make_corpus(tmp_path), train={"steps": 2}), "trellis", "transformer")
    beside = compare(comparison, tmp_path / "beside", print, workers=2)
    after = compare(comparison, tmp_path / "after", print)
    losses = [
        {row["variant"]: row["validation_loss"] for row in result["rows"]}
        for result in (beside, after)
    ]
    assert losses[0] == losses[1]
    assert set(losses[0]) == {"trellis", "transformer"}
    assert "2/2" in (tmp_path / "beside" / "trellis.log").read_text()


def test_a_signal_stops_all_workers_and_the_comparison_goes_on(tmp_path):
    corpus = make_corpus(tmp_path)
    out = tmp_path / "runs"
    comparison = of(recipe(corpus, train={"steps": 5000}), "trellis", "transformer")
    began = []

    def interrupt(line):
        began.append(line)
        if len(began) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(loop.Interrupted) as stopped:
        compare(comparison, out, interrupt, workers=2)
    assert stopped.value.exit_code == 143
    assert began[-1] == f"stopped in {out}; the same command goes on"


def test_names_and_numbers_of_a_comparison_are_checked(tmp_path):
    chosen = recipe(make_corpus(tmp_path))
    with pytest.raises(ValueError, match=r"mixer must be one of .*; got 'trelis'"):
        of(chosen, "trelis")
    with pytest.raises(ValueError, match=r"has no key compare\.variants\.a\.mixr; did you mean"):
        Comparison(chosen, CompareSection(variants={"a": {"mixr": "trellis"}}))
    with pytest.raises(ValueError, match=r"seeds must differ from one another; got \[1, 1\]"):
        of(chosen, "trellis", seeds=[1, 1])
    with pytest.raises(ValueError, match=r"contexts needs train\.batch_tokens"):
        of(chosen, "trellis", contexts=[8, 16])
    with pytest.raises(ValueError, match="the name must be that of a folder"):
        Comparison(chosen, CompareSection(variants={"../a": {"mixer": "trellis"}}))
    with pytest.raises(ValueError, match=r"mixers must be among trellis; got 'treliss'; did you"):
        of(chosen, "trellis").only(["treliss"])
