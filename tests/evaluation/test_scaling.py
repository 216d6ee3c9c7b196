import contextlib
import json
import math
import shutil

import matplotlib.pyplot as plt
import pytest
from tests.support import make_corpus, recipe
from typer.testing import CliRunner

from trellis import figures
from trellis.cli import app
from trellis.cli.evaluation import show
from trellis.data import prepare_corpus
from trellis.evaluation import models, scaling
from trellis.evaluation.models import open_model
from trellis.evaluation.ppl import documents, encode, perplexity
from trellis.evaluation.scaling import Training, contexts_of, fit, read_training, variants
from trellis.files import sha256_of
from trellis.training import loop
from trellis.training.metrics import read_metrics
from trellis.training.run import export, load_run, train

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
    gates = 0 if mixer == "transformer" else 32 * 32
    maps = 2 * (4 * 32 * 32 + gates + 3 * 32 * 64) + 32 * vocabulary
    attention = 4 * 32 * (context + 1) / 2
    memories = 4 * 2 * 16 * 17  # of 16 x 16, and a normaliser of 16
    convolutions = 3 * 2 * 4 * 32
    mixing = attention if mixer == "transformer" else memories + convolutions
    return 3 * 2 * (maps + mixing)


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


def measured(*arguments, **options):
    """Runs the command's task and prints its report; returns the numbers."""
    report = scaling.run(*arguments, **options)
    show(report)
    return report.found


def fail(*_, **__):
    raise AssertionError("this should not be measured")


@pytest.fixture
def drawn(monkeypatch):
    """Axes of figures that would be written."""
    kept = []

    @contextlib.contextmanager
    def figure(path, **options):
        whole, axis = plt.subplots(layout="constrained", **options)
        kept.append(axis)
        yield axis
        whole.canvas.draw()

    monkeypatch.setattr(figures, "figure", figure)
    yield kept
    plt.close("all")


def test_a_run_is_a_curve_of_its_validations(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(models, "load_run", None)  # no weights are needed
    result = measured(runs, tmp_path)
    out = capsys.readouterr().out
    for run, row in zip(runs, result["runs"]):
        recorded = [r for r in read_metrics(run) if "validation_loss" in r]
        curve = row["curve"]
        assert [point["step"] for point in curve] == [3, 6]
        assert [p["perplexity"] for p in curve] == [r["validation_perplexity"] for r in recorded]
        assert [point["flops"] for point in curve] == read_training(run).flops[3::3]
        assert row["final"] == curve[-1]
        assert row["recipe"]["train"]["steps"] == STEPS
        assert row["parameters"] == read_training(run).parameters
        final = curve[-1]
        line = next(line for line in out.splitlines() if run.name in line)
        for cell in ("768", f"{final['flops']:.3e}", f"{final['perplexity']:.3f}"):
            assert cell in line
    (numbers,) = tmp_path.glob("scaling-*.json")
    assert numbers.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    kept = json.loads(numbers.read_text())
    assert kept == result
    assert kept["fits"] == {}  # one run per mixer
    assert kept["made_by"]["torch"]
    assert not (tmp_path / "scaling").exists()  # there is nothing to measure once only

    # Another set, or another unit, has a file of its own; a run that is named twice is one.
    measured([*runs[:1], runs[0] / ".", *runs[:1]], tmp_path)
    measured(runs, tmp_path, bits_per_byte=True)
    measured(runs[::-1], tmp_path)
    files = list(tmp_path.glob("scaling-*.json"))
    assert len(files) == 3
    assert sorted(len(json.loads(file.read_text())["runs"]) for file in files) == [1, 2, 2]


def test_flops_are_counted_anew(runs, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael.")
    for options in ({}, {"data": [str(text)], "context": 8}):
        first = measured(runs, tmp_path, **options)["runs"]
        with monkeypatch.context() as patch:
            patch.setattr("trellis.evaluation.scaling.training_flops", lambda *_: 1.0)
            second = measured(runs, tmp_path, **options)["runs"]
        assert [row["final"]["flops"] for row in second] == [6 * 4 * 32] * 2
        assert [r["final"]["loss"] for r in first] == [r["final"]["loss"] for r in second]


def test_the_figure_has_the_numbers(runs, tmp_path, drawn):
    for options, unit, label in (
        ({}, "perplexity", "perplexity per token"),
        ({"bits_per_byte": True}, "bits_per_byte", "bits per byte"),
    ):
        rows = measured(runs, tmp_path, **options)["runs"]
        axis = drawn.pop()
        assert (axis.get_ylabel(), axis.get_xlabel()) == (label, "training FLOPs")
        assert "large dots: a run's end" in axis.get_title("left")
        assert "all runs of a mixer" not in axis.get_title("left")
        lines = axis.get_lines()
        assert [line.get_label() for line in lines[1::2]] == ["linear_attention", "transformer"]
        for row, curve, final in zip(rows, lines[::2], lines[1::2]):
            assert list(curve.get_xdata()) == [point["flops"] for point in row["curve"]]
            assert list(curve.get_ydata()) == [point[unit] for point in row["curve"]]
            assert final.get_xydata().tolist() == [[row["final"]["flops"], row["final"][unit]]]
        low, high = axis.get_ylim()
        ticks = [tick for tick in axis.get_yticks() if low <= tick <= high]
        assert 4 <= len(ticks) <= 14
        assert all(float(label.get_text()) > 0 for label in axis.get_yticklabels())
        assert axis.get_legend() is None  # it stands beside the curves


def test_data_measures_the_newest_checkpoint_as_ppl_does(runs, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times.\n" * 4)
    options = {"data": [str(text)], "context": 40}
    result = measured(runs, tmp_path / "out", **options)
    for run, row in zip(runs, result["runs"]):
        model = open_model(str(run))
        texts = [encode(model, one) for one in documents([str(text)])]
        final = row["final"]
        assert final["loss"] == perplexity(model, texts, 40)["loss"]
        assert final["perplexity"] == pytest.approx(math.exp(final["loss"]))
        assert final["flops"] == read_training(run).flops[STEPS]
        assert row["setting"]["windows"] == "disjoint"
        assert row["weights_sha256"] == model.about["weights_sha256"]
    assert len(list((tmp_path / "out" / "scaling").glob("*.json"))) == 2
    monkeypatch.setattr("trellis.evaluation.ppl.perplexity", fail)
    assert measured(runs, tmp_path / "out", **options)["runs"] == result["runs"]


def test_limit_and_document_bytes_cut_the_data(runs, tmp_path):
    text = tmp_path / "text.jsonl"
    parts = ["It was the best of times.", "It was the worst of times.", "It was an age."]
    text.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    options = {"data": [str(text)], "context": 16}
    losses = []
    for cut in ({"limit": 2}, {"document_bytes": 9}, {"limit": 1, "document_bytes": 9}, {}):
        (row,) = measured(runs[:1], tmp_path / "out", **options, **cut)["runs"]
        model = open_model(str(runs[0]))
        texts = [part[: cut.get("document_bytes")] for part in parts[: cut.get("limit")]]
        expected = perplexity(model, [encode(model, one) for one in texts], 16)
        assert row["final"]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["setting"]["documents"] == len(texts)
        losses.append(row["final"]["loss"])
    assert len(set(losses)) == 4


def test_a_checkpoint_that_is_written_meanwhile_is_not_taken(runs, tmp_path, monkeypatch):
    """FLOPs and weights are of one step."""
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    newest = run / "checkpoints" / f"step-{STEPS:08d}"
    loaded = []

    def load(path, step, device):
        shutil.copytree(newest, newest.with_name("step-00000099"))
        loaded.append(step)
        return load_run(path, step, device)

    monkeypatch.setattr(models, "load_run", load)
    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael.")
    (row,) = measured([run], tmp_path / "out", data=[str(text)], context=8)["runs"]
    assert loaded == [row["step"]] == [row["final"]["step"]] == [STEPS]


def test_a_power_law_is_found_again():
    flops = [1e9, 1e10, 3e11]
    law = fit(flops, [7 * c**-0.05 for c in flops])
    assert law.a == pytest.approx(7)
    assert law.b == pytest.approx(0.05)
    assert fit([1e9, 1e9, 1e10], [3, 3, 2]) is None


def test_three_runs_of_a_mixer_are_fitted(runs, tmp_path, capsys, drawn):
    """The same run at three lengths of training: its validations, cut off."""
    copies = []
    for number, flops in enumerate((3, 1, 2)):
        copy = tmp_path / f"run{number}"
        shutil.copytree(runs[0], copy)
        lines = [json.dumps(r) for r in read_metrics(copy) if r["step"] <= flops]
        loss = math.log(256) * flops**-0.1
        validation = {"validation_loss": loss, "validation_bits_per_byte": 7 * flops**-0.2}
        lines.append(json.dumps({"step": flops, **validation}))
        (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        copies.append(copy)
    result = measured(copies, tmp_path / "out")
    assert result["fits"]["linear_attention"]["b"] == pytest.approx(0.1)
    assert "linear_attention: loss = " in capsys.readouterr().out
    assert [row["name"] for row in result["runs"]] == ["run0", "run1", "run2"]
    through = drawn[0].get_lines()[-1]  # all ends, in the order of their FLOPs
    finals = sorted((r["final"]["flops"], r["final"]["perplexity"]) for r in result["runs"])
    assert through.get_xydata().tolist() == [list(final) for final in finals]
    assert "strong lines: all runs of a mixer" in drawn[0].get_title("left")

    result = measured(copies, tmp_path / "out", bits_per_byte=True)
    law = result["fits"]["linear_attention"]
    assert law["b"] == pytest.approx(0.2)
    per_step = read_training(copies[0]).flops[1]
    assert law["a"] * per_step ** -law["b"] == pytest.approx(7)
    out = capsys.readouterr().out
    assert "bits per byte over training FLOPs" in out
    assert "linear_attention: bits per byte = " in out
    assert "perplexity per token over" not in out


def test_variants_of_a_mixer_are_told_apart(tmp_path):
    def training(mixer, given=None, **fields):
        fields = {"phi": "silu", "slots": None, "learned": False, **fields}
        return Training(
            tmp_path, None, mixer, fields, set(given or []), 0, 0, [], [], "", {}
        )  # fmt: skip

    runs = [
        training("trellis"),
        training("trellis", ["phi"], phi="l2norm", learned=True),  # learned follows from phi
        training("trellis", ["phi", "slots"], slots=8),
        training("gsa", ["slots"], slots=8),
        training("gsa", ["slots"], slots=8),
    ]
    assert variants(runs) == [
        "trellis (phi=silu, slots=None)", "trellis (phi=l2norm, slots=None)",
        "trellis (phi=silu, slots=8)", "gsa", "gsa",
    ]  # fmt: skip
    assert variants(runs[:1]) == ["trellis"]


def test_fields_of_a_run_are_those_of_its_mixers(runs, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(runs[0], other)
    path = other / "checkpoints" / f"step-{STEPS:08d}" / "config.json"
    config = json.loads(path.read_text())
    noted = json.loads((path.parent / "checkpoint.json").read_text())

    def write():
        """Writes the configuration, with its hash, as if the run had it."""
        path.write_text(json.dumps(config))
        noted["files"]["config.json"] = sha256_of(path)
        (path.parent / "checkpoint.json").write_text(json.dumps(noted))

    config["mixer_config"] = {"linear_attention": {"normalize": False}}
    write()
    result = measured([runs[0], other], tmp_path / "out")
    names = [f"linear_attention (normalize={value})" for value in (True, False)]
    assert [row["variant"] for row in result["runs"]] == names
    out = capsys.readouterr().out
    assert all(name in out for name in names)
    config["mixer"], config["mixer_config"] = ["linear_attention", "abc", "abc"], {}
    write()
    assert read_training(other).mixer == "linear_attention+abc+abc"
    assert read_training(other).fields["abc.slots"] is not None


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
            measured(paths, out, **options)
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
    refused(runs, "--limit 3 needs --data", limit=3)
    refused(runs, "--document-bytes 9 needs --data", document_bytes=9)
    asked = CliRunner().invoke(app, ["eval", "scaling", str(runs[0]), "--batch-tokens", "8192"])
    assert "--batch-tokens 8192 needs --data" in str(asked.exception)


def test_runs_validated_on_one_text_can_be_compared(runs, tmp_path):
    """Wherever it is, and whatever they were trained on."""
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times.\n" * 4)
    prepare_corpus([text], tmp_path / "there", validation=0)
    shutil.copytree(tmp_path / "there", tmp_path / "copy")
    paths = []
    for run, name in zip(runs, ("there", "copy")):
        data = {"validation_path": str(tmp_path / name)}
        paths.append(changed(run, tmp_path / f"validated {name}", data=data))
    # Trained on another text.
    saved = paths[1] / "checkpoints" / f"step-{STEPS:08d}" / "checkpoint.json"
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "data": "another"}))
    assert len(measured(paths, tmp_path / "out")["runs"]) == 2
    with pytest.raises(ValueError, match="not validated alike: text is held out of"):
        measured([runs[0], paths[0]], tmp_path / "out")

    # The same name, but another text; and a text that is gone.
    shutil.rmtree(tmp_path / "copy")
    with pytest.raises(ValueError, match=r"copy was validated on .*copy, which is not there"):
        measured(paths, tmp_path / "out")
    assert len(measured(paths[1:], tmp_path / "out")["runs"]) == 1
    text.write_text("It was another text.\n" * 9)
    prepare_corpus([text], tmp_path / "copy", validation=0)
    with pytest.raises(ValueError, match="not validated alike: text is"):
        measured(paths, tmp_path / "out")


def test_runs_that_cannot_be_compared_are_named(runs, tmp_path, capsys):
    other = changed(runs[1], tmp_path / "other", log={"validation_tokens": 99})
    with pytest.raises(ValueError, match=r"linear_attention and .*other were not validated alike"):
        measured([runs[0], other], tmp_path / "out")

    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael.")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["truncation"] = {
        "direction": "Right", "max_length": 10**9, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = {"data": [str(text)], "context": 8}
    with pytest.raises(ValueError, match=r"different tokenizers.*add --bits-per-byte"):
        measured([runs[0], other], tmp_path / "out", **options)
    result = measured([runs[0], other], tmp_path / "out", bits_per_byte=True, **options)
    assert all(row["final"]["bits_per_byte"] > 0 for row in result["runs"])
    assert "perplexity" not in capsys.readouterr().out
