"""A stream of a million rows: time of a row and memory, beside reading a window at every row.

The stream observes a row and forecasts; so does a forecaster that reads its last 512 rows again at
every row, which is what models with a normalised window must do. Both are made by the recipe of
`trellis forecast fit`: the same blocks, with patches of 8 rows in the stream and of 64 rows in the
window; the window is read with patches of 8 rows, too. The weights are not trained: they do not
change the time. Times are those of the processor, so that other programs on the machine do not
count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from .. import machine
from ..figures import figure
from ..forecasting import ForecastConfig, Forecaster, ForecastModel, StreamingForecaster
from ..forecasting.fitting import recipe_model

#: Rows that are timed one by one at every mark.
TIMED = 256
#: Rows that are observed at once between marks.
PORTION = 4096


def run(
    rows: int, marks: int, channels: int, window: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Observes `rows` rows of synthetic series and measures at `marks` marks on the way."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"horizon": 96, "channels": channels}
    config = ForecastConfig(lookback=96, **sizes, **recipe_model(96, {"normalizer": "running"}))
    scalers = {f"c{n}": (0.0, 1.0) for n in range(channels)}
    stream = StreamingForecaster(Forecaster(ForecastModel(config), scalers))
    parameters = sum(p.numel() for p in stream.forecaster.model.parameters())
    say(f"{parameters:,} parameters, {channels} channels, horizon {config.horizon}, one by one")
    found = []
    places = np.unique(np.geomspace(max(1, rows / 1000), rows, marks).astype(int))
    for place in places:
        while stream.seen + TIMED < place:
            stream.observe(_rows(stream.seen, min(PORTION, place - TIMED - stream.seen), channels))
        observing, forecasting = [], []
        for row in _rows(stream.seen, int(place) - stream.seen, channels):
            start = time.process_time()
            stream.observe(row)
            middle = time.process_time()
            stream.forecast()
            observing.append(middle - start)
            forecasting.append(time.process_time() - middle)
        mark = {
            "rows": stream.seen,
            # A patch is read at every eighth row: the mean, not the median, has its time.
            "observe_ms": 1e3 * sum(observing) / len(observing),
            "forecast_ms": 1e3 * median(forecasting),
            "state_bytes": stream.nbytes,
            "resident_bytes": machine.resident_bytes(),
        }
        found.append(mark)
        say(
            f"{mark['rows']:>9,} rows: observe {mark['observe_ms']:.2f} ms, forecast "
            f"{mark['forecast_ms']:.2f} ms, state {mark['state_bytes'] / 1024:.0f} KiB, process "
            f"{machine.gib(mark['resident_bytes'])}"
        )
    last = found[-1]
    stream_rate = 1e3 / (last["observe_ms"] + last["forecast_ms"])
    say(f"a forecast after every row: {stream_rate:.0f} rows/s as a stream")
    usual = recipe_model(window, {})
    read_again = []
    for patch in (config.patch, usual["patch"]):
        whole = ForecastConfig(lookback=window, **sizes, **{**usual, "patch": patch})
        rate = _window_rate(whole)
        read_again.append({"patch": patch, "rows_per_second": rate, "times": stream_rate / rate})
        say(
            f"with a window of {window} read again in patches of {patch}: {rate:.0f} rows/s; the "
            f"stream has {stream_rate / rate:.1f} times as many"
        )
    return {
        "parameters": parameters, "channels": channels, "marks": found, "window": window,
        "stream_rows_per_second": stream_rate, "read_again": read_again,
    }  # fmt: skip


@torch.no_grad()
def _window_rate(config: ForecastConfig) -> float:
    """Rows per second of a forecaster that reads its whole lookback for every forecast."""
    model = ForecastModel(config).eval()
    past = torch.from_numpy(_rows(0, config.lookback, config.channels or 1).astype(np.float32))[
        None
    ]
    times = []
    for _ in range(32):
        start = time.process_time()
        model(past)
        times.append(time.process_time() - start)
    return 1 / median(times)


def _rows(first: int, count: int, channels: int) -> np.ndarray:
    """Rows of synthetic series, each with a trend that turns and two periods."""
    at = np.arange(first, first + count)[:, None] + 31.0 * np.arange(channels)
    noise = np.random.default_rng(first).normal(size=at.shape)
    return np.sin(at / 24) + 0.5 * np.sin(at / 168) + np.sin(at / 1e5) + 0.2 * noise


def draw(result: dict[str, Any], path: Path) -> None:
    """Time of a row and memory over the rows observed."""
    marks: Sequence[dict[str, Any]] = result["marks"]
    rows = [mark["rows"] for mark in marks]
    with figure(path, 2, figsize=(10, 3.8)) as (left, right):
        left.plot(rows, [mark["observe_ms"] for mark in marks], "o-", label="observe a row")
        left.plot(rows, [mark["forecast_ms"] for mark in marks], "s-", label="forecast")
        for again, line in zip(result["read_again"], ("--", ":")):
            left.axhline(
                1e3 / again["rows_per_second"], color="0.5", linestyle=line,
                label=f"read {result['window']} rows again, patches of {again['patch']}",
            )  # fmt: skip
        left.set_ylabel("ms")
        right.plot(rows, [mark["state_bytes"] / 2**20 for mark in marks], "o-", label="state")
        right.plot(
            rows, [mark["resident_bytes"] / 2**20 for mark in marks], "s-", label="whole process"
        )
        right.set_ylabel("MiB")
        right.set_yscale("log")
        for axis in (left, right):
            axis.set_xscale("log")
            axis.set_xlabel("rows observed")
            axis.set_ylim(bottom=0 if axis is left else None)
            axis.legend()
