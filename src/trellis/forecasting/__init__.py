"""Forecasting of time series, window by window or row by row, with any mixer of the registry.

`TrellisForecast`, a model of neuralforecast, imports that library when it is first used.
"""

from typing import Any

from .fitting import FitOptions, fit
from .forecaster import Forecaster, fit_file
from .model import ForecastConfig, ForecastModel
from .series import read_series
from .streaming import StreamingForecaster

__all__ = [
    "FitOptions",
    "ForecastConfig",
    "ForecastModel",
    "Forecaster",
    "StreamingForecaster",
    "fit",
    "fit_file",
    "read_series",
]


def __getattr__(name: str) -> Any:
    if name != "TrellisForecast":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .neural import TrellisForecast

    return TrellisForecast
