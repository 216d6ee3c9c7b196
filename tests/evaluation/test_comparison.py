import json
import math
import signal

import numpy as np
import pytest
from tests.support import make_corpus, recipe

from trellis.evaluation import comparison
from trellis.evaluation.comparison import bigram_loss, compare
from trellis.training import loop
from trellis.training.metrics import read_metrics


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


def test_mixers_are_trained_side_by_side(tmp_path):
    chosen = recipe(make_corpus(tmp_path), train={"steps": 4}, checkpoint={"every": 2})
    said = []
    out = tmp_path / "runs"
    result = compare(chosen, ["transformer", "trellis"], out, said.append)
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
    again = compare(chosen, ["trellis"], out, said.append)
    assert (out / "trellis" / "metrics.jsonl").read_bytes() == before
    assert again["rows"] == result["rows"][1:]

    other = recipe(make_corpus(tmp_path / "other"), train={"steps": 5})
    with pytest.raises(ValueError, match="trained by another recipe"):
        compare(other, ["trellis"], out, said.append)


def test_a_run_that_diverges_shows(tmp_path):
    train = {"steps": 5, "learning_rate": 1e30, "warmup": 0.0, "clip": 0.0, "max_bad_steps": 50}
    chosen = recipe(make_corpus(tmp_path), train=train)
    said = []
    (row,) = compare(chosen, ["transformer"], tmp_path / "runs", said.append)["rows"]
    assert row["first_loss"] is not None
    assert row["last_loss"] is None
    assert row["skipped_steps"] == 4
    assert any("not finite" in line for line in said)


def test_a_signal_stops_the_comparison_and_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise loop.Interrupted("stopped", signal.SIGINT)

    monkeypatch.setattr(comparison, "train", interrupted)
    said = []
    with pytest.raises(loop.Interrupted) as stopped:
        compare(recipe(make_corpus(tmp_path)), ["trellis"], tmp_path / "runs", said.append)
    assert stopped.value.exit_code == 130
    assert said[-1] == f"stopped in {tmp_path / 'runs' / 'trellis'}; the same command goes on"


def test_what_cannot_be_compared_is_said_before_anything_is_written(tmp_path):
    out = tmp_path / "runs"
    corpus = make_corpus(tmp_path)
    chosen = recipe(corpus, model={"mixer_config": {"slots": 8}})
    with pytest.raises(ValueError, match=r"mixer_config must be empty; got \{'slots': 8\}"):
        compare(chosen, ["trellis"], out, print)
    with pytest.raises(ValueError, match="mixers must name at least one"):
        compare(recipe(corpus), [], out, print)
    nothing = make_corpus(tmp_path / "all", held_out=0.0)
    with pytest.raises(ValueError, match="holds nothing out to compare on"):
        compare(recipe(nothing), ["trellis"], out, print)
    missing = recipe(corpus, data={"path": str(tmp_path / "none")})
    with pytest.raises(FileNotFoundError, match="no prepared text"):
        compare(missing, ["trellis"], out, print)
    assert not out.exists()


def test_text_that_is_missing_is_made_from_its_sources(tmp_path):
    corpus = make_corpus(tmp_path)
    path = tmp_path / "made"
    sources = [str(tmp_path / "source.jsonl")]
    chosen = recipe(corpus, data={"path": str(path), "sources": sources}, train={"steps": 1})
    compare(chosen, ["transformer"], tmp_path / "runs", print)
    assert path.is_dir()
