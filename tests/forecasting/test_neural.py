"""TrellisForecast in neuralforecast; run by `make test-forecast`."""

import numpy as np
import pytest
import torch

pytest.importorskip("neuralforecast", reason="neuralforecast is in an environment of its own")

import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.common._base_model import BaseModel
from neuralforecast.losses.pytorch import MAE, DistributionLoss, MQLoss
from neuralforecast.models import NHITS, PatchTST

from trellis.forecasting import TrellisForecast

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
}
SMALL = {"h": 6, "input_size": 30, "max_steps": 8, **QUIET}


def tiny(**given):
    return TrellisForecast(**{**SMALL, "dim": 16, "layers": 1, "heads": 2, "patch": 8, **given})


def frame(lengths=(120, 90, 75)):
    """Sines of different lengths, with columns that may be used as exogenous."""
    parts = []
    for n, length in enumerate(lengths):
        when = pd.date_range("2024-01-01", periods=length, freq="h")
        hour = np.arange(length)
        y = (
            10 * n
            + np.sin(2 * np.pi * hour / 12)
            + 0.05 * np.random.default_rng(n).normal(size=length)
        )
        parts.append(
            pd.DataFrame(
                {"unique_id": f"s{n}", "ds": when, "y": y, "heat": np.cos(hour), "day": hour % 24}
            )
        )
    return pd.concat(parts, ignore_index=True)


def test_it_is_a_model_of_neuralforecast_beside_others():
    models = [tiny(), NHITS(**SMALL), PatchTST(**SMALL, hidden_size=16, n_heads=2)]
    assert isinstance(models[0], BaseModel)
    nf = NeuralForecast(models=models, freq="h")
    nf.fit(frame())
    out = nf.predict()
    assert list(out.columns) == ["unique_id", "ds", "TrellisForecast", "NHITS", "PatchTST"]
    assert len(out) == 3 * 6
    assert np.isfinite(out["TrellisForecast"]).all()
    # The level of each series comes through the normalisation of its window.
    means = out.groupby("unique_id")["TrellisForecast"].mean().to_numpy()
    assert np.allclose(means, [0, 10, 20], atol=2)


def test_it_learns():
    nf = NeuralForecast(models=[tiny(max_steps=150, learning_rate=3e-3)], freq="h")
    data = frame((240, 240))
    cut = data["ds"] < data["ds"].min() + pd.Timedelta(hours=234)
    nf.fit(data[cut])
    merged = nf.predict().merge(data, on=["unique_id", "ds"])
    error = (merged["TrellisForecast"] - merged["y"]).abs().mean()
    assert error < 0.2  # the mean of a sine is off by 0.64


def test_cross_validation_and_quantiles():
    nf = NeuralForecast(models=[tiny(loss=MQLoss(level=[80]))], freq="h")
    out = nf.cross_validation(frame(), n_windows=2, step_size=3)
    assert out["cutoff"].nunique() >= 2
    names = ["TrellisForecast-median", "TrellisForecast-lo-80", "TrellisForecast-hi-80"]
    assert set(names) <= set(out.columns)
    assert np.isfinite(out[names].to_numpy()).all()


def test_exogenous_columns_change_the_forecast():
    data = frame()
    data["kind of day"] = data["day"] // 8  # 0, 1 and 2
    static = pd.DataFrame({"unique_id": ["s0", "s1", "s2"], "kind": [0.0, 1.0, 2.0]})
    model = tiny(
        hist_exog_list=["heat"], futr_exog_list=["day", "kind of day"], stat_exog_list=["kind"],
        cat_exog_list=["kind of day"], categorical_cardinalities={"kind of day": 3},
    )  # fmt: skip
    nf = NeuralForecast(models=[model], freq="h")
    nf.fit(data, static_df=static)
    future = nf.make_future_dataframe().assign(day=0.0, **{"kind of day": 0})

    def forecast(data=data, static=static, **ahead):
        given = {"df": data, "static_df": static, "futr_df": future.assign(**ahead)}
        return nf.predict(**given)["TrellisForecast"].to_numpy()

    one = forecast()
    for other in (
        forecast(day=23.0),
        forecast(**{"kind of day": 2}),
        forecast(data=data.assign(heat=data["heat"] + 3)),
        forecast(static=static.assign(kind=static["kind"][::-1].to_numpy())),
    ):
        assert np.abs(one - other).max() > 1e-4


def test_saved_and_loaded_it_forecasts_the_same(tmp_path):
    nf = NeuralForecast(models=[tiny()], freq="h")
    nf.fit(frame())
    nf.save(str(tmp_path / "saved"), overwrite=True)
    again = NeuralForecast.load(str(tmp_path / "saved"))
    assert type(again.models[0]) is TrellisForecast
    expected = nf.predict()["TrellisForecast"].to_numpy()
    assert np.allclose(again.predict()["TrellisForecast"].to_numpy(), expected, atol=1e-6)


def test_series_shorter_than_the_input_with_padding():
    nf = NeuralForecast(models=[tiny(start_padding_enabled=True)], freq="h")
    nf.fit(frame((120, 20)))
    assert np.isfinite(nf.predict()["TrellisForecast"]).all()


@pytest.mark.parametrize("mixer", ["transformer", "gated_delta_net", "mamba2"])
def test_any_mixer(mixer):
    nf = NeuralForecast(models=[tiny(mixer=mixer, max_steps=2)], freq="h")
    nf.fit(frame((80,)))
    assert np.isfinite(nf.predict()["TrellisForecast"]).all()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"mixer must be one of .* got 'treliss'; did you mean"):
        tiny(mixer="treliss")
    with pytest.raises(ValueError, match="loss must be of points or quantiles"):
        tiny(loss=DistributionLoss("Normal"))


def test_missing_rows_do_not_count():
    model = tiny(loss=MAE())
    model.eval()
    y = torch.randn(1, 30, 1)
    mask = torch.ones_like(y)
    mask[:, :10] = 0
    batch = {"insample_y": y, "insample_mask": mask, "hist_exog": None, "futr_exog": None,
             "stat_exog": None}  # fmt: skip
    other = y.clone()
    other[:, :10] = 100
    assert torch.allclose(model(batch), model({**batch, "insample_y": other}), atol=1e-5)


def test_peers_are_measured_on_the_same_windows(tmp_path):
    from trellis.evaluation.forecasting import run

    data = frame((400,))
    data[["ds", "y", "heat"]].to_csv(tmp_path / "data.csv", index=False)
    report = run(
        tmp_path / "data.csv", tmp_path / "runs", lookback=48, horizons=[6],
        models=["trellis", "patchtst", "nhits"], say=lambda line: None,
        model_fields={"dim": 16, "heads": 2},
        fit_fields={"steps": 4, "check_every": 2, "batch": 16},
    )  # fmt: skip
    found = {record["model"]["name"]: record["result"] for record in report.found}
    assert set(found) == {"repeat-last", "nlinear", "trellis", "patchtst", "nhits"}
    assert len({result["windows"] for result in found.values()}) == 1
    assert all(np.isfinite(result["mse"]) for result in found.values())
    assert found["patchtst"]["parameters"] > 100_000
