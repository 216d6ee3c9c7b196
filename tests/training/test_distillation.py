"""Runs that start from a model and learn from a teacher."""

import pytest
import torch
from tests.support import comparable, make_corpus, recipe, small_config

from trellis import TrellisForCausalLM
from trellis.models.pretrained import replaced
from trellis.training.recipe import from_dict
from trellis.training.run import load_run, save_model, train


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a teacher of attention, and a student with Trellis in its first layer."""
    folder = tmp_path_factory.mktemp("models")
    corpus = make_corpus(folder / "corpus")
    torch.manual_seed(0)
    config = small_config(
        "transformer", vocab_size=257, hidden_size=32, num_hidden_layers=2, initializer_range=0.05
    )
    teacher = TrellisForCausalLM(config)
    save_model(teacher, corpus.tokenizer(), folder / "teacher")
    save_model(replaced(teacher, [0], "trellis"), corpus.tokenizer(), folder / "student")
    return folder, corpus


def distilled(models, run, start="student", loss="logits", **train_keys):
    folder, corpus = models
    given = recipe(
        corpus, train={"steps": 4, **train_keys}, log={"validate_every": 2},
        distill={"teacher": str(folder / "teacher"), "loss": loss},
    ).as_dict()  # fmt: skip
    given["model"] = {"start": str(folder / start)}
    train(from_dict(given), run)
    return [record for record in comparable(run) if "validation_kl" in record]


def test_a_model_does_not_differ_from_itself(models, tmp_path):
    first = distilled(models, tmp_path / "run", "teacher", learning_rate=0.0)[0]
    assert abs(first["validation_kl"]) < 1e-6
    assert first["teacher_validation_loss"] == pytest.approx(first["validation_loss"], abs=1e-5)


def test_only_new_mixers_learn_what_the_teachers_return(models, tmp_path):
    found = distilled(models, tmp_path / "run", loss="mixers", learning_rate=1e-2)
    assert found[-1]["mixer_errors"].keys() == {"0"}
    assert found[-1]["mixer_errors"]["0"] < found[0]["mixer_errors"]["0"]
    before, _ = load_run(models[0] / "student")
    after, _ = load_run(tmp_path / "run")
    for name, weight in after.state_dict().items():
        same = torch.equal(weight, before.state_dict()[name])
        assert same != name.startswith("model.layers.0.mixer."), name


def test_low_rank_runs_are_loaded_merged(models, tmp_path):
    found = distilled(models, tmp_path / "run", learning_rate=1e-2, lora=3)
    assert found[-1]["validation_kl"] < found[0]["validation_kl"]
    after, _ = load_run(tmp_path / "run")
    assert type(after.model.layers[1].mixer.q_proj) is torch.nn.Linear
    before, _ = load_run(models[0] / "student")
    change = after.model.layers[1].mixer.q_proj.weight - before.model.layers[1].mixer.q_proj.weight
    assert torch.linalg.matrix_rank(change, tol=1e-6) == 3


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"distill": {"loss": "logits"}}, "needs a distill.teacher"),
        ({"distill": {"teacher": "t", "loss": "words"}}, "distill.loss must be one of text"),
        (
            {"distill": {"teacher": "t", "loss": "logits"}, "data": {"batches": "contiguous"}},
            'needs data.batches = "packed"',
        ),
        ({"model": {"start": "folder"}}, "must not be given with model.start"),
        ({"train": {"lora": -1}}, "train.lora must be a whole number of at least 0"),
    ],
)
def test_what_does_not_go_together_is_refused(models, sections, reason):
    with pytest.raises(ValueError, match=reason):
        recipe(models[1], **sections)


def test_missing_and_other_models_are_refused(models, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.start must be a folder"):
        distilled(models, tmp_path / "run", "nothing")
    with pytest.raises(ValueError, match="all layers have the same"):
        distilled(models, tmp_path / "run", "teacher", loss="mixers")
    assert not (tmp_path / "run").exists()
