"""Two processes on gloo do what one does."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.support import (
    TEXT,
    comparable,
    environment,
    losses,
    recipe,
    recipe_table,
    relative_rms,
    write_toml,
)

from trellis.data import prepare_corpus
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


VARIANTS = {
    "ddp": {"train": {"strategy": "ddp"}},
    "fsdp": {"train": {"strategy": "fsdp"}},
    "accumulated": {"train": {"strategy": "ddp", "micro_tokens": 32}},
    "fsdp accumulated": {"train": {"strategy": "fsdp", "micro_tokens": 32}},
    "contiguous": {"data": {"batches": "contiguous"}},
    "contiguous fsdp": {"data": {"batches": "contiguous"}, "train": {"strategy": "fsdp"}},
    "contiguous, window": {
        "data": {"batches": "contiguous"},
        "model": {"mixer": "transformer", "mixer_config": {"window": 100}},
        "train": {"micro_tokens": 32},
    },
    "sequence parallel": {"train": {"sequence_parallel": 2, "micro_tokens": 32}},
    "sequence parallel, stale, checkpointing": {
        "model": {
            "mixer_config": {
                "mode": "stale",
                "minibatch": 8,
                "learn_initial_memory": True,
            }
        },
        "train": {"sequence_parallel": 2, "checkpointing": True},
    },
    "sequence parallel, attention": {
        "model": {"mixer": ["transformer", "trellis"]},
        "train": {"sequence_parallel": 2},
    },
}


BASELINES = {
    "mixer": ["linear_attention", "abc", "gsa", "delta_net", "gated_delta_net", "mamba2", "ttt"],
    "num_hidden_layers": 7,
}
VARIANTS |= {
    # A context that ends inside TTT's mini-batches.
    "baselines, contiguous": {
        "model": BASELINES,
        "data": {"batches": "contiguous", "context": 29},
        "train": {"steps": 6},
    },
    "baselines, sequence parallel": {
        "model": BASELINES,
        "train": {"sequence_parallel": 2, "steps": 6},
    },
}
ONE_STEP = {"steps": 1, "warmup": 0.0, "clip": 0.0}
OTHERS = {
    "gradients of trellis": {
        "model": {"mixer": "trellis"},
        "train": {**ONE_STEP, "sequence_parallel": 2},
    },
    "gradients of transformer": {
        "model": {"mixer": "transformer"},
        "train": {**ONE_STEP, "sequence_parallel": 2},
    },
    # Longer than the segments that a model reads without gradients, in one document.
    "beyond a segment": {
        "data": {"context": 4200},
        "train": {"strategy": "fsdp", "steps": 1, "rows": 2},
        "log": {"validation_tokens": 9000},
    },
}


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """name -> (run on one process, run on two), all two-process runs made in one launch."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "one.txt").write_text(TEXT.read_text())
    long = prepare_corpus([folder / "one.txt"], folder / "long", validation=0.4)
    jobs, found = [], {}
    for name, sections in {**VARIANTS, **OTHERS}.items():
        text = long if name == "beyond a segment" else corpus
        path = folder / name.replace(" ", "-").replace(",", "")
        jobs.append((recipe_table(text, **sections), path / "two", False))
        alone = {**sections, "train": {**sections.get("train", {}), "sequence_parallel": 1}}
        alone["train"].pop("micro_tokens", None)
        train(recipe(text, **alone), path / "one")
        found[name] = (path / "one", path / "two")
    launch(folder, jobs)
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_equal_one(runs, name):
    one, two = runs[name]
    assert len(losses(one)) == VARIANTS[name].get("train", {}).get("steps", 20)
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
def test_gradients_travel_back_from_process_to_process(runs, mixer):
    one, two = map(gradients, runs[f"gradients of {mixer}"])
    assert len(one) >= 20
    assert one.keys() == two.keys()
    for name, gradient in one.items():
        assert relative_rms(two[name], gradient) < 1e-5, name


def test_checkpoints_move_between_numbers_of_processes(corpus, runs, tmp_path):
    one = runs["ddp"][0]
    whole = losses(one)
    jobs = []
    for strategy in ("ddp", "fsdp"):
        # From one process to two.
        onward = tmp_path / f"one-to-{strategy}"
        shutil.copytree(one, onward)
        shutil.rmtree(checkpoints.path_of(onward, 20))
        sections = {"train": {"strategy": strategy}}
        jobs.append((recipe_table(corpus, **sections), onward, True))
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


def test_relayed_states_move_between_numbers_of_processes(runs, corpus, tmp_path):
    one, two = runs["contiguous"]
    back = tmp_path / "back"
    shutil.copytree(two, back)
    shutil.rmtree(checkpoints.path_of(back, 20))
    sections = {"data": {"batches": "contiguous"}}
    train(recipe(corpus, **sections), back, resume=True)
    assert (losses(back) - losses(one)).abs().max() < 1e-5
    relayed = checkpoints.load_extra(checkpoints.open_checkpoint(two, 10))
    assert relayed["relay.0.memory.keys"].shape[0] == 4  # all rows of the batch


def test_a_sharded_model_validates_contexts_beyond_a_segment(runs):
    one, two = (comparable(run)[-1]["validation_loss"] for run in runs["beyond a segment"])
    assert one == pytest.approx(two, abs=1e-4)


def test_torchrun_and_the_command_stop_on_a_signal_and_resume(corpus, tmp_path):
    file = write_toml(tmp_path / "r.toml", recipe_table(corpus, train={"steps": 100000}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "-m", "trellis.cli"]
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*launcher, "train", str(file), "--out", str(run)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    seen = 0
    for line in process.stdout:
        seen += line.startswith("step")
        if seen == 15:
            break
    process.terminate()
    out, _ = process.communicate(timeout=120)
    (step,) = re.findall(r"stopped after step (\d+), saved", out)
    assert checkpoints.steps_in(run)[-1] == int(step)
    more = recipe(corpus, train={"steps": int(step) + 2})
    train(more, run, resume=True)
    assert [r["step"] for r in comparable(run) if "loss" in r][-2:] == [
        int(step) + 1,
        int(step) + 2,
    ]


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
