"""What a person does with runs: train, watch, generate, export, plot; and what they get wrong."""

import errno
import json
import re
import sys

import pytest
import torch
from safetensors import SafetensorError
from tests.support import (
    TEXT,
    comparable,
    losses,
    make_corpus,
    recipe,
    recipe_table,
    run_command,
    write_toml,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from trellis import TrellisForCausalLM
from trellis.cli import app, main
from trellis.cli import train as commands
from trellis.data import prepare_corpus, train_tokenizer
from trellis.evaluation.comparison import draw_losses
from trellis.mixers.base import names_without_weight_decay
from trellis.models.cache import TrellisCache
from trellis.models.sampling import Sampling, choose, generate
from trellis.training.distributed import Processes
from trellis.training.estimate import least_memory
from trellis.training.metrics import ProgressLine, clock, read_metrics, validate
from trellis.training.optimization import decayed_names
from trellis.training.run import export, load_run, recipe_of, train

#: Losses on a fixed text: 30 steps, fp32. The tolerance leaves room for the order of sums of other
#: processors and thread counts.
GOLDEN_STEPS = [1, 5, 10, 15, 20, 25, 30]
GOLDEN = {
    "trellis": [5.4283, 5.1722, 4.5226, 3.8213, 3.5923, 3.2159, 3.3108],
    "transformer": [5.4845, 5.1481, 4.5489, 3.8118, 3.6748, 3.3147, 3.3864],
}
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    train(recipe(corpus, checkpoint={"every": 10}), run)
    return run


@pytest.mark.parametrize("mixer", GOLDEN)
def test_golden_losses(corpus, tmp_path, mixer):
    sections = {"model": {"mixer": mixer}, "train": {"steps": 30}, "log": {"every": 5}}
    train(recipe(corpus, **sections), tmp_path / "run")
    found = {r["step"]: r["loss"] for r in comparable(tmp_path / "run") if "loss" in r}
    assert list(found) == GOLDEN_STEPS
    print(mixer, [round(loss, 5) for loss in found.values()])
    assert list(found.values()) == pytest.approx(GOLDEN[mixer], abs=TOLERANCE)


def test_what_is_logged(trained, corpus):
    records = read_metrics(trained)
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 21))
    assert steps[-1]["tokens"] == 20 * 4 * 32
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    timing = steps[-1]["timing"]
    assert timing["tokens_per_second"] > 0
    assert 0 < timing["utilisation"] < 1
    assert timing["memory_bytes"] > 2**20
    assert timing["seconds_left"] == 0
    validations = [r for r in records if "validation_loss" in r]
    assert [r["step"] for r in validations] == [10, 20]
    assert validations[-1]["validation_perplexity"] == pytest.approx(
        torch.tensor(validations[-1]["validation_loss"]).exp().item()
    )


def test_validation_is_the_mean_over_fixed_windows(trained, corpus):
    """Against a direct computation, document by document."""
    model, _ = load_run(trained)
    stream, context = corpus.validation, 32
    ends = set(stream.ends.tolist())
    summed = count = 0.0
    windows = (stream.tokens - 1) // context
    chosen = [i * windows // 16 * context for i in range(16)]  # 512 tokens
    for start in chosen:
        ids = stream.read(start, start + context + 1)
        cuts = [0, *(e - start for e in range(start + 1, start + context) if e in ends), context]
        for a, b in zip(cuts, cuts[1:]):
            with torch.no_grad():
                logits = model(torch.from_numpy(ids[a:b])[None]).logits[0].double().log_softmax(-1)
            for place in range(a, b):
                if start + place + 1 not in ends:
                    summed -= logits[place - a, ids[place + 1]].item()
                    count += 1
    last = [r for r in read_metrics(trained) if "validation_loss" in r][-1]
    assert last["validation_loss"] == pytest.approx(summed / count, abs=1e-5)


def test_carrying_states_is_reading_on(corpus, tmp_path):
    """Contiguous batches: a later segment's loss is as if the lane had been read from its start."""
    sections = {
        "data": {"batches": "contiguous", "context": 16},
        "train": {"learning_rate": 0.0, "min_learning_rate": 0.0, "steps": 6, "rows": 2},
    }
    train(recipe(corpus, **sections), tmp_path / "run")
    model, _ = load_run(tmp_path / "run")
    from trellis.training.loop import make_batches

    batches = make_batches(recipe(corpus, **sections), corpus)
    made = [batches.batch(step) for step in range(6)]
    assert all(batch.cu_seqlens is None for batch in made)  # else the check below is too simple
    ids = torch.cat([batch.input_ids for batch in made], dim=1)
    targets = torch.cat([batch.targets for batch in made], dim=1)
    with torch.no_grad():
        logits = model(ids).logits
    by_token = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none"
    ).view(2, 6, 16)
    assert losses(tmp_path / "run").tolist() == pytest.approx(
        by_token.mean((0, 2)).tolist(), abs=1e-5
    )


@pytest.mark.parametrize(
    "option",
    [
        {"checkpointing": True},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
        {"micro_tokens": 1},
    ],
)
def test_options_that_change_no_result(corpus, tmp_path, trained, option):
    sections = {"train": {"steps": 3, **option}}
    if "compile" in option:
        pytest.importorskip("torch._inductor", reason="this torch cannot compile")
    plain = recipe(corpus, train={"steps": 3})
    train(plain, tmp_path / "plain")
    train(recipe(corpus, **sections), tmp_path / "run")
    assert losses(tmp_path / "run").tolist() == pytest.approx(
        losses(tmp_path / "plain").tolist(), abs=2e-5
    )


def test_bf16_autocast_trains(corpus, tmp_path):
    train(recipe(corpus, train={"precision": "bf16"}), tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 0.5


def test_what_decays(trained):
    model, _ = load_run(trained)
    decayed = decayed_names(model)
    assert "model.layers.0.mixer.q_proj.weight" in decayed
    assert "model.layers.1.mlp.down_proj.weight" in decayed
    exempt = ("norm", "embed", "bias", "A_log", "convolutions", "lm_head", "gamma", "beta")
    assert not [n for n in model.state_dict() if any(part in n for part in exempt) and n in decayed]
    assert not decayed & names_without_weight_decay(model)


def text_of(model, tokenizer, prompt, cache, **options):
    return "".join(generate(model, tokenizer, prompt, cache, temperature=0, **options))


def test_a_saved_state_is_gone_on_from(trained, tmp_path):
    model, tokenizer = load_run(trained)
    first, second = "the memory of ", "each pass is"
    whole = text_of(model, tokenizer, first + second, model.init_cache(1), max_tokens=30)
    out = run_command("generate", trained, "--prompt", first, "--max-tokens", 0,
                      "--state-out", tmp_path / "state.safetensors")  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert f"state after {len(first)} tokens" in out.stderr
    assert out.stdout == f"read {len(first)} tokens\n"  # and not the whole text again
    cache = TrellisCache.load(tmp_path / "state.safetensors", model)
    assert text_of(model, tokenizer, second, cache, max_tokens=30) == whole
    # What was generated has been read as well.
    assert cache.seen == [len(first + second) + 30]
    out = run_command("generate", trained, "--prompt", second, "--temperature", 0,
                      "--state-in", tmp_path / "state.safetensors", "--max-tokens", 30)  # fmt: skip
    assert out.stdout == second + whole + "\n"
    out = run_command("generate", trained, "--prompt", first, "--temperature", 0, "--no-echo",
                      "--max-tokens", 9, "--json")  # fmt: skip
    assert out.stderr == (text := json.loads(out.stdout)["texts"][0]) + "\n"
    # Without a prompt, the text goes on from the state.
    out = run_command("generate", trained, "--state-in", tmp_path / "state.safetensors",
                      "--temperature", 0, "--max-tokens", 9)  # fmt: skip
    assert out.stdout == text + "\n"


def test_sampling_depends_on_the_seed_alone(trained):
    model, tokenizer = load_run(trained)
    texts = [
        "".join(generate(model, tokenizer, "x", model.init_cache(1), max_tokens=20, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    cache = model.init_cache(1)
    list(generate(model, tokenizer, "", cache, max_tokens=3))
    assert cache.seen == [4]  # the end of a document, which begins one, and what followed
    list(generate(model, tokenizer, "", cache, max_tokens=3))
    assert cache.seen == [7]  # without a prompt, it goes on
    model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match="prompt must have a token"):
        list(generate(model, tokenizer, "", cache, max_tokens=3))
    sure = [
        "".join(generate(model, tokenizer, "x", model.init_cache(1), max_tokens=9, **options))
        for options in ({"temperature": 0}, {"top_p": 0.0}, {"top_k": 1})
    ]
    assert sure[0] == sure[1] == sure[2]


def test_only_the_likeliest_tokens_are_drawn(trained):
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    source = torch.Generator().manual_seed(0)

    def drawn(*way, times=200):
        return {choose(logits, [Sampling(*way)], [source])[0] for _ in range(times)}

    assert drawn(5.0, 1.0, 2) == {1, 3}
    assert drawn(5.0, 1.0, 9) == drawn(5.0, 1.0) == {0, 1, 2, 3}
    # top_p counts the share among the top_k.
    chances = logits[0, [1, 3]].softmax(-1)
    assert drawn(1.0, float(chances[0]) - 1e-3, 2) == {1}
    with pytest.raises(ValueError, match="top_k must be a whole number of at least 1; got 0"):
        list(text_of(*load_run(trained), "x", None, max_tokens=1, top_k=0))


def test_the_progress_of_a_long_prompt(trained, monkeypatch):
    model, tokenizer = load_run(trained)
    model.config.segment_size = 100
    read = []
    text = "".join(
        generate(
            model, tokenizer, "x" * 250, model.init_cache(1), max_tokens=0, progress=read.append
        )
    )
    assert (read, text) == ([100, 100, 50], "")
    monkeypatch.setattr(commands, "LONG_PROMPT", 10)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    shown = CliRunner().invoke(
        app, ["generate", str(trained), "--prompt", "x" * 50, "--max-tokens", "0"]
    )
    assert shown.exit_code == 0
    assert "reading the prompt" in shown.stderr
    assert "50/50" in shown.stderr


def test_several_samples_and_a_conversation(trained):
    arguments = ["generate", str(trained), "--max-tokens", "5"]
    shown = CliRunner().invoke(app, [*arguments, "--prompt", "ab", "--samples", "3", "--json"])
    texts = json.loads(shown.stdout)["texts"]
    assert len(set(texts)) == 3
    assert shown.stderr == "".join(f"--- {n} of 3\nab{text}\n" for n, text in enumerate(texts, 1))
    alone = CliRunner().invoke(app, [*arguments, "--prompt", "ab", "--seed", "1", "--no-echo"])
    assert alone.stdout == texts[1] + "\n"
    model, tokenizer = load_run(trained)
    cache = model.init_cache(1)
    first, second = (
        "".join(generate(model, tokenizer, line, cache, max_tokens=5, seed=seed))
        for seed, line in enumerate(["hello", "world"])
    )
    shown = CliRunner().invoke(app, [*arguments, "--interactive"], input="hello\nworld\n\nmore\n")
    assert shown.stdout == f"{first}\n{second}\n"


@pytest.mark.parametrize("step", [10, None])
def test_every_checkpoint_can_be_exported(trained, tmp_path, step):
    model, tokenizer = load_run(trained, step)
    export(trained, tmp_path / "model", step)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    fast = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "def f(x):\n    return ä"
    ids = fast(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == tokenizer.encode(text).tolist()
    assert fast.decode(ids[0]) == text
    assert fast.eos_token_id == loaded.config.eos_token_id == 256
    assert fast.pad_token_id == loaded.config.pad_token_id == 256
    batch = fast(["a longer text", "text"], padding=True, padding_side="left", return_tensors="pt")
    assert loaded.generation_config.pad_token_id == 256
    both = loaded.generate(**batch, max_new_tokens=4, do_sample=False)
    alone = loaded.generate(fast("text", return_tensors="pt").input_ids, max_new_tokens=4)
    assert both[1, -4:].tolist() == alone[0, -4:].tolist()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    again, _ = load_run(tmp_path / "model")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    with pytest.raises(FileExistsError, match="exists already: give another --out"):
        export(trained, tmp_path / "model")


def test_an_export_is_whole_or_not_there(trained, tmp_path, monkeypatch):
    left = tmp_path / ".model.partial"  # of another program, or of an export that was killed
    left.mkdir()
    (left / "model.safetensors").write_text("")
    before = set(tmp_path.iterdir())

    for error in (OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")):

        def full(*arguments, error=error, **options):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
            with pytest.raises(OSError, match=re.escape(str(tmp_path / "model"))):
                export(trained, tmp_path / "model")
        assert set(tmp_path.iterdir()) == before
    export(trained, tmp_path / "new" / "model")
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "model"]
    load_run(tmp_path / "new" / "model")


def said_by(monkeypatch, *arguments):
    """What the command `trellis` says when it refuses."""
    monkeypatch.setattr(sys, "argv", ["trellis", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        main()
    assert str(exit.value).startswith("trellis: ")
    return str(exit.value)


def test_what_generate_cannot_do_is_said(trained, tmp_path, monkeypatch, capsys):
    said = said_by(monkeypatch, "generate", tmp_path)
    assert f"{tmp_path} is neither a run nor an exported model: it has no recipe.json" in said
    said = said_by(monkeypatch, "generate", trained, "--prompt", "ab\udcff")
    assert "--prompt must be UTF-8; its character 3 is a byte that is not" in said
    said = said_by(monkeypatch, "generate", trained, "--seed", 2**70)
    assert "seed must be from -2^63 to 2^64 - 1; got 1180591620717411303424" in said
    said = said_by(monkeypatch, "generate", trained, "--samples", 2, "--state-out", tmp_path / "s")
    assert "--samples must be 1 with --interactive or --state-out; got 2" in said
    said = said_by(monkeypatch, "generate", trained, "--device", "nowhere")
    assert "--device must be one that torch has; got 'nowhere'" in said
    said = said_by(monkeypatch, "generate", trained, "--temperature", "inf")
    assert "temperature must be a number of at least 0; got inf" in said
    assert capsys.readouterr().out == ""


def test_any_temperature_above_zero_works(trained):
    model, tokenizer = load_run(trained)
    cold, likeliest, hot = (
        "".join(
            generate(model, tokenizer, "x", model.init_cache(1), max_tokens=9, temperature=value)
        )
        for value in (1e-300, 0, 1e300)
    )
    assert cold == likeliest != hot


@pytest.mark.parametrize(
    "content", ["[]", '{"train"', '{"trian": {}}', '{"train": 3}', "[" * 100_000]
)
def test_a_damaged_recipe_of_a_run_is_named(tmp_path, content):
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/recipe\.json is damaged: "):
        recipe_of(tmp_path)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("model.hidden_size=1000000", "model.hidden_size"),
        ("model.hidden_size=1000000000", "model.hidden_size"),
        ("model.hidden_size=10000000000000000", "hidden_size = 10000000000000000"),
        ("model.num_hidden_layers=100000000", "model.num_hidden_layers"),
        ("model.intermediate_size=100000000000", "model.intermediate_size"),
        ("train.rows=1000000000", "train.rows"),
        ("train.batch_tokens=1e30", "train.batch_tokens"),
    ],
)
def test_what_cannot_fit_is_refused_by_the_key(corpus, tmp_path, monkeypatch, setting, key):
    path = write_toml(tmp_path / "r.toml", recipe_table(corpus))
    for dry in ([], ["--dry-run"]):
        said = said_by(
            monkeypatch, "train", path, "--out", tmp_path / "run", "--set", setting, *dry
        )
        assert key in said
        assert "the run needs at least" in said or "no model can be made with" in said
    assert list(tmp_path.iterdir()) == [path]


def test_least_memory_is_less_than_what_a_run_takes(corpus):
    """By torch's own count of what is allocated in a step: weights, gradients, moments."""
    chosen = recipe(corpus, model={"hidden_size": 128})
    group = Processes(0, 1, torch.device("cpu"), 1, None)
    needs = least_memory(chosen, corpus.vocab_size, group)
    model = TrellisForCausalLM(chosen.model.config(corpus.vocab_size))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert needs["weights, gradients and moments"][0] == 4 * weights


def test_a_dry_run_measures_and_writes_nothing(corpus, tmp_path):
    path = write_toml(tmp_path / "r.toml", recipe_table(corpus))
    shown = CliRunner().invoke(
        app, ["train", str(path), "--out", str(tmp_path / "run"), "--dry-run"]
    )
    assert shown.exit_code == 0, shown.output
    model = TrellisForCausalLM(recipe(corpus).model.config(corpus.vocab_size))
    count = sum(p.numel() for p in model.parameters())
    assert f"parameters  {count:,}\n" in shown.output
    assert f"state       {model.init_cache(1).nbytes:,} bytes of a sequence" in shown.output
    assert "tokens      2,560 in 20 steps of 4 x 32" in shown.output
    assert re.search(r"memory      \d+\.\d\d GiB in these steps, of \d+\.\d\d GiB", shown.output)
    assert re.search(r"time        \d+:\d\d at [\d,]+ tokens/s", shown.output)
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_and_last_lines_of_a_run(corpus, tmp_path):
    out = run_command("train", write_toml(tmp_path / "r.toml", recipe_table(corpus)), "--out",
                      tmp_path / "run", "--json", "--set", "train.steps=2")  # fmt: skip
    lines = out.stderr.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("step 1/2"))
    assert re.search(r"% of peak is of [\d,]+ GFLOP/s, .*; GiB is the memory of", lines[first - 1])
    assert lines[-2] == f"finished: {tmp_path / 'run'}"
    assert lines[-1].startswith(f"next: trellis generate {tmp_path / 'run'} --prompt")
    record = json.loads(out.stdout)
    assert (record["run"], record["step"]) == (str(tmp_path / "run"), 2)
    assert {"loss", "validation_loss"} <= set(record)


def test_curves_of_several_runs(trained, tmp_path):
    drawn = draw_losses([trained, trained], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    tokens, values = drawn[str(trained)]["training"]
    assert tokens[-1] == 20 * 4 * 32
    assert list(values) == losses(trained).tolist()
    with pytest.raises(FileNotFoundError, match=r"is not a run: it has no metrics\.jsonl"):
        draw_losses([tmp_path], tmp_path / "x.png")


def test_tensorboard(corpus, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    train(recipe(corpus, train={"steps": 2}, log={"tensorboard": True}), tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    drawn = [event.value for event in events.Scalars("loss")]
    assert drawn == pytest.approx(losses(tmp_path / "run").tolist())


class Text:
    def __init__(self, terminal):
        self.terminal, self.written = terminal, ""

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.written += text

    def flush(self):
        pass


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_line(trained, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    record = next(r for r in read_metrics(trained) if "loss" in r)
    out = Text(terminal)
    ProgressLine(20, out).show({**record, "loss": 2.0, "bad_steps": 3})
    assert "step  1/20  loss 2.0000  perplexity 7.39" in out.written
    assert "tokens/s" in out.written
    assert "% of peak" in out.written
    assert "3 skipped" in out.written
    assert out.written.startswith("\r") == terminal
    assert (clock(67.4), clock(3723)) == ("1:07", "1:02:03")
    # An error of mixers is no loss of text and has no perplexity.
    ProgressLine(20, out, of_text=False).show({**record, "loss": 0.5})
    assert "loss 0.5000  " in out.written
    assert out.written.count("perplexity") == 1


def test_validating_on_another_folder(corpus, tmp_path):
    other = make_corpus(tmp_path, documents=30)
    section = {"validation_path": str(other.path)}
    train(recipe(corpus, data=section, train={"steps": 1}), tmp_path / "run")
    model, _ = load_run(tmp_path / "run")
    group = Processes(0, 1, torch.device("cpu"), 1, None)
    expected = validate(model, other.train, 32, 512, 4, group)["validation_loss"]
    assert comparable(tmp_path / "run")[-1]["validation_loss"] == pytest.approx(expected)
    (tmp_path / "bpe").mkdir()
    train_tokenizer([TEXT], 300, tmp_path / "t.json")
    third = make_corpus(tmp_path / "bpe", tokenizer=tmp_path / "t.json")
    wrong = recipe(corpus, data={"validation_path": str(third.path)})
    with pytest.raises(ValueError, match="was prepared with another tokenizer than"):
        train(wrong, tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_text_without_a_validation_part(tmp_path, capsys):
    source = tmp_path / "a.txt"
    source.write_text(TEXT.read_text())
    whole = prepare_corpus([source], tmp_path / "whole", validation=0.0)
    train(recipe(whole, train={"steps": 2}, log={"validate_every": 1}), tmp_path / "run")
    assert "there is no validation" in capsys.readouterr().out
    assert all("validation_loss" not in record for record in comparable(tmp_path / "run"))


def broken(corpus, tmp_path, what):
    """A recipe whose inputs are broken in one way; returns (arguments, message)."""
    own = make_corpus(tmp_path)
    values = recipe_table(own)
    arguments = []
    manifest = own.path / "manifest.json"
    if what == "no corpus":
        values["data"].update(path=str(tmp_path / "none"), sources=["stdlib"])
        message = "make it with: trellis data prepare stdlib --tokenizer bytes --out"
    elif what == "truncated shard":
        shard = own.path / "train-00000.bin"
        shard.write_bytes(shard.read_bytes()[:-10])
        message = "train-00000.bin"
    elif what == "manifest that does not match":
        content = json.loads(manifest.read_text())
        content["splits"]["train"]["tokens"] += 1
        manifest.write_text(json.dumps(content))
        message = "expected 33,812: prepare the corpus again"
    elif what == "wrong tokenizer":
        (own.path / "tokenizer.json").write_text("{}")
        message = "tokenizer.json"
    elif what == "typo":
        values["train"]["stesp"] = 3
        message = "a recipe has no key train.stesp; did you mean train.steps?"
    elif what == "growing state":
        values["data"]["batches"] = "contiguous"
        values["model"]["mixer"] = "transformer"
        message = "grows with what is read: give it a window, or use packed batches"
    else:
        assert what == "output that cannot be written"
        (tmp_path / "file").write_text("")
        arguments = ["--out", tmp_path / "file" / "run"]
        message = "cannot be written"
    file = write_toml(tmp_path / "r.toml", values)
    return ["train", file, *(arguments or ["--out", tmp_path / "run"])], message


@pytest.mark.parametrize(
    "what",
    ["no corpus", "truncated shard", "manifest that does not match", "wrong tokenizer", "typo",
     "growing state", "output that cannot be written"],
)  # fmt: skip
def test_broken_inputs_are_named_before_anything_is_written(corpus, tmp_path, monkeypatch, what):
    arguments, message = broken(corpus, tmp_path, what)
    assert message in said_by(monkeypatch, *arguments)
    assert not (tmp_path / "run").exists()


def test_an_error_is_one_line_and_an_exit_code(tmp_path):
    out = run_command("train", tmp_path / "none.toml")
    assert out.returncode == 1
    assert out.stderr == f"trellis: there is no recipe {tmp_path / 'none.toml'}\n"
