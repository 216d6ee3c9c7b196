"""A run that is interrupted and resumed ends as one that was not."""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file
from tests.training.helpers import (
    command,
    comparable,
    environment,
    recipe,
    run_command,
    table,
    write_toml,
)

from trellis.training import checkpoint as checkpoints
from trellis.training.loop import TrainingStopped
from trellis.training.run import train


def contents(run, step):
    """Everything in a checkpoint: every tensor, and what is noted beside them."""
    path = checkpoints.path_of(run, step)
    shards = {p.name: load_file(p) for p in sorted((path / "shards").iterdir())}
    shards["extra"] = load_file(path / "extra.safetensors")
    return shards, json.loads((path / "checkpoint.json").read_text())


def assert_identical(run, other):
    assert checkpoints.steps_in(run) == checkpoints.steps_in(other)
    for step in checkpoints.steps_in(run):
        (tensors, noted), (expected, known) = contents(run, step), contents(other, step)
        for file, parts in expected.items():
            assert parts.keys() == tensors[file].keys()
            for name, tensor in parts.items():
                assert torch.equal(tensors[file][name], tensor), (step, name)
        # safetensors writes the entries of its headers in any order, so hashes of files may differ.
        assert noted.pop("files").keys() == known.pop("files").keys()
        assert noted == known
    assert comparable(run) == comparable(other)


def kill_and_resume(corpus, tmp_path, kills, seed, **sections):
    """Kill -9 a run at random moments and resume it; returns (interrupted, undisturbed)."""
    chance = random.Random(seed)
    file = write_toml(tmp_path / "recipe.toml", table(corpus, **sections))
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "interrupted"
    start = time.monotonic()
    out = run_command("train", file, "--out", undisturbed)
    assert out.returncode == 0, out.stderr
    took = time.monotonic() - start
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
                process.stdout.readline()
                time.sleep(chance.uniform(0, took / 4))
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
        {"train": {"context_warmup": [[0.3, 8], [0.6, 16]]}, "log": {"every": 7}},
    ],
    ids=["packed", "contiguous", "stale", "window", "context warm-up"],
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
def test_a_signal_saves_and_exits_cleanly(corpus, tmp_path, number):
    long = table(corpus, train={"steps": 100000}, checkpoint={"every": 0})
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
    assert process.returncode == 0, errors
    (step,) = checkpoints.steps_in(run)
    assert f"stopped after step {step}, saved; go on with: trellis train {run} --resume" in out
    assert comparable(run)[-1]["step"] <= step


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
        ("extra.safetensors", None, "extra.safetensors is missing"),
    ],
)
def test_damage_is_named(finished, corpus, name, content, message):
    path = checkpoints.path_of(finished, 20) / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        train(recipe(corpus, train={"steps": 30}), finished, resume=True)


def test_another_recipe_or_text_is_refused(finished, corpus, tmp_path):
    with pytest.raises(ValueError, match=r"started with other values of train\.learning_rate"):
        train(recipe(corpus, train={"learning_rate": 1.0}), finished, resume=True)
    with pytest.raises(ValueError, match="has finished its 20 steps already"):
        train(recipe(corpus), finished, resume=True)
    from tests.training.helpers import make_corpus

    other = make_corpus(tmp_path, documents=20)
    with pytest.raises(ValueError, match=r"is not the text that .* was trained on"):
        train(recipe(other, train={"steps": 30}), finished, resume=True)
    with pytest.raises(FileExistsError, match="exists already: give another --out, or --resume"):
        train(recipe(corpus), finished)
    with pytest.raises(FileNotFoundError, match=r"is not a run: it has no recipe\.json"):
        train(recipe(corpus), tmp_path / "none", resume=True)


FULL_DISK = """
import resource, sys
from pathlib import Path
from trellis.cli import main
run = Path(sys.argv[3])
from trellis.training import checkpoint
save = checkpoint.save
def full(*arguments):
    if arguments[1] == 20:  # no file may grow beyond this: what a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    save(*arguments)
checkpoint.save = full
sys.argv = ["trellis", "train", sys.argv[1], "--out", sys.argv[3]]
main()
"""


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(corpus, tmp_path):
    import sys

    file = write_toml(tmp_path / "recipe.toml", table(corpus))
    run = tmp_path / "run"
    out = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(file), "--out", str(run)],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert out.returncode == 1
    assert "trellis: stopped at step 20: cannot write the checkpoint" in out.stderr
    assert "File too large" in out.stderr
    assert "The newest checkpoint, of step 10, is whole." in out.stderr
    assert "Traceback" not in out.stderr
    assert os.listdir(checkpoints.folder_of(run)) == ["step-00000010"]
    checkpoints.open_checkpoint(run)
    train(recipe(corpus), run, resume=True)
    assert checkpoints.steps_in(run) == [10, 20]


def test_what_is_not_finite_is_skipped_counted_and_in_the_end_explained(corpus, tmp_path):
    from trellis.training import loop

    class Poisoned(loop.Trainer):
        """A gradient, later a weight, that is not a number."""

        def _forward(self, batch, states):
            if self.step == 12:
                with torch.no_grad():
                    self.model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
            loss, states = super()._forward(batch, states)
            return (loss * torch.inf if self.step in (3, 4) else loss), states

    original, loop.Trainer = loop.Trainer, Poisoned
    from trellis.training import run as runs

    runs.Trainer = Poisoned
    try:
        run = tmp_path / "run"
        with pytest.raises(
            TrainingStopped,
            match=r"4 steps in a row gave a loss or gradient that is not finite .*: weights that "
            r"are not finite: model.layers.1.mlp.up_proj.weight. The newest checkpoint, of step 10",
        ):
            train(recipe(corpus, train={"max_bad_steps": 4}), run)
    finally:
        loop.Trainer = runs.Trainer = original
    records = [r for r in comparable(run) if "loss" in r]
    assert [r["bad_steps"] for r in records[:6]] == [0, 0, 0, 1, 2, 2]
    assert checkpoints.open_checkpoint(run).content["updates"] == 8
