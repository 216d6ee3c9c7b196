import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from tests.support import evaluated_model, save_gpt2
from typer.testing import CliRunner

from trellis import figures
from trellis.cli import app, main
from trellis.cli.evaluation import show
from trellis.evaluation import models, ppl
from trellis.evaluation.models import open_model
from trellis.evaluation.ppl import encode, perplexity, saw_more, windows
from trellis.evaluation.scoring import token_losses

TEXTS = ["It was the best of times, it was the worst of times. " * 3, "Call me Ishmael.", "x"]


def directly(model, texts, context, stride=None):
    """Every token from the tokens that its window lets it see, one call of the model each."""
    total, count = 0.0, 0
    step = stride or context
    for text in texts:
        ids = encode(model, text).ids
        for target in range(1, len(ids)):
            if target <= context:
                begin = 0
            elif stride is None:
                begin = (target - 1) // context * context
            else:
                moved = -(-(target - context) // step) * step
                begin = min(context + moved, len(ids) - 1) - context
            row = torch.tensor([ids[begin:target]])
            with torch.no_grad():
                logits = model.network(row).logits[0, -1].double()
            total += float(F.cross_entropy(logits, torch.tensor(ids[target])))
            count += 1
    return total / count


@pytest.fixture(params=["trellis", "transformer", "mamba2", "gpt2"])
def model(request, tmp_path):
    if request.param == "gpt2":
        return open_model(str(save_gpt2(tmp_path / "gpt2")))
    return evaluated_model(request.param)


@pytest.mark.parametrize(("context", "stride"), [(200, None), (17, None), (20, 6), (8, 8)])
def test_loss_is_that_of_a_direct_computation(model, context, stride):
    texts = [encode(model, text) for text in TEXTS]
    found = perplexity(model, texts, context, stride=stride)
    expected = directly(model, TEXTS, context, stride)
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    size = sum(len(text.encode()) for text in TEXTS)
    assert found["bytes"] == found["tokens"] == size  # every byte once, as the tokens are bytes
    assert found["bits_per_byte"] == pytest.approx(expected / math.log(2), rel=1e-6)


def test_results_do_not_depend_on_batches(model):
    texts = [encode(model, text) for text in TEXTS]
    alone = perplexity(model, texts, 23, batch_tokens=1)
    together = perplexity(model, texts, 23, batch_tokens=10_000)
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_positions_add_up_to_the_whole(model):
    found = perplexity(model, [encode(model, text) for text in TEXTS], 50)
    rows = found["by_position"]
    assert [(row["from"], row["to"]) for row in rows][:4] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    assert sum(row["tokens"] for row in rows) == found["tokens"]
    mean = sum(row["loss"] * row["tokens"] for row in rows) / found["tokens"]
    assert mean == pytest.approx(found["loss"])


@pytest.mark.parametrize(("context", "stride"), [(5, None), (7, 3), (1, 1), (100, 10)])
def test_windows_predict_every_token_once(context, stride):
    text = encode(evaluated_model(), "abcdefghijklmnopq")
    seen = []
    for window in windows(text, context, stride):
        assert len(window.ids) <= context + 1
        seen += window.ids[window.first + 1 :]
    assert seen == text.ids[1:]


def test_long_rows_are_read_in_segments(monkeypatch):
    model = evaluated_model()
    text = [encode(model, TEXTS[0] * 5)]
    whole = perplexity(model, text, 600)
    monkeypatch.setattr("trellis.evaluation.scoring.LOGIT_TOKENS", 7)
    assert perplexity(model, text, 600)["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_a_context_beyond_the_model_is_an_error(tmp_path):
    model = open_model(str(save_gpt2(tmp_path / "gpt2", positions=64)))
    with pytest.raises(ValueError, match=r"a context of 100 tokens.*gpt2 reads at most 64"):
        perplexity(model, [encode(model, "text")], 100)


def test_rows_may_come_in_any_order(model, monkeypatch):
    monkeypatch.setattr("trellis.evaluation.scoring.LOGIT_TOKENS", 12)
    rows = [encode(model, text).ids for text in ("x", TEXTS[0], "", TEXTS[1])]
    if not model.ours:
        rows.pop(2)  # a model of transformers reads at least one token
    found = token_losses(model, rows)
    for row, losses in zip(rows, found):
        assert len(losses) == len(row) - 1
        if len(row) > 1:
            (alone,) = token_losses(model, [row])
            torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-4)


def test_a_bad_context_or_stride_is_an_error_before_anything_is_measured(tmp_path):
    model = open_model(str(save_gpt2(tmp_path / "gpt2", positions=64)))
    (tmp_path / "text").write_text(TEXTS[0])
    data, out = [str(tmp_path / "text")], tmp_path / "out"
    options = {"document_bytes": None, "limit": None, "batch_tokens": 4096}
    with pytest.raises(ValueError, match=r"a context of 100 tokens.*gpt2 reads at most 64"):
        ppl.run([model], data, [16, 100], out, stride=None, **options)
    with pytest.raises(ValueError, match=r"--stride must be from 1 to the shortest context, 16"):
        ppl.run(None, ["nowhere"], [64, 16], out, stride=17, **options)
    assert not out.exists()


def test_figures_that_cannot_be_drawn_are_an_error_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = {"stride": None, "document_bytes": None, "limit": None, "batch_tokens": 4096}
    with pytest.raises(ModuleNotFoundError, match=r"trellis-memory\[plots\]"):
        ppl.run(None, ["nowhere"], [16], None, **options)


@pytest.mark.parametrize("stride", [None, 4])
def test_predictions_from_more_tokens_than_a_shorter_context_has(stride):
    texts = [encode(evaluated_model(), text) for text in ("a" * 10, "b" * 25, "c" * 3)]
    seen = [
        place + 1
        for text in texts
        for window in windows(text, 16, stride)
        for place in range(window.first, len(window.ids) - 1)
    ]
    for than in (0, 8, 15, 16):
        assert saw_more(texts, 16, stride, than) == sum(one > than for one in seen)


def test_the_command_line(tmp_path):
    gpt2 = str(save_gpt2(tmp_path / "gpt2", positions=128))
    (tmp_path / "text").write_text(TEXTS[1] * 2)
    command = ["eval", "ppl", gpt2, "--data", str(tmp_path / "text"), "--out", str(tmp_path)]
    out = CliRunner().invoke(app, [*command, "--contexts", "16,64,128"])
    assert out.exit_code == 0, out.exception
    assert "gpt2, context 64: 16 of 32 tokens are predicted from more than 16" in out.stdout
    assert "gpt2: 128 tokens of context are no more than 64" in out.stdout
    assert len(list((tmp_path / "ppl").glob("gpt2-*.json"))) == 3
    picture = tmp_path / "ppl" / "by-position.png"
    assert f"written to {picture}\n" in out.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = CliRunner().invoke(app, [*command, "--contexts", "16", "--json", "--quiet"])
    found = json.loads(out.stdout)
    assert [record["setting"]["context"] for record in found["found"]] == [16]
    assert (found["files"], found["left_out"]) == ([str(picture)], [])
    out = CliRunner().invoke(app, [*command, "--contexts", "16,256"])
    assert "reads at most 128 tokens, but 256 are asked for" in str(out.exception)


def test_the_models_that_can_be_measured_are_measured(tmp_path, monkeypatch):
    gpt2 = str(save_gpt2(tmp_path / "mine", positions=128))
    (tmp_path / "text").write_text(TEXTS[1])
    monkeypatch.setattr(models, "_hub_answers", lambda: False)
    monkeypatch.setattr(sys, "argv", ["trellis", "eval", "ppl", gpt2, "nobody/model", "--data",
                                      str(tmp_path / "text"), "--contexts", "16", "--out",
                                      str(tmp_path)])  # fmt: skip
    said = "trellis: nobody/model was not measured: it is not on this machine, and the hub does not"
    with pytest.raises(SystemExit, match=said):
        main()
    assert len(list((tmp_path / "ppl").glob("mine-*.json"))) == 1


def test_the_axis_counts_tokens(tmp_path):
    with figures.figure(tmp_path / "x.png") as axis:
        axis.plot([1, 2, 512, 2048], [4, 3, 2, 1])
        figures.count_tokens(axis)
        shown = axis.xaxis.get_major_formatter()
        assert [shown(x) for x in (1, 512, 1024, 2048, 32768)] == ["1", "512", "1k", "2k", "32k"]


def test_nothing_to_predict_is_an_error():
    model = evaluated_model()
    with pytest.raises(ValueError, match="nothing to predict"):
        perplexity(model, [encode(model, "")], 10)


def test_the_command_keeps_results_and_does_not_repeat_them(tmp_path, capsys):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    options = {"stride": None, "document_bytes": None, "batch_tokens": 4096}
    files = [str(tmp_path / f"{number}.txt") for number in range(3)]
    model = evaluated_model()
    first = ppl.run([model], files, [16, 64], tmp_path / "out", limit=None, **options)
    show(first)
    assert "perplexity per token by context" in capsys.readouterr().out
    kept = sorted((tmp_path / "out" / "ppl").glob("*.json"))
    assert len(kept) == 2
    record = json.loads(kept[0].read_text())
    assert record["made_by"]["torch"] == torch.__version__
    assert record["setting"]["data_sha256"]
    assert (tmp_path / "out" / "ppl" / "by-position.png").stat().st_size > 1000

    model.network = None  # would fail if it were asked
    assert ppl.run([model], files, [16, 64], tmp_path / "out", limit=None, **options) == first


def test_a_limit_is_a_prefix(tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    files = [str(tmp_path / f"{number}.txt") for number in range(3)]
    options = {"stride": None, "document_bytes": None, "batch_tokens": 4096}
    model = evaluated_model()
    (limited,) = ppl.run([model], files, [64], tmp_path / "a", limit=2, **options).found
    (prefix,) = ppl.run([model], files[:2], [64], tmp_path / "b", limit=None, **options).found
    assert limited["result"] == prefix["result"]
