import json
import math
import shutil

import pytest
from tests.training.helpers import make_corpus, recipe

from trellis.evaluation import scaling_task
from trellis.evaluation.ppl import encode, perplexity
from trellis.evaluation.scaling import Training, contexts_of, fit, read_training
from trellis.evaluation.subject import load_subject
from trellis.evaluation.texts import documents
from trellis.training import loop
from trellis.training.metrics import read_metrics
from trellis.training.run import export, train

#: Steps of a run, and where it validates.
STEPS, EVERY = 6, 3
WARMUP = [[0.5, 8]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Two mixers; the transformer reads sequences of 8 tokens for half of its steps."""
    folder = tmp_path_factory.mktemp("runs")
    for mixer, warmup in (("linear_attention", []), ("transformer", WARMUP)):
        one = recipe(
            corpus,
            model={"mixer": mixer},
            train={"steps": STEPS, "context_warmup": warmup},
            log={"validate_every": EVERY},
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(loop.PEAK_SIZES, "cpu", 256)  # the machine's rate is of no interest
            train(one, folder / mixer)
    return [folder / "linear_attention", folder / "transformer"]


def by_hand(mixer, vocabulary, context):
    """FLOPs of training on one token: width 32, 2 layers, 2 heads of 16, an MLP of 64."""
    maps = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * vocabulary
    attention = 4 * 32 * (context + 1) / 2
    memories = 4 * 2 * 16 * 17  # of 16 x 16, and a normaliser of 16
    return 3 * 2 * (maps + (attention if mixer == "transformer" else memories))


def test_flops_are_those_of_a_calculation_by_hand(runs, corpus):
    tokens = 4 * 32  # of a step
    for run in runs:
        found = read_training(run)
        contexts = [8, 8, 8, 32, 32, 32] if run.name == "transformer" else [32] * 6
        expected = [tokens * by_hand(run.name, corpus.vocab_size, c) for c in contexts]
        assert found.flops[0] == 0
        assert found.flops[3] == pytest.approx(sum(expected[:3]), rel=1e-12)
        assert found.flops[6] == pytest.approx(sum(expected), rel=1e-12)
        assert (found.step, found.tokens(6), found.mixer) == (6, 6 * tokens, run.name)


def test_contexts_follow_the_records_of_a_schedule_that_was_changed(corpus):
    """Resumed with 12 steps in place of 6: the warm-up had ended after 3 of them."""
    longer = recipe(corpus, train={"steps": 12, "context_warmup": WARMUP})
    assert contexts_of(longer, [], 12) == [8] * 6 + [32] * 6
    noted = [(1, 8), (3, 8), (6, 32), (9, 32), (12, 32)]
    records = [{"step": step, "context": context} for step, context in noted]
    assert contexts_of(longer, records, 12) == [8] * 3 + [32] * 9


def test_a_run_is_a_curve_of_its_validations(runs, tmp_path, capsys):
    result = scaling_task.run(runs, tmp_path)
    out = capsys.readouterr().out
    for run, record in zip(runs, result["runs"]):
        recorded = [r for r in read_metrics(run) if "validation_loss" in r]
        curve = record["result"]["curve"]
        assert [point["step"] for point in curve] == [3, 6]
        assert [p["perplexity"] for p in curve] == [r["validation_perplexity"] for r in recorded]
        assert [point["flops"] for point in curve] == read_training(run).flops[3::3]
        assert record["result"]["final"] == curve[-1]
        assert record["model"]["recipe"]["train"]["steps"] == STEPS
        assert record["setting"]["validation"]["corpus"]
        final = curve[-1]
        row = next(line for line in out.splitlines() if run.name in line)
        for cell in ("768", f"{final['flops']:.3e}", f"{final['perplexity']:.3f}"):
            assert cell in row
    folder = tmp_path / "scaling"
    assert (folder / "scaling.png").stat().st_size > 1000
    kept = json.loads((folder / "scaling.json").read_text())
    assert kept == result
    assert kept["fits"] == {}  # one run per mixer
    assert kept["made_by"]["torch"]


def test_records_are_not_made_again(runs, tmp_path, monkeypatch):
    first = scaling_task.run(runs, tmp_path)
    monkeypatch.setattr(Training, "curve", None)  # would fail if it were called
    assert scaling_task.run(runs, tmp_path)["runs"] == first["runs"]


def test_data_measures_the_newest_checkpoint_as_ppl_does(runs, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times.\n" * 4)
    options = {"data": [str(text)], "context": 40}
    result = scaling_task.run(runs, tmp_path / "out", **options)
    for run, record in zip(runs, result["runs"]):
        subject = load_subject(str(run))
        texts = [encode(subject, one) for one in documents([str(text)])]
        final = record["result"]["final"]
        assert final["loss"] == perplexity(subject, texts, 40)["loss"]
        assert final["perplexity"] == pytest.approx(math.exp(final["loss"]))
        assert final["flops"] == read_training(run).flops[STEPS]
        assert record["setting"]["data_sha256"]
    monkeypatch.setattr(scaling_task, "perplexity", None)
    assert scaling_task.run(runs, tmp_path / "out", **options)["runs"] == result["runs"]


def test_a_power_law_is_found_again():
    flops = [1e9, 1e10, 3e11]
    law = fit(flops, [7 * c**-0.05 for c in flops])
    assert law.a == pytest.approx(7)
    assert law.b == pytest.approx(0.05)
    assert fit([1e9, 1e9, 1e10], [3, 3, 2]) is None


def test_three_runs_of_a_mixer_are_fitted(runs, tmp_path, capsys):
    """The same run at three lengths of training: its validations, cut off."""
    copies = []
    for number, flops in enumerate((1, 2, 3)):
        copy = tmp_path / f"run{number}"
        shutil.copytree(runs[0], copy)
        lines = [json.dumps(r) for r in read_metrics(copy) if r["step"] <= flops]
        loss = math.log(256) * flops**-0.1
        validation = {"validation_loss": loss, "validation_bits_per_byte": loss / math.log(2)}
        lines.append(json.dumps({"step": flops, **validation}))
        (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        copies.append(copy)
    result = scaling_task.run(copies, tmp_path / "out")
    assert result["fits"]["linear_attention"]["b"] == pytest.approx(0.1)
    assert "linear_attention: loss = " in capsys.readouterr().out
    assert len({record["name"] for record in result["runs"]}) == 3


def changed(run, folder, **sections):
    """A copy whose recipe says something else."""
    shutil.copytree(run, folder)
    table = json.loads((folder / "recipe.json").read_text())
    for section, values in sections.items():
        table[section].update(values)
    (folder / "recipe.json").write_text(json.dumps(table))
    return folder


def test_what_cannot_be_measured_is_named(runs, tmp_path):
    def refused(paths, message, **options):
        out = tmp_path / "refused"
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            scaling_task.run(paths, out, **options)
        assert not out.exists()

    export(runs[0], tmp_path / "exported")
    refused([runs[1], tmp_path / "exported"], "exported is a model without a record")
    refused([tmp_path / "nothing"], r"nothing is not a run: it has no recipe\.json")
    silent = changed(runs[0], tmp_path / "silent")
    (silent / "metrics.jsonl").unlink()
    refused([silent], r"silent is not a run: it has no metrics\.jsonl")
    losses = [r for r in read_metrics(runs[0]) if "loss" in r]
    (silent / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in losses))
    refused([runs[0], silent], "silent has no validation")
    refused(runs, "--data and --context go together", data=["text"])
    refused(runs, "--data and --context go together", context=8)


def test_runs_that_cannot_be_compared_are_named(runs, tmp_path):
    other = changed(runs[1], tmp_path / "other", log={"validation_tokens": 99})
    with pytest.raises(ValueError, match=r"linear_attention and .*other were not validated alike"):
        scaling_task.run([runs[0], other], tmp_path / "out")

    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael.")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["truncation"] = {
        "direction": "Right", "max_length": 10**9, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = {"data": [str(text)], "context": 8}
    with pytest.raises(ValueError, match=r"different tokenizers.*add --bits-per-byte"):
        scaling_task.run([runs[0], other], tmp_path / "out", **options)
    result = scaling_task.run([runs[0], other], tmp_path / "out", bits_per_byte=True, **options)
    assert all(record["result"]["final"]["bits_per_byte"] > 0 for record in result["runs"])
