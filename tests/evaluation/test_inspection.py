import contextlib
import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from tests.support import evaluated_model, save_gpt2
from typer.testing import CliRunner

from trellis.cli import app
from trellis.cli.evaluation import show
from trellis.evaluation import inspection
from trellis.evaluation.inspection import (
    QUANTITIES,
    RECALLS,
    Replay,
    effective_rank,
    inspect,
    picture,
    token_texts,
)
from trellis.evaluation.inspection.picture import PASSES, half_life, over_age, retention
from trellis.evaluation.models import open_model
from trellis.ops import trellis_memory
from trellis.ops.memory.activations import FUNCTIONS

TEXT = "the cat sat on the mat; the cat ran."
IDS = list(TEXT.encode())
CONFIGS = {
    "exact": {},
    "paper": {"form": "paper"},
    "stale": {"form": "paper", "mode": "stale", "minibatch": 5},
    "error after the decay": {"form": "paper", "error_at": "after"},
    "stale, error after the decay": {"error_at": "after", "mode": "stale", "minibatch": 5},
    "decode": {"value_pass": "decode", "separate_gates": True, "phi": "identity"},
    "learned start": {"phi": "layernorm", "slots": 6, "psi": "tanh"},
}


def model_of(**fields):
    return evaluated_model(mixer_config={"heads": 2, **fields})


@pytest.fixture(params=CONFIGS)
def model(request):
    return model_of(**CONFIGS[request.param])


def states_of(model, ids=IDS):
    """The model's own states: before the first token and after every one, read one by one."""
    cache = model.network.init_cache(1)
    states = [[state.memory for state in cache.states]]
    with torch.no_grad():
        for token in ids:
            model.network(torch.tensor([[token]]), past_key_values=cache)
            states.append([state.memory for state in cache.states])
    return states


def close(found, expected, tolerance=2e-5):
    expected = torch.as_tensor(expected).detach().double()
    difference = (torch.as_tensor(found).double() - expected).square().mean().sqrt()
    return float(difference) <= tolerance * float(expected.square().mean().sqrt())


@pytest.mark.parametrize("segment", [4096, 7])
def test_replay_equals_the_model(model, segment):
    model.network.config.segment_size = segment
    arrays = inspect(model, IDS)
    final = model.network.read(torch.tensor([IDS])).states
    for layer, state in enumerate(final):
        for memory in PASSES:
            norms = getattr(state.memory, memory)[0].norm(dim=(-2, -1))
            assert close(arrays[f"{memory}_memory_norm"][layer, :, -1], norms)


def test_states_of_the_replay(model):
    mixer = model.network.model.layers[0].mixer
    x = torch.randn(1, 41, 32)
    blank = {
        f"{memory}_{name}": np.zeros((1, 2, 41), np.float32)
        for memory in PASSES
        for name in QUANTITIES
    }
    with torch.no_grad():
        _, state = mixer(x)
        before = mixer.init_state(1)
        replay = Replay(mixer, 0, blank, 1)
        for part in (slice(0, 33), slice(33, 41)):
            inputs = mixer.project(x, before)[0].at(part)
            replay.read(part.start, inputs)
    for found, expected in zip(replay.state, state.memory):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert close(found, expected)


def test_quantities_are_those_of_the_models_own_states(model):
    arrays = inspect(model, IDS)
    states = states_of(model)
    mixer = model.network.model.layers[1].mixer
    heard = []
    hook = mixer.register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    model.network.read(torch.tensor([IDS]))
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
            beta = log_beta[n][0, t].exp()[:, None, None]
            start = states[point][1][n][0] * (beta if config.error_at == "after" else 1)
            start.requires_grad_()

            def loss(m, phi=phi, x=x, target=target, t=t):
                code = phi(torch.einsum("hmd,hd->hm", m, x[0, t]))
                return (code - target[0, t]).square().sum(-1) / 2

            (gradient,) = torch.autograd.grad(loss(start).sum(), start)
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
    model = model_of()
    arrays = inspect(model, IDS)
    places = np.arange(len(IDS))
    for memory in PASSES:
        power = arrays[f"{memory}_target_power"][1]
        recall = arrays[f"recall_{memory}"][1]
        after = recall[:, places, places]
        np.testing.assert_allclose(after, arrays[f"{memory}_error_after"][1] / power, rtol=1e-4)
        before = recall[:, places[1:], places[:-1]]
        error = arrays[f"{memory}_error_before"][1] / power
        np.testing.assert_allclose(before, error[:, 1:], rtol=1e-4)


@pytest.mark.parametrize("value_pass", ["encode", "decode"])
def test_the_answer_is_the_memorys_own(value_pass):
    """What the memory answers to the key of the token just written, by the op itself."""
    fields = {"psi": "tanh", "slots": 6, "value_pass": value_pass, "normalize": ("q", "k")}
    model = model_of(**fields)
    mixer = model.network.model.layers[1].mixer
    assert mixer.slots != mixer.key_dim
    heard = []
    hook = mixer.register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    model.network.read(torch.tensor([IDS]))
    hook.remove()
    with torch.no_grad():
        inputs = mixer.project(heard[0], mixer.init_state(1))[0]
        y, _ = trellis_memory(*inputs._replace(q=inputs.k), **mixer.choices)
    expected = torch.cosine_similarity(y, inputs.v, dim=-1)[0].mT  # [H, T]
    places = np.arange(len(IDS))
    found = inspect(model, IDS)["recall_answer"][1][:, places, places]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    # psi bends the answer: without it the direction is another.
    mixer.config.psi = "identity"
    without = inspect(model, IDS)["recall_answer"][1][:, places, places]
    assert np.abs(without - found).max() > 1e-3


def test_a_memory_that_keeps_all_recalls_what_it_was_told():
    """Decoding with whole steps and no forgetting, the answer to the code just written is v."""
    model = model_of(value_pass="decode", step="constant", forget_gate=False, phi="identity")
    arrays = inspect(model, IDS)
    assert arrays["values_error_after"].max() < 1e-6 * arrays["values_target_power"].max()
    assert (retention(arrays["keys_forget_gate"], arrays["probes"])[..., 0, :] == 1).all()
    assert half_life(arrays["keys_forget_gate"]) == np.inf


def test_a_memory_that_forgets_all_keeps_the_last_write_alone():
    model = model_of()
    for block in model.network.model.layers:
        block.mixer.decay.A_log.data.fill_(20.0)
    arrays = inspect(model, IDS)
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
    arrays = inspect(model_of(**{**CONFIGS[name], **fields}), IDS)
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
    whole = inspect(model_of(), IDS)["keys_effective_rank"]
    some = inspect(model_of(), IDS, rank_every=10)["keys_effective_rank"]
    there = [0, 10, 20, 30, len(IDS) - 1]
    np.testing.assert_allclose(some[..., there], whole[..., there], rtol=1e-5)
    assert np.isnan(np.delete(some, there, axis=-1)).all()


def test_the_first_tokens_are_a_prefix():
    whole, first = inspect(model_of(), IDS), inspect(model_of(), IDS[:11])
    for memory in PASSES:
        for name in QUANTITIES:
            both = first[f"{memory}_{name}"], whole[f"{memory}_{name}"][..., :11]
            np.testing.assert_allclose(*both, rtol=1e-3, atol=1e-5)


def test_probes_are_spread_over_the_text():
    arrays = inspect(model_of(), IDS, probes=4)
    assert arrays["probes"].tolist() == [0, 12, 23, 35]
    assert arrays["recall_keys"].shape == (2, 2, 4, len(IDS))


def forgetful(*rates):
    """A model whose heads forget as fast as these say: -log of the gate, of every layer's heads."""
    model = model_of(separate_gates=False)
    for block, rate in zip(model.network.model.layers, rates):
        block.mixer.beta_proj.weight.data.zero_()
        block.mixer.decay.dt_bias.data.fill_(0.0)  # softplus of it is log 2
        block.mixer.decay.A_log.data.copy_(torch.tensor(rate).log() - math.log(math.log(2)))
    return model


def test_all_layers_are_recalled_and_of_long_texts_fewer_tokens(monkeypatch):
    model = forgetful([0.5, 0.2], [0.9, 0.1])
    every = inspect(model, IDS)
    np.testing.assert_allclose(every["keys_forget_gate"][1, 1], math.exp(-0.1), rtol=1e-4)
    assert every["recall_layers"].tolist() == [0, 1]
    monkeypatch.setattr(inspection, "RECALL_ENTRIES", 4 * 2 * 2 * len(IDS))
    some = inspect(model, IDS)
    assert some["probes"].tolist() == [0, 12, 23, 35]
    for name in RECALLS:
        np.testing.assert_array_equal(some[name], every[name][:, :, some["probes"]])


def test_of_a_text_only_what_is_asked_for_is_held(monkeypatch):
    kept = []
    of = inspection._copied
    monkeypatch.setattr(inspection, "_copied", lambda inputs: kept.append(of(inputs)) or kept[-1])
    inspect(model_of(), IDS, probes=2)
    tensors = [t for one in kept for t in (one.q, one.k, one.v, one.alpha, *one.log_beta)]
    assert len(kept) == 2 * 2
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors)


def test_what_is_left_by_age():
    left = np.array([[0.5, 0.6, 0.7], [0.9, 0.2, 0.4], [0.8, 0.8, 0.1]])
    nan = math.nan
    np.testing.assert_array_equal(
        over_age(left, np.arange(3), 2), [[0.5, 0.6, 0.7], [0.2, 0.4, nan], [0.1, nan, nan]]
    )


def test_only_trellis_layers_of_a_hybrid_are_shown():
    fields = {"transformer": {}, "trellis": {"heads": 2}}
    hybrid = evaluated_model(mixer=["transformer", "trellis"], mixer_config=fields, name="hybrid")
    arrays = inspect(hybrid, IDS)
    assert arrays["layers"].tolist() == [1]
    assert arrays["keys_write_norm"].shape == (1, 2, len(IDS))
    final = hybrid.network.read(torch.tensor([IDS])).states[1].memory
    assert close(arrays["keys_memory_norm"][0, :, -1], final.keys[0].norm(dim=(-2, -1)))
    with pytest.raises(ValueError, match=r"layer must be one of .* hybrid, 1; got 0"):
        inspection.run(hybrid, TEXT, None, layer=0)


def test_special_and_broken_tokens_have_texts():
    tokenizer = model_of().tokenizer
    end = tokenizer.end_of_document
    texts = token_texts(tokenizer, [end, 97, 0xC3])
    assert texts[0]
    assert texts[1:] == ["a", "c3"]


def inspected(*arguments, **options):
    """Runs the command's task and prints its report: the record, the arrays' file, the picture."""
    report = inspection.run(*arguments, **options)
    show(report)
    return report.found, *report.files


def test_the_command_keeps_arrays_and_a_record(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(inspection, "draw", lambda path, *_, **place: drawn.append(place))
    model = model_of(separate_gates=True)
    options = {"tokens": 20, "layer": 1, "head": 0, "source": "a book"}
    record, kept, picture = inspected(model, TEXT, tmp_path, **options)
    out = capsys.readouterr().out
    assert "half-life of the fastest head" in out
    assert str(picture) in out
    (written,) = kept.parent.glob("*.json")
    assert written.stem == kept.stem
    assert picture.name == f"{kept.stem}-layer-1-head-0.png"
    assert kept.stem.startswith("small-trellis-")
    assert record["note"]["source"] == "a book"
    arrays = inspection.load(kept)
    for memory in PASSES:
        for name in QUANTITIES:
            assert arrays[f"{memory}_{name}"].shape == (2, 2, 20)
    for name in RECALLS:
        assert arrays[name].shape == (2, 2, 20, 20)
    ids = [model.tokenizer.end_of_document, *IDS[:19]]
    assert arrays["ids"].tolist() == ids
    assert "".join(arrays["tokens"][1:]) == TEXT[:19]
    json.dumps(record, allow_nan=False)

    # What is there is not measured again, and what is missing is. Another layer, another name of
    # the model and another end of the text beyond what is read make no difference.
    before = kept.stat().st_mtime_ns
    for change in ({}, {"layer": 0}, {"layer": None, "head": None}):
        found = inspected(model, TEXT + "!", tmp_path, **{**options, **change})
        assert (found[0], found[1]) == (record, kept)
    model.name = "renamed"
    assert inspected(model, TEXT, tmp_path, **options)[1] == kept
    assert kept.stat().st_mtime_ns == before
    kept.unlink()
    assert inspected(model, TEXT, tmp_path, **options)[0] == record
    assert kept.is_file()
    assert drawn[0] == {"layer": 1, "head": 0}
    assert inspected(model, "The" + TEXT[3:], tmp_path, **options)[1] != kept


def test_the_summary_is_of_the_arrays():
    model = forgetful([0.5, 0.2], [0.9, 0.1])
    arrays = inspect(model, IDS)
    found = inspection.summary(arrays)[1]
    assert (found["layer"], found["mode"]) == (1, "exact")
    keys = found["keys"]
    assert keys["forget_gate"] == pytest.approx((math.exp(-0.9) + math.exp(-0.1)) / 2)
    assert keys["half_life_of_fastest_head"] == pytest.approx(math.log(2) / 0.9, rel=1e-4)
    assert keys["half_life_of_slowest_head"] == pytest.approx(math.log(2) / 0.1, rel=1e-4)
    power = arrays["keys_target_power"][1].sum()
    for when in ("before", "decayed", "after"):
        expected = arrays[f"keys_error_{when}"][1].sum() / power
        assert keys[f"error_{when}"] == pytest.approx(expected, rel=1e-5)
    for name in ("step_size", "write_norm"):
        assert keys[name] == pytest.approx(arrays[f"keys_{name}"][1].mean(), rel=1e-5)
    for name in ("memory_norm", "effective_rank"):
        last = arrays[f"keys_{name}"][1, :, -1].mean()
        assert keys[f"{name}_at_end"] == pytest.approx(last, rel=1e-5)
    kept = inspection.summary(inspect(model_of(forget_gate=False), IDS))[0]["keys"]
    assert kept["half_life_of_fastest_head"] is kept["half_life_of_slowest_head"] is None


@pytest.fixture
def axes_of(monkeypatch):
    """Draws arrays; gives all axes by title, images by title, and all texts of the picture."""

    def drawn(arrays, **options):
        whole = []

        @contextlib.contextmanager
        def figure(path, **style):
            made, axis = plt.subplots(layout="constrained", **style)
            whole.append(made)
            yield axis

        monkeypatch.setattr(picture, "figure", figure)
        picture.draw(None, arrays, "mine", **options)
        parts = [whole[0], *whole[0].subfigs]
        texts = [text.get_text() for part in parts for text in part.texts]
        texts += [part.get_suptitle() for part in parts]
        texts += [part.get_supxlabel() for part in parts if part._supxlabel]
        axes = [axis for axis in whole[0].get_axes() if axis.get_label() != "<colorbar>"]
        return axes, texts

    yield drawn
    plt.close("all")


def titled(axes, title):
    return [a for a in axes if title in a.get_title() or title in a.get_title("left")]


def line(axis, label):
    (found,) = [one for one in axis.get_lines() if one.get_label() == label]
    return found.get_ydata()


def test_curves_are_the_arrays(axes_of):
    arrays = inspect(model_of(separate_gates=True), IDS)
    axes, texts = axes_of(arrays)
    for quantity, title, scale in (
        ("forget_gate", "Forget gate", 100), ("step_size", "Step size", 1),
    ):  # fmt: skip
        (axis,) = titled(axes, title)
        for memory in PASSES:
            for layer in (0, 1):
                mean = scale * arrays[f"{memory}_{quantity}"][layer].mean(0)
                found = line(axis, f"layer {layer}, {memory}")
                np.testing.assert_allclose(found, mean, rtol=1e-5)
    for memory in PASSES:
        (axis,) = titled(axes, f"Error for each token, {memory} (mean of all layers)")
        power = arrays[f"{memory}_target_power"]
        for when in ("before", "after"):
            mean = 100 * (arrays[f"{memory}_error_{when}"] / power).mean((0, 1))
            np.testing.assert_allclose(line(axis, f"{when} its write"), mean, rtol=1e-5)
    assert any("writes every token into a memory" in text for text in texts)
    ticks = titled(axes, "Forget gate")[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks][:5] == ["t", "h", "e", "\u2423", "c"]  # every one
    # The heads of one layer, and one of them.
    axes, _ = axes_of(arrays, layer=1, head=0)
    (axis,) = titled(axes, "Error for each token, keys (layer 1, head 0)")
    after = 100 * arrays["keys_error_after"][1, 0] / arrays["keys_target_power"][1, 0]
    np.testing.assert_allclose(line(axis, "after its write"), after, rtol=1e-5)
    (axis,) = titled(axes, "Step size of layer 1")
    np.testing.assert_allclose(line(axis, "head 0, values"), arrays["values_step_size"][1, 0])


def test_gates_of_both_memories_are_drawn_once(axes_of):
    axes, _ = axes_of(inspect(model_of(form="paper"), IDS))
    for title in ("Forget gate", "Step size"):
        (axis,) = titled(axes, title)
        assert [one.get_label() for one in axis.get_lines()] == ["layer 0", "layer 1"]
    # The steps of normalised LMS differ, the gates do not.
    axes, _ = axes_of(inspect(model_of(form="paper", lms_step=True), IDS))
    assert len(titled(axes, "Forget gate")[0].get_lines()) == 2
    assert len(titled(axes, "Step size")[0].get_lines()) == 4


def test_images_show_the_slowest_and_the_fastest_heads(axes_of):
    arrays = inspect(forgetful([0.5, 0.2], [0.9, 0.1]), IDS)
    axes, _ = axes_of(arrays)
    shown = titled(axes, "half-life")
    names = [axis.get_title().partition(":")[0] for axis in shown]
    places = [(0, 1), (1, 1), (0, 0), (1, 0)]  # above the slowest, below the fastest
    said = ["slowest", "slowest", "fastest", "fastest"]
    assert names == [f"layer {a}, head {b} ({which})" for (a, b), which in zip(places, said)]
    for axis, place in zip(shown, places):
        left = 100 * retention(arrays["keys_forget_gate"][place], arrays["probes"])
        found = axis.images[0].get_array().filled(np.nan)
        np.testing.assert_allclose(found, left, rtol=1e-6)
        assert np.isnan(found[np.tril_indices(len(found), -1)]).all()  # not yet written
    axes, _ = axes_of(arrays, layer=0)
    names = [axis.get_title().partition(":")[0] for axis in titled(axes, "half-life")]
    assert names == ["layer 0, head 1", "layer 0, head 0"]  # the slowest first


def test_layers_that_are_left_out_are_told(axes_of):
    arrays = inspect(model_of(), IDS[:9])
    many = {
        name: np.concatenate([value] * 3) if value.shape[:1] == (2,) else value
        for name, value in arrays.items()
    }
    many["layers"] = many["recall_layers"] = np.arange(6)
    axes, texts = axes_of(many)
    assert any("3 of 6 layers" in text for text in texts)
    assert len(titled(axes, "half-life")) == 6
    _, texts = axes_of(many, layer=4)
    assert not any(" of 6" in text for text in texts)


def test_long_texts_are_shown_over_age(axes_of):
    arrays = inspect(forgetful([0.5, 0.2], [0.9, 0.1]), IDS * 3, probes=30, rank_every=50)
    axes, texts = axes_of(arrays)
    image = titled(axes, "layer 1, head 1 (slowest)")[0].images[0].get_array()
    assert image.shape == (30, 28)  # four half-lives of 6.9 tokens: 27
    np.testing.assert_allclose(image[0], 100 * np.exp(-0.1 * np.arange(28)), rtol=1e-3)
    assert any("tokens read since the write" in text for text in texts)


def test_a_single_token_can_be_drawn(axes_of):
    axes, _ = axes_of(inspect(model_of(), IDS[:1]), layer=1, head=0)
    assert len(titled(axes, "half-life")) == 1


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("$x^ a", {}),
        (TEXT * 3, {"layer": 1, "head": 0, "probes": 9, "rank_every": 50}),
    ],
)
def test_pictures(tmp_path, text, options):
    content = inspected(model_of(), text, tmp_path, **options)[2].read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(content[n : n + 4], "big") for n in (16, 20))
    assert width == 1800
    assert 1000 < height < 1600
    assert len(content) > 50_000


def test_what_cannot_be_inspected_is_an_error(tmp_path):
    model = model_of()
    with pytest.raises(ValueError, match="the text is empty"):
        inspection.run(model, "", tmp_path)
    with pytest.raises(ValueError, match="no tokens"):
        inspect(model, [])
    with pytest.raises(ValueError, match=r"layer must be one of .* 0, 1; got 2"):
        inspection.run(model, TEXT, tmp_path, layer=2)
    with pytest.raises(ValueError, match=r"head must be from 0 to 1 in layer 0; got 5"):
        inspection.run(model, TEXT, tmp_path, layer=0, head=5)
    with pytest.raises(ValueError, match="head 1 needs a layer"):
        inspection.run(model, TEXT, tmp_path, head=1)
    with pytest.raises(ValueError, match="no Trellis layer to inspect: its mixers are mamba2"):
        inspection.run(evaluated_model("mamba2"), TEXT, tmp_path)
    gpt2 = open_model(str(save_gpt2(tmp_path / "gpt2")))
    with pytest.raises(ValueError, match=r"gpt2 has no Trellis layer .* GPT2LMHeadModel"):
        inspection.run(gpt2, TEXT, tmp_path)
    assert not (tmp_path / "inspect").exists()
    asked = CliRunner().invoke(app, ["eval", "inspect", str(tmp_path / "gpt2")])
    assert "either a TEXT or --file FILE" in str(asked.exception)
