import json

import pytest
import torch
from tests.evaluation.helpers import ours, save_gpt2
from tests.support import make_corpus, recipe
from transformers import GPT2LMHeadModel

from trellis.cli.evaluation.common import subjects
from trellis.evaluation import subject as module
from trellis.evaluation.model_files import look_up, name_of
from trellis.evaluation.subject import load_subject


def save_ours(folder):
    subject = ours()
    subject.model.save_pretrained(folder)
    subject.tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("mixer", ["trellis", "transformer", "mamba2"])
def test_long_rows_are_read_in_segments(mixer, monkeypatch):
    subject = ours(mixer)
    rows = [list(b"It was the best of times"), list(b"x"), list(b"it was the worst of ti")]
    whole, states = subject.read(rows)
    shapes = []
    subject.model.model.embed_tokens.register_forward_pre_hook(
        lambda _, args: shapes.append(args[0].shape)
    )
    monkeypatch.setattr(module, "SEGMENT_TOKENS", 15)
    parts, cut = subject.read(rows)
    assert len(shapes) == 5
    assert max(rows * width for rows, width in shapes) == 15
    for one, other in zip(parts, whole):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    # Where the states stand shows in what follows.
    follow = [list(b"go on")] * 3
    for one, other in zip(subject.go_on(follow, cut), subject.go_on(follow, states)):
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
    for function in (look_up, load_subject):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            function(folder)


def test_a_vocabulary_smaller_than_the_tokenizers_is_an_error(tmp_path):
    model = GPT2LMHeadModel.from_pretrained(save_gpt2(tmp_path / "one"))
    model.resize_token_embeddings(100, mean_resizing=False)
    model.save_pretrained(tmp_path / "one")
    for function in (look_up, load_subject):
        with pytest.raises(ValueError, match=r"one cannot .*has 257 tokens, but the model 100"):
            function(str(tmp_path / "one"))


def test_all_models_are_looked_up_before_the_first_is_loaded(tmp_path, monkeypatch):
    good = str(save_gpt2(tmp_path / "good", positions=64))
    (tmp_path / "unfinished").mkdir()
    corpus = make_corpus(tmp_path / "corpus")
    content = json.dumps(recipe(corpus).as_dict())
    (tmp_path / "unfinished" / "recipe.json").write_text(content)
    ours().tokenizer.save(tmp_path / "unfinished")
    monkeypatch.setattr(module, "load_subject", None)  # would fail if it were called
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .*unfinished"):
        next(subjects([good, str(tmp_path / "unfinished")]))
    with pytest.raises(FileNotFoundError, match="there is no run and no model at"):
        next(subjects([good, str(tmp_path / "nowhere")]))
    with pytest.raises(ValueError, match="good reads at most 64 tokens, but 65 are asked for"):
        next(subjects([good], context=65))


def test_a_name_that_the_hub_does_not_know_is_an_error(monkeypatch):
    def refuse(name):
        raise OSError("404")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    with pytest.raises(FileNotFoundError, match="there is no model nobody/nothing: 404"):
        look_up("nobody/nothing")


def test_the_folder_where_one_is_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(save_ours(tmp_path / "mine"))
    assert name_of(".") == load_subject(".").name == "mine"
    assert name_of("somebody/gpt") == "gpt"
