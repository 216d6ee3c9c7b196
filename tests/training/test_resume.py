"""A run that is interrupted and resumed ends as one that was not."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch
from tests.support import (
    assert_identical,
    command,
    comparable,
    environment,
    make_corpus,
    recipe,
    recipe_table,
    run_command,
    write_toml,
)

from trellis.files import locked
from trellis.ops import MemoryState
from trellis.training import checkpoint as checkpoints
from trellis.training import run as runs
from trellis.training.loop import Diverged, Trainer, TrainingStopped
from trellis.training.metrics import Metrics
from trellis.training.recipe import override
from trellis.training.relay import restored
from trellis.training.run import train


def kill_and_resume(corpus, tmp_path, kills, seed, **sections):
    """Kill -9 a run at random moments and resume it; returns (interrupted, undisturbed).

    Moments are counted in steps, each of which prints a line: a busy machine does not change them.
    """
    chance = random.Random(seed)
    file = write_toml(tmp_path / "recipe.toml", recipe_table(corpus, **sections))
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "interrupted"
    out = run_command("train", file, "--out", undisturbed)
    assert out.returncode == 0, out.stderr
    resume = []
    done = 0
    for _ in range(100):
        process = subprocess.Popen(
            command("train", file, "--out", run, *resume),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        if done < kills:
            if done % 2:  # while a checkpoint is being written
                wait_for_partial(process, run)
            else:
                # After the first line of progress: before it there is nothing to lose.
                for _ in range(chance.randint(1, sections["train"]["steps"] // kills)):
                    process.stdout.readline()
                time.sleep(chance.uniform(0, 0.02))  # anywhere in a step
            process.kill()
        _, errors = process.communicate()
        done += process.returncode == -signal.SIGKILL
        resume = ["--resume"] if (run / "recipe.json").exists() else []
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
    assert done == kills
    return run, undisturbed


def wait_for_partial(process, run):
    while process.poll() is None:
        if list(checkpoints.folder_of(run).glob(".step-*.partial")):
            return
        time.sleep(0.0005)


BUSY = {"train": {"steps": 120}, "checkpoint": {"every": 3}, "data": {"batches": "contiguous"}}


def test_two_kills_change_nothing(corpus, tmp_path):
    assert_identical(*kill_and_resume(corpus, tmp_path, 2, seed=0, **BUSY))


@pytest.mark.slow
@pytest.mark.parametrize("batches", ["contiguous", "packed"])
def test_ten_kills_change_nothing(corpus, tmp_path, batches):
    sections = {**BUSY, "train": {"steps": 600}, "data": {"batches": batches}}
    assert_identical(*kill_and_resume(corpus, tmp_path, 10, seed=1, **sections))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"data": {"batches": "contiguous"}, "train": {"micro_tokens": 64}},
        {
            "data": {"batches": "contiguous"},
            "model": {"mixer_config": {"mode": "stale", "minibatch": 5}},
        },
        {
            "data": {"batches": "contiguous"},
            "model": {"mixer": "transformer", "mixer_config": {"window": 20}},
        },
        {
            "data": {"batches": "contiguous"},
            "model": {"mixer": "transformer", "mixer_config": {"window": 100}},
            "train": {"micro_tokens": 32},
        },
        {"train": {"context_warmup": [[0.3, 8], [0.6, 16]]}, "log": {"every": 7}},
    ],
    ids=["packed", "contiguous", "stale", "window", "long window", "context warm-up"],
)
def test_resuming_from_the_middle_is_exact(corpus, tmp_path, sections):
    train(recipe(corpus, **sections), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(checkpoints.path_of(tmp_path / "again", 20))
    with open(tmp_path / "again" / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "lo')  # cut off in writing
    train(recipe(corpus, **sections), tmp_path / "again", resume=True)
    assert_identical(tmp_path / "again", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_shows_in_the_exit_code(corpus, tmp_path, number):
    long = recipe_table(corpus, train={"steps": 100000}, checkpoint={"every": 0})
    file = write_toml(tmp_path / "recipe.toml", long)
    run = tmp_path / "run"
    process = subprocess.Popen(
        command("train", file, "--out", run),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert errors == ""
    (step,) = checkpoints.steps_in(run)
    assert f"stopped after step {step}, saved; go on with: trellis train {run} --resume" in out
    assert comparable(run)[-1]["step"] <= step


def test_a_run_goes_on_from_any_working_directory(corpus, tmp_path, monkeypatch):
    text, other = tmp_path / "text", tmp_path / "other"
    shutil.copytree(corpus.path, text)
    shutil.copytree(corpus.path, other)
    monkeypatch.chdir(tmp_path)
    paths = {"path": "text", "validation_path": "other"}
    run = tmp_path / "run"
    train(recipe(corpus, data=paths, train={"steps": 1}), run)
    assert runs.recipe_of(run).data.path == "text"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    onward = runs.recipe_of(run)
    assert (onward.data.path, onward.data.validation_path) == (str(text), str(other))
    train(override(onward, ["train.steps=2"]), run, resume=True)
    assert checkpoints.steps_in(run)[-1] == 2

    text.rename(tmp_path / "moved")
    three = override(runs.recipe_of(run), ["train.steps=3"])
    said = rf"{run} cannot go on: there is no prepared text at .*text.* --set data\.path=FOLDER"
    with pytest.raises(FileNotFoundError, match=said):
        train(three, run, resume=True)
    train(override(three, [f"data.path={tmp_path / 'moved'}"]), run, resume=True)
    other.rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"--set data\.validation_path=FOLDER"):
        train(override(runs.recipe_of(run), ["train.steps=4"]), run, resume=True)


def test_states_of_earlier_checkpoints_are_found():
    keys = torch.arange(8.0).view(4, 2)
    state = MemoryState(keys, keys + 1)
    tensors = {"lanes.0.keys": state.keys, "lanes.0.values": state.values}
    micro = [range(0, 2), range(2, 4)]
    found = restored({"rng.cpu": keys, **tensors}, micro, [state], torch.device("cpu"))
    assert torch.equal(found[1][0].keys, keys[2:])
    assert restored({"rng.cpu": keys}, micro, [state], torch.device("cpu")) == [None, None]


def test_only_the_newest_checkpoints_are_kept(corpus, tmp_path):
    sections = {"train": {"steps": 9}, "checkpoint": {"every": 2, "keep": 3}}
    train(recipe(corpus, **sections), tmp_path / "run")
    assert checkpoints.steps_in(tmp_path / "run") == [6, 8, 9]
    assert not list(checkpoints.folder_of(tmp_path / "run").glob(".*"))


@pytest.fixture
def finished(corpus, tmp_path):
    train(recipe(corpus), tmp_path / "run")
    return tmp_path / "run"


def test_a_flipped_byte_is_found(finished, corpus):
    (shard,) = (checkpoints.path_of(finished, 20) / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    longer = recipe(corpus, train={"steps": 30})
    with pytest.raises(ValueError, match=rf"{shard} was changed: its sha256 is not that noted; "
                       "delete that folder to go on from step 10"):  # fmt: skip
        train(longer, finished, resume=True)
    shutil.rmtree(checkpoints.path_of(finished, 20))
    train(longer, finished, resume=True)
    assert checkpoints.steps_in(finished)[-1] == 30


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("checkpoint.json", b"{", "checkpoint.json is damaged"),
        ("checkpoint.json", b'{"files": {}, "format": "x", "version": 9}', "format x version 9"),
        ("checkpoint.json", b"[" * 100_000, "checkpoint.json is damaged .it is nested too deeply"),
        ("checkpoint.json", b"[]", "checkpoint.json is damaged .the file must be an object"),
        ("extra.safetensors", None, "extra.safetensors is missing"),
        ("shards/more.safetensors", b"", "more.safetensors is not of this checkpoint: move it"),
    ],
)
def test_damage_is_named(finished, corpus, name, content, message):
    path = checkpoints.path_of(finished, 20) / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        train(recipe(corpus, train={"steps": 30}), finished, resume=True)


@pytest.mark.parametrize("name", ["../../recipe.json", "/etc/hostname", "shards/../../x"])
def test_a_checkpoint_names_no_file_outside_its_folder(finished, name):
    path = checkpoints.path_of(finished, 20) / "checkpoint.json"
    content = json.loads(path.read_text())
    content["files"][name] = "0" * 64
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"names {name}, which lies elsewhere"):
        checkpoints.open_checkpoint(finished)


@pytest.mark.parametrize("key", ["step", "updates", "files", "data", "bad_steps"])
def test_a_checkpoint_without_a_field_is_damaged(finished, key):
    path = checkpoints.path_of(finished, 20) / "checkpoint.json"
    content = json.loads(path.read_text())
    for value in (None, -1, [1]):
        path.write_text(json.dumps({**content, key: value}))
        with pytest.raises(ValueError, match=f"checkpoint.json is damaged .'{key}' must be"):
            checkpoints.open_checkpoint(finished)


def test_another_recipe_or_text_is_refused(finished, corpus, tmp_path):
    with pytest.raises(ValueError, match=r"started with other values of train\.learning_rate"):
        train(recipe(corpus, train={"learning_rate": 1.0}), finished, resume=True)
    with pytest.raises(ValueError, match="has finished its 20 steps already"):
        train(recipe(corpus), finished, resume=True)
    other = make_corpus(tmp_path, documents=20)
    with pytest.raises(ValueError, match=r"is not the text that .* was trained on"):
        train(recipe(other, train={"steps": 30}), finished, resume=True)
    with pytest.raises(FileExistsError, match="exists already: give another --out, or --resume"):
        train(recipe(corpus), finished)
    with pytest.raises(FileNotFoundError, match=r"is not a run: it has no recipe\.json"):
        train(recipe(corpus), tmp_path / "none", resume=True)


@pytest.mark.parametrize("where", ["shards", "extra", "metrics"])
def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(
    corpus, tmp_path, monkeypatch, where
):
    """No file may grow beyond a limit, which is what a full disk does."""
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    module, name = {
        "shards": (checkpoints, "_write_shards"),
        "extra": (checkpoints, "to_safetensors"),
        "metrics": (Metrics, "write"),
    }[where]
    original = getattr(module, name)

    def full(*arguments):
        if (arguments[1:2] or [{}])[0].get("step") == 15 if where == "metrics" else armed:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
        return original(*arguments)

    save, armed = checkpoints.save, False

    def saving(run, step, *rest):
        nonlocal armed
        armed = step == 20
        save(run, step, *rest)

    monkeypatch.setattr(checkpoints, "save", saving)
    monkeypatch.setattr(module, name, full)
    run = tmp_path / "run"
    try:
        with pytest.raises(TrainingStopped, match="The newest checkpoint, of step 10, is") as error:
            train(recipe(corpus, data={"batches": "contiguous"}), run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert str(error.value).startswith(f"stopped at step {15 if where == 'metrics' else 20}: ")
    assert "File too large" in str(error.value)
    assert os.listdir(checkpoints.folder_of(run)) == ["step-00000010"]
    checkpoints.open_checkpoint(run)
    monkeypatch.undo()
    train(recipe(corpus, data={"batches": "contiguous"}), run, resume=True)
    assert checkpoints.steps_in(run) == [10, 20]


def test_a_run_that_is_being_trained_is_held(finished, corpus):
    longer = recipe(corpus, train={"steps": 30})
    with locked(finished), pytest.raises(ValueError, match="another process is at work in"):
        train(longer, finished, resume=True)
    train(longer, finished, resume=True)


def test_a_start_that_was_killed_leaves_nothing_in_the_way(corpus, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".recipe.json.x7").write_text("{")
    train(recipe(corpus, train={"steps": 1}), run)
    assert not (run / ".recipe.json.x7").exists()


def test_what_is_not_finite_is_skipped_counted_and_in_the_end_explained(
    corpus, tmp_path, monkeypatch
):
    class Poisoned(Trainer):
        """A gradient, later a weight, that is not a number."""

        def _forward(self, batch, states):
            if self.step == 12:
                with torch.no_grad():
                    self.model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
            loss, states = super()._forward(batch, states)
            return (loss * torch.inf if self.step in (3, 4) else loss), states

    monkeypatch.setattr(runs, "Trainer", Poisoned)
    run = tmp_path / "run"
    sections = {"train": {"max_bad_steps": 4}, "checkpoint": {"every": 5}}
    with pytest.raises(
        TrainingStopped,
        match=r"4 steps in a row gave a loss or gradient that is not finite .*: weights that "
        r"are not finite: model.layers.1.mlp.up_proj.weight. The newest checkpoint, of step 10",
    ):
        train(recipe(corpus, **sections), run)
    records = [r for r in comparable(run) if "loss" in r]
    assert [r["bad_steps"] for r in records[:6]] == [0, 0, 0, 1, 2, 2]
    assert checkpoints.steps_in(run) == [10]  # none at steps 5 and 15, which were bad
    assert checkpoints.open_checkpoint(run).content["updates"] == 8


def test_a_run_whose_last_steps_were_skipped_has_not_succeeded(corpus, tmp_path):
    wild = {"steps": 3, "learning_rate": 1e30, "warmup": 0.0, "clip": 0.0}
    with pytest.raises(Diverged, match="done its 3 steps, but the last 2 of them were skipped"):
        train(recipe(corpus, train=wild), tmp_path / "run")
    assert checkpoints.steps_in(tmp_path / "run") == [3]
    file = write_toml(tmp_path / "recipe.toml", recipe_table(corpus, train=wild))
    out = run_command("train", file, "--out", tmp_path / "second")
    assert out.returncode == 1
    assert "the last 2 of them were skipped" in out.stderr
    assert "finished" not in out.stdout


def test_steps_that_were_skipped_before_the_end_are_counted(corpus, tmp_path, monkeypatch, capsys):
    class Poisoned(Trainer):
        def _forward(self, batch, states):
            loss, states = super()._forward(batch, states)
            return (loss * torch.inf if self.step == 1 else loss), states

    monkeypatch.setattr(runs, "Trainer", Poisoned)
    train(recipe(corpus, train={"steps": 4}), tmp_path / "run")
    said = f"finished: {tmp_path / 'run'}; 1 of 4 steps were skipped"
    assert said in capsys.readouterr().out
