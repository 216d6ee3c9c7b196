"""Streams: equal to the definition over all rows at once, saved, forked, and bounded."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tests.forecasting.test_model import shaken

from trellis.forecasting import Forecaster, StreamingForecaster
from trellis.forecasting.model import VARIANCE_FLOOR
from trellis.mixers import MIXERS
from trellis.models import decoder
from trellis.models.decoder import BlockSteps


def forecaster(channels=2, **given):
    model = shaken(normalizer="running", half_life=10.0, **given)
    return Forecaster(model, {f"c{n}": (5.0 * n, 2.0 + n) for n in range(channels)})


def definition(forecaster, rows):
    """The forecast after rows [T, C], from the definition of the running normaliser, in fp64.

    Every patch is normalised by the weighted mean and deviation of all rows up to its end, written
    out; the blocks read all patches at once.
    """
    model, config = forecaster.model.double(), forecaster.config
    scaled = torch.from_numpy(forecaster.scaler().apply(rows)).T

    def level(end):
        weights = 2.0 ** (-torch.arange(end - 1, -1, -1, dtype=torch.float64) / config.half_life)
        weights /= weights.sum()
        mean = (scaled[:, :end] * weights).sum(1, keepdim=True)
        variance = ((scaled[:, :end] - mean).square() * weights).sum(1, keepdim=True)
        return mean, (variance + VARIANCE_FLOOR).sqrt()

    length = scaled.shape[1]
    ends = list(range(config.patch, length + 1, config.patch))
    if length % config.patch:
        ends.append(length)
    patches = []
    for end in ends:
        mean, scale = level(end)
        patch = (scaled[:, max(0, end - config.patch) : end] - mean) / scale
        patches.append(torch.nn.functional.pad(patch, (config.patch - patch.shape[1], 0)))
    x = model.embed(torch.stack(patches, 1))
    for block in model.blocks:
        x, _ = block(x)
    hidden = model.norm(x)
    mean, scale = level(length)
    lookback = (scaled[:, -config.lookback :] - mean) / scale
    lookback = torch.nn.functional.pad(lookback, (config.lookback - lookback.shape[1], 0))
    out = model._head(hidden[:, -config.head_patches :], lookback)
    out = out * scale[..., None] + mean[..., None]  # [C, H, outputs]
    undone = forecaster.scaler().undo(out.permute(1, 2, 0).detach().numpy())
    model.float()
    return undone.swapaxes(1, 2)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_stream_equals_the_batch_computation(mixer):
    """1e-5 of the scale of the numbers, after any number of rows, in any portions."""
    made = forecaster(mixer=mixer)
    rows = np.random.default_rng(0).normal(size=(90, 2)).cumsum(0)
    stream = StreamingForecaster(made)
    at = 0
    for portion in (1, 2, 9, 33, 17, 28):
        stream.observe(rows[at : at + portion])
        at += portion
        expected = definition(made, rows[:at])
        error = np.abs(stream.forecast() - expected).max() / np.abs(expected).max()
        assert error < 1e-5, f"{error:.1e} after {at} rows"
    assert at == stream.seen == 90


@pytest.mark.parametrize("given", [{}, {"mix_channels": True, "channels": 2}])
def test_a_patch_is_read_in_one_compiled_call(given, monkeypatch):
    """Where the decoder's kernel can be, and without channels that are mixed between blocks."""
    read, taken = BlockSteps.read, []

    def counted(*arguments):
        found = read(*arguments)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(BlockSteps, "read", counted)
    model = shaken(normalizer="running", half_life=10.0, **given)
    made = Forecaster(model, {"a": (0.0, 1.0), "b": (5.0, 2.0)})
    rows = np.random.default_rng(2).normal(size=(30, 2))
    found = []
    for choice in ("auto", "torch"):
        monkeypatch.setenv(decoder.VARIABLE, choice)
        stream = StreamingForecaster(made)
        for row in rows:
            stream.observe(row)
        found.append(stream.forecast())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-5)
    native = not decoder.missing_kernel()
    times = 0 if given else 30 // 4 + 1  # a patch has 4 rows; the forecast reads one more
    assert taken == times * [native] + times * [False]
    made.model.train()
    with torch.no_grad():
        made.model.forecast(stream.state)  # its dropout is for PyTorch
    assert len(taken) == 2 * times


def test_streams_of_one_forecaster_in_several_threads():
    made = forecaster(channels=3)
    rows = np.random.default_rng(3).normal(size=(4, 120, 3)).cumsum(1)

    def forecasts(part):
        stream, found = StreamingForecaster(made), []
        for row in part:
            stream.observe(row)
            found.append(stream.forecast())
        return found

    alone = [forecasts(part) for part in rows]
    with ThreadPoolExecutor(len(rows)) as pool:
        together = list(pool.map(forecasts, rows))
    np.testing.assert_array_equal(alone, together)


def test_a_stream_follows_a_forecaster_that_is_changed(monkeypatch):
    """Its weights, and a norm that is put in the place of another."""
    made = forecaster()
    stream = StreamingForecaster(made)
    rows = np.random.default_rng(4).normal(size=(9, 2))
    stream.observe(rows[0])
    before = stream.forecast()
    norm = type(made.model.norm)(16, 1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-2, 2, 16))
        made.model.blocks[1].mlp.up_proj.weight.mul_(-1)
    made.model.norm = norm
    found = []
    for choice in ("auto", "bf16", "torch"):  # the decoder's bf16 is for language models
        monkeypatch.setenv(decoder.VARIABLE, choice)
        found.append(stream.forecast())
    assert not np.allclose(found[0], before)
    np.testing.assert_allclose(found[0], found[2], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[0], found[1])
    monkeypatch.setenv(decoder.VARIABLE, "auto")
    torch.set_default_dtype(torch.float64)
    try:
        np.testing.assert_array_equal(stream.forecast(), found[0])
    finally:
        torch.set_default_dtype(torch.float32)


def test_long_portions_are_read_in_segments():
    made = forecaster()
    rows = np.random.default_rng(1).normal(size=(2600, 2))
    whole, portions = StreamingForecaster(made), StreamingForecaster(made)
    whole.observe(rows)
    for part in np.array_split(rows, 40):
        portions.observe(part)
    assert np.allclose(whole.forecast(), portions.forecast(), rtol=1e-5, atol=1e-5)


def test_training_sees_the_forecasts_of_a_stream():
    model = shaken(normalizer="running", half_life=10.0)
    rows = torch.randn(3, 31)
    places = torch.tensor([0, 2, 6])
    found = model.forecasts_within(rows, places)
    for number, end in enumerate([4, 12, 28, 31]):
        expected = model.forecast(model.observe(rows[:, :end], model.init_state(3)))
        assert torch.allclose(found[:, number], expected, rtol=1e-5, atol=1e-5)


def test_the_state_does_not_grow_and_forecasting_does_not_change_it():
    stream = StreamingForecaster(forecaster())
    rows = np.random.default_rng(0).normal(size=(300, 2))
    stream.observe(rows[:50])
    size = stream.nbytes
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
              for _, t in stream._tensors()}  # fmt: skip
    assert sum(stored.values()) == size  # no part is a view of all rows that were read
    once = stream.forecast()
    assert np.array_equal(once, stream.forecast())
    stream.observe(rows[50:])
    assert stream.nbytes == size


def test_quantiles_rise():
    stream = StreamingForecaster(forecaster(quantiles=(0.1, 0.5, 0.9)))
    stream.observe(np.random.default_rng(0).normal(size=(50, 2)))
    assert (np.diff(stream.forecast(), axis=-1) >= 0).all()


def test_saved_loaded_and_forked_streams_go_on_alike(tmp_path):
    made = forecaster()
    rows = np.random.default_rng(0).normal(size=(60, 2))
    stream = StreamingForecaster(made)
    stream.observe(rows[:33])
    stream.save(tmp_path / "state.safetensors")
    fork = stream.fork()
    loaded = StreamingForecaster.load(tmp_path / "state.safetensors", made)
    before = fork.forecast()
    stream.observe(rows[33:])
    assert np.array_equal(fork.forecast(), before)
    for other in (fork, loaded):
        assert other.seen == 33
        other.observe(rows[33:])
        assert np.array_equal(other.forecast(), stream.forecast())


def test_a_state_of_another_forecaster_is_refused(tmp_path):
    made = forecaster()
    stream = StreamingForecaster(made)
    stream.observe(np.ones((5, 2)))
    path = tmp_path / "state.safetensors"
    stream.save(path)
    message = "another configuration, scale or other weights"
    with pytest.raises(ValueError, match=message):
        StreamingForecaster.load(path, forecaster())  # other weights
    with pytest.raises(ValueError, match=message):
        StreamingForecaster.load(path, Forecaster(made.model, {"c0": (0.0, 1.0), "c1": (5.0, 3.0)}))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="has been changed"):
        StreamingForecaster.load(path, made)
    path.write_bytes(bytes(data[:100]))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        StreamingForecaster.load(path, made)
    with pytest.raises(FileNotFoundError, match="no stream at"):
        StreamingForecaster.load(tmp_path / "none", made)
    made.save(path)
    with pytest.raises(ValueError, match="not one of a trellis-stream"):
        StreamingForecaster.load(path, made)


def test_bad_rows_are_refused_and_change_nothing():
    stream = StreamingForecaster(forecaster())
    with pytest.raises(ValueError, match="at least one row"):
        stream.forecast()
    stream.observe([1.0, 2.0])
    before = stream.forecast()
    with pytest.raises(ValueError, match=r"shape \[n, 2\].*got \[3, 3\]"):
        stream.observe(np.ones((3, 3)))
    for wrong in ([["a", "b"]], [[1.0], [1.0, 2.0]], {"c0": 1.0}):
        with pytest.raises(ValueError, match="rows must be numbers, 2 in each row; got a"):
            stream.observe(wrong)
    with pytest.raises(ValueError, match="row 1, column 'c1' is nan"):
        stream.observe([[1.0, 2.0], [1.0, np.nan]])
    with pytest.raises(ValueError, match=r"row 0, column 'c0' is 1e\+45: repeat the last number"):
        stream.observe([1e45, 2.0])
    assert stream.seen == 1
    assert np.array_equal(stream.forecast(), before)


def test_a_forecaster_of_windows_cannot_stream():
    with pytest.raises(
        ValueError, match="trained with normalizer='running'; this one has 'window'"
    ):
        StreamingForecaster(Forecaster(shaken(), {"a": (0.0, 1.0)}))


def test_a_stream_with_a_season_begins_at_any_place_of_it(tmp_path):
    """Rows without their usual course, forecast, plus that course: the same forecast."""
    plain = forecaster()
    cycle = np.array([[0.0, 4.0], [2.0, -4.0], [-2.0, 0.0]])
    made = Forecaster(plain.model, plain.scalers, cycle=cycle)
    rows = np.random.default_rng(1).normal(size=(31, 2))
    stream, reference = StreamingForecaster(made, place=2), StreamingForecaster(plain)
    stream.observe(rows[:20] + cycle[(2 + np.arange(20)) % 3])
    stream.save(tmp_path / "s.safetensors")
    stream = StreamingForecaster.load(tmp_path / "s.safetensors", made).fork()
    stream.observe(rows[20:] + cycle[(22 + np.arange(11)) % 3])
    reference.observe(rows)
    usual = cycle[(33 + np.arange(made.config.horizon)) % 3][:, :, None]
    np.testing.assert_allclose(
        stream.forecast(), reference.forecast() + usual, rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ValueError, match="another configuration, scale"):
        StreamingForecaster.load(tmp_path / "s.safetensors", plain)
    made.about.update(zone=False, every={"seconds": 3600.0})
    early = StreamingForecaster(made, start="1999-03-01 05:00")  # before 2001
    assert early.place == early.fork().place == StreamingForecaster(made, place=5).place == 2
    with pytest.raises(ValueError, match="give start or place, not both"):
        StreamingForecaster(made, start="1999-03-01", place=1)
