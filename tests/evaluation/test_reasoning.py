import json
import socket
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tests.support import evaluated_model, save_gpt2
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from trellis.cli import app
from trellis.cli.evaluation import show
from trellis.evaluation.models import open_model
from trellis.evaluation.ppl import encode
from trellis.evaluation.reasoning import TASKS, find, read

CHOICES = ["in the park", "on a distant star, which nobody knew", "under it", "with great care"]


def publishers():
    """A few items of every task, as the publishers write them: file name -> lines."""
    hellaswag = [
        {
            "ind": n,
            "activity_label": "Removing ice",
            "ctx_a": f"Then, {n} [header] How to [title] Clean the car [step] A man sits.",
            "ctx_b": "the man" if n % 2 else "",
            "ctx": "not used",
            "split": "val",
            "split_type": "indomain",
            "label": n % 4,
            "endings": [f"{end} [substeps] again {n}." for end in CHOICES],
            "source_id": "x",
        }
        for n in range(4)
    ]
    arc = [
        {
            "id": f"Q{n}",
            "question": {
                "stem": f"Where do {n} planets move?",
                "choices": [{"text": text, "label": label} for text, label in zip(CHOICES, labels)],
            },
            "answerKey": labels[n],
        }
        for n, labels in enumerate(["ABCD", "1234", "ABC"])
    ]
    return {
        "lambada_openai_test.jsonl": [
            {"text": f"“Well,” said {name}, and the door was closed by {name}"}
            for name in ("Anna", "old Karenina", "you")
        ],
        "piqa/valid.jsonl": [
            {"goal": f"How do I boil {n} eggs?", "sol1": "In a pot. ", "sol2": " Put it in milk"}
            for n in range(3)
        ],
        "piqa/valid-labels.lst": [0, 1, 1],
        "hellaswag_val.jsonl": hellaswag,
        "winogrande/dev.jsonl": [
            {"qID": f"{n}", "sentence": f"Sarah met {n} Marias so _ was {end}.", "option1": "Sarah",
             "option2": "Maria", "answer": answer}
            for n, end, answer in [(1, "glad", "2"), (2, "sorry to go", 1), (3, "late", "1")]
        ],
        "ARC-Easy/ARC-Easy-Test.jsonl": arc,
        "ARC-Challenge-Test.jsonl": arc[::-1],
        "socialiqa/dev.jsonl": [
            {"context": f"Jo had {n} dogs.", "question": "Why?", "answerA": "for fun",
             "answerB": "none", "answerC": "to walk them every day"}
            for n in range(3)
        ],
        "socialiqa/dev-labels.lst": [3, 1, 2],
    }  # fmt: skip


CLEANED = [
    {"query": f"Canoeing: {n} women are seen. they", "gold": n, "endings": CHOICES}
    for n in range(3)
]


def write(folder, files):
    for name, lines in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data"), publishers())


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory):
    return write(tmp_path_factory.mktemp("cleaned"), {"hellaswag_val.jsonl": CLEANED})


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return str(save_gpt2(tmp_path_factory.mktemp("model") / "gpt2", positions=512))


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    """The same with a tokenizer of merges, some of them over the ends of words."""
    folder = save_gpt2(tmp_path_factory.mktemp("model") / "merging", positions=512)
    inner = tokenizers.ByteLevelBPETokenizer()._tokenizer
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator([str(lines) for lines in publishers().values()], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.resize_token_embeddings(inner.get_vocab_size(), mean_resizing=False)
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.2)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def built(folder, *names):
    from trellis.evaluation.reasoning import build

    return build(names, {name: read(find(folder, name), name) for name in names})


def wrapped(model, **options):
    from trellis.evaluation.lm_eval_model import TrellisLM

    return TrellisLM(model=model, **options)


def asked(*arguments):
    """Requests as lm-eval makes them."""
    return [SimpleNamespace(args=one) for one in arguments]


def by_hf(path):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=path, device="cpu", batch_size=2, dtype="float32")


def compare(tasks, path):
    """Every task by our model class and by lm-eval's own."""
    from lm_eval.evaluator import evaluate

    from trellis.evaluation.reasoning import likelihoods, measure

    model, theirs = wrapped(open_model(path)), by_hf(path)
    for task in tasks.values():
        found = measure(model, task)
        out = evaluate(
            lm=theirs, task_dict={"tasks": {task.task_name: task}},
            bootstrap_iters=0, log_samples=False,
        )  # fmt: skip
        metrics = out["results"][task.task_name]
        for name, value in found.items():
            if name in ("acc", "acc_norm"):
                assert value == metrics[f"{name},none"], (task.task_name, name)
            if name == "perplexity":
                assert value == pytest.approx(metrics["perplexity,none"], rel=1e-5)
        expected = likelihoods(task)
        assert found["items"] == len(expected)
        for item, other in zip(found["likelihoods"], expected):
            assert item == pytest.approx(other, abs=1e-4), task.task_name


@pytest.mark.parametrize("which", ["gpt2", "merging"])
def test_all_tasks_score_as_with_lm_evals_own_model(request, data, which, offline):
    compare(built(data, *TASKS), request.getfixturevalue(which))


def test_contexts_and_continuations_may_merge(merging):
    model = wrapped(open_model(merging))
    context, continuation = "in the", " park again"
    whole = model.tok_encode(context + continuation)
    assert whole[: len(model.tok_encode(context))] != model.tok_encode(context)
    (found,) = model.loglikelihood(asked((context, continuation)))
    (expected,) = by_hf(merging).loglikelihood(asked((context, continuation)), disable_tqdm=True)
    assert found == (pytest.approx(expected[0], abs=1e-4), expected[1])


def test_cleaned_hellaswag_scores_as_with_lm_evals_own_model(cleaned, gpt2, offline):
    compare(built(cleaned, "hellaswag"), gpt2)


def test_prompts_of_hellaswag_are_those_of_lm_eval(data, cleaned):
    task = built(data, "hellaswag")["hellaswag"]
    doc = task.eval_docs[1]
    assert task.doc_to_text(doc) == (
        "Removing ice: Then, 1 How to. Clean the car A man sits. The man"
    )
    assert task.doc_to_choice(doc)[0] == "in the park again 1."
    assert task.doc_to_target(doc) == 1
    task = built(cleaned, "hellaswag")["hellaswag"]
    assert task.doc_to_text(task.eval_docs[2]) == CLEANED[2]["query"]
    assert task.doc_to_choice(task.eval_docs[2]) == CHOICES
    assert task.doc_to_target(task.eval_docs[2]) == 2


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("a b", " c"), ("a b  ", "c"), ("a\n", "c d"), ("", "whole"), ("ä", "ö"), ("x" * 80, " y")],
)
def test_texts_are_split_as_by_lm_evals_own_model(gpt2, monkeypatch, context, continuation):
    model, theirs = wrapped(open_model(gpt2)), by_hf(gpt2)
    monkeypatch.setattr(model.evaluated, "max_context", 64)
    theirs._max_length = 64
    (found,) = model.loglikelihood(asked((context, continuation)))
    (expected,) = theirs.loglikelihood(asked((context, continuation)), disable_tqdm=True)
    assert found == (pytest.approx(expected[0], abs=1e-4), expected[1])
    assert model.cut == (len(context) > 64)


def test_long_contexts_are_cut_and_told_but_not_long_answers(data, tmp_path, capsys):
    model = open_model(str(save_gpt2(tmp_path / "short", positions=24)))
    (record,) = run(model, data, tmp_path, tasks=["winogrande"])
    assert record["result"]["contexts_cut"] == 6
    assert (
        "short, winogrande: 6 contexts are longer than the model reads" in capsys.readouterr().out
    )
    with pytest.raises(ValueError, match=r"a continuation has 30 tokens.*reads at most 24"):
        wrapped(model).loglikelihood(asked(("a", "b" * 30)))
    with pytest.raises(ValueError, match=r"an answer has 31 tokens.*reads at most 24"):
        wrapped(model).generate_until(asked(("a", {"max_gen_toks": 30, "until": []})))


PAIRS = [("the cat sat", " on the mat"), ("the cat sat", " up"), ("", "x"), ("the cat sat ", "so")]


@pytest.mark.parametrize("mixer", ["trellis", "transformer"])
def test_shared_contexts_and_batches_change_nothing(mixer):
    model = evaluated_model(mixer)
    alone = [wrapped(model, share=False).loglikelihood(asked(pair))[0] for pair in PAIRS]
    for options in ({}, {"batch_tokens": 1}, {"share": False}):
        found = wrapped(model, **options).loglikelihood(asked(*PAIRS))
        for one, expected in zip(found, alone):
            assert one == (pytest.approx(expected[0], rel=1e-5), expected[1])


def test_contexts_are_read_once(monkeypatch):
    model = evaluated_model()
    read_rows = []
    original = model.read
    monkeypatch.setattr(model, "read", lambda rows: read_rows.extend(rows) or original(rows))
    wrapped(model).loglikelihood(asked(*((CHOICES[0], f" {end}") for end in CHOICES)))
    assert len(read_rows) == 1


def test_a_whole_text_is_that_of_a_direct_computation():
    model = evaluated_model()
    texts = ["It was the best of times.", "", "x", "It was the worst of times, " * 4]
    for batch_tokens in (1, 10_000):
        found = wrapped(model, batch_tokens=batch_tokens).loglikelihood_rolling(
            asked(*((text,) for text in texts))
        )
        for text, likelihood in zip(texts, found):
            ids = [*model.start, *text.encode()]
            with torch.no_grad():
                chances = model.network(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            expected = sum(float(chances[n, token]) for n, token in enumerate(ids[1:]))
            assert likelihood == pytest.approx(expected, rel=1e-6)


def test_a_whole_text_in_windows_is_that_of_lm_evals_own_model(gpt2, monkeypatch):
    model, theirs = wrapped(open_model(gpt2)), by_hf(gpt2)
    monkeypatch.setattr(model.evaluated, "max_context", 16)
    theirs._max_length = 16
    texts = asked(("It was the best of times, it was the worst of times.",), ("short",))
    expected = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert model.loglikelihood_rolling(texts) == pytest.approx(expected, abs=1e-4)


def save_with(folder, names, template=None):
    """A model whose tokenizer has special tokens of these names, and puts some around texts."""
    folder = save_gpt2(folder, positions=24)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(list(names.values()))
    if template:
        ids = [(name, inner.token_to_id(name)) for name in names.values()]
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=ids
        )
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.resize_token_embeddings(inner.get_vocab_size(), mean_resizing=False)
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.2)
    model.save_pretrained(folder)
    return str(folder)


BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENIZERS = {
    "adds bos": (BOTH, "<s> $A", ["<s>"]),
    "has bos": (BOTH, None, []),
    "only eos": ({"eos_token": "</s>"}, None, []),
    "adds a suffix": (BOTH, "$A <s>", []),
}


@pytest.mark.parametrize("which", TOKENIZERS)
def test_texts_start_as_with_lm_evals_own_model(tmp_path, which):
    names, template, prefix = TOKENIZERS[which]
    path = save_with(tmp_path / "model", names, template)
    opened, theirs = open_model(path), by_hf(path)
    model = wrapped(opened)
    assert [opened.tokenizer.inner.id_to_token(i) for i in opened.prefix] == prefix
    assert opened.start == [model.prefix_token_id] == [theirs.prefix_token_id]
    assert encode(opened, "text").ids == [theirs.prefix_token_id, *b"text"]
    for text in ("", "a text"):
        assert model.tok_encode(text) == theirs.tok_encode(text)
    texts = asked(("It was the best of times, it was the worst of times.",), ("short",))
    expected = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert model.loglikelihood_rolling(texts) == pytest.approx(expected, abs=1e-4)
    pairs = asked(("", "whole"), ("a b", " c d"))
    expected = theirs.loglikelihood(pairs, disable_tqdm=True)
    for found, other in zip(model.loglikelihood(pairs), expected):
        assert found == (pytest.approx(other[0], abs=1e-4), other[1])


def test_our_models_put_nothing_before_texts():
    model = evaluated_model()
    model.tokenizer.inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    again = type(model)("again", model.network, model.tokenizer, {})
    assert (again.prefix, again.start) == ([], [256])


@pytest.mark.parametrize("which", ["trellis", "gpt2"])
def test_text_is_written_up_to_the_first_of_several_stops(which, gpt2):
    model = wrapped(open_model(gpt2) if which == "gpt2" else evaluated_model(which))
    (whole,) = model.generate_until(asked(("hello", {"max_gen_toks": 20, "until": []})))
    late, early = whole[-1], whole[len(whole) // 2]
    requests = asked(
        ("hello", {"max_gen_toks": 20, "until": [late, early, "never there"]}),
        ("hello", {"max_gen_toks": 20, "until": early}),
        ("hello", {"max_gen_toks": 20, "until": []}),
    )
    cut = whole[: min(whole.index(late), whole.index(early))]
    assert model.generate_until(requests) == [cut, whole[: whole.index(early)], whole]
    with pytest.raises(ValueError, match="writes greedily"):
        model.generate_until(asked(("hello", {"do_sample": True, "temperature": 1.0})))


def test_the_hub_is_asked_where_there_is_no_folder(data, tmp_path, monkeypatch):
    import datasets

    items = read(find(data, "piqa"), "piqa")
    rows = datasets.Dataset.from_list(items.rows)
    hub = datasets.DatasetDict({"train": rows, "validation": rows})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, **_: hub)
    model = evaluated_model()
    (theirs,) = run(model, None, tmp_path, tasks=["piqa"])
    (local,) = run(model, data, tmp_path, tasks=["piqa"])
    assert theirs["note"]["data"] == "hub:baber/piqa"
    assert theirs["result"] == local["result"]

    def fail(**_):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"the hub does not give the data of piqa: no network"):
        run(model, None, tmp_path, tasks=["piqa"])


def test_it_is_a_model_of_lm_eval_by_name(gpt2):
    from lm_eval.api.registry import get_model

    from trellis.evaluation.lm_eval_model import TrellisLM

    assert get_model("trellis") is TrellisLM
    model = TrellisLM.create_from_arg_string(
        f"path={gpt2},batch_tokens=100", {"batch_size": 1, "device": "cuda:0"}
    )
    assert model.evaluated.name == "gpt2"
    assert model.batch_tokens == 100


def run(model, folder, out, **options):
    """Runs the command's task and prints its report; returns the records."""
    from trellis.evaluation import reasoning

    given = {"data": folder, "tasks": None, "limit": None, "batch_tokens": 4096, **options}
    report = reasoning.run([model], out, **given)
    show(report)
    return report.found


def test_the_command_prints_the_papers_table_and_does_not_repeat(data, tmp_path, capsys, offline):
    model = evaluated_model()
    first = run(model, data, tmp_path)
    printed = capsys.readouterr().out
    for word in ("LMB.", "PIQA", "Hella.", "Wino.", "ARC-e", "ARC-c", "SIQA", "Avg.", "acc_n"):
        assert word in printed
    accuracies = [record["result"]["acc"] for record in first]
    assert len(accuracies) == 7
    assert f"{100 * sum(accuracies) / 7:.2f}" in printed
    kept = sorted((tmp_path / "reasoning").glob("*.json"))
    assert len(kept) == 7
    assert all(json.loads(path.read_text())["setting"]["data_sha256"] for path in kept)
    model.network = None  # would fail if it were asked
    assert run(model, data, tmp_path) == first


def test_the_command(data, gpt2, tmp_path, offline):
    command = ["eval", "reasoning", gpt2, "--data", str(data), "--out", str(tmp_path)]
    command += ["--tasks", "piqa,siqa", "--limit", "2"]
    out = CliRunner().invoke(app, command)
    assert out.exit_code == 0, out.exception
    assert "PIQA" in out.stdout
    kept = [json.loads(path.read_text()) for path in (tmp_path / "reasoning").glob("*.json")]
    assert {record["setting"]["task"] for record in kept} == {"piqa", "siqa"}
    assert all(record["result"]["items"] == 2 for record in kept)


def test_a_limit_is_a_prefix(data, tmp_path):
    model = evaluated_model()
    (whole,) = run(model, data, tmp_path, tasks=["hellaswag"])
    (part,) = run(model, data, tmp_path, tasks=["hellaswag"], limit=2)
    assert part["result"]["items"] == 2
    for one, expected in zip(part["result"]["likelihoods"], whole["result"]["likelihoods"]):
        assert one == pytest.approx(expected, rel=1e-5)
    model.network = None  # a limit that leaves nothing out is none: nothing is measured again
    assert run(model, data, tmp_path, tasks=["hellaswag"], limit=100) == [whole]
    assert (whole["setting"]["items"], part["setting"]["items"]) == (4, 2)


def test_tasks_without_files_are_left_out_or_errors(cleaned, tmp_path, capsys):
    model = evaluated_model()
    (record,) = run(model, cleaned, tmp_path)
    assert record["setting"]["task"] == "hellaswag"
    assert "left out piqa: there is none of piqa_valid.jsonl" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"siqa: there is none of siqa_dev\.jsonl"):
        run(None, cleaned, tmp_path, tasks=["siqa"])
    with pytest.raises(ValueError, match=r"--tasks must be of lambada.*got 'boolq'"):
        run(None, cleaned, tmp_path, tasks=["boolq"])
    with pytest.raises(FileNotFoundError, match="must be a folder"):
        run(None, tmp_path / "nowhere", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no files of reasoning tasks"):
        run(None, tmp_path / "empty", tmp_path)


GOOD = publishers()
BAD = [
    ("lambada", 1, "not json", r"test\.jsonl:2: this is not JSON"),
    ("lambada", 1, [1], r"test\.jsonl:2: a line must be a JSON object"),
    ("lambada", 0, {"texts": "a b"}, r"test\.jsonl:1: there is no field 'text', only texts"),
    ("lambada", 2, {"text": "ends with a space "}, r":3: 'text' must end with a word"),
    ("piqa", 1, {"goal": "g", "sol1": 3, "sol2": "s"}, r":2: 'sol1' must be a text; got 3"),
    ("hellaswag", 1, {**GOOD["hellaswag_val.jsonl"][1], "label": 4}, r":2: 'label' must be one of"),
    ("hellaswag", 1, CLEANED[1], r":2: there is no field 'activity_label'"),
    ("hellaswag", 3, {**GOOD["hellaswag_val.jsonl"][1], "endings": ["a"]}, "list of two texts"),
    ("winogrande", 2, {"sentence": "none"}, r":3: 'sentence' must have a gap"),
    ("arc_easy", 0, {"question": "text"}, r":1: 'question' must be an object"),
    ("arc_easy", 0, {"question": {"choices": [{"text": "a"}] * 2}}, r"choice 1: there is no field"),
    ("siqa", 1, {"context": "c"}, r":2: there is no field 'question'"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "line", "text", "match"), BAD)
def test_bad_rows_are_named_with_file_and_line(tmp_path, task, line, text, match):
    files = publishers()
    name = next(name for name in TASKS[task].files if name in files)
    files[name][line] = text
    write(tmp_path, files)
    with pytest.raises(ValueError, match=match):
        read(find(tmp_path, task), task)


def test_bad_labels_are_named(tmp_path):
    labels = "piqa/valid-labels.lst"
    for lines, match in (([0, 1], "has 2 labels for 3 items"), ([0, 2, 1], r"lst:2.*got '2'")):
        write(tmp_path, {**publishers(), labels: lines})
        with pytest.raises(ValueError, match=match):
            read(find(tmp_path, "piqa"), "piqa")
    (tmp_path / labels).unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*valid-labels\.lst"):
        read(find(tmp_path, "piqa"), "piqa")
    write(tmp_path, {"piqa/valid.jsonl": []})
    with pytest.raises(ValueError, match=r"valid\.jsonl has no items"):
        read(find(tmp_path, "piqa"), "piqa")
