"""The forecaster: shapes, normalisation, channels, mixers, and configurations that are refused."""

import dataclasses

import pytest
import torch

from trellis.forecasting import ForecastConfig, ForecastModel
from trellis.forecasting.model import match_parameters
from trellis.mixers import MIXERS

SMALL = {"horizon": 5, "lookback": 24, "patch": 4, "dim": 16, "layers": 2, "heads": 2}


def shaken(**given):
    """A small forecaster whose maps, which start as zero, are not."""
    model = ForecastModel(ForecastConfig(**{**SMALL, **given})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("normalizer", ["window", "running"])
def test_every_mixer_forecasts_and_learns(mixer, normalizer):
    model = shaken(mixer=mixer, normalizer=normalizer, quantiles=(0.1, 0.5, 0.9))
    out = model(torch.randn(2, 24, 3))
    assert out.shape == (2, 5, 3, 3)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("normalizer", ["window", "running"])
def test_a_shifted_and_stretched_series_has_a_shifted_and_stretched_forecast(normalizer):
    model = shaken(normalizer=normalizer).double()
    rows = torch.randn(2, 24, 3, dtype=torch.float64)
    moved = model(1000 * rows + 70)
    # Not exact: a small number is added to the variance of a normaliser.
    assert torch.allclose(moved, 1000 * model(rows) + 70, rtol=1e-3, atol=1.0)


def test_a_constant_series_stays_constant_at_the_start_of_training():
    model = ForecastModel(ForecastConfig(**SMALL)).eval()
    out = model(torch.full((1, 24, 2), 7.0))
    assert torch.allclose(out, torch.full_like(out, 7.0))


@pytest.mark.parametrize("given", [{}, {"by_channel": True, "channels": 3}])
def test_channels_are_independent(given):
    model = shaken(**given)
    rows = torch.randn(2, 24, 3)
    other = rows.clone()
    other[..., 0] = torch.randn(2, 24)
    same, changed = model(rows), model(other)
    assert torch.equal(same[:, :, 1:], changed[:, :, 1:])
    assert not torch.allclose(same[:, :, 0], changed[:, :, 0])


def test_with_mix_channels_they_are_not_and_at_the_start_they_are():
    given = {"mix_channels": True, "channels": 3}
    rows = torch.randn(2, 24, 3)
    other = rows.clone()
    other[..., 0] = torch.randn(2, 24)
    assert not torch.allclose(shaken(**given)(rows)[:, :, 1], shaken(**given)(other)[:, :, 1])
    start = ForecastModel(ForecastConfig(**SMALL, **given)).eval()
    assert torch.equal(start(rows)[:, :, 1], start(other)[:, :, 1])


def test_by_channel_treats_channels_differently():
    rows = torch.randn(2, 24, 1).expand(-1, -1, 3)
    out = shaken(by_channel=True, channels=3)(rows)
    assert not torch.allclose(out[:, :, 0], out[:, :, 1])
    plain = shaken()(rows)
    assert torch.allclose(plain[:, :, 0], plain[:, :, 1], atol=1e-6)


def test_a_lookback_that_patches_do_not_fill():
    assert shaken(lookback=23)(torch.randn(1, 23, 1)).shape == (1, 5, 1, 1)


def test_dropout_acts_in_training_only():
    model = shaken(dropout=0.5)
    rows = torch.randn(1, 24, 1)
    assert torch.equal(model(rows), model(rows))
    model.train()
    assert not torch.equal(model(rows), model(rows))


@pytest.mark.parametrize("mixer", MIXERS)
def test_mixers_get_equally_many_parameters(mixer):
    def count(config):
        return sum(p.numel() for p in ForecastModel(config).parameters())

    base = ForecastConfig(lookback=96, horizon=96, dim=32)
    other = ForecastConfig(**{**dataclasses.asdict(base), "mixer": mixer})
    assert abs(count(match_parameters(other, count(base))) / count(base) - 1) < 0.01


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mixer": "treliss"}, "mixer must be one of .*; got 'treliss'; did you mean 'trellis'"),
        ({"mixer_config": {"slot": 3}}, "has no field 'slot'; did you mean 'slots'"),
        ({"normalizer": "batch"}, "normalizer must be one of window, running; got 'batch'"),
        ({"horizon": 0}, "horizon must be a whole number of at least 1; got 0"),
        ({"half_life": 0}, "half_life must be a number above 0; got 0"),
        ({"quantiles": (0.9, 0.5)}, "quantiles must rise between 0 and 1"),
        ({"quantiles": (0.1, 0.9)}, "have 0.5 among them"),
        ({"quantiles": "often"}, "quantiles must rise"),
        ({"patch": 25}, "patch must be at most the lookback, 24 rows; got 25"),
        ({"mix_channels": True}, "mix_channels needs channels"),
        ({"by_channel": True}, "by_channel needs channels"),
        ({"normalizer": "running", "past": 1}, "reads the series alone; got past=1"),
    ],
)
def test_bad_configurations_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ForecastConfig(**{**SMALL, **given})


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="rows must be the lookback, 24 rows; got 20"):
        shaken()(torch.randn(1, 20, 1))
    with pytest.raises(ValueError, match="is for 3 channels; got 2 series"):
        shaken(by_channel=True, channels=3)(torch.randn(1, 24, 2))
    with pytest.raises(ValueError, match="trained with normalizer='running'"):
        shaken().init_state(1)
