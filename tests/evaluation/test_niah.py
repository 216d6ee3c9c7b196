import json
import re

import pytest
from tests.support import evaluated_model, rule_model, save_gpt2
from typer.testing import CliRunner

from trellis.cli import app
from trellis.cli.evaluation import show
from trellis.data.needles import VARIANTS, Haystack, Needles
from trellis.data.tokenizer import load_tokenizer
from trellis.evaluation import niah
from trellis.evaluation.models import open_model, open_models
from trellis.evaluation.niah import by_depth, matches, retrieve

BYTES = load_tokenizer("bytes")
TEXT = "It was late. The fox said nothing. Nobody answered! Then it rained, as always. " * 20
ASKED = re.compile(r"The special magic \w+ for (\S+( \S+)*) mentioned in the provided text is")


def asked(model, variant, length, items, depths=range(0, 101, 10), **options):
    needles = Needles(model.tokenizer, Haystack([TEXT]), 42, "test", len(model.start))
    return retrieve(model, needles, variant, length, items, depths=depths, **options)


def look_up(ids):
    """The next byte of the value that the text gives for the key it asks for."""
    if b"text is" not in bytes(ids[-80:] if len(ids) > 80 else ids[1:]):
        return 0  # still reading
    text = bytes(ids[1:]).decode()
    *_, asked = ASKED.finditer(text)
    value = re.search(rf"s for {asked[1]} is: (\S+( \S+)*?)\.[\s]", text)[1]
    return f" {value}.\n".encode()[min(len(text) - asked.end(), len(value) + 2)]


def counting(ids):
    """Digits whatever was read."""
    return ord("0") + len(ids) * 7919 % 10


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_that_looks_the_key_up_finds_every_needle(variant):
    model = rule_model(look_up)
    found = asked(model, variant, 720, 11)
    assert found["accuracy"] == 1.0
    assert [row["depth"] for row in found["by_depth"]] == list(range(0, 101, 10))
    assert all(row["correct"] == row["items"] == 1 for row in found["by_depth"])
    for item in found["items"]:
        assert item["answer"] == f" {item['value']}"  # enough was known
        assert item["tokens"] + 128 <= 720


@pytest.mark.parametrize("variant", ["passkey", "uuid"])
def test_a_model_that_ignores_the_text_finds_none(variant):
    model = rule_model(counting)
    found = asked(model, variant, 700, 3)
    assert found["accuracy"] == 0.0
    assert all(len(item["answer"]) == 128 for item in found["items"])


def test_a_value_counts_wherever_it_stands_as_in_ruler():
    assert matches(" the number is 1234567, I think", "1234567")
    assert matches("AB-CD\x00", "ab-cd")
    assert not matches("123\x004567", "1234567")
    assert not matches("", "1234567")


def test_fewer_items_are_a_prefix_and_batches_change_nothing(monkeypatch):
    monkeypatch.setattr("trellis.evaluation.niah.ANSWER_TOKENS", 24)
    model = evaluated_model("trellis")
    together = asked(model, "number", 600, 4, batch_tokens=10_000)
    alone = asked(model, "number", 600, 4, batch_tokens=1)
    assert together == alone
    assert all(len(item["answer"]) > 10 for item in alone["items"])
    assert asked(model, "number", 600, 2)["items"] == together["items"][:2]


def test_long_sets_are_built_in_parts(monkeypatch):
    model = rule_model(look_up)
    whole = asked(model, "number", 650, 3)
    monkeypatch.setattr("trellis.evaluation.niah._PROMPT_TOKENS", 1300)
    assert asked(model, "number", 650, 3) == whole


def test_random_depths_are_summed_up_by_tenths():
    answers = [{"depth": depth, "correct": depth > 50} for depth in (3.2, 0, 49, 51, 100)]
    assert by_depth(answers, exact=False) == [
        {"depth": 0, "correct": 0, "items": 2},
        {"depth": 50, "correct": 1, "items": 2},
        {"depth": 100, "correct": 1, "items": 1},
    ]
    for depth, tenth in ((4.9, 0), (5, 10), (15, 20), (85, 90), (94.9, 90), (95, 100)):
        (row,) = by_depth([{"depth": depth, "correct": True}], exact=False)
        assert row["depth"] == tenth


OPTIONS = {"items": 4, "depths": [0, 100], "limit": None, "seed": 42, "batch_tokens": 4096}


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    return [str(tmp_path / "book.txt")]


def test_the_command_keeps_results_and_draws_them(tmp_path, book, capsys):
    model = rule_model(look_up, "looks up")
    places = (book, ["passkey", "word"], [700, 1024], tmp_path / "out")
    first = niah.run([model], *places, **{**OPTIONS, "limit": 2})
    show(first)
    printed = capsys.readouterr().out
    assert "needles found, per cent" in printed
    assert "100.0" in printed
    folder = tmp_path / "out" / "niah"
    (picture,) = folder.glob("looks-up-heatmap-*.png")
    assert picture.stat().st_size > 1000
    assert f"written to {picture}" in printed
    assert len(list(folder.glob("*.json"))) == 4
    record = json.loads(next(folder.glob("*.json")).read_text())
    assert record["setting"]["seed"] == 42
    assert record["setting"]["items"] == len(record["result"]["items"]) == 2

    model.network = None  # would fail if it were asked
    assert niah.run([model], *places, **{**OPTIONS, "limit": 2}) == first
    # Another length beside it changes none of them.
    again = (book, ["word"], [700], tmp_path / "out")
    (one,) = niah.run([model], *again, **{**OPTIONS, "items": 2}).found
    assert one in first.found
    assert len(one["setting"]["haystack_sha256"]) == len(one["setting"]["words_sha256"]) == 64
    assert one["note"] == {"haystack": book}


def test_a_source_of_another_name_is_not_measured_again(tmp_path, book, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = rule_model(look_up)
    options = (["word"], [700], tmp_path / "out")
    first = niah.run([model], book, *options, **OPTIONS).found
    model.network = None  # would fail if it were asked
    (again,) = niah.run([model], ["./book.txt"], *options, **OPTIONS).found
    assert again["result"] == first[0]["result"]


def test_every_setting_and_model_has_its_picture(tmp_path, book, capsys, monkeypatch):
    monkeypatch.setattr(niah, "_draw", lambda *given: given[-1].touch())
    one, other = rule_model(look_up, "same"), rule_model(look_up, "same")
    other.about["weights_sha256"] = "another"
    options = {**OPTIONS, "items": 1}
    for seed, variants in ((1, ["word"]), (2, ["word"]), (2, ["passkey"])):
        for _ in range(2):
            settings = (book, variants, [700], tmp_path)
            show(niah.run([one, other], *settings, **{**options, "seed": seed}))
    pictures = {str(path) for path in (tmp_path / "niah").glob("same-heatmap-*.png")}
    assert len(pictures) == 6
    printed = capsys.readouterr().out.replace("\n", "")
    assert all(f"written to {path}" in printed for path in pictures)


def test_without_matplotlib_nothing_is_measured(tmp_path, book, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"figures need matplotlib"):
        niah.run([None], book, ["word"], [700], tmp_path / "out", **OPTIONS)


def test_models_of_one_name_are_told_apart(tmp_path):
    places = [str(save_gpt2(tmp_path / run / "gpt2")) for run in ("a", "b")]
    assert [model.name for model in open_models(places)] == places
    assert [model.name for model in open_models(places[:1])] == ["gpt2"]


def test_a_wide_table_is_printed_by_variant(tmp_path, book, capsys):
    lengths = [600 + n for n in range(5)]
    options = {**OPTIONS, "items": 1}
    show(niah.run([rule_model(look_up)], book, ["number", "uuid"], lengths, tmp_path, **options))
    assert capsys.readouterr().out.count("needles found") == 2


def test_errors_come_before_measuring(tmp_path, book):
    def run(model, variants=("uuid",), lengths=(700,)):
        niah.run([model], book, variants, lengths, tmp_path / "out", **OPTIONS)

    gpt2 = open_model(str(save_gpt2(tmp_path / "gpt2", positions=1000)))
    with pytest.raises(
        ValueError, match=r"prompt with its answer has 1,024 .*gpt2 reads at most 1,000"
    ):
        run(gpt2, lengths=(700, 1024))
    with pytest.raises(ValueError, match=r"a length of 256 is too short for uuid"):
        run(gpt2, lengths=(700, 256))
    with pytest.raises(ValueError, match=r"variants must be among .* got 'pass'"):
        run(gpt2, variants=("passkey", "pass"))
    assert not (tmp_path / "out").exists()


def test_all_models_are_asked_for_their_length_before_the_first_is_measured(tmp_path, book):
    models = [save_gpt2(tmp_path / str(n), positions=n) for n in (800, 600)]
    result = CliRunner().invoke(app, [
        "eval", "niah", *map(str, models), "--haystack", *book, "--lengths", "590,700",
        "--variants", "number", "--out", str(tmp_path / "out"),
    ])  # fmt: skip
    assert "600 reads at most 600 tokens, but 700 are asked for" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("depths", ["0,50", "random"])
def test_the_commands_options_reach_the_record(tmp_path, book, depths, monkeypatch):
    monkeypatch.setattr("trellis.evaluation.niah.ANSWER_TOKENS", 4)
    model = save_gpt2(tmp_path / "gpt2", positions=720)
    result = CliRunner().invoke(app, [
        "eval", "niah", str(model), "--haystack", *book, "--variants", "number, word",
        "--lengths", "700", "--depths", depths, "--items", "3", "--limit", "2", "--seed", "7",
        "--out", str(tmp_path / "out"),
    ])  # fmt: skip
    assert result.exit_code == 0, result.exception
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("niah/*.json")]
    assert {record["setting"]["variant"] for record in records} == {"number", "word"}
    made = Needles(BYTES, Haystack([TEXT]), 7, "test")
    given = None if depths == "random" else [0, 50]
    for record in records:
        setting, found = record["setting"], record["result"]["items"]
        assert (setting["length"], setting["items"], setting["seed"]) == (700, 2, 7)
        assert setting["depths"] == (given or depths)
        expected = [made.item(setting["variant"], 700, index, given) for index in range(2)]
        assert [(row["key"], row["value"], row["depth"]) for row in found] == [
            (item.key, item.value, item.depth) for item in expected
        ]


@pytest.mark.parametrize("depths", ["0,101", "-1", "half"])
def test_depths_out_of_range_are_named(depths):
    result = CliRunner().invoke(app, ["eval", "niah", "nowhere", "--depths", depths])
    assert isinstance(result.exception, ValueError)
    assert "--depths must be whole numbers from 0 to 100" in str(result.exception)
