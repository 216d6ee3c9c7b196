"""Arguments of the ops and of the model: odd shapes, types and options, and none that crash."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.support import cases, exit_code, numbers, often, unchanged, words
from tests.support import make_corpus, recipe, small_model

from trellis.ops import (
    causal_convolution,
    delta_rule,
    gated_slots,
    linear_attention,
    trellis_memory,
    trellis_memory_step,
    ttt_linear,
)
from trellis.training.run import train

sizes = st.sampled_from([1, 2, 3, 4, 5, 7, 1, 2, 3, 0])
types = st.sampled_from(
    [torch.float32] * 6 + [torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
#: The letters of every argument's shape; a case may replace any of them by another tensor.
OPS = {
    trellis_memory: dict(q="BTHK", k="BTHK", v="BTHV", alpha="BTHM", log_beta="BTH", gamma="BTH"),
    trellis_memory_step: dict(q="BHK", k="BHK", v="BHV", alpha="BHM", log_beta="BH", gamma="BH"),
    linear_attention: dict(q="BTHK", k="BTHK", v="BTHV", log_decay="BTH"),
    delta_rule: dict(q="BTHK", k="BTHK", v="BTHV", beta="BTH", log_decay="BTH"),
    gated_slots: dict(q="BTHK", k="BTHK", v="BTHV", write="BTHM", log_decay="BTHM"),
    ttt_linear: dict(
        q="BTHK", k="BTHK", v="BTHK", eta="BTH", theta="V", norm_weight="HK", norm_bias="HK"
    ),
    causal_convolution: dict(x="BTK", weight="KV"),
}
OPTIONS = {
    "backend": st.one_of(st.sampled_from(["native", "chunked", "reference", "auto", "nothing"])),
    "cu_seqlens": st.one_of(
        st.none(),
        st.lists(st.integers(-1, 5), max_size=4).map(lambda bounds: torch.tensor(bounds)),
        st.just([0, 1]),
    ),
    "mode": st.sampled_from(["exact", "stale", "", None]),
    "minibatch": numbers,
    "initial_state": st.one_of(st.none(), st.just(3), st.lists(sizes, max_size=4).map(torch.zeros)),
}


@st.composite
def calls(draw, op):
    size = {letter: draw(sizes) for letter in "BTHKVM"}
    given = {
        name: torch.rand([size[letter] for letter in letters]) - (0.5 if "log" not in name else 1)
        for name, letters in OPS[op].items()
    }
    for name in draw(st.lists(st.sampled_from(sorted(given)), max_size=2, unique=True)):
        shape = draw(st.one_of(st.just(given[name].shape), st.lists(sizes, max_size=5)))
        given[name] = draw(
            st.one_of(
                types.map(lambda dtype, shape=shape: torch.ones(shape, dtype=dtype)),
                st.sampled_from([None, 0.5, "x", torch.ones(2, 3, device="meta")]),
            )
        )
    known = sorted(OPTIONS.keys() & inspect.signature(op).parameters.keys())
    for option in draw(st.lists(st.sampled_from(known), max_size=2)):
        given[option] = draw(OPTIONS[option])
    return given


@often
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_ops(op, times):
    @cases(20, times)
    @given(calls(op))
    def check(arguments):
        try:
            found = op(**arguments)
        except (ValueError, TypeError):
            return
        y = found[0] if isinstance(found, tuple) else found
        assert y.shape[:1] == arguments[next(iter(OPS[op]))].shape[:1]

    check()


@often
def test_inputs_of_a_model(times):
    model = small_model(num_hidden_layers=1)
    ids = st.lists(sizes, max_size=3).flatmap(
        lambda shape: st.integers(-2, 100).map(lambda top: torch.full(shape, top))
    )
    masks = st.one_of(st.none(), st.lists(sizes, max_size=3).map(torch.ones))
    kinds = st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bool])

    @cases(30, times)
    @given(ids, kinds, masks, st.booleans(), st.one_of(st.none(), st.integers(-3, 9)))
    def check(ids, kind, mask, cached, keep):
        cache = model.init_cache(max(len(ids), 1)) if cached and ids.dim() else None
        try:
            model(ids.to(kind), attention_mask=mask, past_key_values=cache, logits_to_keep=keep)
        except (ValueError, TypeError):
            return
        assert ids.dim() == 2

    check()


@often
def test_options_of_commands(tmp_path, times):
    corpus = make_corpus(tmp_path / "corpus")
    run = tmp_path / "run"
    train(recipe(corpus, train={"steps": 1}), run)
    text = tmp_path / "a.txt"
    text.write_text("some text")
    options = {
        ("generate", run, "--prompt", "x", "--max-tokens", 1): [
            "--temperature", "--top-p", "--top-k", "--seed", "--step", "--device",
            "--state-in", "--prompt-file",
        ],
        ("eval", "ppl", run, "--data", text, "--out", run / "recipe.json"): [
            "--contexts", "--stride", "--limit", "--batch-tokens", "--document-bytes", "--threads",
        ],
        ("data", "prepare", text, "--out", run): [
            "--validation", "--seed", "--shard-tokens", "--max-documents",
        ],
        ("data", "tokenizer", text, "--out", run / "recipe.json"): ["--vocab-size"],
        ("data", "info", corpus.path): ["--json"],
        ("data", "verify"): ["--"],
        ("export", run, "--out", run): ["--step"],
        ("plot", text): ["--out"],
        ("models",): ["--vocab-size", "--contexts"],
    }  # fmt: skip
    pairs = st.sampled_from(
        [(command, name) for command, names in options.items() for name in names]
    )
    bad = st.one_of(numbers.map(str), words.filter(lambda word: "\0" not in word))

    @cases(25, times)
    @given(pairs, bad)
    def check(pair, value):
        (command, name) = pair
        with unchanged(tmp_path):
            code, said = exit_code(*command, name, value)
        assert code in (0, 1, 2)
        assert "Traceback" not in said

    check()
