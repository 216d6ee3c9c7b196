import json
from types import SimpleNamespace

import pytest
import torch
from tests.support import evaluated_model, make_corpus, recipe, save_gpt2
from transformers import GPT2LMHeadModel

from trellis.evaluation import models as module
from trellis.evaluation.models import Unreachable, look_up, name_of, open_model, open_models


def save_ours(folder):
    model = evaluated_model()
    model.network.save_pretrained(folder)
    model.tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("mixer", ["trellis", "transformer", "mamba2"])
def test_long_rows_are_read_in_segments(mixer, monkeypatch):
    model = evaluated_model(mixer)
    rows = [list(b"It was the best of times"), list(b"x"), list(b"it was the worst of ti")]
    whole, states = model.read(rows)
    shapes = []
    model.network.model.embed_tokens.register_forward_pre_hook(
        lambda _, args: shapes.append(args[0].shape)
    )
    monkeypatch.setattr(module, "SEGMENT_TOKENS", 15)
    parts, cut = model.read(rows)
    assert len(shapes) == 5
    assert max(rows * width for rows, width in shapes) == 15
    for one, other in zip(parts, whole):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    # Where the states stand shows in what follows.
    follow = [list(b"go on")] * 3
    for one, other in zip(model.logits(follow, cut), model.logits(follow, states)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_config(folder):
    (folder / "config.json").write_text('{"model_type":')


def list_as_config(folder):
    (folder / "config.json").write_text("[1]")


def remove_tokenizer(folder):
    for path in folder.glob("token*"):
        path.unlink()


def break_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("save", [save_gpt2, save_ours])
@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (cut_weights, "the model .*one cannot be loaded"),
        (break_config, "the model .*one cannot be loaded"),
        (list_as_config, r"config\.json must hold an object"),
        (remove_tokenizer, "one.*tokenizer"),
        (break_tokenizer, "the model .*one cannot be loaded"),
        (remove_weights, "one has no weights"),
    ],
)
def test_a_damaged_model_is_named_before_it_is_loaded(tmp_path, save, damage, match):
    folder = str(save(tmp_path / "one"))
    damage(tmp_path / "one")
    for function in (look_up, open_model):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            function(folder)


def test_a_vocabulary_smaller_than_the_tokenizers_is_an_error(tmp_path):
    model = GPT2LMHeadModel.from_pretrained(save_gpt2(tmp_path / "one"))
    model.resize_token_embeddings(100, mean_resizing=False)
    model.save_pretrained(tmp_path / "one")
    for function in (look_up, open_model):
        with pytest.raises(ValueError, match=r"one cannot .*has 257 tokens, but the model 100"):
            function(str(tmp_path / "one"))


def test_all_models_are_looked_up_before_the_first_is_loaded(tmp_path, monkeypatch):
    good = str(save_gpt2(tmp_path / "good", positions=64))
    (tmp_path / "unfinished").mkdir()
    corpus = make_corpus(tmp_path / "corpus")
    content = json.dumps(recipe(corpus).as_dict())
    (tmp_path / "unfinished" / "recipe.json").write_text(content)
    evaluated_model().tokenizer.save(tmp_path / "unfinished")
    monkeypatch.setattr(module, "open_model", None)  # would fail if it were called
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .*unfinished"):
        next(open_models([good, str(tmp_path / "unfinished")]))
    with pytest.raises(FileNotFoundError, match="there is no run and no model at"):
        next(open_models([good, str(tmp_path / "nowhere")]))
    with pytest.raises(ValueError, match="good reads at most 64 tokens, but 65 are asked for"):
        next(open_models([good], context=65))


def test_a_name_that_the_hub_does_not_know_is_an_error(monkeypatch):
    def refuse(name, local_files_only):
        assert not local_files_only
        raise OSError("404")

    monkeypatch.setattr(module, "_hub_answers", lambda: True)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    with pytest.raises(FileNotFoundError, match="there is no model nobody/nothing: 404"):
        look_up("nobody/nothing")


def test_models_that_the_hub_would_have_to_send_are_left_out_while_it_does_not_answer(
    tmp_path, monkeypatch
):
    good = str(save_gpt2(tmp_path / "good"))
    monkeypatch.setattr(module, "_hub_answers", lambda: False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    said = "nobody/nothing was not measured: it is not on this machine, and the hub does not answer"
    left_out = []
    found = list(open_models([good, "nobody/nothing"], left_out=left_out))
    assert ([model.name for model in found], left_out) == (["good"], [said])
    for models, given in (([good, "nobody/nothing"], None), (["nobody/nothing"], [])):
        with pytest.raises(Unreachable, match=said):
            next(open_models(models, left_out=given))


def test_the_hub_is_asked_once(monkeypatch):
    asked = []

    def refuse(*_, timeout):
        asked.append(timeout)
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=refuse))
    module._hub_answers.cache_clear()
    try:
        assert [module._hub_answers(), module._hub_answers()] == [False, False]
    finally:
        module._hub_answers.cache_clear()
    assert asked == [5]


def test_the_folder_where_one_is_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(save_ours(tmp_path / "mine"))
    assert name_of(".") == open_model(".").name == "mine"
    assert name_of("somebody/gpt") == "gpt"
