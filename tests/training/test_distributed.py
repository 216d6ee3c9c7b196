"""Two processes on gloo do what one does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.support import relative_rms
from tests.training.helpers import environment, losses, recipe, table

from trellis.training import checkpoint as checkpoints
from trellis.training.run import load_run, train

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)
WORKER = Path(__file__).parent / "worker.py"


def launch(folder, jobs, processes=2):
    """Train jobs (table, run, resume) one after another on several processes."""
    listed = folder / f"jobs-{len(list(folder.iterdir()))}.json"
    listed.write_text(json.dumps([[t, str(run), resume] for t, run, resume in jobs]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(WORKER), str(listed)]
    root = Path(__file__).parents[2]
    out = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=root)
    assert out.returncode == 0, out.stderr[-4000:]


def weights(run, step=None):
    model, _ = load_run(run, step)
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_same_weights(actual, expected, tolerance=1e-4):
    actual, expected = weights(actual), weights(expected)
    for name, value in expected.items():
        assert relative_rms(actual[name], value) < tolerance, name


#: Without a normalising f. What the first token of a sequence reads is a multiple of its own code,
#: which ln_silu scales to one length whatever its size: the output jumps where the multiple changes
#: its sign, and rounding errors of 1e-7 become 1e-3 within 20 steps.
SMOOTH = {"f": "silu"}
VARIANTS = {
    "ddp": {"train": {"strategy": "ddp"}},
    "fsdp": {"train": {"strategy": "fsdp"}},
    "accumulated": {"train": {"strategy": "ddp", "micro_tokens": 32}},
    "fsdp accumulated": {"train": {"strategy": "fsdp", "micro_tokens": 32}},
    "contiguous": {"data": {"batches": "contiguous"}},
    "sequence parallel": {"train": {"sequence_parallel": 2}},
    "sequence parallel, stale, checkpointing": {
        "model": {
            "mixer_config": {
                **SMOOTH,
                "mode": "stale",
                "minibatch": 8,
                "learn_initial_memory": True,
            }
        },
        "train": {"sequence_parallel": 2, "checkpointing": True},
    },
    "sequence parallel, attention": {
        "model": {"mixer": ["transformer", "trellis"], "mixer_config": {"trellis": SMOOTH}},
        "train": {"sequence_parallel": 2},
    },
}


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """name -> (run on one process, run on two), all two-process runs made in one launch."""
    folder = tmp_path_factory.mktemp("distributed")
    jobs, found = [], {}
    for name, sections in VARIANTS.items():
        sections = {"model": {"mixer_config": SMOOTH}, **sections}
        path = folder / name.replace(" ", "-").replace(",", "")
        values = table(corpus, **sections)
        jobs.append((values, path / "two", False))
        alone = {**sections, "train": {**sections.get("train", {}), "sequence_parallel": 1}}
        alone["train"].pop("micro_tokens", None)
        train(recipe(corpus, **alone), path / "one")
        found[name] = (path / "one", path / "two")
    launch(folder, jobs)
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_equal_one(runs, name):
    one, two = runs[name]
    assert len(losses(one)) == 20
    assert (losses(one) - losses(two)).abs().max() < 1e-5
    assert_same_weights(two, one)


def gradients(run):
    """Of a run's only step: AdamW's first moments, a tenth of them."""
    with_moments = {}
    found = checkpoints.open_checkpoint(run)
    assert found.step == 1
    for shard in (found.path / "shards").iterdir():
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                with_moments[name] = file.get_tensor(name)
    return {name: t for name, t in with_moments.items() if name.startswith("exp_avg.")}


@pytest.mark.parametrize("mixer", ["trellis", "transformer"])
def test_gradients_travel_back_from_process_to_process(corpus, tmp_path, mixer):
    sections = {"model": {"mixer": mixer}, "train": {"steps": 1, "warmup": 0.0, "clip": 0.0}}
    train(recipe(corpus, **sections), tmp_path / "one")
    sections["train"]["sequence_parallel"] = 2
    launch(tmp_path, [(table(corpus, **sections), tmp_path / "two", False)])
    one, two = gradients(tmp_path / "one"), gradients(tmp_path / "two")
    assert len(one) >= 20
    assert one.keys() == two.keys()
    for name, gradient in one.items():
        assert relative_rms(two[name], gradient) < 1e-5, name


def test_checkpoints_move_between_numbers_of_processes(corpus, runs, tmp_path):
    import shutil

    one = runs["ddp"][0]
    whole = losses(one)
    jobs = []
    for strategy in ("ddp", "fsdp"):
        # From one process to two.
        onward = tmp_path / f"one-to-{strategy}"
        shutil.copytree(one, onward)
        shutil.rmtree(checkpoints.path_of(onward, 20))
        sections = {"model": {"mixer_config": SMOOTH}, "train": {"strategy": strategy}}
        jobs.append((table(corpus, **sections), onward, True))
        # From two processes to one.
        back = tmp_path / f"{strategy}-to-one"
        shutil.copytree(runs[strategy][1], back)
        shutil.rmtree(checkpoints.path_of(back, 20))
        train(recipe(corpus, **sections), back, resume=True)
        assert (losses(back) - whole).abs().max() < 1e-5
        assert_same_weights(back, one)
    launch(tmp_path, jobs)
    for _, onward, _ in jobs:
        assert (losses(onward) - whole).abs().max() < 1e-5
        assert_same_weights(onward, one)


def test_carried_states_move_between_numbers_of_processes(runs, corpus, tmp_path):
    import shutil

    one, two = runs["contiguous"]
    back = tmp_path / "back"
    shutil.copytree(two, back)
    shutil.rmtree(checkpoints.path_of(back, 20))
    sections = {"model": {"mixer_config": SMOOTH}, "data": {"batches": "contiguous"}}
    train(recipe(corpus, **sections), back, resume=True)
    assert (losses(back) - losses(one)).abs().max() < 1e-5
    lanes = checkpoints.load_extra(checkpoints.open_checkpoint(two, 10))
    assert lanes["lanes.0.memory.keys"].shape[0] == 4  # all rows of the batch


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"rows": 3}}, "the 3 rows of a batch must divide evenly among 2"),
        (
            {"train": {"sequence_parallel": 4}},
            "train.sequence_parallel must divide the number of processes, 2; got 4",
        ),
    ],
)
def test_what_does_not_divide_is_named(corpus, tmp_path, monkeypatch, sections, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        train(recipe(corpus, **sections), tmp_path / "run")
    assert not (tmp_path / "run").exists()
