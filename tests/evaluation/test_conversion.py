"""`trellis convert`: a tiny Llama, made on the spot, becomes a model with a bounded memory."""

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import (
    command,
    comparable,
    contents,
    environment,
    evaluated_model,
    make_corpus,
    relative_rms,
    save_gpt2,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from trellis.cli import app
from trellis.data import prepare_corpus, train_tokenizer
from trellis.data.batches import validation_windows
from trellis.data.tokenizer import load_tokenizer, read_llama2c_tokenizer
from trellis.evaluation import conversion, ppl
from trellis.evaluation.conversion import Conversion, memory_off, open_pretrained, windows
from trellis.evaluation.models import EvaluatedModel, open_model
from trellis.mixers.base import named_tensors
from trellis.models.pretrained import imported, replaced
from trellis.training import checkpoint as checkpoints
from trellis.training import loop
from trellis.training.run import load_run

#: The folder of a pretrained model, which the environment variable TRELLIS_STORIES names.
STORIES = Path(os.environ.get("TRELLIS_STORIES", "models/stories260k"))
SMALL = {
    "steps": [6, 4, 3], "contexts": [32, 32, 64], "batch_tokens": 128, "validation_tokens": 256,
    "window": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One thread, as in the processes that tests start, and no long measurement of the peak."""
    monkeypatch.setitem(loop.PEAK_SIZES, "cpu", 256)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def llama(**fields):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.1, bos_token_id=None, eos_token_id=256, **fields,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random Llama and the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return folder


@pytest.fixture(scope="module")
def converted(model, corpus, tmp_path_factory):
    """The folder of a conversion with one layer kept, and its report."""
    out = tmp_path_factory.mktemp("runs") / "run"
    said = []
    chosen = Conversion(keep_attention=1, **SMALL)
    report = conversion.convert(model, corpus.path, out, chosen, say=said.append)
    return out, report, said


def arguments(model, corpus, out):
    """The command of the conversion that `converted` made."""
    numbers = {name: ",".join(map(str, SMALL[name])) for name in ("steps", "contexts")}
    return [
        "convert", model, "--data", corpus.path, "--out", out, "--keep-attention", 1,
        "--steps", numbers["steps"], "--contexts", numbers["contexts"], "--window", 8,
        "--batch-tokens", 128, "--validation-tokens", 256,
    ]  # fmt: skip


def test_every_stage_comes_closer_to_the_teacher(converted):
    out, report, said = converted
    stages = report.found["stages"]
    assert list(stages) == ["align", "keep", "distill", "extend"]
    assert {stage["context"] for stage in stages.values()} == {32}
    assert [stage["tokens"] for stage in stages.values()] == [6 * 128, 6 * 128, 10 * 128, 13 * 128]
    errors = [
        record["mixer_errors"]
        for line in (out / "align" / "metrics.jsonl").read_text().splitlines()
        if "mixer_errors" in (record := json.loads(line))
    ]
    assert errors[0].keys() == {"0", "1", "2"}
    assert all(errors[-1][layer] < errors[0][layer] for layer in errors[0])
    # Attention that is given back helps by itself; distillation helps beyond it.
    assert stages["keep"]["validation_kl"] < stages["align"]["validation_kl"]
    assert stages["distill"]["validation_kl"] < stages["keep"]["validation_kl"]
    # The layer that cost most has its attention again, in a window.
    costs = {int(layer): cost for layer, cost in report.found["costs"].items()}
    assert report.found["kept"] == [max(costs, key=costs.get)]
    assert any("layer 2: " in line for line in said)
    assert sorted(report.found["mixers"]) == ["transformer", "trellis", "trellis"]


def test_the_cost_of_a_layer_is_what_replacing_it_alone_costs(converted, corpus):
    out, report, _ = converted
    teacher, aligned = (load_run(out / name)[0].eval() for name in ("teacher", "align"))
    # The windows of 32 tokens that lie evenly over the text to train on.
    starts = validation_windows(corpus.train, 32, SMALL["validation_tokens"])
    ids = torch.stack([torch.from_numpy(corpus.train.read(s, s + 33)).long() for s in starts])
    with torch.no_grad():
        before = teacher(ids[:, :-1]).logits.log_softmax(-1)
        for layer, cost in report.found["costs"].items():
            block = teacher.model.layers[int(layer)]
            attention, block.mixer = block.mixer, aligned.model.layers[int(layer)].mixer
            after = teacher(ids[:, :-1]).logits.log_softmax(-1)
            block.mixer = attention
            expected = (before.exp() * (before - after)).sum(-1).mean()
            assert cost == pytest.approx(float(expected), rel=1e-3)


def test_what_is_held_out_is_measured_in_parts_of_every_document(corpus):
    model = evaluated_model("trellis")
    ends = corpus.validation.ends.tolist()
    assert len(ends) > 1
    texts = conversion.held_out(model, corpus.validation, 20 * len(ends), 8)
    assert [len(text.ids) - len(model.start) for text in texts] == [20] * len(ends)
    whole = corpus.validation.read(0, corpus.validation.tokens).tolist()
    for text, start in zip(texts, [0, *ends]):
        assert list(text.ids[len(model.start) :]) == whole[start : start + 20]
    # No less of a document than the longest context, and no more in all than is asked for.
    texts = conversion.held_out(model, corpus.validation, 40, 30)
    assert [len(text.ids) - len(model.start) for text in texts] == [30, 10]


def test_training_in_bf16(model, corpus, tmp_path):
    quick = {**SMALL, "steps": [6, 2, 0], "precision": "bf16"}
    out = tmp_path / "run"
    conversion.convert(model, corpus.path, out, Conversion(keep_attention=1, **quick))
    recipes = [
        json.loads((out / stage / "recipe.json").read_text()) for stage in ("align", "distill")
    ]
    assert [recipe["train"]["precision"] for recipe in recipes] == ["bf16", "bf16"]
    errors = [
        list(record["mixer_errors"].values())
        for line in (out / "align" / "metrics.jsonl").read_text().splitlines()
        if "mixer_errors" in (record := json.loads(line))
    ]
    assert all(after < before for before, after in zip(errors[0], errors[-1]))
    assert load_run(out / "model")[0].model.embed_tokens.weight.dtype == torch.float32


def test_the_teacher_is_the_pretrained_model(converted, model):
    ours, _ = load_run(converted[0] / "teacher")
    theirs = LlamaForCausalLM.from_pretrained(model)
    ids = torch.arange(60)[None] * 7 % 257
    with torch.no_grad():
        assert relative_rms(ours(ids).logits, theirs(ids).logits) < 1e-5


def test_the_converted_model_is_one_like_any_other(converted, corpus, tmp_path):
    out, report, _ = converted
    loaded = AutoModelForCausalLM.from_pretrained(out / "model")
    ids = torch.arange(20)[None]
    assert loaded.generate(ids, max_new_tokens=5, do_sample=False).shape == (1, 25)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, loaded(ids).logits)
    opened = open_model(str(out / "model"))
    measured = ppl.perplexity(opened, [ppl.encode(opened, "a text of some words")], 16)
    assert measured["tokens"] == 20
    # Its state stays as it is, and has as many bytes as is stated.
    sizes = report.found["state_bytes"]
    assert sizes["student"]["1000"] == sizes["student"]["100000"]
    assert sizes["teacher"]["100000"] > 90 * sizes["teacher"]["1000"]
    cache = loaded.read(torch.arange(1000)[None] % 257)
    numbers = sum(t.numel() for state in cache.states for _, t in named_tensors(state))
    assert 4 * numbers == sizes["student"]["1000"]


def test_without_text_the_model_is_only_imported(model, tmp_path):
    out = tmp_path / "teacher"
    result = CliRunner().invoke(app, ["convert", str(model), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["attention"]["kv_heads"] == 2
    ours, _ = load_run(out)
    ids = torch.arange(60)[None] * 7 % 257
    with torch.no_grad():
        assert relative_rms(ours(ids).logits, llama()(ids).logits) < 1e-5
    again = CliRunner().invoke(app, ["convert", str(model), "--out", str(out)])
    assert isinstance(again.exception, FileExistsError)


def test_measures_say_what_memory_and_window_are_worth(converted):
    measures = converted[1].found["measures"]
    names = list(dict.fromkeys(entry["model"] for entry in measures))
    assert names == [
        "teacher", "teacher, window 8", "student", "student, memory off", "student, window off",
    ]  # fmt: skip
    assert {entry["context"] for entry in measures} == {16, 32, 64, 128}
    assert all(entry["beyond"]["tokens"] < entry["tokens"] for entry in measures)
    assert (converted[0] / "measures.png").stat().st_size > 1000


def test_the_same_command_does_nothing_again_and_another_is_refused(converted, model, corpus):
    out, report, _ = converted
    weights = (out / "model" / "model.safetensors").stat()
    again = conversion.convert(model, corpus.path, out, Conversion(keep_attention=1, **SMALL))
    assert again.found == json.loads(json.dumps(report.found))
    assert (out / "model" / "model.safetensors").stat() == weights
    with pytest.raises(ValueError, match="started with other values of keep_attention, lora"):
        conversion.convert(model, corpus.path, out, Conversion(lora=2, **SMALL))


def kill_in(stages, model, corpus, out):
    """Kills the command with signal 9 in the second step of each of these stages; then it ends."""
    for stage in [*stages, None]:
        process = subprocess.Popen(
            command(*arguments(model, corpus, out)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        inside = False
        for line in process.stdout:
            inside = inside or (stage is not None and line.startswith(f"--- {stage}"))
            if inside and line.startswith("step 2/"):
                process.kill()
        errors = process.stderr.read()
        assert process.wait() == (0 if stage is None else -signal.SIGKILL), errors


def test_an_interrupted_stage_goes_on_bit_by_bit(converted, model, corpus, tmp_path, monkeypatch):
    steps = []

    def breaks_down(trainer, stopping, step=loop.Trainer._train_step):
        steps.append(trainer.step)
        if len(steps) in (4, 10):  # in the first stage, and in the second
            raise KeyboardInterrupt
        return step(trainer, stopping)

    monkeypatch.setattr(loop.Trainer, "_train_step", breaks_down)
    given = model, corpus.path, tmp_path / "run", Conversion(keep_attention=1, **SMALL)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            conversion.convert(*given)
    conversion.convert(*given)
    assert len(steps) > sum(SMALL["steps"])
    assert_same_stages(converted[0], tmp_path / "run")


@pytest.mark.slow
def test_every_stage_may_be_killed(converted, model, corpus, tmp_path):
    kill_in(conversion.STAGES, model, corpus, tmp_path / "run")
    assert_same_stages(converted[0], tmp_path / "run")


def assert_same_stages(one, other):
    """All weights, moments and metrics of all stages are equal; their recipes name two folders."""
    for stage in conversion.STAGES:
        steps = checkpoints.steps_in(one / stage)
        assert steps == checkpoints.steps_in(other / stage)
        for step in steps:
            ours, theirs = (contents(run / stage, step)[0] for run in (one, other))
            for file, parts in ours.items():
                for name, tensor in parts.items():
                    assert torch.equal(theirs[file][name], tensor), (stage, step, name)
        assert comparable(one / stage) == comparable(other / stage)
    found = [json.loads((run / "measures.json").read_text()) for run in (one, other)]
    assert found[0]["measures"] == found[1]["measures"]


def test_what_a_kill_left_behind_is_no_obstacle(model, corpus, tmp_path):
    """A process that is killed while it writes leaves files and folders with a dot."""
    out = tmp_path / "run"
    (out / ".teacher.x1").mkdir(parents=True)
    (out / ".teacher.x1" / "model.safetensors").write_text("half")
    (out / ".options.json.x2").write_text("{")
    (out / ".gitignore").write_text("*")
    quick = {**SMALL, "steps": [2, 0, 0]}
    conversion.convert(model, corpus.path, out, Conversion(**quick))
    left = {path.name for path in out.iterdir() if path.name.startswith(".")}
    assert left == {".gitignore"}


def test_a_stage_that_diverged_is_never_gone_on_from(model, corpus, tmp_path):
    chosen = Conversion(rates=[1e-2, 1e30, 1e-3], **{**SMALL, "steps": [2, 3, 2]})
    given = model, corpus.path, tmp_path / "run", chosen
    for message in ("probably useless", "were not finite, so its model is useless"):
        with pytest.raises(loop.TrainingStopped, match=message):
            conversion.convert(*given)
    assert not (tmp_path / "run" / "distilled").exists()


def test_attention_that_stays_sees_no_more_than_before(corpus, tmp_path):
    theirs = MistralForCausalLM(MistralConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=9,
    ))  # fmt: skip
    for window, found in ((128, 9), (4, 4), (None, 9)):
        student = replaced(imported(theirs), [0], "trellis", window=window)
        assert student.model.layers[1].mixer.config.window == found


def test_low_rank_training_and_some_layers(model, corpus, tmp_path):
    chosen = Conversion(
        layers=[0, 2], lora=2, mixer="gated_delta_net", **{**SMALL, "steps": [2, 2, 0]}
    )
    report = conversion.convert(model, corpus.path, tmp_path / "run", chosen)
    assert report.found["mixers"] == ["gated_delta_net", "transformer", "gated_delta_net"]
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name)
        for name in ("aligned", "model")
    )
    changes = {
        name: torch.linalg.matrix_rank(weight - before.state_dict()[name], tol=1e-6)
        for name, weight in after.state_dict().items()
        if "mlp." in name or "layers.1.mixer." in name
    }
    assert all(0 < rank <= 2 for rank in changes.values()), changes
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(before.state_dict()[name], after.state_dict()[name])


def test_the_loss_beyond_a_window_is_of_the_tokens_behind_it(converted, corpus):
    """Beside the definition: the whole document at once, no cache and no padding."""
    network, tokenizer = load_run(converted[0] / "model")
    opened = EvaluatedModel("student", network, tokenizer, {})
    text = conversion.held_out(opened, corpus.validation, 50, 64)[0]
    ids = torch.tensor(text.ids)[None]
    for switched in (contextlib.nullcontext, lambda: memory_off(network),
                     lambda: windows(network, 1)):  # fmt: skip
        with switched(), torch.no_grad():
            found = ppl.perplexity(opened, [text], 64, beyond=8)
            logits = network(ids).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
        # The token at place t is predicted from t tokens.
        assert found["beyond"]["tokens"] == len(losses) - 8
        assert found["beyond"]["loss"] == pytest.approx(float(losses[8:].mean()), rel=1e-5)


# What is switched off.


def test_without_memory_a_token_sees_itself_alone():
    network = evaluated_model("trellis").network
    ids = torch.arange(12)[None]
    with torch.no_grad(), memory_off(network):
        found = network(ids).logits
        alone = torch.cat([network(ids[:, t : t + 1]).logits for t in range(12)], 1)
    assert relative_rms(found, alone) < 1e-5
    with torch.no_grad():
        assert relative_rms(network(ids).logits, alone) > 1e-3


def test_without_window_a_token_sees_itself_alone():
    network = evaluated_model("transformer", mixer_config={"window": 6}).network
    ids = torch.arange(12)[None]
    with torch.no_grad(), windows(network, 1):
        found = network(ids).logits
        alone = torch.cat([network(ids[:, t : t + 1]).logits for t in range(12)], 1)
    assert relative_rms(found, alone) < 1e-5
    assert network.model.layers[0].mixer.config.window == 6


# What is refused, before anything is written.


def test_wrong_models_and_texts_are_refused(model, corpus, tmp_path):
    out = tmp_path / "run"
    small = Conversion(**SMALL)

    def expect(error, match, *given):
        with pytest.raises(error, match=match):
            conversion.convert(*given)
        assert not out.exists()

    gpt2 = save_gpt2(tmp_path / "gpt2")
    expect(ValueError, "is of the kind 'gpt2'", gpt2, corpus.path, out, small)
    expect(FileNotFoundError, "no model at", tmp_path / "none", corpus.path, out, small)
    bare = tmp_path / "bare"
    llama().save_pretrained(bare)
    expect(FileNotFoundError, "tokenizer", bare, corpus.path, out, small)
    scaled = tmp_path / "scaled"
    llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ).save_pretrained(scaled)
    expect(ValueError, "rope_type must be", scaled, corpus.path, out, small)
    source = tmp_path / "words.txt"
    source.write_text("some words and more words\n" * 200)
    train_tokenizer([source], 300, tmp_path / "words")
    other = prepare_corpus([source], tmp_path / "other", tokenizer=str(tmp_path / "words"))
    expect(ValueError, "another vocabulary than that of", model, other.path, out, small)
    expect(ValueError, "--layers must be from 0 to 2; got 3", model, corpus.path, out,
           Conversion(layers=[3], **SMALL))  # fmt: skip
    expect(ValueError, "--keep-attention must be from 0 to 2", model, corpus.path, out,
           Conversion(keep_attention=3, **SMALL))  # fmt: skip
    expect(ValueError, "mixer must be one of", model, corpus.path, out,
           Conversion(mixer="nothing", **SMALL))  # fmt: skip
    expect(ValueError, "no field 'slot'", model, corpus.path, out,
           Conversion(fields={"slot": 1}, **SMALL))  # fmt: skip
    expect(ValueError, "--precision must be one of auto, fp32, bf16", model, corpus.path, out,
           Conversion(precision="half", **SMALL))  # fmt: skip
    expect(ValueError, "--steps must be 3 numbers", model, corpus.path, out,
           Conversion(**{**SMALL, "steps": [1, 2]}))  # fmt: skip
    expect(ValueError, "--lora must be at most the model's width", model, corpus.path, out,
           Conversion(lora=10_000, **SMALL))  # fmt: skip
    expect(ValueError, "more tokens to train on than the longest of --contexts", model,
           corpus.path, out,
           Conversion(**{**SMALL, "contexts": [32, 32, 10**6], "batch_tokens": 10**6}),
           )  # fmt: skip


def test_a_folder_must_have_just_the_weights_of_its_model(model, tmp_path):
    weights = load_file(model / "model.safetensors")
    place = "model.layers.1.self_attn.v_proj"

    def changed(name, weights):
        folder = tmp_path / name
        shutil.copytree(model, folder)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    lacking = changed("lacking", {k: w for k, w in weights.items() if k != f"{place}.weight"})
    more = changed("more", {**weights, f"{place}.bias": torch.zeros(16)})
    other = changed("other", {**weights, f"{place}.weight": torch.zeros(3, 3)})
    cut = tmp_path / "cut"
    shutil.copytree(model, cut)
    (cut / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:500])
    quantized = tmp_path / "quantized"
    shutil.copytree(model, quantized)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (quantized / "config.json").write_text(json.dumps(config))
    bare = tmp_path / "bare"
    llama().save_pretrained(bare)
    for folder, error, message in (
        (lacking, ValueError, f"lacks 1 weights: {place}.weight"),
        (more, ValueError, f"has no place for 1 weights: {place}.bias"),
        (other, ValueError, "other cannot be converted"),
        (cut, ValueError, "cut cannot be converted"),
        (quantized, ValueError, "its weights are quantized"),
        (bare, FileNotFoundError, "give another with --tokenizer"),
    ):
        with pytest.raises(error, match=message):
            open_pretrained(folder)


def test_what_a_gguf_file_would_lose_is_refused():
    llama = {"general.architecture": "llama"}
    conversion.check_gguf(llama, ["blk.0.attn_q.weight"])
    conversion.check_gguf({"general.architecture": "qwen2"}, ["blk.0.attn_q.bias"])
    for told, tensors, message in (
        ({"general.architecture": "gpt2"}, [], "must be of the kind llama, mistral"),
        (llama, ["rope_freqs.weight"], "rotary positions that are scaled"),
        ({**llama, "llama.rope.scaling.type": "linear"}, [], "rotary positions that are scaled"),
        ({**llama, "llama.attention.sliding_window": 4096}, [], "a window of its attention"),
        (llama, ["blk.0.attn_q.bias"], "biases"),
    ):
        with pytest.raises(ValueError, match=message):
            conversion.check_gguf(told, tensors)


def test_a_gguf_file_says_how_text_is_cut_into_words(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate([*letters, "12"])}
    inner = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def tokens(rule, family="llama"):
        told = {"tokenizer.ggml.model": "gpt2", "general.architecture": family}
        told |= {} if rule is None else {"tokenizer.ggml.pre": rule}
        fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(inner.to_str()))
        return len(conversion._gguf_tokenizer(told, fast, tmp_path).encode("12 b"))

    assert tokens(None) == tokens("gpt-2") == tokens("qwen2", "qwen2") == 3
    assert tokens("smollm") == 4  # SmolLM's digits are words of their own
    with pytest.raises(ValueError, match=r"words by the rule 'llama-bpe'.*give the model's tok"):
        tokens("llama-bpe")


def test_a_run_of_ours_is_a_teacher_only_with_attention(converted):
    network, _ = open_pretrained(converted[0] / "teacher")
    assert network.config.mixer == "transformer"
    with pytest.raises(ValueError, match="the mixer 'transformer' in all layers"):
        open_pretrained(converted[0] / "model")


# Other formats.


def permuted(weight, heads):
    """Rows of a map as GGUF has them: channels i and i + D/2, which turn together, side by side."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def test_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    theirs = llama(tie_word_embeddings=True)
    config = theirs.config
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd",
        "model.norm": "output_norm", "model.layers": "blk",
    }  # fmt: skip
    for name, weight in theirs.state_dict().items():
        if name.startswith("lm_head"):
            continue
        numbers = weight.numpy().astype(np.float32)
        for there, here in (("q_proj", 4), ("k_proj", 2)):
            if there in name:
                numbers = permuted(numbers, here)
        for there, here in names.items():
            name = name.replace(there, here)
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    load_tokenizer("bytes").save(tmp_path / "bytes")
    ours, _ = open_pretrained(path, tmp_path / "bytes")
    ids = torch.arange(60)[None] * 7 % 257
    with torch.no_grad():
        assert relative_rms(ours(ids).logits, theirs(ids).logits) < 1e-5
    assert relative_rms(imported(theirs)(ids).logits, theirs(ids).logits) < 1e-5


def write_tokenizer(path):
    """A tokenizer.bin with bytes, some letters and words, the longer ones with higher scores."""
    words = [" ", "a", "b", "n", "s", "an", " b", "ba", "ana", " ban", "as", " bananas"]
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256)), *words]
    scores = [0.0] * 259 + [-float(len(words) - i) for i in range(len(words))]
    data = struct.pack("<i", max(map(len, tokens)))
    for token, score in zip(tokens, scores):
        data += struct.pack("<fi", score, len(token.encode())) + token.encode()
    path.write_bytes(data)
    return tokens, scores


def encoded(text, tokens, scores):
    """What run.c does: it merges the neighbours whose token has the highest score, one by one."""
    ids = {token: i for i, token in reversed(list(enumerate(tokens)))}
    found = []
    for character in f" {text}":
        one = ids.get(character)
        found += [one] if one is not None else [byte + 3 for byte in character.encode()]
    while True:
        pairs = [ids.get(tokens[a] + tokens[b]) for a, b in zip(found, found[1:])]
        merged = [(scores[i], -place) for place, i in enumerate(pairs) if i is not None]
        if not merged:
            return found
        place = -max(merged)[1]
        found[place : place + 2] = [pairs[place]]


def test_the_tokenizer_of_llama2c(tmp_path):
    path = tmp_path / "tokenizer.bin"
    tokens, scores = write_tokenizer(path)
    tokenizer = read_llama2c_tokenizer(path, len(tokens))
    for text in ("bananas", "ban an as bananas  ba", "a\nb é 日", "nab"):
        ids = tokenizer.encode(text).tolist()
        assert ids == encoded(text, tokens, scores)
        assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_document == 1
    with pytest.raises(ValueError, match="271 tokens, but the model 97"):
        read_llama2c_tokenizer(path, 97)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="not a tokenizer of"):
        read_llama2c_tokenizer(path, len(tokens))


@pytest.mark.slow
@pytest.mark.skipif(
    not STORIES.exists(),
    reason=f"there is no {STORIES}; TRELLIS_STORIES names the folder of stories260K.bin",
)
def test_stories(tmp_path):
    """The whole path with a real pretrained model, on few tokens."""
    network, tokenizer = open_pretrained(STORIES / "stories260K.bin")
    assert sum(p.numel() for p in network.parameters()) == 260_032
    text = (STORIES / "tinystories_sample.txt").read_text()
    source = tmp_path / "stories.jsonl"
    stories = [story.strip() for story in text.split("<|endoftext|>")[:60]]
    source.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    tokenizer.save(tmp_path / "tokenizer")
    data = tmp_path / "data"
    prepare_corpus([source], data, tokenizer=str(tmp_path / "tokenizer"), validation=0.2)
    chosen = Conversion(
        steps=[12, 30, 2], contexts=[128, 128, 256], batch_tokens=1024, validation_tokens=2048,
        window=16, keep_attention=1,
    )  # fmt: skip
    found = conversion.convert(STORIES / "stories260K.bin", data, tmp_path / "run", chosen).found
    losses = {
        entry["model"]: entry["loss"] for entry in found["measures"] if entry["context"] == 256
    }
    assert losses["teacher"] < 1.4
    stages = found["stages"]
    assert stages["distill"]["validation_kl"] < 0.7 * stages["keep"]["validation_kl"]
    assert losses["student"] < min(losses["student, memory off"], losses["student, window off"])
