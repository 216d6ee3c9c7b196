import json

import numpy as np
import pytest
import torch
from tests.evaluation.helpers import ours, save_gpt2
from typer.testing import CliRunner

from trellis.cli import app
from trellis.evaluation import inspection_task
from trellis.evaluation.inspection import inspect, token_texts
from trellis.evaluation.memory_measures import (
    by_age,
    effective_rank,
    half_life,
    retention,
    since_written,
)
from trellis.evaluation.replay import PASSES, QUANTITIES, RECALLS, Heard, Replay
from trellis.evaluation.subject import load_subject
from trellis.ops.memory.activations import FUNCTIONS

TEXT = "the cat sat on the mat; the cat ran."
IDS = list(TEXT.encode())
CONFIGS = {
    "exact": {},
    "stale": {"mode": "stale", "minibatch": 5},
    "decode": {"value_pass": "decode", "separate_gates": True, "phi": "identity"},
    "learned start": {"phi": "layernorm", "slots": 6, "psi": "tanh"},
}


def subject_of(**fields):
    return ours(mixer_config=fields)


@pytest.fixture(params=CONFIGS)
def subject(request):
    return subject_of(**CONFIGS[request.param])


def states_of(subject, ids=IDS):
    """The model's own states: before the first token and after every one, read one by one."""
    cache = subject.model.init_cache(1)
    states = [[state.memory for state in cache.states]]
    with torch.no_grad():
        for token in ids:
            subject.model(torch.tensor([[token]]), past_key_values=cache)
            states.append([state.memory for state in cache.states])
    return states


def close(found, expected, tolerance=2e-5):
    expected = torch.as_tensor(expected).detach().double()
    difference = (torch.as_tensor(found).double() - expected).square().mean().sqrt()
    return float(difference) <= tolerance * float(expected.square().mean().sqrt())


@pytest.mark.parametrize("segment", [4096, 7])
def test_replay_equals_the_model(subject, segment):
    subject.model.config.segment_size = segment
    arrays = inspect(subject, IDS)
    assert arrays["replay_error"].max() < 2e-5
    final = subject.model.read(torch.tensor([IDS])).states
    for layer, state in enumerate(final):
        for memory in PASSES:
            norms = getattr(state.memory, memory)[0].norm(dim=(-2, -1))
            assert close(arrays[f"{memory}_memory_norm"][layer, :, -1], norms)


def test_outputs_and_states_of_the_replay(subject):
    mixer = subject.model.model.layers[0].mixer
    x = torch.randn(1, 41, 32)
    blank = {
        f"{memory}_{name}": np.zeros((1, 2, 41), np.float32)
        for memory in PASSES
        for name in QUANTITIES
    }
    with torch.no_grad():
        y, state = mixer(x)
        before = mixer.init_state(1)
        replay = Replay(mixer, 0, blank, 1)
        for part in (slice(0, 33), slice(33, 41)):
            inputs = mixer.project(x, before)[0].at(part)
            replay.read(Heard(0, part.start, x[:, part], before, inputs, y[:, part]))
    assert replay.difference() < 2e-5
    for found, expected in zip(replay.state, state.memory):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert close(found, expected)


def test_quantities_are_those_of_the_models_own_states(subject):
    arrays = inspect(subject, IDS)
    states = states_of(subject)
    mixer = subject.model.model.layers[1].mixer
    heard = []
    hook = mixer.register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    subject.model.read(torch.tensor([IDS]))
    hook.remove()
    with torch.no_grad():
        _, k, v, alpha, log_beta, gamma = mixer.project(heard[0], mixer.init_state(1))[0]
    config = mixer.config
    for n, memory in enumerate(PASSES):
        phi, x, target = FUNCTIONS[config.phi], (k, v)[n], alpha
        if n and config.value_pass == "decode":
            phi, x, target = FUNCTIONS["identity"], alpha / alpha.norm(dim=-1, keepdim=True), v
        for t in (0, 3, 17, len(IDS) - 1):
            point = t if config.mode == "exact" else t // 5 * 5
            before, after = states[t][1][n][0], states[t + 1][1][n][0]
            start = states[point][1][n][0].detach().clone().requires_grad_()

            def loss(m, phi=phi, x=x, target=target, t=t):
                code = phi(torch.einsum("hmd,hd->hm", m, x[0, t]))
                return (code - target[0, t]).square().sum(-1) / 2

            (gradient,) = torch.autograd.grad(loss(start).sum(), start)
            beta = log_beta[n][0, t].exp()[:, None, None]
            expected = {
                "forget_gate": log_beta[n][0, t].exp(),
                "step_size": gamma[n][0, t],
                "write_norm": gamma[n][0, t] * gradient.norm(dim=(-2, -1)),
                "error_before": loss(start).detach(),
                "error_decayed": loss(beta * before),
                "error_after": loss(after),
                "target_power": target[0, t].square().sum(-1) / 2,
                "memory_norm": after.norm(dim=(-2, -1)),
            }
            for name, value in expected.items():
                assert close(arrays[f"{memory}_{name}"][1, :, t], value, 1e-4), (memory, name, t)
            difference = (after - beta * before).norm(dim=(-2, -1))
            assert close(arrays[f"{memory}_write_norm"][1, :, t], difference, 1e-4)


def test_recall_is_the_error_at_the_write_and_just_before_it():
    subject = subject_of()
    arrays = inspect(subject, IDS, layer=1)
    places = np.arange(len(IDS))
    for memory in PASSES:
        power = arrays[f"{memory}_target_power"][1]
        recall = arrays[f"recall_{memory}"]
        after = recall[:, places, places]
        np.testing.assert_allclose(after, arrays[f"{memory}_error_after"][1] / power, rtol=1e-4)
        before = recall[:, places[1:], places[:-1]]
        error = arrays[f"{memory}_error_before"][1] / power
        np.testing.assert_allclose(before, error[:, 1:], rtol=1e-4)
    assert np.abs(arrays["recall_answer"]).max() <= 1 + 1e-5


def test_a_memory_that_keeps_all_recalls_what_it_was_told():
    """Decoding with whole steps and no forgetting, the answer to the code just written is v."""
    subject = subject_of(value_pass="decode", step="constant", forget_gate=False, phi="identity")
    arrays = inspect(subject, IDS)
    assert arrays["values_error_after"].max() < 1e-6 * arrays["values_target_power"].max()
    assert (retention(arrays["keys_forget_gate"], arrays["probes"])[..., 0, :] == 1).all()
    assert half_life(arrays["keys_forget_gate"]) == np.inf


def test_a_memory_that_forgets_all_keeps_the_last_write_alone():
    subject = subject_of()
    for block in subject.model.model.layers:
        block.mixer.decay.A_log.data.fill_(20.0)
    arrays = inspect(subject, IDS)
    left = retention(arrays["keys_forget_gate"], arrays["probes"])[0, 0]
    after = np.triu(np.ones_like(left), 1) > 0
    assert (np.diag(left) == 1).all()
    assert left[after].max() < 1e-6
    np.testing.assert_allclose(arrays["keys_memory_norm"], arrays["keys_write_norm"], rtol=1e-5)
    np.testing.assert_allclose(arrays["keys_effective_rank"], 1, rtol=1e-2)


def test_retention_is_the_product_of_the_gates_since():
    gates = np.array([[0.5, 0.25, 0.0, 1.0]])
    left = retention(gates, np.array([0, 1, 3]))[0]
    nan = np.nan
    np.testing.assert_array_equal(left, [[1, 0.25, 0, 0], [nan, 1, 0, 0], [nan, nan, nan, 1]])
    assert half_life(np.array([0.5, 0.5])) == pytest.approx(1)
    assert half_life(np.array([0.25, 1.0])) == pytest.approx(1)
    assert half_life(gates) == 0


@pytest.mark.parametrize("name", ["exact", "decode"])
def test_a_small_step_descends(name):
    step = 1e-3
    fields = {"step": "constant", "step_max": step, "forget_gate": False}
    arrays = inspect(subject_of(**{**CONFIGS[name], **fields}), IDS)
    for memory in PASSES:
        gained = arrays[f"{memory}_error_before"] - arrays[f"{memory}_error_after"]
        # To first order the step times |gradient|^2; what is written is the step times that.
        expected = arrays[f"{memory}_write_norm"] ** 2 / step
        np.testing.assert_allclose(gained, expected, rtol=0.05, atol=1e-4)
        assert (gained > 0).all()


def test_effective_rank():
    assert effective_rank(torch.zeros(2, 4, 3)).tolist() == [0, 0]
    one = torch.outer(torch.randn(4), torch.randn(3))
    assert effective_rank(one).item() == pytest.approx(1, abs=1e-3)
    assert effective_rank(7 * torch.eye(5)).item() == pytest.approx(5)


def test_ranks_at_some_tokens_and_the_last():
    whole = inspect(subject_of(), IDS)["keys_effective_rank"]
    some = inspect(subject_of(), IDS, rank_every=10)["keys_effective_rank"]
    there = [0, 10, 20, 30, len(IDS) - 1]
    np.testing.assert_allclose(some[..., there], whole[..., there], rtol=1e-5)
    assert np.isnan(np.delete(some, there, axis=-1)).all()


def test_the_first_tokens_are_a_prefix():
    whole, first = inspect(subject_of(), IDS), inspect(subject_of(), IDS[:11])
    for memory in PASSES:
        for name in QUANTITIES:
            both = first[f"{memory}_{name}"], whole[f"{memory}_{name}"][..., :11]
            np.testing.assert_allclose(*both, rtol=1e-3, atol=1e-5)


def test_probes_are_spread_over_the_text():
    arrays = inspect(subject_of(), IDS, probes=4)
    assert arrays["probes"].tolist() == [0, 12, 23, 35]
    assert arrays["recall_keys"].shape == (2, 4, len(IDS))


def test_recall_by_age_and_since_the_write():
    recalled = np.array([[0.5, 0.6, 0.7], [0.9, 0.2, 0.4], [0.8, 0.8, 0.1]])
    written = np.arange(3)
    ages = by_age(recalled, written, 2)
    np.testing.assert_allclose(ages, [0.8, 0.85, 0.8 / 3, 0.5, 0.7])
    since = since_written(recalled, written)
    assert np.isnan(since[0]).all()
    np.testing.assert_allclose(since[1:], [[0, -0.7, -0.5], [0, 0, -0.7]], atol=1e-12)


def test_only_trellis_layers_of_a_hybrid_are_shown():
    hybrid = ours(mixer=["transformer", "trellis"], name="hybrid")
    arrays = inspect(hybrid, IDS)
    assert arrays["layers"].tolist() == [1]
    assert arrays["keys_write_norm"].shape == (1, 2, len(IDS))
    assert arrays["replay_error"].max() < 2e-5
    with pytest.raises(ValueError, match=r"layer must be one of .* hybrid, 1; got 0"):
        inspect(hybrid, IDS, layer=0)


def test_special_and_broken_tokens_have_texts():
    tokenizer = subject_of().tokenizer
    end = tokenizer.end_of_document
    texts = token_texts(tokenizer, [end, 97, 0xC3])
    assert texts[0]
    assert texts[1:] == ["a", "c3"]


def test_the_command_keeps_arrays_and_a_record(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(inspection_task, "draw", lambda path, *_, **place: drawn.append(place))
    subject = subject_of(separate_gates=True)
    options = {"tokens": 20, "layer": 1, "head": 0}
    record, kept, picture = inspection_task.run(subject, TEXT, tmp_path, **options)
    out = capsys.readouterr().out
    assert "half-life" in out
    assert str(picture) in out
    arrays = inspection_task.load(kept)
    for memory in PASSES:
        for name in QUANTITIES:
            assert arrays[f"{memory}_{name}"].shape == (2, 2, 20)
    for name in RECALLS:
        assert arrays[name].shape == (2, 20, 20)
    assert arrays["tokens"].shape == arrays["ids"].shape == (20,)
    assert "".join(arrays["tokens"][1:]) == TEXT[:19]
    assert arrays["recall_layer"] == 1
    layer = record["result"]["layers"][0]
    assert layer["mode"] == "exact"
    assert layer["replay_error"] < 2e-5
    assert layer["keys"]["error_after"] < layer["keys"]["error_before"]
    json.dumps(record, allow_nan=False)

    # What is there is not measured again, and what is missing is.
    before = kept.stat().st_mtime_ns
    assert inspection_task.run(subject, TEXT, tmp_path, **options)[0] == record
    assert kept.stat().st_mtime_ns == before
    kept.unlink()
    assert inspection_task.run(subject, TEXT, tmp_path, **options)[0] == record
    assert kept.is_file()
    assert drawn == [{"layer": 1, "head": 0}] * 3


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("$x^ a", {}),
        (TEXT * 8, {"layer": 1, "probes": 9, "rank_every": 50}),
        ("a", {"tokens": 1, "layer": 1, "head": 0}),
    ],
)
def test_pictures(tmp_path, text, options):
    picture = inspection_task.run(subject_of(), text, tmp_path, **options)[2].read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(picture[n : n + 4], "big") for n in (16, 20))
    assert 1500 < width < 3500
    assert 2000 < height < 5000
    assert len(picture) > 50_000


def test_what_cannot_be_inspected_is_an_error(tmp_path):
    subject = subject_of()
    with pytest.raises(ValueError, match="the text is empty"):
        inspection_task.run(subject, "", tmp_path)
    with pytest.raises(ValueError, match="no tokens"):
        inspect(subject, [])
    with pytest.raises(ValueError, match=r"layer must be one of .* 0, 1; got 2"):
        inspection_task.run(subject, TEXT, tmp_path, layer=2)
    with pytest.raises(ValueError, match=r"head must be from 0 to 1 in layer 0; got 5"):
        inspection_task.run(subject, TEXT, tmp_path, layer=0, head=5)
    with pytest.raises(ValueError, match="head 1 needs a layer"):
        inspection_task.run(subject, TEXT, tmp_path, head=1)
    with pytest.raises(ValueError, match="no Trellis layer to inspect: its mixers are mamba2"):
        inspection_task.run(ours("mamba2"), TEXT, tmp_path)
    gpt2 = load_subject(str(save_gpt2(tmp_path / "gpt2")))
    with pytest.raises(ValueError, match=r"gpt2 has no Trellis layer .* GPT2LMHeadModel"):
        inspection_task.run(gpt2, TEXT, tmp_path)
    assert not (tmp_path / "inspect").exists()
    asked = CliRunner().invoke(app, ["eval", "inspect", str(tmp_path / "gpt2")])
    assert "either a TEXT or --file FILE" in str(asked.exception)
