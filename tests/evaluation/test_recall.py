import gzip
import json
import os
from pathlib import Path

import pytest
from tests.support import evaluated_model, rule_model, save_gpt2
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from trellis.cli import app
from trellis.cli.evaluation import show
from trellis.data.tokenizer import TextTokenizer, load_tokenizer
from trellis.evaluation import recall
from trellis.evaluation.models import open_model
from trellis.evaluation.recall import (
    KEYED,
    SETS,
    contains,
    cut_prompt,
    encode,
    load_set,
    measure,
    window,
)

BYTES = load_tokenizer("bytes")
NAMES = ["Anna", "Bela", "Cleo", "Dora"]
COLOURS = ["red", "green", "blue", "white"]
LINES = "".join(f"{name}: {colour} (seen)\n" for name, colour in zip(NAMES, COLOURS))
TALK = " ".join(f"{name} likes {colour}." for name, colour in zip(NAMES, COLOURS))


def rows(name):
    """Four items of a set in its published form: text and value have white space around them."""
    pairs = list(zip(NAMES, COLOURS))
    if name == "squad":
        return [
            {"text": f" {TALK}\n{n} likes ", "value": f"{c} ", "context": TALK, "question": "?"}
            for n, c in pairs
        ]
    middle = "Summary of information above...\n" if name == "swde" else ""
    return [{"text": f"\n{LINES}{middle}{n}: ", "value": c.upper(), "key": n} for n, c in pairs]


def write(path, content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


def squad_json(path, paragraphs):
    """SQuAD 1.1 with questions as (question, [(answer, place)])."""
    made = [
        {"context": context, "qas": [
            {"id": str(n), "question": question,
             "answers": [{"text": text, "answer_start": place} for text, place in answers]}
            for n, (question, answers) in enumerate(questions)
        ]}
        for context, questions in paragraphs
    ]  # fmt: skip
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "", "paragraphs": made}]}))
    return str(path)


def likes(path):
    questions = [
        (f"What does {name} like?", [(colour, TALK.index(colour)), ("it", 0)])
        for name, colour in zip(NAMES, COLOURS)
    ]
    return squad_json(path, [(TALK, questions[:1]), (TALK, questions[1:])])


def cut(item, size):
    """The cut prompt as text."""
    return BYTES.decode(cut_prompt(item, BYTES, size))


def copy(ids):
    """What followed the longest ending of the text where it stood before."""
    text = bytes(ids)
    for size in range(min(len(text) - 1, 12), 0, -1):
        place = text.rfind(text[-size:], 0, -1)
        if place >= 0:
            return text[place + size]
    return ord("?")


def guess(ids):
    """The same after any prompt."""
    said = b"%red\n"
    _, began, written = bytes(ids).partition(said[:1])
    return said[len(began + written)]


@pytest.fixture(params=SETS)
def one(request, tmp_path):
    return load_set(request.param, write(tmp_path / "set.jsonl", rows(request.param)))


def score(model, one, context_tokens=None, **options):
    prompts = encode(model, one.items, context_tokens)
    return measure(model, one.items, prompts, **options)


def test_prompts_are_the_published_texts(one):
    pairs = list(zip(NAMES, COLOURS))
    if one.name == "squad":
        expected = [f"{TALK}\n{name} likes" for name, _ in pairs]
    elif one.name == "swde":
        expected = [f"{LINES}Summary of information above...\n{name}:" for name, _ in pairs]
    else:
        expected = [f"{LINES}{name}:" for name, _ in pairs]
    assert [item.prompt for item in one.items] == expected
    model = evaluated_model()
    assert encode(model, one.items, None) == [list(text.encode()) for text in expected]
    assert one.form == "published"


def test_prompts_of_squad_itself(tmp_path):
    one = load_set("squad", likes(tmp_path / "squad.json"))
    assert [item.prompt for item in one.items] == [
        f"{TALK}\nQuestion: What does {name} like?\nAnswer:" for name in NAMES
    ]
    assert one.items[0].answers == ("red", "it")
    assert one.form.startswith("squad-1.1")


def test_cut_prompts_end_in_what_is_asked_for(one):
    asked = {"squad": "\n{} likes", "swde": ". {}:", "fda": ". {}:"}[one.name]
    for item, name in zip(one.items, NAMES):
        text = cut(item, 30)
        assert text.endswith(asked.format(name))
        assert text.removesuffix(asked.format(name)).strip() in item.document
        # A document that fits stays whole, and its query is asked all the same.
        whole = (TALK if one.name == "squad" else LINES).strip()
        assert cut(item, 5000) == whole + asked.format(name)


def test_a_key_is_asked_with_a_capital(tmp_path):
    row = {"text": "Its colour: red.\ncolour:colour:", "value": "red", "key": "colour"}
    (item,) = load_set("fda", write(tmp_path / "a.jsonl", [row])).items
    assert cut(item, 950) == "Its colour: red. Colour:"


@pytest.mark.parametrize("place", [0, 3, 40, 60, 113, 114, 197])
@pytest.mark.parametrize("size", [3, 10, 51, 200, 500])
def test_a_window_is_full_and_has_the_answer_in_its_middle(tmp_path, place, size):
    text = "." * place + "abc" + "." * (197 - place)
    source = squad_json(tmp_path / "a.json", [(text, [("q", [("abc", place)])])])
    (item,) = load_set("squad", source).items
    kept = cut(item, size).removesuffix("\nQuestion: q\nAnswer:")
    assert len(kept) == min(size, 200)
    before, _, after = kept.partition("abc")
    assert kept == f"{before}abc{after}"
    # Unequal only where the text has no more to give.
    begins, ends = place == len(before), 197 - place == len(after)
    assert begins or ends or abs(len(before) - len(after)) <= 1
    assert not begins or len(before) <= len(after) or size >= 200
    assert not ends or len(after) <= len(before) or size >= 200


def test_windows_by_hand():
    assert window(100, 50, 52, 10) == (46, 56)
    assert window(100, 1, 2, 10) == (0, 10)
    assert window(100, 99, 100, 10) == (90, 100)
    assert window(5, 1, 2, 10) == (0, 5)


def test_a_window_counts_tokens_not_characters(tmp_path):
    text = "é" * 20 + "abc" + "é" * 20
    source = squad_json(tmp_path / "a.json", [(text, [("q", [("abc", 20)])])])
    (item,) = load_set("squad", source).items
    query = BYTES.encode(item.query).tolist()
    for size in range(3, 20):
        kept = bytes(cut_prompt(item, BYTES, size)[: -len(query)])
        assert len(kept) == size
        assert b"abc" in kept
        assert kept in text.encode()


def test_the_place_that_squad_names_is_kept(tmp_path):
    text = "abc" + "." * 50 + "abc!" + "." * 50
    source = squad_json(tmp_path / "a.json", [(text, [("q", [("abc", 53)])])])
    (item,) = load_set("squad", source).items
    assert "abc!" in cut(item, 20)


@pytest.mark.parametrize("context_tokens", [None, 40])
def test_a_model_that_copies_has_all(one, context_tokens):
    found = score(rule_model(copy), one, context_tokens)
    assert (found["accuracy"], found["right"], found["items"]) == (1.0, 4, 4)


def test_a_model_that_copies_has_all_of_squad_itself(tmp_path):
    def answer(ids):
        """The colour that the passage gives to who is asked for, found in the passage."""
        context, _, query = bytes(ids).partition(b"\nQuestion: What does ")
        name, _, written = query.partition(b" like?\nAnswer:")
        told = context.partition(name + b" likes ")[2].partition(b".")[0] + b"\n"
        return told[len(written)] if name and len(written) < len(told) else ord("?")

    one = load_set("squad", likes(tmp_path / "squad.json"))
    assert score(rule_model(answer), one)["accuracy"] == 1.0
    assert score(rule_model(answer), one, 60)["accuracy"] == 1.0


def test_a_model_that_ignores_the_text_has_what_chance_gives(one):
    found = score(rule_model(guess), one)
    assert found["accuracy"] == 0.25  # one of four colours is red
    assert {row["output"] for row in found["outputs"]} == {"%red"}
    assert [row["right"] for row in found["outputs"]] == [True, False, False, False]
    assert score(rule_model(lambda ids: ord("x")), one)["accuracy"] == 0.0


@pytest.mark.parametrize("task", ["swde", "fda", "squad_completion"])
def test_scores_and_prompts_are_those_of_lm_eval(tmp_path, task):
    name = task.split("_")[0]
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    module = pytest.importorskip(f"lm_eval.tasks.{task}.task")
    kind = {"swde": "SWDE", "fda": "FDA", "squad_completion": "SQUADCompletion"}[task]
    theirs = getattr(module, kind)
    docs = rows(name)
    items = load_set(name, write(tmp_path / "a.jsonl", docs)).items
    for doc, item in zip(docs, items):
        assert item.prompt == theirs.doc_to_text(None, doc)
        assert item.answers == (theirs.doc_to_target(None, doc),)
    cases = [
        (" Red and more", ["red"]), ("re d", ["red"]), ("", ["red"]), ("x(.*)", ["(.*)"]),
        ("anything", ["(.*)"]), ("STRASSE", ["straße"]), ("İ", ["i"]), ("a b", ["x", "A B"]),
    ]  # fmt: skip
    for output, answers in cases:
        assert contains(output, answers) == bool(module.contains_score(output, answers))


@pytest.mark.parametrize("begins", [True, False])
def test_tokens_are_those_of_lm_evals_own_model(tmp_path, begins):
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    from lm_eval.models.huggingface import HFLM

    folder = save_gpt2(tmp_path / "gpt2", positions=400)
    if begins:
        token = "<|endoftext|>"
        special = {token: {"id": token, "ids": [256], "tokens": [token]}}
        first = {"SpecialToken": {"id": token, "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        begin = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text],
                 "special_tokens": special}  # fmt: skip
        inner = Tokenizer.from_str(json.dumps({**BYTES.json, "post_processor": begin}))
        PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=token).save_pretrained(folder)
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=1, dtype="float32")
    model = open_model(str(folder))
    items = load_set("swde", write(tmp_path / "a.jsonl", rows("swde"))).items
    for item, ids in zip(items, encode(model, items, None)):
        assert ids == theirs.tok_batch_encode([item.prompt])[0][0].tolist()
        assert (ids[0] == 256) == begins
    cut = encode(model, items, 30)
    assert [ids[begins:] for ids in cut] == [cut_prompt(item, BYTES, 30) for item in items]
    # What stands before a text is part of what the model reads.
    model.max_context = max(map(len, cut)) + 48
    assert encode(model, items, 30) == cut
    model.max_context -= 1
    with pytest.raises(ValueError, match=r"the prompt with 48 tokens of answer has"):
        encode(model, items, 30)


def merging():
    """Bytes, and every pair of letters that the texts here have, over the ends of words too."""
    inner = Tokenizer.from_str(json.dumps(BYTES.json))
    pairs = dict.fromkeys(pair for text in (TALK,) for pair in zip(text, text[1:]))
    model = dict(BYTES.json["model"])
    space = inner.pre_tokenizer.pre_tokenize_str(" ")[0][0]
    merges = [[space if c == " " else c for c in pair] for pair in pairs]
    model["merges"] = merges
    model["vocab"] = {**model["vocab"], **{"".join(p): 257 + n for n, p in enumerate(merges)}}
    return TextTokenizer(json.dumps({**BYTES.json, "model": model}), "merging")


def lower():
    """Bytes of small letters, so that no capital is ever read."""
    return TextTokenizer(json.dumps({**BYTES.json, "normalizer": {"type": "Lowercase"}}), "lower")


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (merging, {"red": 2, "GREEN": 5, "GREEN. C": 7, "te.": 2}),
        (lower, {"red": 3, "GREEN": 5, "GREEN. C": 8, "te.": 3}),
    ],
)
def test_the_answer_is_kept_whatever_the_tokenizer_does_to_it(tmp_path, make, least):
    tokenizer = make()
    text = TALK.replace("green", "GREEN")
    for answer in least:
        place = text.index(answer)
        source = squad_json(tmp_path / "a.json", [(text, [("q", [(answer, place)])])])
        (item,) = load_set("squad", source).items
        query = tokenizer.encode(item.query).tolist()
        held = least[answer]
        for size in range(1, held):
            with pytest.raises(ValueError, match=f"the answer has {held} tokens, .* into {size}:"):
                cut_prompt(item, tokenizer, size)
        for size in range(held, len(tokenizer.encode(text))):
            kept = cut_prompt(item, tokenizer, size)[: -len(query)]
            assert len(kept) == size
            assert answer.lower() in tokenizer.decode(kept).lower()


@pytest.mark.parametrize("mixer", ["trellis", "gpt2"])
def test_batched_is_one_by_one(mixer, tmp_path):
    one = load_set("squad", write(tmp_path / "a.jsonl", rows("squad")))
    gpt2 = mixer == "gpt2"
    model = open_model(str(save_gpt2(tmp_path / "gpt2"))) if gpt2 else evaluated_model(mixer)
    assert score(model, one, batch_tokens=1) == score(model, one, batch_tokens=100_000)


OPTIONS = {"context_tokens": None, "batch_tokens": 4096}


def test_the_command_keeps_results_and_does_not_repeat_them(tmp_path, capsys):
    sources = {name: write(tmp_path / f"{name}.jsonl", rows(name)) for name in SETS}
    model, other = rule_model(copy, "copier"), rule_model(guess)
    other.about["weights_sha256"] = "another"
    report = recall.run([model, other], sources, tmp_path / "out", limit=2, **OPTIONS)
    show(report)
    found = report.found
    shown = capsys.readouterr().out
    assert "squad (2)" in shown
    assert "average" in shown
    lines = [line for line in shown.splitlines() if "copier" in line or "ruled" in line]
    assert [line.count("100.0") for line in lines] == [4, 0]
    assert lines[1].count("50.0") == 4

    kept = list((tmp_path / "out" / "recall").glob("*.json"))
    assert len(kept) == 6
    assert found[0]["setting"]["form"] == "published"
    assert found[0]["setting"]["data_sha256"]
    assert found[0]["result"]["outputs"][0]["output"].startswith(" red")
    model.network = None  # would fail if it were asked
    again = recall.run([model], sources, tmp_path / "out", limit=2, **OPTIONS)
    assert again.found == found[:3]


def test_the_place_of_the_answer_is_part_of_the_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "abc" + "." * 80 + "abc"
    options = {**OPTIONS, "context_tokens": 20, "limit": None}
    model = evaluated_model()
    found = []
    for place in (0, 83):
        squad_json(tmp_path / "a.json", [(text, [("q", [("abc", place)])])])
        (record,) = recall.run([model], {"squad": "a.json"}, Path("out"), **options).found
        found.append(record)
    assert len(list(Path("out/recall").glob("*.json"))) == 2
    # A file's name as it is typed is not, nor a limit that leaves nothing out.
    model.network = None  # would fail if it were asked
    again = recall.run([model], {"squad": "./a.json"}, Path("out"), **{**options, "limit": 9}).found
    assert again[0]["result"] == found[1]["result"]


def test_a_limit_is_a_prefix(tmp_path):
    sources = {"fda": write(tmp_path / "a.jsonl", rows("fda"))}
    model = evaluated_model()
    (whole,) = recall.run([model], sources, tmp_path / "o", limit=None, **OPTIONS).found
    (some,) = recall.run([model], sources, tmp_path / "o", limit=3, **OPTIONS).found
    assert some["result"]["outputs"] == whole["result"]["outputs"][:3]


def test_answers_that_are_not_there_are_counted(tmp_path, capsys):
    content = [*rows("fda"), {"text": "x" * 80 + "yz", "value": "red", "key": "Anna"}]
    sources = {"fda": write(tmp_path / "a.jsonl", content)}
    options = {**OPTIONS, "context_tokens": 20}
    report = recall.run([evaluated_model()], sources, tmp_path / "out", limit=None, **options)
    show(report)
    (found,) = report.found
    assert found["result"]["answer_not_in_document"] == 1
    assert found["result"]["items"] == 5
    assert "fda: 1 of 5 documents do not hold the answer" in capsys.readouterr().out
    (item,) = load_set("fda", sources["fda"]).items[4:]
    assert cut(item, 20) == "x" * 18 + "yz. Anna:"


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "lines.json", "list.json", "parquet"])
def test_files(tmp_path, form):
    path = tmp_path / f"set.{form}"
    expected = [item._replace(where="") for item in load_items(tmp_path)]
    if form == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="the data extra is not installed")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows("swde")), path)
    elif form == "list.json":
        path.write_text(json.dumps(rows("swde")))
    else:
        write(path, rows("swde"))
    if form.endswith("gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert [item._replace(where="") for item in load_set("swde", str(path)).items] == expected


def load_items(folder):
    return load_set("swde", write(folder / "plain.jsonl", rows("swde"))).items


def test_a_set_of_the_hub(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="the data extra is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "based-fda"
    folder.mkdir()
    write(folder / "validation.jsonl", rows("fda"))
    write(folder / "test.jsonl", rows("fda")[:1])
    found = load_set("fda", f"hub:{folder}").items
    assert [item.prompt for item in found] == [f"{LINES}{name}:" for name in NAMES]
    assert len(load_set("fda", f"hub:{folder}@test").items) == 1
    with pytest.raises(ValueError, match=r"'hub:.*@nothing' failed after item 0"):
        load_set("fda", f"hub:{folder}@nothing")
    write(folder / "validation.jsonl", [{"text": "a", "key": "b"}])
    with pytest.raises(ValueError, match=r"hub:.*: item 1: there is no field 'value', but 'text'"):
        load_set("fda", f"hub:{folder}")


GOOD = json.dumps(rows("fda")[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{GOOD}\n\n{{bad", r"set.jsonl:3: this is not JSON"),
        ("[" * 100_000, r"set.jsonl:1: this is not JSON: it is nested too deeply"),
        (f"{GOOD}\n[1]", r"set.jsonl:2: expected an object, got a list"),
        ('{"value": "a", "key": "b"}', r"set.jsonl:1: there is no field 'text', but 'value'"),
        ('{"text": "a", "key": "b"}', r"set.jsonl:1: there is no field 'value'"),
        ('{"text": "a", "value": "b"}', r"set.jsonl:1: there is no field 'key'"),
        ('{"text": "a", "value": 1, "key": "b"}', r"field 'value' must be a str, not int"),
        ('{"text": "a", "value": " ", "key": "b"}', r"set.jsonl:1: field 'value' is empty"),
        ('{"text": "\\n", "value": "b", "key": "b"}', r"set.jsonl:1: field 'text' is empty"),
        ("", r"there is no item in .*set.jsonl"),
    ],
)
def test_malformed_rows_are_named(tmp_path, content, message):
    (tmp_path / "set.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_set("fda", str(tmp_path / "set.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[\n1,", r"a.json:2: this is not JSON"),
        ("a.json", b"[" * 100_000, r"a.json cannot be read: it is nested too deeply"),
        ("a.json", b"[]", r"there is no item in .*a.json"),
        ("a.json", b'[{"text": "a", "value": "b"}, 3]', r"a.json: item 2: expected an object"),
        ("a.json", b'{"data": 1}', r"field 'data' must be a list, not int"),
        ("a.json", b'{"data": []}', r"there is no item in"),
        ("a.json", b'{"data": [{}]}', r"no field 'paragraphs'"),
        ("a.json", b'{"data": [{"paragraphs": [{"qas": []}]}]}', r"no field 'context'"),
        ("a.jsonl", b"\xff", r"a.jsonl is not UTF-8: .* at byte 0"),
        ("a.jsonl.gz", b"text", r"a.jsonl.gz cannot be read"),
        ("a.parquet", b"text", r"a.parquet failed after item 0"),
        ("a.csv", b"text", r"a.csv must be .jsonl, .json or .parquet"),
    ],
)
def test_malformed_files_are_named(tmp_path, name, content, message):
    if name == "a.parquet":
        pytest.importorskip("pyarrow", reason="the data extra is not installed")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_set("squad", str(tmp_path / name))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], r"item 1: the question has no answer, as in SQuAD 2.0"),
        ([("red", 3)], r"item 1: the answer 'red' does not stand at character 3"),
        ([("red", "x")], r"item 1: field 'answer_start' must be a int"),
    ],
)
def test_malformed_questions_are_named(tmp_path, answers, message):
    source = squad_json(tmp_path / "a.json", [(TALK, [("q", answers)])])
    with pytest.raises(ValueError, match=message):
        load_set("squad", source)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file nothing\.jsonl"):
        load_set("fda", "nothing.jsonl")
    with pytest.raises(ValueError, match="is a folder: name one of its files, or hub:"):
        load_set("fda", str(tmp_path))
    with pytest.raises(ValueError, match="the set must be one of squad, swde, fda"):
        load_set("nq", "a.jsonl")
    for name in KEYED:
        with pytest.raises(ValueError, match=rf"is SQuAD's file; --{name} takes rows"):
            load_set(name, likes(tmp_path / "squad.json"))
    with pytest.raises(ValueError, match="give --squad, --swde or --fda"):
        recall.run([evaluated_model()], {}, tmp_path / "out", limit=None, **OPTIONS)


def test_what_cannot_be_cut_is_named(tmp_path):
    long = {"text": "green " * 20 + "she likes", "value": "green"}
    one = load_set("squad", write(tmp_path / "a.jsonl", [long]))
    with pytest.raises(ValueError, match=r"a.jsonl:1: the text of 129 tokens cannot be cut to 50"):
        encode(evaluated_model(), one.items, 50)
    one = load_set("fda", write(tmp_path / "b.jsonl", rows("fda")))
    with pytest.raises(ValueError, match=r"b.jsonl:1: the answer has 3 tokens, .* into 2:"):
        encode(evaluated_model(), one.items, 2)


def test_a_text_beyond_the_model_is_an_error_before_anything_is_measured(tmp_path):
    model = open_model(str(save_gpt2(tmp_path / "gpt2", positions=100)))
    sources = {name: write(tmp_path / f"{name}.jsonl", rows(name)) for name in SETS}
    message = r"squad.jsonl:1: the prompt with 48 tokens .* gpt2 reads at most 100.*--context-token"
    with pytest.raises(ValueError, match=message):
        recall.run([model], sources, tmp_path / "out", limit=None, **OPTIONS)
    assert not (tmp_path / "out").exists()
    options = {**OPTIONS, "context_tokens": 30}
    assert recall.run([model], sources, tmp_path / "out", limit=1, **options).found


def test_the_commands_options_reach_the_record(tmp_path):
    model = save_gpt2(tmp_path / "gpt2")
    given = {"squad": likes(tmp_path / "squad.json")}
    given |= {name: write(tmp_path / f"{name}.jsonl", rows(name)) for name in KEYED}
    options = [word for name, source in given.items() for word in (f"--{name}", source)]
    result = CliRunner().invoke(app, [
        "eval", "recall", str(model), *options, "--limit", "2", "--context-tokens", "80",
        "--out", str(tmp_path / "out"),
    ])  # fmt: skip
    assert result.exit_code == 0, result.exception
    assert "squad (2)" in result.output
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("recall/*.json")]
    assert {one["setting"]["set"]: one["note"]["data"] for one in records} == given
    for one in records:
        assert (one["setting"]["context_tokens"], one["setting"]["items"]) == (80, 2)
        answers = [output["answers"][0].lower() for output in one["result"]["outputs"]]
        assert answers == COLOURS[:2]


def test_squad_as_it_is_published():
    root = Path(__file__).parents[2]
    folder = Path(os.environ.get("TRELLIS_DATA", root.parent / "shared" / "data"))
    source = folder / "tasks" / "squad_dev-v1.1.json"
    if not source.is_file():
        pytest.skip(f"SQuAD 1.1 is not at {source}: set TRELLIS_DATA to a folder that holds it")
    one = load_set("squad", str(source))
    assert len(one.items) == 10570
    assert all(contains(item.document, item.answers) for item in one.items)
    gpt2 = folder / "tokenizers" / "gpt2"
    tokenizer = load_tokenizer(gpt2) if gpt2.is_dir() else BYTES
    for item in one.items[::200]:
        prompt = cut_prompt(item, tokenizer, 60)
        query = tokenizer.encode(item.query).tolist()
        assert prompt[-len(query) :] == query
        kept = prompt[: -len(query)]
        assert len(kept) == min(60, len(tokenizer.encode(item.document)))
        assert item.document[slice(*item.span)] in tokenizer.decode(kept)
