"""Training, and `trellis forecast` from a CSV file to forecasts, tables and pictures."""

import contextlib
import csv
import datetime as dt
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from trellis.cli import app
from trellis.cli.forecast import split_settings
from trellis.forecasting import (
    FitOptions,
    ForecastConfig,
    Forecaster,
    ForecastModel,
    StreamingForecaster,
    fit,
    fitting,
    forecaster,
)
from trellis.forecasting.fitting import APART, solve_linear, validate
from trellis.forecasting.series import Series, Step
from trellis.forecasting.windows import Errors, Windows, pinball

SMALL = ["--set", "dim=16", "--set", "layers=1", "--set", "heads=2", "--set", "patch=4"]
QUICK = ["--set", "steps=6", "--set", "check_every=3", "--set", "batch=16"]


def waves(rows, channels=2):
    """Sines with some noise, each with a period of its own."""
    noise = np.random.default_rng(0).normal(size=(rows, channels))
    time = np.arange(rows)[:, None]
    return np.sin(2 * np.pi * time / np.array([12, 20])[:channels]) + 0.1 * noise


def wide(path, rows=200, start=dt.datetime(2024, 1, 1)):
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["when", "load", "heat"])
        for n, row in enumerate(waves(rows)):
            writer.writerow([start + dt.timedelta(hours=n), *(f"{x:.4f}" for x in 50 + 9 * row)])
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["forecast", *map(str, arguments)])


def good(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, f"{result.output} {result.exception}"
    return result


def windows(lookback=24, horizon=6, rows=400):
    values = torch.from_numpy(waves(rows).astype(np.float32))
    cut = int(0.8 * rows)
    train = Windows(values, [(0, cut)], lookback, horizon)
    return train, Windows(values, [(cut - lookback, rows)], lookback, horizon)


@pytest.mark.parametrize("normalizer", ["window", "running"])
@pytest.mark.parametrize("quantiles", [(), (0.1, 0.5, 0.9)])
def test_training_learns(normalizer, quantiles):
    torch.manual_seed(0)
    config = ForecastConfig(
        horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2, normalizer=normalizer,
        quantiles=quantiles, half_life=24.0, linear=False,
    )  # fmt: skip
    model = ForecastModel(config)
    train, validation = windows()
    options = FitOptions(
        steps=60, batch=64, learning_rate=1e-2, check_every=20, context=96, solve=False
    )
    start = validate(model.eval(), validation, options)
    found = fit(model, train, validation, options)
    assert found.best.mse < start.mse / 2
    assert validate(model, validation, options).mse == pytest.approx(found.best.mse)
    assert [look.step for look in found.looks] == [0, 20, 40, 60]
    assert found.looks[0][2:] == start


def test_a_look_at_a_stream_takes_so_many_forecasts(monkeypatch):
    """Spread over the part, and over the streams of a long file."""
    config = ForecastConfig(
        horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2, normalizer="running"
    )
    model = ForecastModel(config).eval()
    values = torch.randn(400, 1)
    asked = []
    plain = model.forecasts_within
    monkeypatch.setattr(
        model, "forecasts_within", lambda rows, at: (asked.append(at.tolist()), plain(rows, at))[1]
    )
    for spans, counts in (
        ([(296, 400)], [4]),
        ([(0, 200), (200, 400)], [2, 2]),
        ([(0, 300), (300, 400)], [3, 1]),  # a longer stream has more
        ([(0, 40), (40, 200), (200, 240), (240, 400)], [1, 1, 2]),  # and a short one may have none
    ):
        part = Windows(values, spans, 24, 6)
        every = validate(model, part, FitOptions(context=24, validation_windows=None))
        assert every == validate(model, part, FitOptions(context=24, validation_windows=500))
        whole = asked[: len(spans)]
        asked.clear()
        assert every != validate(model, part, FitOptions(context=24, validation_windows=4))
        assert [len(few) for few in asked] == counts
        assert asked[0][0] == whole[0][0]
        assert asked[-1][-1] == whole[-1][-1]
        asked.clear()


@pytest.mark.parametrize(
    "given",
    [{}, {"by_channel": True, "channels": 2}, {"normalizer": "running", "half_life": 24.0}],
)
def test_the_linear_map_starts_at_its_least_squares_solution(given):
    """From there, no small change of a weight makes the training error smaller."""
    config = ForecastConfig(horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2, **given)
    model = ForecastModel(config).eval()
    train, validation = windows()
    solve_linear(model, train, ridge=1e-9)
    assert validate(model, validation, FitOptions(context=96)).mse < 0.1
    if config.normalizer == "window":
        past, target = train.take(torch.arange(len(train)))
        loss = (model(past)[..., 0] - target).square().mean()
        (gradient,) = torch.autograd.grad(loss, [model.linear.weight])
        assert gradient.abs().max() < 1e-3


def test_the_distance_of_the_channels_maps_is_chosen_on_validation():
    config = ForecastConfig(
        horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2, by_channel=True, channels=2
    )
    model = ForecastModel(config).eval()
    train, validation = windows()
    errors = []

    def error():
        errors.append(validate(model, validation, FitOptions()).mse)
        return errors[-1]

    chosen = solve_linear(model, train, error)
    assert len(set(errors)) == len(errors) == len(APART)
    assert chosen == APART[errors.index(min(errors))]
    assert validate(model, validation, FitOptions()).mse == pytest.approx(min(errors))
    solve_linear(model, train)  # without a look at validation all channels share a map
    assert torch.equal(model.linear.weight[0], model.linear.weight[1])


def test_maps_of_their_own_are_the_solutions_of_their_channels(monkeypatch):
    """With hardly a weight on their distance, none can be changed for the better."""
    monkeypatch.setattr(fitting, "APART", (1e-9,))
    config = ForecastConfig(
        horizon=6, lookback=8, patch=4, dim=16, layers=1, heads=2, by_channel=True, channels=2
    )
    model = ForecastModel(config).eval()
    rows = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    for n in range(1, 400):  # one channel goes on as it is, the other swings
        rows[n] += torch.tensor([0.9, -0.7]) * rows[n - 1]
    train = Windows(rows, [(0, 400)], 8, 6)

    def gradient():
        past, target = train.take(torch.arange(len(train)))
        loss = (model(past)[..., 0] - target).square().mean()
        return torch.autograd.grad(loss, [model.linear.weight])[0].abs().amax((1, 2))

    solve_linear(model, train, lambda: 0.0, ridge=1e-9)
    assert gradient().max() < 1e-3
    solve_linear(model, train, ridge=1e-9)  # the shared map suits neither
    assert gradient().min() > 1e-2


def test_quantiles_spread_after_training():
    """Before the first step all quantiles are the same, which has the highest pinball loss."""
    config = ForecastConfig(
        horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2, quantiles=(0.1, 0.5, 0.9)
    )
    model = ForecastModel(config)
    values = torch.randn(400, 1, generator=torch.Generator().manual_seed(0))  # nothing to learn
    train, validation = (Windows(values, [part], 24, 6) for part in ((0, 320), (296, 400)))
    found = fit(model, train, validation, FitOptions(steps=40, batch=32, check_every=20))
    assert found.best.step > 0
    assert found.best.pinball == min(look.pinball for look in found.looks)
    lookback, target = validation.take(torch.arange(len(validation)))
    with torch.no_grad():
        out = model(lookback)
    low, _, high = out.unbind(-1)
    assert (high - low).mean() > 0.05
    assert float(pinball(out, target, config.quantiles)) == pytest.approx(found.best.pinball)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_solved_map_is_trained_at_its_own_rate(rate, monkeypatch):
    looks = iter(range(100, 0, -1))  # every look is better than the one before
    monkeypatch.setattr(fitting, "validate", lambda *arguments: Errors(next(looks), 1.0))
    config = ForecastConfig(horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2)
    model, solved = ForecastModel(config), ForecastModel(config)
    train, validation = windows()
    solve_linear(solved, train)
    options = FitOptions(steps=3, batch=16, check_every=3, linear_rate=rate)
    fit(model, train, validation, options)
    moved = (model.linear.weight - solved.linear.weight).abs().max()
    assert model.head.weight.abs().max() > 0
    assert (moved > 0) == (rate > 0)
    assert (model.linear.weight.grad is None) == (rate == 0)  # else it counts in the clipped norm
    assert moved <= 3 * rate * options.learning_rate * 1.1


def test_training_stops_early_and_keeps_the_best_weights():
    config = ForecastConfig(horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2)
    model = ForecastModel(config)
    train, validation = windows()
    validation.values = validation.values.clone()
    validation.values[320:] = torch.randn(80, 2)  # nothing to be learned for
    options = FitOptions(steps=400, batch=32, learning_rate=1e-2, check_every=5, patience=3)
    found = fit(model, train, validation, options)
    assert found.looks[-1].step < 400
    assert found.best.mse == min(look.mse for look in found.looks)
    assert validate(model, validation, options).mse == pytest.approx(found.best.mse, rel=1e-5)


def test_the_weights_that_are_kept_are_a_running_mean(monkeypatch):
    train, validation = windows(rows=200)
    config = ForecastConfig(horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2)
    looks = []

    def weights_of(average):
        """The head's weights at each look of a training: those that are looked at."""
        looks.clear()
        torch.manual_seed(0)
        model = ForecastModel(config)

        def look(model, *arguments):
            looks.append(model.head.weight.clone())
            return Errors(100.0 - len(looks), 1.0)

        monkeypatch.setattr(fitting, "validate", look)
        options = FitOptions(steps=5, batch=16, check_every=1, average=average, solve=False)
        fit(model, train, validation, options)
        assert torch.equal(model.head.weight, looks[-1])
        return looks[1:]

    plain = weights_of(0.0)
    mean = plain[0]  # after the first step
    for number, (weight, found) in enumerate(zip(plain, weights_of(0.9))):
        if number:
            mean = mean + (1 - min(0.9, (1 + number) / (10 + number))) * (weight - mean)
        assert torch.allclose(found, mean, atol=1e-6), number
    with pytest.raises(ValueError, match="average must be a share"):
        FitOptions(average=1.5)


def test_a_seed_repeats_a_training():
    train, validation = windows(rows=200)
    losses = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model = ForecastModel(
            ForecastConfig(horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2, dropout=0.1)
        )
        options = FitOptions(steps=4, batch=16, check_every=2, seed=seed)
        losses.append([look.loss for look in fit(model, train, validation, options).looks])
    assert losses[0] == losses[1] != losses[2]


def test_a_training_that_diverges_says_so():
    train, validation = windows(rows=200)
    model = ForecastModel(ForecastConfig(horizon=6, lookback=24, patch=4, dim=16, heads=2))
    with torch.no_grad():
        model.embed.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="loss of step 1 is not finite; a smaller learning_rate"):
        fit(model, train, validation, FitOptions(steps=3, batch=8))


def test_the_pinball_loss_has_its_minimum_at_the_quantile():
    target = torch.randn(20_000)
    guesses = torch.linspace(-2, 2, 401)
    for level in (0.1, 0.5, 0.8):
        losses = [float(pinball(target.new_full((20_000, 1), float(g)), target, (level,)))
                  for g in guesses]  # fmt: skip
        best = float(guesses[int(np.argmin(losses))])
        assert best == pytest.approx(float(target.quantile(level)), abs=0.02)


def test_fit_and_predict_a_wide_file(tmp_path):
    data = wide(tmp_path / "data.csv")
    before = data.read_bytes()
    model, out, picture = (tmp_path / name for name in ("m.safetensors", "out.csv", "out.png"))
    sizes = ["--horizon", 5, "--lookback", 24, "--quantiles", "0.1,0.5,0.9"]
    good("fit", data, "--out", model, *sizes, *SMALL, *QUICK)
    good("predict", model, data, "--out", out, "--figure", picture)
    rows = list(csv.reader(out.open()))
    assert rows[0] == ["when", "load", "load-0.1", "load-0.9", "heat", "heat-0.1", "heat-0.9"]
    assert rows[1][0] == "2024-01-09 08:00:00"
    assert len(rows) == 6
    point, low, high = (float(cell) for cell in rows[1][1:4])
    assert low <= point <= high
    assert 35 < point < 65
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert data.read_bytes() == before
    printed = good("predict", model, data)
    assert printed.stdout == out.read_text()


def test_fit_and_predict_a_long_file_with_new_series(tmp_path):
    values = waves(120)
    lines = ["unique_id,ds,y"]
    for name, count in (("a", 120), ("b", 80)):
        lines += [f"{name},{dt.date(2024, 1, 1) + dt.timedelta(n)},{values[n, 0]:.4f}"
                  for n in range(count)]  # fmt: skip
    data = tmp_path / "long.csv"
    data.write_text("\n".join(lines))
    model = tmp_path / "m.safetensors"
    good("fit", data, "--out", model, "--horizon", 4, "--lookback", 24, "--quantiles", "none",
         *SMALL, *QUICK)  # fmt: skip
    other = tmp_path / "other.csv"
    other.write_text("\n".join(line.replace("b,", "new,") for line in lines))
    rows = list(csv.reader(good("predict", model, other).stdout.splitlines()))
    assert rows[0] == ["unique_id", "ds", "y"]
    assert [row[0] for row in rows[1:]] == ["a"] * 4 + ["new"] * 4
    ends = {
        "a": dt.date(2024, 1, 1) + dt.timedelta(119),
        "new": dt.date(2024, 1, 1) + dt.timedelta(79),
    }
    for number, row in enumerate(rows[1:]):
        assert row[1].startswith(str(ends[row[0]] + dt.timedelta(1 + number % 4)))
    # A new series is scaled by its own rows: ten times its numbers, ten times its forecast.
    cells = [line.split(",") for line in lines]
    large = [
        f"new,{when},{10 * float(y)}" if name == "b" else f"{name},{when},{y}"
        for name, when, y in cells
    ]
    other.write_text("\n".join(large))
    again = list(csv.reader(good("predict", model, other).stdout.splitlines()))
    for row, grown in zip(rows[5:], again[5:]):
        assert float(grown[2]) == pytest.approx(10 * float(row[2]), rel=1e-2)


def test_a_season_is_found_by_dates_and_forecast_at_the_right_hours(tmp_path):
    """A file that repeats its days exactly is forecast exactly, also from another hour."""
    usual = np.random.default_rng(0).normal(size=24) * 10
    start = dt.datetime(2024, 1, 1, 5)
    dates = [start + dt.timedelta(hours=n) for n in range(240)]
    lines = [f"{date},{50 + usual[date.hour]:.6f}" for date in dates]
    data, later = tmp_path / "data.csv", tmp_path / "later.csv"
    data.write_text("\n".join(["when,load", *lines]))
    later.write_text("\n".join(["when,load", *lines[100:]]))
    model = tmp_path / "m.safetensors"
    told = good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    assert "season: the usual course of 24 rows" in told.output
    assert Forecaster.load(model).season == 24
    for file in (data, later):
        rows = list(csv.reader(good("predict", model, file).stdout.splitlines()))
        wanted = [50 + usual[(5 + 240 + n) % 24] for n in range(5)]
        np.testing.assert_allclose([float(row[1]) for row in rows[1:]], wanted, atol=0.05)
    # Quiet days are followed by a quiet day: only a small part of the difference is left out.
    quiet = [f"{date},{50 + usual[date.hour] / 2:.6f}" for date in dates]
    data.write_text("\n".join(["when,load", *quiet]))
    rows = list(csv.reader(good("predict", model, data).stdout.splitlines()))
    wanted = [50 + usual[(5 + 240 + n) % 24] / 2 for n in range(5)]
    np.testing.assert_allclose([float(row[1]) for row in rows[1:]], wanted, atol=1.5)
    data.write_text("\n".join(["when,load", *lines]))
    for season, message in (("1", "must be a number of rows"), ("200", "needs at least two")):
        told = run("fit", data, "--out", tmp_path / "n", "--horizon", 5, "--lookback", 24,
                   "--season", season)  # fmt: skip
        assert told.exit_code
        assert message in str(told.exception)
    assert not (tmp_path / "n").exists()


def test_a_new_series_must_show_what_is_usual_in_its_season(tmp_path):
    """Too short, it is refused; long enough, a series that repeats its days is forecast exactly."""
    usual = np.random.default_rng(0).normal(size=24) * 10
    dates = [dt.datetime(2024, 1, 1) + dt.timedelta(hours=n) for n in range(240)]
    lines = [f"a,{date},{50 + usual[date.hour]:.6f}" for date in dates]
    data, other, model = (tmp_path / name for name in ("a.csv", "b.csv", "m.safetensors"))
    data.write_text("\n".join(["unique_id,ds,y", *lines]))
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    new = [line.replace("a,", "shop,", 1) for line in lines]
    other.write_text("\n".join(["unique_id,ds,y", *new[:47]]))
    assert "shop has 47 rows; at least 48 are needed" in str(run("predict", model, other).exception)
    other.write_text("\n".join(["unique_id,ds,y", *new[:53]]))
    rows = list(csv.reader(good("predict", model, other).stdout.splitlines()))
    wanted = [50 + usual[(53 + n) % 24] for n in range(5)]
    np.testing.assert_allclose([float(row[2]) for row in rows[1:]], wanted, atol=0.1)


def test_forecasts_keep_the_digits_of_numbers_with_a_large_offset(tmp_path):
    data = wide(tmp_path / "data.csv")
    rows = list(csv.reader(data.open()))
    lines = [f"{when},{1.7e9 + float(load):.4f}" for when, load, _ in rows[1:]]
    data.write_text("\n".join(["when,load", *lines]))
    model = tmp_path / "m.safetensors"
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    printed = list(csv.reader(good("predict", model, data).stdout.splitlines()))[1:]
    found = json.loads(good("predict", model, data, "--json").stdout)["forecasts"][0]["values"]
    np.testing.assert_allclose(
        [float(row[1]) for row in printed], [step[0][2] for step in found], rtol=0, atol=1e-4
    )


def test_columns_that_quantiles_would_repeat_are_refused(tmp_path):
    data = wide(tmp_path / "data.csv")
    data.write_text(data.read_text().replace("heat", "load-0.9", 1))
    sizes = ["--horizon", 5, "--lookback", 24, *SMALL, *QUICK]
    result = run("fit", data, "--out", tmp_path / "m", *sizes)
    assert "would have the column 'load-0.9' twice" in str(result.exception)
    good("fit", data, "--out", tmp_path / "m", *sizes, "--quantiles", "none")


@pytest.mark.parametrize("mixer", ["mamba2", "gsa", "trellis"])
def test_any_mixer_by_a_field_and_single_fields_of_it(tmp_path, mixer):
    data, model = wide(tmp_path / "data.csv"), tmp_path / "m.safetensors"
    more = ["--set", "mixer_config.slots=8"] if mixer == "trellis" else []
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK,
         "--set", f"mixer={mixer}", *more)  # fmt: skip
    config = Forecaster.load(model).config
    assert config.mixer == mixer
    assert config.mixer_config == ({"shape": "model", "slots": 8} if more else {})
    told = run("evaluate", data, "--set", f"mixer={mixer}", "--out", tmp_path / "runs")
    assert f"models chooses it; got mixer={mixer!r}" in str(told.exception)
    assert not (tmp_path / "runs").exists()


def test_trouble_in_columns_that_a_forecaster_does_not_use(tmp_path):
    data, model = wide(tmp_path / "data.csv"), tmp_path / "m.safetensors"
    lines = [line + ",windy" for line in data.read_text().splitlines()]
    data.write_text("\n".join([lines[0].replace("windy", "note"), *lines[1:]]))
    good("fit", data, "--out", model, "--columns", "heat", "--horizon", 5, "--lookback", 24,
         *SMALL, *QUICK)  # fmt: skip
    assert good("predict", model, data).stdout.startswith("when,heat,")


def test_a_file_that_appears_during_training_is_kept(tmp_path, monkeypatch):
    data, model = wide(tmp_path / "data.csv"), tmp_path / "m.safetensors"
    solve = fitting.solve_linear

    def another_program(*arguments):
        model.write_text("mine")
        return solve(*arguments)

    monkeypatch.setattr(fitting, "solve_linear", another_program)
    told = good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    assert model.read_text() == "mine"
    assert "m-2.safetensors" in told.output
    assert Forecaster.load(tmp_path / "m-2.safetensors").names == ["load", "heat"]


def test_a_streaming_forecaster_from_the_command_line(tmp_path):
    data = wide(tmp_path / "data.csv", start=dt.datetime(2024, 1, 1, 5))
    model = tmp_path / "m.safetensors"
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, "--streaming",
         *SMALL, *QUICK, "--set", "context=64")  # fmt: skip
    loaded = Forecaster.load(model)
    assert loaded.season == 24
    with data.open() as file:
        rows = [[float(x) for x in row[1:]] for row in list(csv.reader(file))[1:]]
    printed = list(csv.reader(good("predict", model, data).stdout.splitlines()))
    for given in (
        {"start": "2024-01-01 05:00"},
        {"start": dt.datetime(2024, 1, 1, 5)},
        {"start": np.datetime64("2024-01-01T05:00:00.000000000")},
        {"place": 24 * 10**30 + 5},
        {"place": np.int64(5)},
    ):
        stream = StreamingForecaster(loaded, **given)
        stream.observe(rows)
        stream.observe(np.empty((0, 2)))
        assert float(printed[1][1]) == pytest.approx(stream.forecast()[0, 0, 2], rel=1e-4)
    assert loaded.place_of(dt.date(2024, 1, 1)) % 24 == 0
    for given, message in (
        ({}, "season of 24 rows: give start, the date of the first row"),
        ({"start": 20240101}, "a date must be like 2024-12-31 23:50:00; got 20240101"),
        ({"place": -1}, "place must be a whole number of at least 0; got -1"),
        ({"start": pd.NaT}, "a date must be like 2024-12-31 23:50:00; got NaT"),
        ({"start": "yesterday"}, "a date must be like 2024-12-31 23:50:00; got 'yesterday'"),
        ({"start": "2024-01-01 05:00+02:00"}, "has an offset from UTC; the dates in training had"),
    ):
        with pytest.raises(ValueError, match=message):
            StreamingForecaster(loaded, **given)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (
            lambda text: text.replace("heat", "wind"),
            [],
            "must have the columns load, heat; it lacks",
        ),
        (lambda text: "\n".join(text.splitlines()[:20]), [], "has 19 rows; at least 24 are needed"),
        (lambda text: text, ["--columns", "load"], "must have the columns load, heat"),
        (lambda text: text.replace(":00:00", ":30:00", 1), [], "whole number of steps"),
    ],
)
def test_predict_refuses_files_that_do_not_fit(tmp_path, change, arguments, message):
    data = wide(tmp_path / "data.csv")
    model = tmp_path / "m.safetensors"
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    other = tmp_path / "other.csv"
    other.write_text(change(data.read_text()))
    result = run("predict", model, other, "--out", tmp_path / "out.csv", *arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert not (tmp_path / "out.csv").exists()


def test_predict_takes_its_columns_from_a_file_with_more(tmp_path):
    data = wide(tmp_path / "data.csv")
    model = tmp_path / "m.safetensors"
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    rows = list(csv.reader(data.open()))
    other = tmp_path / "other.csv"
    other.write_text("\n".join(f"{when},{heat},7,{load}" for when, load, heat in rows))
    other.write_text(other.read_text().replace("heat,7,load", "heat,wind,load", 1))
    assert good("predict", model, other).stdout == good("predict", model, data).stdout


def test_a_picture_shows_the_channel_that_is_forecast(tmp_path, monkeypatch):
    """Of a file that has more channels, in another order."""
    drawn = []

    class Axis:
        def plot(self, dates, values, **how):
            drawn.append(np.asarray(values))

        def __getattr__(self, name):
            return lambda *arguments, **how: None

    monkeypatch.setattr(forecaster, "figure", lambda *a, **how: contextlib.nullcontext(Axis()))
    dates = [dt.datetime(2024, 1, 1, hour) for hour in range(4)]
    series = Series(
        ["wind", "load"], dates, np.array([[n, 10.0 * n] for n in range(4)]), Step(seconds=3600)
    )
    found = forecaster.Forecast(["load"], dates[:2], np.full((2, 1, 1), 7.0), (), 0)
    forecaster.draw_forecast(found, series, tmp_path / "f.png")
    assert drawn[0].tolist() == [0.0, 10.0, 20.0, 30.0]
    assert drawn[1].tolist() == [7.0, 7.0]


@pytest.mark.parametrize(("first", "second"), [("", "+09:00"), ("+09:00", "")])
def test_dates_with_and_without_an_offset_are_not_mixed_up(tmp_path, first, second):
    data = wide(tmp_path / "data.csv")
    model, other = tmp_path / "m.safetensors", tmp_path / "other.csv"
    text = data.read_text()
    data.write_text(text.replace(":00:00,", f":00:00{first},"))
    other.write_text(text.replace(":00:00,", f":00:00{second},"))
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    assert "from UTC; those in training had" in str(run("predict", model, other).exception)


def test_forecasts_are_the_result_of_predict(tmp_path):
    data = wide(tmp_path / "data.csv")
    model = tmp_path / "m.safetensors"
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    printed = good("predict", model, data).stdout
    assert good("predict", model, data, "--quiet").stdout == printed
    found = json.loads(good("predict", model, data, "--json").stdout)
    (forecast,) = found["forecasts"]
    assert forecast["names"] == ["load", "heat"]
    row = printed.splitlines()[1].split(",")
    assert row[0] == forecast["dates"][0] == "2024-01-09 08:00:00"
    assert float(row[1]) == pytest.approx(forecast["values"][0][0][found["levels"].index(0.5)])


def test_predict_writes_nothing_where_one_path_is_wrong(tmp_path):
    data = wide(tmp_path / "data.csv")
    model = tmp_path / "m.safetensors"
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    before = sorted(tmp_path.iterdir())
    for out, picture, message in (
        ("o.csv", "none/f.png", "--figure must be in a folder"),
        ("o.csv", "data.csv/f.png", "--figure must be in a folder"),
        ("none/o.csv", "f.png", "--out must be in a folder"),
        ("same.png", "same.png", "must be two files"),
    ):
        paths = ["--out", tmp_path / out, "--figure", tmp_path / picture]
        assert message in str(run("predict", model, data, *paths).exception)
        assert sorted(tmp_path.iterdir()) == before


def test_numbers_that_fp32_cannot_hold_are_named(tmp_path):
    data = wide(tmp_path / "data.csv")
    model = tmp_path / "m.safetensors"
    good("fit", data, "--out", model, "--horizon", 5, "--lookback", 24, *SMALL, *QUICK)
    lines = data.read_text().splitlines()
    lines[-3] = lines[-3].rsplit(",", 1)[0] + ",1e200"
    data.write_text("\n".join(lines))
    for arguments in (("predict", model, data), ("fit", data, "--out", tmp_path / "n", *QUICK,
                      "--horizon", 5, "--lookback", 24)):  # fmt: skip
        found = str(run(*arguments).exception)
        assert "'heat' is 1e+200 at 2024-01-09 05:00:00, far too large" in found
    for number in ("1e200", "1e7"):  # in the training part, beside numbers of about 1
        lines[5] = lines[5].rsplit(",", 1)[0] + f",{number}"
        data.write_text("\n".join(lines[:-5]))
        arguments = ("fit", data, "--out", tmp_path / "n", *QUICK, "--horizon", 5, "--lookback", 24)
        found = str(run(*arguments).exception)
        assert f"'heat' is {float(number):g} at 2024-01-01 04:00:00, far too large" in found


@pytest.mark.parametrize(
    ("usual", "far", "drowned"),
    [
        (lambda n: 0.0 if n % 10 else 1 + n % 7, [1e6], True),  # the rain of a dry year, a fault
        (lambda n: 0.0 if n % 10 else 1 + n % 7, [], False),
        (lambda n: 0.5 + 0.01 * math.sin(n), [1e6, -3e6], True),
        (lambda n: (2000 if 18 <= n % 24 < 22 else 0.5) + 0.01 * math.sin(n), [], False),
        (lambda n: 5.0, [1e6], False),  # constant: there is nothing that would be lost
    ],
)
def test_faults_that_drown_all_other_numbers_are_refused(tmp_path, usual, far, drowned):
    """Far values that a channel often takes are no faults."""
    data = tmp_path / "data.csv"
    values = [usual(n) for n in range(400)]
    values[100 : 100 + len(far)] = far
    dates = [dt.datetime(2024, 1, 1) + dt.timedelta(hours=n) for n in range(400)]
    data.write_text("\n".join(["date,a", *(f"{d},{v}" for d, v in zip(dates, values))]))
    arguments = (data, "--out", tmp_path / "m", *SMALL, *QUICK, "--horizon", 5, "--lookback", 24)
    if not drowned:
        good("fit", *arguments)
        return
    found = str(run("fit", *arguments).exception)
    assert f"'a' is {max(far, key=abs):g} at 2024-01-05 0{3 + len(far)}:00:00, far too" in found
    assert not (tmp_path / "m").exists()


def test_by_channel_is_for_wide_files(tmp_path):
    data = tmp_path / "long.csv"
    dates = [dt.datetime(2024, 1, 1) + dt.timedelta(hours=n) for n in range(80)]
    data.write_text("\n".join(["unique_id,ds,y", *(f"a,{date},1" for date in dates)]))
    found = run("fit", data, "--out", tmp_path / "m", "--set", "by_channel=true").exception
    assert "by_channel and mix_channels are for wide files" in str(found)


def test_fit_refuses_before_it_trains(tmp_path):
    data = wide(tmp_path / "data.csv", 30)
    for arguments, message in [
        (["--out", tmp_path / "m"], "has 30 rows; at least 288 are needed"),
        (["--out", data], "--out must not be there yet"),
        (["--out", tmp_path / "no" / "m"], "there is no"),
        (["--out", tmp_path / "m", "--set", "dimm=3"], "did you mean 'dim'"),
        (["--out", tmp_path / "m", "--set", "dim"], "--set must be FIELD=VALUE"),
        (["--out", tmp_path / "m", "--quantiles", "0.1,0.9"], "have 0.5 among them"),
        (["--out", tmp_path / "m", "--sentinel", "x"], "--sentinel must be a number"),
        (["--out", tmp_path / "m", "--missing", "zero"], "missing must be one of refuse, last"),
        (["--out", tmp_path / "m", "--columns", "load,load"], "named once each; got 'load' twice"),
        (["--out", tmp_path / "m", "--set", "channels=5"], "--set cannot set channels"),
        (["--out", tmp_path / "m", "--set", "past=1"], "--set cannot set past"),
        (["--out", tmp_path / "m", "--set", "seed=1"], "--set cannot set seed"),
        (["--out", tmp_path / "m", "--set", "mixer_config=none"], "mixer_config must be a table"),
        (["--out", tmp_path / "m", "--set", "dropout=x"], "dropout must be a share from 0 to 1"),
        (["--out", tmp_path / "m", "--date-format", "%Q"], "date_format must be like"),
        (["--out", tmp_path / "m", "--date-format", "%Y%Y"], "date_format must be like"),
        (
            ["--out", tmp_path / "m", "--set", "dim=5", "--set", "dim.x=3"],
            "dim must be a whole number",
        ),
    ]:
        result = run("fit", data, *arguments)
        assert message in str(result.exception), message
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


def test_settings_are_toml_and_may_name_a_part_of_a_table():
    whole = split_settings(['mixer_config={shape = "model", slots = 8}', "validation_windows=none"])
    parts = split_settings(["mixer_config.shape=model", "mixer_config.slots=8"])
    assert whole == ({"mixer_config": {"shape": "model", "slots": 8}}, {"validation_windows": None})
    assert parts == ({"mixer_config": {"shape": "model", "slots": 8}}, {})
    with pytest.raises(ValueError, match="the value is not valid TOML"):
        split_settings(['mixer_config={"shape": "model"}'])


def test_evaluate_writes_records_a_table_and_a_picture(tmp_path):
    data = wide(tmp_path / "data.csv", 400)
    arguments = [
        "evaluate", data, "--lookback", 24, "--horizons", "6,12", "--seeds", "0,1",
        "--models", "trellis,transformer", "--out", tmp_path / "runs", *SMALL, *QUICK,
        "--set", "quantiles=[0.1, 0.5, 0.9]", "--set", "solve=false",
    ]  # fmt: skip
    result = good(*arguments, "--json")
    found = json.loads(result.stdout)
    assert len(found["found"]) == 2 * (3 + 2 * 2)  # with two seeds of two mixers
    table = json.loads((tmp_path / "runs/forecast/tables/data-24-test.json").read_text())
    rows = {(row["model"], row["horizon"]): row for row in table["rows"]}
    trellis, transformer = rows["trellis", 6], rows["transformer", 6]
    assert trellis["seeds"] == 2
    assert trellis["mse_sd"] > 0
    assert abs(trellis["parameters"] / transformer["parameters"] - 1) < 0.02
    assert trellis["mse"] < rows["repeat-last", 6]["mse"]
    assert rows["nlinear-season", 6]["mse"] != rows["nlinear", 6]["mse"]
    mean = (trellis["mse"] + rows["trellis", 12]["mse"]) / 2
    assert rows["trellis", "mean"]["mse"] == pytest.approx(mean)
    picture = tmp_path / "runs/forecast/tables/data-24-test.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs/forecast").glob("*.json")}
    assert len(written) == 14
    again = good(*arguments)  # reads what is there
    assert {p: p.stat().st_mtime_ns for p in written} == written
    assert "repeat-last" in again.stdout


def test_a_short_lookback_has_short_patches(tmp_path):
    data = wide(tmp_path / "data.csv", 60)
    model = tmp_path / "m.safetensors"
    good("fit", data, "--out", model, "--horizon", 2, "--lookback", 3, *QUICK)
    assert Forecaster.load(model).config.patch == 3


@pytest.mark.parametrize("date", ["2024-01-01", "2024-01-01 {:02d}:00"])
def test_evaluate_leaves_out_a_season_that_the_rows_do_not_show(tmp_path, date):
    """Dates that all are one day; hours of which the training part has less than two days."""
    data = tmp_path / "data.csv"
    rows = waves(30)
    lines = [f"{date.format(n % 24)},{row[0]:.4f},{row[1]:.4f}" for n, row in enumerate(rows)]
    data.write_text("\n".join(["when,a,b", *lines]))
    found = json.loads(good(
        "evaluate", data, "--lookback", 3, "--horizons", 2, "--models", "nlinear", "--json",
        "--out", tmp_path / "runs").stdout)  # fmt: skip
    assert [record["model"]["name"] for record in found["found"]] == ["repeat-last", "nlinear"]


def test_evaluate_a_stream_and_the_validation_part(tmp_path):
    data = wide(tmp_path / "data.csv", 300)
    common = ["evaluate", data, "--lookback", 24, "--horizons", 6, "--out", tmp_path / "runs",
              *SMALL, *QUICK]  # fmt: skip
    good(*common, "--set", "normalizer=running", "--set", "context=64", "--label", "stream")
    table = json.loads((tmp_path / "runs/forecast/tables/data-24-test-stream.json").read_text())
    rows = {row["model"]: row for row in table["rows"]}
    assert rows["trellis"]["mse"] < rows["repeat-last"]["mse"]
    found = json.loads(good(*common, "--part", "validation", "--json").stdout)["found"]
    result = found[-1]["result"]
    assert result["mse"] == pytest.approx(result["best"]["mse"], rel=0.05)  # of fewer windows
    result = run(*common, "--models", "treliss")
    assert "did you mean 'trellis'" in str(result.exception)


def test_a_stream_is_tested_before_the_same_rows_as_windows():
    """A stream whose blocks say nothing is NLinear with the running level, window by window."""
    from trellis.evaluation.forecasting import stream_errors
    from trellis.forecasting.windows import Benchmark

    benchmark = Benchmark(waves(300), "ratio")
    config = ForecastConfig(
        horizon=6, lookback=24, patch=4, dim=16, layers=1, heads=2, normalizer="running",
        half_life=1e9,
    )  # fmt: skip
    model = ForecastModel(config).eval()  # its first forecast is the mean of all rows so far
    target = benchmark.windows("test", 24, 6)
    found = stream_errors(model, benchmark, target)
    rows = benchmark.values.double()
    squared = [
        (rows[start + 24 : start + 30] - rows[: start + 24].mean(0)).square().mean()
        for start in target.starts.tolist()
    ]
    assert found.mse == pytest.approx(float(torch.stack(squared).mean()), rel=1e-4)
