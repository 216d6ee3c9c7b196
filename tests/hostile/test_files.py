"""Damaged and crafted files: manifests, states of models, checkpoints of runs."""

import contextlib
import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.support import (
    DOCUMENTED,
    cases,
    exit_code,
    often,
    spoiled_bytes,
    spoiled_json,
    unchanged,
)
from tests.support import make_corpus, recipe, small_model, tokens

from trellis import TrellisCache
from trellis.data import open_corpus
from trellis.training.run import load_run, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    train(recipe(corpus, train={"steps": 2}), folder)
    return folder


@often
def test_manifests(corpus, tmp_path, times):
    folder = shutil.copytree(corpus.path, tmp_path / "corpus")
    path = folder / "manifest.json"
    whole = path.read_bytes()
    spoiled = st.one_of(
        spoiled_bytes(whole),
        spoiled_json(json.loads(whole)).map(lambda value: json.dumps(value).encode()),
    )

    @cases(50, times)
    @given(spoiled)
    def check(data):
        path.write_bytes(data)
        with unchanged(folder):
            try:
                opened = open_corpus(folder)
            except DOCUMENTED:
                return
            for stream in (opened.train, opened.validation):
                assert len(stream.read(0, stream.tokens)) == stream.tokens
            with contextlib.suppress(*DOCUMENTED):
                opened.verify()

    check()


@often
def test_states(tmp_path, times):
    model = small_model(num_hidden_layers=1)
    path = tmp_path / "state"
    model.read(tokens(1, 9)).save(path)

    @cases(30, times)
    @given(spoiled_bytes(path.read_bytes()))
    def check(data):
        path.write_bytes(data)
        with unchanged(tmp_path):
            try:
                cache = TrellisCache.load(path, model)
            except DOCUMENTED:
                return
        assert cache.seen == [9]  # the piece was replaced by itself

    check()


@often
def test_states_that_somebody_made(tmp_path, times):
    """With a true checksum and fingerprint, but other shapes."""
    model = small_model(num_hidden_layers=1)
    path = tmp_path / "state"
    sizes = st.lists(st.integers(0, 5), min_size=4, max_size=4)

    @cases(10, times)
    @given(sizes, sizes, st.integers(-5, 5))
    def check(keys, values, seen):
        cache = model.read(tokens(1, 9))
        (state,) = cache.states
        memory = state.memory._replace(keys=torch.ones(keys), values=torch.ones(values))
        cache.states, cache.seen = [state._replace(memory=memory)], [seen]
        cache.save(path)
        with contextlib.suppress(ValueError, TypeError):
            model.read(tokens(1, 3), TrellisCache.load(path, model))

    check()


@often
def test_checkpoints(run, tmp_path, times):
    folder = shutil.copytree(run, tmp_path / "run")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    whole = {path: path.read_bytes() for path in files}

    @st.composite
    def spoiled(draw):
        path = draw(st.sampled_from(files))
        if path.suffix == ".json" and draw(st.booleans()):
            return path, json.dumps(draw(spoiled_json(json.loads(whole[path])))).encode()
        return path, draw(spoiled_bytes(whole[path]))

    @cases(30, times)
    @given(spoiled())
    def check(change):
        path, data = change
        path.write_bytes(data)
        try:
            with unchanged(folder), contextlib.suppress(*DOCUMENTED):
                load_run(folder)
        finally:
            path.write_bytes(whole[path])

    check()


@often
def test_commands_on_damaged_runs(run, tmp_path, times):
    folder = shutil.copytree(run, tmp_path / "run")
    files = [path for path in sorted(folder.rglob("*.json")) if path.is_file()]
    whole = {path: path.read_bytes() for path in files}
    commands = [
        ("generate", folder, "--prompt", "x", "--max-tokens", 1),
        ("train", folder, "--resume", "--dry-run", "--set", "train.steps=4"),
        ("export", folder, "--out", tmp_path / "run" / "checkpoints"),
        ("eval", "scaling", folder, "--out", tmp_path / "run" / "metrics.jsonl"),
    ]

    @cases(10, times)
    @given(st.data(), st.sampled_from(commands), st.sampled_from(files))
    def check(data, command, path):
        path.write_bytes(json.dumps(data.draw(spoiled_json(json.loads(whole[path])))).encode())
        try:
            with unchanged(folder):
                code, said = exit_code(*command)
        finally:
            path.write_bytes(whole[path])
        assert code in (0, 1, 2)
        assert "Traceback" not in said

    check()
